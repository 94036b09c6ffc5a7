"""The order of video tokens in tiles of 4×4×4, in which tokens of one tile are similar."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from sage_kernels.spec.layout import ceil_div

TILE = (4, 4, 4)
TILE_TOKENS = math.prod(TILE)


@dataclass(frozen=True)
class TileOrder:
    """Order of a grid's tokens, tile by tile; border tiles may be partial.

    Tiles, and the tokens of a tile, are in raster order: t, h, w, with w fastest.

    Attributes:
        grid: (frames, height, width) in tokens; raster order is the flattened grid.
        tokens: int64 (tokens,), the raster index of the token at each place of the order.
        places: int64 (tokens,), the inverse: the place of each token of raster order.
        counts: int64 (tiles,), the number of tokens of each tile, at most 64.
        valid: bool (tiles · 64,), which places of `pad`, 64 for each tile, hold a token.
        padded_tokens: int64 (tiles · 64,), the raster index of the token at each place of `pad`; at an empty place,
            the number of all tokens.
        padded_places: int64 (tokens,), the place of `pad` of each token of raster order.
    """

    grid: tuple[int, int, int]
    tokens: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor
    valid: torch.Tensor
    padded_tokens: torch.Tensor
    padded_places: torch.Tensor

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

    @property
    def is_whole(self) -> bool:
        """Check whether every tile has 64 tokens."""
        return self.tokens.shape[0] == self.valid.shape[0]

    def sort(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (…, tokens, channels), given in raster order, in this order and without padding."""
        return _Take.apply(x, self.tokens, self.places)

    def unsort(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `sort`."""
        return _Take.apply(x, self.places, self.tokens)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (…, tokens, channels), in raster order, as (…, tiles · 64, channels), 0 where a tile has no
        token."""
        if self.is_whole:
            return self.sort(x)
        return _Take.apply(x, self.padded_tokens, self.padded_places)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `pad`."""
        return _Take.apply(x, self.padded_places, self.padded_tokens)


class _Take(torch.autograd.Function):
    """The rows of a tensor at indices that name each row once; an index past the last row gives 0.

    The gradient puts the rows back by the inverse indices. The gradient of `index_select` would add rows by atomic
    operations, which are slower than the copy itself.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        """Return x (…, rows, channels) at int64 `at`; `back` is the inverse, (rows,)."""
        ctx.save_for_backward(at, back)
        if at.shape[0] > back.shape[0]:
            x = F.pad(x, (0, 0, 0, 1))  # the last row holds zeros
        return x.index_select(-2, at)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of x."""
        at, back = ctx.saved_tensors
        return _Take.apply(gradients[0], back, at), None, None


@lru_cache(maxsize=64)
def _order(grid: tuple[int, int, int], device: torch.device) -> TileOrder:
    with torch.inference_mode(False):  # otherwise calls with gradients could not save these tensors
        places = [torch.arange(side, device=device) for side in grid]
        t, h, w = torch.meshgrid(*places, indexing="ij")
        tile_of = torch.zeros_like(t)
        for place, side, size in zip((t, h, w), grid, TILE, strict=True):
            tile_of = tile_of * ceil_div(side, size) + place // size
        # A tile's tokens are in raster order too, so a stable sort by tile keeps their order.
        tokens = tile_of.flatten().argsort(stable=True)
        places_of = tokens.argsort()
        counts = tile_of.flatten().bincount()
        valid = (torch.arange(TILE_TOKENS, device=device) < counts[:, None]).flatten()
        padded_tokens = torch.full(valid.shape, len(tokens), device=device)
        padded_tokens[valid] = tokens
        return TileOrder(grid, tokens, places_of, counts, valid, padded_tokens, valid.nonzero()[:, 0][places_of])
