"""`sage-hf tune`: what it measures, and the table that it fits and writes."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sage_hf.app import warmup
from sage_hf.app.cli import main
from sage_hf.nominal import nominal_request
from sage_hf.tune import tune
from sage_hf.tune.fit import Measured, fit
from sage_kernels.cuda import compiler
from sage_kernels.cuda.registration import NOT_FASTER, NVFP4Forward
from sage_kernels.dispatch import cost_model
from sage_kernels.dispatch.cost_model import Table
from sage_kernels.dispatch.curves import Curve, Sizes

TRUE = Curve("x", 128, "none", False, 128, 64, 264, True, launch=8, token=0.01, item=1.5, tile=0.3, score=0)


def sizes_of_calls(count, head_dim=128):
    draw = random.Random(0)
    lengths = (256, 1000, 2048, 5000, 16384)
    for _ in range(count):
        yield Sizes(draw.choice((1, 2, 4)), 24, 24, draw.choice(lengths), draw.choice((77, *lengths)), head_dim)


def measured_by(curve, count, noise=0.0):
    draw = random.Random(1)
    for sizes in sizes_of_calls(count, curve.head_dim):
        us = curve.us(sizes) * draw.uniform(1 - noise, 1 + noise)
        yield Measured(curve.runner, curve.mask, curve.causal, sizes, us)


@pytest.mark.parametrize("causal", [False, True])
def test_a_fit_predicts_other_calls_as_well_as_its_points_were_measured(causal):
    true = replace(TRUE, causal=causal)
    (found,) = fit(measured_by(true, 40, noise=0.02), multiprocessors=132)
    assert found.error < 0.06
    for sizes in sizes_of_calls(80):
        assert found.us(sizes) == pytest.approx(true.us(sizes), rel=0.06)


def test_a_head_dim_of_few_points_has_weights_that_grow_as_those_of_others_do():
    few = replace(TRUE, head_dim=96, token=0.0075, item=1.125, tile=0.225)
    curves = fit([*measured_by(TRUE, 40), *measured_by(few, 3)], multiprocessors=132)
    assert [curve.head_dim for curve in curves] == [96, 128]
    for sizes in sizes_of_calls(20, 96):
        assert curves[0].us(sizes) == pytest.approx(few.us(sizes), rel=0.02)


def test_few_points_of_an_unknown_runner_give_no_curve():
    assert fit(measured_by(TRUE, 3), multiprocessors=132) == ()


def test_the_points_cover_what_models_call():
    points = tune.points()
    kinds = {point.kind: (point.mask, point.causal) for point in points}
    assert set(kinds) == {"none", "causal", "keys", "causal_keys", "bool", "additive"}
    assert kinds["causal"] == ("none", True) and kinds["causal_keys"] == ("keys", True)
    assert {32, 64, 96, 128, 256} <= {point.sizes.head_dim for point in points}
    assert any(point.sizes.kv_len < 256 <= 4 * point.sizes.kv_len < point.sizes.q_len for point in points)
    assert len(points) == len(set(points))
    assert len(set(kinds.values())) == len(kinds)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is made believe, whose calls take what `TRUE` says, low-bit ones half as long and 40 µs longer."""
    properties = SimpleNamespace(name="NVIDIA RTX 4090", major=8, minor=9, multi_processor_count=128)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def measure(device, points, seconds):
        for point in points:
            us = replace(TRUE, causal=point.causal).us(point.sizes)
            yield Measured("flash", point.mask, point.causal, point.sizes, us)
            yield Measured("sage2 by kernel, quantizer", point.mask, point.causal, point.sizes, us / 2 + 40)

    monkeypatch.setattr(tune, "measure_points", measure)
    monkeypatch.setattr(tune, "compile_kernels", lambda device, calls, seconds: None)


