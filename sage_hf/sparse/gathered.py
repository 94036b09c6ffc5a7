"""Exact attention of tiles of queries to gathered tiles of keys; the cost depends only on the kept tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from sage_kernels.exact import sdpa

GATHERED_AT_ONCE = 2**28
"""Number of elements of K, and of V, that are gathered at once."""
TILES_BY_PRODUCT = 256
"""Number of tiles up to which gradients of copies are summed on tensor cores, by a product with ones and zeros."""


@torch.library.custom_op("sage_hf::take_tiles", mutates_args=())
def take_tiles(tiles: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the entries (heads, m, elements) of tiles (heads, n, elements) at indices int64 (heads, m), with
    gradients.

    The gradient of `gather` or `index_select` would add in the tensors' dtype and in any order, by atomic operations.
    """
    heads, count, elements = tiles.shape
    first = torch.arange(heads, device=at.device)[:, None] * count
    return tiles.flatten(0, 1).index_select(0, (at + first).flatten()).view(heads, -1, elements)


@torch.library.custom_op("sage_hf::add_tiles", mutates_args=())
def add_tiles(gradient: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    """Return (heads, count, elements): for each index, the sum of its rows of gradient (heads, m, elements)."""
    heads, _, elements = gradient.shape
    if count <= TILES_BY_PRODUCT:
        one_hot = at.unsqueeze(1) == torch.arange(count, device=at.device)[:, None]
        with torch.autocast(gradient.device.type, enabled=False):
            return one_hot.to(gradient.dtype) @ gradient
    first = torch.arange(heads, device=at.device)[:, None] * count
    rows, every = gradient.reshape(-1, elements), (at + first).flatten()
    sums = torch.ops.aten.embedding_dense_backward(rows, every, heads * count, -1, False)
    return sums.view(heads, count, elements)


@take_tiles.register_fake
def _(tiles: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return tiles.new_empty(*at.shape, tiles.shape[2])


@add_tiles.register_fake
def _(gradient: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    return gradient.new_empty(gradient.shape[0], count, gradient.shape[2])


def _keep_indices(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.count = inputs[0].shape[1]


def _add(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return add_tiles(gradient, ctx.saved_tensors[0], ctx.count), None


take_tiles.register_autograd(_add, setup_context=_keep_indices)


def attend_to_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: torch.Tensor,
    valid: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute softmax attention of each tile of queries to the keys of its tiles, with gradients.

    For each tile of queries, its tiles of keys are copied side by side. PyTorch's attention runs on the copies, for
    some heads, or some tiles of one head, at a time. If there are several parts, the backward pass copies them again,
    so that memory stays linear in the number of tokens.

    Args:
        query, key, value: (batch, heads, tokens, head_dim); tokens is a multiple of the number of tiles.
        tiles: int64 (batch, heads, tiles, kept): the tiles of keys that each tile of queries attends to.
        valid: bool (tokens,), which keys exist; None: all. Each tile of queries must have an existing key in its tiles.
        scale: factor of the scores; default head_dim ** -0.5.

    Returns:
        (batch, heads, tokens, head_dim) in query's dtype.
    """
    batch, heads, count, kept = tiles.shape
    size, channels = query.shape[2] // count, query.shape[3]
    queries, keys, values = (x.reshape(batch * heads, count, size * channels) for x in (query, key, value))
    listed = tiles.flatten(0, 1)
    exist = None if valid is None else valid.view(count, size)

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, listed: torch.Tensor) -> torch.Tensor:
        at = listed.flatten(1)
        side_by_side = (-1, 1, kept * size, channels)
        mask = None if exist is None else exist[at.flatten()].view(-1, 1, 1, kept * size)
        output = sdpa.pytorch_sdpa(
            queries.reshape(-1, 1, size, channels),
            take_tiles(keys, at).view(side_by_side),
            take_tiles(values, at).view(side_by_side),
            mask,
            scale=scale,
        )
        return output.view(queries.shape)

    of_tile = kept * size * channels
    heads_at_once = min(batch * heads, max(1, GATHERED_AT_ONCE // (count * of_tile)))
    tiles_at_once = min(count, max(1, GATHERED_AT_ONCE // of_tile))
    again = torch.is_grad_enabled() and (heads_at_once, tiles_at_once) != (batch * heads, count)
    parts = []
    for head in range(0, batch * heads, heads_at_once):
        some = slice(head, head + heads_at_once)
        of_heads = []
        for tile in range(0, count, tiles_at_once):
            rows = slice(tile, tile + tiles_at_once)
            part = (queries[some, rows], keys[some], values[some], listed[some, rows])
            if again:
                of_heads.append(checkpoint(attend, *part, use_reentrant=False, preserve_rng_state=False))
            else:
                of_heads.append(attend(*part))
        parts.append(of_heads[0] if len(of_heads) == 1 else torch.cat(of_heads, 1))
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.view(batch, heads, count * size, channels)
