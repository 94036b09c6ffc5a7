"""Quantisation of Q and K to INT8, with the bits of `formats.int8` after `transforms`.

Only the rotation by MMA instructions sums in another order than `transforms.rotate`: codes may differ by 1 for
numbers that are almost ties.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...spec.call import Call
from ...spec.layout import Sequences, batch_strides, ceil_div, padded_channels, stride_of
from ...spec.operands import Int8Operands, KVStatistics
from ..common.int8 import int8_scale, magnitude, round_to_int8
from ..common.launch import INTERPRETED, UNSPECIALIZED, launch, strides
from ..common.rotation import channel_factor, rotate, rotation_matrix, sign_bits
from ..common.sequences import operand_row, sequence_range
from ..common.tokens import load_tokens, tail_source
from .heavy import heavy_keys, replaceable_keys
from .statistics import token_statistics
from .value import quantize_value

BLOCK_ROWS = tl.constexpr(64)
TILES_BY_MATRIX = 4
MAX_MATRIX = 128


def quantize_operands(call: Call, key_mask_u8: torch.Tensor | None = None) -> Int8Operands:
    """Transform and quantise Q, K and V as `reference.forward.quantize_operands` does; add `mean_score`
    for heavy keys and the LSE.

    Args:
        call: a call of a recipe with Q and K in INT8; not empty.
        key_mask_u8: uint8 (batch or 1, kv_len), 0 for keys left out of means and scales; None: all count.
    """
    batch, tail, rotates = call.batch, call.tail, call.recipe.rotate
    q_sequences, kv_sequences = tail.token_axes
    tail_key_mask_u8 = None if key_mask_u8 is None else key_mask_u8[:, call.first_keys :]
    statistics = token_statistics(call, key_mask_u8, key_mask_u8 if call.q_len == call.kv_len else None)
    wants_scores = call.return_lse or call.heavy_keys > 0
    codes, scale, mean_score = quantize_query(call.query, q_sequences, batch, statistics, rotates, wants_scores)
    key, key_scale = quantize_key(tail.key, kv_sequences, batch, statistics, rotates, tail_key_mask_u8)
    value, value_scale = quantize_value(tail.value, kv_sequences, batch, statistics, tail_key_mask_u8, call.recipe.pv)
    return Int8Operands(
        codes,
        scale,
        key,
        key_scale,
        value,
        value_scale,
        statistics.value_mean,
        mean_score,
        heavy_keys(call, statistics, key_mask_u8, codes.shape[-1], value_scale.shape[-1], centred=False),
        statistics.equalizer,
    )


def _transform(x: torch.Tensor, channels: int, statistics: KVStatistics, rotates: bool) -> dict[str, Any]:
    """Return the arguments of a quantiser that transform the channels of Q or K.

    16-bit tensors are rotated by MMA instructions; float32 tensors, and more channels than fit in shared memory, by
    butterflies. A program that has loaded the matrix quantises several tiles.
    """
    by_matrix = rotates and x.dtype != torch.float32 and channels <= MAX_MATRIX
    return {
        "key_mean": statistics.key_mean,
        "equalizer": statistics.equalizer,
        "mean_channels": statistics.key_mean.shape[2],
        "matrix": rotation_matrix(channels, x.dtype, x.device) if by_matrix else None,
        "SIGN_BITS": sign_bits(channels) if rotates else None,
        "TILES": TILES_BY_MATRIX if by_matrix else 1,
    }


def quantize_query(
    query: torch.Tensor, sequences: Sequences, batch: int, statistics: KVStatistics, rotates: bool, mean_score: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Equalize and rotate Q; quantise it to INT8 with one scale per token.

    Args:
        query: (batch, q_heads, tokens, head_dim), any strides; (1, q_heads, total tokens, head_dim) when packed.
        sequences: the token axis.
        batch: number of sequences.
        statistics: K's mean, and the equalizer.
        rotates: whether to rotate channels.
        mean_score: whether to compute the third result.

    Returns:
        (codes, scale, mean_score): int8 (operand batch, q_heads, rows, channels), float32 (operand batch, q_heads,
        rows), and float32 of the same shape, each query's product with K's mean, or None. channels is head_dim rounded
        up to a power of two, rows are `sequences.rows`; beyond a sequence everything is 0.
    """
    q_heads, head_dim = query.shape[1], query.shape[3]
    channels = padded_channels(head_dim)
    shape = (1 if sequences.packed else batch, q_heads, sequences.rows)
    codes = query.new_empty((*shape, channels), dtype=torch.int8)
    scale = query.new_empty(shape, dtype=torch.float32)
    score = query.new_empty(shape, dtype=torch.float32) if mean_score else None
    transform = _transform(query, channels, statistics, rotates)
    programs = ceil_div(sequences.blocks * 2, transform["TILES"])
    launch(
        quantize_query_int8,
        (programs * batch * q_heads,),
        query=query,
        codes=codes,
        scale=scale,
        mean_score=score,
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        blocks=programs,
        q_heads=q_heads,
        group=q_heads // statistics.key_mean.shape[1],
        head_dim=head_dim,
        rows=sequences.rows,
        **strides("", batch_strides(query, sequences)),
        CHANNELS=channels,
        PACKED=sequences.packed,
        RAGGED=sequences.ranges is not None,
        MEAN_SCORE=mean_score,
        **transform,
        enable_fp_fusion=False,
    )
    return codes, scale, score


