"""The order of video tokens in 4×4×4 tiles."""

import pytest
import torch

from sage_hf.sparse import TileOrder

GRIDS = [(4, 4, 4), (8, 8, 12), (5, 6, 7), (1, 9, 3), (2, 1, 1), (13, 4, 5)]


@pytest.mark.parametrize("grid", GRIDS)
def test_tiles_hold_neighbours_and_orders_are_undone(grid):
    order = TileOrder.of(grid)
    tokens = grid[0] * grid[1] * grid[2]
    x = torch.arange(tokens, dtype=torch.float32)[None, None, :, None].expand(2, 3, -1, 5)
    assert torch.equal(order.unsort(order.sort(x)), x)
    assert torch.equal(order.unpad(order.pad(x)), x)
    assert order.counts.sum() == tokens
    assert order.pad(x).shape[2] == order.tiles * 64
    assert int(order.valid.sum()) == tokens
    places = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij"), -1).flatten(0, 2)
    sorted_places = places[order.tokens].split(order.counts.tolist())
    seen = []
    for tile in sorted_places:
        corner = tile // 4
        assert (corner == corner[0]).all()
        seen.append(tuple(corner[0].tolist()))
        flat = (tile - 4 * corner) @ torch.tensor([16, 4, 1])
        assert torch.equal(flat, flat.sort().values)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("grid", GRIDS)
def test_places_without_a_token_hold_zeros(grid):
    order = TileOrder.of(grid)
    padded = order.pad(torch.ones(1, 1, order.tokens.shape[0], 2))
    assert torch.equal(padded[0, 0, :, 0] == 1, order.valid)


def test_two_grids_with_the_same_tokens_have_orders_of_their_own():
    first, second = TileOrder.of((4, 8, 8)), TileOrder.of((8, 8, 4))
    assert not torch.equal(first.tokens, second.tokens)
    assert torch.equal(TileOrder.of((4, 8, 8)).tokens, first.tokens)


@pytest.mark.parametrize("grid", [(0, 4, 4), (4, 4), (4, -1, 4)])
def test_grids_without_tokens_are_refused(grid):
    with pytest.raises(ValueError, match="grid"):
        TileOrder.of(grid)


@pytest.mark.parametrize("grid", [pytest.param((4, 4, 8), marks=pytest.mark.audit), (5, 1, 3)])
def test_gradients_go_back_to_their_tokens(grid):
    order = TileOrder.of(grid)
    x = torch.randn(2, len(order.tokens), 1, dtype=torch.float64, requires_grad=True)
    for function in (order.pad, order.sort, order.unsort, lambda y: order.unpad(order.pad(y) ** 2)):
        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,))
