"""The command `sage-hf check`: its table, file and exit code, and that a wrong kernel is passed over afterwards."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from sage_hf.app.cli import main
from sage_hf.bench import check
from sage_hf.nominal import nominal_request
from sage_kernels.dispatch import self_check, verdicts
from sage_kernels.dispatch.select import select
from sage_kernels.spec.recipe import RECIPES, get_recipe
from tests.helpers.kernels import FakeForward, preferred


@dataclass(frozen=True)
class DoubledScale(FakeForward):
    """Takes the scale of the scores twice."""

    def attend(self, call, quantizer):
        return super().attend(replace(call, scale=2 * call.scale), quantizer)


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path / "cache"))
    self_check.forget()
    yield
    self_check.forget()


@pytest.mark.parametrize(
    "recipes",
    [("sage1", "sage_bwd", "sage_bwd_int8"), pytest.param(tuple(RECIPES), marks=pytest.mark.audit)],
    ids=["few", "all"],
)
def test_every_recipe_of_a_cpu_is_right(recipes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "RECIPES", {name: get_recipe(name) for name in recipes})
    path = tmp_path / "check.json"
    assert main(["check", "--device", "cpu", "--json", str(path)]) == 0
    table = capsys.readouterr().out
    assert "reference_backward" in table and "failed" not in table and "left out" not in table
    result = json.loads(path.read_text())
    assert result["machine"] == json.loads(json.dumps(verdicts.machine_of(None)))
    for row in result["rows"]:
        assert row["calls"] >= 8 and row["failed"] == []
        assert 0.01 < row["worst"] < 1  # a bound that nothing comes near holds nothing


def test_a_wrong_kernel_fails_and_is_passed_over_from_then_on(capsys, monkeypatch):
    monkeypatch.setattr(check, "RECIPES", {"sage1": get_recipe("sage1")})  # the others take seconds
    with preferred(DoubledScale("wrong", "sage1")):
        assert main(["check", "--device", "cpu"]) == 1
        printed = capsys.readouterr().out
        assert "wrong: sage1, head_dim 64: " in printed and "that rounding explains" in printed
        plan = select(nominal_request("sage1", torch.device("cpu")))
        assert plan.kernel == "reference"
        assert "self-check" in dict(plan.passed_over)["sage1 by wrong"]


def test_calls_without_time_are_counted(capsys):
    assert main(["check", "--device", "cpu", "--seconds", "0"]) == 0
    assert "calls were left out" in capsys.readouterr().out


def test_kernels_are_registered_where_nothing_else_was_imported():
    code = "import sage_hf.bench.check; from sage_kernels.dispatch import qk_norm_rope_kernels as x; "
    subprocess.run([sys.executable, "-c", code + "x.reference_qk_norm_rope_kernel()"], check=True)
