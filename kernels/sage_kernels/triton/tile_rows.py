"""Inverted block lists, for the kernel of dK and dV: the blocks of rows that attend to each tile of keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..spec.block_list import BlockList
from ..spec.call import BackwardCall
from ..spec.layout import ceil_div
from .common.launch import MASK_AXES, UNSPECIALIZED, launch, strides
from .common.sequences import sequence_range

TILES, ROWS = tl.constexpr(32), tl.constexpr(32)  # tiles and blocks of rows that a program reads at once


@dataclass(frozen=True)
class TileRows:
    """The blocks of rows that attend to each tile of keys, as causality leaves them.

    Keys that do not exist hide no block here: they change no other key's gradients.

    Attributes:
        rows: int32 (list batch, list heads, places): the blocks of each tile, tile after tile, in ascending order; one
            place more may be read. Sizes are 1 where the list is broadcast. With packed sequences, sequences are the
            batch, and their lengths hide blocks beyond their ends.
        spans: int32 (list batch, list heads, tiles, 3): for each tile the place of its first block that sees some of
            the keys, the place of its first block that sees all keys, and the end of its blocks.
        blocks: the block list.
    """

    rows: torch.Tensor
    spans: torch.Tensor
    blocks: BlockList


def tile_rows(call: BackwardCall) -> TileRows:
    """Invert the block list of a call."""
    blocks = call.mask.blocks
    assert blocks is not None
    counts, tiles = blocks.counts, blocks.tiles
    if call.lengths is not None:
        counts, tiles = (x.expand(call.batch, *x.shape[1:]) for x in (counts, tiles))
    batches, heads, row_blocks, places = tiles.shape
    q_sequences, kv_sequences = call.token_axes
    tile_count = ceil_div(call.kv_len, blocks.block_n)
    kept = tiles.new_zeros((batches, heads, row_blocks, tile_count), dtype=torch.uint8)
    launch(
        mark_tiles,
        (row_blocks, heads, batches),
        counts=counts,
        tiles=tiles,
        kept=kept,
        q_ranges=q_sequences.ranges,
        q_len=call.q_len,
        tile_count=tile_count,
        places=places,
        **strides("counts", counts.stride(), MASK_AXES),
        **strides("tiles", tiles.stride(), (*MASK_AXES[:3], "place")),
        LIST_M=blocks.block_m,
        RAGGED=q_sequences.ranges is not None,
        WIDTH=min(1024, max(32, triton.next_power_of_2(places))),
    )
    ends = kept.sum(2, dtype=torch.int32).cumsum(-1, dtype=torch.int32)
    rows = tiles.new_empty((batches, heads, row_blocks * places + 1))
    spans = tiles.new_empty((batches, heads, tile_count, 3))
    launch(
        list_rows,
        (ceil_div(tile_count, TILES.value), heads, batches),
        kept=kept,
        ends=ends,
        rows=rows,
        spans=spans,
        q_ranges=q_sequences.ranges,
        kv_ranges=kv_sequences.ranges,
        q_len=call.q_len,
        kv_len=call.kv_len,
        causal_offset=call.kernel_offset,
        tile_count=tile_count,
        row_blocks=row_blocks,
        places=rows.shape[2],
        LIST_M=blocks.block_m,
        LIST_N=blocks.block_n,
        CAUSAL=call.is_causal,
        RAGGED=q_sequences.ranges is not None,
    )
    return TileRows(rows, spans, blocks)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "tile_count", "places"])
def mark_tiles(
    counts,
    tiles,
    kept,
    q_ranges,
    q_len,
    tile_count,
    places,
    counts_stride_batch,
    counts_stride_head,
    counts_stride_row,
    tiles_stride_batch,
    tiles_stride_head,
    tiles_stride_row,
    tiles_stride_place,
    LIST_M: tl.constexpr,
    RAGGED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write 1 for the tiles that one block of rows of one (list batch, list head) attends to."""
    block, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kept += ((batch * tl.num_programs(1) + head) * tl.num_programs(0) + block) * tile_count
    tiles += batch * tiles_stride_batch + head * tiles_stride_head + block.to(tl.int64) * tiles_stride_row
    count = tl.load(counts + batch * counts_stride_batch + head * counts_stride_head + block * counts_stride_row)
    _q_start, q_len, _q_row = sequence_range(q_ranges, batch, q_len, RAGGED)
    count = tl.where(block * LIST_M < q_len, tl.minimum(count, places), 0)
    for start in range(0, count, WIDTH):
        place = start + tl.arange(0, WIDTH)
        tile = tl.load(tiles + place.to(tl.int64) * tiles_stride_place, mask=place < count, other=-1)
        tl.store(kept + tile, 1, mask=(tile >= 0) & (tile < tile_count))


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "tile_count", "row_blocks", "places"])
def list_rows(
    kept,
    ends,
    rows,
    spans,
    q_ranges,
    kv_ranges,
    q_len,
    kv_len,
    causal_offset,
    tile_count,
    row_blocks,
    places,
    LIST_M: tl.constexpr,
    LIST_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Write the blocks of rows and the spans (`TileRows`) of TILES tiles of one (list batch, list head)."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pair = batch * tl.num_programs(1) + head
    _q_start, q_len, _q_row = sequence_range(q_ranges, batch, q_len, RAGGED)
    _kv_start, kv_len, _kv_row = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    kept += pair * row_blocks * tile_count
    rows += pair * places
    inside = tile < tile_count
    at = tl.load(ends + pair * tile_count + tile - 1, mask=inside & (tile > 0), other=0)
    seen, whole = at, at
    first_key = tile * LIST_N
    last_key = tl.minimum(first_key + LIST_N, kv_len) - 1
    for start in range(0, row_blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        exists = (block < row_blocks)[:, None] & inside[None, :]
        listed = tl.load(kept + block.to(tl.int64)[:, None] * tile_count + tile[None, :], mask=exists, other=0)
        listed = listed.to(tl.int32)
        place = at[None, :] + tl.cumsum(listed, 0) - 1
        tl.store(rows + place, tl.broadcast_to(block[:, None], (ROWS, TILES)), mask=listed != 0)
        if CAUSAL:
            first_row = block * LIST_M
            last_row = tl.minimum(first_row + LIST_M, q_len) - 1
            hidden = first_key[None, :] > last_row[:, None] + causal_offset
            partial = last_key[None, :] > first_row[:, None] + causal_offset
            seen += tl.sum(tl.where(hidden, listed, 0), 0)
            whole += tl.sum(tl.where(partial, listed, 0), 0)
        at += tl.sum(listed, 0)
    spans += (pair * tile_count + tile) * 3
    tl.store(spans, seen, mask=inside)
    tl.store(spans + 1, whole, mask=inside)
    tl.store(spans + 2, at, mask=inside)
