"""cuda/item_order.py: how the Hopper forward's items are shared out among blocks."""

import pytest

from sage_kernels.cuda.item_order import ITEM_TILES, heads_at_once, item_work, last_parts, longest_share

BLOCKS = 132


def shares_of_blocks(pairs, size, work):
    """Add up the work of each block, item by item as `next_item` of forward_items.cuh finds them."""
    rows, shares = len(work), [0.0] * BLOCKS
    for block in range(BLOCKS):
        turn = 0
        while (index := turn * BLOCKS + (BLOCKS - 1 - block if turn % 2 else block)) < rows * pairs:
            group = index // (rows * size)
            within, heads = index - group * rows * size, min(size, pairs - group * size)
            shares[block] += work[rows - 1 - within // heads]
            turn += 1
    return shares


@pytest.mark.parametrize(("pairs", "size", "rows"), [(32, 8, 128), (10, 4, 229), (7, 3, 20), (3, 3, 11), (128, 22, 32)])
def test_the_longest_share_is_that_of_the_kernel_s_zigzag(pairs, size, rows):
    work = item_work(rows * 128 - 5, rows * 128 - 53, -48, 128, 128)
    shares = shares_of_blocks(pairs, size, work.tolist())
    assert longest_share(pairs, size, BLOCKS, work) == pytest.approx(max(shares) / (sum(shares) / BLOCKS), rel=1e-5)


def test_an_item_s_work_is_its_tiles_and_what_it_takes_beside_them():
    assert item_work(400, 352, -48, 128, 128).tolist() == pytest.approx([n + ITEM_TILES for n in (1, 2, 3, 3)])
    assert item_work(300, 1000, -1000, 192, 96).tolist() == pytest.approx([1 + ITEM_TILES] * 2)


@pytest.mark.parametrize(
    ("pairs", "most", "tokens", "longest"),
    [(32, 8, 16384, 1.011), (64, 8, 16384, 1.01), (128, 32, 4096, 1.01), (32, 16, 8192, 1.01), (10, 8, 29236, 1.03)],
)
def test_groups_of_heads_leave_no_block_a_long_share(pairs, most, tokens, longest):
    sizes = tokens, tokens - 48, -48, 128, 128
    found = heads_at_once(pairs, most, BLOCKS, *sizes)
    work = item_work(*sizes)
    assert 1 <= found <= most
    assert longest_share(pairs, found, BLOCKS, work) <= min(longest, longest_share(pairs, most, BLOCKS, work))


@pytest.mark.parametrize(("pairs", "most"), [(1, 40), (3, 1), (500, 200)])
def test_groups_have_at_least_one_head_and_no_more_than_stay_in_the_cache(pairs, most):
    assert 1 <= heads_at_once(pairs, most, 1, 64, 16, -48, 128, 128) <= min(pairs, most)


@pytest.mark.parametrize(
    ("items", "parts"), [(264, 1), (176, 3), (177, 2), (198, 2), (199, 1), (263, 1), (44, 3), (66, 2), (67, 1)]
)
def test_the_last_round_has_an_item_s_parts_for_blocks_that_would_have_none(items, parts):
    assert last_parts(items, blocks=132, warpgroups=3) == parts
    assert last_parts(items, blocks=132, warpgroups=1) == 1
