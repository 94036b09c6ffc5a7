"""Operands of the backward kernels' loops: dO, V, Q and K, padded and in the formats of their products.

Loops can then load whole tiles and ignore strides, lengths and rows without a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ...spec.layout import KEY_BLOCK, Sequences, batch_strides, padded_channels
from ...spec.operands import KeyPadding, Saved
from ...spec.recipe import Recipe
from .int8 import int8_scale, magnitude, round_to_int8
from .launch import UNSPECIALIZED, launch, strides
from .rotation import channel_factor, rotation_matrix
from .scores import LOG2E
from .sequences import operand_row, sequence_range
from .tiles import operand_token
from .tokens import load_tokens

BLOCK_ROWS = tl.constexpr(KEY_BLOCK)


@dataclass(frozen=True)
class QueryOperands:
    """Operands of the kernel that walks over queries; rows are as in `Saved`, channels powers of two.

    "16 bits" means the dtype of the caller's tensors. "Transposed" is int8 (operand batch, heads, channels, rows) with
    the tokens of each 16 in the order of `tiles.operand_token`. Beyond a sequence everything is 0.

    Attributes:
        gradient: dO in 16 bits (operand batch, q_heads, rows, v_channels), 0 in rows without a key.
        query: the values of the saved codes in 16 bits (operand batch, q_heads, rows, channels), rotation and
            equalizing undone; or, if dS is INT8, the codes transposed.
        gradient_codes, gradient_scale: dO in INT8 transposed, and float32 (operand batch, q_heads, rows / 64); None if
            P is not INT8.
        lse: float32 (operand batch, q_heads, rows), of scores in base 2; +inf in rows without a key, so that their P
            is 0.
        delta: float32, the same shape: rowsum(dO∘O).
    """

    gradient: torch.Tensor
    query: torch.Tensor
    gradient_codes: torch.Tensor | None
    gradient_scale: torch.Tensor | None
    lse: torch.Tensor
    delta: torch.Tensor


def query_operands(
    output_gradient: torch.Tensor,
    output: torch.Tensor,
    saved: Saved,
    batch: int,
    sequences: Sequences,
    recipe: Recipe,
) -> QueryOperands:
    """Make the operands of the kernel that walks over queries.

    Args:
        output_gradient, output: (batch, q_heads, tokens, v_head_dim), any strides; (1, q_heads, total tokens,
            v_head_dim) when packed.
        saved: the result of the forward pass.
        batch, sequences: the number of sequences and the token axis.
        recipe: says whether P and dS are multiplied in INT8, and how Q and K were transformed.
    """
    operand_batch, q_heads, rows, channels = saved.query.shape
    int8 = multiplies_int8(recipe)
    v_head_dim = output.shape[3]
    v_channels = padded_channels(v_head_dim)
    operands = QueryOperands(
        gradient=output.new_empty((operand_batch, q_heads, rows, v_channels)),
        query=_empty_copy(saved.query, output.dtype, int8),
        gradient_codes=saved.query.new_empty((operand_batch, q_heads, v_channels, rows)) if int8 else None,
        gradient_scale=saved.lse.new_empty((operand_batch, q_heads, rows // KEY_BLOCK)) if int8 else None,
        lse=torch.empty_like(saved.query_scale),
        delta=torch.empty_like(saved.query_scale),
    )
    blocks = sequences.rows_of_longest // KEY_BLOCK
    launch(
        prepare_queries,
        (blocks * batch * q_heads,),
        output_gradient=output_gradient,
        output=output,
        lse=saved.lse,
        codes=saved.query,
        codes_scale=saved.query_scale,
        gradient=operands.gradient,
        operand_lse=operands.lse,
        delta=operands.delta,
        query=operands.query,
        gradient_codes=operands.gradient_codes,
        gradient_scale=operands.gradient_scale,
        **_restoring(saved, recipe),
        group=q_heads // saved.key.shape[1],
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        blocks=blocks,
        q_heads=q_heads,
        v_head_dim=v_head_dim,
        rows=rows,
        **strides("gradient", batch_strides(output_gradient, sequences)),
        **strides("output", batch_strides(output, sequences)),
        **strides("lse", batch_strides(saved.lse, sequences)),
        CHANNELS=channels,
        V_CHANNELS=v_channels,
        INT8=int8,
        PACKED=sequences.packed,
        RAGGED=sequences.ranges is not None,
        num_warps=8 if max(channels, v_channels) > 128 else 4,
    )
    return operands


def key_operands(
    value: torch.Tensor,
    saved: Saved,
    batch: int,
    sequences: Sequences,
    padding: KeyPadding | None,
    recipe: Recipe,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the operands of the kernel that walks over keys.

    Args:
        value: (batch, kv_heads, tokens, v_head_dim), any strides, or packed in the same way.
        saved, batch, sequences, recipe: as above.
        padding: the keys that exist; None: all.

    Returns:
        (value, key): V in 16 bits (operand batch, kv_heads, rows, v_channels), 0 for keys that do not exist; and K in
        the form of `QueryOperands.query`.
    """
    operand_batch, kv_heads, rows, channels = saved.key.shape
    int8 = multiplies_int8(recipe)
    v_head_dim = value.shape[3]
    v_channels = padded_channels(v_head_dim)
    operand_value = value.new_empty((operand_batch, kv_heads, rows, v_channels))
    key = _empty_copy(saved.key, value.dtype, int8)
    blocks = sequences.rows_of_longest // KEY_BLOCK
    launch(
        prepare_keys,
        (blocks * batch * kv_heads,),
        value=value,
        codes=saved.key,
        codes_scale=saved.key_scale,
        operand_value=operand_value,
        key=key,
        **_restoring(saved, recipe),
        key_mask=None if padding is None else padding.key_mask_u8,
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        blocks=blocks,
        kv_heads=kv_heads,
        v_head_dim=v_head_dim,
        rows=rows,
        **strides("", batch_strides(value, sequences)),
        key_mask_stride=0 if padding is None else padding.strides[0],
        CHANNELS=channels,
        V_CHANNELS=v_channels,
        INT8=int8,
        HAS_KEY_MASK=padding is not None,
        PACKED=sequences.packed,
        RAGGED=sequences.ranges is not None,
        num_warps=8 if max(channels, v_channels) > 128 else 4,
    )
    return operand_value, key


