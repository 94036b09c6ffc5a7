"""Exact attention with key-padding masks by two kernels: one takes right padding as lengths, this file's all others.

Batch elements whose keys come first, as right padding leaves them, are only counted, for a kernel that follows on the
GPU. There is one launch, because every such call waits for it: no list of tiles is made unless a program needs it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dispatch.kernels import AttendToPrefix
from ..runtime.hardware import multiprocessors
from ..spec.call import Call
from ..spec.layout import ceil_div, power_of_two, round_up, stride_of
from .common.launch import UNSPECIALIZED, launch, strides
from .common.scores import LOG2E, store_clamped
from .configs import nonprefix_forward_config
from .masked_forward import LISTED_ALONE, WORD, attend_tile, pack_rows

PROGRAMS = 2
"""Programs that a multiprocessor has room for; few, because most programs only find that they have no work."""
LEAST_LISTED = 512  # keys that are read at once
COUNTED = 512, 2048
"""Fewest and most words of four keys that are counted at once: each thread has 64 bytes in flight."""
VECTOR = tl.constexpr(16)  # bytes that a thread loads at once
SHARED_PERCENT = 100
"""Share of L1 that is shared memory: after a launch with the driver's choice, FlashAttention 3 takes 3 % longer at
head_dim 64, where it keeps some of its registers in L1."""
SCHEDULE_PARTS, SCHEDULE_MULTIPLE = 3, 4  # parts and multiple of `kernels.AttendToPrefix`'s schedule


def attend_nonprefix(call: Call, attend_to_prefix: AttendToPrefix, row_blocks: int = 0) -> torch.Tensor:
    """Return the output, 0 in rows without a key.

    Args:
        call: as in `masked_forward.attend`, with a key-padding mask and without causality.
        attend_to_prefix: the kernel for batch elements whose existing keys come first.
        row_blocks: number of that kernel's blocks of rows in one batch element, if it takes a schedule; else 0.
    """
    output, _ = call.new_outputs()
    call = call.for_kernel()
    query, key, value, key_mask = call.query, call.key, call.value, call.mask.key_mask
    assert key_mask is not None
    key_mask = key_mask.view(torch.uint8)
    (batch, q_heads, q_len, head_dim), kv_len, v_head_dim = query.shape, call.kv_len, value.shape[3]
    channels, v_channels = max(64, power_of_two(head_dim)), max(64, power_of_two(v_head_dim))
    config = nonprefix_forward_config(max(channels, v_channels))
    width = min(LISTED_ALONE, max(LEAST_LISTED, power_of_two(kv_len)))
    blocks = ceil_div(q_len, config.block_m)
    programs = min(ceil_div(PROGRAMS * multiprocessors(query.get_device()), batch), blocks * q_heads)
    fewest, most = COUNTED
    counted = min(most, max(fewest, power_of_two(ceil_div(kv_len, 4))))
    words = ceil_div(kv_len, width) * (width // WORD.value)
    places = 2 + ceil_div(kv_len, config.block_n)
    bits = query.new_empty((batch, programs, words), dtype=torch.int32)
    entries = query.new_empty((batch, programs, places), dtype=torch.int32)
    kv_lengths = query.new_empty((batch,), dtype=torch.int32)
    q_lengths = None if row_blocks else query.new_empty((batch,), dtype=torch.int32)
    schedule = query.new_empty((schedule_size(batch),), dtype=torch.int32) if row_blocks else None
    launch(
        nonprefix_forward,
        (programs, batch),
        query=query,
        key=TensorDescriptor.from_tensor(key, [1, 1, config.block_n, channels]),
        value=TensorDescriptor.from_tensor(value, [1, 1, config.block_n, v_channels]),
        output=output,
        key_mask=key_mask,
        bits=bits,
        entries=entries,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        schedule=schedule,
        row_blocks=row_blocks,
        part_size=schedule_size(batch) // SCHEDULE_PARTS,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        blocks=blocks,
        group=q_heads // key.shape[1],
        words=words,
        places=places,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        softmax_scale=call.scale,
        **strides("query", query.stride()[:3]),
        **strides("output", output.stride()[:3]),
        key_mask_stride=stride_of(key_mask),
        key_mask_stride_key=key_mask.stride(1),
        CHANNELS=channels,
        V_CHANNELS=v_channels,
        WIDTH=width,
        BITS=WORD.value,
        COUNTED=counted if key_mask.stride(1) == 1 else 0,
        shared_percent=SHARED_PERCENT,
        **config.constants,
    )
    attend_to_prefix(call, q_lengths, kv_lengths, schedule, output)
    return output


def schedule_size(batch: int) -> int:
    """Return the size of `kernels.AttendToPrefix`'s schedule."""
    return SCHEDULE_PARTS * round_up(batch, SCHEDULE_MULTIPLE) + 1


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group", "words", "places", "row_blocks", "part_size"])
def nonprefix_forward(
    query,
    key,
    value,
    output,
    key_mask,
    bits,
    entries,
    q_lengths,
    kv_lengths,
    schedule,
    row_blocks,
    part_size,
    q_len,
    kv_len,
    q_heads,
    blocks,
    group,
    words,
    places,
    head_dim,
    v_head_dim,
    softmax_scale,
    query_stride_batch,
    query_stride_head,
    query_stride_token,
    output_stride_batch,
    output_stride_head,
    output_stride_token,
    key_mask_stride,
    key_mask_stride_key,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Attend in one batch element unless its keys come first; write the lengths, or the schedule, where they do.

    Each program has its own `bits` and `entries`: as in `masked_forward.pack_bool_mask`, for one row of a mask. COUNTED
    is the width for `count_adjacent`, or 0 if the bytes of a mask are not adjacent.
    """
    part, batch = tl.program_id(0), tl.program_id(1)
    base = key_mask + batch.to(tl.int64) * key_mask_stride
    if COUNTED != 0:
        count, end = count_adjacent(base, kv_len, COUNTED)
    else:
        count, end = count_apart(base, kv_len, key_mask_stride_key, WIDTH)
    come_first = (count == end) & (count != 0)
    if part == 0:
        tl.store(kv_lengths + batch, tl.where(come_first, count, 0))
        if schedule is None:
            tl.store(q_lengths + batch, tl.where(come_first, q_len, 0))
        else:
            tl.store(schedule + batch, 1)
            tl.store(schedule + part_size + batch, tl.where(come_first, row_blocks, 0))
            tl.store(schedule + 2 * part_size + batch, batch)
            if batch == 0:
                tl.store(schedule + 3 * part_size, 0)
    if come_first:
        return
    program = batch.to(tl.int64) * tl.num_programs(0) + part
    bits += program * words
    entries += program * places
    first_row = tl.arange(0, 1)
    pack_rows(
        base + first_row[:, None], bits + first_row[:, None], entries, first_row, 1, kv_len, 0, key_mask_stride_key,
        1, BLOCK_N, WIDTH, BITS, False,
    )  # fmt: skip
    tl.debug_barrier()  # threads read what other threads listed
    listed = tl.load(entries)
    scale = softmax_scale * LOG2E
    for item in range(part, q_heads * blocks, tl.num_programs(0)):
        head, block = item // blocks, item % blocks
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        token, channel = row.to(tl.int64), tl.arange(0, CHANNELS)
        at = query + batch.to(tl.int64) * query_stride_batch + head.to(tl.int64) * query_stride_head
        at += token[:, None] * query_stride_token + channel[None, :]
        q = tl.load(at, mask=(row < q_len)[:, None] & (channel < head_dim)[None, :], other=0.0)
        acc = tl.zeros((BLOCK_M, V_CHANNELS), tl.float32)
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
        entry = tl.load(entries + 1)
        for index in range(0, listed):
            following = tl.load(entries + 2 + index)  # loaded a tile ahead: loads of K and V wait for it
            row_max, row_sum, acc = attend_tile(
                entry // 2 * BLOCK_N, entry % 2, q, key, value, bits, bits, batch, head // group, 0, 0, 0, scale,
                row, q_len, kv_len, 0, 0, row_max, row_sum, acc,
                CHANNELS, V_CHANNELS, BLOCK_N, False, "keys", 1, True,
            )  # fmt: skip
            entry = following
        acc = acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
        channel = tl.arange(0, V_CHANNELS)
        into = output + batch.to(tl.int64) * output_stride_batch + head.to(tl.int64) * output_stride_head
        into += token[:, None] * output_stride_token + channel[None, :]
        store_clamped(into, acc, (row < q_len)[:, None] & (channel < v_head_dim)[None, :])


@triton.jit
def count_adjacent(base, kv_len, WIDTH: tl.constexpr):
    """Count the bytes from `base` on that are not 0, and find the place after the last such byte: WIDTH words at once.

    Every program waits for this, so it loads whole vectors, and single bytes where a vector would cross the ends.
    """
    first = (VECTOR - base.to(tl.int64) % VECTOR) % VECTOR
    first = tl.minimum(first.to(tl.int32), kv_len)
    whole = (kv_len - first) // VECTOR * VECTOR
    edge = tl.arange(0, 2 * VECTOR)
    column = tl.where(edge < VECTOR, edge, first + whole + edge - VECTOR)
    inside = tl.where(edge < VECTOR, edge < first, column < kv_len)
    exists = tl.load(base + column, mask=inside, other=0) != 0
    lane = tl.arange(0, WIDTH)
    words = tl.multiple_of((base + first).to(tl.pointer_type(tl.uint32)), VECTOR)
    counts, ends = tl.zeros((WIDTH,), tl.int32), tl.zeros((WIDTH,), tl.int32)
    for start in range(0, whole, 4 * WIDTH):
        word = tl.load(words + start // 4 + lane, mask=start + lane // 4 * VECTOR < whole, other=0)
        word = (((word & 0x7F7F7F7F) + 0x7F7F7F7F) | word) & 0x80808080  # the highest bit of bytes that are not 0
        counts += (((word >> 7) * 0x01010101) >> 24).to(tl.int32)
        length = tl.where(word >> 16 == 0, tl.where(word >> 8 == 0, 1, 2), tl.where(word >> 24 == 0, 3, 4))
        ends = tl.where(word == 0, ends, first + start + 4 * lane + length)
    count, last = tl.reduce((counts, ends), 0, _sum_and_maximum)
    few, last_of_few = tl.reduce((exists.to(tl.int32), tl.where(exists, column + 1, 0)), 0, _sum_and_maximum)
    return count + few, tl.maximum(last, last_of_few)


@triton.jit
def count_apart(base, kv_len, stride, WIDTH: tl.constexpr):
    """Compute `count_adjacent` for bytes that are not adjacent."""
    lane = tl.arange(0, WIDTH)
    counts, ends = tl.zeros((WIDTH,), tl.int32), tl.zeros((WIDTH,), tl.int32)
    for start in range(0, kv_len, WIDTH):
        column = start + lane
        exists = tl.load(base + column.to(tl.int64) * stride, mask=column < kv_len, other=0) != 0
        counts += exists.to(tl.int32)
        ends = tl.where(exists, column + 1, ends)
    return tl.reduce((counts, ends), 0, _sum_and_maximum)


@triton.jit
def _sum_and_maximum(count, end, other_count, other_end):
    return count + other_count, tl.maximum(end, other_end)
