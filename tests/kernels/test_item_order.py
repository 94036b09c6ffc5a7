"""cuda/item_order.py: in which order the Hopper forward's items come."""

import heapq

import pytest
import torch

from sage_kernels.cuda.item_order import heads_in_cache, last_parts
from tests.helpers.triton_calls import new_call

BLOCKS = 132
ITEM_TILES = 2.6  # what an item takes beside its tiles, in times of a tile: measured on an H200


def causal_call(batch, q_heads, kv_heads, tokens, head_dim):
    query, key = (torch.empty(batch, heads, tokens, head_dim, device="meta") for heads in (q_heads, kv_heads))
    return new_call(query, key, key, "sage2", is_causal=True)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 32, 32, 16384, 128),
        (4, 32, 32, 4096, 128),
        (1, 33, 33, 4096, 128),
        (1, 8, 8, 32768, 128),
        (2, 32, 8, 32768, 128),
        (1, 1, 1, 131072, 128),
        (1, 10, 10, 29236, 64),
    ],
)
def test_blocks_that_take_items_as_they_get_free_end_at_about_the_same_time(sizes):
    """Count items from the last one, as `next_item` of forward_items.cuh does: a group of fewer heads comes first."""
    batch, heads, _, tokens, _ = sizes
    pairs, rows, at_once = batch * heads, -(-tokens // 128), heads_in_cache(causal_call(*sizes))
    ends, work = [0.0] * BLOCKS, 0.0
    for behind in reversed(range(pairs * rows)):
        group = behind // (rows * at_once)
        tiles = 1 + (behind - group * rows * at_once) // min(at_once, pairs - group * at_once)
        heapq.heapreplace(ends, ends[0] + tiles + ITEM_TILES)
        work += tiles + ITEM_TILES
    assert max(ends) <= 1.01 * work / BLOCKS


@pytest.mark.parametrize(
    ("items", "parts"), [(264, 1), (176, 3), (177, 2), (198, 2), (199, 1), (263, 1), (44, 3), (66, 2), (67, 1)]
)
def test_the_last_round_has_an_item_s_parts_for_blocks_that_would_have_none(items, parts):
    assert last_parts(items, blocks=132, warpgroups=3) == parts
    assert last_parts(items, blocks=132, warpgroups=1) == 1
