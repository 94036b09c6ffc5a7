"""Exact attention of few queries over many keys, in the caller's 16 bits: programs divide the keys of a sequence.

The queries of all heads that share keys are rows of one program, so K and V are read once. Each program of a sequence
attends to a part of its keys; a second kernel merges the parts by their maxima and sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..runtime.hardware import multiprocessors
from ..spec.call import Call
from ..spec.layout import ceil_div, power_of_two, stride_of
from .common.launch import UNSPECIALIZED, launch, strides
from .common.scores import LOG2E, store_clamped
from .configs import splitkv_forward_config

MIN_ROWS = 16  # rows of an MMA instruction
PROGRAMS = {64: 2, 128: 1, 256: 1}  # programs that fit on a multiprocessor, by padded channels
MAX_PARTS = 64
FEWEST_TILES = 2  # tiles of a part
KEYS_AT_ONCE = tl.constexpr(1024)  # keys of a mask that a program reads at once


def attend(call: Call) -> torch.Tensor:
    """Return the output, 0 in rows without a key.

    Args:
        call: not empty, not packed, with at most a key-padding mask, in float16 or bfloat16; Q, K and V pass
            `layout.is_aligned`, and at most `registration.SPLIT_ROWS` queries that share keys.
    """
    output, _ = call.new_outputs()
    call = call.for_kernel()
    query, key, value, key_mask = call.query, call.key, call.value, call.mask.key_mask
    (batch, q_heads, q_len, head_dim), (kv_heads, kv_len), v_head_dim = query.shape, key.shape[1:3], value.shape[3]
    rows = q_heads // kv_heads * q_len
    channels, v_channels = max(16, power_of_two(head_dim)), max(16, power_of_two(v_head_dim))
    config = splitkv_forward_config(max(channels, v_channels), max(MIN_ROWS, power_of_two(rows)))
    tiles = ceil_div(kv_len, config.block_n)
    at_once = PROGRAMS[max(64, channels, v_channels)] * multiprocessors(query.get_device())
    tiles_of_part = ceil_div(tiles, parts_of(tiles, batch * kv_heads, at_once))
    parts = ceil_div(tiles, tiles_of_part)
    sums = maxima = None
    into, into_strides = output, output.stride()[:3]
    if parts > 1:
        into = query.new_empty((batch * kv_heads, rows, parts, v_channels), dtype=torch.float32)
        sums, maxima = (query.new_empty((batch * kv_heads, rows, parts), dtype=torch.float32) for _ in range(2))
        into_strides = (0, 0, 0)
    launch(
        attend_to_part,
        (parts, kv_heads, batch),
        query=query,
        key=TensorDescriptor.from_tensor(key, [1, 1, config.block_n, channels]),
        value=TensorDescriptor.from_tensor(value, [1, 1, config.block_n, v_channels]),
        output=into,
        sums=sums,
        maxima=maxima,
        key_mask=None if key_mask is None else key_mask.view(torch.uint8),
        q_len=q_len,
        kv_len=kv_len,
        group_rows=rows,
        part_tiles=tiles_of_part,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        causal_offset=call.causal_offset,
        softmax_scale=call.scale,
        **strides("query", query.stride()[:3]),
        **strides("output", into_strides),
        key_mask_stride=stride_of(key_mask),
        key_mask_stride_key=1 if key_mask is None else key_mask.stride(1),
        CHANNELS=channels,
        V_CHANNELS=v_channels,
        CAUSAL=call.is_causal,
        PADDED=key_mask is not None,
        WHOLE=parts == 1,
        **config.constants,
    )
    if parts > 1:
        launch(
            merge_parts,
            (rows, batch * kv_heads),
            parts=into,
            sums=sums,
            maxima=maxima,
            output=output,
            part_count=parts,
            q_len=q_len,
            kv_heads=kv_heads,
            v_head_dim=v_head_dim,
            **strides("output", output.stride()[:3]),
            V_CHANNELS=v_channels,
            PARTS=max(4, power_of_two(parts)),
            num_warps=4,
        )
    return output


def parts_of(tiles: int, sequences: int, programs: int) -> int:
    """Return into how many parts the keys of each (batch element, kv head) are divided.

    Args:
        tiles: the number of tiles of keys.
        sequences: number of pairs of batch element and kv head.
        programs: how many run at once.
    """
    wanted = max(1, programs // sequences)
    return max(1, min(wanted, tiles // FEWEST_TILES, MAX_PARTS))


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group_rows", "part_tiles"])
def attend_to_part(
    query,
    key,
    value,
    output,
    sums,
    maxima,
    key_mask,
    q_len,
    kv_len,
    group_rows,
    part_tiles,
    head_dim,
    v_head_dim,
    causal_offset,
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
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Attend with all queries of one (batch, kv head) to one part of the keys.

    With WHOLE there is one part, and `output` is the call's output; otherwise `output` is float32 (batch · kv heads,
    rows, parts, V_CHANNELS), and `sums` and `maxima` are written as well.
    """
    part, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = kv_len
    if CAUSAL:
        columns = tl.minimum(columns, q_len + causal_offset)
    first = part * part_tiles
    end = tl.minimum(first + part_tiles, tl.cdiv(columns, BLOCK_N))
    if PADDED:
        key_mask += batch.to(tl.int64) * key_mask_stride
        first, end = existing_tiles(key_mask, key_mask_stride_key, first, end, kv_len, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    inside = row < group_rows
    head = (kv_head * (group_rows // q_len) + row // q_len).to(tl.int64)
    token = (row % q_len).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    at = query + batch.to(tl.int64) * query_stride_batch + head * query_stride_head + token * query_stride_token
    q = tl.load(at[:, None] + channel[None, :], mask=inside[:, None] & (channel < head_dim)[None, :], other=0.0)
    scale = softmax_scale * LOG2E
    acc = tl.zeros((BLOCK_M, V_CHANNELS), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for tile in range(first, end):
        start = tile * BLOCK_N
        column = start + tl.arange(0, BLOCK_N)
        k = key.load([batch, kv_head, start, 0]).reshape(BLOCK_N, CHANNELS)
        x = tl.dot(q, k.T) * scale
        exists = column < kv_len
        if PADDED:
            exists = exists & (tl.load(key_mask + column * key_mask_stride_key, mask=exists, other=0) != 0)
        allowed = exists[None, :]
        if CAUSAL:
            allowed = allowed & (column[None, :] <= token[:, None] + causal_offset)
        x = tl.where(allowed, x, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, 1))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - finite_max)
        p = tl.exp2(x - finite_max[:, None])
        row_sum = row_sum * decay + tl.sum(p, 1)
        v = value.load([batch, kv_head, start, 0]).reshape(BLOCK_N, V_CHANNELS)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
        row_max = new_max
    channel = tl.arange(0, V_CHANNELS)
    if WHOLE:
        acc = acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
        into = output + batch.to(tl.int64) * output_stride_batch + head * output_stride_head
        into = (into + token * output_stride_token)[:, None] + channel[None, :]
        store_clamped(into, acc, inside[:, None] & (channel < v_head_dim)[None, :])
    else:
        pair = (batch * tl.num_programs(1) + kv_head).to(tl.int64)
        place = (pair * group_rows + row) * tl.num_programs(0) + part
        tl.store(output + place[:, None] * V_CHANNELS + channel[None, :], acc, mask=inside[:, None])
        tl.store(sums + place, row_sum, mask=inside)
        tl.store(maxima + place, row_max, mask=inside)


@triton.jit
def existing_tiles(key_mask, stride_key, first, end, kv_len, BLOCK_N: tl.constexpr):
    """Return the range of tiles, of tiles first…end - 1, from the first existing key to the last."""
    first_key, end_key = kv_len, 0
    for start in range(first * BLOCK_N, end * BLOCK_N, KEYS_AT_ONCE):
        column = start + tl.arange(0, KEYS_AT_ONCE)
        inside = column < tl.minimum(end * BLOCK_N, kv_len)
        exists = tl.load(key_mask + column * stride_key, mask=inside, other=0) != 0
        first_key = tl.minimum(first_key, tl.min(tl.where(exists, column, kv_len), 0))
        end_key = tl.maximum(end_key, tl.max(tl.where(exists, column + 1, 0), 0))
    return first_key // BLOCK_N, tl.cdiv(end_key, BLOCK_N)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "part_count"])
def merge_parts(
    parts,
    sums,
    maxima,
    output,
    part_count,
    q_len,
    kv_heads,
    v_head_dim,
    output_stride_batch,
    output_stride_head,
    output_stride_token,
    V_CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the parts of one row, a query of one of the heads that share a (batch, kv head)."""
    row, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part, channel = tl.arange(0, PARTS), tl.arange(0, V_CHANNELS)
    exists = part < part_count
    place = (pair * tl.num_programs(0) + row) * part_count + part
    maximum = tl.load(maxima + place, mask=exists, other=float("-inf"))
    largest = tl.max(maximum, 0)
    weight = tl.exp2(maximum - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(tl.load(sums + place, mask=exists, other=0.0) * weight, 0)
    acc = tl.load(parts + place[:, None] * V_CHANNELS + channel[None, :], mask=exists[:, None], other=0.0)
    acc = tl.sum(acc * (weight / tl.where(total == 0.0, 1.0, total))[:, None], 0)
    group = tl.num_programs(0) // q_len
    into = output + (pair // kv_heads) * output_stride_batch
    into += (pair % kv_heads * group + row // q_len) * output_stride_head + (row % q_len) * output_stride_token
    store_clamped(into + channel, acc, channel < v_head_dim)
