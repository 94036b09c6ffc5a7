"""The benchmark of training: what it measures, and what is made of its results."""

import argparse
import json
import math
from dataclasses import replace

import forward
import pages
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf.bench import command, measure_training, tables
from sage_hf.bench.measure import draw
from sage_hf.bench.measure_training import SampledGradientErrors, Step
from sage_hf.bench.peers import Prepared, Provider
from sage_hf.bench.shapes import TRAINING_SHAPES, Shape
from sage_hf.bench.training_peers import TRAINING_PROVIDERS, prepare_fa3, prepare_sdpa_backward
from sage_kernels.dispatch.registry import KernelUnavailableError
from sage_kernels.exact import sdpa
from sage_kernels.exact.gradients import Gradients, exact_gradients
from sage_kernels.reference import backward as reference_backward
from sage_kernels.spec.recipe import get_recipe
from tests.helpers.benchmark_results import CPU, SMALL, fake_training_result

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
def test_exact_gradients_are_those_of_autograd(options, monkeypatch):
    monkeypatch.setattr(sdpa, "ELEMENTS_PER_CHUNK", 2**17)
    query, key, value = draw(SMALL, "biased", CPU)
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
    shape = replace(SMALL, kv_heads=kv_heads)
    inputs, output_gradient = draw(shape, "biased", CPU), torch.randn(2, 4, 300, 64)
    errors = SampledGradientErrors(output_gradient, *inputs, shape.causal)
    truth = exact_gradients(output_gradient, *inputs, is_causal=shape.causal)
    assert max(errors.of(truth).values()) == 0
    assert all(math.isclose(error, 0.01) for error in errors.of(Gradients(*(x * 1.01 for x in truth))).values())
    truth.key[0, -1, 0, 0] = torch.nan
    assert [name for name, error in errors.of(truth).items() if math.isnan(error)] == ["dk_rel_l1"]


def test_a_step_gives_the_gradients_for_every_layout_of_the_output():
    inputs = [x.requires_grad_() for x in draw(SMALL, "normal", CPU)]
    output_gradient = torch.randn(2, 4, 300, 64)

    def attend(transposed):
        output = sdpa.attention(*inputs, is_causal=True)[0]
        return output.transpose(1, 2).contiguous().transpose(1, 2) if transposed else output

    expected = autograd(output_gradient, *inputs, is_causal=True)
    for transposed in (False, True):
        step = Step(lambda transposed=transposed: attend(transposed), inputs, output_gradient.clone())
        for _ in range(2):
            for mine, pytorchs in zip(step(), expected, strict=True):
                # Gradients are rounded to their inputs' bfloat16.
                assert (mine - pytorchs).abs().sum() <= 2**-8 * pytorchs.abs().sum()


def test_bytes_counted_for_the_backward_pass_are_those_that_are_saved():
    shape = Shape("x", 2, 4, 2, 300, 40)
    query, key, value = draw(shape, "normal", CPU)
    output, saved = reference_backward.forward(query, key, value, get_recipe("sage_bwd"), is_causal=False)
    tensors = (value, output, *saved)
    assert shape.low_bit_saved_bytes == sum(x.numel() * x.element_size() for x in tensors)
    lse = 4 * 2 * 4 * 300
    assert shape.saved_bytes == 2 * (query.numel() + key.numel() + value.numel() + output.numel()) + lse


@pytest.mark.parametrize("shape", TRAINING_SHAPES, ids=str)
def test_low_bits_keep_at_most_four_fifths_of_what_16_bits_keep(shape):
    """Q and K take 1 of 2 bytes each, of the 8 bytes that Q, K, V and O take; less where heads of Q share one of K."""
    assert shape.low_bit_saved_bytes <= 0.8 * shape.saved_bytes


def test_a_peer_whose_backward_is_another_ones_is_refused():
    inputs = [x.requires_grad_() for x in draw(replace(SMALL, kv_heads=4), "normal", CPU)]
    prepared = prepare_sdpa_backward(SDPBackend.MATH, "ScaledDotProductFlashAttentionBackward")(*inputs, True)
    with pytest.raises(RuntimeError, match="Backward0, not ScaledDotProductFlashAttentionBackward"):
        prepared.call()
    with torch.no_grad(), pytest.raises(RuntimeError, match="the backward pass is nothing, not"):
        prepared.call()
    with pytest.raises(ModuleNotFoundError, match="FlashAttention 3 with a backward pass is not installed"):
        prepare_fa3(*inputs, True)


@pytest.mark.parametrize("recipe", ["sage_bwd", "sage_bwd_int8"])
def test_our_recipes_are_measured_natively_or_not_at_all(recipe):
    (provider,) = (one for one in TRAINING_PROVIDERS if one.name == f"sage_hf:{recipe}")
    with pytest.raises(KernelUnavailableError, match=f"no native kernel for recipe '{recipe}'"):
        provider.prepare(*draw(SMALL, "normal", CPU), True)


