"""Sparse attention: routers that choose tiles, the order that makes tiles coherent, their use in models, and VSA."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sage_hf.sparse.config import Sparse

_HOME = {
    "MeanRouter": "routers",
    "Router": "routers",
    "ShareRouter": "routers",
    "SubBlockRouter": "routers",
    "TileOrder": "order",
    "even_budgets": "routers",
    "kept_mass": "routers",
    "tile_mass": "routers",
    "vsa_attention": "vsa",
}

__all__ = ["Sparse", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
