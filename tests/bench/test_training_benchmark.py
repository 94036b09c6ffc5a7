"""The benchmark of training: what it measures, and what is made of its results."""

import argparse
import json
import math
from dataclasses import replace

import pages
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf.bench import command, measure, results, tables
from sage_hf.bench.cases import TRAINING_SHAPES, BenchCase, draw
from sage_hf.bench.measure import SampledGradientErrors, TrainingStep
from sage_hf.bench.providers import TRAINING_PROVIDERS, PreparedCall, Provider
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.exact import sdpa
from sage_kernels.exact.gradients import Gradients, exact_gradients
from tests.helpers.benchmark_results import CPU, SMALL, fake_training_result

TRAINED = replace(SMALL, training=True)
TRAINING_RESULTS = sorted(pages.RESULTS.glob("*-forward_backward.json"))


def autograd(output_gradient, query, key, value, mask=None, is_causal=False, causal_offset=0, scale=None) -> Gradients:
    """Compute `exact_gradients` by PyTorch."""
    inputs = [x.detach().double().requires_grad_() for x in (query, key, value)]
    allowed = torch.ones(2, 1, query.shape[2], key.shape[2], dtype=torch.bool) if mask is None else mask
    if is_causal:
        allowed = allowed.tril(causal_offset)
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(*inputs, attn_mask=allowed, scale=scale, enable_gqa=True)
    return Gradients(output.detach(), *torch.autograd.grad(output, inputs, output_gradient.double()))


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "causal_offset": -40, "scale": -0.3}, {"mask": "padding"}])
def test_exact_gradients_match_autograd(options, monkeypatch):
    monkeypatch.setattr(sdpa, "ELEMENTS_PER_CHUNK", 2**17)
    query, key, value = draw(SMALL, CPU, biased=True).tensors
    output_gradient, value = torch.randn(2, 4, 300, 40), value[..., :40]
    if "mask" in options:
        mask = torch.rand(2, 1, 300, 300) < 0.5
        mask[:, :, 17] = False
        options = {"mask": mask}
    found = exact_gradients(output_gradient, query, key, value, **options)
    for mine, pytorchs in zip(found, autograd(output_gradient, query, key, value, **options), strict=True):
        assert mine.shape == pytorchs.shape
        assert torch.allclose(mine, pytorchs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sampled_gradient_errors_are_those_of_the_first_and_the_last_key_head(kv_heads):
    inputs = draw(replace(TRAINED, kv_heads=kv_heads), CPU, biased=True)
    errors = SampledGradientErrors(inputs)
    truth = exact_gradients(inputs.gradient, *(x.detach() for x in inputs.tensors), is_causal=True)
    assert max(errors.of(truth).values()) == 0
    assert all(math.isclose(error, 0.01) for error in errors.of(Gradients(*(x * 1.01 for x in truth))).values())
    truth.key[0, -1, 0, 0] = torch.nan
    assert [name for name, error in errors.of(truth).items() if math.isnan(error)] == ["dk_rel_l1"]


def test_a_step_gives_the_gradients_for_every_layout_of_the_output():
    inputs = draw(TRAINED, CPU)

    def attend(transposed):
        output = sdpa.attention(*inputs.tensors, is_causal=True)[0]
        return output.transpose(1, 2).contiguous().transpose(1, 2) if transposed else output

    expected = autograd(inputs.gradient, *inputs.tensors, is_causal=True)
    for transposed in (False, True):
        step = TrainingStep(lambda transposed=transposed: attend(transposed), inputs)
        for _ in range(2):
            for mine, pytorchs in zip(step(), expected, strict=True):
                # Gradients are rounded to their inputs' bfloat16.
                assert (mine - pytorchs).abs().sum() <= 2**-8 * pytorchs.abs().sum()


@pytest.mark.parametrize("recipe", ["sage_bwd", "sage_bwd_int8"])
def test_our_recipes_are_measured_natively_or_not_at_all(recipe):
    (provider,) = (one for one in TRAINING_PROVIDERS if one.name == f"sage_hf:{recipe}")
    with pytest.raises(KernelUnavailableError, match=f"no native kernel for recipe '{recipe}'"):
        provider.prepare(draw(TRAINED, CPU)).call()


def test_a_training_provider_that_cannot_run_has_a_row_that_says_why(monkeypatch):
    def absent(inputs):
        raise ModuleNotFoundError("No module named 'absent'\nmore")

    def plain(inputs):
        return PreparedCall(lambda: sdpa.attention(*inputs.tensors, is_causal=inputs.case.upper_left)[0], "plain")

    monkeypatch.setattr(measure, "first_calls", lambda call: (0.0, 10**9, 5))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7)
    monkeypatch.setattr(measure, "median_steps_ms", lambda calls: {name: [3e-3, 1e-3, 2e-3] for name in calls})
    missing, row = measure.measure_case(
        TRAINED, [Provider("absent", "Absent", absent), Provider("plain", "Plain", plain)], CPU
    )
    assert missing["unavailable"] == "ModuleNotFoundError: No module named 'absent'" and "ms" not in missing
    assert row["direction"] == "forward_backward" and row["kernel"] == "plain"
    assert (row["ms"], row["forward_ms"], row["backward_ms"]) == (3e-3, 1e-3, 2e-3)
    assert math.isclose(row["tflops"], TRAINED.operations / 3e-6 * 1e-12)
    assert row["peak_extra_bytes"] == 10**9 - SMALL.input_bytes - SMALL.output_bytes
    assert row["saved_bytes"] == 0
    # The output is float64 here; gradients are rounded to bfloat16.
    assert max(row["output_rel_l1"], row["output_rel_l1_biased"]) < 1e-12
    assert max(row[f"{name}_rel_l1{kind}"] for name in ("dq", "dk", "dv") for kind in ("", "_biased")) < 2**-8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_measures_every_number_of_training():
    case = BenchCase.square("small", (2, 4, 4, 512, 64), causal=True, training=True)
    result = measure.run(torch.device("cuda"), [case], TRAINING_PROVIDERS, lambda line: None)
    rows = {row["provider"]: row for row in result["rows"]}
    assert set(rows) == {one.name for one in TRAINING_PROVIDERS}
    flash = rows["sdpa_fa2"]
    assert min(flash["forward_ms"], flash["backward_ms"], flash["tflops"]) > 0
    # It rounds P and dS to bfloat16; where K has a mean, that shows in dQ.
    errors = {f"{name}_rel_l1{kind}" for name in measure.ERRORS for kind in ("", "_biased")}
    assert max(flash[name] for name in errors - {"dq_rel_l1_biased"}) < 2**-6
    kept = case.input_bytes + case.output_bytes + 4 * 2 * 4 * 512  # with the LSE
    # Allocations are rounded up to 512 bytes; FA2 keeps its random state too.
    assert kept <= flash["saved_bytes"] <= kept + 16 * 512
    assert json.loads(results.to_json(result)) == result and tables.text(result)