def test_tune_writes_a_table_where_calls_look_for_it(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    assert main(["tune"]) == 0
    path = cost_model.tuned_path("NVIDIA RTX 4090")
    assert f"wrote {path}" in capsys.readouterr().out
    table = cost_model.read_table(path)
    assert (table.gpu, table.capability, table.versions["torch"]) == ("NVIDIA RTX 4090", (8, 9), torch.__version__)
    short, long = (Sizes(1, 24, 24, n, n, 128) for n in (512, 16384))
    rivals = table.exact("none", False, 128)
    low_bit = table.curve("sage2 by kernel, quantizer", "none", False, 128)
    assert not cost_model.is_faster(low_bit, rivals, short)
    assert cost_model.is_faster(low_bit, rivals, long)


@pytest.mark.parametrize("gpu_name", ["NVIDIA RTX 4090", "another GPU"])
def test_what_there_was_no_time_for_is_as_the_table_that_ships_for_such_a_gpu_has_it(
    gpu, gpu_name, monkeypatch, tmp_path
):
    path = tmp_path / "8.9.json"
    flash, fa3 = (replace(TRUE, runner=runner, launch=1e6) for runner in ("flash", "fa3"))
    Table(gpu_name, (8, 9), {"torch": "2.0"}, (flash, fa3)).write(path)
    monkeypatch.setattr(cost_model, "shipped_path", lambda capability: path)
    table = tune.tune(torch.device("cuda"))
    found = {curve.kind: curve for curve in table.curves}
    assert table.versions["torch"] == torch.__version__ and found[flash.kind].launch < 100
    assert (fa3.kind in found) == (gpu_name == "NVIDIA RTX 4090")


def test_both_kernels_of_consumer_blackwell_are_measured(gpu, monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA RTX 5090", major=12, minor=0, multi_processor_count=170)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def measure(device, points, seconds, names_of=tune.names_for):
        if "sage3" in names_of(points[0]) or points[0].grad:
            kernel = NVFP4Forward()
            request = nominal_request("sage3", torch.device("cpu"), device_type="cuda", capability=(12, 0))
            request = replace(request, dtype=torch.bfloat16, aligned=True)
            name = kernel.rival if kernel.unsupported(request) == NOT_FASTER else kernel.name
            for point in points:
                runner = cost_model.low_bit_runner("sage3", name, "nvfp4_quantize_cuda")
                yield Measured(runner, point.mask, point.causal, point.sizes, 100.0 if name == kernel.rival else 50.0)

    monkeypatch.setattr(tune, "measure_points", measure)
    monkeypatch.setattr(compiler, "why_not", lambda *_: "")
    table = tune.tune(torch.device("cuda"))
    request = nominal_request("sage3", torch.device("cpu"), device_type="cuda", capability=(12, 0), head_dim=128)
    monkeypatch.setattr(cost_model, "table_of", lambda capability: table)
    assert NVFP4Forward().unsupported(replace(request, dtype=torch.bfloat16, aligned=True)) == ""


def test_tune_writes_to_the_file_that_is_named(gpu, monkeypatch, tmp_path):
    few = [point for point in tune.points() if point.sizes.head_dim == 128 and point.kind == "none"]
    monkeypatch.setattr(tune, "points", lambda: few)
    assert main(["tune", "--output", str(tmp_path / "table.json")]) == 0
    assert cost_model.read_table(tmp_path / "table.json").curves


def test_a_machine_without_a_gpu_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("tune", "warmup"):
        assert main([command]) == 2
        assert "needs a GPU" in capsys.readouterr().err


def test_a_gpu_on_which_nothing_runs_is_told_so(gpu, monkeypatch, capsys):
    monkeypatch.setattr(tune, "measure_points", lambda device, points, seconds: [])
    assert main(["tune"]) == 2
    assert "nothing could be measured" in capsys.readouterr().err


def test_warmup_runs_each_recipe_of_a_configuration_once_for_each_kernel(gpu, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(warmup, "compile_kernels", lambda device, calls: compiled.extend(calls) or len(compiled))
    assert main(["warmup", "train-int8-infer-fp4", "--head-dim", "128"]) == 0
    exact = {"exact_forward", "split_forward", "fa3_padded"}
    assert {name for name, _ in compiled} == {"sage2", "sage_bwd"} | exact  # sage2 is what stands in for sage3 there
    assert {point.kind for name, point in compiled if name not in exact} == {"none", "causal", "keys"}
    assert {"bool", "additive"} < {point.kind for name, point in compiled if name in exact}
    assert {point.sizes.head_dim for _, point in compiled} == {128}
    assert f"ran {len(compiled)} calls" in capsys.readouterr().out
