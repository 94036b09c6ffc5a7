"""cuda/item_order.py: in which order the Hopper forward's items come."""

import pytest
import torch

from sage_kernels.cuda.item_order import heads_at_once, last_parts
from tests.helpers.calls import new_call


def causal_call(batch, q_heads, kv_heads, tokens, head_dim):
    query, key = (torch.empty(batch, heads, tokens, head_dim, device="meta") for heads in (q_heads, kv_heads))
    return new_call(query, key, key, "sage2", is_causal=True)


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
