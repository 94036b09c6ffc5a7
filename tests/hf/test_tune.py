"""`sage-hf tune`: what it measures, and the table that it fits and writes."""

import json
import math
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sage_hf.app import warmup
from sage_hf.app.cli import main
from sage_hf.bench.cases import BenchCase, MaskName, draw
from sage_hf.nominal import nominal_request
from sage_hf.tune import cases, tune
from sage_hf.tune.fit import MeasuredTime, fit
from sage_kernels.cuda import compiler
from sage_kernels.cuda.registration import NOT_FASTER, CudaNVFP4Forward
from sage_kernels.dispatch import cost_model, verdicts
from sage_kernels.dispatch.cost_model import CostTable
from sage_kernels.dispatch.curves import CallSizes, CostCurve, CostWeights, ItemSchedule
from sage_kernels.exact import sdpa

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SCHEDULE = ItemSchedule(rows=128, keys=64, slots=264, order="waves", packs=False, widths=(64, 96, 128, 192, 256))
TRUE = CostCurve("x", "none", False, (1, 256), SCHEDULE, CostWeights(launch=8, queries=0.01, item=1.5, wide_tile=0.3))


def sizes_of_calls(count, head_dims=(128,)):
    draw = random.Random(0)
    lengths = (256, 1000, 2048, 5000, 16384)
    for _ in range(count):
        tokens = draw.choice(lengths), draw.choice((77, *lengths))
        yield CallSizes(draw.choice((1, 2, 4)), 24, draw.choice((24, 8)), *tokens, draw.choice(head_dims))


def measured_by(curve, count, noise=0.0, **options):
    draw = random.Random(1)
    for sizes in sizes_of_calls(count, **options):
        us = curve.us(sizes) * draw.uniform(1 - noise, 1 + noise)
        yield MeasuredTime(curve.provider, curve.mask, curve.causal, sizes, us)


