"""cuda/item_order.py: in which order the items of Hopper's INT8 kernels come, so that no multiprocessor is idle."""

import heapq

import pytest
import torch

from sage_kernels.cuda import item_order
from sage_kernels.cuda.int8_backward import TILE
from sage_kernels.spec.layout import BLOCK
from sage_kernels.spec.operands import Saved
from tests.helpers.calls import new_backward_call, new_call

MULTIPROCESSORS = 132


def tensors_of(batch, q_heads, kv_heads, q_len, kv_len, head_dim):
    sizes = (q_heads, q_len), (kv_heads, kv_len)
    return (torch.empty(batch, *size, head_dim, device="meta", dtype=torch.bfloat16) for size in sizes)


def backward_call(batch, q_heads, kv_heads, q_len, kv_len, head_dim, is_causal=True):
    query, key = tensors_of(batch, q_heads, kv_heads, q_len, kv_len, head_dim)
    saved = Saved(query, query, key, key, key, query)
    return new_backward_call(query, key, query, saved, "sage_bwd", head_dim, is_causal=is_causal)


def key_heads_at_once(call):
    return item_order.key_heads_at_once(call, MULTIPROCESSORS, 2 if call.channels == 128 else 4)


def parts_of_key_blocks(call):
    steps = -(-call.output.shape[2] // TILE) * call.output.shape[1] // call.value.shape[1]
    return item_order.parts_of_key_blocks(call, MULTIPROCESSORS, steps)


def tiles_taken(call, together: int) -> tuple[int, float]:
    """Count the tiles that pass until a call ends if free multiprocessors take the next block, and if none is idle."""
    q_heads, kv_heads, tokens = call.output.shape[1], call.value.shape[1], call.kv_len
    heads, group, blocks = call.batch * kv_heads, q_heads // kv_heads, -(-tokens // BLOCK)
    parts = parts_of_key_blocks(call)
    assert parts == 1 or blocks * heads < MULTIPROCESSORS  # all blocks are split
    steps = [
        group * (-(-tokens // TILE) - 2 * block) / parts
        for first in range(0, heads, together)
        for block in range(blocks)
        for _ in range(min(together, heads - first) * parts)
    ]
    ends = [0.0] * MULTIPROCESSORS
    for item in steps:
        heapq.heapreplace(ends, ends[0] + item)
    return max(ends), sum(steps) / MULTIPROCESSORS


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
    *counts, tokens, head_dim = sizes
    query, key = tensors_of(*counts, tokens, tokens, head_dim)
    assert item_order.heads_at_once(new_call(query, key, key, "sage2", is_causal=True)) == heads


@pytest.mark.parametrize(
    ("items", "parts"), [(264, 1), (176, 3), (177, 2), (198, 2), (199, 1), (263, 1), (44, 3), (66, 2), (67, 1)]
)
def test_the_last_round_has_an_item_s_parts_for_blocks_that_would_have_none(items, parts):
    assert item_order.last_parts(items, blocks=132, max_parts=3) == parts
    assert item_order.last_parts(items, blocks=132, max_parts=1) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 32, 8, 2048, 128),
        (1, 32, 8, 4096, 128),
        (1, 32, 8, 8192, 128),
        (2, 32, 8, 4096, 128),
        (1, 32, 8, 16384, 128),
        (4, 32, 8, 2048, 64),
        (1, 24, 24, 2456, 128),
        (2, 48, 12, 1654, 128),
        (2, 32, 32, 8192, 128),
        (1, 28, 4, 4096, 128),
        (1, 32, 8, 2048, 128),
    ],
)
def test_multiprocessors_are_busy_to_the_end_of_a_causal_backward_pass(sizes):
    *counts, tokens, head_dim = sizes
    call = backward_call(*counts, tokens, tokens, head_dim)
    taken, ideal = tiles_taken(call, key_heads_at_once(call))
    assert taken <= 1.12 * ideal


@pytest.mark.parametrize("sizes", [(1, 7, 7, 8192, 128), (3, 28, 4, 8192, 128), (1, 64, 1, 4096, 64)])
def test_sums_of_the_heads_that_are_taken_together_stay_in_the_cache(sizes):
    batch, q_heads, kv_heads, tokens, head_dim = sizes
    together = key_heads_at_once(backward_call(batch, q_heads, kv_heads, tokens, tokens, head_dim))
    bytes_of_head = (2 if head_dim == 128 else 4) * q_heads // kv_heads * tokens * head_dim
    assert 1 <= together <= batch * kv_heads
    assert together == 1 or together * bytes_of_head <= item_order.SUMS_BYTES


def test_without_causality_all_blocks_of_keys_are_equally_long():
    assert key_heads_at_once(backward_call(1, 32, 8, 4096, 4096, 128, is_causal=False)) == 1


@pytest.mark.parametrize(
    ("heads", "q_len", "kv_len", "is_causal", "parts"),
    [
        (64, 8192, 8192, False, 8),  # 4 of 4096 blocks are left for 132 multiprocessors
        (30, 17776, 17776, False, 1),  # 78 are: a second part of each would have to wait
        (64, 8192, 8192, True, 1),
        (33, 8192, 512, False, 1),  # none is
        (8, 8192, 1024, True, 4),  # 64 blocks, on average half as long as the longest
        (16, 1024, 1024, True, 1),  # 128 blocks, too short to split
        (16, 4096, 1024, True, 2),
        (8, 1024, 1024, False, 2),
        (2, 1024, 128, False, 4),  # of 16 tiles
        (2, 64, 128, False, 1),
    ],
)
def test_the_last_blocks_of_keys_are_split_where_multiprocessors_would_wait(heads, q_len, kv_len, is_causal, parts):
    assert parts_of_key_blocks(backward_call(1, heads, heads, q_len, kv_len, 64, is_causal)) == parts
