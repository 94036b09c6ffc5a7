"""The backward kernels of recipes with gradients: S from INT8 again, then dV, dK and dQ (`reference_backward`).

Two kernels, which see the same tiles of scores: one holds keys and walks over queries, for dK and dV, the other holds
queries and walks over keys, for dQ. So each gradient is summed in registers, in one order, without atomics. The first
computes Sᵀ = K·Qᵀ, so that Pᵀ and dSᵀ are where the left operands of the next products have to be: in its registers.

A key's column of scores, and so what a key that does not exist would do, stays in the row of dK and dV that is its own.
Only causality therefore needs a mask there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..formats.int8 import INT8_MAX
from ..recipe import Recipe
from ..saved import Lengths, Saved
from .backward_operands import backward_operands, batch_strides
from .configs import int8_backward_key_config, int8_backward_query_config
from .formats import max_or_nan
from .int8_training import clamped_offset, token_axes
from .key_padding import KeyPadding, key_tiles
from .launch import launch
from .operand_tiles import as_operand, load_key, load_key_scale, load_value
from .quantize_int8 import INTERPRETED, magnitude, round_to_byte
from .scores import LOG2E
from .sequences import ceil_div, operand_row, sequence_range

FULL = tl.constexpr(INT8_MAX)
# Rows of P or dS below it become zeros: their reciprocal would not be finite.
SMALLEST = tl.constexpr(1e-36)


def backward(
    output_gradient: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    saved: Saved,
    *,
    head_dim: int,
    lengths: Lengths | None,
    valid: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int = 0,
    scale: float | None,
    recipe: Recipe,
    capability: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of Q, K and V.

    Args:
        output_gradient: (batch, q_heads, q_len, v_head_dim), value's dtype, any strides.
        value: (batch, kv_heads, kv_len, v_head_dim) float16 or bfloat16, as the forward got it.
        output, saved: what the forward returned.
        head_dim: of Q and K.
        lengths, valid, is_causal, causal_offset, scale, recipe, capability: as `int8_training.training_attention` got
            them.

    Returns:
        (query_gradient, key_gradient, value_gradient) in value's dtype, each laid out as (batch, tokens, heads,
        channels). Rows without a key, and keys that do not exist, have gradient 0 and give none.

    Raises:
        ValueError: both lengths and valid are given, or the recipe's backward has no kernel.
    """
    if lengths is not None and valid is not None:
        raise ValueError("packed sequences say by their lengths which keys exist: give no valid beside them")
    formats = recipe.backward
    if formats is None or (formats.p, formats.ds) not in (("16bit", "16bit"), ("int8", "int8")):
        raise ValueError(f"the backward of {recipe} has no kernel")
    if (formats.dp, formats.scales, formats.delta) != ("16bit", "row", "output"):
        raise ValueError(f"the backward of {recipe} has no kernel")
    # Kernels read them as they were made.
    saved = Saved(*(x.contiguous() for x in saved))
    batch, q_heads, q_len, v_head_dim = output_gradient.shape
    kv_heads, kv_len = value.shape[1:3]
    sequences, q_sequences, kv_sequences = token_axes(q_len, kv_len, lengths)
    # Zeros where only the GPU knows the lengths, which say what is written.
    empty = 0 in (*output_gradient.shape, *value.shape[1:3], sequences, q_sequences.tokens, kv_sequences.tokens)
    new = value.new_zeros if empty or sequences is not None else value.new_empty
    gradients = (
        new(batch, q_len, q_heads, head_dim).transpose(1, 2),
        new(batch, kv_len, kv_heads, head_dim).transpose(1, 2),
        new(batch, kv_len, kv_heads, v_head_dim).transpose(1, 2),
    )
    if empty:
        return gradients
    padding = None if valid is None else KeyPadding.of(valid)
    int8 = formats.ds == "int8"
    count = sequences or batch
    operands = backward_operands(output_gradient, value, output, saved, count, q_sequences, kv_sequences, padding, int8)
    channels, v_channels = saved.query.shape[-1], operands.gradient.shape[-1]
    tma = capability[0] >= 9
    key_config = int8_backward_key_config(capability, max(channels, v_channels), int8)
    query_config = int8_backward_query_config(capability, max(channels, v_channels), int8)
    shared: tuple[Any, ...] = (
        operands.lse,
        operands.delta,
        None if padding is None else padding.valid,
        None if padding is None else padding.spans,
        *((0, 0) if padding is None else padding.strides),
        q_sequences.ranges,
        kv_sequences.ranges,
        q_sequences.tokens,
        kv_sequences.tokens,
        q_sequences.rows,
        kv_sequences.rows,
        q_heads // kv_heads,
        clamped_offset(causal_offset, q_sequences, kv_sequences),
        head_dim**-0.5 if scale is None else scale,
        head_dim,
    )
    constants: dict[str, Any] = {
        "CHANNELS": channels,
        "V_CHANNELS": v_channels,
        "INT8": int8,
        "CAUSAL": is_causal,
        "PADDED": padding is not None,
        "PACKED": q_sequences.packed,
        "RAGGED": q_sequences.ranges is not None,
        "TMA": tma,
    }

    def tiles(x: torch.Tensor | None, block: int, transposed: bool = False) -> torch.Tensor | TensorDescriptor | None:
        """An operand as a kernel reads tiles of `block` tokens of it."""
        if x is None or not tma:
            return x
        shape = [x.shape[2], block] if transposed else [block, x.shape[3]]
        return TensorDescriptor.from_tensor(x.view(-1, x.shape[3]), shape)

    launch(
        int8_backward_key,
        (ceil_div(kv_sequences.tokens, key_config.block_n), kv_heads, count),
        saved.key,
        saved.key_scale,
        operands.value,
        tiles(saved.query, key_config.block_m),
        saved.query_scale,
        tiles(operands.query, key_config.block_m, transposed=int8),
        tiles(operands.gradient, key_config.block_m),
        tiles(operands.gradient_codes, key_config.block_m, transposed=True),
        operands.gradient_scale,
        gradients[1],
        gradients[2],
        *shared,
        v_head_dim,
        *batch_strides(gradients[1], kv_sequences),
        *batch_strides(gradients[2], kv_sequences),
        **constants,
        **key_config.constants,
    )
    launch(
        int8_backward_query,
        (ceil_div(q_sequences.tokens, query_config.block_m), q_heads, count),
        saved.query,
        saved.query_scale,
        operands.gradient,
        tiles(saved.key, query_config.block_n),
        saved.key_scale,
        tiles(operands.key, query_config.block_n, transposed=int8),
        tiles(operands.value, query_config.block_n),
        gradients[0],
        *shared,
        *batch_strides(gradients[0], q_sequences),
        **constants,
        **query_config.constants,
    )
    return gradients


