"""cuda/int8_backward.py: blocks of keys of causal calls are taken in an order that leaves no multiprocessor idle."""

import heapq

import pytest
import torch

from sage_kernels.cuda import int8_backward
from sage_kernels.spec.layout import BLOCK
from sage_kernels.spec.operands import Saved
from tests.helpers.calls import new_backward_call

MULTIPROCESSORS = 132


def call_of(batch, q_heads, kv_heads, tokens, head_dim, is_causal=True):
    query, key = (
        torch.empty(batch, heads, tokens, head_dim, device="meta", dtype=torch.bfloat16)
        for heads in (q_heads, kv_heads)
    )
    saved = Saved(query, query, key, key, key, query)
    return new_backward_call(query, key, query, saved, "sage_bwd", head_dim, is_causal=is_causal)


def tiles_taken(call, together: int) -> tuple[int, float]:
    """Count the tiles that pass until a call ends if free multiprocessors take the next block, and if none is idle."""
    q_heads, kv_heads, tokens = call.output.shape[1], call.value.shape[1], call.kv_len
    heads, group, blocks = call.batch * kv_heads, q_heads // kv_heads, -(-tokens // BLOCK)
    parts = int8_backward.parts_of_last(call, MULTIPROCESSORS)
    assert parts == 1 or blocks * heads < MULTIPROCESSORS  # all blocks are split
    steps = [
        group * (-(-tokens // int8_backward.TILE) - 2 * block) / parts
        for first in range(0, heads, together)
        for block in range(blocks)
        for _ in range(min(together, heads - first) * parts)
    ]
    ends = [0.0] * MULTIPROCESSORS
    for item in steps:
        heapq.heapreplace(ends, ends[0] + item)
    return max(ends), sum(steps) / MULTIPROCESSORS


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
def test_multiprocessors_are_busy_to_the_end(sizes):
    call = call_of(*sizes)
    taken, ideal = tiles_taken(call, int8_backward.heads_at_once(call, MULTIPROCESSORS))
    assert taken <= 1.12 * ideal


@pytest.mark.parametrize("sizes", [(1, 7, 7, 8192, 128), (3, 28, 4, 8192, 128), (1, 64, 1, 4096, 64)])
def test_sums_of_the_heads_that_are_taken_together_stay_in_the_cache(sizes):
    batch, q_heads, kv_heads, tokens, head_dim = sizes
    together = int8_backward.heads_at_once(call_of(*sizes), MULTIPROCESSORS)
    bytes_of_head = (2 if head_dim == 128 else 4) * q_heads // kv_heads * tokens * head_dim
    assert 1 <= together <= batch * kv_heads
    assert together == 1 or together * bytes_of_head <= int8_backward.SUMS_BYTES


def test_without_causality_all_blocks_are_equally_long():
    assert int8_backward.heads_at_once(call_of(1, 32, 8, 4096, 128, is_causal=False), MULTIPROCESSORS) == 1
