"""Tile lists of a mask: the tiles of scores to compute, the tiles that need the mask, and the keys that count."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..spec.call import PADDING_BIAS, Call
from ..spec.layout import BLOCK, ceil_div
from ..spec.masks import unexpanded
from .common.launch import MASK_AXES, UNSPECIALIZED, launch, strides

PADDING = tl.constexpr(PADDING_BIAS)
BLOCK_ROWS = tl.constexpr(BLOCK)
CLEARED = 1024
"""Numbers that a program of `clear_keys` clears."""
WIDTH = tl.constexpr(32)  # columns of a tile that are read at once: registers do not suffice for more
# Bits that describe a set of scores.
ALLOWED, UNPADDED, SEEN, MASKED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)


def mask_entries(call: Call, block_m: int, block_n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read the mask of a call once, and list the tiles of (block_m, block_n) scores that it leaves to compute.

    Keys are counted without heavy and recent keys.

    Returns:
        (mask, entries, key_mask_u8). `mask` is the mask as kernels read it, (batch, q_heads, q_len, kv_len) with stride
        0 where it is broadcast; bool as uint8. `entries`, int32 (mask batch, mask heads, row blocks, 1 + tiles), holds
        the number of tiles to compute for a block of rows, then 2 · tile + (1 if some of its scores are masked or
        biased) for each, in order; sizes are 1 where the mask is broadcast. `key_mask_u8`, uint8 (mask batch, kv_len),
        is 0 for keys that no mean and no scale counts (`reference.forward.counted_keys`).
    """
    mask = call.mask.tensor
    assert mask is not None
    shape, first_keys = (*call.query.shape[:3], call.key.shape[2]), call.first_keys
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    stored = unexpanded(mask)
    batches, heads, rows, columns = (stored.shape[0], stored.shape[1], stored.shape[2], shape[3])
    mask = mask.expand(shape)
    block_m, row_blocks = (block_m, ceil_div(shape[2], block_m)) if call.is_causal or rows > 1 else (16, 1)
    entries = mask.new_empty(
        (batches, heads, row_blocks, 1 + ceil_div(columns - first_keys, block_n)), dtype=torch.int32
    )
    # Per batch: bits of each key (ALLOWED: some query may attend to it; UNPADDED: also no bias marks it as padding),
    # then a flag that is not 0 if some query has no key except padding.
    keys = mask.new_empty((batches, columns + 1), dtype=torch.int32)
    launch(clear_keys, (ceil_div(keys.numel(), CLEARED),), keys=keys, elements=keys.numel(), BLOCK=CLEARED)
    launch(
        list_tiles,
        (row_blocks, heads, batches),
        mask=mask,
        entries=entries,
        keys=keys,
        q_len=shape[2],
        kv_len=columns,
        causal_offset=call.causal_offset,
        recent_start=call.recent_start if call.has_recent_keys else 0,
        **strides("", mask.stride(), MASK_AXES),
        places=entries.shape[3],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        FIRST=first_keys,
        BOOL=mask.dtype == torch.uint8,
        CAUSAL=call.is_causal,
        RECENT=call.has_recent_keys,
        num_warps=max(4, block_m // 16),
    )
    key_mask_u8 = mask.new_empty((batches, columns), dtype=torch.uint8)
    launch(
        count_keys,
        (ceil_div(columns, 1024), batches),
        keys=keys,
        key_mask=key_mask_u8,
        kv_len=columns,
        BLOCK=1024,
    )
    return mask, entries, key_mask_u8


@triton.jit
def bitwise_or(x, y):
    return x | y


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "elements"])
def clear_keys(keys, elements, BLOCK: tl.constexpr):
    """Set the bits of keys, so many numbers, to 0. It is our own kernel because replays know no other operators."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(keys + at, tl.zeros((BLOCK,), tl.int32), mask=at < elements)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def list_tiles(
    mask,
    entries,
    keys,
    q_len,
    kv_len,
    causal_offset,
    recent_start,
    stride_batch,
    stride_head,
    stride_row,
    stride_column,
    places,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,
    BOOL: tl.constexpr,
    CAUSAL: tl.constexpr,
    RECENT: tl.constexpr,
):
    """List the tiles of one block of rows of one (mask batch, mask head), and add their scores' bits to the keys'."""
    block, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_row = row < q_len
    last_column = FIRST + row // BLOCK_ROWS * BLOCK_ROWS + recent_start - 1 if RECENT else row + causal_offset
    base = mask + batch * stride_batch + head * stride_head + row.to(tl.int64)[:, None] * stride_row
    keys += batch * (kv_len + 1)
    entries += ((batch * tl.num_programs(1) + head) * tl.num_programs(0) + block) * places
    count = 0
    row_has_key = tl.zeros((BLOCK_M,), tl.int32)
    # First keys lie in tiles below 0; only their bits are wanted.
    for tile in range(-((FIRST + BLOCK_N - 1) // BLOCK_N), tl.cdiv(kv_len - FIRST, BLOCK_N)):
        tile_bits = 0
        for part in tl.static_range(BLOCK_N // WIDTH):
            column = FIRST + tile * BLOCK_N + part * WIDTH + tl.arange(0, WIDTH)
            exists = column < kv_len
            if FIRST % BLOCK_N > 0:
                exists = exists & (column >= 0)
            inside = inside_row[:, None] & exists[None, :]
            at = base + column.to(tl.int64)[None, :] * stride_column
            if BOOL:
                value = tl.load(at, mask=inside, other=0)
                allowed = value != 0
                unpadded = allowed
                plain = allowed
            else:
                value = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
                allowed = value != float("-inf")
                unpadded = value > PADDING
                plain = value == 0.0
            row_has_key |= tl.max(unpadded.to(tl.int32), 1)
            seen = allowed
            if CAUSAL:
                not_hidden = column[None, :] <= last_column[:, None]
                seen = allowed & not_hidden
                plain = plain & not_hidden
            bits = tl.where(allowed, ALLOWED, 0) | tl.where(unpadded, UNPADDED, 0) | tl.where(seen, SEEN, 0)
            bits = tl.reduce(bits | tl.where(plain | ~inside_row[:, None], 0, MASKED), 0, bitwise_or)
            part_bits = tl.reduce(bits, 0, bitwise_or)
            # Other programs change `known`, so threads that hold the same key may read different values of it: `news`
            # must stay in its thread and be combined only with values that all threads agree on.
            known = tl.load(keys + column, mask=exists, other=ALLOWED | UNPADDED)
            news = (part_bits & (ALLOWED | UNPADDED) & ~known) != 0
            tl.atomic_or(keys + column, bits & (ALLOWED | UNPADDED), mask=news)
            tile_bits |= part_bits
        listed = (tile_bits & SEEN) != 0
        if FIRST > 0:
            listed = listed & (tile >= 0)
        if listed:
            tl.store(entries + 1 + count, 2 * tile + ((tile_bits & MASKED) != 0).to(tl.int32))
            count += 1
    tl.store(entries, count)
    if tl.min(tl.where(inside_row, row_has_key, 1), 0) == 0:
        tl.atomic_or(keys + kv_len, 1)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def count_keys(keys, key_mask, kv_len, BLOCK: tl.constexpr):
    """Write to `key_mask` which keys count: keys without padding if every query has such a key, else all seen keys."""
    keys += tl.program_id(1).to(tl.int64) * (kv_len + 1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < kv_len
    bits = tl.load(keys + column, mask=inside, other=0)
    counts = tl.where(tl.load(keys + kv_len) == 0, bits & UNPADDED, bits & ALLOWED)
    tl.store(key_mask + tl.program_id(1).to(tl.int64) * kv_len + column, counts.to(tl.uint8), mask=inside)