@triton.jit
def largest(x, axis: tl.constexpr):
    """Largest magnitude along an axis; NaN where one is NaN. The interpreter's own reductions alone are fast."""
    if INTERPRETED:
        return tl.max(magnitude(x), axis).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.abs(x), axis, max_or_nan)


@triton.jit
def codes_per_unit(row_max):
    return tl.full(row_max.shape, FULL, tl.float32) / tl.maximum(row_max, SMALLEST)


@triton.jit
def byte_rows(x, row_max):
    """Rows of x in int8, 127 at `row_max`, as the left operand of a product."""
    return round_to_byte(
        as_operand(x * (tl.full(row_max.shape, FULL, tl.float32) / tl.maximum(row_max, SMALLEST))[:, None])
    )


@triton.jit
def add_queries(
    k,
    k_scale,
    v,
    dk,
    dv,
    first_key,
    query,
    query_scale,
    query_operand,
    gradient,
    gradient_codes,
    gradient_scale,
    lse,
    delta,
    of_head,
    q_first,
    q_operand_start,
    q_rows,
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
    """(dk, dv) with what a tile of queries adds; the tile of scores is (BLOCK_N keys, BLOCK_M queries)."""
    KEY_BLOCKS: tl.constexpr = (BLOCK_N + 63) // 64
    first = q_first + tile * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    s = tl.dot(k, load_key(query, first, BLOCK_M, CHANNELS, TMA).T)
    do = load_key(gradient, first, BLOCK_M, V_CHANNELS, TMA)
    dp = tl.dot(v, do.T)
    q_scale = tl.load(query_scale + row)
    s = tl.reshape(s, (KEY_BLOCKS, BLOCK_N // 8 // KEY_BLOCKS, 4, 2, BLOCK_M)).to(tl.float32)
    scale = k_scale[:, :, None] * q_scale[None, None, :]
    x = s * scale[:, None, :, None, :] - tl.load(lse + row)[None, None, None, None, :]
    p = tl.reshape(tl.exp2(x), (BLOCK_N, BLOCK_M))
    if MASKED:
        column = first_key + tl.arange(0, BLOCK_N)
        allowed = column[:, None] <= (tile * BLOCK_M + tl.arange(0, BLOCK_M) + causal_offset)[None, :]
        p = tl.where(allowed, p, 0.0)
    row_delta = tl.load(delta + row)
    if INT8:  # dS times Q's scales, which lie along the sum
        dp *= q_scale[None, :]
        row_delta *= q_scale
    ds = p * (dp - row_delta[None, :])
    if MASKED:
        ds = tl.where(allowed, ds, 0.0)
    if INT8:
        p_max, ds_max = largest(p, 1), largest(ds, 1)
        p_codes, ds_codes = byte_rows(p, p_max), byte_rows(ds, ds_max)
        position = q_operand_start + tile * BLOCK_M
        do_codes = load_value(gradient_codes, of_head, position, q_rows, BLOCK_M, V_CHANNELS, True, TMA)
        p_max *= tl.load(gradient_scale + first // 64) * (1.0 / FULL)
        dv += tl.dot(p_codes, do_codes).to(tl.float32) * p_max[:, None]
        q_codes = load_value(query_operand, of_head, position, q_rows, BLOCK_M, CHANNELS, True, TMA)
        dk += tl.dot(ds_codes, q_codes).to(tl.float32) * (ds_max * (1.0 / FULL))[:, None]
    else:
        # Both operands before either product: a matrix instruction under way forbids writing another's registers.
        p, ds = p.to(do.dtype), ds.to(do.dtype)
        q = load_key(query_operand, first, BLOCK_M, CHANNELS, TMA)
        dv = tl.dot(p, do, dv)
        dk = tl.dot(ds, q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["q_len", "kv_len", "causal_offset"])
def int8_backward_key(
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
    TMA: tl.constexpr,
):
    """dK and dV of BLOCK_N keys of one (batch, kv head), from the queries of all heads of its group."""
    block = tl.program_id(0)
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    _, q_len, q_operand_start = sequence_range(q_ranges, batch, q_len, RAGGED)
    kv_start, kv_len, kv_operand_start = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    first_key = block * BLOCK_N
    if first_key < kv_len:
        kv_first = operand_row(batch, kv_head, kv_heads, kv_rows, kv_operand_start, PACKED) + first_key
        row = kv_first + tl.arange(0, BLOCK_N)
        channel, v_channel = tl.arange(0, CHANNELS), tl.arange(0, V_CHANNELS)
        k = tl.load(key + row[:, None] * CHANNELS + channel[None, :])
        v = tl.load(value + row[:, None] * V_CHANNELS + v_channel[None, :])
        k_scale = load_key_scale(key_scale, kv_first, BLOCK_N) * (softmax_scale * LOG2E)
        dk = tl.zeros((BLOCK_N, CHANNELS), tl.float32)
        dv = tl.zeros((BLOCK_N, V_CHANNELS), tl.float32)

        # Queries from tile `begin` on see some of the keys, those from `full_begin` on all of them.
        begin, full_begin, end = 0, 0, tl.cdiv(q_len, BLOCK_M)
        if PADDED:
            spans += batch * spans_stride
            exists = (first_key + BLOCK_N > tl.load(spans)) & (first_key < tl.load(spans + 2))
            end = tl.where(exists, end, 0)
        if CAUSAL:
            first_query = first_key - causal_offset
            begin = tl.minimum(tl.maximum(first_query, 0) // BLOCK_M, end)
            full_begin = tl.minimum(tl.cdiv(tl.maximum(first_query + BLOCK_N - 1, 0), BLOCK_M), end)
        for member in range(group):
            head = kv_head * group + member
            q_first = operand_row(batch, head, kv_heads * group, q_rows, q_operand_start, PACKED)
            of_head = operand_row(batch, head, kv_heads * group, 1, 0, PACKED)
            if CAUSAL:
                for tile in range(begin, full_begin):
                    dk, dv = add_queries(
                        k,
                        k_scale,
                        v,
                        dk,
                        dv,
                        first_key,
                        query,
                        query_scale,
                        query_operand,
                        gradient,
                        gradient_codes,
                        gradient_scale,
                        lse,
                        delta,
                        of_head,
                        q_first,
                        q_operand_start,
                        q_rows,
                        tile,
                        causal_offset,
                        CHANNELS,
                        V_CHANNELS,
                        BLOCK_M,
                        BLOCK_N,
                        INT8,
                        True,
                        TMA,
                    )
            for tile in range(full_begin, end):
                dk, dv = add_queries(
                    k,
                    k_scale,
                    v,
                    dk,
                    dv,
                    first_key,
                    query,
                    query_scale,
                    query_operand,
                    gradient,
                    gradient_codes,
                    gradient_scale,
                    lse,
                    delta,
                    of_head,
                    q_first,
                    q_operand_start,
                    q_rows,
                    tile,
                    causal_offset,
                    CHANNELS,
                    V_CHANNELS,
                    BLOCK_M,
                    BLOCK_N,
                    INT8,
                    False,
                    TMA,
                )

        column = first_key + tl.arange(0, BLOCK_N)
        inside = column < kv_len
        attended = inside
        if PADDED:
            attended = attended & (tl.load(valid + batch * valid_stride + column, mask=inside, other=0) != 0)
        if CAUSAL:
            attended = attended & (column < q_len + causal_offset)
        token = (kv_start + column).to(tl.int64)
        into = key_gradient + batch * key_stride_batch + kv_head * key_stride_head + token[:, None] * key_stride_token
        into += channel[None, :] * key_stride_channel
        dk = tl.where(attended[:, None], dk * softmax_scale, 0.0)
        tl.store(into, dk.to(key_gradient.dtype.element_ty), mask=inside[:, None] & (channel < head_dim)[None, :])
        into = value_gradient + batch * value_stride_batch + kv_head * value_stride_head
        into += token[:, None] * value_stride_token + v_channel[None, :] * value_stride_channel
        dv = tl.where(attended[:, None], dv, 0.0)
        tl.store(into, dv.to(value_gradient.dtype.element_ty), mask=inside[:, None] & (v_channel < v_head_dim)[None, :])


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
    s = tl.reshape(tl.dot(q, load_key(key, first, BLOCK_N, CHANNELS, TMA).T), SHAPE).to(tl.float32)
    dp = tl.dot(do, load_key(value, first, BLOCK_N, V_CHANNELS, TMA).T)
    scale = q_scale[:, None, None] * k_scale[None, :, :]
    p = tl.exp2(s * scale[:, :, None, :, None] - row_lse[:, None, None, None, None])
    ds = tl.reshape(p, (BLOCK_M, BLOCK_N)) * (dp - row_delta[:, None])
    if MASKED:
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        allowed = (column < kv_len)[None, :]
        if PADDED:
            allowed = allowed & (tl.load(valid + column, mask=column < kv_len, other=0) != 0)[None, :]
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


@triton.jit(do_not_specialize=["q_len", "kv_len", "causal_offset"])
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
        do = tl.load(gradient + row[:, None] * V_CHANNELS + v_channel[None, :])
        q_scale = tl.load(query_scale + row) * (softmax_scale * LOG2E)
        row_lse, row_delta = tl.load(lse + row), tl.load(delta + row)
        kv_first = operand_row(batch, head // group, kv_heads, kv_rows, kv_operand_start, PACKED)
        of_head = operand_row(batch, head // group, kv_heads, 1, 0, PACKED)
        if PADDED:
            valid += batch * valid_stride
        index = block * BLOCK_M + tl.arange(0, BLOCK_M)
        dq = tl.zeros((BLOCK_M, CHANNELS), tl.float32)

        # Tiles begin…full_begin - 1 and full_end… need a mask, those between need none.
        begin, full_begin, full_end, columns = key_tiles(spans, batch, spans_stride, kv_len, BLOCK_N, PADDED)
        if CAUSAL:
            columns = tl.minimum(columns, (block + 1) * BLOCK_M + causal_offset)
            full_end = tl.minimum(full_end, tl.maximum(block * BLOCK_M + causal_offset + 1, 0) // BLOCK_N)
        full_end = tl.maximum(full_begin, full_end)
        before = full_begin - begin
        for tile in range(full_begin, full_end):
            dq = add_keys(
                q,
                q_scale,
                do,
                row_lse,
                row_delta,
                dq,
                index,
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
                CHANNELS,
                V_CHANNELS,
                BLOCK_M,
                BLOCK_N,
                INT8,
                CAUSAL,
                PADDED,
                False,
                TMA,
            )
        for masked in range(0, before + tl.cdiv(columns, BLOCK_N) - full_end):
            tile = masked + tl.where(masked < before, begin, full_end - before)
            dq = add_keys(
                q,
                q_scale,
                do,
                row_lse,
                row_delta,
                dq,
                index,
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
                CHANNELS,
                V_CHANNELS,
                BLOCK_M,
                BLOCK_N,
                INT8,
                CAUSAL,
                PADDED,
                True,
                TMA,
            )

        token = (q_start + index).to(tl.int64)
        into = query_gradient + batch * stride_batch + head * stride_head + token[:, None] * stride_token
        into += channel[None, :] * stride_channel
        inside = (index < q_len)[:, None] & (channel < head_dim)[None, :]
        tl.store(into, (dq * softmax_scale).to(query_gradient.dtype.element_ty), mask=inside)
