"""Exact attention: PyTorch's scaled_dot_product_attention, and a plain implementation in any precision to judge by."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

ELEMENTS_PER_CHUNK = 2**22


def rows_per_chunk(batch_heads: int, columns: int, multiple: int = 1) -> int:
    """Return how many rows of scores fit in a chunk of bounded size, so that memory stays linear in sequence length."""
    rows = ELEMENTS_PER_CHUNK // max(1, batch_heads * columns)
    return max(multiple, rows // multiple * multiple)


def apply_mask(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    first_row: int,
    first_column: int,
    causal_offset: int = 0,
) -> torch.Tensor:
    """Add the mask to a tile of scores.

    Args:
        scores: (batch, q_heads, rows, columns), the tile that begins at (first_row, first_column).
        mask: (batch, q_heads, q_len, kv_len), bool (True: may attend) or additive; strides may be 0.
        is_causal: row i attends to columns 0…i + causal_offset (0: upper-left alignment, as in PyTorch).

    Returns:
        The masked scores, -inf where attention is not allowed.
    """
    rows, columns = scores.shape[-2:]
    if mask is not None:
        tile = mask[..., first_row : first_row + rows, first_column : first_column + columns]
        scores = scores.masked_fill(~tile, -torch.inf) if tile.dtype == torch.bool else scores + tile.to(scores.dtype)
    first_row += causal_offset
    if is_causal and first_column + columns > first_row + 1:
        row = torch.arange(first_row, first_row + rows, device=scores.device).unsqueeze(-1)
        column = torch.arange(first_column, first_column + columns, device=scores.device)
        scores = scores.masked_fill(column > row, -torch.inf)
    return scores


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale·Q·Kᵀ + mask)·V in `dtype`, a few rows at a time.

    Args:
        query: (batch, q_heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_head_dim); q_heads a multiple of
            kv_heads.
        mask: bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len).
        is_causal: row i attends to keys 0…i + causal_offset.
        scale: default head_dim ** -0.5.

    Returns:
        (output, lse) in `dtype`: (batch, q_heads, q_len, v_head_dim) and (batch, q_heads, q_len). A row that may attend
        to nothing gives output 0 and lse -inf.
    """
    output = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=dtype)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
    value = value.to(dtype).repeat_interleave(query.shape[1] // max(1, value.shape[1]), 1)
    for rows, scores in _score_chunks(query, key, mask, is_causal, causal_offset, scale, dtype):
        lse[:, :, rows] = scores.logsumexp(-1)
        weights = torch.exp(scores - lse[:, :, rows].nan_to_num(nan=torch.nan, neginf=0.0).unsqueeze(-1))
        output[:, :, rows] = weights @ value
    return output, lse


def log_sum_exp(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute the lse of `attention`, float32 (batch, q_heads, q_len), without the output."""
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    for rows, scores in _score_chunks(query, key, mask, is_causal, causal_offset, scale, torch.float32):
        lse[:, :, rows] = scores.logsumexp(-1)
    return lse


def _score_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
    dtype: torch.dtype,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield masked scores (batch, q_heads, rows, kv_len) in `dtype` with their rows, in chunks; none without keys."""
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    if 0 in (batch, q_heads, q_len, kv_len):
        return
    scale = max(1, head_dim) ** -0.5 if scale is None else scale
    if mask is not None:
        mask = mask.expand(batch, q_heads, q_len, kv_len)
    transposed_key = key.to(dtype).repeat_interleave(q_heads // kv_heads, 1).transpose(-1, -2)
    rows = rows_per_chunk(batch * q_heads, kv_len)
    for start in range(0, q_len, rows):
        chunk = slice(start, start + rows)
        scores = query[:, :, chunk].to(dtype) @ transposed_key * scale
        yield chunk, apply_mask(scores, mask, is_causal, start, 0, causal_offset)


def with_causality(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal_offset: int = 0
) -> torch.Tensor:
    """Return a mask that also keeps row i from keys beyond i + causal_offset.

    Args:
        mask: bool or additive, broadcastable to (batch, q_heads, q_len, kv_len), or None.
        query, key: as in `attention`.

    Returns:
        As mask, or bool, at least (1, 1, q_len, kv_len).
    """
    seen = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(causal_offset)
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def unexpanded(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask without repetitions: dimensions of stride 0 get size 1, so work on it costs what it stores."""
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def key_mask(mask: torch.Tensor | None, kv_len: int) -> torch.Tensor | None:
    """Return which keys exist, bool (batch or 1, kv_len), if that is all the 4-D mask says; otherwise None."""
    if mask is None or mask.dtype != torch.bool:
        return None
    mask = unexpanded(mask)
    if mask.shape[1] != 1 or mask.shape[2] != 1:
        return None
    return mask[:, 0, 0].expand(-1, kv_len)


def attended_rows(mask: torch.Tensor) -> torch.Tensor:
    """Return which rows may attend to some key: bool, broadcastable to the mask's shape with its last dimension 1."""
    mask = unexpanded(mask)
    allowed = mask if mask.dtype == torch.bool else mask != -torch.inf
    return allowed.any(-1, keepdim=True)


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call PyTorch's scaled_dot_product_attention with this package's argument names; shapes as in `attention`.

    Grouped queries with a mask have their keys and values repeated first, as transformers does: PyTorch's kernels of
    linear memory take the one or the other, on most devices.
    """
    if enable_gqa and mask is not None:
        group = query.shape[1] // max(1, key.shape[1])
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        enable_gqa = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