def multiplies_int8(recipe: Recipe) -> bool:
    """Return whether P and dS are multiplied in INT8."""
    return recipe.backward == "int8"


def _restoring(saved: Saved, recipe: Recipe) -> dict[str, Any]:
    """Return the arguments that undo rotation and equalizing of the values of codes; INT8 operands stay transformed."""
    restores, codes = not multiplies_int8(recipe), saved.query
    return {
        "matrix": rotation_matrix(codes.shape[3], codes.dtype, codes.device) if restores and recipe.rotate else None,
        "equalizer": saved.equalizer if restores and recipe.equalize else None,
    }


def _empty_copy(codes: torch.Tensor, dtype: torch.dtype, int8: bool) -> torch.Tensor:
    """Allocate the second operand: transposed INT8 codes, or values in `dtype`."""
    if int8:
        return codes.new_empty((*codes.shape[:2], codes.shape[3], codes.shape[2]))
    return torch.empty_like(codes, dtype=dtype)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group"])
def prepare_queries(
    output_gradient,
    output,
    lse,
    codes,
    codes_scale,
    gradient,
    operand_lse,
    delta,
    query,
    gradient_codes,
    gradient_scale,
    matrix,
    equalizer,
    group,
    ranges,
    tokens,
    blocks,
    q_heads,
    v_head_dim,
    rows,
    gradient_stride_batch,
    gradient_stride_head,
    gradient_stride_token,
    gradient_stride_channel,
    output_stride_batch,
    output_stride_head,
    output_stride_token,
    output_stride_channel,
    lse_stride_batch,
    lse_stride_head,
    lse_stride_token,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    INT8: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Prepare a block of 64 tokens of Q and dO of one (batch, q head)."""
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (pair // q_heads).to(tl.int64), (pair % q_heads).to(tl.int64)
    start, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    if block // 2 * 128 < length:
        position = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        token = operand_token(position)
        channel, v_channel = tl.arange(0, CHANNELS), tl.arange(0, V_CHANNELS)
        at = lse + batch * lse_stride_batch + head * lse_stride_head + (start + token).to(tl.int64) * lse_stride_token
        natural = tl.load(at, mask=token < length, other=float("-inf"))
        has_key = natural != float("-inf")
        base = output_gradient + batch * gradient_stride_batch + head * gradient_stride_head
        dy, _counts = load_tokens(
            base,
            None,
            start,
            token,
            length,
            v_channel,
            v_head_dim,
            gradient_stride_token,
            gradient_stride_channel,
            False,
        )
        dy = tl.where(has_key[:, None], dy, 0.0)
        base = output + batch * output_stride_batch + head * output_stride_head
        y, _counts = load_tokens(
            base, None, start, token, length, v_channel, v_head_dim, output_stride_token, output_stride_channel, False
        )
        first = operand_row(batch, head, q_heads, rows, operand_start, PACKED)
        row = first + token
        tl.store(operand_lse + row, tl.where(has_key, natural * LOG2E, float("inf")))
        tl.store(delta + row, tl.sum(dy * y, 1))
        tl.store(gradient + row[:, None] * V_CHANNELS + v_channel[None, :], dy.to(gradient.dtype.element_ty))
        q = tl.load(codes + row[:, None] * CHANNELS + channel[None, :])
        if INT8:
            scale, inverse = int8_scale(tl.max(tl.max(magnitude(dy), 1), 0), False)
            tl.store(gradient_scale + first // BLOCK_ROWS + block, scale)
            head_index = operand_row(batch, head, q_heads, 1, 0, PACKED)
            store_transposed(
                gradient_codes, round_to_int8(dy * inverse), head_index * V_CHANNELS, operand_start + position, rows
            )
            store_transposed(query, q, head_index * CHANNELS, operand_start + position, rows)
        else:
            kv_pair = batch * (q_heads // group) + head // group
            values = restored(q, matrix, equalizer, kv_pair, channel, True) * tl.load(codes_scale + row)[:, None]
            tl.store(query + row[:, None] * CHANNELS + channel[None, :], values.to(query.dtype.element_ty))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def prepare_keys(
    value,
    codes,
    codes_scale,
    operand_value,
    key,
    matrix,
    equalizer,
    key_mask,
    ranges,
    tokens,
    blocks,
    kv_heads,
    v_head_dim,
    rows,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    key_mask_stride,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    INT8: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Prepare a block of 64 tokens of K and V of one (batch, kv head)."""
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    start, length, operand_start = sequence_range(ranges, batch, tokens, RAGGED)
    if block // 2 * 128 < length:
        position = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        token = operand_token(position)
        channel, v_channel = tl.arange(0, CHANNELS), tl.arange(0, V_CHANNELS)
        row = operand_row(batch, head, kv_heads, rows, operand_start, PACKED) + token
        base = value + batch * stride_batch + head * stride_head
        if HAS_KEY_MASK:
            key_mask += batch * key_mask_stride
        v, _counts = load_tokens(
            base, key_mask, start, token, length, v_channel, v_head_dim, stride_token, stride_channel, HAS_KEY_MASK
        )
        into = operand_value + row[:, None] * V_CHANNELS + v_channel[None, :]
        tl.store(into, v.to(operand_value.dtype.element_ty))
        k = tl.load(codes + row[:, None] * CHANNELS + channel[None, :])
        if INT8:
            head_index = operand_row(batch, head, kv_heads, 1, 0, PACKED)
            store_transposed(key, k, head_index * CHANNELS, operand_start + position, rows)
        else:
            scale = tl.load(codes_scale + row // 64 * 4 + row % 8 // 2).to(tl.float32)
            values = restored(k, matrix, equalizer, pair.to(tl.int64), channel, False) * scale[:, None]
            tl.store(key + row[:, None] * CHANNELS + channel[None, :], values.to(key.dtype.element_ty))


@triton.jit
def restored(codes, matrix, equalizer, kv_pair, channel, DIVIDE: tl.constexpr):
    """Return codes (tokens, channels) in float32 as they were before rotation and equalizing, without their scales."""
    CHANNELS: tl.constexpr = codes.shape[1]
    if matrix is None:
        x = codes.to(tl.float32)
    else:  # the sums are exact
        columns = tl.load(matrix + channel[:, None] * CHANNELS + channel[None, :]).T
        x = tl.dot(codes, columns).to(tl.float32) * CHANNELS**-0.5
    if equalizer is not None:
        x *= channel_factor(equalizer + kv_pair * CHANNELS, channel, CHANNELS, DIVIDE)[None, :]
    return x


@triton.jit
def store_transposed(into, x, first_channel, position, rows):
    """Store x (tokens, channels) at these positions of a transposed operand."""
    channel = first_channel + tl.arange(0, x.shape[1])
    tl.store(into + channel.to(tl.int64)[:, None] * rows + position[None, :], tl.trans(x))
