"""What the forward pass of a recipe with gradients keeps for its backward pass, whichever kernel runs either."""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128
KEY_BLOCK = 64
MIN_CHANNELS = 32


class Lengths(NamedTuple):
    """Sequences of any lengths, packed one after the other: (1, heads, total tokens, channels).

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,).
        max_seqlen_q, max_seqlen_k: the longest sequence's length, or more.
        seqused_k: int32 (sequences,), only that many keys of each sequence count; None: all.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: torch.Tensor | None = None


class Saved(NamedTuple):
    """INT8 Q and K as the scores were made of them, padded: rows to blocks of 128 tokens, channels to a power of two.

    A sequence of an ordinary batch has `rows` = tokens rounded up to 128, and batch is the caller's. Packed sequences
    lie in one batch element of (total tokens // 128 + sequences) · 128 rows; sequence i begins at row
    (cu_seqlens[i] // 128 + i) · 128. What lies beyond a sequence is 0, or, between sequences, undefined.

    Attributes:
        query: int8 (batch, q_heads, rows, channels).
        query_scale: float32 (batch, q_heads, rows).
        key: int8 (batch, kv_heads, rows, channels), K without its mean.
        key_scale: bfloat16 (batch, kv_heads, rows / 64, 4), of the 16 tokens that `reference.thread_order` puts
            together.
        lse: float32 (batch, q_heads, q_len): natural log-sum-exp of each row's scores against K without its mean,
            -inf where a row may attend to nothing; (1, q_heads, total queries) when packed.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    lse: torch.Tensor


def padded_rows(tokens: int, sequences: int | None = None) -> int:
    """Rows of `Saved` for sequences of `tokens` tokens each, or for that many packed ones of `tokens` in total."""
    blocks = -(-tokens // BLOCK) if sequences is None else tokens // BLOCK + sequences
    return blocks * BLOCK


def padded_channels(head_dim: int) -> int:
    """Channels of `Saved`."""
    return max(MIN_CHANNELS, 1 << (head_dim - 1).bit_length())
