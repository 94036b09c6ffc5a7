"""The gradient table: it measures the recipes as they are shipped, against the truth."""

import json
from pathlib import Path

import gradient_table
import pytest
import torch
from tensors import Sample

from sage_kernels.exact import sdpa
from sage_kernels.reference import backward as reference_backward
from sage_kernels.spec.recipe import RECIPES

RESULT = Path(__file__).parents[1] / "benchmarks/results/cpu-gradient_table.json"


def sample(kv_heads=2, is_causal=False):
    generator = torch.Generator().manual_seed(0)
    heads = (2, kv_heads, kv_heads, 2)
    tensors = (torch.randn(1, count, 140, 64, generator=generator).bfloat16() for count in heads)
    return Sample(*tensors, is_causal=is_causal, scale=0.2)


@pytest.mark.parametrize("name", ["sage_bwd", "sage_bwd_int8"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_recipes_row_is_the_recipe(name, is_causal):
    query, key, value, gradient, *_ = given = sample(is_causal=is_causal)
    variant = gradient_table.VARIANTS[f"`{name}`"]
    assert variant.recipe == RECIPES[name]
    options = {"is_causal": is_causal, "scale": 0.2}
    output, saved = reference_backward.forward(query, key, value, RECIPES[name], **options)
    parts = reference_backward.backward(gradient, value, output, saved, RECIPES[name], head_dim=64, **options)
    for measured, expected in zip(gradient_table.quantized(given, variant), (output, *parts), strict=True):
        assert torch.equal(measured, expected)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_the_truth_is_exact_attention_and_its_gradient(kv_heads):
    given = sample(kv_heads, is_causal=True)
    leaves = [x.double().requires_grad_() for x in given[:3]]
    output, _ = sdpa.attention(*leaves, is_causal=True, scale=0.2)
    parts = torch.autograd.grad(output, leaves, given.output_gradient.double())
    for truth, expected in zip(gradient_table.exact(given), (output, *parts), strict=True):
        assert torch.allclose(truth, expected, atol=1e-12)


@pytest.mark.parametrize("coarse", [{"query_tokens": 64}, {"key_tokens": 64}, {"query_tokens": 128}])
def test_coarser_scales_of_q_and_k_cost_accuracy(coarse):
    given = sample()
    truth = gradient_table.exact(given)
    fine = gradient_table.errors([given], [truth], gradient_table.Variant(gradient_table.BWD))
    coarser = gradient_table.errors([given], [truth], gradient_table.Variant(gradient_table.BWD, **coarse))
    for name in ("dQ", "dK"):
        assert 1.02 * fine[name]["rel_l1"] < coarser[name]["rel_l1"] < 2 * fine[name]["rel_l1"]


def test_errors_are_those_of_the_definition_whatever_a_samples_magnitude():
    given = sample()
    variant = gradient_table.VARIANTS["`sage_bwd`"]
    truth = gradient_table.exact(given)
    alone = gradient_table.errors([given], [truth], variant)
    got, wanted = gradient_table.quantized(given, variant)[1].double(), truth[1]
    assert alone["dQ"]["rel_l1"] == pytest.approx(((got - wanted).abs().sum() / wanted.abs().sum()).item())
    size = wanted.square().mean().sqrt()
    assert alone["dQ"]["rmse"] == pytest.approx(((got - wanted).square().mean().sqrt() / size).item())
    quiet = given._replace(output_gradient=given.output_gradient * 2.0**-20)
    both = gradient_table.errors([given, quiet], [truth, gradient_table.exact(quiet)], variant)
    for name in gradient_table.RESULTS:
        assert both[name] == pytest.approx(alone[name])


def test_the_stored_table_has_every_variant_and_result():
    rows = json.loads(RESULT.read_text())["rows"]
    assert [row["variant"] for row in rows] == list(gradient_table.VARIANTS)
    names = [name for name in rows[0] if name != "variant"]
    assert {"Gaussian σ=1", "Gaussian σ=3", "Gaussian σ=10", "tiny video"} <= set(names)
    for name in names:
        assert len(gradient_table.markdown(rows, name).splitlines()) == len(rows) + 2
        for row in rows:
            assert set(row[name]) == set(gradient_table.RESULTS)
