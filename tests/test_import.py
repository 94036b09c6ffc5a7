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
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.select import select
sizes = (torch.bfloat16, 1, 8, 8, 1024, 1024, 64, 64)
hopper = Request("sage2", "cuda", (9, 0), *sizes, "none", False, False, aligned=True)
print(select(hopper, "error").kernel, select(Request("sage2", "cuda", (8, 9), *sizes, "none", False, False)).reason)
"""
    output = forks.run(BLOCKED.format(names=["triton"]) + code)
    assert output.startswith("int8_forward_hopper ")
    assert "Triton is not installed" in output


def test_importing_sage_hf_is_fast_and_does_not_load_the_compiler():
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


HEAVY = {"torch._dynamo", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes", "sympy"}
TRACES = f"""
import sys
import pytest, torch
from tests.helpers import fake_gpu
from sage_kernels import backends
from sage_kernels.replay import trace
from sage_kernels.spec.call import BackwardCall, Call, Mask
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.dispatch.registry import get_backward, get_forward, get_quantizer

fake_gpu.install(pytest.MonkeyPatch())
forward, quantizer = get_forward("int8_forward_hopper"), get_quantizer("int8_quantize_hopper")
query, key_mask = torch.empty(1, 192, 2, 64, dtype=torch.bfloat16).transpose(1, 2), torch.ones(1, 192, dtype=torch.bool)
with trace.tracing() as traced:
    for recipe in ("sage2", "sage1", "sage_bwd"):
        for mask in (Mask(), Mask.of_keys(traced.placeholder(key_mask))):
            tensors = [traced.placeholder(query) for _ in range(3)]
            call = Call(*tensors, get_recipe(recipe), mask, False, 0, 0.125)
            if recipe != "sage_bwd":
                forward.attend(call, quantizer)
                continue
            output, saved = forward.attend_and_save(call, quantizer)
            GRADIENTS
    with pytest.raises(trace.NotReplayableError):
        tensors[0] + 1
assert traced.steps and not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)
"""


def test_tracing_imports_nothing_that_takes_long(forks):
    forks.run(TRACES.replace("GRADIENTS", "pass"))


def test_tracing_gradients_imports_triton_and_nothing_else_that_takes_long(forks):
    prepare = """
from sage_kernels.triton.common import backward_operands, rotation
matrix = rotation.rotation_matrix
backward_operands.rotation_matrix = lambda channels, dtype, device: matrix(channels, dtype, torch.device("cpu"))
forward,"""
    gradients = "BackwardCall(output, tensors[2], output, saved, 64, call.recipe, mask, False, 0, 0.125)"
    code = TRACES.replace("GRADIENTS", f'get_backward("int8_backward").backward({gradients})')
    forks.run(code.replace("\nforward,", prepare, 1))
