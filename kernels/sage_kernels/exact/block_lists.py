"""Exact attention over block lists."""

from __future__ import annotations

import torch

from ..spec.block_list import BlockList
from ..spec.call import AttentionOutput
from ..spec.masks import attended_rows, with_causality
from ..spec.options import Options
from . import sdpa


def attend_to_list(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: BlockList,
    *,
    mask: torch.Tensor | None,
    options: Options,
) -> AttentionOutput:
    """Attend exactly to the tiles of a list by PyTorch's scaled_dot_product_attention, some rows at a time.

    It computes all tiles and masks unlisted tiles, so it is no faster than dense attention. Without gradients its
    memory is linear in length.

    Args:
        query, key, value: as in `exact.sdpa.attention`.
        mask: bool (batch or 1, 1, 1, kv_len), False where a key does not exist; None: all exist.
        options: causality, scale, and whether the log-sum-exp of each row's scores, without a gradient, is wanted.

    Returns:
        (output, lse or None): (batch, q_heads, q_len, v_head_dim) in query's dtype, 0 in rows that may attend to
        nothing; (batch, q_heads, q_len) float32.
    """
    batch, q_heads, q_len, _ = query.shape
    kv_len, gqa, scale = key.shape[2], q_heads != key.shape[1], options.scale
    outputs, lses = [], []
    rows = sdpa.rows_per_chunk(batch * q_heads, kv_len, blocks.block_m)
    for start in range(0, max(q_len, 1), rows):  # one empty part without queries
        part = query[:, :, start : start + rows]
        allowed = blocks.mask(kv_len, start, start + part.shape[2])
        if mask is not None:
            allowed = allowed & mask
        if options.is_causal:
            allowed = with_causality(allowed, part, key, options.causal_offset + start)
        output = sdpa.sdpa(part, key, value, mask=allowed, scale=scale, enable_gqa=gqa)
        outputs.append(torch.where(attended_rows(allowed), output, 0.0))
        if options.return_lse:
            with torch.no_grad():
                lses.append(sdpa.log_sum_exp(part, key, mask=allowed, scale=scale))
    return torch.cat(outputs, 2), torch.cat(lses, 2) if options.return_lse else None
