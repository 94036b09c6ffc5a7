"""The benchmark of host time: what it measures, and what it writes."""

import json

import pytest
import torch

from sage_hf.app.cli import main
from sage_hf.bench import measure_host, timing

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(timing, "LOOPED_CALLS", 2)
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setattr(measure_host, "WARM_UP", 1)


@pytest.mark.parametrize("route", [route for route in measure_host.ROUTES if route != "compiled"])
def test_each_route_is_timed_with_each_provider_or_says_why_not(route):
    rows = measure_host.measure_route(route, ("sage", "sdpa", "nothing"), CPU)
    assert [row["provider"] for row in rows] == ["sage", "sdpa", "nothing"]
    assert rows[0]["us"] > 0 and rows[1]["us"] > 0 and "us" not in rows[2] and rows[2]["unavailable"]
    assert {row["route"] for row in rows} == {route}


def test_the_cost_of_a_graph_is_shared_by_its_calls(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    calls = {"one": (lambda: None, 1), "many": (lambda: None, 8)}
    assert timing.looped_us(calls, CPU) == {"one": 1e6 / 2, "many": 1e6 / 8}


def test_the_command_writes_rows_and_prints_a_table(monkeypatch, tmp_path, capsys):
    rows = [
        {"route": "plain", "provider": "sage", "us": 40.2},
        {"route": "plain", "provider": "sdpa", "us": 15.4},
        {"route": "key_mask", "provider": "sageattention", "unavailable": "ValueError: no such call"},
    ]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(measure_host, "run", lambda *args, **options: {"gpu": "NVIDIA H200", "rows": rows})
    assert main(["bench", "--host", "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "nvidia-h200-host.json").read_text())["rows"] == rows
    printed = capsys.readouterr().out
    assert "plain         40      15      –" in printed and "key mask      –       –       –" in printed
    assert "| plain | 40 | 15 | – |" in measure_host.markdown({"rows": rows})


def test_the_command_takes_no_shapes(capsys, monkeypatch):
    assert main(["bench", "--host", "--training"]) != 0
    assert "--host takes no --training" in capsys.readouterr().err
