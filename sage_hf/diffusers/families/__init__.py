"""What attention modules of each family compute. Every file here is imported, and its functions register themselves."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from .registry import ADAPTERS, FAMILIES

__all__ = ["ADAPTERS", "FAMILIES"]

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
