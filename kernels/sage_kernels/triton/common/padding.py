"""Padding of keys as kernels read it: which keys exist, their spans, and the tiles that need no mask."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...spec.operands import KeyPadding
from .launch import UNSPECIALIZED, launch


def key_padding(key_mask: torch.Tensor) -> KeyPadding:
    """Find the spans of existing keys; bool `key_mask`, (batch or 1, kv_len), is False where a key does not exist."""
    padding = KeyPadding.of(key_mask)
    write_spans(padding)
    return padding


def write_spans(padding: KeyPadding) -> None:
    """Write the spans of a padding, from the keys that exist."""
    batch, kv_len = padding.key_mask_u8.shape
    launch(
        find_spans,
        (batch,),
        key_mask=padding.key_mask_u8,
        spans=padding.spans,
        kv_len=kv_len,
        BLOCK=1024,
    )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def find_spans(key_mask, spans, kv_len, BLOCK: tl.constexpr):
    """Write the spans (`KeyPadding.spans`) of one batch element."""
    batch = tl.program_id(0).to(tl.int64)
    key_mask += batch * kv_len
    lane = tl.arange(0, BLOCK)
    first = tl.zeros((BLOCK,), tl.int32) + kv_len
    end = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, kv_len, BLOCK):
        exists = tl.load(key_mask + start + lane, mask=start + lane < kv_len, other=0) != 0
        first = tl.minimum(first, tl.where(exists, start + lane, kv_len))
        end = tl.maximum(end, tl.where(exists, start + lane + 1, 0))
    begin = tl.min(first, 0)
    hole = tl.zeros((BLOCK,), tl.int32) + kv_len
    for start in range(0, kv_len, BLOCK):
        missing = tl.load(key_mask + start + lane, mask=start + lane < kv_len, other=1) == 0
        hole = tl.minimum(hole, tl.where(missing & (start + lane > begin), start + lane, kv_len))
    tl.store(spans + 3 * batch, begin)
    tl.store(spans + 3 * batch + 1, tl.min(hole, 0))
    tl.store(spans + 3 * batch + 2, tl.max(end, 0))


@triton.jit
def key_exists(column, kv_len, key_mask, PADDED: tl.constexpr):
    """Return whether keys exist, given their indices in the sequence and the pointer to its key mask."""
    exists = column < kv_len
    if PADDED:
        exists = exists & (tl.load(key_mask + column, mask=exists, other=0) != 0)
    return exists


@triton.jit
def key_tiles(
    spans,
    batch,
    stride,
    kv_len,
    row_block,
    causal_offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """Return the keys that a block of BLOCK_M rows sees: (begin, full_begin, full_end, columns).

    Tiles full_begin…full_end - 1 need no mask; tiles begin…full_begin - 1, and tiles from full_end on with keys below
    `columns`, need one. Only `spans` include the FIRST keys at the front: all else is counted from the key after them.
    """
    begin, full_begin, full_end, columns = 0, 0, kv_len // BLOCK_N, kv_len
    if PADDED:
        spans += batch * stride
        first, hole, columns = tl.load(spans), tl.load(spans + 1), tl.load(spans + 2)
        if FIRST > 0:
            first, hole, columns = tl.maximum(first - FIRST, 0), tl.maximum(hole - FIRST, 0), columns - FIRST
        begin, full_begin, full_end = first // BLOCK_N, tl.cdiv(first, BLOCK_N), hole // BLOCK_N
    if CAUSAL:
        columns = tl.minimum(columns, (row_block + 1) * BLOCK_M + causal_offset)
        full_end = tl.minimum(full_end, tl.maximum(row_block * BLOCK_M + causal_offset + 1, 0) // BLOCK_N)
    return begin, full_begin, tl.maximum(full_begin, full_end), columns
