"""Training on several processes: gradients are those of one process with the whole batch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sage_hf
from tests.helpers import distributed_training
from tests.helpers.distributed_training import MODELS, WORLD, gradient


@pytest.mark.audit
def test_gradients_match_the_whole_batch(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    command = [*torchrun, "-m", distributed_training.__name__, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, check=True, timeout=300)
    for name, (build, batch, loss) in MODELS.items():
        model = build().train()
        sage_hf.apply(model, "sage_bwd")
        loss(model, batch()).backward()
        expected = gradient(model)
        for kind, scales in (("ddp", (1,)), ("fsdp", (1, 1 / WORLD))):  # torch 2.8 does not divide FSDP's sums on a CPU
            found = torch.load(tmp_path / f"{name}-{kind}.pt")
            errors = [(found * scale - expected).abs().sum() for scale in scales]
            # Sums over the batch in another order may round a code of Q or K the other way.
            assert min(errors) <= 1e-3 * expected.abs().sum(), (name, kind)
