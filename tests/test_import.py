"""Check what `import sage_hf` needs, and costs."""

import subprocess
import sys

import pytest

BLOCKED = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module")
def without_triton():
    return BLOCKED.format(names=["triton", "cuda"])


def test_attention_runs_without_triton(without_triton, forks):
    code = """
import sage_hf, torch
query = torch.randn(1, 2, 80, 64)
for recipe in ("sage3", "sage2", "sage1", "sage_bwd"):
    assert sage_hf.sage_attention(query, query, query, recipe=recipe).isfinite().all()
query.requires_grad_()
sage_hf.sage_attention(query, query, query, recipe="sage_bwd").sum().backward()
assert query.grad.isfinite().all()
"""
    forks.run(without_triton + code)


def test_env_says_what_the_lack_of_triton_costs(without_triton, forks):
    output = forks.run(without_triton + "from sage_hf.app.cli import main\nassert main(['env']) == 0")
    assert "Triton is not installed" in output


def test_a_gpu_without_triton_keeps_what_needs_none(forks):
    pytest.importorskip("cuda.bindings.nvrtc")
    code = """
import torch
import sage_kernels.ops
from sage_kernels.registry import Request, select
sizes = (torch.bfloat16, 1, 8, 8, 1024, 1024, 64, 64)
hopper = Request("sage2", "cuda", (9, 0), *sizes, "none", False, False, aligned=True)
print(select(hopper, "error").kernel, select(Request("sage2", "cuda", (8, 9), *sizes, "none", False, False)).reason)
"""
    output = forks.run(BLOCKED.format(names=["triton"]) + code)
    assert output.startswith("int8_forward_hopper ")
    assert "Triton is not installed" in output


def test_importing_sage_hf_leaves_the_compiler_alone_and_takes_little_longer_than_importing_torch():
    code = """
import sys, time
start = time.process_time()
import torch
torch_seconds = time.process_time() - start
import sage_hf
assert "torch._dynamo" not in sys.modules
assert not {"diffusers", "transformers", "triton"} & set(sys.modules)
print((time.process_time() - start) / torch_seconds)
"""
    command = [sys.executable, "-c", code]
    ratios = (float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(3))
    assert any(ratio <= 1.3 for ratio in ratios)


def test_a_rehearsal_imports_nothing_that_takes_long():
    code = """
import sys
import torch
from sage_kernels import rehearsal
with rehearsal.rehearsing() as rehearsed:
    x = rehearsed.stand_in(torch.empty(2, 3)).new_empty(4, 6).transpose(0, 1)[1:].transpose(0, 1)
    torch.empty_like(x.new_empty(3).view(3, 1))
assert not {"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
