"""Quantisation of V to e4m3, INT8 or float16, with the bits of `reference.forward.quantize_operands`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...formats.fp8 import E4M3_MAX, ERROR_STEP, LARGEST_MOVE
from ...formats.fp16 import FP16_HEADROOM
from ...formats.int8 import INT8_MAX
from ...formats.reciprocal import SMALLEST_NORMAL
from ...spec.layout import BLOCK, Sequences, batch_strides, ceil_div, padded_channels, stride_of
from ...spec.operands import VALUE_DTYPES, KVStatistics
from ..common.int8 import round_to_int8
from ..common.launch import UNSPECIALIZED, launch, strides
from ..common.sequences import operand_row, sequence_range
from ..common.tiles import operand_token
from ..common.tokens import load_tokens, tail_source
from .heavy import replaceable_keys

BLOCK_ROWS = tl.constexpr(BLOCK)
ONE_127TH = tl.constexpr(1 / INT8_MAX)
ONE_448TH = tl.constexpr(1 / E4M3_MAX)
ONE_128TH = tl.constexpr(1 / BLOCK)
MAX_MOVE = tl.constexpr(LARGEST_MOVE)
# float32 numbers around this constant are ERROR_STEP apart: adding it rounds to the nearest multiple of ERROR_STEP,
# ties to even.
ERROR_ROUNDER = tl.constexpr(1.5 * 2**23 * ERROR_STEP)
SMALLEST_SCALE = tl.constexpr(SMALLEST_NORMAL)
HEADROOM_EXPONENT = tl.constexpr(int(math.log2(FP16_HEADROOM)))
CHUNK = 64  # channels of a program at most, so that registers allow more programs in flight


def quantize_value(
    value: torch.Tensor,
    sequences: Sequences,
    batch: int,
    statistics: KVStatistics,
    key_mask_u8: torch.Tensor | None,
    pv: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract V's mean and quantise V to e4m3, INT8 or float16.

    Args:
        value: (batch, kv_heads, tokens, v_head_dim), any strides; (1, kv_heads, total tokens, v_head_dim) when packed.
        sequences, batch: the token axis and the number of sequences.
        statistics: V's mean and extrema, and which keys are heavy: here other keys have their places.
        key_mask_u8: uint8 (batch or 1, tokens), 0 where a key does not count; None: all count.
        pv: "fp8" (e4m3) or "int8", with a scale per channel; or "fp16", with a scale per (batch, head).

    Returns:
        (values, scale): in 8 bits (operand batch, kv_heads, channels, rows), in 16 bits (operand batch, kv_heads, rows,
        channels); float32 (batch, kv_heads, channels). 8-bit values are transposed and their tokens are in the order of
        `common.tiles.operand_token`: then the weights are the operand of P·V in the registers where Q·Kᵀ left the
        scores.
    """
    kv_heads, v_head_dim = value.shape[1], value.shape[3]
    channels = padded_channels(v_head_dim)
    operand_batch = 1 if sequences.packed else batch
    shape = (sequences.rows, channels) if pv == "fp16" else (channels, sequences.rows)
    values = value.new_empty((operand_batch, kv_heads, *shape), dtype=VALUE_DTYPES[pv])
    scale = value.new_empty((batch, kv_heads, channels), dtype=torch.float32)
    launch(
        quantize_value_block,
        (sequences.blocks * batch * kv_heads, ceil_div(channels, CHUNK)),
        value=value,
        values=values,
        scale=scale,
        value_mean=statistics.value_mean,
        value_amax=statistics.value_tensor_amax if pv == "fp16" else statistics.value_amax,
        chosen=statistics.chosen,
        key_mask=key_mask_u8,
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        blocks=sequences.blocks,
        kv_heads=kv_heads,
        v_head_dim=v_head_dim,
        rows=sequences.rows,
        **strides("", batch_strides(value, sequences)),
        key_mask_stride=stride_of(key_mask_u8),
        CHANNELS=channels,
        CHUNK=min(channels, CHUNK),
        FIRST=statistics.first_keys,
        PLACES=replaceable_keys(statistics),
        HAS_KEY_MASK=key_mask_u8 is not None,
        PACKED=sequences.packed,
        RAGGED=sequences.ranges is not None,
        enable_fp_fusion=False,
    )
    return values, scale


