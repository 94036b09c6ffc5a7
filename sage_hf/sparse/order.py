"""The order of video tokens in tiles of 4×4×4, in which tokens of one tile are alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

TILE = (4, 4, 4)


@dataclass(frozen=True)
class TileOrder:
    """Order of the tokens of a grid tile by tile; a grid's border tiles may be partial.

    Tiles, and the tokens of a tile, lie in the order t, h, w, w fastest, as raster order has tokens.

    Attributes:
        grid: (frames, height, width) in tokens; raster order is this flattened.
        tokens: int64 (tokens,), the raster index of the token at each place of the order.
        places: int64 (tokens,), the place of each token of raster order: the inverse.
        counts: int64 (tiles,), the tokens of each tile, at most 64.
    """

    grid: tuple[int, int, int]
    tokens: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, grid: tuple[int, int, int], device: torch.device | str = "cpu") -> TileOrder:
        """Return the order of a grid.

        Raises:
            ValueError: a side of the grid is not positive.
        """
        if len(grid) != 3 or min(grid) < 1:
            raise ValueError(f"expected a grid of (frames, height, width), each at least 1; got {grid}")
        return _order(tuple(grid), torch.device(device))

    @property
    def tiles(self) -> int:
        """Return the number of tiles."""
        return self.counts.shape[0]

    def sort(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (…, tokens, channels) of raster order in this order, without padding."""
        return x.index_select(-2, self.tokens)

    def unsort(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `sort`."""
        return x.index_select(-2, self.places)

    @property
    def padded_places(self) -> torch.Tensor:
        """Return the place of each token of raster order where every tile has 64 places: int64 (tokens,)."""
        size = math.prod(TILE)
        first = self.counts.cumsum(0) - self.counts
        tile = torch.repeat_interleave(
            torch.arange(self.tiles, device=self.counts.device), self.counts, output_size=self.tokens.shape[0]
        )
        of_order = torch.arange(self.tokens.shape[0], device=self.counts.device) - first[tile] + tile * size
        return of_order[self.places]

    @property
    def valid(self) -> torch.Tensor:
        """Return which of the places of `pad` hold a token: bool (tiles · 64,)."""
        size = math.prod(TILE)
        return (torch.arange(size, device=self.counts.device) < self.counts[:, None]).flatten()

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (…, tokens, channels) of raster order as (…, tiles · 64, channels), 0 where a tile has no token."""
        padded = F.pad(self.sort(x), (0, 0, 0, 1))  # the last place holds zeros
        size = math.prod(TILE)
        first = self.counts.cumsum(0) - self.counts
        at = first[:, None] + torch.arange(size, device=x.device)
        return padded.index_select(-2, torch.where(self.valid.view(-1, size), at, self.tokens.shape[0]).flatten())

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `pad`."""
        return x.index_select(-2, self.padded_places)


@lru_cache(maxsize=64)
def _order(grid: tuple[int, int, int], device: torch.device) -> TileOrder:
    places = [torch.arange(side, device=device) for side in grid]
    t, h, w = torch.meshgrid(*places, indexing="ij")
    tile_of = torch.zeros_like(t)
    for place, side, size in zip((t, h, w), grid, TILE, strict=True):
        tile_of = tile_of * -(-side // size) + place // size
    # Raster order is the order inside a tile too, so a stable sort by tile keeps it.
    tokens = tile_of.flatten().argsort(stable=True)
    return TileOrder(grid, tokens, tokens.argsort(), tile_of.flatten().bincount())
