"""Order of the items of Hopper's INT8 kernels, and the parts of the last items.

An item of the forward kernel is a block of queries of one head; an item of the backward kernel, a block of keys.
"""

from __future__ import annotations

from ..spec.call import BackwardCall, Call
from ..spec.layout import BLOCK, power_of_two, round_up

L2_BYTES = 32 * 2**20  # of the cache's 50 MiB, for keys and values that blocks read at the same time
LONG_KV_LEN = 8192  # keys
LONG_BYTES = 12 * 2**20  # the same for causal calls with so many keys
HEADS_AT_ONCE = 4
"""Heads of Q whose blocks are taken in turn, if there are many rounds of the multiprocessors."""
FEW_ROUNDS = 4
"""Rounds up to which the blocks of all heads may be taken in turn."""
MOST_PARTS, STEPS_OF_PART = 8, 4  # most parts of a block of keys (their partial sums are added); fewest tiles of a part
STEPS_OF_CAUSAL_PART = 32
"""Fewest tiles of a part of the longest block of a causal call with one round."""
SUMS_BYTES = 32 * 2**20
"""Bytes of sums of dQ to which blocks may add at the same time: the cache adds 3.0 TB/s, memory 1.1 to 1.4."""


def heads_in_cache(call: Call, cache_bytes: int = L2_BYTES) -> int:
    """Return the number of heads of Q whose K and V stay in so many bytes of the L2 cache together."""
    _, kv_heads, kv_len, head_dim = call.key.shape
    bytes_of_head = 2 * round_up(kv_len, BLOCK) * power_of_two(head_dim)
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


def last_parts(items: int, blocks: int, max_parts: int) -> int:
    """Return into how many parts to split the items that remain for a last round of so many blocks.

    A part takes less time than its item: it has the rows of some warpgroups, or some of the tiles.
    """
    last_items = items % blocks
    return min(max_parts, blocks // last_items) if last_items else 1


def key_heads_at_once(call: BackwardCall, blocks_at_once: int, bytes_of_sum: int) -> int:
    """Return the number of heads of K whose blocks are taken in turn; dQ is summed in numbers of so many bytes.

    Blocks of a causal head differ in length: taken head after head, the longest blocks of the last heads would start
    when all others end, which matters if there are few rounds. More heads at once add to more sums, which should stay
    in the cache. Equal numbers of heads are taken in turn, unless that would halve them.
    """
    if not call.is_causal:
        return 1
    kv_heads = call.value.shape[1]
    group, heads = call.output.shape[1] // kv_heads, call.batch * kv_heads
    max_heads = SUMS_BYTES // (bytes_of_sum * group * call.channels * call.q_len)
    if call.token_axes[1].blocks * heads > FEW_ROUNDS * blocks_at_once:
        return max(1, min(HEADS_AT_ONCE // group, max_heads))
    max_heads = max(1, min(heads, max_heads))
    divisor = next(count for count in range(max_heads, 0, -1) if heads % count == 0)
    return divisor if 2 * divisor >= max_heads else max_heads


def parts_of_key_blocks(call: BackwardCall, blocks_at_once: int, steps: int) -> int:
    """Return into how many parts to split the blocks of keys that remain for a last round of the multiprocessors.

    Blocks of a causal call with more than one round are short, so they are not split. In one round the longest block
    takes as long as the call, and twice as long as blocks take on average.

    Args:
        call: the call.
        blocks_at_once: number of blocks that run at the same time.
        steps: number of tiles of queries that attend to the same keys.
    """
    blocks = call.token_axes[1].blocks * call.batch * call.value.shape[1]
    if call.is_causal and blocks > blocks_at_once:
        return 1
    parts = last_parts(blocks, blocks_at_once, max(1, min(MOST_PARTS, steps // STEPS_OF_PART)))
    if not call.is_causal:
        return parts
    return max(parts, last_parts(blocks, 2 * blocks_at_once, max(1, min(MOST_PARTS, steps // STEPS_OF_CAUSAL_PART))))