def test_the_training_tables_show_speeds_then_errors_and_memory_at_one_shape():
    speeds, caption, errors, explanation = tables.markdown(fake_training_result()).split("\n\n")
    assert [len(table.splitlines()) for table in (speeds, errors)] == [2 + len(TRAINING_SHAPES), 2 + 4]
    assert "FA3" not in speeds and "| **104** |" in speeds and "forward and backward, 3.5 ×" in caption
    assert explanation.startswith("At 1×30×17776×64.")
    ours = [cell.strip() for cell in errors.splitlines()[-2].strip("|").split("|")]
    assert ours == ["sage_bwd", "1.25", "1.75", *["0.0400 (0.0400)"] * 4, "42", "3.00", "0.5"]


def test_the_text_of_training_names_reasons():
    text = tables.text(fake_training_result())
    assert "At 1×30×17776×64:" in text and "fa3, end_to_end: ModuleNotFoundError: no backward pass (all shapes)" in text


@pytest.mark.parametrize(
    ("training", "shapes", "unknown"), [(False, ["8k-128", "llama-3-training"], "llama-3"), (True, ["mochi"], "mochi")]
)
def test_shapes_of_the_other_direction_are_refused(training, shapes, unknown):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--training"] * training + ["--shapes", *shapes])
    with pytest.raises(ValueError, match=f"--shapes: unknown {unknown}.*; choose from: .*8k-128"):
        command.execute(args)


@pytest.mark.parametrize("path", TRAINING_RESULTS, ids=lambda path: path.stem)
def test_training_results_are_complete_and_name_their_commit(path):
    result = json.loads(path.read_text())
    found = {(row["shape"], row["provider"]) for row in result["rows"]}
    expected = {(shape.name, one.name) for shape in TRAINING_SHAPES for one in TRAINING_PROVIDERS}
    assert found >= expected
    assert all(("tflops" in row) != ("unavailable" in row) for row in result["rows"])
    assert len(result["commit"]) == 40


@pytest.mark.parametrize("path", TRAINING_RESULTS, ids=lambda path: path.stem)
def test_training_in_low_bits_keeps_less_for_the_backward_pass_than_16_bits_do(path):
    rows = json.loads(path.read_text())["rows"]
    exact = {row["shape"]: row["saved_bytes"] for row in rows if row["provider"] == "sdpa_fa2"}
    for row in rows:
        if row["provider"].startswith("sage_hf") and "saved_bytes" in row:
            assert row["saved_bytes"] <= 0.8 * exact[row["shape"]], row
