"""The routers against brute force: their scores, what they keep, and the attention mass in it."""

import itertools
import math

import pytest
import torch

from sage_hf.sparse import MeanRouter, ShareRouter, SubBlockRouter, even_budgets, kept_mass, routers, tile_mass
from sage_kernels import ops
from sage_kernels.exact import sdpa

SIZES = ((128, 128), (128, 64), (64, 64))


def draw(q_len=500, kv_len=450, batch=2, q_heads=4, kv_heads=2, dtype=torch.float32, contrast=2.0):
    """Tokens that are alike within runs of 32."""
    generator = torch.Generator().manual_seed(0)

    def runs(heads, tokens):
        base = torch.randn(batch, heads, -(-tokens // 32), 16, generator=generator).repeat_interleave(32, 2)
        return (contrast * base[:, :, :tokens] + torch.randn(batch, heads, tokens, 16, generator=generator)).to(dtype)

    return runs(q_heads, q_len), runs(kv_heads, kv_len)


def means_of(x, size):
    return torch.stack([part.double().mean(2) for part in x.split(size, 2)], 2)


def subblock_by_hand(query, key, block_m, block_n, parts):
    """Loops over blocks and their parts, in float64."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    rows, tiles = query.split(block_m, 2), key.split(block_n, 2)
    scores = torch.empty(*query.shape[:2], len(rows), len(tiles), dtype=torch.float64)
    for (r, row), (t, tile) in itertools.product(enumerate(rows), enumerate(tiles)):
        a, b = means_of(row, block_m // parts), means_of(tile, block_n // parts)
        scores[:, :, r, t] = (a @ b.mT * query.shape[-1] ** -0.5).flatten(-2).logsumexp(-1)
    return scores


@pytest.mark.parametrize(("block_m", "block_n"), SIZES)
def test_mean_scores_equal_scores_of_block_means(block_m, block_n):
    query, key = draw()
    found = MeanRouter(0.5, block_m, block_n).scores(query, key)
    expected = means_of(query, block_m) @ means_of(key, block_n).repeat_interleave(2, 1).mT / 4
    assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize(("block_m", "block_n"), SIZES)
@pytest.mark.parametrize("tokens", [500, 515, 513])
def test_subblock_scores_are_the_formulas_also_of_partial_blocks(block_m, block_n, tokens, monkeypatch):
    query, key = draw(tokens, tokens - 60)
    router = SubBlockRouter(0.5, block_m, block_n)
    expected = subblock_by_hand(query, key, block_m, block_n, 4)
    assert torch.allclose(router.scores(query, key).double(), expected, atol=1e-5)
    monkeypatch.setattr(routers, "SCORES_AT_ONCE", 1)
    assert torch.allclose(router.scores(query, key).double(), expected, atol=1e-5)


@pytest.mark.parametrize("router", [MeanRouter, SubBlockRouter])
@pytest.mark.parametrize("keep", [0.01, 0.25, 0.5, 1.0, (0.25, 0.5, 0.75, 1.0)])
def test_the_best_tiles_are_kept_as_many_as_asked_for(router, keep):
    query, key = draw()
    made = router(keep)
    blocks, scores = made.route(query, key), made.scores(query, key)
    kept = blocks.kept(450)
    shares = keep if isinstance(keep, tuple) else (keep,) * 4
    for head, share in enumerate(shares):
        assert (blocks.counts[:, head] == max(1, math.ceil(share * 4))).all()
    worst_kept = scores.masked_fill(~kept, torch.inf).amin(-1)
    best_left = scores.masked_fill(kept, -torch.inf).amax(-1)
    assert (worst_kept >= best_left).all()


def test_of_equal_scores_the_first_tiles_are_kept():
    query, key = torch.ones(1, 1, 256, 16), torch.ones(1, 1, 1024, 16)
    for router in (MeanRouter(0.25), SubBlockRouter(0.25)):
        blocks = router.route(query, key)
        assert torch.equal(blocks.tiles[..., :2], torch.tensor([0, 1], dtype=torch.int32).expand(1, 1, 2, 2))
    assert (ShareRouter(0.25).route(query, key).counts == 2).all()


def test_scores_of_bfloat16_tokens_are_float32():
    """Means that differ by less than bfloat16 resolves are told apart."""
    key = torch.ones(1, 1, 1024, 16)
    for tile in range(8):
        key[:, :, 128 * tile : 128 * tile + tile + 1] = 1.0078125
    blocks = MeanRouter(0.25).route(torch.ones(1, 1, 128, 16).bfloat16(), key.bfloat16())
    assert sorted(blocks.tiles[0, 0, 0, :2].tolist()) == [6, 7]


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_tiles_are_kept_until_their_share_reaches_the_bound(share):
    query, key = draw()
    blocks = ShareRouter(share, similarity=-1.0).route(query, key)
    weights = (means_of(query, 128) @ means_of(key, 128).repeat_interleave(2, 1).mT / 4).softmax(-1)
    for row in itertools.product(range(2), range(4), range(4)):
        order, total, wanted = weights[row].argsort(descending=True), 0.0, set()
        for tile in order.tolist():
            if total < share:
                wanted.add(tile)
            total += float(weights[row][tile])
        assert set(blocks.tiles[row][: blocks.counts[row]].tolist()) == wanted


def test_blocks_whose_tokens_differ_are_kept_whole():
    query, key = draw(512, 512, batch=1, q_heads=1, kv_heads=1, contrast=0.0)
    query[:, :, 128:256] = query[:, :, 128:129] * torch.rand(128, 1, generator=torch.Generator().manual_seed(1))
    key[:, :, 256:384] = key[:, :, 256:257]
    cosine = torch.nn.functional.cosine_similarity(query[0, 0, :128, None], query[0, 0, None, :128], dim=-1)
    assert torch.allclose(routers.block_similarity(query, 128)[0, 0, 0], cosine.mean(), atol=1e-5)
    kept = ShareRouter(0.01, similarity=0.5).route(query, key).kept(512)[0, 0]
    assert kept[[0, 2, 3]].all()  # blocks of rows that differ
    assert kept[1, [0, 1, 3]].all()  # tiles of keys that differ
    alone = ShareRouter(1e-6, similarity=-1.0).route(query, key)
    assert (alone.counts == 1).all()


@pytest.mark.parametrize("router", [MeanRouter(0.25), SubBlockRouter(0.25), ShareRouter(0.2)])
@pytest.mark.parametrize("text", [slice(0, 100), slice(-130, None), slice(0, 0)])
def test_text_attends_to_all_keys_and_all_queries_attend_to_it(router, text):
    query, key = draw(1000, 1000)
    blocks = router.route(query, key, dense=[text])
    kept = blocks.kept(1000)
    start, stop, _ = text.indices(1000)
    plain = router.route(query, key).kept(1000)
    if start == stop:
        assert torch.equal(kept, plain)
        return
    rows = slice(start // 128, -(-stop // 128))
    assert kept[:, :, rows].all()
    assert kept[..., rows].all()
    plain[:, :, rows] = True
    plain[..., rows] = True
    assert torch.equal(kept, plain)


@pytest.mark.parametrize("router", [MeanRouter(1.0), SubBlockRouter(1.0), ShareRouter(1.0)])
def test_all_kept_is_dense_attention(router):
    query, key = draw()
    blocks = router.route(query, key)
    value = torch.randn(2, 2, 450, 16, generator=torch.Generator().manual_seed(2))
    output, _ = ops.attention(query, key, value, blocks=blocks, recipe="exact")
    truth, _ = sdpa.attention(query, key, value)
    assert torch.allclose(output.double(), truth, atol=1e-5)
    assert torch.allclose(kept_mass(query, key, blocks), torch.ones(2, 4), atol=1e-5)


def test_mass_equals_the_sum_of_kept_weights():
    query, key = draw()
    weights = (query.double() @ key.double().repeat_interleave(2, 1).mT / 4).softmax(-1)
    expected = torch.stack([part.sum(-1) for part in weights.split(64, -1)], -1)
    assert torch.allclose(tile_mass(query, key, block_n=64).double(), expected, atol=1e-6)
    blocks = MeanRouter(0.5).route(query, key)
    expected = (weights * blocks.mask(450, 0, 500)).sum(-1).mean(-1)
    assert torch.allclose(kept_mass(query, key, blocks, sampled_rows=500).double(), expected, atol=1e-6)


def test_routers_recall_more_mass_than_chance_and_less_than_the_best_tiles():
    query, key = draw(1024, 1024)
    mass = tile_mass(query, key).unflatten(2, (-1, 128)).mean(3)
    best = mass.sort(-1, descending=True).values[..., :2].sum(-1).mean((0, 1, 2))
    for router in (MeanRouter(0.25), SubBlockRouter(0.25)):
        recall = kept_mass(query, key, router.route(query, key), sampled_rows=1024).mean()
        assert 0.25 < recall <= best + 1e-6


def test_parts_tell_tiles_apart_whose_means_are_equal():
    """A tile of two opposite halves has mean 0, and one half of it a query's weight."""
    query, key = torch.ones(1, 1, 128, 16), torch.zeros(1, 1, 512, 16)
    key[:, :, 128:192], key[:, :, 192:256] = 3.0, -3.0
    assert MeanRouter(0.25).route(query, key).tiles[0, 0, 0, 0] == 0
    assert SubBlockRouter(0.25).route(query, key).tiles[0, 0, 0, 0] == 1


def test_budgets_even_out_what_heads_keep():
    generator = torch.Generator().manual_seed(0)
    sharpness = torch.tensor([0.1, 1.0, 3.0, 8.0])[:, None, None]
    mass = (torch.randn(2, 4, 50, 32, generator=generator) * sharpness).softmax(-1)
    budgets = even_budgets(mass, 0.25)
    assert sum(budgets) / 4 <= 0.25
    assert budgets == tuple(sorted(budgets, reverse=True))
    curves = mass.sort(-1, descending=True).values.cumsum(-1).mean((0, 2))
    even = [float(curves[head, round(share * 32) - 1]) for head, share in enumerate(budgets)]
    alike = curves[:, 7]
    assert min(even) > float(alike.min())
    assert even_budgets(mass, 1.0) == pytest.approx((1.0,) * 4, abs=0.4)
    assert all(share >= 1 / 32 for share in even_budgets(mass, 0.001))


@pytest.mark.parametrize("keep", [0.0, 1.5, -0.1, (0.5, 0.0), "half"])
def test_shares_outside_0_to_1_are_refused(keep):
    for router in (MeanRouter, SubBlockRouter):
        with pytest.raises(ValueError, match="keep must be"):
            router(keep)
    with pytest.raises(ValueError, match="share must be"):
        ShareRouter(0.0)


def test_a_share_for_each_head_needs_as_many_heads():
    with pytest.raises(ValueError, match="2 shares"):
        MeanRouter((0.5, 0.5)).route(*draw())


@pytest.mark.parametrize("at_once", [1, 2 * 2 * 100 * 300, 2**26])
def test_weights_of_tiles_do_not_depend_on_how_many_heads_are_computed_at_once(at_once, monkeypatch):
    query, key = torch.randn(2, 6, 100, 16), torch.randn(2, 3, 300, 16)
    expected = (query.unflatten(1, (3, 2)) @ key.unsqueeze(2).mT / 4).softmax(-1).flatten(1, 2)
    expected = torch.stack([tile.sum(-1) for tile in expected.split(128, -1)], -1)
    monkeypatch.setattr(routers, "WEIGHTS_AT_ONCE", at_once)
    assert torch.allclose(tile_mass(query, key), expected, atol=1e-6)
