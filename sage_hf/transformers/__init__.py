"""Low-bit attention for transformers models: `attn_implementation="sage3"` and its siblings.

Importing this package does not import transformers; `register` waits for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sage_hf.transformers.registration import register

_OF_LAYERS = ("attention_layers", "unsupported")

__all__ = ["attention_layers", "register", "unsupported"]


def __getattr__(name: str) -> Any:
    if name not in _OF_LAYERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.layers"), name)
