"""Each recipe is what it says: its fields, and its operands rebuilt by hand from formats and transforms."""

import pytest
import torch

from sage_kernels import exact, reference, transforms
from sage_kernels.formats import fp8, fp16, int8, nvfp4
from sage_kernels.recipe import RECIPES, Recipe, get_recipe


def draw(tokens=256, head_dim=64):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, tokens, head_dim, generator=generator) + 1.0 for _ in range(3))
    return query, key, value


def test_the_recipes_are_those_of_the_table():
    nvfp4_both = {"qk": "nvfp4", "pv": "nvfp4", "smooth_q": True, "smooth_k": True}
    assert {
        "sage3": Recipe(
            "sage3",
            **nvfp4_both,
            smooth_v=True,
            rotate=True,
            tensor_scale=True,
            scale_steps=(-2, 6),
            denominator="quantized_p",
        ),
        "sage3_paper": Recipe(
            "sage3_paper", **nvfp4_both, smooth_v=False, rotate=False, tensor_scale=False, scale_steps=(0, 0)
        ),
        "sage2": Recipe(
            "sage2",
            qk="int8",
            pv="fp8",
            smooth_k=True,
            smooth_v=True,
            denominator="quantized_p",
            q_tokens_per_scale=1,
            k_tokens_per_scale=64,
        ),
        "sage1": Recipe(
            "sage1", qk="int8", pv="fp16", smooth_k=True, denominator="p", q_tokens_per_scale=1, k_tokens_per_scale=64
        ),
        "exact": Recipe("exact", qk="exact", pv="exact"),
    } == RECIPES


@pytest.mark.parametrize("name", ["sage4", ["sage3"], None])
def test_what_is_no_recipe_is_refused_with_the_list(name):
    with pytest.raises(ValueError, match="recipes are: exact, sage1, sage2, sage3, sage3_paper"):
        get_recipe(name)


def test_sage3_operands_are_smoothed_rotated_and_searched():
    query, key, value = draw()
    operands = reference.quantize_operands(query, key, value, RECIPES["sage3"])
    key = key - key.mean(-2, keepdim=True)
    blocks = query.unflatten(-2, (2, 128))
    query = (blocks - blocks.mean(-2, keepdim=True)).flatten(-3, -2)
    value = (value - value.mean(-2, keepdim=True)).mT
    assert torch.equal(operands.smooth_key, key)
    assert torch.equal(operands.query_mean, blocks.mean(-2))
    assert torch.equal(operands.query, nvfp4.quantize(transforms.rotate(query), (-2, 6)).dequantize())
    assert torch.equal(operands.key, nvfp4.quantize(transforms.rotate(key), (-2, 6)).dequantize())
    assert torch.equal(operands.value * operands.value_scale, nvfp4.quantize(value, (-2, 6)).dequantize().mT)


def test_sage3_paper_operands_are_smoothed_in_the_published_format():
    query, key, value = draw()
    operands = reference.quantize_operands(query, key, value, RECIPES["sage3_paper"])
    blocks = query.unflatten(-2, (2, 128))
    query = (blocks - blocks.mean(-2, keepdim=True)).flatten(-3, -2)
    one = torch.ones(1, 1)
    assert torch.equal(operands.query, nvfp4.quantize(query, tensor_scale=one).dequantize())
    assert torch.equal(operands.key, nvfp4.quantize(key - key.mean(-2, keepdim=True), tensor_scale=one).dequantize())
    assert torch.equal(operands.value, nvfp4.quantize(value.mT, tensor_scale=one).dequantize().mT)
    assert operands.value_mean is None


@pytest.mark.parametrize("name", ["sage2", "sage1"])
def test_int8_operands_have_a_scale_per_query_and_per_64_keys(name):
    query, key, value = draw()
    operands = reference.quantize_operands(query, key, value, RECIPES[name])
    for (codes, scale), (expected, expected_scale) in zip(
        ((operands.query, operands.query_scale), (operands.key, operands.key_scale)),
        (int8.quantize(query, 1), int8.quantize(key - key.mean(-2, keepdim=True), 64)),
        strict=True,
    ):
        assert torch.equal(codes, expected.float())
        assert torch.equal(scale, expected_scale)
    if name == "sage2":
        codes, scale = fp8.quantize(value - value.mean(-2, keepdim=True), dim=-2)
    else:
        codes, scale = fp16.quantize(value)
    assert torch.equal(operands.value, codes.float())
    assert torch.equal(operands.value_scale, scale)


@pytest.mark.parametrize("name", ["sage3", "sage3_paper", "sage2", "sage1"])
def test_p_is_quantised_at_its_scale_and_rows_are_divided_by_the_recipes_denominator(name):
    """One tile of keys, so the online softmax is the plain one and can be redone in a few lines."""
    recipe = RECIPES[name]
    query, key, value = (x[:, :, :128] for x in draw())
    operands = reference.quantize_operands(query, key, value, recipe)
    scores = operands.query @ operands.key.mT * operands.query_scale * operands.key_scale.mT
    if operands.query_mean is not None:
        scores = scores + operands.query_mean @ operands.smooth_key.mT
    p = torch.exp(0.125 * (scores - scores.amax(-1, keepdim=True)))
    if recipe.pv == "nvfp4":
        elements, scale = nvfp4.round_groups(p * 448 * 6)
        quantized = (elements * scale).flatten(-2) / (448 * 6)
    elif recipe.pv == "fp8":
        quantized = fp8.round_to_e4m3(p * 448).float() / 448
    else:
        quantized = p.half().float()
    denominator = quantized if recipe.denominator == "quantized_p" else p
    expected = quantized @ operands.value / denominator.sum(-1, keepdim=True) * operands.value_scale
    if operands.value_mean is not None:
        expected = expected + operands.value_mean
    output, _ = reference.attention(query, key, value, recipe)
    # P may round the other way where two orders of float32 arithmetic meet a tie: one step of one element in a row.
    truth, _ = exact.attention(query, key, value)
    assert (output - expected).abs().sum() <= 0.01 * (expected - truth).abs().sum()
