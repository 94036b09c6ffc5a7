"""Means and extrema of K and V over tokens: quantising any element requires them.

Sums are taken in the order of `transforms.sum_of_tokens`, so that means have the specification's bits: a first kernel
sums blocks of 128 tokens, a second kernel the block sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...spec import transforms
from ...spec.call import Call
from ...spec.layout import BLOCK, Sequences, batch_strides, padded_channels, stride_of
from ...spec.operands import KVStatistics
from ..common.launch import UNSPECIALIZED, launch, strides
from ..common.sequences import operand_row, sequence_range
from .choice import choose_keys, is_finite, mean_query, write_scores
from .reduction import BLOCK_ROWS, all_true, mean_of_blocks, quiet_groups, reduce_block, tokens_of_groups

MIN_MEAN = tl.constexpr(transforms.MIN_MEAN)
EQUALIZER_QUERIES = tl.constexpr(transforms.EQUALIZER_QUERIES)
MAX_EQUALIZER = tl.constexpr(transforms.MAX_EQUALIZER)
MIN_VARIANCE = tl.constexpr(transforms.MIN_VARIANCE)
PARTS = tl.constexpr(4)  # statistics of V for each block and channel: sum, largest, smallest, whether all are finite


def token_statistics(
    call: Call, key_mask_u8: torch.Tensor | None = None, query_mask_u8: torch.Tensor | None = None
) -> KVStatistics:
    """Compute the statistics of K and V, and the equalizer of K and Q; choose the heavy keys.

    Args:
        call: its recipe's smooth_k, smooth_v and equalize, and `chooses_heavy_keys`, decide which to compute; not
            empty.
        key_mask_u8: uint8 (batch or 1, kv_len), 0 where a key does not count; None: all count.
        query_mask_u8: the same for the rows of Q that decide the equalizer, (batch or 1, q_len).
    """
    key, value, recipe = call.key, call.value, call.recipe
    q_sequences, sequences = call.token_axes
    kv_heads, batch = key.shape[1], call.batch
    pairs, blocks = batch * kv_heads, sequences.blocks
    shared: dict[str, Any] = {
        "HAS_KEY_MASK": key_mask_u8 is not None,
        "PACKED": sequences.packed,
        "RAGGED": sequences.ranges is not None,
        "enable_fp_fusion": False,
    }
    key_mask_stride = stride_of(key_mask_u8)
    operand_blocks = sequences.rows // BLOCK

    def new(*shape: int) -> torch.Tensor:
        return key.new_empty(shape, dtype=torch.float32)

    group = call.query.shape[1] // kv_heads
    scores = None
    if call.chooses_heavy_keys:
        scores = new((1 if sequences.packed else batch) * kv_heads, operand_blocks, BLOCK)

    def reduce_blocks(x: torch.Tensor, *shape: int, extrema: bool = False, squares: bool = False) -> torch.Tensor:
        parts = new((1 if sequences.packed else batch) * kv_heads, operand_blocks, *shape)
        scored = None if extrema else scores
        launch(
            block_statistics,
            (blocks * pairs,),
            x=x,
            key_mask=key_mask_u8,
            ranges=sequences.ranges,
            q_ranges=None if scored is None else q_sequences.ranges,
            parts=parts,
            query=None if scored is None else call.query,
            scores=scored,
            softmax_scale=call.scale,
            tokens=sequences.tokens,
            q_len=q_sequences.tokens,
            group=group,
            blocks=blocks,
            operand_blocks=operand_blocks,
            kv_heads=kv_heads,
            channels=x.shape[-1],
            **strides("", batch_strides(x, sequences)),
            **strides("query", (0, 0, 0, 0) if scored is None else batch_strides(call.query, q_sequences)),
            key_mask_stride=key_mask_stride,
            CHANNELS=shape[-1],
            EXTREMA=extrema,
            SQUARES=squares,
            LATE=scored is not None and call.late_keys > 0,
            num_warps=8 if squares else 4,  # a thread keeps its elements for the squares
            **shared,
        )
        return parts

    k_channels, v_channels = (padded_channels(x.shape[-1]) for x in (key, value))
    statistics = KVStatistics(
        new(batch, kv_heads, k_channels),
        new(batch, kv_heads, v_channels),
        new(batch, kv_heads, v_channels),
        new(batch, kv_heads),
        new(batch, kv_heads, k_channels) if recipe.equalize else None,
        None if scores is None else key.new_empty((batch, kv_heads, call.replaceable_keys), dtype=torch.int32),
        call.first_keys,
    )
    lengths: dict[str, Any] = {
        "tokens": sequences.tokens,
        "kv_heads": kv_heads,
        "operand_blocks": operand_blocks,
        "key_mask_stride": key_mask_stride,
    }
    if recipe.smooth_k or recipe.equalize or scores is not None:
        of_queries = None
        if recipe.equalize:
            of_queries = _query_squares(call, query_mask_u8, q_sequences, k_channels)
        parts = reduce_blocks(key, *((2,) if recipe.equalize else ()), k_channels, squares=recipe.equalize)
        launch(
            key_statistics,
            (pairs,),
            parts=parts,
            key_mask=key_mask_u8,
            ranges=sequences.ranges,
            mean=statistics.key_mean,
            equalizer=statistics.equalizer,
            query_squares=of_queries,
            scores=scores,
            chosen=statistics.chosen,
            group=group,
            **lengths,
            CHANNELS=k_channels,
            FIRST=call.first_keys,
            PLACES=call.replaceable_keys,
            LATE=call.late_keys > 0,
            **shared,
        )
    if not recipe.smooth_k:
        statistics.key_mean.zero_()
    parts = reduce_blocks(value, PARTS.value, v_channels, extrema=True)
    launch(
        value_statistics,
        (pairs,),
        parts=parts,
        key_mask=key_mask_u8,
        ranges=sequences.ranges,
        mean=statistics.value_mean,
        amax=statistics.value_amax,
        tensor_amax=statistics.value_tensor_amax,
        **lengths,
        CHANNELS=v_channels,
        SMOOTH=recipe.smooth_v,
        **shared,
    )
    return statistics


def _query_squares(call: Call, query_mask_u8: torch.Tensor | None, sequences: Sequences, channels: int) -> torch.Tensor:
    """Return the mean squares of the rows of Q that decide the equalizer: float32 (batch, q_heads, channels)."""
    query, batch = call.query, call.batch
    q_heads, head_dim = query.shape[1], query.shape[3]
    squares = query.new_empty((batch, q_heads, channels), dtype=torch.float32)
    launch(
        query_squares,
        (batch * q_heads,),
        query=query,
        query_mask=query_mask_u8,
        ranges=sequences.ranges,
        squares=squares,
        tokens=sequences.tokens,
        q_heads=q_heads,
        channels=head_dim,
        **strides("", batch_strides(query, sequences)),
        query_mask_stride=stride_of(query_mask_u8),
        CHANNELS=channels,
        HAS_QUERY_MASK=query_mask_u8 is not None,
        RAGGED=sequences.ranges is not None,
        SMOOTH=call.recipe.smooth_q,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return squares


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group"])
def block_statistics(
    x,
    key_mask,
    ranges,
    q_ranges,
    parts,
    query,
    scores,
    softmax_scale,
    tokens,
    q_len,
    group,
    blocks,
    operand_blocks,
    kv_heads,
    channels,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    query_stride_batch,
    query_stride_head,
    query_stride_token,
    query_stride_channel,
    key_mask_stride,
    CHANNELS: tl.constexpr,
    EXTREMA: tl.constexpr,
    SQUARES: tl.constexpr,
    LATE: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Reduce 128 tokens of one (batch, kv head) into (…, operand blocks, CHANNELS) sums, or (…, PARTS, CHANNELS).

    With SQUARES, sums of squares follow each block's sums: (…, operand blocks, 2, CHANNELS). With `scores`, which are
    float32 (…, operand blocks, 128), write the tokens' products with the mean of `query`: -inf for tokens that do not
    count.
    """
    block, pair = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    batch = pair // kv_heads
    start, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    part = operand_row(batch, pair % kv_heads, kv_heads, operand_blocks, operand_start // BLOCK_ROWS, PACKED) + block
    x += batch * stride_batch + pair % kv_heads * stride_head
    if HAS_KEY_MASK:
        key_mask += batch * key_mask_stride
    first = block * BLOCK_ROWS
    if first >= length:
        return
    total, largest, smallest, finite = reduce_block(
        x, key_mask, start, first, length, channels, stride_token, stride_channel, CHANNELS, HAS_KEY_MASK, HAS_KEY_MASK
    )
    if (first + BLOCK_ROWS > length) | (not all_true(is_finite(total))):
        total, largest, smallest, finite = reduce_block(
            x, key_mask, start, first, length, channels, stride_token, stride_channel, CHANNELS, HAS_KEY_MASK, True
        )
    channel = tl.arange(0, CHANNELS)
    if EXTREMA:
        into = parts + part * PARTS * CHANNELS + channel
        tl.store(into, total)
        tl.store(into + CHANNELS, largest)
        tl.store(into + 2 * CHANNELS, smallest)
        tl.store(into + 3 * CHANNELS, finite)
    elif SQUARES:
        squares, _largest, _smallest, _finite = reduce_block(
            x,
            key_mask,
            start,
            first,
            length,
            channels,
            stride_token,
            stride_channel,
            CHANNELS,
            HAS_KEY_MASK,
            True,
            True,
        )
        tl.store(parts + part * 2 * CHANNELS + channel, total)
        tl.store(parts + (part * 2 + 1) * CHANNELS + channel, squares)
    else:
        tl.store(parts + part * CHANNELS + channel, total)
    if scores is not None:
        q_start, q_len, _ = sequence_range(q_ranges, batch, q_len, RAGGED)
        query += batch * query_stride_batch + pair % kv_heads * group * query_stride_head
        query += tl.cast(q_start, tl.int64) * query_stride_token
        mean = mean_query(
            query, q_len, group, channels, query_stride_head, query_stride_token, query_stride_channel, CHANNELS, LATE
        )
        mean *= softmax_scale
        write_scores(
            scores + part * BLOCK_ROWS, mean, x, key_mask, start, first, length, channels, stride_token, stride_channel,
            CHANNELS, HAS_KEY_MASK,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group"])
def key_statistics(
    parts,
    key_mask,
    ranges,
    mean,
    equalizer,
    query_squares,
    scores,
    chosen,
    group,
    tokens,
    kv_heads,
    operand_blocks,
    key_mask_stride,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    PLACES: tl.constexpr,
    LATE: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Compute the mean of K of one (batch, kv head) from the sums of its blocks.

    Compute the equalizer too, if it is wanted, and choose heavy keys if there are `scores`.
    """
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // kv_heads, pair % kv_heads
    _, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    first_part = operand_row(batch, head, kv_heads, operand_blocks, operand_start // BLOCK_ROWS, PACKED)
    if HAS_KEY_MASK:
        key_mask += batch * key_mask_stride
    PARTS_OF_BLOCK: tl.constexpr = 1 if equalizer is None else 2
    stride: tl.constexpr = PARTS_OF_BLOCK * CHANNELS
    parts += first_part * stride
    used = tl.cdiv(length, BLOCK_ROWS)
    channel = tl.arange(0, CHANNELS)
    counts = tokens_of_groups(key_mask, used, length, HAS_KEY_MASK)
    groups = None
    if equalizer is not None:
        groups = quiet_groups(parts + CHANNELS, counts, used, stride, CHANNELS)
        counts = tl.where(groups, counts, 0.0)
    count = tl.sum(counts, 0)
    k_mean = mean_of_blocks(parts, count, used, stride, CHANNELS, groups)
    tl.store(mean + pair * CHANNELS + channel, k_mean)
    if equalizer is not None:
        k_square = mean_of_blocks(parts + CHANNELS, count, used, stride, CHANNELS, groups)
        q_square = tl.zeros((CHANNELS,), tl.float32)
        for member in range(group):
            q_square += tl.load(query_squares + (pair * group + member) * CHANNELS + channel)
        q_square /= group
        mean_square = k_mean * k_mean
        variance = tl.maximum(k_square - mean_square, mean_square * MIN_VARIANCE)
        some = (q_square > 0) & (k_square > 0) & (variance > 0)
        ratio = tl.where(some, tl.div_rn(variance, tl.where(some, q_square, 1.0)), 1.0)
        ratio = tl.minimum(tl.maximum(ratio, 2.0 ** (-4 * MAX_EQUALIZER)), 2.0 ** (4 * MAX_EQUALIZER))
        exponent = ((ratio.to(tl.int32, bitcast=True) >> 23) - 126 + 1) >> 2
        tl.store(equalizer + pair * CHANNELS + channel, ((exponent + 127) << 23).to(tl.float32, bitcast=True))
    if scores is not None:
        heaviest = choose_keys(scores + first_part * BLOCK_ROWS, length, FIRST, PLACES, LATE)
        tl.store(chosen + pair * PLACES + tl.arange(0, PLACES), heaviest)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def query_squares(
    query,
    query_mask,
    ranges,
    squares,
    tokens,
    q_heads,
    channels,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    query_mask_stride,
    CHANNELS: tl.constexpr,
    HAS_QUERY_MASK: tl.constexpr,
    RAGGED: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    """Compute the mean squares of 128 rows or fewer, at equal distances, of Q of one (batch, q head).

    With SMOOTH, squares are of the distances from the mean of these rows.
    """
    pair = tl.program_id(0).to(tl.int64)
    start, length, _ = sequence_range(ranges, pair // q_heads, tokens, RAGGED)
    query += pair // q_heads * stride_batch + pair % q_heads * stride_head + tl.cast(start, tl.int64) * stride_token
    step = tl.maximum(tl.cdiv(length, EQUALIZER_QUERIES), 1)
    rows = tl.cdiv(length, step)
    count = rows
    if HAS_QUERY_MASK:
        query_mask += pair // q_heads * query_mask_stride
        row = tl.arange(0, EQUALIZER_QUERIES)
        count = tl.sum((tl.load(query_mask + row * step, mask=row < rows, other=0) != 0).to(tl.int32), 0)
    total, _largest, _smallest, _finite = reduce_block(
        query,
        query_mask,
        0,
        0,
        rows,
        channels,
        step * stride_token,
        stride_channel,
        CHANNELS,
        HAS_QUERY_MASK,
        True,
        True,
        step,
    )
    divisor = tl.maximum(count, 1).to(tl.float32)
    square = tl.div_rn(total, tl.zeros_like(total) + divisor)
    square = tl.where(is_finite(square), square, 0.0)
    if SMOOTH:
        total, _largest, _smallest, _finite = reduce_block(
            query, query_mask, 0, 0, rows, channels, step * stride_token, stride_channel,
            CHANNELS, HAS_QUERY_MASK, True, False, step,
        )  # fmt: skip
        mean = tl.div_rn(total, tl.zeros_like(total) + divisor)
        square = tl.where(square > 0.0, tl.maximum(square - mean * mean, mean * mean * MIN_VARIANCE), 0.0)
    tl.store(squares + pair * CHANNELS + tl.arange(0, CHANNELS), square)


@triton.jit
def largest_magnitude(x, y):
    return tl.maximum(tl.abs(x), tl.abs(y))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def value_statistics(
    parts,
    key_mask,
    ranges,
    mean,
    amax,
    tensor_amax,
    tokens,
    kv_heads,
    operand_blocks,
    key_mask_stride,
    CHANNELS: tl.constexpr,
    SMOOTH: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Compute the mean and extrema of V of one (batch, kv head) from the statistics of its blocks."""
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // kv_heads, pair % kv_heads
    _, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    first_part = operand_row(batch, head, kv_heads, operand_blocks, operand_start // BLOCK_ROWS, PACKED)
    if HAS_KEY_MASK:
        key_mask += batch * key_mask_stride
    parts += first_part * PARTS * CHANNELS
    used = tl.cdiv(length, BLOCK_ROWS)
    row, channel = tl.arange(0, 32), tl.arange(0, CHANNELS)
    largest = tl.full((32, CHANNELS), float("-inf"), tl.float32)
    smallest = tl.full((32, CHANNELS), float("inf"), tl.float32)
    finite = tl.full((32, CHANNELS), 1.0, tl.float32)
    for first in range(0, used, 32):
        part = parts + ((first + row)[:, None] * PARTS + 1) * CHANNELS + channel[None, :]
        inside = (first + row < used)[:, None]
        largest = tl.maximum(largest, tl.load(part, mask=inside, other=float("-inf")))
        smallest = tl.minimum(smallest, tl.load(part + CHANNELS, mask=inside, other=float("inf")))
        finite = tl.minimum(finite, tl.load(part + 2 * CHANNELS, mask=inside, other=1.0))
    # Rounding is monotonic: the extrema of V - mean are the extrema of V, minus the mean.
    v_largest, v_smallest = tl.max(largest, 0), tl.min(smallest, 0)
    v_mean = tl.zeros((CHANNELS,), tl.float32)
    if SMOOTH:
        count = tl.sum(tokens_of_groups(key_mask, used, length, HAS_KEY_MASK), 0)
        v_mean = mean_of_blocks(parts, count, used, PARTS * CHANNELS, CHANNELS)
        v_mean = tl.where(
            tl.abs(v_mean) > largest_magnitude(v_largest - v_mean, v_smallest - v_mean) * MIN_MEAN, v_mean, 0.0
        )
    v_amax = tl.where(v_largest < v_smallest, 0.0, largest_magnitude(v_largest - v_mean, v_smallest - v_mean))
    tl.store(mean + pair * CHANNELS + channel, v_mean)
    tl.store(tensor_amax + pair, tl.max(v_amax, 0))
    tl.store(amax + pair * CHANNELS + channel, tl.where(tl.min(finite, 0) == 0.0, float("nan"), v_amax))
