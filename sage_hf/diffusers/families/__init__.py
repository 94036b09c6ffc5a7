"""The computations of each family's attention modules; all files here are imported and register their functions."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from sage_hf.diffusers.families.registry import ADAPTERS, FAMILIES

__all__ = ["ADAPTERS", "FAMILIES"]

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
