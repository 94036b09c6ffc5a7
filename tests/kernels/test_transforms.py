"""Every transform is exact in real arithmetic: undoing it in float64 gives exact attention back."""

import pytest
import torch

from sage_kernels.spec import transforms


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 2, 16, 64, 128, 256])
def test_rotation_is_orthonormal(size):
    matrix = transforms.rotate(torch.eye(size)).double()
    # Entries are ±size**-0.5, rounded to float32 when that is no power of two.
    assert (matrix @ matrix.T - torch.eye(size)).abs().max() <= 2**-22


def test_rotation_refuses_what_is_no_power_of_two():
    with pytest.raises(ValueError, match="got 96: pad"):
        transforms.rotation_signs(96)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
def test_rotating_query_and_key_leaves_scores_unchanged(head_dim):
    query, key = random(2, 3, 50, head_dim), random(2, 3, 70, head_dim, seed=1)
    before = query.double() @ key.double().mT
    after = transforms.rotate(query).double() @ transforms.rotate(key).double().mT
    bound = head_dim * 2**-22 * query.double().norm(dim=-1, keepdim=True) * key.double().norm(dim=-1).unsqueeze(-2)
    assert ((after - before).abs() <= bound).all()


def test_rotation_spreads_a_loud_channel():
    x = torch.zeros(1, 128)
    x[0, 5] = 100.0
    assert transforms.rotate(x).abs().max() < 10


@pytest.mark.parametrize("size", [16, 48, 128])
def test_unrotating_undoes_the_rotation(size):
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(transforms.unrotate(transforms.rotate(x)), x, rtol=0, atol=1e-14)
    assert not torch.allclose(transforms.rotate(transforms.rotate(x)), x, atol=1e-2)


def test_equalizing_query_and_key_leaves_scores_unchanged_to_the_bit():
    """Factors are powers of two: in float64 every product and every sum stays what it was."""
    query, key = random(2, 4, 50, 32), random(2, 2, 70, 32, seed=1) * random(32, seed=2).exp()
    factor = transforms.equalize(query, key)
    assert factor.shape == (2, 2, 1, 32)
    assert factor.unique().numel() > 2
    assert torch.equal(factor.log2(), factor.log2().round())
    equalized = (query * factor.repeat_interleave(2, 1)).double(), (key / factor).double()
    before = query.double().unflatten(1, (2, 2)) @ key.double().unsqueeze(2).mT
    after = equalized[0].unflatten(1, (2, 2)) @ equalized[1].unsqueeze(2).mT
    assert torch.equal(before, after)


@pytest.mark.parametrize("factor", [2.0**-30, 1 / 40, 1.0, 1.9, 10.0, 40.0, 2.0**30])
def test_equalized_channels_of_query_and_key_are_as_loud(factor):
    query, key = random(1, 1, 500, 4), random(1, 1, 500, 4, seed=1) + 100
    key[..., 2] = (key[..., 2] - 93) * factor
    equalizer = transforms.equalize(query, key).flatten()
    rest = (torch.tensor(factor).log2() / 2 - equalizer[2].log2()).abs()
    assert rest <= 0.6 or equalizer[2] == 2.0 ** (8 if factor > 1 else -8)
    assert torch.equal(equalizer[[0, 1, 3]], torch.ones(3))


def test_channels_of_zeros_and_constant_keys_are_equalized_by_finite_factors():
    query, key = random(1, 2, 20, 8), random(1, 1, 30, 8, seed=1)
    query[..., 0], key[..., 1] = 0, 0
    key[..., 2] = 3.0
    key[0, 0, 4, 3], query[0, 1, 5, 4], key[0, 0, 7, 5] = torch.nan, torch.inf, 1e30
    equalizer = transforms.equalize(query, key).flatten()
    assert torch.equal(equalizer[:2], torch.ones(2))
    assert (equalizer.log2().abs() <= transforms.MAX_EQUALIZER).all()
    assert torch.equal(transforms.equalize(query, torch.zeros_like(key)), torch.ones(1, 1, 1, 8))


def test_the_equalizer_uses_valid_keys_and_sampled_queries_of_its_group():
    query, key = random(1, 4, 300, 8), random(1, 2, 40, 8, seed=1)
    key_mask = torch.arange(40)[:, None] < 25
    expected = transforms.equalize(query, key, key_mask)
    assert torch.equal(transforms.equalize(query, torch.where(key_mask, key, 1e6), key_mask), expected)
    for head in range(2):
        alone = transforms.equalize(query[:, 2 * head : 2 * head + 2], key[:, head : head + 1], key_mask)
        assert torch.equal(alone, expected[:, head : head + 1])
    left_out = torch.arange(300) % 3 > 0  # 300 rows are sampled at distances of 3
    query[:, :, left_out] = 1e6
    assert torch.equal(transforms.equalize(query, key, key_mask), expected)


