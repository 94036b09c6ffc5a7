"""diffusers' context parallelism with our kernels on two GPUs: the cases of the CPU's test, by NCCL in bfloat16."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_agree_with_one(tmp_path: Path):
    diffusers = pytest.importorskip("diffusers")
    if not hasattr(diffusers, "ContextParallelConfig"):
        pytest.skip("this diffusers has no context parallelism")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.helpers.context_parallel"]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), "cuda", report], cwd=ROOT) for rank in range(2)
    ]
    try:
        assert [worker.wait(timeout=600) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    found = json.loads(report.read_text())
    assert len(found) > 10
    assert not {case: what for case, what in found.items() if what}
