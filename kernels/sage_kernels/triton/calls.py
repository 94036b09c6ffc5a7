"""What every forward kernel's call has in common: outputs, empty calls, token axes, masks, the sign of the scale."""

from __future__ import annotations

from typing import Protocol

import torch

from .mask_tiles import MaskTiles, mask_tiles
from .sequences import Sequences


class Attend(Protocol):
    """Quantise and attend, into `output` and `lse`; no length is 0 and scale is not negative."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        q_sequences: Sequences,
        kv_sequences: Sequences,
        *,
        scale: float,
        is_causal: bool,
        causal_offset: int,
        tiles: MaskTiles | None,
    ) -> None: ...


def attention(
    attend: Attend,
    masked_tile: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int = 0,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ops.attention` by a kernel; `masked_tile` is its (block_m, block_n) for a mask."""
    batch, q_heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    output = query.new_empty(batch, q_len, q_heads, value.shape[3]).transpose(1, 2)
    lse = query.new_empty((batch, q_heads, q_len), dtype=torch.float32) if return_lse else None
    if 0 in (batch, q_heads, q_len, kv_len):
        return output.zero_(), None if lse is None else lse.fill_(-torch.inf)
    q_sequences, kv_sequences = Sequences.equal(q_len), Sequences.equal(kv_len)
    causal_offset = clamped_offset(causal_offset, q_sequences, kv_sequences)
    tiles = None
    if mask is not None:
        tiles = mask_tiles(mask, (batch, q_heads, q_len, kv_len), is_causal, causal_offset, *masked_tile)
    query, scale = positive_scale(query, scale)
    attend(
        query,
        key,
        value,
        output,
        lse,
        q_sequences,
        kv_sequences,
        scale=scale,
        is_causal=is_causal,
        causal_offset=causal_offset,
        tiles=tiles,
    )
    return output, lse


def packed_attention(
    attend: Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    *,
    is_causal: bool,
    causal_offset: int = 0,
    scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ops.packed_attention` by a kernel; query, key, value and the output are (1, heads, total tokens, channels)."""
    _, q_heads, q_total, _ = query.shape
    # Zeros, because the lengths say what is written, and only the GPU knows them.
    output = query.new_zeros(1, q_total, q_heads, value.shape[3]).transpose(1, 2)
    lse = query.new_full((1, q_heads, q_total), -torch.inf, dtype=torch.float32) if return_lse else None
    if 0 in (cu_seqlens_q.shape[0] - 1, q_heads, q_total, key.shape[2], max_seqlen_q, max_seqlen_k):
        return output, lse
    q_sequences = Sequences.of_cu_seqlens(cu_seqlens_q, max_seqlen_q, q_total)
    kv_sequences = Sequences.of_cu_seqlens(cu_seqlens_k, max_seqlen_k, key.shape[2], seqused_k)
    query, scale = positive_scale(query, scale)
    attend(
        query,
        key,
        value,
        output,
        lse,
        q_sequences,
        kv_sequences,
        scale=scale,
        is_causal=is_causal,
        causal_offset=clamped_offset(causal_offset, q_sequences, kv_sequences),
        tiles=None,
    )
    return output, lse


def clamped_offset(causal_offset: int, q_sequences: Sequences, kv_sequences: Sequences) -> int:
    """An offset that means the same, and fits a kernel's integers."""
    return max(-q_sequences.tokens, min(causal_offset, kv_sequences.tokens))


def positive_scale(query: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float]:
    """(query, scale) with the same products; kernels take the largest score of a tile before they scale it."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return (-query, -scale) if scale < 0 else (query, scale)
