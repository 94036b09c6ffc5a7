"""Shares of the forward kernel's items for the blocks of its grid: causal items differ in length."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..call import Call
from ..layout import BLOCK, ceil_div, power_of_two

L2_BYTES = 32 * 2**20  # of the cache's 50 MiB, for the keys and values that blocks read at the same time
ITEM_TILES = 2.6  # what an item takes beside its tiles, in times of a tile
EVEN = 1.01  # the longest share, relative to the mean, with which a search ends
SIZES = 16  # of groups that a search tries


def heads_in_cache(call: Call) -> int:
    """Return how many heads of Q have their K and V stay in the L2 cache together."""
    _, kv_heads, kv_len, head_dim = call.key.shape
    bytes_of_head = 2 * ceil_div(kv_len, BLOCK) * BLOCK * power_of_two(head_dim)
    return max(1, L2_BYTES // bytes_of_head) * (call.query.shape[1] // kv_heads)


@lru_cache(maxsize=1024)
def heads_at_once(
    pairs: int, most: int, blocks: int, q_len: int, kv_len: int, causal_offset: int, block_m: int, block_n: int
) -> int:
    """Return how many heads are worked through together: at most `most`, so that the longest share of a block is short.

    Items are dealt out by number, in a zigzag, the longest of a group of heads first (`next_item` of
    forward_items.cuh). Where a group ends within a round, the shares become uneven: at 1×32×16384×128, with groups of 8
    heads one of 132 blocks has 1.10 times the mean, with groups of 3 heads 1.01.

    Args:
        pairs: heads of Q of all batch elements.
        most: heads whose K and V stay in the cache.
        blocks: of the grid.
        q_len, kv_len, causal_offset: as in `int8_forward.Arguments`.
        block_m, block_n: query rows of an item, and keys of a tile.
    """
    most = min(pairs, most)
    sizes = list(range(most, 0, -1))
    if most > SIZES:
        sizes = sorted({most, *(min(most, ceil_div(pairs, count)) for count in range(1, SIZES))}, reverse=True)
    work = item_work(q_len, kv_len, causal_offset, block_m, block_n)
    best, least = most, float("inf")
    for size in sizes:
        longest = longest_share(pairs, size, blocks, work)
        if longest < least:
            best, least = size, longest
        if longest <= EVEN:
            break
    return best


def item_work(q_len: int, kv_len: int, causal_offset: int, block_m: int, block_n: int) -> torch.Tensor:
    """Return what each item of a head takes, by rows, in times of a tile; arguments as in `heads_at_once`."""
    behind = torch.arange(ceil_div(q_len, block_m), device="cpu") * block_m + block_m + causal_offset
    tiles = (behind.clamp(max=kv_len) + block_n - 1) // block_n
    return tiles.clamp(min=1).float() + ITEM_TILES


def longest_share(pairs: int, size: int, blocks: int, work: torch.Tensor) -> float:
    """Return the longest share of a block, relative to the mean.

    Args:
        pairs, blocks: as in `heads_at_once`.
        size: heads of a group.
        work: that of the items of a head, as `item_work` returns it.
    """
    items = torch.cat([work.flip(0).repeat_interleave(min(size, pairs - first)) for first in range(0, pairs, size)])
    rounds = torch.nn.functional.pad(items, (0, -len(items) % blocks)).view(-1, blocks)
    rounds[1::2] = rounds[1::2].flip(1)
    shares = rounds.sum(0)
    return float(shares.max() / shares.mean())


def last_parts(items: int, blocks: int, warpgroups: int) -> int:
    """Return in how many parts the items are split that up to so many blocks have left for a last round.

    Each part has the rows of some of an item's warpgroups; with fewer of them a block takes less time.
    """
    left = items % blocks
    return min(warpgroups, blocks // left) if left else 1
