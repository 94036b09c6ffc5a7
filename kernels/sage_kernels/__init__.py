"""The kernel backend of sage-hf: low-bit attention for PyTorch.

It needs torch, and triton for its GPU kernels. The names of `__all__` are the entry points; `dispatch.registry` holds
the kernels; `reference` is the specification of every recipe in plain PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_ENTRY_POINTS = {
    "attention": ("ops", "attention"),
    "packed_attention": ("ops", "packed_attention"),
    "packed_training_attention": ("training", "packed_attention"),
    "training_attention": ("training", "attention"),
}

__all__ = sorted(_ENTRY_POINTS)


def __getattr__(name: str) -> Any:
    if name in _ENTRY_POINTS:
        module, function = _ENTRY_POINTS[name]
        return getattr(import_module(f"{__name__}.{module}"), function)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
