"""The forward benchmark: what it measures, and what is made of its results."""

import json
import math
from dataclasses import replace
from pathlib import Path

import forward
import pytest
import torch

from sage_hf.bench import measure, plots, tables
from sage_hf.bench.measure import SampledErrors, draw
from sage_hf.bench.peers import PROVIDERS, Prepared, Provider, _sageattention, _to_e4m3
from sage_hf.bench.shapes import SHAPES, Shape
from sage_kernels import exact

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "kernels/benchmarks/results").glob("*-forward.json"))
CPU = torch.device("cpu")
SMALL = Shape("small", 2, 4, 2, 300, 64, causal=True)


def fake_result() -> dict:
    """As `measure.run` returns: every provider at every shape but fa3, which is missing, and sage1 without causal."""
    rows = []
    for shape in SHAPES:
        for index, one in enumerate(PROVIDERS):
            row = measure._row(shape, one)
            if one.name == "fa3":
                row["unavailable"] = "ModuleNotFoundError: No module named 'fa3_fwd'"
            elif one.name == "sage_hf:sage1" and shape.causal:
                row["unavailable"] = "RuntimeError: no causal"
            else:
                row |= {"kernel": "k", "compile_s": 0.5, "rel_l1": 0.01, "cosine": 0.999}
                row |= {"rel_l1_biased": 1e-3 * (index + 1), "cosine_biased": 0.9, "ms": 2.0, "tflops": 100.0 + index}
                row |= {"peak_extra_bytes": shape.input_bytes // 2} if one.scope == "end_to_end" else {}
            rows.append(row)
    facts = {"gpu": "NVIDIA H200", "capability": "9.0", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
    facts |= {"cudnn": 91900, "packages": {"fa3-fwd": "0.0.3"}, "commit": "0" * 40, "date": "2026-01-01"}
    quantizer = {"name": "operands of sage2", "batch": 2, "heads": 32, "tokens": 16384, "head_dim": 128, "bytes": 10}
    quantizers = [quantizer | {"ms": 0.4, "share_of_copy_bandwidth": 0.84}, {"head_dim": 64, "unavailable": "no"}]
    return {**facts, "copy_bandwidth": 4.3e12, "quantizers": quantizers, "rows": rows}


def test_operations_are_those_of_both_products_and_half_when_causal():
    shape = Shape("x", 2, 4, 1, 100, 64)
    assert shape.operations == 4 * 2 * 4 * 100 * 100 * 64
    assert replace(shape, causal=True).operations == shape.operations / 2
    assert shape.input_bytes == 2 * 2 * (4 + 1 + 1) * 100 * 64


def test_shape_and_provider_names_are_unique():
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert len({(one.name, one.scope) for one in PROVIDERS}) == len(PROVIDERS)


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
    missing, row = measure._measure_shape(SMALL, providers, CPU)
    assert missing["unavailable"] == "ModuleNotFoundError: No module named 'absent'" and "ms" not in missing
    assert row["provider"] == "half" and row["kernel"] == "half"
    assert math.isclose(row["tflops"], SMALL.operations / 1e-6 * 1e-12)
    assert max(row["rel_l1"], row["rel_l1_biased"]) < 1e-12 and min(row["cosine"], row["cosine_biased"]) > 0.999


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
    assert exact_row["peak_extra_bytes"] < SMALL.input_bytes and exact_row["compile_s"] >= 0
    assert json.loads(tables.to_json(result)) == result and tables.text(result)


def test_e4m3_scales_are_those_of_each_slice():
    x = torch.randn(2, 3, 5, 7) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    codes, descale = _to_e4m3(x, (2, 3))
    assert descale.shape == (2, 3) and codes.float().abs().amax((2, 3)).eq(448).all()
    assert ((codes.float() * descale[..., None, None] - x).abs() <= x.abs() / 16 + descale[..., None, None] / 512).all()
    assert _to_e4m3(x, (0, 1, 2, 3))[1].shape == (1,)


def test_generations_of_sageattention_are_told_apart(monkeypatch, tmp_path):
    for name, text in {"sageattention": "", "sageattention2": "raise ImportError('build failed: error: x')"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _sageattention(1).__name__ == "sageattention"
    with pytest.raises(ImportError, match="build failed"):
        _sageattention(2)
    (tmp_path / "sageattention2.py").unlink()
    with pytest.raises(ModuleNotFoundError, match="SageAttention 2 is not installed"):
        _sageattention(2)


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
    assert causal[header.index("sage1")] == "–" and causal[header.index("sage3")] == "**107**"
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
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_says_what_it_needs(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="no provider measured anything"):
        plots.plot({**fake_result(), "rows": []}, tmp_path / "empty.png")
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install \"sage-hf\[benchmarks\]\""):
        plots.require_matplotlib()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_readmes_table_is_that_of_the_results_file(path):
    assert tables.markdown(json.loads(path.read_text())) in (ROOT / "README.md").read_text()


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
