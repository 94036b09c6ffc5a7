"""Exact attention of tiles of queries to listed tiles of keys, which are brought together: it costs what is kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

GATHERED_AT_ONCE = 2**28
"""Number of elements of K, and of V, that are brought together at once."""


@torch.library.custom_op("sage_hf::take_tiles", mutates_args=())
def take_tiles(tiles: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return tiles[at] of tiles (n, elements), at int64 (m,). Its gradient is summed by sorting, in float32 at least.

    The one of `index_select` adds in the tensors' dtype, in any order, and is many times slower on a GPU.
    """
    return tiles.index_select(0, at)


@torch.library.custom_op("sage_hf::add_tiles", mutates_args=())
def add_tiles(gradient: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    """Return (count, elements), the sums of those rows of the gradient (m, elements) that have the same index."""
    return torch.ops.aten.embedding_dense_backward(gradient.contiguous(), at, count, -1, False)


@take_tiles.register_fake
def _(tiles: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return tiles.new_empty(at.shape[0], tiles.shape[1])


@add_tiles.register_fake
def _(gradient: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    return gradient.new_empty(count, gradient.shape[1])


def _keep_indices(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.count = inputs[0].shape[0]


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

    For each tile of queries its tiles of keys are copied side by side, and PyTorch's attention runs on the copies, some
    tiles at a time. Where one part is not enough, gradients copy them again, so that memory stays linear in the number
    of tokens.

    Args:
        query, key, value: (batch, heads, tokens, head_dim), tokens a multiple of the number of tiles.
        tiles: int64 (batch, heads, tiles, kept), for each tile of queries the tiles of keys that it attends to.
        valid: bool (tokens,), which keys exist; None: all. Each tile of queries must find one among its tiles.
        scale: factor of the scores; default head_dim ** -0.5.

    Returns:
        (batch, heads, tokens, head_dim) in query's dtype.
    """
    batch, heads, count, kept = tiles.shape
    size, channels = query.shape[2] // count, query.shape[3]
    first = torch.arange(batch * heads, device=tiles.device)[:, None, None] * count
    of_rows = (tiles.flatten(0, 1) + first).flatten(0, 1)  # (batch · heads · tiles, kept) among all tiles
    queries = query.reshape(-1, 1, size, channels)
    keys, values = key.reshape(-1, size * channels), value.reshape(-1, size * channels)
    exist = None if valid is None else valid.view(count, size)

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        at = chosen.flatten()
        shape = (-1, 1, kept * size, channels)
        mask = None if exist is None else exist.index_select(0, at % count).view(-1, 1, 1, kept * size)
        return F.scaled_dot_product_attention(
            queries, take_tiles(keys, at).view(shape), take_tiles(values, at).view(shape), mask, scale=scale
        )

    at_once = max(1, GATHERED_AT_ONCE // (kept * size * channels))
    outputs = []
    for begin in range(0, len(of_rows), at_once):
        part = (queries[begin : begin + at_once], keys, values, of_rows[begin : begin + at_once])
        if torch.is_grad_enabled() and at_once < len(of_rows):
            outputs.append(checkpoint(attend, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(attend(*part))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.view(batch, heads, count * size, channels)