@pytest.mark.parametrize("order", ["waves", "queue", "split"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_fit_predicts_other_calls_as_well_as_its_points_were_measured(causal, order):
    true = replace(TRUE, causal=causal, schedule=replace(SCHEDULE, order=order))
    (found,) = fit(measured_by(true, 40, noise=0.02), multiprocessors=132)
    assert found.error < 0.06
    for sizes in sizes_of_calls(80):
        assert found.us(sizes) == pytest.approx(true.us(sizes), rel=0.06)


def test_head_dims_share_a_curve_which_is_for_none_beyond_those_measured():
    (found,) = fit(measured_by(TRUE, 38, head_dims=(72, 96, 128, 256)), multiprocessors=132)
    assert found.head_dims == (65, 256)
    for sizes in sizes_of_calls(80, (80, 112, 128, 256)):
        assert found.us(sizes) == pytest.approx(TRUE.us(sizes), rel=0.08)


def test_few_points_of_an_unknown_provider_give_no_curve():
    assert fit(measured_by(TRUE, 3), multiprocessors=132) == ()


PROVIDERS = {"sdpa_fa2": "flash", "cudnn": "cudnn", "fa3": "fa3"}


def measured_without_masks(name):
    """Return (kind, sizes, {provider: µs}) of the calls of a result without masks."""
    calls = []
    for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
        if row["direction"] == "forward" and row["mask"] in ("none", "causal") and row["q_len"] >= 16:
            sizes = CallSizes(*(row[name] for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")))
            us = {provider: row["others_ms"].get(name, math.inf) * 1e3 for name, provider in PROVIDERS.items()}
            calls.append((row["mask"] == "causal", sizes, us))
    return calls


def test_curves_choose_the_fastest_kernel_of_calls_that_they_have_not_seen():
    """Fitted to half of the calls of an H200, they choose for the other half, and on an H100.

    Where the fastest takes the GPU less than FlashAttention 3 takes the host, the host's time counts, not the curves.
    """
    calls, elsewhere = map(measured_without_masks, ("nvidia-h200-grid", "nvidia-h100-80gb-hbm3-unseen"))
    known = [
        MeasuredTime(provider, "none", causal, sizes, one)
        for causal, sizes, us in calls[::2]
        for provider, one in us.items()
        if one < math.inf
    ]
    table = CostTable("", (9, 0), {}, fit(known, multiprocessors=132))
    for others in (calls[1::2], elsewhere):
        shares = []
        for causal, sizes, us in others:
            if min(us.values()) < cost_model.FA3_HOST_US:
                continue
            curves = {provider: table.curve(provider, "none", causal, sizes.head_dim) for provider in us}
            expected = {
                provider: curve.us(sizes) for provider, curve in curves.items() if curve and us[provider] < math.inf
            }
            shares.append(min(us.values()) / us[min(expected, key=expected.get)])
        assert sum(share >= 0.97 for share in shares) >= 0.96 * len(shares) and min(shares) >= 0.9, sorted(shares)[:8]


def test_the_points_cover_what_models_call():
    points = tune.points()
    assert {point.mask for point in points} == set(MaskName.__args__)
    assert {32, 64, 96, 128, 256} <= {point.head_dim for point in points}
    assert any(point.kv_len < 256 <= 4 * point.kv_len < point.q_len for point in points)
    assert len(points) == len(set(points))
    first = {(point.kind, point.is_causal, point.training) for point in points[:60]}
    assert first == {(point.kind, point.is_causal, point.training) for point in points}


@pytest.mark.parametrize("mask", MaskName.__args__)
def test_a_point_is_the_call_that_its_mask_names(mask, monkeypatch):
    case = BenchCase("any", 2, 4, 2, 90 if mask == "lower_right" else 150, 150, 64, mask)
    inputs = draw(case, torch.device("cpu"))
    expected, _ = sdpa.attention(*inputs.tensors, mask=inputs.mask, is_causal=mask in ("causal", "causal_lengths"))
    monkeypatch.setattr(cases, "sdpa_kernel", lambda backend: nullcontext())
    found = cases.prepare(torch.device("cpu"), case)("flash")()
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.01)  # P and the output are bfloat16
    if case.kind in ("none", "keys") and not case.causal_offset:
        cases.prepare(torch.device("cpu"), replace(case, training=True))("flash")()


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that is made believe, whose calls take what `TRUE` says, low-bit ones half as long and 40 µs longer."""
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))  # without verdicts, which would ask for a GPU
    verdicts.forget()
    properties = SimpleNamespace(name="NVIDIA RTX 4090", major=8, minor=9, multi_processor_count=128)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)

    def measure(device, points, seconds):
        for point in points[:200]:
            us = replace(TRUE, causal=point.is_causal).us(point.sizes)
            yield MeasuredTime("flash", point.kind, point.is_causal, point.sizes, us)
            yield MeasuredTime("sage2 by kernel, quantizer", point.kind, point.is_causal, point.sizes, us / 2 + 40)

    monkeypatch.setattr(tune, "measure_points", measure)
    monkeypatch.setattr(tune, "compile_kernels", lambda device, calls, seconds: 0)


@pytest.mark.audit
def test_tune_writes_a_table_where_calls_look_for_it(gpu, monkeypatch, tmp_path, capsys):
    assert main(["tune"]) == 0
    path = cost_model.tuned_path("NVIDIA RTX 4090")
    assert f"wrote {path}" in capsys.readouterr().out
    table = cost_model.read_table(path)
    assert (table.gpu, table.capability, table.versions["torch"]) == ("NVIDIA RTX 4090", (8, 9), torch.__version__)
    short, long = (CallSizes(1, 24, 24, n, n, 128) for n in (512, 16384))
    rivals = [table.curve("flash", "none", False, 128)]
    low_bit = table.curve("sage2 by kernel, quantizer", "none", False, 128)
    assert not cost_model.is_faster(low_bit, rivals, short)
    assert cost_model.is_faster(low_bit, rivals, long)


def test_kinds_that_there_was_no_time_for_are_as_the_table_that_ships_has_them(gpu, monkeypatch, tmp_path):
    path = tmp_path / "8.9.json"
    slow = replace(TRUE, weights=CostWeights(launch=1e6))
    known = [
        replace(slow, provider=provider, mask=mask) for provider in ("flash", "fa3") for mask in ("none", "unknown")
    ]
    CostTable("another GPU", (8, 9), {"torch": "2.0"}, tuple(known)).write(path)
    monkeypatch.setattr(cost_model, "shipped_path", lambda capability: path)
    few = [point for point in tune.points() if point.head_dim == 128 and point.mask == "none"]
    monkeypatch.setattr(tune, "points", lambda: few)
    table = tune.tune(torch.device("cuda"))
    assert table.versions["torch"] == torch.__version__
    measured = [table.curve(provider, "none", False, 128) for provider in ("flash", "fa3")]
    assert measured[0].weights.launch < 100 and measured[1] is None
    assert [table.curve(provider, "unknown", False, 128) for provider in ("flash", "fa3")] == known[1::2]


def test_both_kernels_of_consumer_blackwell_are_measured(gpu, monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA RTX 5090", major=12, minor=0, multi_processor_count=170)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)

    def measure(device, points, seconds):
        kernel = CudaNVFP4Forward()
        request = nominal_request("sage3", torch.device("cpu"), device_type="cuda", capability=(12, 0))
        request = replace(request, dtype=torch.bfloat16, aligned=True)
        for point in [one for one in points if one.head_dim == 128 and one.mask == "none" and not one.training]:
            for name, context in tune.variants((12, 0), point):
                with context:
                    ran = kernel.rival if kernel.unsupported(request) == NOT_FASTER else kernel.name
                if name == "sage3":
                    provider = cost_model.low_bit_provider("sage3", ran, "nvfp4_quantize_cuda")
                    us = 100.0 if ran == kernel.rival else 50.0
                    yield MeasuredTime(provider, point.kind, point.is_causal, point.sizes, us)

    monkeypatch.setattr(tune, "measure_points", measure)
    monkeypatch.setattr(compiler, "unavailable", lambda *_: "")
    table = tune.tune(torch.device("cuda"))
    request = nominal_request("sage3", torch.device("cpu"), device_type="cuda", capability=(12, 0), head_dim=128)
    monkeypatch.setattr(cost_model, "table_of", lambda capability: table)
    assert CudaNVFP4Forward().unsupported(replace(request, dtype=torch.bfloat16, aligned=True)) == ""


def test_tune_writes_to_the_file_that_is_named(gpu, monkeypatch, tmp_path):
    few = [point for point in tune.points() if point.head_dim == 128 and point.mask == "none"]
    monkeypatch.setattr(tune, "points", lambda: few)
    assert main(["tune", "--output", str(tmp_path / "table.json")]) == 0
    assert cost_model.read_table(tmp_path / "table.json").curves


def test_a_machine_without_a_gpu_gets_a_message(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("tune", "warmup"):
        assert main([command]) == 2
        assert "needs a GPU" in capsys.readouterr().err


def test_a_gpu_without_kernels_gets_a_message(gpu, monkeypatch, capsys):
    monkeypatch.setattr(tune, "measure_points", lambda device, points, seconds: [])
    assert main(["tune"]) == 2
    assert "nothing could be measured" in capsys.readouterr().err


def test_warmup_runs_each_recipe_of_a_configuration_once_for_each_kernel(gpu, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(warmup, "compile_kernels", lambda device, calls: compiled.extend(calls) or len(compiled))
    assert main(["warmup", "train-int8-infer-fp4", "--head-dim", "128"]) == 0
    exact = {"masked_forward", "splitkv_forward", "fa3_padded"}
    assert {name for name, _ in compiled} == {"sage2", "sage_bwd"} | exact  # sage2 replaces sage3 there
    assert {point.mask for name, point in compiled if name not in exact} == {"none", "causal", "lengths"}
    assert {"bool", "additive"} < {point.kind for name, point in compiled if name in exact}
    assert {point.head_dim for _, point in compiled} == {128}
    assert f"ran {len(compiled)} calls" in capsys.readouterr().out