def quantize_key(
    key: torch.Tensor,
    sequences: Sequences,
    batch: int,
    statistics: KVStatistics,
    rotates: bool,
    key_mask_u8: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract K's mean, equalize and rotate K; quantise it to INT8, a scale per 16 tokens (`layout.thread_order`).

    Args:
        key: (batch, kv_heads, tokens, head_dim), any strides; (1, kv_heads, total tokens, head_dim) when packed.
        sequences, batch: the token axis and the number of sequences.
        statistics: K's mean, the equalizer, and which keys are heavy: here other keys have their places.
        rotates: whether to rotate channels.
        key_mask_u8: uint8 (batch or 1, tokens), 0 where a key does not count; None: all count.

    Returns:
        (codes, scale): int8 (operand batch, kv_heads, rows, channels), bfloat16 (operand batch, kv_heads, rows / 64,
        4). Scales have 16 bits because Triton would load 32-bit ones through shared memory, with barriers.
    """
    kv_heads, head_dim = key.shape[1], key.shape[3]
    channels = padded_channels(head_dim)
    shape = (1 if sequences.packed else batch, kv_heads, sequences.rows)
    codes = key.new_empty((*shape, channels), dtype=torch.int8)
    scale = key.new_empty((*shape[:2], sequences.rows // 64, 4), dtype=torch.bfloat16)
    transform = _transform(key, channels, statistics, rotates)
    programs = ceil_div(sequences.blocks * 2, transform["TILES"])
    launch(
        quantize_key_int8,
        (programs * batch * kv_heads,),
        key=key,
        codes=codes,
        scale=scale,
        chosen=statistics.chosen,
        key_mask=key_mask_u8,
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        blocks=programs,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rows=sequences.rows,
        **strides("", batch_strides(key, sequences)),
        key_mask_stride=stride_of(key_mask_u8),
        CHANNELS=channels,
        FIRST=statistics.first_keys,
        PLACES=replaceable_keys(statistics),
        HAS_KEY_MASK=key_mask_u8 is not None,
        PACKED=sequences.packed,
        RAGGED=sequences.ranges is not None,
        **transform,
        enable_fp_fusion=False,
    )
    return codes, scale


@triton.jit
def scaled_matrix(matrix, factor, CHANNELS: tl.constexpr):
    """Return the rotation's matrix of ±1 with a factor, a power of two, for each of its rows; exact in 16 bits."""
    channel = tl.arange(0, CHANNELS)
    x = tl.load(matrix + channel[:, None] * CHANNELS + channel[None, :])
    if INTERPRETED:  # the interpreter treats bfloat16 factors as integers
        return (x.to(tl.float32) * factor[:, None]).to(x.dtype)
    else:
        return x * factor.to(x.dtype)[:, None]


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group"])
def quantize_query_int8(
    query,
    codes,
    scale,
    key_mean,
    equalizer,
    matrix,
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
    SIGN_BITS: tl.constexpr,
    TILES: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    MEAN_SCORE: tl.constexpr,
):
    """Quantise TILES blocks of 64 tokens of Q of one (batch, q head)."""
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (pair // q_heads).to(tl.int64), (pair % q_heads).to(tl.int64)
    start, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    # The last block of 128 is quantised as a whole.
    count = tl.minimum(tl.cdiv(length, 128) * 2 - block * TILES, TILES)
    if count > 0:
        base = query + batch * stride_batch + head * stride_head
        channel = tl.arange(0, CHANNELS)
        kv_pair = batch * (q_heads // group) + head // group
        factor = tl.full((CHANNELS,), 1.0, tl.float32)
        if equalizer is not None:
            factor = channel_factor(equalizer + kv_pair * mean_channels, channel, head_dim, False)
        if matrix is not None:
            rotation = scaled_matrix(matrix, factor, CHANNELS)
        for tile in range(count):
            token = (block * TILES + tile) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            x, _counts = load_tokens(
                base, None, start, token, length, channel, head_dim, stride_token, stride_channel, False
            )
            row = operand_row(batch, head, q_heads, rows, operand_start, PACKED) + token
            if MEAN_SCORE:
                mean = tl.load(key_mean + kv_pair * mean_channels + channel, mask=channel < head_dim, other=0.0)
                tl.store(mean_score + row, tl.sum(x * mean[None, :], 1))
            if matrix is not None:
                x = tl.dot(x.to(rotation.dtype), rotation) * CHANNELS**-0.5
            else:
                if equalizer is not None:
                    x *= factor[None, :]
                if SIGN_BITS is not None:
                    x = rotate(x, CHANNELS, SIGN_BITS)
            row_scale, inverse = int8_scale(tl.max(magnitude(x), 1), False)
            tl.store(scale + row, row_scale)
            tl.store(codes + row[:, None] * CHANNELS + channel[None, :], round_to_int8(x * inverse[:, None]))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def quantize_key_int8(
    key,
    codes,
    scale,
    key_mean,
    equalizer,
    matrix,
    chosen,
    key_mask,
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
    key_mask_stride,
    CHANNELS: tl.constexpr,
    SIGN_BITS: tl.constexpr,
    TILES: tl.constexpr,
    FIRST: tl.constexpr,
    PLACES: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Quantise TILES blocks of 64 tokens of K of one (batch, kv head)."""
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    start, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    # The last block of 128 is quantised as a whole.
    count = tl.minimum(tl.cdiv(length, 128) * 2 - block * TILES, TILES)
    if count > 0:
        base = key + batch * stride_batch + head * stride_head
        if HAS_KEY_MASK:
            key_mask += batch * key_mask_stride
        channel = tl.arange(0, CHANNELS)
        first_channel = pair.to(tl.int64) * mean_channels
        mean = tl.load(key_mean + first_channel + channel, mask=channel < head_dim, other=0.0)
        inverse_factor = tl.full((CHANNELS,), 1.0, tl.float32)
        if equalizer is not None:
            inverse_factor = channel_factor(equalizer + first_channel, channel, head_dim, True)
        if matrix is not None:
            # K itself is exact in 16 bits, K without its mean is not: subtract the rotated mean.
            rotation = scaled_matrix(matrix, inverse_factor, CHANNELS)
            mean = tl.reshape(rotate((mean * inverse_factor)[None, :], CHANNELS, SIGN_BITS), (CHANNELS,))
        for tile in range(count):
            token = (block * TILES + tile) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            x, counts = load_tokens(
                base, key_mask, start, token, length, channel, head_dim, stride_token, stride_channel, HAS_KEY_MASK,
                source=tail_source(token, chosen, pair, FIRST, PLACES),
            )  # fmt: skip
            if matrix is not None:
                x = tl.dot(x.to(rotation.dtype), rotation) * CHANNELS**-0.5
            x = tl.where(counts[:, None], x - mean[None, :], 0.0)
            if matrix is None:
                if equalizer is not None:
                    x *= inverse_factor[None, :]
                if SIGN_BITS is not None:
                    x = rotate(x, CHANNELS, SIGN_BITS)
            group_scale, inverse = int8_scale(thread_max(tl.max(magnitude(x), 1)), True)
            inverse = tl.reshape(tl.broadcast_to(inverse[None, :, None], (8, 4, 2)), (BLOCK_ROWS,))
            first = operand_row(batch, head, kv_heads, rows, operand_start, PACKED)
            into = scale + (first + (block * TILES + tile) * BLOCK_ROWS) // 16 + tl.arange(0, 4)
            tl.store(into, group_scale.to(tl.bfloat16))
            row = first + token
            tl.store(codes + row[:, None] * CHANNELS + channel[None, :], round_to_int8(x * inverse[:, None]))


@triton.jit
def thread_max(x):
    """Return the largest of the tokens that share a scale: (64,) -> (4,)."""
    return tl.max(tl.max(tl.reshape(x, (8, 4, 2)), 2), 0)
