"""diffusers' context parallelism with our kernels on two GPUs: the cases of the CPU's test, by NCCL in bfloat16."""

from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_agree_with_one(tmp_path: Path):
    diffusers = pytest.importorskip("diffusers")
    if not hasattr(diffusers, "ContextParallelConfig"):
        pytest.skip("this diffusers has no context parallelism")
    from tests.helpers.processes import run_processes  # an older diffusers has nothing to import

    found = run_processes(tmp_path, 2, device="cuda", seconds=600)
    assert len(found) > 10
    assert not {case: what for case, what in found.items() if what}
