"""Sort block lists on Hopper for `int8_forward`, by `block_lists.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..call import Call
from ..layout import ceil_div
from .launch import Kernel, Source, launch
from .parameters import ConstInts, Int, Int64, Ints

LIST_SIZE = 128  # rows and keys a tile of the lists that are taken
THREADS = 128


@dataclass(slots=True)
class Lists:
    """Block lists, and where they go.

    Attributes:
        counts, tiles: those of a `BlockList`.
        entries: (list batch, list heads, row_blocks, 2 + places or 3), written; see `sort_lists`.
        lists: the number of lists.
        heads, row_blocks, places: the sizes of the lists.
        counts_stride_batch, …, tiles_stride_place: strides.
    """

    counts: ConstInts
    tiles: ConstInts
    entries: Ints
    counts_stride_batch: Int64
    counts_stride_head: Int64
    counts_stride_row: Int64
    tiles_stride_batch: Int64
    tiles_stride_head: Int64
    tiles_stride_row: Int64
    tiles_stride_place: Int64
    lists: Int
    heads: Int
    row_blocks: Int
    places: Int
    q_len: Int
    kv_len: Int
    causal_offset: Int


@dataclass(slots=True)
class Parameters:
    """Parameters of the kernel."""

    a: Lists


@cache
def kernel(is_causal: bool) -> Kernel:
    """Return `sort_lists`."""
    macros = {"LIST_SIZE": LIST_SIZE, "THREADS": THREADS, "CAUSAL": is_causal}
    return Kernel(Source("block_lists.cu", {"sort_lists": Parameters}, macros), "sort_lists", THREADS)


def sort_lists(call: Call) -> torch.Tensor:
    """Sort the lists of a call, whose blocks are LIST_SIZE rows by LIST_SIZE keys, and whose keys all exist.

    Args:
        call: one of `Call.for_kernel`, with a block list.

    Returns:
        int32 (list batch, list heads, blocks of rows, 2 + places or 3): the number of tiles all of whose scores count,
        the number of all tiles, then the tiles, those first, or a 0 if there is none.

    Raises:
        CompileError: see `launch.launch`.
    """
    blocks = call.mask.blocks
    assert blocks is not None
    counts, tiles = blocks.counts, blocks.tiles
    batches, heads, row_blocks, places = tiles.shape
    entries = tiles.new_empty((batches, heads, row_blocks, 2 + max(1, places)))
    lists = batches * heads * row_blocks
    arguments = Lists(
        counts=counts,
        tiles=tiles,
        entries=entries,
        counts_stride_batch=counts.stride(0),
        counts_stride_head=counts.stride(1),
        counts_stride_row=counts.stride(2),
        tiles_stride_batch=tiles.stride(0),
        tiles_stride_head=tiles.stride(1),
        tiles_stride_row=tiles.stride(2),
        tiles_stride_place=tiles.stride(3),
        lists=lists,
        heads=heads,
        row_blocks=row_blocks,
        places=places,
        q_len=call.q_len,
        kv_len=call.kv_len,
        causal_offset=call.causal_offset,
    )
    launch(kernel(call.is_causal), ceil_div(lists, THREADS // 32), Parameters(arguments), tiles.device)
    return entries
