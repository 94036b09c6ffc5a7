"""The report on a GPU: what it holds, in which order it is written, and that it takes untried kernels last."""

import json
from contextlib import nullcontext

import pytest
import torch

from sage_hf.app.cli import main
from sage_hf.bench import check, measure, report
from sage_kernels.cuda import registration
from sage_kernels.spec.recipe import RECIPES

CPU = torch.device("cpu")


def test_every_recipe_has_a_plan():
    found = {row["recipe"]: row for row in report.plans(CPU)}
    assert found.keys() == RECIPES.keys()
    assert found["sage3"]["kernel"] == "reference"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU for which one kernel waits to be tried."""
    calls = []

    def chosen(device):
        kernel = "untried" if registration._enforced else "tried"
        return [{"recipe": "sage3", "kernel": kernel}, {"recipe": "sage2", "kernel": "tried"}]

    def measure_case(shape, providers, device):
        calls.append((shape.name, tuple(one.name for one in providers)))
        return [measure.new_row(shape, one) | {"kernel": "k", "ms": 1.0, "tflops": 5.0} for one in providers]

    checked = {"rows": [{"kernel": "nvfp4_forward", "calls": 9, "worst": 0.7, "failed": []}], "left_out": 0}
    monkeypatch.setattr(check, "run", lambda device: checked)
    monkeypatch.setattr(report, "plans", chosen)
    monkeypatch.setattr(measure, "measure_case", measure_case)
    monkeypatch.setattr(report, "copy_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(report, "facts", lambda device: {"gpu": "NVIDIA RTX 5090"})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    properties = type("Properties", (), {"multi_processor_count": 170, "total_memory": 2**35})
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    return calls


def test_untried_kernels_come_last_behind_a_written_file(gpu, tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "report.json"
    assert main(["bench", "--report", str(path)]) == 0
    tried, untried = gpu[: len(report.SPEED_SHAPES)], gpu[len(report.SPEED_SHAPES) :]
    assert [providers for _, providers in untried] == [("sage_hf:sage3",)] * len(report.SPEED_SHAPES)
    assert [len(providers) for _, providers in tried] == [len(report.SPEED_PROVIDERS)] * len(report.SPEED_SHAPES)
    written = json.loads(path.read_text())
    assert written["gpu"] == "NVIDIA RTX 5090" and written["multiprocessors"] == 170
    for name in ("plans", "rows"):
        untried = ["untried" in row for row in written[name]]
        assert any(untried) and untried == sorted(untried)
    printed = capsys.readouterr().out
    assert f"wrote {path}" in printed and "0.70" in printed and written["check"]["rows"][0]["calls"] == 9

    # Should the untried kernel hang or crash, what was measured before is there.
    def crash(shape, providers, device):
        if len(providers) == 1:
            raise KeyboardInterrupt
        return measured(shape, providers, device)

    measured = measure.measure_case
    monkeypatch.setattr(measure, "measure_case", crash)
    assert main(["bench", "--report", str(path)]) == 130
    assert len(json.loads(path.read_text())["rows"]) == len(report.SPEED_PROVIDERS) * len(report.SPEED_SHAPES)


def test_a_report_takes_no_other_choices(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for others in (["--training"], ["--shapes", "4k-128"]):
        assert main(["bench", "--report", str(tmp_path / "x.json"), *others]) == 2
        assert "--report takes no" in capsys.readouterr().err
