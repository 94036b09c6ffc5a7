"""Block lists for kernels that walk over keys: tiles without a mask come first, wholly hidden tiles are left out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..spec.call import BackwardCall, Call, clamped_offset
from .common.launch import UNSPECIALIZED, launch
from .common.sequences import sequence_range

SOME, ALL = tl.constexpr(1), tl.constexpr(2)  # how many keys of a tile exist, if any


def block_entries(call: Call | BackwardCall, block_n: int) -> torch.Tensor:
    """Sort the lists of a call for tiles of block_n keys, a divisor of the list's block_n.

    Returns:
        int32 (list batch, list heads, blocks of rows, 3 + places): the number of tiles without a masked score, the
        number of all tiles, then the tiles, unmasked tiles first; one place more may be read. Sizes are 1 where the
        list is broadcast; with packed sequences, sequences are the batch.
    """
    blocks, key_mask, kv_len = call.mask.blocks, call.mask.key_mask, call.kv_len
    assert blocks is not None
    parts = blocks.block_n // block_n
    state = None
    if key_mask is not None:
        of_tile = F.pad(key_mask.view(torch.uint8), (0, -kv_len % block_n)).unflatten(-1, (-1, block_n))
        state = of_tile.amin(-1) + of_tile.amax(-1)
    batches, heads, row_blocks, places = blocks.tiles.shape
    if key_mask is not None:
        batches = max(batches, key_mask.shape[0])
    q_sequences, kv_sequences = call.token_axes
    if call.lengths is not None:
        batches = call.batch
    counts, tiles = (x.expand(batches, *x.shape[1:]) for x in (blocks.counts, blocks.tiles))
    entries = tiles.new_empty((batches, heads, row_blocks, 3 + parts * places))
    launch(
        sort_tiles,
        (row_blocks, heads, batches),
        counts=counts,
        tiles=tiles,
        state=state,
        entries=entries,
        q_ranges=q_sequences.ranges,
        kv_ranges=kv_sequences.ranges,
        q_len=call.q_len,
        kv_len=kv_len,
        causal_offset=clamped_offset(call.causal_offset, call.q_len, kv_len),
        counts_stride_batch=counts.stride(0),
        counts_stride_head=counts.stride(1),
        counts_stride_row=counts.stride(2),
        tiles_stride_batch=tiles.stride(0),
        tiles_stride_head=tiles.stride(1),
        tiles_stride_row=tiles.stride(2),
        tiles_stride_place=tiles.stride(3),
        places=entries.shape[3],
        state_stride=0 if state is None or state.shape[0] == 1 else state.stride(0),
        BLOCK_M=blocks.block_m,
        BLOCK_N=block_n,
        PARTS=parts,
        CAUSAL=call.is_causal,
        PADDED=state is not None,
        RAGGED=call.lengths is not None,
        WIDTH=min(1024, max(32, triton.next_power_of_2(parts * places))),
    )
    return entries


@triton.jit
def find_tiles(
    tiles,
    state,
    place,
    count,
    first_row,
    last_row,
    kv_len,
    causal_offset,
    stride_place,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return (tile, seen, unmasked) for places in a list: a tile's number, whether some or all of its scores count."""
    listed = place < count
    tile = tl.load(tiles + (place // PARTS).to(tl.int64) * stride_place, mask=listed, other=0) * PARTS + place % PARTS
    first, last = tile * BLOCK_N, tile * BLOCK_N + BLOCK_N - 1
    seen = listed & (tile >= 0) & (first < kv_len)
    unmasked = seen & (last < kv_len)
    if CAUSAL:
        seen = seen & (first <= last_row + causal_offset)
        unmasked = unmasked & (last <= first_row + causal_offset)
    if PADDED:
        existing = tl.load(state + tile, mask=seen, other=0)
        seen = seen & (existing >= SOME)
        unmasked = unmasked & (existing == ALL)
    return tile, seen, unmasked & seen


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "places"])
def sort_tiles(
    counts,
    tiles,
    state,
    entries,
    q_ranges,
    kv_ranges,
    q_len,
    kv_len,
    causal_offset,
    counts_stride_batch,
    counts_stride_head,
    counts_stride_row,
    tiles_stride_batch,
    tiles_stride_head,
    tiles_stride_row,
    tiles_stride_place,
    places,
    state_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    RAGGED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the entries (`block_entries`) of one block of rows of one (list batch, list head)."""
    block, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    entries += ((batch * tl.num_programs(1) + head) * tl.num_programs(0) + block) * places
    tiles += batch * tiles_stride_batch + head * tiles_stride_head + block.to(tl.int64) * tiles_stride_row
    count = tl.load(counts + batch * counts_stride_batch + head * counts_stride_head + block * counts_stride_row)
    count = tl.minimum(count * PARTS, places - 3)
    if PADDED:
        state += batch * state_stride
    _q_start, q_len, _q_row = sequence_range(q_ranges, batch, q_len, RAGGED)
    _kv_start, kv_len, _kv_row = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    first_row = block * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, q_len) - 1
    lane = tl.arange(0, WIDTH)
    unmasked_count = 0
    for start in range(0, count, WIDTH):
        _, _, unmasked = find_tiles(
            tiles, state, start + lane, count, first_row, last_row, kv_len, causal_offset, tiles_stride_place,
            BLOCK_N, PARTS, CAUSAL, PADDED,
        )  # fmt: skip
        unmasked_count += tl.sum(unmasked.to(tl.int32), 0)
    before, behind = 0, unmasked_count
    for start in range(0, count, WIDTH):
        tile, seen, unmasked = find_tiles(
            tiles, state, start + lane, count, first_row, last_row, kv_len, causal_offset, tiles_stride_place,
            BLOCK_N, PARTS, CAUSAL, PADDED,
        )  # fmt: skip
        is_partial = (seen & ~unmasked).to(tl.int32)
        at = tl.where(unmasked, before + tl.cumsum(unmasked.to(tl.int32), 0), behind + tl.cumsum(is_partial, 0)) - 1
        tl.store(entries + 2 + at, tile, mask=seen)
        before += tl.sum(unmasked.to(tl.int32), 0)
        behind += tl.sum(is_partial, 0)
    tl.store(entries, unmasked_count)
    tl.store(entries + 1, behind)
