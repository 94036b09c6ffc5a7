"""The kernel of dQ: a program holds queries and walks over the keys that they see."""

import triton
import triton.language as tl

from .common.int8 import round_to_byte
from .common.launch import UNSPECIALIZED
from .common.padding import key_exists, key_tiles
from .common.scores import LOG2E
from .common.sequences import operand_row, sequence_range
from .common.tiles import as_operand, load_key, load_key_scale, load_value, optimization_barrier
from .common.weights import weights_of_queries
from .int8_rows import CODE_MAX, codes_per_unit, max_magnitude


@triton.jit
def add_keys(
    q,
    q_scale,
    do,
    row_lse,
    row_delta,
    dq,
    row,
    operands,
    key_mask,
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
    """Return dq after adding one tile of keys.

    Args:
        q, q_scale, do, row_lse, row_delta, dq: of the rows; `row` are their indices in their sequence.
        operands: (key, key_scale, key_operand, value, head_index, kv_first, kv_operand_start, kv_rows): those of the
            kernel, the index of the KV head, the sequence's first row and first token, and the number of tokens.
        key_mask, kv_len, causal_offset: which keys exist, and causality; read with MASKED.
        tile: the tile's number.
    """
    key, key_scale, key_operand, value, head_index, kv_first, kv_operand_start, kv_rows = operands
    KEY_BLOCKS: tl.constexpr = (BLOCK_N + 63) // 64
    SHAPE: tl.constexpr = (BLOCK_M, KEY_BLOCKS, BLOCK_N // 8 // KEY_BLOCKS, 4, 2)
    first = kv_first + tile * BLOCK_N
    k_scale = load_key_scale(key_scale, first, BLOCK_N)
    s = tl.dot(q, load_key(key, first, BLOCK_N, CHANNELS, TMA).T)
    dp = tl.dot(do, load_key(value, first, BLOCK_N, V_CHANNELS, TMA).T)
    ds = weights_of_queries(s, q_scale, k_scale, row_lse) * (dp - row_delta[:, None])
    if MASKED:
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        allowed = key_exists(column, kv_len, key_mask, PADDED)[None, :]
        if CAUSAL:
            allowed = allowed & (column[None, :] <= row[:, None] + causal_offset)
        ds = tl.where(allowed, ds, 0.0)
    if INT8:
        # dS takes K's scales, which vary along the sum, so they cannot be factored out: one scale per thread and 64
        # keys.
        by_thread = tl.reshape(ds, SHAPE)
        thread_max = max_magnitude(max_magnitude(by_thread, 4), 2) * k_scale[None, :, :]
        ds_max = max_magnitude(max_magnitude(thread_max, 2), 1)
        factor = codes_per_unit(ds_max)[:, None, None] * k_scale[None, :, :]
        codes = round_to_byte(as_operand(tl.reshape(by_thread * factor[:, :, None, :, None], (BLOCK_M, BLOCK_N))))
        k = load_value(
            key_operand, head_index, kv_operand_start + tile * BLOCK_N, kv_rows, BLOCK_N, CHANNELS, True, TMA
        )
        return dq + tl.dot(codes, k).to(tl.float32) * (ds_max * (1.0 / CODE_MAX))[:, None]
    else:
        return tl.dot(ds.to(do.dtype), load_key(key_operand, first, BLOCK_N, CHANNELS, TMA), dq)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def int8_bwd_dq(
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
    entries,
    entries_stride_batch,
    entries_stride_head,
    entries_stride_row,
    key_mask,
    spans,
    key_mask_stride,
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
    LIST_M: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute dQ of BLOCK_M rows of one (batch, q head); LIST_M rows share `entries` of a block list; 0: no list."""
    # Later rows attend to more keys: start with later rows, so that short programs fill the gaps at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q_heads = tl.num_programs(1)
    kv_heads = q_heads // group
    q_start, q_len, q_operand_start = sequence_range(q_ranges, batch, q_len, RAGGED)
    _, kv_len, kv_operand_start = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    if block * BLOCK_M < q_len:
        q_row = operand_row(batch, head, q_heads, q_rows, q_operand_start, PACKED)
        q_row += block * BLOCK_M + tl.arange(0, BLOCK_M)
        channel, v_channel = tl.arange(0, CHANNELS), tl.arange(0, V_CHANNELS)
        q = tl.load(query + q_row[:, None] * CHANNELS + channel[None, :])
        q_scale = tl.load(query_scale + q_row) * (softmax_scale * LOG2E)
        row_lse, row_delta = tl.load(lse + q_row), tl.load(delta + q_row)
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        token = (q_start + row).to(tl.int64)
        has_key = (row < q_len) & (row_lse < float("inf"))
        at = gradient + batch * gradient_stride_batch + head * gradient_stride_head
        at += token[:, None] * gradient_stride_token + v_channel.to(tl.int64)[None, :] * gradient_stride_channel
        do = tl.load(at, mask=has_key[:, None] & (v_channel < v_head_dim)[None, :], other=0.0)
        kv_first = operand_row(batch, head // group, kv_heads, kv_rows, kv_operand_start, PACKED)
        head_index = operand_row(batch, head // group, kv_heads, 1, 0, PACKED)
        if PADDED:
            key_mask += batch * key_mask_stride
        operands = (key, key_scale, key_operand, value, head_index, kv_first, kv_operand_start, kv_rows)
        dq = tl.zeros((BLOCK_M, CHANNELS), tl.float32)

        if LIST_M > 0:
            entries += batch * entries_stride_batch + head * entries_stride_head
            entries += (block // (LIST_M // BLOCK_M)) * entries_stride_row
            unmasked, listed = tl.load(entries), tl.load(entries + 1)
            tile = tl.load(entries + 2)
            for index in range(0, unmasked):
                following = tl.load(entries + 3 + index)  # loaded a tile ahead: loads of K and V wait for it
                dq = add_keys(
                    q, q_scale, do, row_lse, row_delta, dq, row, operands, key_mask, kv_len, tile, causal_offset,
                    CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, INT8, CAUSAL, PADDED, False, TMA,
                )  # fmt: skip
                tile = following
            for index in range(unmasked, listed):
                dq = add_keys(
                    q, q_scale, do, row_lse, row_delta, dq, row, operands, key_mask, kv_len,
                    tl.load(entries + 2 + index), causal_offset,
                    CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, INT8, CAUSAL, PADDED, True, TMA,
                )  # fmt: skip
        else:
            begin, full_begin, full_end, columns = key_tiles(
                spans, batch, spans_stride, kv_len, block, causal_offset, BLOCK_M, BLOCK_N, CAUSAL, PADDED
            )
            before = full_begin - begin
            for tile in range(full_begin, full_end):
                dq = add_keys(
                    q, q_scale, do, row_lse, row_delta, dq, row, operands, key_mask, kv_len, tile, causal_offset,
                    CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, INT8, CAUSAL, PADDED, False, TMA,
                )  # fmt: skip
            for index in range(0, before + tl.cdiv(columns, BLOCK_N) - full_end):
                tile = index + tl.where(index < before, begin, full_end - before)
                dq = add_keys(
                    q, q_scale, do, row_lse, row_delta, dq, row, operands, key_mask, kv_len, tile, causal_offset,
                    CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, INT8, CAUSAL, PADDED, True, TMA,
                )  # fmt: skip

        row = optimization_barrier(block * BLOCK_M) + tl.arange(0, BLOCK_M)
        token = (q_start + row).to(tl.int64)
        into = query_gradient + batch * stride_batch + head * stride_head + token[:, None] * stride_token
        into += channel[None, :] * stride_channel
        inside = (row < q_len)[:, None] & (channel < head_dim)[None, :]
        tl.store(into, (dq * softmax_scale).to(query_gradient.dtype.element_ty), mask=inside)
