"""Keys, documents and tensors that are much louder than others, in the reference: others must not pay for them."""

import pytest
import torch
import torch.nn.functional as F

from sage_kernels import ops, training
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec import transforms
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.loud import LOUD_DOCUMENT, documents, loud_key

FORWARD_ONLY = ("sage1", "sage2", "sage3")
WITH_GRADIENTS = ("sage_bwd", "sage_bwd_int8")


def relative_error(inputs, recipe, **options):
    output, _ = reference.attention(*inputs, RECIPES[recipe], **options)
    truth, _ = sdpa.attention(*(x.double() for x in inputs), **options)
    return (output.double() - truth).abs().sum() / truth.abs().sum()


@pytest.mark.parametrize(("place", "is_causal"), [*((place, False) for place in (0, 63, 64, 100, 255)), (200, True)])
@pytest.mark.parametrize("recipe", FORWARD_ONLY)
def test_a_loud_key_costs_the_others_nothing(recipe, place, is_causal):
    """The error is no larger than where the key is as loud as the others."""
    calls = (loud_key(256, place, 64, times=times) for times in (1000.0, 1.0))
    loud, ordinary = (relative_error(call, recipe, is_causal=is_causal) for call in calls)
    assert loud <= ordinary


@pytest.mark.parametrize("place", [0, 700, 1023])
def test_keys_count_in_the_mean_and_the_equalizer_but_for_the_group_of_a_loud_one(place):
    query, key, _ = loud_key(1024, place, 32, times=1000.0, heads=2)
    key[:, 1, place] /= 1000.0
    counted = transforms.quiet_keys(key)
    group = torch.arange(1024) // 128 % 8
    assert torch.equal(counted[0, 0, :, 0], group != group[place]) and counted[0, 1].all()
    others = key[:, :1, group != group[place]]
    torch.testing.assert_close(
        transforms.mean_of_tokens(key, counted)[:, :1], others.mean(2, keepdim=True), rtol=0, atol=1e-6
    )
    expected = transforms.equalize(query[:, :1], others)
    assert torch.equal(transforms.equalize(query, key, counted)[:, :1], expected)


def test_tokens_that_do_not_count_and_short_groups_make_no_group_loud():
    key = loud_key(1030, 0, 32, times=1.0)[1]
    key_mask = torch.ones(1, 1, 1030, 1, dtype=torch.bool)
    key_mask[:, :, 3:130] = False
    assert torch.equal(transforms.quiet_keys(key, key_mask), key_mask.expand(1, 4, -1, 1))
    assert torch.equal(transforms.quiet_keys(torch.where(key_mask, key, 1e6), key_mask), key_mask.expand(1, 4, -1, 1))
    assert transforms.quiet_keys(torch.zeros_like(key)).all()
    assert transforms.quiet_keys(key[:, :, :1]).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("recipe", [*FORWARD_ONLY, "sage3_paper"])
def test_a_packed_document_is_independent_of_its_neighbours_to_the_bit(recipe, is_causal):
    outputs = []
    for loud in (False, True):
        inputs, lengths = documents("cpu", loud=loud)
        tokens = [x[0].transpose(0, 1) for x in inputs]
        outputs.append(ops.packed_attention(*tokens, *lengths[:4], recipe=recipe, is_causal=is_causal)[0])
    assert_others_are_equal(*outputs)


@pytest.mark.parametrize("recipe", WITH_GRADIENTS)
def test_a_packed_documents_gradients_are_independent_of_its_neighbours_to_the_bit(recipe):
    results = []
    for loud in (False, True):
        inputs, lengths = documents("cpu", loud=loud)
        tokens = [x[0].transpose(0, 1).requires_grad_() for x in inputs]
        output = training.packed_attention(*tokens, *lengths[:4], recipe=recipe)
        output.backward(torch.ones_like(output))
        results.append([output.detach(), *(x.grad for x in tokens)])
    for ordinary, with_loud in zip(*results, strict=True):
        assert_others_are_equal(ordinary, with_loud)


def assert_others_are_equal(ordinary, with_loud):
    """Assert tokens to be equal but for those of the loud document, which differ."""
    quiet = torch.ones(len(ordinary), dtype=torch.bool)
    quiet[LOUD_DOCUMENT] = False
    assert torch.equal(ordinary[quiet], with_loud[quiet])
    assert not torch.equal(ordinary[~quiet], with_loud[~quiet])


@pytest.mark.parametrize("size", [1e18, 2e18])
@pytest.mark.parametrize("recipe", [*FORWARD_ONLY, "sage3_paper", *WITH_GRADIENTS])
def test_where_sdpa_is_finite_large_queries_and_keys_give_finite_outputs(recipe, size):
    """Their squares have sums beyond float32."""
    query, key, value = loud_key(64, 0, 64, times=1.0)
    query, key = query * size, key * size
    assert F.scaled_dot_product_attention(query, key, value).isfinite().all()
    output, lse = reference.attention(query, key, value, RECIPES[recipe])
    assert output.isfinite().all() and lse.isfinite().all()


def test_a_mean_whose_sum_overflows_is_not_subtracted():
    assert not transforms.mean_of_tokens(torch.full((1, 1, 200, 4), 1e37)).any()
    x = torch.randn(1, 1, 200, 4, generator=torch.Generator().manual_seed(0)) + 1e37
    assert torch.equal(transforms.smooth_value(x)[0], x)
