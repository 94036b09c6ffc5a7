"""The reference gradients against exact attention: what the recipes promise of them."""

from dataclasses import replace

import pytest
import torch

from sage_kernels.reference import backward as subject
from sage_kernels.spec.layout import Lengths
from tests.helpers.calls import new_backward_call, new_call
from tests.helpers.gradients import (
    BWD,
    BWD_INT8,
    FLOAT32,
    PLAIN,
    ROTATED,
    TRANSFORMED,
    TRANSFORMED_INT8,
    UNIT,
    autograd,
    draw,
    gradients,
    names,
    relative_l1,
)


@names
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("sigma", "most"), [(1.0, 0.02), (3.0, 0.078)])
def test_gradients_of_flat_and_of_sharp_attention_are_near_the_exact_ones(recipe, head_dim, sigma, most):
    """Scores of deviation 9: there INT8 of Q and K is most of the error, and .078 is what one scale per block gives."""
    inputs = draw(1, 2, 2, 1024, 1024, head_dim, head_dim, dtype=torch.bfloat16, sigma=sigma)
    for actual, truth in zip(gradients(*inputs, recipe), autograd(*inputs), strict=True):
        assert relative_l1(actual, truth) <= most


def test_p_and_ds_in_16_bit_are_more_accurate_than_in_int8():
    query, key, value, gradient = draw(1, 2, 2, 512, 512, 64, 64, dtype=torch.bfloat16)
    truths = autograd(query, key, value, gradient)
    for fine, coarse, truth in zip(
        *(gradients(query, key, value, gradient, recipe) for recipe in (BWD, BWD_INT8)), truths, strict=True
    ):
        assert relative_l1(fine, truth) < relative_l1(coarse, truth)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotation_halves_the_error_that_a_loud_channel_makes(head_dim):
    """One channel of 8 times the others' deviation sets every scale; rotated, all share its loudness."""
    query, key, value, gradient = draw(1, 2, 2, 512, 512, head_dim, 64, dtype=torch.bfloat16)
    query[..., 3], key[..., 3] = query[..., 3] * 8, key[..., 3] * 8
    truths = autograd(query, key, value, gradient, scale=0.05)
    plain = gradients(query, key, value, gradient, PLAIN, scale=0.05)
    rotated = gradients(query, key, value, gradient, ROTATED, scale=0.05)
    for actual, other, truth in zip(rotated, plain, truths, strict=True):
        assert relative_l1(actual, truth) < relative_l1(other, truth) / 2


@pytest.mark.parametrize("recipe", [TRANSFORMED, TRANSFORMED_INT8], ids=["16 bit", "INT8"])
def test_equalizer_corrects_channels_that_are_loud_in_k_alone(recipe):
    """Take 2 of 64 channels, 40 times as loud in K and as quiet in Q; with grouped heads, and padded channels."""
    query, key, value, gradient = draw(2, 4, 2, 300, 300, 60, 32, dtype=torch.bfloat16)
    query[..., [3, 20]], key[..., [3, 20]] = query[..., [3, 20]] / 40, key[..., [3, 20]] * 40
    key_mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(1)) < 0.8
    truths = autograd(query, key, value, gradient, key_mask=key_mask)
    rotated = gradients(query, key, value, gradient, replace(recipe, equalize=False), key_mask=key_mask)
    equalized = gradients(query, key, value, gradient, recipe, key_mask=key_mask)
    for actual, other, truth in zip(equalized, rotated, truths, strict=True):
        assert relative_l1(actual, truth) < 0.04
        assert relative_l1(actual, truth) < relative_l1(other, truth) / 2


@names
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sequence_of_one_token_passes_its_gradient_to_v_alone(recipe, is_causal):
    query, key, value, gradient = draw(2, 4, 4, 1, 1, 32, 32, dtype=torch.bfloat16)
    dq, dk, dv = gradients(query, key, value, gradient, recipe, is_causal=is_causal)
    # dP and δ are equal but for the order of their float32 sums.
    bound = 32 * FLOAT32 * (gradient.double() * value.double()).abs().sum(-1, keepdim=True)
    assert (dq.double().abs() <= bound * key.double().abs().amax()).all()
    assert (dk.double().abs() <= bound * query.double().abs().amax()).all()
    step = UNIT[torch.bfloat16] * gradient.double().abs()
    if recipe.backward == "int8":
        step = step + gradient.double().abs().amax(-1, keepdim=True) / 254
    assert ((dv.double() - gradient.double()).abs() <= 1.01 * step).all()


