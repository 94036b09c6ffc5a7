"""The kernel backend of sage-hf: low-bit attention for PyTorch.

Knows torch (and, for its GPU kernels, triton). `attention` and its siblings are the doors; `registry` says what each
kernel can do; `reference` is the specification of every recipe in plain PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_DOORS = {
    "attention": ("ops", "attention"),
    "packed_attention": ("ops", "packed_attention"),
    "packed_training_attention": ("training", "packed_attention"),
    "training_attention": ("training", "attention"),
}

__all__ = sorted(_DOORS)


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, door = _DOORS[name]
    return getattr(import_module(f"{__name__}.{module}"), door)
