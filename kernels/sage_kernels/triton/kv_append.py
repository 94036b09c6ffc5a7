"""Append tokens to a low-bit KV cache, and prepare Q for decoding, in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..spec.kv_cache import FIRST_TOKENS, PAGE, RING, WINDOW, KVCache
from ..spec.layout import ceil_div, power_of_two
from .common.launch import UNSPECIALIZED, launch, strides
from .common.replayed_launches import KernelLaunch
from .common.rotation import channel_factor, rotate, sign_bits
from .common.scores import round_finite

LOG2E = tl.constexpr(1.4426950408889634)
BIAS = tl.constexpr(1024.0)
"""Offset of a code in the mantissa of a float16 (`kv_decode`)."""
BLOCK_T = 32
"""Tokens of a program."""


def append(cache: KVCache, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store tokens, with the bits of `reference.kv_cache.append`.

    Args:
        cache: INT8 or INT4, with its transforms frozen.
        key, value: (batch, kv_heads, tokens, head_dim), channels contiguous.
    """
    if key.shape[2] > RING - (cache.length - cache.coded_columns) and cache.length > cache.coded_columns:
        # The new tokens take the slots of tokens in the window, which are quantised first.
        _append(cache, key[:, :, :0], value[:, :, :0], cache.length)
        cache.coded_columns = cache.length
    _append(cache, key, value, cache.coded_after(key.shape[2]))
    cache.advance(key.shape[2])


def _append(cache: KVCache, key: torch.Tensor, value: torch.Tensor, coded_after: int) -> None:
    tokens = key.shape[2]
    cache.reserve(cache.length + tokens)
    leaving = max(0, min(coded_after, cache.length) - cache.coded_columns)
    launch(
        append_tokens,
        (ceil_div(max(tokens, leaving), BLOCK_T), cache.kv_heads, cache.batch * 2),
        **_arguments(cache, key, value, coded_after),
        query=key,
        rows=None,
        constants=None,
        q_len=tokens,
        group=1,
        softmax_scale=0.0,
        **strides("query", key.stride()[:3]),
        BLOCK_T=BLOCK_T,
        BLOCK_M=8,
        OVERLAP=False,
    )


def append_launch(
    cache: KVCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    rows: torch.Tensor,
    constants: torch.Tensor,
    overlap: bool,
) -> KernelLaunch:
    """Return the launch that stores the tokens of a step of decoding, and prepares its queries for `kv_decode`.

    Args:
        cache, key, value: as in `append`; at most MAX_QUERIES tokens, which must fit.
        query: (batch, q_heads, q_len, head_dim), channels contiguous.
        scale: factor of the scores.
        rows: float16 (batch · kv_heads, rows of Q of a KV head, padded, channels): transformed, of maximum 1.
        constants: float32 (batch · kv_heads, 3, rows): the factor of the scores in base 2, the sum of a row, and BIAS
            times the row's sum with the factors of the codes.
        overlap: whether the next kernel may start before this kernel has ended.
    """
    # Never `dependent`: `attend_to_kv_part` reads `counts` and `start` before it waits, which is safe only because this
    # kernel starts after the stream's earlier kernels have ended: the step before writes `counts` in its last kernel.
    arguments = dict(
        **_arguments(cache, key, value, cache.coded_after(key.shape[2])),
        query=query,
        rows=rows,
        constants=constants,
        q_len=query.shape[2],
        group=query.shape[1] // cache.kv_heads,
        softmax_scale=scale,
        **strides("query", query.stride()[:3]),
        BLOCK_T=max(2, power_of_two(key.shape[2])),
        BLOCK_M=rows.shape[1],
        OVERLAP=overlap,
    )
    return append_tokens, (1, cache.kv_heads, cache.batch * 3), arguments


