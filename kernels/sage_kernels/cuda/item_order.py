"""Order of the forward kernel's items, and their parts."""

from __future__ import annotations

from ..call import Call
from ..layout import BLOCK, ceil_div, power_of_two

L2_BYTES = 32 * 2**20  # of the cache's 50 MiB, for the keys and values that blocks read at the same time


def heads_in_cache(call: Call) -> int:
    """Return how many heads of Q have their K and V stay in the L2 cache together."""
    _, kv_heads, kv_len, head_dim = call.key.shape
    bytes_of_head = 2 * ceil_div(kv_len, BLOCK) * BLOCK * power_of_two(head_dim)
    return max(1, L2_BYTES // bytes_of_head) * (call.query.shape[1] // kv_heads)


def last_parts(items: int, blocks: int, warpgroups: int) -> int:
    """Return in how many parts the items are split that up to so many blocks have left for a last round.

    Each part has the rows of some of an item's warpgroups; with fewer of them a block takes less time.
    """
    left = items % blocks
    return min(warpgroups, blocks // left) if left else 1
