"""Exact attention to listed tiles, brought together a part at a time."""

import pytest
import torch

from sage_hf.sparse import gathered
from sage_hf.sparse.gathered import attend_to_tiles

TILES, SIZE, HEAD_DIM = 6, 16, 8


def draw(kept, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 3, TILES * SIZE, HEAD_DIM)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    tiles = torch.rand(2, 3, TILES, TILES, generator=generator).argsort(-1)[..., :kept].sort(-1).values
    return inputs, tiles


def by_mask(query, key, value, tiles, valid=None, scale=None):
    """The same by a mask of all scores."""
    chosen = torch.zeros(2, 3, TILES, TILES, dtype=torch.bool).scatter(-1, tiles, True)
    mask = chosen.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3)
    if valid is not None:
        mask = mask & valid
    scores = query @ key.mT * (HEAD_DIM**-0.5 if scale is None else scale)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("by_product", [0, TILES])
@pytest.mark.parametrize("at_once", [2**28, 13 * SIZE * HEAD_DIM * TILES, 4 * SIZE * HEAD_DIM * 3, 1])
@pytest.mark.parametrize("kept", [1, 3, TILES])
def test_outputs_and_gradients_equal_attention_with_a_mask(monkeypatch, at_once, kept, by_product):
    """All heads at once, a few of them, some tiles of one, and one tile: the parts must not show."""
    monkeypatch.setattr(gathered, "GATHERED_AT_ONCE", at_once)
    monkeypatch.setattr(gathered, "TILES_BY_PRODUCT", by_product)
    inputs, tiles = draw(kept)
    leaves = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
    outputs = [f(*part, tiles, scale=0.3) for f, part in zip((attend_to_tiles, by_mask), leaves, strict=True)]
    assert torch.allclose(*outputs, atol=1e-12)
    weight = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = (
        torch.autograd.grad((output * weight).sum(), part) for output, part in zip(outputs, leaves, strict=True)
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-11)


def test_keys_that_do_not_exist_are_hidden():
    inputs, tiles = draw(2)
    valid = torch.arange(TILES * SIZE) % SIZE < 5
    with torch.no_grad():
        assert torch.allclose(attend_to_tiles(*inputs, tiles, valid), by_mask(*inputs, tiles, valid), atol=1e-12)