@names
@pytest.mark.parametrize("factor", [2.0**-40, 2.0**40, -1.0])
def test_the_magnitude_and_the_sign_of_the_gradient_do_not_matter(recipe, factor):
    query, key, value, gradient = draw(1, 2, 1, 140, 200, 32, 32, dtype=torch.bfloat16)
    expected = gradients(query, key, value, gradient, recipe)
    actual = gradients(query, key, value, gradient * factor, recipe)
    assert all(torch.equal(x, y * factor) for x, y in zip(actual, expected, strict=True))


@names
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_spoils_the_same_elements_as_in_exact_attention(recipe, is_causal, bad):
    query, key, value, gradient = draw(1, 2, 1, 140, 150, 32, 32)
    gradient[0, 1, 70, 3] = bad

    def spoiled(x):
        return ~x.isfinite().all(-1)

    dq, dk, dv = (spoiled(x) for x in gradients(query, key, value, gradient, recipe, is_causal=is_causal))
    truths = [spoiled(x) for x in autograd(query, key, value, gradient, is_causal=is_causal)]
    row = torch.zeros(1, 2, 140, dtype=torch.bool)
    row[0, 1, 70] = True
    seen = (torch.arange(150) <= 70 if is_causal else torch.ones(150, dtype=torch.bool)).expand(1, 1, 150)
    assert torch.equal(dq, row) and torch.equal(truths[0], row)
    assert torch.equal(dk, seen) and torch.equal(truths[1], seen)
    # 0 times what is not finite spoils V's gradient of every key in exact attention; here of no others than those.
    assert not (seen & ~dv).any()
    assert not (dv & ~truths[2]).any()


@names
def test_the_gradient_of_rows_that_attend_to_nothing_does_not_matter(recipe):
    query, key, value, gradient = draw(1, 2, 2, 140, 130, 32, 32)
    options = {"is_causal": True, "causal_offset": -30}
    clean = gradients(query, key, value, gradient, recipe, **options)
    gradient[:, :, :30] = torch.nan
    poisoned = gradients(query, key, value, gradient, recipe, **options)
    assert all(torch.equal(x, y) for x, y in zip(clean, poisoned, strict=True))
    assert not clean[0][:, :, :30].any()


@names
def test_grouped_heads_add_up(recipe):
    query, key, value, gradient = draw(2, 6, 2, 140, 150, 32, 24)
    dq, *grouped = gradients(query, key, value, gradient, recipe)
    repeated = (x.repeat_interleave(3, 1) for x in (key, value))
    expected, *parts = gradients(query, *repeated, gradient, recipe)
    assert torch.allclose(dq, expected, rtol=0, atol=1e-6)
    for actual, part in zip(grouped, parts, strict=True):
        terms = part.unflatten(1, (2, 3))
        # Two orders of a float32 sum of 3·140 terms.
        assert torch.allclose(actual, terms.sum(2), rtol=0, atol=3 * 140**0.5 * FLOAT32 * terms.abs().amax().item())


@names
@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_that_do_not_exist_have_no_gradient_and_no_influence(recipe, is_causal):
    query, key, value, gradient = draw(2, 4, 2, 140, 200, 32, 32)
    key_mask = torch.ones(2, 200, dtype=torch.bool)
    key_mask[0, 60:90] = key_mask[1, :80] = False
    clean = gradients(query, key, value, gradient, recipe, key_mask=key_mask, is_causal=is_causal)
    missing = ~key_mask[:, None].expand(2, 2, 200)
    key[missing], value[missing] = 1e4, torch.nan
    poisoned = gradients(query, key, value, gradient, recipe, key_mask=key_mask, is_causal=is_causal)
    assert all(torch.equal(x, y) for x, y in zip(clean, poisoned, strict=True))
    gradient[:, :, -1] = torch.nan
    for spoiled in gradients(query, key, value, gradient, recipe, key_mask=key_mask, is_causal=is_causal)[1:]:
        assert not spoiled[missing].any()


