"""The kernel of dK and dV: a program holds keys and walks over the queries that see them.

It computes Sᵀ = K·Qᵀ, so that Pᵀ and dSᵀ are already in registers, as left operands of the next products must be. A key
that does not exist changes only its own rows of dK and dV, which are zeroed at the end; so tiles need no mask except
the causal mask.
"""

import triton
import triton.language as tl

from .common.launch import UNSPECIALIZED
from .common.padding import key_exists
from .common.scores import LOG2E
from .common.sequences import operand_row, sequence_range
from .common.tiles import load_key, load_key_scale, load_value, optimization_barrier
from .common.weights import weights_of_keys
from .int8_rows import CODE_MAX, max_magnitude, quantize_rows


@triton.jit
def add_queries(
    k,
    k_scale,
    v,
    dk,
    dv,
    first_key,
    operands,
    gradient_codes,
    gradient_scale,
    tile,
    causal_offset,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INT8: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return (dk, dv) after adding one tile of queries; its scores are (BLOCK_N keys, BLOCK_M queries).

    Args:
        k, k_scale, v, dk, dv: of the keys from `first_key` on.
        operands: (query, query_scale, query_operand, gradient, lse, delta, head_index, q_first, q_operand_start,
            q_rows): those of the kernel, the index of the head, the sequence's first row and first token, and the
            number of tokens.
        gradient_codes, gradient_scale: dO in INT8; read with INT8.
        tile: the tile's number.
        causal_offset: as in the kernel; read with MASKED.
    """
    query, query_scale, query_operand, gradient, lse, delta, head_index, q_first, q_operand_start, q_rows = operands
    first = q_first + tile * BLOCK_M
    q_row = first + tl.arange(0, BLOCK_M)
    s = tl.dot(k, load_key(query, first, BLOCK_M, CHANNELS, TMA).T)
    do = load_key(gradient, first, BLOCK_M, V_CHANNELS, TMA)
    dp = tl.dot(v, do.T)
    q_scale = tl.load(query_scale + q_row)
    p = weights_of_keys(s, k_scale, q_scale, tl.load(lse + q_row))
    if MASKED:
        column = first_key + tl.arange(0, BLOCK_N)
        allowed = column[:, None] <= (tile * BLOCK_M + tl.arange(0, BLOCK_M) + causal_offset)[None, :]
        p = tl.where(allowed, p, 0.0)
    row_delta = tl.load(delta + q_row)
    if INT8:  # dS takes Q's scales, which vary along the sum, so they cannot be factored out
        dp *= q_scale[None, :]
        row_delta *= q_scale
    ds = p * (dp - row_delta[None, :])
    if MASKED:
        ds = tl.where(allowed, ds, 0.0)
    if INT8:
        p_max, ds_max = max_magnitude(p, 1), max_magnitude(ds, 1)
        p_codes, ds_codes = quantize_rows(p, p_max), quantize_rows(ds, ds_max)
        position = q_operand_start + tile * BLOCK_M
        do_codes = load_value(gradient_codes, head_index, position, q_rows, BLOCK_M, V_CHANNELS, True, TMA)
        p_max *= tl.load(gradient_scale + first // 64) * (1.0 / CODE_MAX)
        dv += tl.dot(p_codes, do_codes).to(tl.float32) * p_max[:, None]
        q_codes = load_value(query_operand, head_index, position, q_rows, BLOCK_M, CHANNELS, True, TMA)
        dk += tl.dot(ds_codes, q_codes).to(tl.float32) * (ds_max * (1.0 / CODE_MAX))[:, None]
    else:
        # Make both operands before either product: registers of the second operand cannot be written while a matrix
        # instruction is in flight.
        p, ds = p.to(do.dtype), ds.to(do.dtype)
        q = load_key(query_operand, first, BLOCK_M, CHANNELS, TMA)
        dv = tl.dot(p, do, dv)
        dk = tl.dot(ds, q, dk)
    return dk, dv


@triton.jit
def locate_keys(first_key, kv_start, kv_len, key_mask, BLOCK_N: tl.constexpr, PADDED: tl.constexpr):
    """Return (index, token in the caller's tensors, whether inside the sequence, whether it exists) of BLOCK_N keys."""
    column = first_key + tl.arange(0, BLOCK_N)
    exists = key_exists(column, kv_len, key_mask, PADDED)
    return column, (kv_start + column).to(tl.int64), column < kv_len, exists


@triton.jit(do_not_specialize=UNSPECIALIZED)
def int8_bwd_dkdv(
    key,
    key_scale,
    value,
    query,
    query_scale,
    query_operand,
    gradient,
    gradient_codes,
    gradient_scale,
    key_gradient,
    value_gradient,
    lse,
    delta,
    rows,
    row_spans,
    rows_stride_batch,
    rows_stride_head,
    row_spans_stride_batch,
    row_spans_stride_head,
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
    v_stride_batch,
    v_stride_head,
    v_stride_token,
    v_stride_channel,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    key_stride_channel,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    value_stride_channel,
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
    LIST_N: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute dK and dV of BLOCK_N keys of one (batch, kv head), from the queries of all heads of its group.

    A block list has LIST_M rows and LIST_N keys per tile; 0: no list.
    """
    block = tl.program_id(0)
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    _, q_len, q_operand_start = sequence_range(q_ranges, batch, q_len, RAGGED)
    kv_start, kv_len, kv_operand_start = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    first_key = block * BLOCK_N
    if first_key < kv_len:
        kv_first = operand_row(batch, kv_head, kv_heads, kv_rows, kv_operand_start, PACKED) + first_key
        k_row = kv_first + tl.arange(0, BLOCK_N)
        channel, v_channel = tl.arange(0, CHANNELS), tl.arange(0, V_CHANNELS)
        k = tl.load(key + k_row[:, None] * CHANNELS + channel[None, :])
        if PADDED:
            key_mask += batch * key_mask_stride
        _column, token, _inside, exists = locate_keys(first_key, kv_start, kv_len, key_mask, BLOCK_N, PADDED)
        at = value + batch * v_stride_batch + kv_head * v_stride_head + token[:, None] * v_stride_token
        at += v_channel.to(tl.int64)[None, :] * v_stride_channel
        v = tl.load(at, mask=exists[:, None] & (v_channel < v_head_dim)[None, :], other=0.0)
        k_scale = load_key_scale(key_scale, kv_first, BLOCK_N) * (softmax_scale * LOG2E)
        dk = tl.zeros((BLOCK_N, CHANNELS), tl.float32)
        dv = tl.zeros((BLOCK_N, V_CHANNELS), tl.float32)

        # Queries from tile `begin` on see some of the keys; queries from `full_begin` on see all of them.
        begin, full_begin, end = 0, 0, tl.cdiv(q_len, BLOCK_M)
        if PADDED:
            spans += batch * spans_stride
            end = tl.where((first_key + BLOCK_N > tl.load(spans)) & (first_key < tl.load(spans + 2)), end, 0)
        if CAUSAL and LIST_M == 0:
            first_query = first_key - causal_offset
            begin = tl.minimum(tl.maximum(first_query, 0) // BLOCK_M, end)
            full_begin = tl.minimum(tl.cdiv(tl.maximum(first_query + BLOCK_N - 1, 0), BLOCK_M), end)
        for member in range(group):
            head = kv_head * group + member
            q_first = operand_row(batch, head, kv_heads * group, q_rows, q_operand_start, PACKED)
            head_index = operand_row(batch, head, kv_heads * group, 1, 0, PACKED)
            operands = (
                query, query_scale, query_operand, gradient, lse, delta, head_index, q_first, q_operand_start, q_rows
            )  # fmt: skip
            if LIST_M > 0:
                PARTS: tl.constexpr = LIST_M // BLOCK_M
                rows_of_head = rows + batch * rows_stride_batch + head * rows_stride_head
                span = row_spans + batch * row_spans_stride_batch + head * row_spans_stride_head
                span += first_key // LIST_N * 3
                list_begin, list_full, list_end = tl.load(span), tl.load(span + 1), tl.load(span + 2)
                if PADDED:
                    list_begin = tl.where(end > 0, list_begin, list_end)
                    list_full = tl.where(end > 0, list_full, list_end)
                if CAUSAL:
                    for index in range(list_begin * PARTS, list_full * PARTS):
                        tile = tl.load(rows_of_head + index // PARTS) * PARTS + index % PARTS
                        dk, dv = add_queries(
                            k, k_scale, v, dk, dv, first_key, operands, gradient_codes, gradient_scale, tile,
                            causal_offset, CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, INT8, True, TMA,
                        )  # fmt: skip
                block_of_rows = tl.load(rows_of_head + list_full)
                for index in range(list_full * PARTS, list_end * PARTS):
                    tile = block_of_rows * PARTS + index % PARTS
                    block_of_rows = tl.load(rows_of_head + (index + 1) // PARTS)  # a tile ahead: loads of Q and dO wait
                    dk, dv = add_queries(
                        k, k_scale, v, dk, dv, first_key, operands, gradient_codes, gradient_scale, tile, causal_offset,
                        CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, INT8, False, TMA,
                    )  # fmt: skip
            elif CAUSAL:
                for tile in range(begin, full_begin):
                    dk, dv = add_queries(
                        k, k_scale, v, dk, dv, first_key, operands, gradient_codes, gradient_scale, tile, causal_offset,
                        CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, INT8, True, TMA,
                    )  # fmt: skip
            if LIST_M == 0:
                for tile in range(full_begin, end):
                    dk, dv = add_queries(
                        k, k_scale, v, dk, dv, first_key, operands, gradient_codes, gradient_scale, tile, causal_offset,
                        CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, INT8, False, TMA,
                    )  # fmt: skip

        first_key = optimization_barrier(first_key)
        column, token, inside, attended = locate_keys(first_key, kv_start, kv_len, key_mask, BLOCK_N, PADDED)
        if CAUSAL:
            attended = attended & (column < q_len + causal_offset)
        into = key_gradient + batch * key_stride_batch + kv_head * key_stride_head + token[:, None] * key_stride_token
        into += channel[None, :] * key_stride_channel
        dk = tl.where(attended[:, None], dk * softmax_scale, 0.0)
        tl.store(into, dk.to(key_gradient.dtype.element_ty), mask=inside[:, None] & (channel < head_dim)[None, :])
        into = value_gradient + batch * value_stride_batch + kv_head * value_stride_head
        into += token[:, None] * value_stride_token + v_channel[None, :] * value_stride_channel
        dv = tl.where(attended[:, None], dv, 0.0)
        tl.store(into, dv.to(value_gradient.dtype.element_ty), mask=inside[:, None] & (v_channel < v_head_dim)[None, :])
