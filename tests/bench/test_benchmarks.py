"""The benchmark of the forward pass: what it measures, and what is made of its results."""

import itertools
import json
import math
import sys
from dataclasses import replace

import pages
import pytest
import torch

import sage_hf
from sage_hf.bench import measure, model_tables, plots, providers, results, tables
from sage_hf.bench.cases import SHAPES, BenchCase, draw
from sage_hf.bench.measure import SampledErrors
from sage_hf.bench.providers import PROVIDERS, PreparedCall, Provider, sageattention, to_e4m3
from sage_kernels import ops
from sage_kernels.dispatch import registry
from sage_kernels.exact import sdpa
from sage_kernels.replay.cache import MOST_BYTES
from tests.helpers.benchmark_results import CPU, FACTS, SMALL, fake_result
from tests.helpers.kernels import FakeForward, FakeQuantizer, only_the_reference

RESULTS = sorted(pages.RESULTS.glob("*-forward.json"))


def fake_timing(monkeypatch, times: list[float]) -> None:
    """Let every call take these times, of the whole and of its steps, without a GPU."""
    monkeypatch.setattr(measure, "first_calls", lambda call: (0.0, 10**9, 5))
    steps = times if len(times) > 1 else times * 2
    monkeypatch.setattr(measure, "median_steps_ms", lambda calls: {name: steps for name in calls})


@pytest.mark.parametrize("mask", ["none", "causal", "lower_right"])
@pytest.mark.parametrize("lengths", [(7, 7), (3, 10), (10, 3), (1, 5)])
def test_operations_are_of_both_products_for_every_pair_that_causality_leaves(mask, lengths):
    case = BenchCase("x", 2, 4, 1, *lengths, 64, mask)
    attends = draw(case, CPU).mask if mask == "lower_right" else torch.ones(lengths, dtype=torch.bool)
    pairs = int((attends.tril() if mask == "causal" else attends).sum())
    assert case.operations == 4 * 2 * 4 * pairs * 64
    assert replace(case, training=True).operations == 3.5 * case.operations
    assert case.input_bytes == 2 * 2 * (4 * lengths[0] + 2 * lengths[1]) * 64


