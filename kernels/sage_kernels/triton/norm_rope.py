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

ELEMENTS = 4096  # of a program's heads, its padding included: 32 of a thread, four loads of 16 bytes in flight
WARPS = 4
MOST_HEADS = 8  # of a token in one program, which read its angles once
AXES = ("batch", "token", "head")
TABLE_AXES = ("batch", "row", "head", "pair")


def forward(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
    """Return the heads, contiguous, in the dtype of x.

    Args:
        x: (batch, tokens, heads, head_dim), float16 or bfloat16, whose channels lie one behind another.
        norm, rope: what to do.
    """
    output = x.new_empty(x.shape)
    if x.numel():
        grid, arguments = _arguments(x, norm, rope)
        launch(norm_rope_forward, grid, x=x, output=output, num_warps=WARPS, enable_fp_fusion=False, **arguments)
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
    grid, arguments = _arguments(x, norm, rope)
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
        num_warps=WARPS,
        **strides("gradient", gradient.stride(), AXES),
        **arguments,
    )
    weight_gradient, bias_gradient = (
        None if one is None or part is None else part.sum((0, 1, 2)).to(one.dtype)
        for one, part in zip(vectors, (weight_parts, bias_parts), strict=True)
    )
    return x_gradient, weight_gradient, bias_gradient


def _arguments(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid, and the arguments that both kernels have."""
    batch, tokens, heads, head_dim = x.shape
    channels = triton.next_power_of_2(head_dim)
    across = norm is not None and norm.across_heads
    together = triton.next_power_of_2(heads) if across else min(MOST_HEADS, heads & -heads)
    block = max(1, ELEMENTS // (together * channels))
    table_strides = (0, 0, 0, 0) if rope is None else rope.strides(head_dim)
    arguments = {
        "weight": None if norm is None else norm.weight,
        "bias": None if norm is None else norm.bias,
        "cosine": None if rope is None else rope.cosine,
        "sine": None if rope is None else rope.sine,
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
    stride_pair,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Return whether tokens are rotated, (tokens, 1, 1), and cosine and sine, (tokens, HEADS, PAIRS), else 0."""
    turns = ((row >= 0) & (row < rows))[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[None, :, None]
    exists = turns & (head < heads) & (pair < HEAD_DIM // 2)[None, None, :]
    place = batch * stride_batch + row.to(tl.int64)[:, None, None] * stride_row
    place += head * stride_head + pair[None, None, :] * stride_pair
    return turns, tl.load(cosine + place, mask=exists, other=0.0), tl.load(sine + place, mask=exists, other=0.0)


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
    table_stride_pair,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    ACROSS: tl.constexpr,
    HALVES: tl.constexpr,
    ANGLES_OF_HEADS: tl.constexpr,
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
        turns, c, s = _angles(
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
            table_stride_pair,
            HEAD_DIM,
            HEADS if ANGLES_OF_HEADS else 1,
        )
        first = a * c - b * s
        second = b * c + a * s
        a = tl.where(turns, first, a)
        b = tl.where(turns, second, b)
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
    table_stride_pair,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    ACROSS: tl.constexpr,
    HALVES: tl.constexpr,
    ANGLES_OF_HEADS: tl.constexpr,
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
        turns, c, s = _angles(
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
            table_stride_pair,
            HEAD_DIM,
            HEADS if ANGLES_OF_HEADS else 1,
        )
        first = da * c + db * s
        second = db * c - da * s
        da = tl.where(turns, first, da)
        db = tl.where(turns, second, db)
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
