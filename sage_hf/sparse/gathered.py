"""Exact attention of tiles of queries to listed tiles of keys, which are brought together: it costs what is kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

GATHERED_AT_ONCE = 2**28
"""Number of elements of K, and of V, that are brought together at once."""


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
    tiles at a time. Gradients copy them again, so that memory stays linear in the number of tokens.

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
            queries, keys.index_select(0, at).view(shape), values.index_select(0, at).view(shape), mask, scale=scale
        )

    at_once = max(1, GATHERED_AT_ONCE // (kept * size * channels))
    outputs = []
    for begin in range(0, len(of_rows), at_once):
        part = (queries[begin : begin + at_once], keys, values, of_rows[begin : begin + at_once])
        if torch.is_grad_enabled():
            outputs.append(checkpoint(attend, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(attend(*part))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.view(batch, heads, count * size, channels)