@pytest.mark.parametrize("biased", [False, True])
def test_tensors_are_the_same_every_time_and_biased_ones_have_means(biased):
    first, second = (draw(SMALL, CPU, biased).tensors for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [x.shape[1] for x in first] == [4, 2, 2]
    assert (first[1].float().mean(2).abs().mean() > 1) == biased


@pytest.mark.parametrize("causal", [False, True])
def test_sampled_errors_match_the_whole_output(causal):
    case = SMALL if causal else replace(SMALL, mask="none")
    inputs = draw(case, CPU, biased=True)
    query, key, value = (x.double() for x in inputs.tensors)
    errors = SampledErrors(replace(inputs, query=query, key=key, value=value))
    output, _ = sdpa.attention(query, key, value, is_causal=causal)
    assert errors.of(output)["rel_l1"] < 1e-12
    assert errors.of(output / 4, 4.0)["rel_l1"] < 1e-12
    assert math.isclose(errors.of(output * 1.01)["rel_l1"], 0.01, rel_tol=1e-6)
    output[0, -1, -1] = torch.nan
    assert math.isnan(errors.of(output)["rel_l1"])


def test_a_provider_that_cannot_run_has_a_row_that_says_why(monkeypatch):
    def absent(inputs):
        raise ModuleNotFoundError("No module named 'absent'\nmore")

    def half(inputs):
        return PreparedCall(
            lambda: sdpa.attention(*inputs.tensors, is_causal=inputs.case.upper_left)[0] / 2, "half", 2.0
        )

    fake_timing(monkeypatch, [1e-3])
    ours = [Provider("absent", "Absent", absent, "kernel"), Provider("half", "Half", half, "kernel")]
    missing, row = measure.measure_case(SMALL, ours, CPU)
    assert missing["unavailable"] == "ModuleNotFoundError: No module named 'absent'" and "ms" not in missing
    assert row["provider"] == "half" and row["kernel"] == "half"
    assert math.isclose(row["tflops"], SMALL.operations / 1e-6 * 1e-12)
    assert max(row["rel_l1"], row["rel_l1_biased"]) < 1e-12 and min(row["cosine"], row["cosine_biased"]) > 0.999


def test_a_provider_whose_result_is_not_finite_has_no_speed(monkeypatch):
    def broken(inputs):
        output = torch.zeros_like(inputs.query)
        output[-1, -1, 7, 3] = torch.nan  # where no error is sampled
        return PreparedCall(lambda: output, "broken")

    fake_timing(monkeypatch, [1e-3])
    (row,) = measure.measure_case(SMALL, [Provider("broken", "Broken", broken, "kernel")], CPU)
    assert row["unavailable"] == "ArithmeticError: the result holds NaN or infinity" and "ms" not in row
    gradients = [torch.ones(1, 2, 3, 4) for _ in range(4)]
    gradients[2][0, 0, 0, 0] = torch.inf
    with pytest.raises(ArithmeticError):
        measure.require_finite(gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_measures_every_number():
    lines = []
    result = measure.run(torch.device("cuda"), [SMALL], progress=lines.append)
    assert lines == ["small: 2×4/2×300×64, causal"]
    rows = {(row["provider"], row["scope"]): row for row in result["rows"]}
    assert set(rows) == {(one.name, one.scope) for one in PROVIDERS}
    exact_row = rows["sdpa_fa2", "end_to_end"]
    assert exact_row["tflops"] > 0 and max(exact_row["rel_l1"], exact_row["rel_l1_biased"]) < 0.01
    ours = rows["sage_hf:sage2", "end_to_end"]
    assert 0 < ours["peak_extra_bytes"] < SMALL.input_bytes and ours["compile_s"] >= 0
    assert json.loads(results.to_json(result)) == result and tables.text(result)


def test_the_portable_kernel_is_measured_where_another_is_preferred():
    inputs, ran = draw(SMALL, CPU), []
    portable = FakeForward("int8_forward", "sage1", ran=ran.append)
    with only_the_reference():
        registry.register_quantizer(FakeQuantizer("int8_quantize", "sage1"))
        registry.register_forward(FakeForward("preferred", "sage1", ran=ran.append))
        registry.register_forward(portable)
        prepared = providers.ours_in_triton("sage1")(inputs)
        output, expected = prepared.call(), ops.attention(*inputs.tensors, is_causal=True, recipe="sage1")[0]
        assert prepared.kernel == "int8_forward"
        assert ran == ["int8_forward", "preferred"]
        assert torch.equal(output, expected)
    with only_the_reference():
        registry.register_quantizer(FakeQuantizer("int8_quantize", "sage1"))
        registry.register_forward(portable)
        with pytest.raises(RuntimeError, match="runs in Triton here as it is"):
            providers.ours_in_triton("sage1")(inputs)


def test_the_recorded_kernel_is_the_kernel_that_ran(monkeypatch):
    fake_timing(monkeypatch, [1e-3])
    ran = []
    (sage1,) = (one for one in PROVIDERS if (one.name, one.scope) == ("sage_hf:sage1", "end_to_end"))
    with only_the_reference():
        registry.register_quantizer(FakeQuantizer("int8_quantize", "sage1"))
        refuses = lambda request: "" if request.mask == "none" else "it takes no mask"  # noqa: E731
        registry.register_forward(FakeForward("takes no mask", "sage1", reason=refuses, ran=ran.append))
        registry.register_forward(FakeForward("takes masks", "sage1", ran=ran.append))
        for mask, kernel in (("causal", "takes no mask"), ("lengths", "takes masks")):
            (row,) = measure.measure_case(replace(SMALL, mask=mask), [sage1], CPU)
            assert (row["kernel"], set(ran)) == (kernel, {kernel})
            assert row["rel_l1"] < 0.05
            ran.clear()


def test_each_slice_has_its_e4m3_scale():
    x = torch.randn(2, 3, 5, 7) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    codes, descale = to_e4m3(x, (2, 3))
    assert descale.shape == (2, 3) and codes.float().abs().amax((2, 3)).eq(448).all()
    assert ((codes.float() * descale[..., None, None] - x).abs() <= x.abs() / 16 + descale[..., None, None] / 512).all()
    assert to_e4m3(x, (0, 1, 2, 3))[1].shape == (1,)


def test_generations_of_sageattention_are_distinguished(monkeypatch, tmp_path):
    for name, text in {"sageattention": "", "sageattention2": "raise ImportError('build failed: error: x')"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported below goes with the test
        del sys.modules[name]
    with sage_hf.drop_in(), pytest.raises(ModuleNotFoundError, match="SageAttention 1 is not installed"):
        sageattention(1)
    with sage_hf.drop_in(), pytest.raises(ModuleNotFoundError, match="SageAttention 2 is not installed"):
        sageattention(2)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sageattention(1).__name__ == "sageattention"
    with pytest.raises(ImportError, match="build failed"):
        sageattention(2)
    (tmp_path / "sageattention2.py").unlink()
    with pytest.raises(ModuleNotFoundError, match="SageAttention 2 is not installed"):
        sageattention(2)


def test_json_holds_a_row_a_line():
    result = fake_result()
    text = results.to_json(result)
    assert json.loads(text) == result
    assert len(text.splitlines()) == len(result["rows"]) + len(result) + 3


def test_the_table_shows_every_shape_and_who_measured_there():
    lines = tables.markdown(fake_result()).splitlines()
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert "FA3" not in header and "FA3 FP8 (kernel)" in header and header[1] == "FA2"
    assert len(lines) == 2 + len(SHAPES) + 2
    causal = [cell.strip() for cell in lines[2 + 3].strip("|").split("|")]
    assert causal[0] == "16k-128-causal: 2×32×16384×128, causal"
    assert causal[header.index("sage1")] == "–" and causal[header.index("sage2, Triton")] == "**109**"
    assert "NVIDIA H200" in lines[-1] and "commit 0000000000, 2026-01-01" in lines[-1]


def test_the_text_names_errors_memory_and_reasons():
    text = tables.text(fake_result())
    assert "At 1×24×119056×128:" in text and "  0.50  " in text
    assert "fa3, end_to_end: ModuleNotFoundError: No module named 'fa3_fwd' (all shapes)" in text
    assert "sage_hf:sage1, kernel: RuntimeError: no causal (16k-128-causal; 16k-64-causal; llama-3-prefill)" in text


def test_a_result_without_any_measurement_still_says_why():
    result = fake_result()
    result["rows"] = [row for row in result["rows"] if row["provider"] == "fa3"]
    assert "No module named 'fa3_fwd'" in tables.text(result)


def test_the_plot_of_speeds_names_ours_and_three_peers_at_their_lines_ends():
    result = json.loads(RESULTS[0].read_text())
    figure = plots.length_figure(tables.measured(result), "a GPU")
    for axes in figure.axes:
        assert axes.get_legend() is None
        assert {text.get_text() for text in axes.texts} == {"sage2", "SageAttn2", "FA3", "cuDNN"}
        heights = sorted(text.xy[1] for text in axes.texts)
        gap = plots.LABEL_GAP * axes.get_ylim()[1]
        assert all(higher - lower >= gap * 0.999 for lower, higher in itertools.pairwise(heights))


def model_rows(name, times, kernels=None, **values):
    """Rows of a model, of providers with these times, the last of which ran these kernels."""
    rows = [
        {"model": name.upper(), "name": name, "mode": "eager", "provider": provider, "ms": ms}
        for provider, ms in times.items()
    ]
    return [*rows[:-1], rows[-1] | {"kernels": kernels or {}} | values]


def test_the_gain_of_models_has_a_row_for_each_that_was_measured_with_both():
    rows = model_rows("a", {"default": 622.0, "sage_hf:sage1": 560.0, "sage_hf:sage2": 504.0}, {"fa3": 2, "sdpa": 1})
    rows += [row | {"mode": "compiled"} for row in rows[:1]] + model_rows(
        "b", {"default": 68.0, "sage_hf:sage2": 103.0}
    )
    lines = model_tables.model_gain({**FACTS, "rows": rows}).splitlines()
    assert lines[0].startswith("| model, eager | baseline, ms |")
    assert lines[2:4] == [
        "| A | 622 | 504 | `sage2` | 1.23× | FA3 in 2 of 3, PyTorch in 1 of 3 |",
        "| B | 68 | 103 | `sage2` | 0.66× | not recorded |",
    ]
    assert lines[4] == "" and "NVIDIA H200" in lines[5]


def test_a_gain_is_split_into_what_each_part_of_ours_saves():
    parts = {"sage_hf:sage2, no fa3": 62.0, "sage_hf:sage2, no low bits, no norms": 95.0}
    times = {"default": 100.0, **parts, "sage_hf:sage2, no low bits": 80.0, "sage_hf:sage2": 50.0}
    rows = model_rows("a", times, {"int8_forward, int8_quantize": 9}, qk_norm_rope=9, fa3_installed=True)
    training = {"default": 10.0, "sage_hf:sage_bwd, no low bits": 9.0, "sage_hf:sage_bwd": 6.5}
    text = model_tables.model_gain({**FACTS, "rows": [*rows, *model_rows("b", training)]})
    lines = text.splitlines()
    assert lines[0].endswith(
        "| exact kernel saves, ms | norms and RoPE saves, ms | low bits saves, ms | without FA3, ms |"
    )
    assert lines[2].endswith("| `sage2` | 2.00× | INT8 in 9 of 9 + fused norms | 5.0 | 15.0 | 30.0 | 62 |")
    assert lines[3].endswith("| `sage_bwd` | 1.54× | not recorded | 0.0 | 1.0 | 2.5 | – |")
    assert "(FA3, `pip install fa3-fwd`) was installed" in text


def test_the_first_table_shows_rows_in_which_low_bits_ran_and_counts_the_others():
    int8 = {"int8_forward, int8_quantize": 2}
    named = [model_rows(name, {"default": 10.0, "sage_hf:sage2": 8.0}, int8) for name in model_tables.PIPELINES]
    more = [model_rows(f"m{ms}", {"default": 10.0, "sage_hf:sage2": ms}, int8) for ms in (4.0, 2.0, 5.0)]
    exact = [model_rows(f"x{ms}", {"default": 10.0, "sage_hf:sage2": ms}, {"fa3": 3}) for ms in (1.0, 10.2)]
    rows = [row for of_model in (*exact, *more, *named) for row in of_model]
    lines = model_tables.low_bit_gain({**FACTS, "rows": rows}, most=4).splitlines()
    assert [line.split()[1] for line in lines[2:6]] == [
        *(name.upper().split()[0] for name in model_tables.PIPELINES),
        "M2.0",
    ]
    assert lines[7].startswith(
        "4 other steps were measured, some without low bits, at 0.98× to 10.00×; none of them is below 0.97×. "
    )
    rows[1]["ms"] = 11.0
    table = model_tables.low_bit_gain({**FACTS, "rows": rows}, most=4)
    assert "some without low bits, at 0.91× to 2.50×; one of them is below 0.97×. " in table


def test_the_plot_says_what_it_needs(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="no provider measured anything"):
        plots.plot({**fake_result(), "rows": []}, tmp_path / "empty.png")
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install \"sage-hf\[benchmarks\]\""):
        plots.require_matplotlib()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_cover_every_shape_with_every_provider_and_name_their_commit(path):
    result = json.loads(path.read_text())
    found = {(row["shape"], row["provider"], row["scope"]) for row in result["rows"]}
    assert found == {(shape.name, one.name, one.scope) for shape in SHAPES for one in PROVIDERS}
    assert all(("tflops" in row) != ("unavailable" in row) for row in result["rows"])
    assert len(result["commit"]) == 40


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_our_calls_take_at_most_the_memory_of_their_inputs(path):
    """The second call, which is the one measured, holds a second output: its first replay is compared with it."""
    for row in json.loads(path.read_text())["rows"]:
        if row["provider"].startswith("sage_hf") and "peak_extra_bytes" in row:
            case = BenchCase.of_row(row)
            compared = case.output_bytes if case.output_bytes <= MOST_BYTES else 0
            assert row["peak_extra_bytes"] <= case.input_bytes + compared, row