def test_a_training_provider_that_cannot_run_has_a_row_that_says_why(monkeypatch):
    def absent(*call):
        raise ModuleNotFoundError("No module named 'absent'\nmore")

    def plain(query, key, value, is_causal):
        return Prepared(lambda: sdpa.attention(query, key, value, is_causal=is_causal)[0], "plain")

    monkeypatch.setattr(measure_training, "first_calls", lambda call: (0.0, 10**9, 5))
    monkeypatch.setattr(measure_training, "saved_bytes", lambda attend, inputs: attend(*inputs).numel())
    monkeypatch.setattr(measure_training, "median_steps_ms", lambda calls: {name: [3e-3, 1e-3, 2e-3] for name in calls})
    providers = [Provider("absent", "Absent", "end_to_end", absent), Provider("plain", "Plain", "end_to_end", plain)]
    missing, row = measure_training.measure_shape(SMALL, providers, CPU)
    assert missing["unavailable"] == "ModuleNotFoundError: No module named 'absent'" and "ms" not in missing
    assert row["direction"] == "forward_backward" and row["kernel"] == "plain"
    assert (row["ms"], row["forward_ms"], row["backward_ms"]) == (3e-3, 1e-3, 2e-3)
    assert math.isclose(row["tflops"], 3.5 * SMALL.operations / 3e-6 * 1e-12)
    assert row["peak_extra_bytes"] == 10**9 - SMALL.input_bytes - SMALL.output_bytes
    assert row["saved_bytes"] == SMALL.output_bytes / 2
    # The output is float64 here; gradients are rounded to bfloat16.
    assert max(row["output_rel_l1"], row["output_rel_l1_biased"]) < 1e-12
    assert max(row[f"{name}_rel_l1{kind}"] for name in ("dq", "dk", "dv") for kind in ("", "_biased")) < 2**-8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_measures_every_number_of_training():
    shape = Shape("small", 2, 4, 4, 512, 64, causal=True)
    result = measure_training.run(torch.device("cuda"), [shape], commit="0" * 40, progress=lambda line: None)
    rows = {row["provider"]: row for row in result["rows"]}
    assert set(rows) == {one.name for one in TRAINING_PROVIDERS}
    flash = rows["sdpa_fa2"]
    assert min(flash["forward_ms"], flash["backward_ms"], flash["tflops"]) > 0
    # It rounds P and dS to bfloat16; where K has a mean, that shows in dQ.
    errors = {f"{name}_rel_l1{kind}" for name in measure_training.ERRORS for kind in ("", "_biased")}
    assert max(flash[name] for name in errors - {"dq_rel_l1_biased"}) < 2**-6
    # Allocations are rounded up to 512 bytes; FA2 keeps its random state too.
    assert shape.saved_bytes <= flash["saved_bytes"] <= shape.saved_bytes + 16 * 512
    assert json.loads(tables.to_json(result)) == result and tables.text(result)


def test_training_json_holds_a_row_a_line():
    result = fake_training_result()
    assert json.loads(tables.to_json(result)) == result
    assert len(tables.to_json(result).splitlines()) == len(result["rows"]) + len(result) + 3


def test_the_training_tables_show_speeds_then_errors_and_memory_at_one_shape():
    speeds, caption, errors, explanation = tables.markdown(fake_training_result()).split("\n\n")
    assert [len(table.splitlines()) for table in (speeds, errors)] == [2 + len(TRAINING_SHAPES), 2 + 4]
    assert "FA3" not in speeds and "| **104** |" in speeds and "forward and backward, 3.5 ×" in caption
    assert explanation.startswith("At 1×30×17776×64.")
    ours = [cell.strip() for cell in errors.splitlines()[-2].strip("|").split("|")]
    kept = TRAINING_SHAPES[-1].low_bit_saved_bytes / 1e6
    assert ours == ["sage_bwd", "1.25", "1.75", *["0.0400 (0.0400)"] * 4, "42", f"{kept:.0f}", "3.00", "0.5"]


def test_the_text_of_training_names_reasons():
    text = tables.text(fake_training_result())
    assert "At 1×30×17776×64:" in text and "fa3, end_to_end: ModuleNotFoundError: no backward pass (all shapes)" in text


def test_rendering_training_draws_the_plot_and_prints_the_tables(monkeypatch, tmp_path, capsys):
    path = tmp_path / "nvidia-h200-forward_backward.json"
    path.write_text(tables.to_json(fake_training_result()))
    monkeypatch.setattr("sys.argv", ["forward_backward.py", "--render", str(path)])
    forward.main(training=True)
    assert capsys.readouterr().out.strip() == tables.markdown(fake_training_result())
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


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
    assert found == {(shape.name, one.name) for shape in TRAINING_SHAPES for one in TRAINING_PROVIDERS}
    assert all(("tflops" in row) != ("unavailable" in row) for row in result["rows"])
    assert len(result["commit"]) == 40


@pytest.mark.parametrize("path", TRAINING_RESULTS, ids=lambda path: path.stem)
def test_training_in_low_bits_keeps_less_for_the_backward_pass_than_16_bits_do(path):
    for row in json.loads(path.read_text())["rows"]:
        if row["provider"].startswith("sage_hf") and "saved_bytes" in row:
            assert row["saved_bytes"] < tables.shape_of(row).saved_bytes, row
