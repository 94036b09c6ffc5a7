"""Quantisation of Q and K to INT8, with the bits of `formats.int8` after `transforms.smooth`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...call import Call
from ...language.int8 import int8_scale, magnitude, round_to_int8
from ...language.launch import UNSPECIALIZED, launch, strides
from ...language.sequences import operand_row, sequence_range
from ...language.tokens import load_tokens
from ...layout import Sequences, batch_strides, padded_channels, stride_of
from ...operands import Int8Operands, Statistics
from .heavy import heavy_keys
from .statistics import token_statistics
from .value import quantize_value

BLOCK_ROWS = tl.constexpr(64)


def quantize_int8_operands(call: Call, valid: torch.Tensor | None = None) -> Int8Operands:
    """Transform and quantise Q, K and V as `reference.forward.quantize_operands` does; add `mean_score` for the LSE.

    Args:
        call: of a recipe with Q and K in INT8; not empty.
        valid: int32 or uint8 (batch or 1, kv_len), 0 for keys left out of means and scales; None: all count.
    """
    batch, tail = call.batch, call.tail
    q_sequences, kv_sequences = tail.token_axes
    counts = None if valid is None else valid[:, call.heavy_keys :]
    statistics = token_statistics(tail.key, tail.value, call.recipe, kv_sequences, counts)
    codes, scale, mean_score = quantize_query(call.query, q_sequences, batch, statistics if call.return_lse else None)
    key, key_scale = quantize_key(tail.key, kv_sequences, batch, statistics, counts)
    value, value_scale = quantize_value(tail.value, kv_sequences, batch, statistics, counts, call.recipe.pv)
    return Int8Operands(
        codes,
        scale,
        key,
        key_scale,
        value,
        value_scale,
        statistics.value_mean,
        mean_score,
        heavy_keys(call, statistics, valid, codes.shape[-1], value_scale.shape[-1]),
    )


def quantize_query(
    query: torch.Tensor, sequences: Sequences, batch: int, statistics: Statistics | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise Q to INT8 with one scale per token.

    Args:
        query: (batch, q_heads, tokens, head_dim), any strides; (1, q_heads, total tokens, head_dim) when packed.
        sequences: the token axis.
        batch: number of sequences.
        statistics: K's mean, where the LSE is wanted; else None.

    Returns:
        (codes, scale, key_mean_score): int8 (operand batch, q_heads, rows, channels), float32 (operand batch, q_heads,
        rows), and float32 of the same shape, each query's product with K's mean, or None. channels is head_dim rounded
        up to a power of two, rows are `sequences.rows`; beyond a sequence everything is 0.
    """
    q_heads, head_dim = query.shape[1], query.shape[3]
    channels = padded_channels(head_dim)
    shape = (1 if sequences.packed else batch, q_heads, sequences.rows)
    codes = query.new_empty((*shape, channels), dtype=torch.int8)
    scale = query.new_empty(shape, dtype=torch.float32)
    mean_score = None if statistics is None else query.new_empty(shape, dtype=torch.float32)
    launch(
        quantize_query_int8,
        (sequences.blocks * 2 * batch * q_heads,),
        query=query,
        codes=codes,
        scale=scale,
        key_mean=None if statistics is None else statistics.key_mean,
        mean_score=mean_score,
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        blocks=sequences.blocks * 2,
        q_heads=q_heads,
        group=1 if statistics is None else q_heads // statistics.key_mean.shape[1],
        mean_channels=1 if statistics is None else statistics.key_mean.shape[2],
        head_dim=head_dim,
        rows=sequences.rows,
        **strides("", batch_strides(query, sequences)),
        CHANNELS=channels,
        PACKED=sequences.packed,
        RAGGED=sequences.ranges is not None,
        MEAN_SCORE=mean_score is not None,
        enable_fp_fusion=False,
    )
    return codes, scale, mean_score


