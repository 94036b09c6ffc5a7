"""The benchmarks of forward and of training: what they measure, and what is made of their results."""

import argparse
import itertools
import json
import math
from dataclasses import replace

import forward
import pages
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf.bench import command, measure, measure_training, peers, plots, tables
from sage_hf.bench.exact_gradients import Gradients, exact_gradients
from sage_hf.bench.measure import SampledErrors, draw
from sage_hf.bench.measure_training import SampledGradientErrors, Step
from sage_hf.bench.peers import PROVIDERS, Prepared, Provider, sageattention, to_e4m3
from sage_hf.bench.shapes import SHAPES, TRAINING_SHAPES, Shape
from sage_hf.bench.training_peers import TRAINING_PROVIDERS, prepare_fa3, prepare_sdpa_backward
from sage_kernels import exact, ops, registry
from sage_kernels.recipe import get_recipe
from sage_kernels.reference import backward as reference_backward
from sage_kernels.registry import KernelUnavailableError
from tests.helpers.kernels import StandInForward, StandInQuantizer, only_the_reference

RESULTS = sorted(pages.RESULTS.glob("*-forward.json"))
TRAINING_RESULTS = sorted(pages.RESULTS.glob("*-forward_backward.json"))
CPU = torch.device("cpu")
SMALL = Shape("small", 2, 4, 2, 300, 64, causal=True)
FACTS = {"gpu": "NVIDIA H200", "capability": "9.0", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
FACTS |= {"cudnn": 91900, "packages": {"fa3-fwd": "0.0.3"}, "commit": "0" * 40, "date": "2026-01-01"}


def fake_result() -> dict:
    """As `measure.run` returns: every provider at every shape but fa3, which is missing, and sage1 without causal."""
    rows = []
    for shape in SHAPES:
        for index, one in enumerate(PROVIDERS):
            row = measure.new_row(shape, one)
            if one.name == "fa3":
                row["unavailable"] = "ModuleNotFoundError: No module named 'fa3_fwd'"
            elif one.name == "sage_hf:sage1" and shape.causal:
                row["unavailable"] = "RuntimeError: no causal"
            else:
                row |= {"kernel": "k", "compile_s": 0.5, "rel_l1": 0.01, "cosine": 0.999}
                row |= {"rel_l1_biased": 1e-3 * (index + 1), "cosine_biased": 0.9, "ms": 2.0, "tflops": 100.0 + index}
                row |= {"peak_extra_bytes": shape.input_bytes // 2} if one.scope == "end_to_end" else {}
            rows.append(row)
    quantizer = {"name": "operands of sage2", "batch": 2, "heads": 32, "tokens": 16384, "head_dim": 128, "bytes": 10}
    quantizers = [quantizer | {"ms": 0.4, "share_of_copy_bandwidth": 0.84}, {"head_dim": 64, "unavailable": "no"}]
    return {**FACTS, "copy_bandwidth": 4.3e12, "quantizers": quantizers, "rows": rows}


def fake_training_result() -> dict:
    """As `measure_training.run` returns: every provider at every shape but fa3, which is missing."""
    rows = []
    for shape in TRAINING_SHAPES:
        for index, one in enumerate(TRAINING_PROVIDERS):
            row = measure.new_row(shape, one, "forward_backward")
            if one.name == "fa3":
                row["unavailable"] = "ModuleNotFoundError: no backward pass"
            else:
                row |= {"kernel": "k", "compile_s": 0.5, "ms": 3.0, "forward_ms": 1.25, "backward_ms": 1.75}
                errors = [f"{name}_rel_l1" for name in ("output", "dq", "dk", "dv")]
                row |= {name + suffix: 0.01 * (index + 1) for name in errors for suffix in ("", "_biased")}
                row |= {"tflops": 100.0 + index, "peak_extra_bytes": 3 * shape.input_bytes, "saved_bytes": 42_000_000}
            rows.append(row)
    return {**FACTS, "rows": rows}


def test_operations_are_those_of_both_products_and_half_when_causal():
    shape = Shape("x", 2, 4, 1, 100, 64)
    assert shape.operations == 4 * 2 * 4 * 100 * 100 * 64
    assert replace(shape, causal=True).operations == shape.operations / 2
    assert shape.training_operations == 3.5 * shape.operations
    assert shape.input_bytes == 2 * 2 * (4 + 1 + 1) * 100 * 64


def test_shape_and_provider_names_are_unique():
    for shapes, providers in ((SHAPES, PROVIDERS), (TRAINING_SHAPES, TRAINING_PROVIDERS)):
        assert len({shape.name for shape in shapes}) == len(shapes)
        assert len({(one.name, one.scope) for one in providers}) == len(providers)
    common = {shape.name for shape in SHAPES} & {shape.name for shape in TRAINING_SHAPES}
    assert common == {shape.name for shape in set(SHAPES) & set(TRAINING_SHAPES)}


@pytest.mark.parametrize("kind", ["normal", "biased"])
def test_tensors_are_the_same_every_time_and_biased_ones_have_means(kind):
    first, second = draw(SMALL, kind, CPU), draw(SMALL, kind, CPU)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [x.shape[1] for x in first] == [4, 2, 2]
    assert (first[1].float().mean(2).abs().mean() > 1) == (kind == "biased")


@pytest.mark.parametrize("causal", [False, True])
def test_sampled_errors_are_those_of_the_whole_output(causal):
    query, key, value = (x.double() for x in draw(SMALL, "biased", CPU))
    errors = SampledErrors(query, key, value, causal)
    output, _ = exact.attention(query, key, value, is_causal=causal)
    assert errors.of(output)["rel_l1"] < 1e-12
    assert errors.of(output / 4, 4.0)["rel_l1"] < 1e-12
    assert math.isclose(errors.of(output * 1.01)["rel_l1"], 0.01, rel_tol=1e-6)
    output[0, -1, -1] = torch.nan
    assert math.isnan(errors.of(output)["rel_l1"])


def test_a_provider_that_cannot_run_has_a_row_that_says_why(monkeypatch):
    def absent(*call):
        raise ModuleNotFoundError("No module named 'absent'\nmore")

    def half(query, key, value, is_causal):
        return Prepared(lambda: exact.attention(query, key, value, is_causal=is_causal)[0] / 2, "half", 2.0)

    def first_calls(call, row, shape):
        call()
        row["compile_s"] = 0.0
        return 5

    monkeypatch.setattr(measure, "_first_calls", first_calls)
    monkeypatch.setattr(measure, "median_ms", lambda calls: dict.fromkeys(calls, 1e-3))
    providers = [Provider("absent", "Absent", "kernel", absent), Provider("half", "Half", "kernel", half)]
    missing, row = measure.measure_shape(SMALL, providers, CPU)
    assert missing["unavailable"] == "ModuleNotFoundError: No module named 'absent'" and "ms" not in missing
    assert row["provider"] == "half" and row["kernel"] == "half"
    assert math.isclose(row["tflops"], SMALL.operations / 1e-6 * 1e-12)
    assert max(row["rel_l1"], row["rel_l1_biased"]) < 1e-12 and min(row["cosine"], row["cosine_biased"]) > 0.999


def test_a_provider_whose_result_is_not_finite_has_no_speed(monkeypatch):
    def broken(query, key, value, is_causal):
        output = torch.zeros_like(query)
        output[-1, -1, 7, 3] = torch.nan  # where no error is sampled
        return Prepared(lambda: output, "broken")

    monkeypatch.setattr(measure, "_first_calls", lambda *call: 5)
    monkeypatch.setattr(measure, "median_ms", lambda calls: dict.fromkeys(calls, 1e-3))
    (row,) = measure.measure_shape(SMALL, [Provider("broken", "Broken", "kernel", broken)], CPU)
    assert row["unavailable"] == "ArithmeticError: the result holds NaN or infinity" and "ms" not in row
    gradients = [torch.ones(1, 2, 3, 4) for _ in range(4)]
    gradients[2][0, 0, 0, 0] = torch.inf
    with pytest.raises(ArithmeticError):
        measure.require_finite(*gradients)


def test_providers_take_turns_of_several_calls(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = len(made)

        def elapsed_time(self, later):
            return later.at - self.at

    made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    steps = {"one": ((lambda: made.append("a"),), 8), "two": ((lambda: made.append("b"), lambda: made.append("c")), 5)}
    assert measure.median_steps_ms(steps) == {"one": [1, 1], "two": [2, 1, 1]}
    assert "".join(made) == "aabc" * 3 + "aabcbc"
    assert measure.median_ms({"one": (lambda: made.append("a"), 1)}) == {"one": 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_measures_every_number():
    lines = []
    result = measure.run(torch.device("cuda"), [SMALL], commit="0" * 40, progress=lines.append)
    assert lines == ["small: 2×4/2×300×64, causal", "quantizers"] and result["copy_bandwidth"] > 0
    rows = {(row["provider"], row["scope"]): row for row in result["rows"]}
    assert set(rows) == {(one.name, one.scope) for one in PROVIDERS}
    exact_row = rows["sdpa_fa2", "end_to_end"]
    assert exact_row["tflops"] > 0 and max(exact_row["rel_l1"], exact_row["rel_l1_biased"]) < 0.01
    ours = rows["sage_hf:sage2", "end_to_end"]
    assert 0 < ours["peak_extra_bytes"] < SMALL.input_bytes and ours["compile_s"] >= 0
    assert json.loads(tables.to_json(result)) == result and tables.text(result)


def test_the_portable_kernel_is_measured_where_another_is_preferred():
    inputs, ran = draw(SMALL, "normal", CPU), []
    portable = StandInForward("int8_forward", "sage1", ran=ran.append)
    with only_the_reference():
        registry.register_quantizer(StandInQuantizer("int8_quantize", "sage1"))
        registry.register_forward(StandInForward("preferred", "sage1", ran=ran.append))
        registry.register_forward(portable)
        prepared = peers.ours_in_triton("sage1")(*inputs, False)
        output, expected = prepared.call(), ops.attention(*inputs, recipe="sage1")[0]
        assert prepared.kernel == "int8_forward"
        assert ran == ["int8_forward", "preferred"]
        assert torch.equal(output, expected)
    with only_the_reference():
        registry.register_quantizer(StandInQuantizer("int8_quantize", "sage1"))
        registry.register_forward(portable)
        with pytest.raises(RuntimeError, match="runs in Triton here as it is"):
            peers.ours_in_triton("sage1")(*inputs, False)


def test_e4m3_scales_are_those_of_each_slice():
    x = torch.randn(2, 3, 5, 7) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    codes, descale = to_e4m3(x, (2, 3))
    assert descale.shape == (2, 3) and codes.float().abs().amax((2, 3)).eq(448).all()
    assert ((codes.float() * descale[..., None, None] - x).abs() <= x.abs() / 16 + descale[..., None, None] / 512).all()
    assert to_e4m3(x, (0, 1, 2, 3))[1].shape == (1,)


def test_generations_of_sageattention_are_told_apart(monkeypatch, tmp_path):
    for name, text in {"sageattention": "", "sageattention2": "raise ImportError('build failed: error: x')"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sageattention(1).__name__ == "sageattention"
    with pytest.raises(ImportError, match="build failed"):
        sageattention(2)
    (tmp_path / "sageattention2.py").unlink()
    with pytest.raises(ModuleNotFoundError, match="SageAttention 2 is not installed"):
        sageattention(2)


def test_json_holds_a_row_a_line():
    result = fake_result()
    text = tables.to_json(result)
    assert json.loads(text) == result
    assert len(text.splitlines()) == len(result["rows"]) + len(result["quantizers"]) + len(result) + 4


def test_the_table_shows_every_shape_and_who_measured_there():
    lines = tables.markdown(fake_result()).splitlines()
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert "FA3" not in header and "FA3 FP8 (kernel)" in header and header[1] == "FA2"
    assert len(lines) == 2 + len(SHAPES) + 2
    causal = [cell.strip() for cell in lines[2 + 3].strip("|").split("|")]
    assert causal[0] == "16k-128-causal: 2×32×16384×128, causal"
    assert causal[header.index("sage1")] == "–" and causal[header.index("sage2, Triton")] == "**109**"
    assert "NVIDIA H200" in lines[-1] and "commit 0000000000, 2026-01-01" in lines[-1]


def test_the_text_names_errors_memory_quantizers_and_reasons():
    text = tables.text(fake_result())
    assert "At 1×24×119056×128:" in text and "  0.50  " in text
    assert "operands of sage2  2×32×16384×128  0.400  84%" in text
    assert "fa3, end_to_end: ModuleNotFoundError: No module named 'fa3_fwd' (all shapes)" in text
    assert "sage_hf:sage1, kernel: RuntimeError: no causal (16k-128-causal, 16k-64-causal, llama-3-prefill)" in text
    assert "quantizers: no (head_dim 64)" in text


def test_a_result_without_any_measurement_still_says_why():
    result = fake_result()
    result["rows"] = [row for row in result["rows"] if row["provider"] == "fa3"]
    assert "No module named 'fa3_fwd'" in tables.text(result)


def test_rendering_draws_the_plot_and_prints_the_table(monkeypatch, tmp_path, capsys):
    path = tmp_path / "nvidia-h200-forward.json"
    path.write_text(tables.to_json(fake_result()))
    monkeypatch.setattr("sys.argv", ["forward.py", "--render", str(path)])
    forward.main()
    assert capsys.readouterr().out.strip() == tables.markdown(fake_result())
    for picture in ("nvidia-h200-forward.png", "nvidia-h200-forward-errors.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_the_plot_of_speeds_names_ours_and_three_peers_at_their_lines_ends():
    result = json.loads(RESULTS[0].read_text())
    figure = plots.length_figure(tables.measured(result), "a GPU")
    for axes in figure.axes:
        assert axes.get_legend() is None
        assert {text.get_text() for text in axes.texts} == {"sage2", "SageAttn2", "FA3", "cuDNN"}
        heights = sorted(text.xy[1] for text in axes.texts)
        gap = plots.LABEL_GAP * axes.get_ylim()[1]
        assert all(higher - lower >= gap * 0.999 for lower, higher in itertools.pairwise(heights))


def test_the_gain_of_attention_is_pytorchs_fastest_kernel_over_ours():
    lines = tables.attention_gain(fake_result()).splitlines()
    assert len(lines) == 2 + len(tables.MODEL_SHAPES) + 2
    assert lines[2] == "| HunyuanVideo, 720p | 1×24×119056×128 | 2 | 2 | 1.00× |"
    result = fake_result()
    for row in result["rows"]:
        if row["provider"] == "cudnn":
            row["ms"] = 1.5
        if row["provider"] == "sage_hf:sage2" and row["scope"] == "end_to_end":
            row["ms"] = 0.5
    assert tables.attention_gain(result).splitlines()[2].endswith("| 1.5 | 0.5 | 3.00× |")


def test_the_gain_of_models_has_a_row_for_each_that_was_measured_with_both():
    rows = [
        {"model": "A", "mode": "eager", "provider": "default", "ms": 622.0},
        {"model": "A", "mode": "eager", "provider": "sage_hf:sage1", "ms": 560.0},
        {"model": "A", "mode": "eager", "provider": "sage_hf:sage2", "ms": 504.0},
        {"model": "A", "mode": "compiled", "provider": "default", "ms": 600.0},
        {"model": "B", "mode": "eager", "provider": "default", "ms": 68.0},
        {"model": "B", "mode": "eager", "provider": "sage_hf:sage2", "ms": 103.0},
    ]
    lines = tables.model_gain({**FACTS, "rows": rows}).splitlines()
    assert lines[2:4] == ["| A | eager | 622 | 504 | `sage2` | 1.23× |", "| B | eager | 68 | 103 | `sage2` | 0.66× |"]
    assert lines[4] == "" and "NVIDIA H200" in lines[5]


def test_the_gain_of_some_models_goes_from_the_largest_to_the_smallest():
    rows = [
        {"model": f"{ours}", "mode": "eager", "provider": provider, "ms": ms}
        for ours in (70, 10, 30, 20, 60, 50, 40)
        for provider, ms in (("default", 50.0), ("sage_hf:sage2", float(ours)))
    ]
    lines = tables.model_gain({**FACTS, "rows": rows}, most=3).splitlines()
    assert [line.split()[1] for line in lines[2:5]] == ["10", "40", "70"] and lines[5] == ""
    assert "3 of 7 measured, from the largest gain to the smallest" in lines[6]


def test_the_plot_says_what_it_needs(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="no provider measured anything"):
        plots.plot({**fake_result(), "rows": []}, tmp_path / "empty.png")
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install \"sage-hf\[benchmarks\]\""):
        plots.require_matplotlib()


# Training.


def autograd(output_gradient, query, key, value, mask=None, is_causal=False, causal_offset=0, scale=None) -> Gradients:
    """As `exact_gradients`, by PyTorch."""
    inputs = [x.detach().double().requires_grad_() for x in (query, key, value)]
    allowed = torch.ones(2, 1, query.shape[2], key.shape[2], dtype=torch.bool) if mask is None else mask
    if is_causal:
        allowed = allowed.tril(causal_offset)
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(*inputs, attn_mask=allowed, scale=scale, enable_gqa=True)
    return Gradients(output.detach(), *torch.autograd.grad(output, inputs, output_gradient.double()))


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "causal_offset": -40, "scale": -0.3}, {"mask": "padding"}])
def test_exact_gradients_are_those_of_autograd(options, monkeypatch):
    monkeypatch.setattr(exact, "ELEMENTS_PER_CHUNK", 2**17)
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
        output = exact.attention(*inputs, is_causal=True)[0]
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
        return Prepared(lambda: exact.attention(query, key, value, is_causal=is_causal)[0], "plain")

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


# Results on file.


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_cover_every_shape_with_every_provider_and_name_their_commit(path):
    result = json.loads(path.read_text())
    found = {(row["shape"], row["provider"], row["scope"]) for row in result["rows"]}
    assert found == {(shape.name, one.name, one.scope) for shape in SHAPES for one in PROVIDERS}
    assert all(("tflops" in row) != ("unavailable" in row) for row in result["rows"])
    assert len(result["commit"]) == 40


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_our_calls_take_at_most_the_memory_of_their_inputs(path):
    for row in json.loads(path.read_text())["rows"]:
        if row["provider"].startswith("sage_hf") and "peak_extra_bytes" in row:
            assert row["peak_extra_bytes"] <= tables.shape_of(row).input_bytes, row
