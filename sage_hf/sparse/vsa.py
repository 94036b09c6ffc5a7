"""VSA, trainable sparse attention over tiles of 4×4×4 video tokens (arXiv 2505.13389)."""

from __future__ import annotations

import math

import torch

from sage_hf.attention import sage_attention
from sage_kernels.blocks import BlockList

from .order import TILE, TileOrder

TILE_TOKENS = math.prod(TILE)


def vsa_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    grid: tuple[int, int, int],
    sparsity: float,
    *,
    scale: float | None = None,
    recipe: str = "exact",
    fallback: str | None = None,
) -> torch.Tensor:
    """Compute coarse attention over tiles, times the gate, plus fine attention over the best tiles of each tile.

    With q̄, k̄, v̄ the means of a tile's tokens: o_coarse = softmax(q̄·k̄ᵀ·scale)·v̄, the same for all tokens of a tile;
    o_fine is attention to the tokens of those tiles whose coarse scores are largest; the result is o_coarse ∘ gate +
    o_fine. Gradients flow through all but the choice of tiles; those of the fine stage are exact in any recipe.

    Args:
        query, key, value: (batch, heads, tokens, head_dim), self-attention of video tokens in raster order.
        gate: (batch, heads, tokens, head_dim), the model's `to_gate_compress` of its normalised states; None: 0, as
            for a model without trained gates.
        grid: (frames, height, width) in tokens; any sizes.
        sparsity: share of the tiles that are left out; ⌈(1 - sparsity)·tiles⌉ are kept, at least one.
        scale: factor of the scores; default head_dim ** -0.5.
        recipe, fallback: of the fine stage, as in `sage_attention`.

    Returns:
        (batch, heads, tokens, head_dim) in query's dtype and raster order.

    Raises:
        ValueError: the grid has another number of tokens, sparsity is not in [0, 1), or see `sage_attention`.
    """
    tokens = math.prod(grid)
    if not query.shape == key.shape == value.shape or query.shape[2] != tokens:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must be alike, with "
            f"the {tokens} tokens of the grid {tuple(grid)}: leave text tokens to dense attention"
        )
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be in [0, 1); got {sparsity}")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    order = TileOrder.of(grid, query.device)
    query, key, value = order.pad(query), order.pad(key), order.pad(value)
    q_means, k_means, v_means = (tile_means(x, order.counts) for x in (query, key, value))
    precision = torch.promote_types(query.dtype, torch.float32)
    scores = q_means.to(precision) @ k_means.to(precision).mT * scale

    kept = min(order.tiles, max(1, math.ceil((1 - sparsity) * order.tiles - 1e-9)))
    best = scores.detach().argsort(dim=-1, descending=True, stable=True)[..., :kept].sort(-1).values
    blocks = BlockList(
        torch.full(best.shape[:3], kept, dtype=torch.int32, device=best.device), best.int(), TILE_TOKENS, TILE_TOKENS
    )
    mask = None if order.tiles * TILE_TOKENS == tokens else order.valid[None, None, None]
    fine = order.unpad(
        sage_attention(query, key, value, mask, scale=scale, recipe=recipe, fallback=fallback, blocks=blocks)
    )
    if gate is None:
        return fine
    coarse = (scores.softmax(-1) @ v_means.to(precision)).to(query.dtype)
    return order.unpad(coarse.repeat_interleave(TILE_TOKENS, 2)) * gate + fine


def tile_means(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mean of each tile's tokens, summed in at least float32 and rounded to x's dtype.

    Args:
        x: (batch, heads, tiles · 64, head_dim), 0 in places without a token.
        counts: (tiles,), the tokens of each tile.
    """
    precision = torch.promote_types(x.dtype, torch.float32)
    sums = x.unflatten(2, (-1, TILE_TOKENS)).sum(3, dtype=precision)
    return (sums / counts[:, None]).to(x.dtype)
