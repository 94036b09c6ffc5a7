"""QK-norm and RoPE, and their gradients: one pass over memory each.

A program has some heads of some tokens, or all heads of a token if they share a norm. For each head it holds the first
and the second channels of the rotated pairs: neighbours, which lie in one thread, or halves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..spec.layout import ceil_div
from ..spec.qk_norm_rope import Norm, Rope
from .common.launch import UNSPECIALIZED, launch, strides

FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 2048, 2048  # of a block's heads, padding included (measured on an H200)
WARPS = 4
LARGE_TOKEN, LARGE_TOKEN_WARPS = 8192, 8  # elements of a token with one norm from which it takes so many warps
MOST_HEADS = 8  # heads of a token in one program, which reads the token's angles once
PARTS = 1056  # programs that share the sums for weight and bias: eight for each multiprocessor of an H200
SUM_ROWS, SUM_COLUMNS = 128, 8
AXES = ("batch", "token", "head")
TABLE_AXES = ("batch", "row", "head", "channel")


def forward(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
    """Return the heads, contiguous, in the dtype of x.

    Args:
        x: (batch, tokens, heads, head_dim), float16 or bfloat16, with contiguous channels.
        norm, rope: the norm and the RoPE.
    """
    output = x.new_empty(x.shape)
    if x.numel():
        grid, arguments = _arguments(x, norm, rope, FORWARD_ELEMENTS)
        launch(
            qk_norm_rope_forward,
            grid,
            x=x,
            output=output,
            enable_fp_fusion=False,
            bias=None if norm is None else norm.bias,
            **arguments,
            ROUNDS=norm is not None and norm.rounds,
            ACROSS=norm is not None and norm.across_heads,
            ROUNDS_PRODUCTS=rope is not None and rope.cosine.dtype == x.dtype,
        )
    return output


def backward(
    gradient: torch.Tensor, x: torch.Tensor, norm: Norm | None, rope: Rope | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, contiguous, and of the norm's weight and bias; None where the norm has none.

    Args:
        gradient: the output's gradient, of its size and dtype, with contiguous channels.
        x, norm, rope: as in `forward`; each head has a separate norm.
    """
    x_gradient = x.new_empty(x.shape)
    vectors = (None, None) if norm is None else (norm.weight, norm.bias)
    if not x.numel():
        weight_gradient, bias_gradient = (None if one is None else torch.zeros_like(one) for one in vectors)
        return x_gradient, weight_gradient, bias_gradient
    (blocks, groups, batch), arguments = _arguments(x, norm, rope, BACKWARD_ELEMENTS)
    grid = blocks, groups, batch
    if any(one is not None for one in vectors):  # then a program sums up over several blocks
        grid = min(blocks, ceil_div(PARTS, groups * batch)), groups, batch
    weight_parts, bias_parts = (
        None if one is None else x.new_empty((*grid, x.shape[-1]), dtype=torch.float32) for one in vectors
    )
    launch(
        qk_norm_rope_backward,
        grid,
        gradient=gradient,
        x=x,
        x_gradient=x_gradient,
        weight_parts=weight_parts,
        bias_parts=bias_parts,
        blocks=blocks,
        **strides("gradient", gradient.stride(), AXES),
        **arguments,
    )
    weight_gradient, bias_gradient = map(_sum, (weight_parts, bias_parts), vectors)
    return x_gradient, weight_gradient, bias_gradient


