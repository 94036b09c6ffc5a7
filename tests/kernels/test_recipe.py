"""Each recipe is what it says: its fields, and its operands rebuilt by hand from formats and transforms."""

from dataclasses import replace

import pytest
import torch

from sage_kernels.exact import sdpa
from sage_kernels.formats import fp8, fp16, int8, nvfp4
from sage_kernels.reference import forward as reference
from sage_kernels.spec import transforms
from sage_kernels.spec.recipe import RECIPES, get_recipe


def draw(tokens=256, head_dim=64):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, tokens, head_dim, generator=generator) + 1.0 for _ in range(3))
    return query, key, value


@pytest.mark.parametrize("name", ["sage4", ["sage3"], None])
def test_what_is_no_recipe_is_refused_with_the_list(name):
    with pytest.raises(ValueError, match="recipes are: " + ", ".join(sorted(RECIPES))):
        get_recipe(name)


def in_blocks(x, *options):
    """NVFP4 with a tensor scale for every 128 tokens."""
    return nvfp4.quantize(x.unflatten(-2, (-1, 128)), *options).dequantize().flatten(-3, -2)


def without_heavy(operands, recipe, key, value):
    """Check the operands' heavy keys, which are the first ones; return K and V of the others, without K's mean.

    Means and scales are those of all keys: heavy values lie behind the others, in blocks of their own.
    """
    heavy = recipe.heavy_keys
    smooth_key, key_mean = transforms.smooth(key)
    if recipe.smooth_v:
        value = transforms.smooth_value(value)[0]
    if heavy == 0:
        assert operands.heavy is None
        return smooth_key, value
    assert torch.equal(operands.heavy.key, key[:, :, :heavy] - key_mean)
    return smooth_key[:, :, heavy:], torch.cat((value[:, :, heavy:], value[:, :, :heavy], value[:, :, :heavy]), -2)