def quantize_key(
    key: torch.Tensor, sequences: Sequences, batch: int, statistics: Statistics, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract K's mean and quantise K to INT8 with one scale per 16 tokens (`layout.thread_order`).

    Args:
        key: (batch, kv_heads, tokens, head_dim), any strides; (1, kv_heads, total tokens, head_dim) when packed.
        sequences, batch: the token axis and the number of sequences.
        statistics: K's mean.
        valid: int32 (batch or 1, tokens), 0 where a key does not count; None: all count.

    Returns:
        (codes, scale): int8 (operand batch, kv_heads, rows, channels), bfloat16 (operand batch, kv_heads, rows / 64,
        4). Scales have 16 bits because Triton would load 32-bit ones through shared memory, with barriers.
    """
    kv_heads, head_dim = key.shape[1], key.shape[3]
    channels = padded_channels(head_dim)
    shape = (1 if sequences.packed else batch, kv_heads, sequences.rows)
    codes = key.new_empty((*shape, channels), dtype=torch.int8)
    scale = key.new_empty((*shape[:2], sequences.rows // 64, 4), dtype=torch.bfloat16)
    launch(
        quantize_key_int8,
        (sequences.blocks * 2 * batch * kv_heads,),
        key=key,
        codes=codes,
        scale=scale,
        key_mean=statistics.key_mean,
        valid=valid,
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        blocks=sequences.blocks * 2,
        kv_heads=kv_heads,
        mean_channels=statistics.key_mean.shape[2],
        head_dim=head_dim,
        rows=sequences.rows,
        **strides("", batch_strides(key, sequences)),
        valid_stride=stride_of(valid),
        CHANNELS=channels,
        HAS_VALID=valid is not None,
        PACKED=sequences.packed,
        RAGGED=sequences.ranges is not None,
        enable_fp_fusion=False,
    )
    return codes, scale


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group"])
def quantize_query_int8(
    query,
    codes,
    scale,
    key_mean,
    mean_score,
    ranges,
    tokens,
    blocks,
    q_heads,
    group,
    mean_channels,
    head_dim,
    rows,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    CHANNELS: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    MEAN_SCORE: tl.constexpr,
):
    """Quantise a block of 64 tokens of Q of one (batch, q head)."""
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (pair // q_heads).to(tl.int64), (pair % q_heads).to(tl.int64)
    start, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    if block // 2 * 128 < length:
        base = query + batch * stride_batch + head * stride_head
        token = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        channel = tl.arange(0, CHANNELS)
        x, _counts = load_tokens(
            base, None, start, token, length, channel, head_dim, stride_token, stride_channel, False
        )
        row = operand_row(batch, head, q_heads, rows, operand_start, PACKED) + token
        if MEAN_SCORE:
            mean_row = key_mean + (batch * (q_heads // group) + head // group) * mean_channels
            mean = tl.load(mean_row + channel, mask=channel < head_dim, other=0.0)
            tl.store(mean_score + row, tl.sum(x * mean[None, :], 1))
        row_scale, inverse = int8_scale(tl.max(magnitude(x), 1), False)
        tl.store(scale + row, row_scale)
        tl.store(codes + row[:, None] * CHANNELS + channel[None, :], round_to_int8(x * inverse[:, None]))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def quantize_key_int8(
    key,
    codes,
    scale,
    key_mean,
    valid,
    ranges,
    tokens,
    blocks,
    kv_heads,
    mean_channels,
    head_dim,
    rows,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    valid_stride,
    CHANNELS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Quantise a block of 64 tokens of K of one (batch, kv head)."""
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    start, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    if block // 2 * 128 < length:
        base = key + batch * stride_batch + head * stride_head
        if HAS_VALID:
            valid += batch * valid_stride
        token = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        channel = tl.arange(0, CHANNELS)
        x, counts = load_tokens(
            base, valid, start, token, length, channel, head_dim, stride_token, stride_channel, HAS_VALID
        )
        mean_row = key_mean + pair.to(tl.int64) * mean_channels
        mean = tl.load(mean_row + channel, mask=channel < head_dim, other=0.0)
        x = tl.where(counts[:, None], x - mean[None, :], 0.0)
        group_scale, inverse = int8_scale(thread_max(tl.max(magnitude(x), 1)), True)
        inverse = tl.reshape(tl.broadcast_to(inverse[None, :, None], (8, 4, 2)), (BLOCK_ROWS,))
        first = operand_row(batch, head, kv_heads, rows, operand_start, PACKED)
        tl.store(scale + (first + block * BLOCK_ROWS) // 16 + tl.arange(0, 4), group_scale.to(tl.bfloat16))
        row = first + token
        tl.store(codes + row[:, None] * CHANNELS + channel[None, :], round_to_int8(x * inverse[:, None]))


@triton.jit
def thread_max(x):
    """Return the largest of the tokens that share a scale: (64,) -> (4,)."""
    return tl.max(tl.max(tl.reshape(x, (8, 4, 2)), 2), 0)
