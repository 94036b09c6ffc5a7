"""Order of the forward kernel's items, and their parts."""

from __future__ import annotations

from ..spec.call import Call
from ..spec.layout import BLOCK, ceil_div, power_of_two

L2_BYTES = 32 * 2**20  # of the cache's 50 MiB, for keys and values that blocks read at the same time
LONG_KV_LEN = 8192  # keys
LONG_BYTES = 12 * 2**20  # the same for causal calls with so many keys


def heads_in_cache(call: Call, cache_bytes: int = L2_BYTES) -> int:
    """Return the number of heads of Q whose K and V stay in so many bytes of the L2 cache together."""
    _, kv_heads, kv_len, head_dim = call.key.shape
    bytes_of_head = 2 * ceil_div(kv_len, BLOCK) * BLOCK * power_of_two(head_dim)
    return max(1, cache_bytes // bytes_of_head) * (call.query.shape[1] // kv_heads)


def heads_at_once(call: Call) -> int:
    """Return the number of heads of Q whose causal items are taken together; blocks take items as they get free.

    With few heads at once, 1×32×16384×128 takes 1.3 % less time than with as many heads as `L2_BYTES` hold. With
    shorter heads the end of a group, where items are short, comes too often: 4×32×4096×128 then takes 0.8 % more time.
    Items of a single head may be too few to end at about the same time.
    """
    if call.kv_len < LONG_KV_LEN:
        return heads_in_cache(call)
    return max(2, heads_in_cache(call, LONG_BYTES))


def last_parts(items: int, blocks: int, warpgroups: int) -> int:
    """Return into how many parts to split the items that remain for a last round of so many blocks.

    Each part has the rows of some of an item's warpgroups; with fewer warpgroups a block takes less time.
    """
    last_items = items % blocks
    return min(warpgroups, blocks // last_items) if last_items else 1
