"""The forward pass of recipes with gradients: `int8_forward`, and what its backward needs of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..recipe import Recipe
from ..saved import Lengths, Saved, padded_channels
from .calls import clamped_offset, positive_scale
from .int8_forward import Int8Operands, forward, quantize_operands
from .key_padding import KeyPadding
from .sequences import Sequences


def token_axes(q_tokens: int, kv_tokens: int, lengths: Lengths | None) -> tuple[int | None, Sequences, Sequences]:
    """(number of packed sequences, or None; token axis of Q; that of K and V)."""
    if lengths is None:
        return None, Sequences.equal(q_tokens), Sequences.equal(kv_tokens)
    return (
        lengths.cu_seqlens_q.shape[0] - 1,
        Sequences.of_cu_seqlens(lengths.cu_seqlens_q, lengths.max_seqlen_q, q_tokens),
        Sequences.of_cu_seqlens(lengths.cu_seqlens_k, lengths.max_seqlen_k, kv_tokens, lengths.seqused_k),
    )


def training_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    lengths: Lengths | None,
    valid: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int = 0,
    scale: float | None,
    recipe: Recipe,
    capability: tuple[int, int],
    quantize: Callable[..., Int8Operands] = quantize_operands,
    attend: Callable[..., None] = forward,
) -> tuple[torch.Tensor, Saved]:
    """Attention that can be differentiated.

    Args:
        query: (batch, q_heads, q_len, head_dim) float16 or bfloat16, any strides; (1, q_heads, total queries, head_dim)
            with lengths.
        key, value: (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_head_dim), or packed likewise.
        lengths: of packed sequences, each of which attends to itself; None: an ordinary batch.
        valid: bool (batch or 1, kv_len), False where a key does not exist; None: all do.
        is_causal, causal_offset: row i attends to keys 0…i + causal_offset.
        scale: default head_dim ** -0.5.
        recipe: one with gradients.
        capability: the GPU's; it chooses the tile.
        quantize, attend: make the operands and attend to them, as `int8_forward.quantize_operands` and `forward` do.

    Returns:
        (output, saved): (batch, q_heads, q_len, v_head_dim) in query's dtype, laid out as (batch, q_len, q_heads,
        v_head_dim), 0 in rows without a key; see `Saved`.

    Raises:
        ValueError: both lengths and valid are given.
    """
    if lengths is not None and valid is not None:
        raise ValueError("packed sequences say by their lengths which keys exist: give no valid beside them")
    batch, q_heads, q_len, head_dim = query.shape
    sequences, q_sequences, kv_sequences = token_axes(q_len, key.shape[2], lengths)
    empty = 0 in (*query.shape, *key.shape[1:3], sequences, q_sequences.tokens, kv_sequences.tokens)
    output = query.new_empty(batch, q_len, q_heads, value.shape[3]).transpose(1, 2)
    lse = query.new_empty((batch, q_heads, q_len), dtype=torch.float32)
    if empty or sequences is not None:  # only the GPU knows the lengths, which say what is written
        output.zero_()
        lse.fill_(-torch.inf)
    if empty:
        channels, rows, kv_rows = padded_channels(head_dim), q_sequences.rows, kv_sequences.rows
        return output, Saved(
            query.new_zeros((batch, q_heads, rows, channels), dtype=torch.int8),
            query.new_zeros((batch, q_heads, rows), dtype=torch.float32),
            query.new_zeros((batch, key.shape[1], kv_rows, channels), dtype=torch.int8),
            query.new_zeros((batch, key.shape[1], kv_rows // 64, 4), dtype=torch.bfloat16),
            lse,
        )
    padding = None if valid is None else KeyPadding.of(valid)
    signed_query, scale = positive_scale(query, scale)
    operands = quantize(
        signed_query, key, value, recipe, q_sequences, kv_sequences, None if padding is None else padding.valid
    )
    attend(
        operands,
        output,
        lse,
        q_sequences,
        kv_sequences,
        scale=scale,
        is_causal=is_causal,
        causal_offset=clamped_offset(causal_offset, q_sequences, kv_sequences),
        tiles=None,
        padding=padding,
        capability=capability,
    )
    codes = operands.query if signed_query is query else operands.query.neg_()
    return output, Saved(codes, operands.query_scale, operands.key, operands.key_scale, lse)
