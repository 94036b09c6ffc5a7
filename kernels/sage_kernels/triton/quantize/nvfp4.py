"""Quantisation of Q, K and V to NVFP4, with the bits of `formats.nvfp4` after `transforms`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...formats import nvfp4
from ...formats.nvfp4 import GROUP as GROUP_SIZE
from ...spec.call import Call
from ...spec.layout import BLOCK, Sequences, batch_strides, power_of_two, round_up, stride_of
from ...spec.operands import KVStatistics, NVFP4Operands
from ...spec.recipe import Recipe
from ...spec.transforms import rotation_block
from ..common.formats import E4M3_NAN, GROUP, decode_e4m3, encode_e2m1, encode_e4m3, max_or_nan, round_to_e2m1
from ..common.launch import UNSPECIALIZED, launch, strides
from ..common.rotation import channel_factor, rotate, sign_bits
from ..common.sequences import operand_row, sequence_range
from ..common.tokens import load_tokens, tail_source
from .choice import is_finite
from .heavy import heavy_keys, replaceable_keys
from .reduction import reduce_block
from .statistics import token_statistics

BLOCK_ROWS = tl.constexpr(BLOCK)
MIN_CHANNELS = 64  # channels of the FP4 MMA instructions
STEPS_ROW = tl.constexpr(nvfp4.STEPS_ROW)
MAX_STEPS = tl.constexpr(nvfp4.MAX_STEPS)
BIN_SHIFT, FIRST_BIN = tl.constexpr(nvfp4.BIN_SHIFT), tl.constexpr(nvfp4.FIRST_BIN)
SEARCH_LIMIT = tl.constexpr(nvfp4.SEARCH_LIMIT)
ONE_SIXTH = tl.constexpr(1 / 6)
# 448 · 6 = 1.3125 · 2¹¹
LIMIT_EXPONENT = tl.constexpr(11)
LIMIT_MANTISSA = tl.constexpr(0x280000)


def quantize_operands(call: Call, key_mask_u8: torch.Tensor | None = None) -> NVFP4Operands:
    """Transform and quantise Q, K and V as `reference.forward.quantize_operands` does; add `mean_score`.

    Args:
        call: a call of a recipe whose qk and pv are "nvfp4"; not empty.
        key_mask_u8: uint8 (batch or 1, kv_len), 0 for keys left out of means and scales; None: all count.
    """
    recipe, batch, tail = call.recipe, call.batch, call.tail
    q_sequences, kv_sequences = tail.token_axes
    tail_key_mask_u8 = None if key_mask_u8 is None else key_mask_u8[:, call.first_keys :]
    statistics = token_statistics(call, key_mask_u8, key_mask_u8 if call.q_len == call.kv_len else None)
    codes, scale, tensor_scale, mean, mean_score = _quantize_tokens(
        call.query, recipe, q_sequences, batch, statistics, None, True, call.wants_mean_score
    )
    key_codes, key_scale, key_tensor_scale, _, _ = _quantize_tokens(
        tail.key, recipe, kv_sequences, batch, statistics, tail_key_mask_u8, False, False
    )
    value, value_scale, value_tensor_scale = _quantize_value(
        tail.value, recipe, kv_sequences, batch, statistics, tail_key_mask_u8
    )
    return NVFP4Operands(
        codes,
        scale,
        tensor_scale,
        mean,
        key_codes,
        key_scale,
        key_tensor_scale,
        value,
        value_scale,
        value_tensor_scale,
        statistics.value_mean,
        mean_score,
        statistics,
        heavy_keys(call, statistics, key_mask_u8, 2 * codes.shape[-1], value.shape[-2], centred=True),
    )


def _padded_channels(channels: int) -> int:
    return max(MIN_CHANNELS, power_of_two(channels))


def _quantize_tokens(
    x: torch.Tensor,
    recipe: Recipe,
    sequences: Sequences,
    batch: int,
    statistics: KVStatistics,
    key_mask_u8: torch.Tensor | None,
    is_query: bool,
    mean_score: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (codes, scale, tensor_scale, mean, mean_score) of Q or K; the last two are None for K."""
    heads, head_dim = x.shape[1], x.shape[3]
    channels = _padded_channels(head_dim)
    shape = (1 if sequences.packed else batch, heads, sequences.rows)
    codes = x.new_empty((*shape, channels // 2), dtype=torch.uint8)
    scale = x.new_empty((*shape, channels // GROUP_SIZE), dtype=torch.uint8)
    tensor_scale = x.new_empty((*shape[:2], sequences.rows // BLOCK), dtype=torch.float32)
    smooth_blocks = is_query and recipe.smooth_q
    mean = x.new_empty((*tensor_scale.shape, channels), dtype=torch.float32) if smooth_blocks else None
    score = x.new_empty(shape, dtype=torch.float32) if mean_score else None
    rotation = rotation_block(round_up(head_dim, GROUP_SIZE))
    steps = recipe.scale_steps if is_query else recipe.key_scale_steps
    launch(
        quantize_tokens_nvfp4,
        (sequences.blocks, batch * heads),
        x=x,
        codes=codes.view(torch.int64),
        scale=scale,
        tensor_scale=tensor_scale,
        mean=mean,
        key_mean=statistics.key_mean,
        equalizer=statistics.equalizer,
        mean_score=score,
        chosen=None if is_query else statistics.chosen,
        search=nvfp4.search_table(steps, x.device),
        key_mask=key_mask_u8,
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        heads=heads,
        group=heads // statistics.key_mean.shape[1],
        key_mean_channels=statistics.key_mean.shape[2],
        channels=head_dim,
        rows=sequences.rows,
        **strides("", batch_strides(x, sequences)),
        key_mask_stride=stride_of(key_mask_u8),
        CHANNELS=channels,
        ROTATION=rotation if recipe.rotate else 1,
        SIGN_BITS=sign_bits(rotation) if recipe.rotate else 0,
        IS_QUERY=is_query,
        SMOOTH=recipe.smooth_q if is_query else recipe.smooth_k,
        MEAN_SCORE=mean_score,
        TENSOR_SCALE=recipe.tensor_scale,
        STEPS=len(steps),
        FIRST=statistics.first_keys,
        PLACES=0 if is_query else replaceable_keys(statistics),
        HAS_KEY_MASK=key_mask_u8 is not None,
        PACKED=sequences.packed,
        RAGGED=sequences.ranges is not None,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return codes, scale, tensor_scale, mean, score


def _quantize_value(
    value: torch.Tensor,
    recipe: Recipe,
    sequences: Sequences,
    batch: int,
    statistics: KVStatistics,
    key_mask_u8: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes, scale, tensor_scale) of V."""
    kv_heads, v_head_dim = value.shape[1], value.shape[3]
    channels = _padded_channels(v_head_dim)
    shape = (1 if sequences.packed else batch, kv_heads, channels)
    codes = value.new_empty((*shape, sequences.rows // 2), dtype=torch.uint8)
    scale = value.new_empty((*shape, sequences.rows // GROUP_SIZE), dtype=torch.uint8)
    tensor_scale = value.new_empty((batch, kv_heads), dtype=torch.float32)
    launch(
        quantize_value_nvfp4,
        (sequences.blocks, batch * kv_heads),
        value=value,
        codes=codes.view(torch.int64),
        scale=scale,
        tensor_scale=tensor_scale,
        value_mean=statistics.value_mean,
        value_tensor_amax=statistics.value_tensor_amax,
        chosen=statistics.chosen,
        search=nvfp4.search_table(recipe.scale_steps, value.device),
        key_mask=key_mask_u8,
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        kv_heads=kv_heads,
        mean_channels=statistics.value_mean.shape[2],
        channels=v_head_dim,
        rows=sequences.rows,
        **strides("", batch_strides(value, sequences)),
        key_mask_stride=stride_of(key_mask_u8),
        CHANNELS=channels,
        SMOOTH=recipe.smooth_v,
        TENSOR_SCALE=recipe.tensor_scale,
        STEPS=len(recipe.scale_steps),
        FIRST=statistics.first_keys,
        PLACES=replaceable_keys(statistics),
        HAS_KEY_MASK=key_mask_u8 is not None,
        PACKED=sequences.packed,
        RAGGED=sequences.ranges is not None,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return codes, scale, tensor_scale


@triton.jit
def least_power_of_two(amax):
    """Return (s, 1 / s) of the least power of two s with amax ≤ 448·6·s; 1 where amax is 0 (`formats.power_of_two`)."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - LIMIT_EXPONENT + ((bits & 0x7FFFFF) > LIMIT_MANTISSA).to(tl.int32)
    exponent = tl.where(bits == 0, 0, tl.maximum(exponent, -126))
    scale = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(code):
    """Return the float32 reciprocals of e4m3 scales by their codes; 1 for 0."""
    scale = decode_e4m3(code).to(tl.float32)
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale == 0, 1.0, scale))


@triton.jit
def split_groups(x):
    """Split x (rows, 16·n) into sixteen tensors (rows, n): elements 0…15 of every group.

    With sixteen tensors every compiler version gives each thread whole groups.
    """
    x = (tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP)),)
    for level in tl.static_range(4):
        halves = ()
        for i in tl.static_range(1 << level):
            pairs = tl.reshape(x[i], (x[i].shape[0], x[i].shape[1], 2, 8 >> level))
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            halves += (first, second)
        x = halves
    elements = ()
    for i in tl.static_range(16):
        elements += (tl.reshape(x[i], (x[i].shape[0], x[i].shape[1])),)
    return elements


@triton.jit
def halves_of_words(words):
    """Return the lower and the upper halves of int32 words as float16."""
    return words.to(tl.int16).to(tl.float16, bitcast=True), (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def round_magnitude(q):
    """Return the bits of float16 numbers, times 2¹⁴, rounded to e2m1 as `nvfp4.search_groups` does, int16."""
    return (q.to(tl.int16, bitcast=True) + 0x100) & -0x200


@triton.jit
def squared_error(y, up, down):
    """Return the errors of `nvfp4.search_groups`: y, sixteen float16 (rows, groups), and the ratios."""
    sums = ()
    for half in tl.static_range(2):
        error = tl.zeros_like(y[0])
        for i in tl.static_range(8):
            x = y[i // 2 * 4 + i % 2 + 2 * half]
            d = tl.fma(round_magnitude(x * up).to(tl.float16, bitcast=True), down, -x)
            error = tl.fma(d, d, error)
        sums += (error,)
    return sums[0] + sums[1]


@triton.jit
def search_groups(x, search, STEPS: tl.constexpr):
    """Quantise groups by `nvfp4.search_groups`.

    Args:
        x: sixteen float32 (rows, groups), divided by the tensor scale.
        search: `nvfp4.search_table`.

    Returns:
        (low, high, scale): int32 (rows, groups), eight codes each, and the scale's code, uint8.
    """
    h = ((x[0] + 0.0).to(tl.float16),)
    for i in tl.static_range(1, 16):
        h += ((x[i] + 0.0).to(tl.float16),)  # type: ignore[assignment]
    amax = tl.abs(h[0])
    for i in tl.static_range(1, 16):
        amax = max_or_nan(amax, tl.abs(h[i]))
    amax = amax.to(tl.float32)
    finite = amax < SEARCH_LIMIT
    sixth = tl.where(finite, amax, 0.0) * ONE_SIXTH
    row = tl.maximum(sixth.to(tl.int32, bitcast=True) >> BIN_SHIFT, FIRST_BIN) - FIRST_BIN
    row = search + row * (MAX_STEPS + 1)
    word = tl.load(row)
    inverse, _ = halves_of_words(word)
    y = (h[0] * inverse,)
    for i in tl.static_range(1, 16):
        y += (h[i] * inverse,)  # type: ignore[assignment]
    code, up = word >> 16, tl.zeros_like(inverse) + 2.0**-11
    least = squared_error(y, up.to(tl.float16), (tl.zeros_like(inverse) + 2.0**11).to(tl.float16))
    best, up = code, up.to(tl.float16)
    # Loop at run time: compiling an unrolled loop takes several times as long.
    for number in range(STEPS):
        ratio_up, ratio_down = halves_of_words(tl.load(row + number + 1))
        error = squared_error(y, ratio_up, ratio_down)
        better = error < least  # false where the ratio is NaN
        best = tl.where(better, code + tl.load(search + STEPS_ROW * (MAX_STEPS + 1) + number + 1), best)
        least, up = tl.where(better, error, least), tl.where(better, ratio_up, up)
    low, high = tl.zeros_like(best), tl.zeros_like(best)
    for i in tl.static_range(8):
        low |= e2m1_code(y[i] * up) << 4 * i
        high |= e2m1_code(y[i + 8] * up) << 4 * i
    return low, high, tl.where(finite, best, E4M3_NAN).to(tl.uint8)


@triton.jit
def e2m1_code(q):
    """Return the int32 e2m1 codes of float16 numbers times 2¹⁴, rounded by `round_magnitude`."""
    bits = round_magnitude(q).to(tl.int32)
    return ((bits >> 9) & 7) | ((bits >> 12) & 8)


@triton.jit
def quantize_groups(x, search, STEPS: tl.constexpr):
    """Quantise float32 (rows, 16·n) by `nvfp4.round_groups`: int64 (rows, n) of sixteen codes, uint8 scales."""
    x = split_groups(x)
    if STEPS > 0:
        low, high, best = search_groups(x, search, STEPS)
    else:
        magnitude = (tl.abs(x[0]),)
        for i in tl.static_range(1, 16):
            magnitude += (tl.abs(x[i]),)  # type: ignore[assignment]
        amax = magnitude[0]
        for i in tl.static_range(1, 16):
            amax = max_or_nan(amax, magnitude[i])
        best = encode_e4m3(tl.where(is_finite(amax), amax, float("nan")) * ONE_SIXTH)
        inverse = reciprocal(best)
        low, high = tl.zeros_like(amax).to(tl.int32), tl.zeros_like(amax).to(tl.int32)
        for i in tl.static_range(8):
            low |= encode_e2m1(round_to_e2m1(magnitude[i] * inverse), x[i]) << 4 * i
            high |= encode_e2m1(round_to_e2m1(magnitude[i + 8] * inverse), x[i + 8]) << 4 * i
    codes = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    return tl.where(best == E4M3_NAN, 0, codes), best


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group", "rows"])
def quantize_tokens_nvfp4(
    x,
    codes,
    scale,
    tensor_scale,
    mean,
    key_mean,
    equalizer,
    mean_score,
    chosen,
    search,
    key_mask,
    ranges,
    tokens,
    heads,
    group,
    key_mean_channels,
    channels,
    rows,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    key_mask_stride,
    CHANNELS: tl.constexpr,
    ROTATION: tl.constexpr,
    SIGN_BITS: tl.constexpr,
    IS_QUERY: tl.constexpr,
    SMOOTH: tl.constexpr,
    MEAN_SCORE: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    PLACES: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Quantise a block of 128 tokens of Q or K of one (batch, head); `codes` has one int64 per group."""
    block, pair = tl.program_id(0), tl.program_id(1)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    start, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    if RAGGED and block * BLOCK_ROWS >= length:
        return
    first = operand_row(batch, head, heads, rows, operand_start, PACKED) + block * BLOCK_ROWS
    token, channel = tl.arange(0, BLOCK_ROWS), tl.arange(0, CHANNELS)
    x += batch * stride_batch + head * stride_head
    if HAS_KEY_MASK:
        key_mask += batch * key_mask_stride
    token_of_sequence = block * BLOCK_ROWS + token
    tile, counts = load_tokens(
        x, key_mask, start, token_of_sequence, length, channel, channels, stride_token, stride_channel, HAS_KEY_MASK,
        source=tail_source(token_of_sequence, chosen, pair, FIRST, PLACES),
    )  # fmt: skip
    kv_pair = batch * (heads // group) + head // group
    key_mean += kv_pair * key_mean_channels + channel
    if MEAN_SCORE:
        k_mean = tl.load(key_mean, mask=channel < key_mean_channels, other=0.0)
        tl.store(mean_score + first + token, tl.sum(tile * k_mean[None, :], 1))
    if SMOOTH:
        if IS_QUERY:
            count = tl.minimum(length - block * BLOCK_ROWS, BLOCK_ROWS).to(tl.float32)
            total, _largest, _smallest, _finite = reduce_block(
                x,
                None,
                start,
                block * BLOCK_ROWS,
                length,
                channels,
                stride_token,
                stride_channel,
                CHANNELS,
                False,
                True,
            )
            shift = tl.div_rn(total, tl.zeros_like(total) + count)
            tl.store(mean + (first // BLOCK_ROWS) * CHANNELS + channel, shift)
        else:
            shift = tl.load(key_mean, mask=channel < key_mean_channels, other=0.0)
        tile = tl.where(counts[:, None], tile - shift[None, :], 0.0)
    if equalizer is not None:
        tile *= channel_factor(equalizer + kv_pair * key_mean_channels, channel, channels, not IS_QUERY)[None, :]
    if ROTATION > 1:
        tile = rotate(tile, ROTATION, SIGN_BITS)
    factor = 1.0
    if TENSOR_SCALE:
        finite = tl.where(is_finite(tile), tl.abs(tile), 0.0)
        factor, inverse = least_power_of_two(tl.max(tl.max(finite, 0), 0))
        tile = tile * inverse
    tl.store(tensor_scale + first // BLOCK_ROWS, factor)
    packed, group_scale = quantize_groups(tile, search, STEPS)
    position = token
    if not IS_QUERY:
        position = token // 32 * 32 + token % 8 // 2 * 8 + token % 32 // 8 * 2 + token % 2
    at = (first + position)[:, None] * (CHANNELS // GROUP) + tl.arange(0, CHANNELS // GROUP)[None, :]
    tl.store(codes + at, packed)
    tl.store(scale + at, group_scale)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "rows"])
def quantize_value_nvfp4(
    value,
    codes,
    scale,
    tensor_scale,
    value_mean,
    value_tensor_amax,
    chosen,
    search,
    key_mask,
    ranges,
    tokens,
    kv_heads,
    mean_channels,
    channels,
    rows,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    key_mask_stride,
    CHANNELS: tl.constexpr,
    SMOOTH: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    PLACES: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Quantise and transpose a block of 128 tokens of V of one (batch, kv head); `codes` has one int64 per group."""
    block, pair = tl.program_id(0), tl.program_id(1)
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    start, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    if RAGGED and block * BLOCK_ROWS >= length:
        return
    token, channel = tl.arange(0, BLOCK_ROWS), tl.arange(0, CHANNELS)
    value += batch * stride_batch + head * stride_head
    if HAS_KEY_MASK:
        key_mask += batch * key_mask_stride
    token_of_sequence = block * BLOCK_ROWS + token
    tile, counts = load_tokens(
        value, key_mask, start, token_of_sequence, length, channel, channels, stride_token, stride_channel,
        HAS_KEY_MASK, source=tail_source(token_of_sequence, chosen, pair, FIRST, PLACES),
    )  # fmt: skip
    head_index = batch * kv_heads + head
    if SMOOTH:
        shift = tl.load(value_mean + head_index * mean_channels + channel, mask=channel < mean_channels, other=0.0)
        tile = tl.where(counts[:, None], tile - shift[None, :], 0.0)
    factor = 1.0
    if TENSOR_SCALE:
        factor, inverse = least_power_of_two(tl.load(value_tensor_amax + head_index))
        tile = tile * inverse
    if block == 0:
        tl.store(tensor_scale + head_index, factor)
    packed, group_scale = quantize_groups(tl.trans(tile), search, STEPS)
    row = (operand_row(batch, head, kv_heads, CHANNELS, 0, PACKED) + channel).to(tl.int64)[:, None]
    first = operand_start // GROUP + block * (BLOCK_ROWS // GROUP)
    at = row * (rows // GROUP) + first + tl.arange(0, BLOCK_ROWS // GROUP)[None, :]
    tl.store(codes + at, packed)
    tl.store(scale + at, group_scale)
