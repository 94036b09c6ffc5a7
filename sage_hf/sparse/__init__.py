"""Sparse attention: routers that choose tiles, the order that makes tiles coherent, their use in models, and VSA."""

from .config import Sparse
from .order import TileOrder
from .routers import MeanRouter, Router, ShareRouter, SubBlockRouter, even_budgets, kept_mass, tile_mass
from .vsa import vsa_attention

__all__ = [
    "MeanRouter",
    "Router",
    "ShareRouter",
    "Sparse",
    "SubBlockRouter",
    "TileOrder",
    "even_budgets",
    "kept_mass",
    "tile_mass",
    "vsa_attention",
]
