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


def heads_at_once(call: Call) -> int:
    """Return how many heads of Q are worked through together: those in the cache, or fewer in groups alike.

    Blocks take causal items as they get free, the longest of a group first. A small last group would keep few of them:
    of 33 heads of 4096 tokens with 128 channels 32 stay in the cache, and behind these the last one would make the
    longest share 1.18 times the mean; groups of 17 make it 1.01.
    """
    group = call.query.shape[1] // call.key.shape[1]
    pairs, most = call.key.shape[0] * call.key.shape[1], heads_in_cache(call) // group
    return ceil_div(pairs, ceil_div(pairs, most)) * group


def last_parts(items: int, blocks: int, warpgroups: int) -> int:
    """Return in how many parts the items are split that up to so many blocks have left for a last round.

    Each part has the rows of some of an item's warpgroups; with fewer of them a block takes less time.
    """
    left = items % blocks
    return min(warpgroups, blocks // left) if left else 1
