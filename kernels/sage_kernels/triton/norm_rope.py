"""Norm and rotation of heads, and their gradients: one pass over memory each.

A program has some heads of some tokens, or all heads of a token where they have one norm. Of each head it holds the
first and the second channels of the pairs that are rotated: neighbours, which lie in one thread, or halves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..heads import Norm, Rope
from ..language.launch import UNSPECIALIZED, launch, strides
from ..layout import ceil_div

FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 2048, 4096  # of a program's heads, padding included (measured on an H200)
WARPS = 4
LARGE_TOKEN, LARGE_TOKEN_WARPS = 8192, 8  # elements of a token whose heads have one norm, from which on it is so many
MOST_HEADS = 8  # of a token in one program, which read its angles once
AXES = ("batch", "token", "head")
TABLE_AXES = ("batch", "row", "head", "channel")


def forward(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
    """Return the heads, contiguous, in the dtype of x.

    Args:
        x: (batch, tokens, heads, head_dim), float16 or bfloat16, whose channels lie one behind another.
        norm, rope: what to do.
    """
    output = x.new_empty(x.shape)
    if x.numel():
        grid, arguments = _arguments(x, norm, rope, FORWARD_ELEMENTS)
        launch(norm_rope_forward, grid, x=x, output=output, enable_fp_fusion=False, **arguments)
    return output


def backward(
    gradient: torch.Tensor, x: torch.Tensor, norm: Norm | None, rope: Rope | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, contiguous, and of the norm's weight and bias; None of what it has not.

    Args:
        gradient: of the output, of its size and dtype.
        x, norm, rope: as in `forward`; each head has a norm of its own.
    """
    x_gradient = x.new_empty(x.shape)
    vectors = (None, None) if norm is None else (norm.weight, norm.bias)
    if not x.numel():
        weight_gradient, bias_gradient = (None if one is None else torch.zeros_like(one) for one in vectors)
        return x_gradient, weight_gradient, bias_gradient
    if gradient.stride(-1) != 1:
        gradient = gradient.contiguous()
    grid, arguments = _arguments(x, norm, rope, BACKWARD_ELEMENTS)
    weight_parts, bias_parts = (
        None if one is None else x.new_empty((*grid, x.shape[-1]), dtype=torch.float32) for one in vectors
    )
    launch(
        norm_rope_backward,
        grid,
        gradient=gradient,
        x=x,
        x_gradient=x_gradient,
        weight_parts=weight_parts,
        bias_parts=bias_parts,
        **strides("gradient", gradient.stride(), AXES),
        **arguments,
    )
    weight_gradient, bias_gradient = (
        None if one is None or part is None else part.sum((0, 1, 2)).to(one.dtype)
        for one, part in zip(vectors, (weight_parts, bias_parts), strict=True)
    )
    return x_gradient, weight_gradient, bias_gradient


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
        "bias": None if norm is None else norm.bias,
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
        "ROUNDS": norm is not None and norm.rounds,
        "ACROSS": across,
        "HALVES": rope is not None and rope.halves,
        "ANGLES_OF_HEADS": table_strides[2] != 0,
        "ANGLES_OF_CHANNELS": rope is not None and rope.cosine.shape[-1] == head_dim,
        "ROUNDS_PRODUCTS": rope is not None and rope.cosine.dtype == x.dtype,
    }
    return (ceil_div(tokens, block), ceil_div(heads, together), batch), arguments


