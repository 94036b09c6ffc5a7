"""Sort block lists for the forward kernel by `sort_lists.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..runtime.hardware import multiprocessors
from ..spec.call import Call
from ..spec.layout import ceil_div, round_up
from ..spec.operands import KeyPadding
from .launch import ConfiguredKernel, KernelSource, launch
from .parameters import ConstInts, Int, Int64, Ints

BLOCK_M = BLOCK_N = 128  # rows and keys of the lists that the forward kernel takes
LIST_HEAD = 2  # numbers before the tiles of a list: of tiles that need no mask, and of all tiles
THREADS = 1024
WARPS = THREADS // 32


@dataclass(frozen=True)
class SortedLists:
    """The lists of a call as `int8_forward.cu` reads them.

    Attributes:
        lists: int32 (list batch, list heads, blocks of rows, places): the number of tiles that need no mask, the number
            of all tiles with scores that count, then the tiles, unmasked tiles first; an empty list has one tile that
            no row sees. Sizes are 1 where the list is broadcast. One place more is read; its contents are ignored.
        queue: int32 (1 + batch · q_heads · blocks of rows,): 0, a counter of the forward kernel, and the items by their
            numbers (batch · q_heads + head) · blocks + block, in the order in which they begin.
    """

    lists: torch.Tensor
    queue: torch.Tensor

    @classmethod
    def empty(cls, call: Call, padding: KeyPadding | None) -> SortedLists:
        """Allocate the lists of a call; `padding` says which keys exist; None: all exist."""
        blocks, (batch, q_heads, _, _) = call.mask.blocks, call.query.shape
        assert blocks is not None
        batches, heads, row_blocks, places = blocks.tiles.shape
        if padding is not None:
            batches = max(batches, padding.key_mask_u8.shape[0])
        list_stride = round_up(LIST_HEAD + places + 2, 4)
        return cls(
            call.query.new_empty((batches, heads, row_blocks, list_stride), dtype=torch.int32),
            call.query.new_empty((1 + batch * q_heads * row_blocks,), dtype=torch.int32),
        )

    @property
    def of_batch(self) -> int:
        """Return the stride in lists from a batch element to the next; 0 if all share a list."""
        return 0 if self.lists.shape[0] == 1 else self.lists.shape[1] * self.lists.shape[2]

    @property
    def of_head(self) -> int:
        """Return the stride in lists from a head to the next; 0 if all share a list."""
        return 0 if self.lists.shape[1] == 1 else self.lists.shape[2]


@dataclass(slots=True)
class SortArguments:
    """The call's lists, the keys that exist, the written lists, and sizes.

    Attributes:
        counts, tiles: fields of `block_list.BlockList`.
        spans: field of `operands.KeyPadding`; None: all keys exist.
        lists, queue: fields of `SortedLists`, written.
        places: the number of places of `tiles`.
        list_batches, list_heads: sizes of `lists`.
        blocks: the number of blocks of rows.
        list_stride: stride from list to list in `lists`.
        heads_at_once: as in `int8_forward.Int8ForwardArguments`.
        blocks_at_once: how many items run at the same time.
    """

    counts: ConstInts
    tiles: ConstInts
    spans: ConstInts
    lists: Ints
    queue: Ints
    counts_stride_batch: Int64
    counts_stride_head: Int64
    counts_stride_row: Int64
    tiles_stride_batch: Int64
    tiles_stride_head: Int64
    tiles_stride_row: Int64
    tiles_stride_place: Int64
    places: Int
    list_batches: Int
    list_heads: Int
    blocks: Int
    list_stride: Int
    spans_stride: Int
    batch: Int
    q_heads: Int
    q_len: Int
    kv_len: Int
    causal_offset: Int
    heads_at_once: Int
    blocks_at_once: Int


@dataclass(slots=True)
class SortParameters:
    """Parameters of the kernel."""

    arguments: SortArguments


@cache
def kernel(is_causal: bool, padded: bool) -> ConfiguredKernel:
    """Return `sort_lists`."""
    macros = {
        "THREADS": THREADS,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "LIST_HEAD": LIST_HEAD,
        "CAUSAL": is_causal,
        "PADDED": padded,
    }
    return ConfiguredKernel(
        KernelSource("sort_lists.cu", {"sort_lists": SortParameters}, macros), "sort_lists", THREADS
    )


def sort_lists(call: Call, padding: KeyPadding | None, into: SortedLists, heads_at_once: int) -> None:
    """Sort the lists of a call, of BLOCK_M rows and tiles of BLOCK_N keys.

    The kernel starts, and lets the stream's next kernel start, while the previous kernel ends. It waits for the
    previous kernel's results only if it reads spans: the previous kernel must not write the lists.

    Args:
        call: a result of `Call.for_kernel`.
        padding: which keys exist, with spans already written; None: all exist.
        into: the lists to write, in memory that the stream's previous kernel does not use.
        heads_at_once: number of heads whose causal items run together.

    Raises:
        CompileError: see `launch.launch`.
    """
    blocks = call.mask.blocks
    assert blocks is not None
    batches, heads, row_blocks, list_stride = into.lists.shape
    counts, tiles = (x.expand(batches, *x.shape[1:]) for x in (blocks.counts, blocks.tiles))
    batch, q_heads, _, _ = call.query.shape
    arguments = SortArguments(
        counts=counts,
        tiles=tiles,
        spans=None if padding is None else padding.spans,
        lists=into.lists,
        queue=into.queue,
        counts_stride_batch=_stride(counts, 0),
        counts_stride_head=_stride(counts, 1),
        counts_stride_row=counts.stride(2),
        tiles_stride_batch=tiles.stride(0),
        tiles_stride_head=tiles.stride(1),
        tiles_stride_row=tiles.stride(2),
        tiles_stride_place=tiles.stride(3),
        places=tiles.shape[3],
        list_batches=batches,
        list_heads=heads,
        blocks=row_blocks,
        list_stride=list_stride,
        spans_stride=0 if padding is None else padding.strides[1],
        batch=batch,
        q_heads=q_heads,
        q_len=call.q_len,
        kv_len=call.kv_len,
        causal_offset=call.causal_offset,
        heads_at_once=heads_at_once,
        blocks_at_once=multiprocessors(call.query.get_device()),
    )
    grid = 1 + ceil_div(batches * heads * row_blocks, WARPS)
    sort = kernel(call.is_causal, padding is not None)
    launch(sort, grid, SortParameters(arguments), call.query.device, dependent=True)


def _stride(x: torch.Tensor, dim: int) -> int:
    """Return the stride along a dimension; 0 if it has one list for all."""
    return 0 if x.shape[dim] == 1 else x.stride(dim)
