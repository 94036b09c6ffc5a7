"""The benchmark of several GPUs: what it measures, tried by two processes on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest

pytestmark = pytest.mark.skipif(not hasattr(diffusers, "ContextParallelConfig"), reason="this diffusers has none")
ROOT = Path(__file__).parents[2]


@pytest.mark.audit
def test_rows_are_measured_once_and_say_why_they_cannot_be(tmp_path: Path):
    arguments = [
        "--tiny",
        "--models",
        "cogvideox-2b",
        "--providers",
        "default",
        "sage2",
        "sage2-compiled",
        "--modes",
        "ulysses",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "benchmarks/run.py"), "parallel", *arguments, "--output", str(tmp_path)]

    def run() -> list[dict[str, object]]:
        subprocess.run(command, cwd=ROOT, check=True, timeout=240)
        rows: list[dict[str, object]] = json.loads((tmp_path / "cpux2-parallel.json").read_text())["rows"]
        return rows

    rows = run()
    assert [(row["provider"], row["gpus"], row["mode"]) for row in rows] == [
        ("default", 1, ""),
        ("sage2", 1, ""),
        ("sage2-compiled", 1, ""),
        ("default", 2, "ulysses"),
        ("sage2", 2, "ulysses"),
        ("sage2-compiled", 2, "ulysses"),
    ]
    assert "no plan" in str(rows[3]["unavailable"])
    assert rows[0]["rel_l1"] == 0
    for one, two in ((rows[1], rows[4]), (rows[2], rows[5])):
        assert 0 < two["rel_l1"] <= 1.1 * one["rel_l1"]
    assert run() == rows
