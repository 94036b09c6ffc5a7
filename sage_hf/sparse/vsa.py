"""VSA, trainable sparse attention over tiles of 4×4×4 video tokens (arXiv 2505.13389)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sage_hf import record
from sage_hf.attention import sage_attention
from sage_hf.sparse.gathered import attend_to_tiles
from sage_hf.sparse.order import TILE_TOKENS, TileOrder
from sage_kernels.dispatch.plan import exact_plan
from sage_kernels.dispatch.request import Request
from sage_kernels.spec.autocast import in_autocast_dtype
from sage_kernels.spec.block_list import BlockList

KERNEL = "sdpa of tiles side by side"
"""Name of the exact fine stage in `sage_hf.explain`."""


def vsa_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    grid: tuple[int, int, int] | TileOrder,
    sparsity: float,
    *,
    scale: float | None = None,
    recipe: str = "exact",
    fallback: str | None = None,
) -> torch.Tensor:
    """Compute coarse attention over tiles, times the gate, plus fine attention over the best tiles of each tile.

    Let q̄, k̄, v̄ be the means of a tile's tokens. Then o_coarse = softmax(q̄·k̄ᵀ·scale)·v̄, the same for all tokens of
    a tile; o_fine is attention to the tokens of the tiles with the largest coarse scores; the result is o_coarse ∘ gate
    + o_fine. Gradients flow through everything but the choice of tiles; the fine stage's gradients are from
    `sage_attention` over a block list. With the recipe "exact", the cost of both passes depends only on the kept tiles.

    Args:
        query, key, value: (batch, heads, tokens, head_dim), self-attention of video tokens in raster order.
        gate: (batch, heads, tokens, head_dim), the output of the model's `to_gate_compress` for its normalised states;
            None: 0, as for a model without trained gates.
        grid: (frames, height, width) in tokens, any sizes; or the grid's order, which a compiled graph needs.
        sparsity: share of the tiles that are left out; ⌈(1 - sparsity)·tiles⌉ are kept, at least one.
        scale: factor of the scores; default head_dim ** -0.5.
        recipe, fallback: recipe and fallback of the fine stage, as in `sage_attention`.

    Returns:
        (batch, heads, tokens, head_dim) in query's dtype and raster order.

    Raises:
        ValueError: the grid has another number of tokens, sparsity is not in [0, 1), or see `sage_attention`.
    """
    size = grid.grid if isinstance(grid, TileOrder) else tuple(grid)
    tokens = math.prod(size)
    if not query.shape == key.shape == value.shape or query.shape[2] != tokens:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must have one shape, "
            f"with the {tokens} tokens of the grid {size}: leave text tokens to dense attention"
        )
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be in [0, 1); got {sparsity}")
    query, key, value = in_autocast_dtype(query, key, value)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    order = grid if isinstance(grid, TileOrder) else TileOrder.of(grid, query.device)
    query, key, value = order.pad(query), order.pad(key), order.pad(value)
    with torch.autocast(query.device.type, enabled=False):  # the coarse stage is in at least float32
        q_means, k_means, v_means = (tile_means(x, order.counts) for x in (query, key, value))
        precision = torch.promote_types(query.dtype, torch.float32)
        scores = q_means.to(precision) @ k_means.to(precision).mT * scale
        coarse = None if gate is None else (scores.softmax(-1) @ v_means.to(precision)).to(query.dtype)

    kept = tiles_kept(order.tiles, sparsity)
    best = scores.detach().argsort(dim=-1, descending=True, stable=True)[..., :kept].sort(-1).values
    fine = order.unpad(_fine(query, key, value, best, order, scale, recipe, fallback))
    if coarse is None or gate is None:
        return fine
    return order.unpad(coarse.repeat_interleave(TILE_TOKENS, 2)) * gate + fine


def _fine(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: torch.Tensor,
    order: TileOrder,
    scale: float,
    recipe: str,
    fallback: str | None,
) -> torch.Tensor:
    """Attend to the tokens of the listed tiles (batch, heads, tiles, kept); tokens are padded."""
    if recipe == "exact":
        if not torch.compiler.is_compiling():
            record.file_plan(
                exact_plan(replace(Request.of(query, key, value, recipe=recipe), mask="blocks"), kernel=KERNEL)
            )
        return attend_to_tiles(query, key, value, tiles, None if order.is_whole else order.valid, scale)
    counts = torch.full(tiles.shape[:3], tiles.shape[3], dtype=torch.int32, device=tiles.device)
    blocks = BlockList(counts, tiles.int(), TILE_TOKENS, TILE_TOKENS)
    mask = None if order.is_whole else order.valid[None, None, None]
    return sage_attention(query, key, value, mask, scale=scale, recipe=recipe, fallback=fallback, blocks=blocks)


def tiles_kept(tiles: int, sparsity: float) -> int:
    """Return the number of tiles that each tile attends to: ⌈(1 - sparsity)·tiles⌉, at least one."""
    return min(tiles, max(1, math.ceil((1 - sparsity) * tiles - 1e-9)))


def tile_means(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mean of each tile's tokens, summed in at least float32 and rounded to x's dtype.

    Args:
        x: (batch, heads, tiles · 64, head_dim), 0 in places without a token.
        counts: (tiles,), the number of tokens of each tile.
    """
    precision = torch.promote_types(x.dtype, torch.float32)
    sums = x.unflatten(2, (-1, TILE_TOKENS)).sum(3, dtype=precision)
    return (sums / counts[:, None]).to(x.dtype)