def _sum(parts: torch.Tensor | None, vector: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of a vector gradient's parts, (…, head_dim) in float32, in the vector's dtype; None for None."""
    if parts is None or vector is None:
        return None
    head_dim = parts.shape[-1]
    gradient = vector.new_empty(vector.shape)
    launch(
        sum_parts,
        (ceil_div(head_dim, SUM_COLUMNS),),
        vector_parts=parts,
        vector_gradient=gradient,
        parts=parts.numel() // head_dim,
        HEAD_DIM=head_dim,
        ROWS=SUM_ROWS,
        COLUMNS=SUM_COLUMNS,
    )
    return gradient


def _arguments(
    x: torch.Tensor, norm: Norm | None, rope: Rope | None, elements: int
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid of programs of about so many elements, and the arguments that both kernels have."""
    batch, tokens, heads, head_dim = x.shape
    channels = triton.next_power_of_2(head_dim)
    across = norm is not None and norm.across_heads
    together = triton.next_power_of_2(heads) if across else min(MOST_HEADS, heads & -heads)
    block = max(1, elements // (together * channels))
    table_strides: tuple[int, ...] = (0, 0, 0, 0) if rope is None else rope.strides()
    cosine, sine = (None, None) if rope is None else (rope.cosine, rope.sine)
    if cosine is not None and sine is None:
        cosine, table_strides = torch.view_as_real(cosine), tuple(2 * stride for stride in table_strides)
    arguments = {
        "num_warps": LARGE_TOKEN_WARPS if across and together * channels >= LARGE_TOKEN else WARPS,
        "weight": None if norm is None else norm.weight,
        "cosine": cosine,
        "sine": sine,
        "tokens": tokens,
        "heads": heads,
        "rows": 0 if rope is None else rope.rows,
        "offset": 0 if rope is None else rope.offset,
        "eps": 0.0 if norm is None else norm.eps,
        **strides("", x.stride(), AXES),
        **strides("table", table_strides, TABLE_AXES),
        "HEAD_DIM": head_dim,
        "PAIRS": channels // 2,
        "TOKENS": block,
        "HEADS": together,
        "NORM": "" if norm is None else norm.kind,
        "HALVES": rope is not None and rope.halves,
        "ANGLES_OF_HEADS": table_strides[2] != 0,
        "ANGLES_BY_PAIR": rope is not None and rope.cosine.shape[-1] != head_dim,
    }
    return (ceil_div(tokens, block), ceil_div(heads, together), batch), arguments


@triton.jit
def _load(
    base,
    place,
    exists,
    pair,
    stride_channel,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HALVES: tl.constexpr,
    BY_PAIR: tl.constexpr,
):
    """Load the first and the second channels of pairs, (tokens, heads, PAIRS) each, in float32.

    Args:
        base: the tensor's address.
        place: offset of each head, (tokens, heads), or fewer if several heads have the same values.
        exists: whether the head exists, in the same shape.
        pair: 0…PAIRS - 1.
        stride_channel: elements from one value to the next.
        BY_PAIR: both channels of a pair share one value.
    """
    if HALVES or BY_PAIR:
        known = exists[:, :, None] & (pair < HEAD_DIM // 2)[None, None, :]
        first = base + place[:, :, None] + pair[None, None, :] * stride_channel
        a = tl.load(first, mask=known, other=0.0)
        b = a if BY_PAIR else tl.load(first + HEAD_DIM // 2 * stride_channel, mask=known, other=0.0)
    else:
        channel = tl.arange(0, 2 * PAIRS)
        known = exists[:, :, None] & (channel < HEAD_DIM)[None, None, :]
        both = tl.load(base + place[:, :, None] + channel[None, None, :] * stride_channel, mask=known, other=0.0)
        a, b = tl.split(tl.reshape(both, (place.shape[0], place.shape[1], PAIRS, 2)))
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store(base, tile, inside, pair, a, b, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr):
    """Store tensors as `_load` returns them, at contiguous places."""
    dtype: tl.constexpr = base.dtype.element_ty
    if HALVES:
        exists = inside[:, :, None] & (pair < HEAD_DIM // 2)[None, None, :]
        first = base + tile[:, :, None] + pair[None, None, :]
        tl.store(first, a.to(dtype), mask=exists)
        tl.store(first + HEAD_DIM // 2, b.to(dtype), mask=exists)
    else:
        channel = tl.arange(0, 2 * PAIRS)
        exists = inside[:, :, None] & (channel < HEAD_DIM)[None, None, :]
        both = tl.reshape(tl.join(a.to(dtype), b.to(dtype)), (tile.shape[0], tile.shape[1], 2 * PAIRS))
        tl.store(base + tile[:, :, None] + channel[None, None, :], both, mask=exists)


@triton.jit
def _mean(a, b, count, ACROSS: tl.constexpr):
    """Return the mean of all channels, (tokens, heads or 1, 1)."""
    total = tl.sum(a, axis=2, keep_dims=True) + tl.sum(b, axis=2, keep_dims=True)
    if ACROSS:
        total = tl.sum(total, axis=1, keep_dims=True)
    return total / count


@triton.jit
def _normalize(a, b, exists, heads, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ACROSS: tl.constexpr):
    """Return the channels without their mean (a layer norm's) and divided by their deviation, and 1 / deviation."""
    count = HEAD_DIM * heads if ACROSS else HEAD_DIM
    if NORM == "layer":
        mean = _mean(a, b, count, ACROSS)
        a = tl.where(exists, a - mean, 0.0)
        b = tl.where(exists, b - mean, 0.0)
    inverse = tl.rsqrt(_mean(a * a, b * b, count, ACROSS) + eps)
    return a * inverse, b * inverse, inverse


@triton.jit
def _angles(
    cosine,
    sine,
    batch,
    row,
    rows,
    heads,
    pair,
    stride_batch,
    stride_row,
    stride_head,
    stride_channel,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    HALVES: tl.constexpr,
    OF_HEADS: tl.constexpr,
    BY_PAIR: tl.constexpr,
):
    """Return whether tokens are rotated, (tokens, 1, 1), and cosines and sines of both channels of pairs."""
    turns = (row >= 0) & (row < rows)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS if OF_HEADS else 1)
    known = turns[:, None] & (head < heads)[None, :]
    place = batch * stride_batch + row.to(tl.int64)[:, None] * stride_row + head[None, :] * stride_head
    cosine_a, cosine_b = _load(cosine, place, known, pair, stride_channel, HEAD_DIM, PAIRS, HALVES, BY_PAIR)
    sines = cosine + 1 if sine is None else sine  # the imaginary parts of complex numbers
    sine_a, sine_b = _load(sines, place, known, pair, stride_channel, HEAD_DIM, PAIRS, HALVES, BY_PAIR)
    return turns[:, None, None], cosine_a, cosine_b, sine_a, sine_b


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "rows", "offset"])
def qk_norm_rope_forward(
    x,
    output,
    weight,
    bias,
    cosine,
    sine,
    tokens,
    heads,
    rows,
    offset,
    eps,
    stride_batch,
    stride_token,
    stride_head,
    table_stride_batch,
    table_stride_row,
    table_stride_head,
    table_stride_channel,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    ACROSS: tl.constexpr,
    HALVES: tl.constexpr,
    ANGLES_OF_HEADS: tl.constexpr,
    ANGLES_BY_PAIR: tl.constexpr,
    ROUNDS_PRODUCTS: tl.constexpr,
):
    """Write the heads of a block of tokens."""
    dtype: tl.constexpr = x.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    batch, pair = tl.program_id(2).to(tl.int64), tl.arange(0, PAIRS)
    inside = (token < tokens)[:, None] & (head < heads)[None, :]
    at = batch * stride_batch + token.to(tl.int64)[:, None] * stride_token + head[None, :] * stride_head
    a, b = _load(x, at, inside, pair, 1, HEAD_DIM, PAIRS, HALVES, False)
    if NORM != "":
        exists = inside[:, :, None] & (pair < HEAD_DIM // 2)[None, None, :]
        a, b, _ = _normalize(a, b, exists, heads, eps, HEAD_DIM, NORM, ACROSS)
        which_vector = tl.arange(0, HEADS if ACROSS else 1)
        vector, known = (which_vector * HEAD_DIM)[None, :], (which_vector < heads)[None, :]
        if weight is not None:
            if ROUNDS:
                a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
            weight_a, weight_b = _load(weight, vector, known, pair, 1, HEAD_DIM, PAIRS, HALVES, False)
            a, b = a * weight_a, b * weight_b
        if bias is not None:
            bias_a, bias_b = _load(bias, vector, known, pair, 1, HEAD_DIM, PAIRS, HALVES, False)
            a, b = a + bias_a, b + bias_b
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    if cosine is not None:
        turns, cosine_a, cosine_b, sine_a, sine_b = _angles(
            cosine,
            sine,
            batch,
            token + offset,
            rows,
            heads,
            pair,
            table_stride_batch,
            table_stride_row,
            table_stride_head,
            table_stride_channel,
            HEAD_DIM,
            PAIRS,
            HEADS,
            HALVES,
            ANGLES_OF_HEADS,
            ANGLES_BY_PAIR,
        )
        if ROUNDS_PRODUCTS:
            first = (a * cosine_a).to(dtype).to(tl.float32) - (b * sine_a).to(dtype).to(tl.float32)
            second = (b * cosine_b).to(dtype).to(tl.float32) + (a * sine_b).to(dtype).to(tl.float32)
        else:
            first = a * cosine_a - b * sine_a
            second = b * cosine_b + a * sine_b
        a = tl.where(turns, first, a)
        b = tl.where(turns, second, b)
    to = ((batch * tokens + token.to(tl.int64)[:, None]) * heads + head[None, :]) * HEAD_DIM
    _store(output, to, inside, pair, a, b, HEAD_DIM, PAIRS, HALVES)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "rows", "offset"])
def qk_norm_rope_backward(
    gradient,
    x,
    x_gradient,
    weight_parts,
    bias_parts,
    weight,
    cosine,
    sine,
    tokens,
    heads,
    blocks,
    rows,
    offset,
    eps,
    gradient_stride_batch,
    gradient_stride_token,
    gradient_stride_head,
    stride_batch,
    stride_token,
    stride_head,
    table_stride_batch,
    table_stride_row,
    table_stride_head,
    table_stride_channel,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    HALVES: tl.constexpr,
    ANGLES_OF_HEADS: tl.constexpr,
    ANGLES_BY_PAIR: tl.constexpr,
):
    """Write the gradients of blocks of tokens, and their sums for weight and bias."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    batch, pair = tl.program_id(2).to(tl.int64), tl.arange(0, PAIRS)
    weight_sum_a = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    weight_sum_b = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    bias_sum_a = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    bias_sum_b = tl.zeros((TOKENS, HEADS, PAIRS), tl.float32)
    one = tl.zeros((1, 1), tl.int64)
    always = one == 0
    if weight is not None:
        weight_a, weight_b = _load(weight, one, always, pair, 1, HEAD_DIM, PAIRS, HALVES, False)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        token = block * TOKENS + tl.arange(0, TOKENS)
        inside = (token < tokens)[:, None] & (head < heads)[None, :]
        from_gradient = batch * gradient_stride_batch + token.to(tl.int64)[:, None] * gradient_stride_token
        from_gradient += head[None, :] * gradient_stride_head
        da, db = _load(gradient, from_gradient, inside, pair, 1, HEAD_DIM, PAIRS, HALVES, False)
        if cosine is not None:
            turns, cosine_a, cosine_b, sine_a, sine_b = _angles(
                cosine,
                sine,
                batch,
                token + offset,
                rows,
                heads,
                pair,
                table_stride_batch,
                table_stride_row,
                table_stride_head,
                table_stride_channel,
                HEAD_DIM,
                PAIRS,
                HEADS,
                HALVES,
                ANGLES_OF_HEADS,
                ANGLES_BY_PAIR,
            )
            first = da * cosine_a + db * sine_b
            second = db * cosine_b - da * sine_a
            da = tl.where(turns, first, da)
            db = tl.where(turns, second, db)
        if NORM != "":
            at = batch * stride_batch + token.to(tl.int64)[:, None] * stride_token + head[None, :] * stride_head
            a, b = _load(x, at, inside, pair, 1, HEAD_DIM, PAIRS, HALVES, False)
            exists = inside[:, :, None] & (pair < HEAD_DIM // 2)[None, None, :]
            a, b, inverse = _normalize(a, b, exists, heads, eps, HEAD_DIM, NORM, False)
            if bias_parts is not None:
                bias_sum_a += da
                bias_sum_b += db
            if weight is not None:
                weight_sum_a += da * a
                weight_sum_b += db * b
                da, db = da * weight_a, db * weight_b
            along = _mean(da * a, db * b, HEAD_DIM, False)
            if NORM == "layer":
                mean = _mean(da, db, HEAD_DIM, False)
                da, db = da - mean, db - mean
            da, db = (da - a * along) * inverse, (db - b * along) * inverse
        to = ((batch * tokens + token.to(tl.int64)[:, None]) * heads + head[None, :]) * HEAD_DIM
        _store(x_gradient, to, inside, pair, da, db, HEAD_DIM, PAIRS, HALVES)
    part = ((batch * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)) * HEAD_DIM
    if weight_parts is not None:
        _store_sum(weight_parts, one + part, always, pair, weight_sum_a, weight_sum_b, HEAD_DIM, PAIRS, HALVES)
    if bias_parts is not None:
        _store_sum(bias_parts, one + part, always, pair, bias_sum_a, bias_sum_b, HEAD_DIM, PAIRS, HALVES)


@triton.jit
def _store_sum(base, tile, inside, pair, a, b, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr):
    """Store the sums over tokens and heads, as `_store` does."""
    total_a = tl.sum(tl.sum(a, axis=0, keep_dims=True), axis=1, keep_dims=True)
    total_b = tl.sum(tl.sum(b, axis=0, keep_dims=True), axis=1, keep_dims=True)
    _store(base, tile, inside, pair, total_a, total_b, HEAD_DIM, PAIRS, HALVES)


@triton.jit(do_not_specialize=["parts"])
def sum_parts(vector_parts, vector_gradient, parts, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the sum of the parts of some channels of weight or bias."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)
        exists = (row < parts)[:, None] & (column < HEAD_DIM)[None, :]
        total += tl.load(vector_parts + row[:, None] * HEAD_DIM + column[None, :], mask=exists, other=0.0)
    dtype: tl.constexpr = vector_gradient.dtype.element_ty
    tl.store(vector_gradient + column, tl.sum(total, axis=0).to(dtype), mask=column < HEAD_DIM)