@pytest.mark.parametrize("q_len", [40, 300])
def test_the_equalizer_ignores_invalid_queries(q_len):
    query, key = random(2, 4, q_len, 8), random(2, 2, 40, 8, seed=1)
    key_mask = torch.rand(2, 1, q_len, 1, generator=torch.Generator().manual_seed(2)) < 0.3
    of_zeros = transforms.equalize(torch.where(key_mask, query, 0.0), key, None, key_mask)
    assert torch.equal(transforms.equalize(torch.where(key_mask, query, 1e6), key, None, key_mask), of_zeros)
    sampled = torch.arange(q_len) % -(-q_len // 128) == 0
    for element in range(2):
        kept = query[element, None, :, key_mask[element, 0, :, 0] & sampled]
        assert torch.equal(transforms.equalize(kept, key[element, None]), of_zeros[element, None])
    assert torch.equal(
        transforms.equalize(query, key, None, torch.tensor(True).view(1, 1, 1, 1)), transforms.equalize(query, key)
    )
    assert torch.equal(transforms.equalize(query, key, None, torch.zeros_like(key_mask)), torch.ones(2, 2, 1, 8))


def test_the_mean_ignores_tokens_that_are_not_valid():
    x = random(2, 3, 10, 4)
    key_mask = torch.tensor([True] * 6 + [False] * 4).view(1, 1, 10, 1)
    poisoned = x.clone()
    poisoned[:, :, 6:] = 1e9
    assert torch.allclose(transforms.mean_of_tokens(poisoned, key_mask), x[:, :, :6].mean(-2, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 100, 128, 129, 20000])
def test_sums_have_one_order(tokens):
    """Redone one addition at a time: halves of 128, halves of 128 of those, then in order."""
    x = random(tokens, 2)

    def halves(rows):
        while len(rows) > 1:
            middle = len(rows) // 2
            rows = [first + second for first, second in zip(rows[:middle], rows[middle:], strict=True)]
        return rows[0]

    def level(rows):
        rows = [*rows, *[torch.zeros(2)] * (-len(rows) % 128)]
        return [halves(rows[first : first + 128]) for first in range(0, len(rows), 128)]

    total, *rest = level(level(list(x)))
    for group in rest:
        total = total + group
    assert torch.equal(transforms.sum_of_tokens(x)[0], total)


def test_the_mean_of_no_token_is_zero():
    assert torch.equal(
        transforms.mean_of_tokens(random(1, 1, 4, 8), torch.zeros(1, 1, 4, 1, dtype=torch.bool)).sum(),
        torch.tensor(0.0),
    )


def test_one_bad_token_does_not_spoil_the_others():
    x = random(1, 1, 10, 4)
    x[0, 0, 3, 1] = float("nan")
    smoothed, mean = transforms.smooth(x)
    assert mean.isfinite().all()
    assert smoothed.isnan().sum() == 1


def test_only_means_that_stand_out_are_taken_from_v():
    x = random(1, 2, 300, 4)
    x = x - x.mean(-2, keepdim=True)
    x[..., 2] += 10 / 64 * x[..., 2].abs().amax(-1, keepdim=True)
    x[0, 0, 5, 3] = float("inf")
    smoothed, mean = transforms.smooth_value(x)
    assert torch.equal(mean[..., 2], transforms.mean_of_tokens(x)[..., 2]) and mean[..., [0, 1, 3]].count_nonzero() == 0
    assert torch.equal(smoothed, x - mean)


def test_invalid_tokens_do_not_say_which_means_stand_out():
    x, key_mask = random(1, 1, 40, 4), torch.arange(40)[:, None] < 20
    x[:, :, :20] += 1
    _, mean = transforms.smooth_value(torch.where(key_mask, x, 1e6), key_mask)
    assert torch.equal(mean, transforms.smooth_value(x[:, :, :20])[1])


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_blocks_are_smoothed_each_by_its_own_mean(tokens):
    x = random(2, 2, tokens, 16)
    smoothed, mean = transforms.smooth_blocks(x, 128)
    assert mean.shape == (2, 2, -(-tokens // 128), 16)
    back = smoothed + mean.repeat_interleave(128, -2)[:, :, :tokens]
    assert torch.allclose(back, x, atol=1e-6)
    for start in range(0, tokens, 128):
        assert smoothed[:, :, start : start + 128].mean(-2).abs().max() < 1e-6


def test_inputs_are_not_changed():
    x = random(1, 1, 200, 16)
    before = x.clone()
    transforms.smooth(x), transforms.smooth_value(x), transforms.smooth_blocks(x, 128), transforms.rotate(x)
    assert torch.equal(x, before)


def scores_one_by_one(query, key, scale, key_mask):
    """Scores of one head of K, in loops; `query` is (rows, head_dim), `key_mask` has a bool for each key."""
    step = -(-len(query) // transforms.HEAVY_QUERIES)
    mean = query[::step].double().mean(0)
    scores = [float(scale * mean @ x.double()) for x in key]
    for number in range(len(key)):
        share_its_scale = [x for x in range(len(key)) if x // 64 == number // 64 and x % 8 // 2 == number % 8 // 2]
        others = sum(abs(scores[x]) for x in share_its_scale if key_mask[x] and x != number)
        if abs(scores[number]) > others:
            scores[number] = abs(scores[number])
    return scores


def places_one_by_one(scores, places, key_mask):
    """`heavy_places` of keys with these scores, in a loop."""
    chosen = []
    for place in range(places):
        best, largest = place, scores[place] + transforms.HEAVY_MARGIN
        for number in range(place + places, len(scores), places):
            if key_mask[place] and key_mask[number] and scores[number] > largest:
                best, largest = number, scores[number]
        chosen.append(best)
    return chosen


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 64), (5, 65), (100, 200), (37, 1000)])
def test_heavy_places_are_taken_by_the_keys_with_the_largest_scores(q_len, kv_len):
    generator = torch.Generator().manual_seed(q_len)
    query = torch.randn(2, 4, q_len, 32, generator=generator) + 1
    key = torch.randn(2, 2, kv_len, 32, generator=generator) * 2
    key_mask = torch.rand(2, 1, kv_len, 1, generator=generator) < 0.8
    chosen = transforms.heavy_places(query, key, 64, 0.5, key_mask)
    for batch in range(2):
        for head in range(2):
            rows = query[batch, 2 * head : 2 * head + 2].flatten(0, 1)
            exists = key_mask[batch, 0, :, 0]
            expected = places_one_by_one(scores_one_by_one(rows, key[batch, head], 0.5, exists), 64, exists)
            assert chosen[batch, head].tolist() == expected
    assert (chosen % 64 == torch.arange(64)).all()


def test_equal_keys_and_keys_that_are_not_clearly_heavier_take_no_place():
    query, key = torch.ones(1, 1, 3, 16), torch.zeros(1, 1, 200, 16)
    first = torch.arange(64)
    assert torch.equal(transforms.heavy_places(query, key, 64, 1.0)[0, 0], first)
    key[:, :, 70] = transforms.HEAVY_MARGIN / 16
    assert torch.equal(transforms.heavy_places(query, key, 64, 1.0)[0, 0], first)
    key[:, :, 134] = key[:, :, 198] = transforms.HEAVY_MARGIN / 8
    expected = first.clone()
    expected[6] = 134  # the first of equals
    assert torch.equal(transforms.heavy_places(query, key, 64, 1.0)[0, 0], expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e38])
def test_a_key_without_a_finite_score_neither_takes_nor_leaves_a_place(bad):
    query, key = torch.ones(1, 1, 3, 16), torch.zeros(1, 1, 200, 16)
    key[:, :, 70], key[:, :, 5], key[:, :, 69] = bad, bad, 100.0
    first = torch.arange(64)
    chosen = transforms.heavy_places(query, key, 64, 1e3)[0, 0]
    # What is not finite counts as 0, and 0 is less than 100; products of 1e38 overflow.
    first[5] = 5 if bad == 1e38 else 69
    assert torch.equal(chosen, first)


def test_exchanged_tokens_change_places_with_those_that_were_there():
    x = torch.arange(200.0).view(1, 1, 200, 1).expand(1, 2, 200, 3)
    chosen = torch.stack((torch.arange(64), torch.arange(64) + 64))[None]
    found = transforms.exchange(x, chosen)
    assert torch.equal(found[:, 0], x[:, 0])
    assert torch.equal(found[0, 1, :, 0], torch.cat((x[0, 1, 64:128, 0], x[0, 1, :64, 0], x[0, 1, 128:, 0])))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 48), (6, 64), (100, 200), (37, 1000)])
def test_late_keys_have_the_largest_scores_with_queries_of_the_later_half(q_len, kv_len):
    generator = torch.Generator().manual_seed(q_len)
    query = torch.randn(2, 4, q_len, 32, generator=generator) + 1
    query[:, :, : q_len // 2] = torch.nan
    key = torch.randn(2, 2, kv_len, 32, generator=generator) * 2
    key_mask = torch.rand(2, 1, kv_len, 1, generator=generator) < 0.8
    late = transforms.late_keys(query, key, 48, 16, 0.5, key_mask)
    assert late.shape == (2, 2, 16)
    for batch in range(2):
        for head in range(2):
            rows = query[batch, 2 * head : 2 * head + 2, q_len // 2 :].flatten(0, 1)
            exists = key_mask[batch, 0, :, 0]
            scores = scores_one_by_one(rows, key[batch, head], 0.5, exists)
            expected = places_one_by_one(scores[32:], 16, exists[32:])
            numbers = [transforms.NO_KEY if number < 16 else number + 32 for number in expected]
            assert late[batch, head].tolist() == numbers
    assert (late == transforms.NO_KEY).any() and (late < transforms.NO_KEY).any() == (kv_len > 48)