@triton.jit(do_not_specialize=UNSPECIALIZED)
def quantize_value_block(
    value,
    values,
    scale,
    value_mean,
    value_amax,
    chosen,
    key_mask,
    ranges,
    tokens,
    blocks,
    kv_heads,
    v_head_dim,
    rows,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    key_mask_stride,
    CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    PLACES: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Quantise 128 tokens and CHUNK channels of one (batch, kv head)."""
    IN_8_BITS: tl.constexpr = values.dtype.element_ty != tl.float16
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    start, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    channel = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    channel_index = pair.to(tl.int64) * CHANNELS + channel
    if IN_8_BITS:
        channel_scale = tl.load(value_amax + channel_index) * (
            ONE_127TH if values.dtype.element_ty == tl.int8 else ONE_448TH
        )
    else:
        exponent = headroom_exponent(tl.load(value_amax + pair))
        channel_scale = tl.zeros(channel.shape, tl.float32) + exp2_of_integer(exponent)
    if block == 0:
        tl.store(scale + channel_index, channel_scale)
    if block * BLOCK_ROWS < length:
        position = tl.arange(0, BLOCK_ROWS)
        token = block * BLOCK_ROWS + (operand_token(position) if IN_8_BITS else position)
        base = value + batch * stride_batch + head * stride_head
        if HAS_KEY_MASK:
            key_mask += batch * key_mask_stride
        x, counts = load_tokens(
            base, key_mask, start, token, length, channel, v_head_dim, stride_token, stride_channel, HAS_KEY_MASK,
            source=tail_source(token, chosen, pair, FIRST, PLACES),
        )  # fmt: skip
        x = tl.where(counts[:, None], x - tl.load(value_mean + channel_index)[None, :], 0.0)
        if IN_8_BITS:
            inverse = tl.div_rn(tl.full(channel_scale.shape, 1.0, tl.float32), channel_scale)
            x = x * tl.where(channel_scale < SMALLEST_SCALE, 0.0, inverse)[None, :]
            row = operand_row(batch, head, kv_heads, CHANNELS, 0, PACKED) + channel
            first = tl.multiple_of(operand_start, BLOCK_ROWS) + block * BLOCK_ROWS
            into = values + row[:, None] * rows + (first + position)[None, :]
            codes = round_to_int8(x) if values.dtype.element_ty == tl.int8 else round_keeping_sums(x)
            tl.store(into, tl.trans(codes))
        else:
            row = operand_row(batch, head, kv_heads, rows, operand_start, PACKED) + token
            into = values + row[:, None] * CHANNELS + channel[None, :]
            tl.store(into, (x * exp2_of_integer(-exponent)).to(tl.float16))


@triton.jit
def round_keeping_sums(x):
    """Round a block of tokens, float32 (128, channels), to e4m3 by `formats.fp8.round_keeping_sums`."""
    error = x.to(tl.float16).to(tl.float32) - x.to(tl.float8e4nv).to(tl.float32)
    total = tl.sum((error + ERROR_ROUNDER) - ERROR_ROUNDER, 0)[None, :]
    move = tl.minimum(tl.abs(total) * ONE_128TH, tl.abs(x) * MAX_MOVE)
    # Multiply instead of negating: Triton 3.6 negates by subtracting from 0, which loses the sign of a zero.
    return (x + move * tl.where(total < 0, -1.0, 1.0)).to(tl.float8e4nv)


@triton.jit
def headroom_exponent(amax):
    """Return the exponent of the least power of two s with amax ≤ FP16_HEADROOM·s, within ±126; 0 where amax is 0."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32) - HEADROOM_EXPONENT
    return tl.where(amax > 0.0, tl.minimum(tl.maximum(exponent, -126), 126), 0)


@triton.jit
def exp2_of_integer(exponent):
    """Return 2 to an integer exponent within ±126, exact."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
