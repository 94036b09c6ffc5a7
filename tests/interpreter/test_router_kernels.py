"""The routers' kernels in Triton's interpreter, against the routers' own PyTorch."""

import pytest
import torch

from sage_hf.sparse import MeanRouter, ShareRouter, SubBlockRouter, routers
from sage_kernels.triton import routers as kernels


def draw(q_len=300, kv_len=270, batch=1, q_heads=2, kv_heads=1, channels=24):
    """Tokens that are alike within runs of 32, laid out as projections do."""
    generator = torch.Generator().manual_seed(0)

    def runs(heads, tokens):
        base = torch.randn(batch, -(-tokens // 32), heads, channels, generator=generator).repeat_interleave(32, 1)
        noise = torch.randn(batch, tokens, heads, channels, generator=generator)
        return (2 * base[:, :tokens] + noise).transpose(1, 2)

    return runs(q_heads, q_len), runs(kv_heads, kv_len)


@pytest.fixture
def by_kernels(monkeypatch):
    """Make routers take the kernels, wherever their tensors are."""
    monkeypatch.setattr(routers, "router_kernels", lambda query, key: kernels)


@pytest.mark.parametrize("sizes", [(16, 64), (32, 32), (128, 64)])
@pytest.mark.parametrize("tokens", [300, pytest.param(256, marks=pytest.mark.audit), 7])
def test_means_and_similarities_are_the_specifications(sizes, tokens):
    for query, key in (draw(tokens), [x.bfloat16()[..., ::2] for x in draw(tokens)]):
        found = kernels.block_means(query, key, *sizes, similarity=True)
        for x, size, mean, similarity in zip((query, key), sizes, found[:2], found[2:], strict=True):
            expected = routers.block_means(x, size)
            assert ((mean.float().sum(0) - expected).abs() <= 2**-17 * expected.abs() + 1e-6).all()
            assert torch.allclose(similarity, routers.block_similarity(x, size), atol=1e-6)
    assert kernels.block_means(query, key, *sizes)[2:] == (None, None)


@pytest.mark.parametrize("sizes", [(128, 128), pytest.param((64, 64), marks=pytest.mark.audit), (128, 64)])
@pytest.mark.parametrize("parts", [(4, 4), (1, 1), (2, 8), pytest.param((4, 1), marks=pytest.mark.audit)])
@pytest.mark.parametrize("tokens", [300, pytest.param(257, marks=pytest.mark.audit)])
def test_scores_are_the_specifications(sizes, parts, tokens):
    query, key = draw(tokens, tokens - 60)
    means = kernels.block_means(query, key, *(size // n for size, n in zip(sizes, parts, strict=True)))
    found = kernels.block_scores(means.query, means.key, 0.2, *parts)
    expected = SubBlockRouter(0.5, *sizes, *parts).scores(query, key, 0.2)
    assert found.shape == expected.shape
    lengths = [
        routers.block_means(x, size // n).norm(dim=-1).max()
        for x, size, n in zip((query, key), sizes, parts, strict=True)
    ]
    assert (found - expected).abs().max() <= 2**-16 * 0.2 * lengths[0] * lengths[1] + 1e-5


@pytest.mark.parametrize("dense", [(), (slice(0, 100),), (slice(-30, None), slice(0, 0))])
@pytest.mark.parametrize(
    "router",
    [
        MeanRouter(0.25),
        SubBlockRouter(0.3, 64, 64),
        SubBlockRouter((0.25, 1.0)),
        ShareRouter(0.6),
        ShareRouter(0.3, similarity=0.75, block_n=64),
        ShareRouter(1.0),
    ],
    ids=str,
)
@pytest.mark.usefixtures("by_kernels")
def test_routers_keep_the_specifications_tiles(router, dense, monkeypatch):
    query, key = draw()
    found = router.route(query, key, dense=dense)
    monkeypatch.setattr(routers, "router_kernels", lambda query, key: None)
    expected = router.route(query, key, dense=dense)
    assert torch.equal(found.counts, expected.counts)
    assert torch.equal(found.kept(270), expected.kept(270))
    listed = torch.arange(found.tiles.shape[-1]) < found.counts.unsqueeze(-1)
    ascending = found.tiles.masked_fill(~listed, 10**6)
    assert torch.equal(ascending, ascending.sort(-1).values)


@pytest.mark.parametrize("number", [1, 37])
def test_of_equal_scores_the_first_tiles_are_kept(number):
    """Few values, both zeros, infinities, and numbers that differ in their last bit."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([0.0, -0.0, 1.0, 1.0 + 2**-23, -3.0, 1e-40, -torch.inf, torch.inf])
    scores = values[torch.randint(len(values), (2, 3, 5, 40), generator=generator)]
    counts, tiles = kernels.list_most(scores, (number,) * 3)
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :number].sort(-1).values
    assert (counts == number).all()
    assert torch.equal(tiles.long(), best)


def test_tiles_are_kept_until_their_share_reaches_the_bound():
    """Keep the first of equal shares, and the tile that crosses the bound too."""
    scores = torch.tensor([0.1, 0.3, 0.1, 0.1, 0.3, 0.1]).log().expand(1, 1, 1, -1)
    for share, expected in ((0.05, [1]), (0.35, [1, 4]), (0.65, [0, 1, 4]), (0.85, [0, 1, 2, 3, 4]), (1.0, range(6))):
        counts, tiles = kernels.list_share(scores, share)
        assert tiles[0, 0, 0, : counts.item()].tolist() == list(expected)
