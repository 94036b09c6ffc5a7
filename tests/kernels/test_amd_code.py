"""The kernels of `sage1` compile for AMD's architectures, ahead of time and without a GPU; none is offered there."""

import pytest

# Rows and keys a tile, and warps, with which the loop of `int8_forward` keeps its values in vector registers.
TILES = {"gfx942": (64, 64, 8), "gfx950": (64, 64, 8), "gfx1201": (64, 64, 16)}
COMPILE = """
import re, sys
import torch
torch.version.hip = "7.0"  # as PyTorch for ROCm says, before anything of ours is imported
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from tests.kernels.test_machine_code import record

class CompileOnly:
    def __init__(self, architecture):
        self.target = GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target

    def get_current_stream(self, device):
        return 0

driver.set_active(CompileOnly(ARCHITECTURE))
spills = {}
for launch in record("int8_forward", "sage1", HEAD_DIM, MASK, (8, 0)):
    arguments, options = dict(launch.arguments), {k: v for k, v in launch.options.items() if k != "maxnreg"}
    options["num_stages"] = 1
    if launch.kernel.__name__ == "int8_forward":
        arguments["BLOCK_M"], arguments["BLOCK_N"], options["num_warps"] = TILE
    compiled = launch.kernel.run(grid=launch.grid, warmup=True, **arguments, **options)
    code = compiled.asm["amdgcn"]
    spills[launch.kernel.__name__] = int(re.search(r"\\.vgpr_spill_count:\\s+(\\d+)", code)[1])
assert "int8_forward" in spills
assert re.search(r"v_(mfma|wmma)_i32_", code), "no product in INT8"
assert not any(spills.values()), spills
"""


@pytest.mark.audit
@pytest.mark.parametrize("architecture", TILES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal", "bool"])
def test_sage1_compiles_for_amd_without_spilling_vector_registers(forks, architecture, head_dim, mask):
    pytest.importorskip("triton.backends.amd")
    names = f"ARCHITECTURE, HEAD_DIM, MASK, TILE = {architecture!r}, {head_dim}, {mask!r}, {TILES[architecture]}\n"
    forks.run(names + COMPILE)
