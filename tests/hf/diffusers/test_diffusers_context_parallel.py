"""diffusers' context parallelism with our backends: two processes, each with half of the tokens, agree with one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("diffusers.models._modeling_parallel") is None, reason="this diffusers has none"
)

WORKER = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import sage_hf
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
qkv = [torch.randn(2, 128, 4, 32) for _ in range(3)]
for degrees in ({"ulysses_degree": 2}, {"ring_degree": 2}):
    context = ContextParallelConfig(**degrees)
    config = ParallelConfig(context_parallel_config=context)
    mesh = init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config.setup(rank, 2, torch.device("cpu"), mesh=mesh)
    exact, low_bit = AttentionBackendName("sage_exact"), AttentionBackendName("sage3_emulate")
    shards = [x.chunk(2, dim=1)[rank] for x in qkv]
    expected = dispatch_attention_fn(*qkv, backend=exact).chunk(2, dim=1)[rank]
    torch.testing.assert_close(dispatch_attention_fn(*shards, backend=exact, parallel_config=config), expected)

    whole = dispatch_attention_fn(*qkv, backend=low_bit).chunk(2, dim=1)[rank]
    sharded = dispatch_attention_fn(*shards, backend=low_bit, parallel_config=config)
    # a ring quantises each shard of the keys by itself: as many bits, so as large an error
    assert 0 < (sharded - expected).norm() < 1.5 * (whole - expected).norm(), degrees
dist.destroy_process_group()
"""


def test_two_shards_agree_with_the_whole(tmp_path: Path):
    command = [sys.executable, "-c", WORKER]
    workers = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")]) for rank in range(2)]
    try:
        assert [worker.wait(timeout=180) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
