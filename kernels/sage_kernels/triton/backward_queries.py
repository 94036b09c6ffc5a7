"""dQ: a program holds queries, and walks over the keys that they see."""

import triton
import triton.language as tl

from ..language.int8 import round_to_byte
from ..language.launch import UNSPECIALIZED
from ..language.padding import key_exists, key_tiles
from ..language.scores import LOG2E
from ..language.sequences import operand_row, sequence_range
from ..language.tiles import as_operand, load_key, load_key_scale, load_value, opaque
from ..language.weights import weights_of_queries
from .byte_rows import FULL, codes_per_unit, largest


@triton.jit
def add_keys(
    q,
    q_scale,
    do,
    row_lse,
    row_delta,
    dq,
    query,
    key,
    key_scale,
    key_operand,
    value,
    valid,
    of_head,
    kv_first,
    kv_operand_start,
    kv_rows,
    kv_len,
    tile,
    causal_offset,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INT8: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """dq with what a tile of keys adds; `query` are the rows' indices."""
    KEY_BLOCKS: tl.constexpr = (BLOCK_N + 63) // 64
    SHAPE: tl.constexpr = (BLOCK_M, KEY_BLOCKS, BLOCK_N // 8 // KEY_BLOCKS, 4, 2)
    first = kv_first + tile * BLOCK_N
    k_scale = load_key_scale(key_scale, first, BLOCK_N)
    s = tl.dot(q, load_key(key, first, BLOCK_N, CHANNELS, TMA).T)
    dp = tl.dot(do, load_key(value, first, BLOCK_N, V_CHANNELS, TMA).T)
    ds = weights_of_queries(s, q_scale, k_scale, row_lse) * (dp - row_delta[:, None])
    if MASKED:
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        allowed = key_exists(column, kv_len, valid, PADDED)[None, :]
        if CAUSAL:
            allowed = allowed & (column[None, :] <= query[:, None] + causal_offset)
        ds = tl.where(allowed, ds, 0.0)
    if INT8:
        # dS times K's scales, which lie along the sum: one a thread and 64 keys.
        by_thread = tl.reshape(ds, SHAPE)
        of_thread = largest(largest(by_thread, 4), 2) * k_scale[None, :, :]
        ds_max = largest(largest(of_thread, 2), 1)
        factor = codes_per_unit(ds_max)[:, None, None] * k_scale[None, :, :]
        codes = round_to_byte(as_operand(tl.reshape(by_thread * factor[:, :, None, :, None], (BLOCK_M, BLOCK_N))))
        k = load_value(key_operand, of_head, kv_operand_start + tile * BLOCK_N, kv_rows, BLOCK_N, CHANNELS, True, TMA)
        return dq + tl.dot(codes, k).to(tl.float32) * (ds_max * (1.0 / FULL))[:, None]
    else:
        return tl.dot(ds.to(do.dtype), load_key(key_operand, first, BLOCK_N, CHANNELS, TMA), dq)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def int8_backward_query(
    query,
    query_scale,
    gradient,
    key,
    key_scale,
    key_operand,
    value,
    query_gradient,
    lse,
    delta,
    valid,
    spans,
    valid_stride,
    spans_stride,
    q_ranges,
    kv_ranges,
    q_len,
    kv_len,
    q_rows,
    kv_rows,
    group,
    causal_offset,
    softmax_scale,
    head_dim,
    v_head_dim,
    gradient_stride_batch,
    gradient_stride_head,
    gradient_stride_token,
    gradient_stride_channel,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INT8: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    TMA: tl.constexpr,
):
    """dQ of BLOCK_M rows of one (batch, q head)."""
    # Later rows have more keys to attend to: begin with those, and end with what fills the gaps.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q_heads = tl.num_programs(1)
    kv_heads = q_heads // group
    q_start, q_len, q_operand_start = sequence_range(q_ranges, batch, q_len, RAGGED)
    _, kv_len, kv_operand_start = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    if block * BLOCK_M < q_len:
        row = operand_row(batch, head, q_heads, q_rows, q_operand_start, PACKED)
        row += block * BLOCK_M + tl.arange(0, BLOCK_M)
        channel, v_channel = tl.arange(0, CHANNELS), tl.arange(0, V_CHANNELS)
        q = tl.load(query + row[:, None] * CHANNELS + channel[None, :])
        q_scale = tl.load(query_scale + row) * (softmax_scale * LOG2E)
        row_lse, row_delta = tl.load(lse + row), tl.load(delta + row)
        index = block * BLOCK_M + tl.arange(0, BLOCK_M)
        token = (q_start + index).to(tl.int64)
        has_key = (index < q_len) & (row_lse < float("inf"))
        at = gradient + batch * gradient_stride_batch + head * gradient_stride_head
        at += token[:, None] * gradient_stride_token + v_channel.to(tl.int64)[None, :] * gradient_stride_channel
        do = tl.load(at, mask=has_key[:, None] & (v_channel < v_head_dim)[None, :], other=0.0)
        kv_first = operand_row(batch, head // group, kv_heads, kv_rows, kv_operand_start, PACKED)
        of_head = operand_row(batch, head // group, kv_heads, 1, 0, PACKED)
        if PADDED:
            valid += batch * valid_stride
        dq = tl.zeros((BLOCK_M, CHANNELS), tl.float32)

        begin, full_begin, full_end, end = key_tiles(
            spans, batch, spans_stride, kv_len, block * BLOCK_M, causal_offset, BLOCK_M, BLOCK_N, CAUSAL, PADDED
        )
        before = full_begin - begin
        for tile in range(full_begin, full_end):
            dq = add_keys(
                q, q_scale, do, row_lse, row_delta, dq, index, key, key_scale, key_operand, value, valid, of_head,
                kv_first, kv_operand_start, kv_rows, kv_len, tile, causal_offset, CHANNELS, V_CHANNELS, BLOCK_M,
                BLOCK_N, INT8, CAUSAL, PADDED, False, TMA,
            )  # fmt: skip
        for masked in range(0, before + end - full_end):
            tile = masked + tl.where(masked < before, begin, full_end - before)
            dq = add_keys(
                q, q_scale, do, row_lse, row_delta, dq, index, key, key_scale, key_operand, value, valid, of_head,
                kv_first, kv_operand_start, kv_rows, kv_len, tile, causal_offset, CHANNELS, V_CHANNELS, BLOCK_M,
                BLOCK_N, INT8, CAUSAL, PADDED, True, TMA,
            )  # fmt: skip

        index = opaque(block * BLOCK_M) + tl.arange(0, BLOCK_M)
        token = (q_start + index).to(tl.int64)
        into = query_gradient + batch * stride_batch + head * stride_head + token[:, None] * stride_token
        into += channel[None, :] * stride_channel
        inside = (index < q_len)[:, None] & (channel < head_dim)[None, :]
        tl.store(into, (dq * softmax_scale).to(query_gradient.dtype.element_ty), mask=inside)