@names
def test_a_padding_of_one_sequence_serves_the_whole_batch(recipe):
    inputs = draw(2, 4, 2, 140, 200, 32, 32)
    key_mask = (torch.arange(200) < 131).view(1, 200)
    shared = gradients(*inputs, recipe, key_mask=key_mask)
    apart = gradients(*inputs, recipe, key_mask=key_mask.repeat(2, 1))
    assert all(torch.equal(x, y) for x, y in zip(shared, apart, strict=True))


@names
def test_padded_keys_equal_a_shorter_sequence(recipe):
    query, key, value, gradient = draw(1, 2, 2, 50, 200, 32, 32)
    padded = gradients(query, key, value, gradient, recipe, key_mask=(torch.arange(200) < 131).view(1, 200))
    short = gradients(query, key[:, :, :131], value[:, :, :131], gradient, recipe)
    for x, y in zip(padded, short, strict=True):
        assert torch.equal(x[:, :, : y.shape[2]], y)


@names
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_equal_each_alone(recipe, is_causal):
    q_starts, k_starts = [0, 63, 63, 193, 300], [0, 128, 150, 150, 400]
    used = [100, 22, 0, 250]
    lengths = Lengths(
        *(torch.tensor(starts, dtype=torch.int32) for starts in (q_starts, k_starts)), 130, 250, torch.tensor(used)
    )
    query, key, value, gradient = draw(1, 4, 2, 300, 400, 40, 24, dtype=torch.bfloat16)
    packed = gradients(query, key, value, gradient, recipe, lengths=lengths, is_causal=is_causal)
    output, saved = subject.forward(new_call(query, key, value, recipe, lengths=lengths, is_causal=is_causal))
    assert (saved.query.shape, saved.query_scale.shape) == ((1, 4, 768, 64), (1, 4, 768))
    assert (saved.key.shape, saved.key_scale.shape) == ((1, 2, 896, 64), (1, 2, 14, 4))
    expected = [torch.zeros_like(x) for x in packed]
    for i, count in enumerate(used):
        queries, keys = slice(q_starts[i], q_starts[i + 1]), slice(k_starts[i], k_starts[i] + count)
        inputs = (query[:, :, queries], key[:, :, keys], value[:, :, keys])
        alone, kept = subject.forward(new_call(*inputs, recipe, is_causal=is_causal))
        assert torch.equal(output[:, :, queries], alone)
        assert torch.equal(saved.lse[:, :, queries], kept.lse)
        first = (q_starts[i] // 128 + i) * 128
        assert torch.equal(saved.query[:, :, first : first + kept.query.shape[2]], kept.query)
        first = (k_starts[i] // 128 + i) * 2
        assert torch.equal(saved.key_scale[:, :, first : first + kept.key_scale.shape[2]], kept.key_scale)
        parts = gradients(*inputs, gradient[:, :, queries], recipe, is_causal=is_causal)
        for whole, tokens, part in zip(expected, (queries, keys, keys), parts, strict=True):
            whole[:, :, tokens] = part
    assert all(torch.equal(x, y) for x, y in zip(packed, expected, strict=True))


@names
def test_inputs_are_not_changed_and_reruns_are_equal(recipe):
    query, key, value, gradient = draw(1, 4, 2, 128, 256, 32, 32)
    output, saved = subject.forward(new_call(query, key, value, recipe, is_causal=True))
    inputs = (gradient, value, output, *saved)
    before = [x.clone() for x in inputs]
    call = new_backward_call(gradient, value, output, saved, recipe, 32, is_causal=True)
    first, second = (subject.backward(call) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


MEMORY_PROBE = """
import resource, torch
from sage_kernels.spec.call import BackwardCall, Call
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.reference import backward as reference_backward
def run(tokens):
    query, key, value, gradient = (torch.randn(1, 1, tokens, 32) for _ in range(4))
    recipe = RECIPES["sage_bwd_int8"]
    output, saved = reference_backward.forward(Call(query, key, value, recipe, is_causal=True))
    reference_backward.backward(BackwardCall(gradient, value, output, saved, 32, recipe, is_causal=True))
run(256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(6144)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_linear_in_length(forks):
    """6144 tokens within 100 MB; one matrix of their scores alone would be 151 MB."""
    assert int(forks.run(MEMORY_PROBE)) * 1024 < 1e8
