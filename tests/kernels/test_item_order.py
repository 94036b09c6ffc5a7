"""cuda/item_order.py: in which order the Hopper forward's items come."""

import heapq

import pytest
import torch

from sage_kernels.cuda.item_order import heads_at_once, last_parts
from tests.helpers.calls import new_call

BLOCKS = 132
ITEM_TILES = 2.6  # what an item takes beside its tiles, in times of a tile: measured on an H200


def causal_call(batch, q_heads, kv_heads, tokens, head_dim):
    query, key = (torch.empty(batch, heads, tokens, head_dim, device="meta") for heads in (q_heads, kv_heads))
    return new_call(query, key, key, "sage2", is_causal=True)


def items_of_queue(pairs, rows, at_once):
    """Return (pair, block) of each place of the queue, counted from the last one as `next_item` does."""
    items = []
    for behind in reversed(range(pairs * rows)):
        group = behind // (rows * at_once)
        within, heads = behind - group * rows * at_once, min(at_once, pairs - group * at_once)
        items.append((group * at_once + within % heads, within // heads))
    return items


@pytest.mark.parametrize(("pairs", "rows", "at_once"), [(1, 7, 2), (12, 5, 5), (33, 32, 32), (7, 1, 3), (4, 9, 100)])
def test_each_item_has_one_place_and_a_group_of_fewer_heads_the_first_ones(pairs, rows, at_once):
    items = items_of_queue(pairs, rows, at_once)
    assert sorted(items) == [(pair, block) for pair in range(pairs) for block in range(rows)]
    first = items[: (pairs % at_once or at_once) * rows]
    assert {pair for pair, _ in first} == set(range(pairs - 1 - (pairs - 1) % at_once, pairs))


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 32, 32, 16384, 128),
        (4, 32, 32, 4096, 128),
        (1, 33, 33, 4096, 128),
        (1, 32, 8, 8192, 128),
        (1, 8, 8, 32768, 128),
        (2, 32, 8, 32768, 128),
        (1, 1, 1, 131072, 128),
        (1, 10, 10, 29236, 64),
        (1, 4, 4, 65536, 64),
    ],
)
def test_blocks_that_take_items_as_they_get_free_end_at_about_the_same_time(sizes):
    batch, heads, _, tokens, head_dim = sizes
    block_m = 128 if head_dim == 128 else 192
    ends, work = [0.0] * BLOCKS, 0.0
    for _, block in items_of_queue(batch * heads, -(-tokens // block_m), heads_at_once(causal_call(*sizes))):
        item = -(-min(tokens, (block + 1) * block_m) // 128) + ITEM_TILES
        heapq.heapreplace(ends, ends[0] + item)
        work += item
    assert max(ends) <= 1.01 * work / BLOCKS


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ((4, 32, 32, 4096, 128), 32),
        ((1, 32, 32, 16384, 128), 3),
        ((1, 32, 8, 32768, 128), 4),
        ((1, 32, 32, 16384, 64), 6),
        ((1, 8, 8, 65536, 128), 2),
    ],
)
def test_groups_of_long_heads_are_smaller(sizes, heads):
    assert heads_at_once(causal_call(*sizes)) == heads


@pytest.mark.parametrize(
    ("items", "parts"), [(264, 1), (176, 3), (177, 2), (198, 2), (199, 1), (263, 1), (44, 3), (66, 2), (67, 1)]
)
def test_the_last_round_has_an_item_s_parts_for_blocks_that_would_have_none(items, parts):
    assert last_parts(items, blocks=132, warpgroups=3) == parts
    assert last_parts(items, blocks=132, warpgroups=1) == 1