@triton.jit
def _load(base, tile, inside, pair, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr):
    """Load the first and the second channels of pairs, (tokens, heads, PAIRS) each, in float32.

    Args:
        base: of the tensor.
        tile: offset of each head, (tokens, heads).
        inside: whether the head exists, (tokens, heads).
        pair: 0…PAIRS - 1.
    """
    if HALVES:
        exists = inside[:, :, None] & (pair < HEAD_DIM // 2)[None, None, :]
        first = base + tile[:, :, None] + pair[None, None, :]
        a = tl.load(first, mask=exists, other=0.0)
        b = tl.load(first + HEAD_DIM // 2, mask=exists, other=0.0)
    else:
        channel = tl.arange(0, 2 * PAIRS)
        exists = inside[:, :, None] & (channel < HEAD_DIM)[None, None, :]
        both = tl.load(base + tile[:, :, None] + channel[None, None, :], mask=exists, other=0.0)
        a, b = tl.split(tl.reshape(both, (tile.shape[0], tile.shape[1], PAIRS, 2)))
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store(base, tile, inside, pair, a, b, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr):
    """Store what `_load` loads."""
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
def _table(
    table,
    row,
    known,
    pair,
    stride_channel,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HALVES: tl.constexpr,
    OWN: tl.constexpr,
):
    """Load a table's values for the first and the second channels of pairs, (tokens, heads, PAIRS) each, in float32.

    Args:
        table: its first value.
        row: offset of each row, (tokens, heads or 1).
        known: whether it exists, alike.
        pair: 0…PAIRS - 1.
        stride_channel: elements from channel to channel, or from pair to pair.
        OWN: each channel has a value of its own; otherwise each pair has one.
    """
    if OWN and not HALVES:
        channel = tl.arange(0, 2 * PAIRS)
        exists = known[:, :, None] & (channel < HEAD_DIM)[None, None, :]
        both = tl.load(table + row[:, :, None] + channel[None, None, :] * stride_channel, mask=exists, other=0.0)
        a, b = tl.split(tl.reshape(both, (row.shape[0], row.shape[1], PAIRS, 2)))
    else:
        exists = known[:, :, None] & (pair < HEAD_DIM // 2)[None, None, :]
        first = table + row[:, :, None] + pair[None, None, :] * stride_channel
        a = tl.load(first, mask=exists, other=0.0)
        b = a
        if OWN:
            b = tl.load(first + HEAD_DIM // 2 * stride_channel, mask=exists, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "rows", "offset"])
def norm_rope_forward(
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
    ANGLES_OF_CHANNELS: tl.constexpr,
    ROUNDS_PRODUCTS: tl.constexpr,
):
    """Write the heads of a block of tokens."""
    dtype: tl.constexpr = x.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    batch, pair = tl.program_id(2).to(tl.int64), tl.arange(0, PAIRS)
    inside = (token < tokens)[:, None] & (head < heads)[None, :]
    at = batch * stride_batch + token.to(tl.int64)[:, None] * stride_token + head[None, :] * stride_head
    a, b = _load(x, at, inside, pair, HEAD_DIM, PAIRS, HALVES)
    if NORM != "":
        exists = inside[:, :, None] & (pair < HEAD_DIM // 2)[None, None, :]
        a, b, _ = _normalize(a, b, exists, heads, eps, HEAD_DIM, NORM, ACROSS)
        which_vector = tl.arange(0, HEADS if ACROSS else 1)
        vector, known = (which_vector * HEAD_DIM)[None, :], (which_vector < heads)[None, :]
        if weight is not None:
            if ROUNDS:
                a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
            weight_a, weight_b = _load(weight, vector, known, pair, HEAD_DIM, PAIRS, HALVES)
            a, b = a * weight_a, b * weight_b
        if bias is not None:
            bias_a, bias_b = _load(bias, vector, known, pair, HEAD_DIM, PAIRS, HALVES)
            a, b = a + bias_a, b + bias_b
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    if cosine is not None:
        row = token + offset
        turns = (row >= 0) & (row < rows)
        which = tl.program_id(1) * HEADS + tl.arange(0, HEADS if ANGLES_OF_HEADS else 1)
        known = turns[:, None] & (which < heads)[None, :]
        place = batch * table_stride_batch + row.to(tl.int64)[:, None] * table_stride_row
        place += which[None, :] * table_stride_head
        cosine_a, cosine_b = _table(
            cosine, place, known, pair, table_stride_channel, HEAD_DIM, PAIRS, HALVES, ANGLES_OF_CHANNELS
        )
        sines = cosine + 1 if sine is None else sine  # the imaginary parts of complex numbers
        sine_a, sine_b = _table(
            sines, place, known, pair, table_stride_channel, HEAD_DIM, PAIRS, HALVES, ANGLES_OF_CHANNELS
        )
        if ROUNDS_PRODUCTS:
            first = (a * cosine_a).to(dtype).to(tl.float32) - (b * sine_a).to(dtype).to(tl.float32)
            second = (b * cosine_b).to(dtype).to(tl.float32) + (a * sine_b).to(dtype).to(tl.float32)
        else:
            first = a * cosine_a - b * sine_a
            second = b * cosine_b + a * sine_b
        a = tl.where(turns[:, None, None], first, a)
        b = tl.where(turns[:, None, None], second, b)
    to = ((batch * tokens + token.to(tl.int64)[:, None]) * heads + head[None, :]) * HEAD_DIM
    _store(output, to, inside, pair, a, b, HEAD_DIM, PAIRS, HALVES)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "rows", "offset"])
def norm_rope_backward(
    gradient,
    x,
    x_gradient,
    weight_parts,
    bias_parts,
    weight,
    bias,
    cosine,
    sine,
    tokens,
    heads,
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
    ROUNDS: tl.constexpr,
    ACROSS: tl.constexpr,
    HALVES: tl.constexpr,
    ANGLES_OF_HEADS: tl.constexpr,
    ANGLES_OF_CHANNELS: tl.constexpr,
    ROUNDS_PRODUCTS: tl.constexpr,
):
    """Write the gradient of a block of tokens, and its part of those of weight and bias."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    batch, pair = tl.program_id(2).to(tl.int64), tl.arange(0, PAIRS)
    inside = (token < tokens)[:, None] & (head < heads)[None, :]
    from_gradient = batch * gradient_stride_batch + token.to(tl.int64)[:, None] * gradient_stride_token
    from_gradient += head[None, :] * gradient_stride_head
    da, db = _load(gradient, from_gradient, inside, pair, HEAD_DIM, PAIRS, HALVES)
    if cosine is not None:
        row = token + offset
        turns = (row >= 0) & (row < rows)
        which = tl.program_id(1) * HEADS + tl.arange(0, HEADS if ANGLES_OF_HEADS else 1)
        known = turns[:, None] & (which < heads)[None, :]
        place = batch * table_stride_batch + row.to(tl.int64)[:, None] * table_stride_row
        place += which[None, :] * table_stride_head
        cosine_a, cosine_b = _table(
            cosine, place, known, pair, table_stride_channel, HEAD_DIM, PAIRS, HALVES, ANGLES_OF_CHANNELS
        )
        sines = cosine + 1 if sine is None else sine  # the imaginary parts of complex numbers
        sine_a, sine_b = _table(
            sines, place, known, pair, table_stride_channel, HEAD_DIM, PAIRS, HALVES, ANGLES_OF_CHANNELS
        )
        first = da * cosine_a + db * sine_b
        second = db * cosine_b - da * sine_a
        da = tl.where(turns[:, None, None], first, da)
        db = tl.where(turns[:, None, None], second, db)
    if NORM != "":
        at = batch * stride_batch + token.to(tl.int64)[:, None] * stride_token + head[None, :] * stride_head
        a, b = _load(x, at, inside, pair, HEAD_DIM, PAIRS, HALVES)
        exists = inside[:, :, None] & (pair < HEAD_DIM // 2)[None, None, :]
        a, b, inverse = _normalize(a, b, exists, heads, eps, HEAD_DIM, NORM, ACROSS)
        part = ((batch * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)) * HEAD_DIM
        here = tl.full((1, 1), part, tl.int64)
        always = tl.full((1, 1), 1, tl.int1)
        if bias_parts is not None:
            _store(bias_parts, here, always, pair, _total(da), _total(db), HEAD_DIM, PAIRS, HALVES)
        if weight is not None:
            _store(weight_parts, here, always, pair, _total(da * a), _total(db * b), HEAD_DIM, PAIRS, HALVES)
            weight_a, weight_b = _load(weight, tl.zeros((1, 1), tl.int32), always, pair, HEAD_DIM, PAIRS, HALVES)
            da, db = da * weight_a, db * weight_b
        along = _mean(da * a, db * b, HEAD_DIM, ACROSS)
        if NORM == "layer":
            mean = _mean(da, db, HEAD_DIM, ACROSS)
            da, db = da - mean, db - mean
        da, db = (da - a * along) * inverse, (db - b * along) * inverse
    to = ((batch * tokens + token.to(tl.int64)[:, None]) * heads + head[None, :]) * HEAD_DIM
    _store(x_gradient, to, inside, pair, da, db, HEAD_DIM, PAIRS, HALVES)


@triton.jit
def _total(values):
    """Return the sum over tokens and heads, (1, 1, PAIRS)."""
    return tl.sum(tl.sum(values, axis=0, keep_dims=True), axis=1, keep_dims=True)
