"""gluon/int8_backward.py: in which order the programs of dQ come."""

import heapq

import pytest
import torch

from sage_kernels.spec.operands import Saved
from tests.helpers.calls import new_backward_call

gluon_backward = pytest.importorskip("sage_kernels.gluon.int8_backward", exc_type=ImportError)  # Triton 3.6

MULTIPROCESSORS = 132
ROWS = 128
PROGRAM_TILES = 3.0  # what a program takes beside its tiles of 64 keys, about, in times of a tile


def call_of(batch, q_heads, kv_heads, tokens, head_dim, is_causal=True):
    output, key = (torch.empty(batch, heads, tokens, head_dim, device="meta") for heads in (q_heads, kv_heads))
    saved = Saved(output, output, key, key, key, output)
    return new_backward_call(output, key, output, saved, "sage_bwd", head_dim, is_causal=is_causal)


def programs(heads, blocks, together):
    """Return (head, block) of each program, as `item_of_program` does, the longest block first."""
    found = []
    for program in range(heads * blocks):
        first = program // (blocks * together) * together
        within, of_group = program - blocks * first, min(together, heads - first)
        found.append((first + within % of_group, blocks - 1 - within // of_group))
    return found


@pytest.mark.parametrize(("heads", "blocks", "together"), [(1, 7, 4), (12, 5, 5), (33, 32, 8), (6, 1, 4), (4, 9, 1)])
def test_each_block_of_each_head_has_one_program(heads, blocks, together):
    found = programs(heads, blocks, together)
    assert sorted(found) == [(head, block) for head in range(heads) for block in range(blocks)]
    groups = [[block for head, block in found if head // together == group] for group in range(-(-heads // together))]
    assert all(of_group == sorted(of_group, reverse=True) for of_group in groups)


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ((1, 32, 8, 8192, 128), 8),
        ((1, 32, 8, 32768, 128), 4),
        ((1, 16, 16, 8192, 128), 4),
        ((2, 16, 16, 4096, 64), 8),
        ((1, 28, 4, 4096, 128), 14),
        ((1, 64, 1, 4096, 128), 128),
    ],
)
def test_heads_whose_keys_the_cache_holds_are_worked_through_together(sizes, together):
    assert gluon_backward.heads_together(call_of(*sizes)) == together
    assert gluon_backward.heads_together(call_of(*sizes, is_causal=False)) == 1


@pytest.mark.parametrize("sizes", [(1, 32, 8, 8192, 128), (1, 32, 8, 4096, 128), (1, 16, 16, 8192, 128)])
def test_programs_end_at_about_the_same_time(sizes):
    batch, heads, _, tokens, _ = sizes

    def longest(together):
        ends = [0.0] * MULTIPROCESSORS
        for _, block in programs(batch * heads, tokens // ROWS, together):
            heapq.heapreplace(ends, ends[0] + 2 * (block + 1) + PROGRAM_TILES)
        return max(ends)

    blocks = tokens // ROWS
    work = batch * heads * (blocks * (blocks + 1) + blocks * PROGRAM_TILES) / MULTIPROCESSORS
    assert longest(gluon_backward.heads_together(call_of(*sizes))) < 1.02 * work
    assert longest(1) > 1.05 * work