@pytest.mark.parametrize("name", ["sage1", "sage2", "sage3"])
def test_with_int8_heavy_keys_without_their_mean_are_not_rounded(name):
    query, key, value = torch.randn(3, 1, 2, 200, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    recipe = replace(RECIPES[name], heavy_choice="first")
    smooth = transforms.smooth(key.float())[0][:, :, :64]
    expected = smooth if recipe.qk == "int8" else smooth.bfloat16().float()
    assert torch.equal(reference.quantize_operands(query, key, value, recipe).heavy.key, expected)


def test_sage3_operands_get_every_transform_without_heavy_keys():
    query, key, value = draw(320)
    recipe = replace(RECIPES["sage3"], heavy_choice="first")
    operands = reference.quantize_operands(query, key, value, recipe)
    assert torch.equal(operands.heavy.query, query)
    assert torch.equal(operands.heavy.value, value[:, :, :64])
    factor = transforms.equalize(query, key, smooth_q=True)
    key, value = without_heavy(operands, recipe, key, value)
    query = query[:, :, :256]  # whole blocks
    operands = replace(operands, query=operands.query[:, :, :256], query_mean=operands.query_mean[:, :, :2])
    query, query_mean = transforms.smooth_blocks(query, 128)
    assert torch.equal(operands.smooth_key, key)
    assert torch.equal(operands.query_mean, query_mean)
    steps, key_steps = recipe.scale_steps, recipe.key_scale_steps
    assert torch.equal(operands.query, in_blocks(transforms.rotate(query * factor), steps))
    assert torch.equal(operands.key, in_blocks(transforms.rotate(key / factor), key_steps))
    quantized = nvfp4.quantize(value.mT, steps).dequantize().mT
    assert torch.equal(operands.value * operands.value_scale, quantized[:, :, :256])


def test_sage3_paper_operands_are_smoothed_in_the_published_format():
    query, key, value = draw()
    operands = reference.quantize_operands(query, key, value, RECIPES["sage3_paper"])
    query, key = transforms.smooth_blocks(query, 128)[0], transforms.smooth(key)[0]
    one = torch.ones(1, 1)
    assert torch.equal(operands.query, nvfp4.quantize(query, tensor_scale=one).dequantize())
    assert torch.equal(operands.key, nvfp4.quantize(key, tensor_scale=one).dequantize())
    assert torch.equal(operands.value, nvfp4.quantize(value.mT, tensor_scale=one).dequantize().mT)
    assert operands.value_mean is None


@pytest.mark.parametrize("name", ["sage2", "sage1", "sage_bwd", "sage_bwd_int8"])
def test_int8_operands_have_a_scale_per_query_and_per_16_keys_of_a_thread(name):
    recipe = replace(RECIPES[name], heavy_choice="first")
    query, key, value = draw(256 + recipe.heavy_keys)
    operands = reference.quantize_operands(query, key, value, recipe)
    factor = transforms.equalize(query, key)
    key, value = without_heavy(operands, recipe, key, value)
    query, key = transforms.rotate(query * factor), transforms.rotate(key / factor)
    codes, scale = int8.quantize(query, 1)
    assert torch.equal(operands.query, codes.float())
    assert torch.equal(operands.query_scale, scale)
    for first in range(0, key.shape[-2], 64):
        for thread in range(4):
            tokens = [first + 8 * j + 2 * thread + e for j in range(8) for e in (0, 1)]
            codes, scale = int8.quantize(key[..., tokens, :], 16, torch.bfloat16)
            assert torch.equal(operands.key[..., tokens, :], codes.float())
            assert torch.equal(operands.key_scale[..., tokens, :], scale.float())
    if name == "sage2":
        codes, scale = fp8.quantize_value(value)
    elif name == "sage_bwd_int8":
        codes, scale = (part.mT for part in int8.quantize(value.mT, 1))
    else:
        codes, scale = fp16.quantize(value)
    assert torch.equal(operands.value, codes.float()[:, :, :256])
    assert torch.equal(operands.value_scale, scale)


@pytest.mark.parametrize("name", ["sage3", "sage3_paper", "sage2", "sage1", "sage_bwd_int8"])
def test_p_has_its_scale_and_rows_have_the_recipes_denominator(name):
    """One tile of keys and the heavy ones, so the online softmax is the plain one and redone in a few lines."""
    recipe = RECIPES[name]
    query, key, value = draw(128 + recipe.heavy_keys)
    query = query[:, :, :128]
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
    elif recipe.pv == "int8":
        largest = p.amax(-1, keepdim=True)
        quantized = (p / largest * 127).round() * largest / 127
    else:
        quantized = p.half().float()
    denominator = quantized if recipe.denominator == "quantized_p" else p
    expected, total = quantized @ operands.value * operands.value_scale, denominator.sum(-1, keepdim=True)
    if operands.value_mean is not None:
        expected = expected + total * operands.value_mean
    if recipe.heavy_keys:
        heavy = operands.heavy
        heavy_p = torch.exp(0.125 * (heavy.query @ heavy.key.mT - scores.amax(-1, keepdim=True)))
        expected, total = expected + heavy_p @ heavy.value, total + heavy_p.sum(-1, keepdim=True)
    expected = expected / total
    output, _ = reference.attention(query, key, value, recipe)
    # P may round the other way where two orders of float32 arithmetic meet a tie: one step of one element in a row.
    truth, _ = sdpa.attention(query, key, value)
    assert (output - expected).abs().sum() <= 0.01 * (expected - truth).abs().sum()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keeping_the_sums_of_v_makes_sage2_more_accurate(seed, head_dim, monkeypatch):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 1, length, head_dim, generator=generator) for length in (128, 1024, 1024))
    truth, _ = sdpa.attention(query, key, value)

    def error():
        output, _ = reference.attention(query, key, value, RECIPES["sage2"])
        return (output - truth).abs().sum()

    kept = error()
    monkeypatch.setattr(fp8, "round_keeping_sums", fp8.round_to_e4m3)
    assert kept < 0.97 * error()