def _arguments(cache: KVCache, key: torch.Tensor, value: torch.Tensor, coded_after: int) -> dict[str, Any]:
    return dict(
        key=key,
        value=value,
        exact_key=cache.exact_key,
        exact_value=cache.exact_value,
        key_codes=cache.key_codes,
        value_codes=cache.value_codes,
        key_scales=cache.key_scales.view(torch.int32),
        value_scales=cache.value_scales.view(torch.int32),
        key_mean=cache.key_mean,
        equalizer=cache.equalizer,
        value_unit=cache.value_unit,
        start=cache.start,
        counts=cache.counts if cache.counts_on_device else None,
        batch_size=cache.batch,
        length=cache.length,
        coded_columns=cache.coded_columns,
        coded_after=coded_after,
        tokens=key.shape[2],
        capacity=cache.capacity,
        head_dim=cache.head_dim,
        **strides("key", key.stride()[:3]),
        **strides("value", value.stride()[:3]),
        CHANNELS=cache.channels,
        BITS=cache.format.bits,
        SIGN_BITS=sign_bits(cache.channels),
        FIRST=FIRST_TOKENS,
        RING=RING,
        PAGE=PAGE,
        WINDOW=WINDOW,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(
    do_not_specialize=[*UNSPECIALIZED, "batch_size", "length", "coded_columns", "coded_after", "group", "capacity"],
)
def append_tokens(
    key,
    value,
    query,
    rows,
    constants,
    exact_key,
    exact_value,
    key_codes,
    value_codes,
    key_scales,
    value_scales,
    key_mean,
    equalizer,
    value_unit,
    start,
    counts,
    batch_size,
    length,
    coded_columns,
    coded_after,
    tokens,
    capacity,
    head_dim,
    q_len,
    group,
    softmax_scale,
    query_stride_batch,
    query_stride_head,
    query_stride_token,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SIGN_BITS: tl.constexpr,
    FIRST: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Transform and store a block of new tokens, and quantise a block of tokens that leave the window.

    Grid (blocks, kv heads, K of the batch, then V, then Q if there are rows). With `counts`, these hold `length`,
    `coded_columns` and `coded_after`, and tokens that do not fit are not stored.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    block, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    operand, batch = part // batch_size, part % batch_size
    pair = batch.to(tl.int64) * tl.num_programs(1) + head
    channel = tl.arange(0, CHANNELS)
    inside = channel < head_dim
    if counts is not None:
        length, coded_columns, coded_after, fits = counted_step(counts, tokens, capacity, WINDOW)
        tokens = tl.where(fits, tokens, 0)
    if operand == 0:
        mean = tl.load(key_mean + pair * CHANNELS + channel)
        ones = tl.full((CHANNELS,), 1.0, tl.float32)
        factor = tl.div_rn(ones, tl.load(equalizer + pair * CHANNELS + channel))
        at = key + batch.to(tl.int64) * key_stride_batch + head.to(tl.int64) * key_stride_head
        append_block(
            at, key_stride_token, mean, factor, exact_key, key_codes, key_scales, start, block, batch, pair, length,
            coded_columns, coded_after, tokens, capacity, inside, CHANNELS, BITS, BLOCK_T, SIGN_BITS, FIRST, RING, PAGE,
            False,
        )  # fmt: skip
    elif operand == 1:
        mean = tl.zeros((CHANNELS,), tl.float32)
        factor = mean + channel_factor(value_unit + pair, 0, 1, True)
        at = value + batch.to(tl.int64) * value_stride_batch + head.to(tl.int64) * value_stride_head
        append_block(
            at, value_stride_token, mean, factor, exact_value, value_codes, value_scales, start, block, batch, pair,
            length, coded_columns, coded_after, tokens, capacity, inside, CHANNELS, BITS, BLOCK_T, SIGN_BITS, FIRST,
            RING, PAGE, True,
        )  # fmt: skip
    elif rows is not None:
        row = tl.arange(0, BLOCK_M)
        from_row = query + batch.to(tl.int64) * query_stride_batch
        from_row += (head * group + row // q_len).to(tl.int64) * query_stride_head + (row % q_len) * query_stride_token
        q = tl.load(
            from_row[:, None] + channel[None, :], mask=(row < group * q_len)[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        q = rotate(q * tl.load(equalizer + pair * CHANNELS + channel)[None, :], CHANNELS, SIGN_BITS)
        largest = tl.max(tl.abs(q), 1)
        largest = tl.where(largest == 0.0, 1.0, largest)
        q = (q * (1.0 / largest)[:, None]).to(tl.float16)
        tl.store(rows + (pair * BLOCK_M + row)[:, None] * CHANNELS + channel[None, :], q)
        scaled = q
        if BITS == 4:  # codes of every second quarter of the channels are multiplied by 16
            scaled = tl.where((channel // (CHANNELS // 4) % 2 == 1)[None, :], (q * 0.0625).to(tl.float16), q)
        into = constants + pair * (BLOCK_M * 3) + row
        tl.store(into, largest * (softmax_scale * LOG2E))
        tl.store(into + BLOCK_M, tl.sum(q.to(tl.float32), 1))
        tl.store(into + BLOCK_M * 2, tl.sum(scaled.to(tl.float32), 1) * BIAS)


@triton.jit
def counted_step(counts, tokens, capacity, WINDOW: tl.constexpr):
    """Return the counts before a step, the window's first column after it, and whether its tokens fit."""
    length = tl.load(counts)
    coded_columns = tl.load(counts + 1)
    fits = length + tokens <= capacity
    coded_after = tl.maximum(coded_columns, length + tokens - WINDOW)
    return length, coded_columns, tl.where(fits, coded_after, coded_columns), fits


@triton.jit
def append_block(
    at, stride, mean, factor, exact, codes, scales, start, block, batch, pair, length, coded_columns, coded_after,
    tokens, capacity, inside, CHANNELS: tl.constexpr, BITS: tl.constexpr, BLOCK_T: tl.constexpr,
    SIGN_BITS: tl.constexpr, FIRST: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Append a block of tokens of K or V at `at`, of one (batch, kv head)."""
    channel = tl.arange(0, CHANNELS)
    index = block * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = exact + pair * ((FIRST + RING) * CHANNELS) + channel[None, :]
    # Tokens that leave the window. `append` ensures that no new token needs their slots.
    column = coded_columns + index
    leaves = column < tl.minimum(coded_after, length)
    x = tl.load(slots + (FIRST + column % RING)[:, None] * CHANNELS, mask=leaves[:, None], other=0.0)
    store_codes(codes, scales, x, pair * capacity + column, leaves, CHANNELS, BITS, PAGE, IS_VALUE)
    is_new = index < tokens
    x = tl.load(
        at + index.to(tl.int64)[:, None] * stride + channel[None, :], mask=is_new[:, None] & inside[None, :], other=0.0
    )
    x = rotate((x.to(tl.float32) - mean[None, :]) * factor[None, :], CHANNELS, SIGN_BITS)
    x = round_finite(x, tl.float16)
    column = length + index
    newest = is_new & (column >= length + tokens - RING)
    tl.store(slots + (FIRST + column % RING)[:, None] * CHANNELS, x, mask=newest[:, None])
    slot = column - tl.load(start + batch)
    is_first = is_new & (slot >= 0) & (slot < FIRST)
    tl.store(slots + slot[:, None] * CHANNELS, x, mask=is_first[:, None])
    if coded_after > length + block * BLOCK_T:
        is_coded = is_new & (column < coded_after)
        store_codes(codes, scales, x, pair * capacity + column, is_coded, CHANNELS, BITS, PAGE, IS_VALUE)


@triton.jit
def store_codes(
    codes, scales, x, place, is_stored, CHANNELS: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr,
    IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Quantise tokens x, float16 (tokens, channels), and store the marked tokens, with the bits of the reference."""
    PER_WORD: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = CHANNELS // PER_WORD
    LEVELS: tl.constexpr = 2**BITS - 1
    x = x.to(tl.float32)
    low = tl.min(x, 1)
    scale = ((tl.max(x, 1) - low) * (1.0 / LEVELS)).to(tl.float16).to(tl.float32)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale == 0.0, 1.0, scale))
    inverse = tl.where(scale == 0.0, 0.0, inverse)
    code = tl.floor((x - low[:, None]) * inverse[:, None] + 0.5)
    code = tl.minimum(tl.maximum(code, 0.0), LEVELS + 0.0).to(tl.int32)
    code = tl.reshape(code, (x.shape[0], PER_WORD, WORDS)) << (tl.arange(0, PER_WORD) * BITS)[None, :, None]
    word = tl.arange(0, WORDS)
    if IS_VALUE:
        into = (place // PAGE * (WORDS * PAGE) + place % PAGE)[:, None] + word[None, :] * PAGE
    else:
        into = place[:, None] * WORDS + word[None, :]
    tl.store(codes + into, tl.sum(code, 1).to(tl.int16), mask=is_stored[:, None])
    scale = scale.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    low = low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    tl.store(scales + place, (scale | (low << 16)).to(tl.int32, bitcast=True), mask=is_stored)
