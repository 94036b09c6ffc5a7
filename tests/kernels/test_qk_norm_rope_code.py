"""Machine code of norm and RoPE on every architecture: 16 bytes at a time, and no spills. `make audit`."""

import pytest
import torch
import triton

from sage_kernels.dispatch.support import NVIDIA_CAPABILITIES
from sage_kernels.testing.aot import compile_launch, machine_code
from sage_kernels.triton import qk_norm_rope
from sage_kernels.triton.common.launch import recording
from tests.helpers.qk_norm_rope import QKNormRopeCase

pytestmark = [
    pytest.mark.audit,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

CASES = (
    QKNormRopeCase((1, 64, 24, 128), "rounded", "channels"),
    QKNormRopeCase((2, 64, 30, 64), "layer"),
    QKNormRopeCase((1, 64, 40, 128), "tokens", "batch"),
    QKNormRopeCase((1, 64, 24, 128), "bare", "heads"),
    QKNormRopeCase((1, 64, 24, 128), "rms", "complex"),
    QKNormRopeCase((1, 64, 32, 128), "", "own", halves=True, heads_first=True),
)


@pytest.mark.parametrize("capability", NVIDIA_CAPABILITIES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_are_read_and_written_16_bytes_at_a_time_without_spills(case, capability):
    x, norm, rope = case.draw(torch.bfloat16)
    with recording() as launches:
        qk_norm_rope.forward(x, norm, rope)
        if not case.across_heads:
            qk_norm_rope.backward(x, x, norm, rope)
    for launch in launches:
        kernel = compile_launch(launch, capability)
        assert machine_code(kernel.asm["cubin"]).instructions.spills == 0
        if launch.kernel is qk_norm_rope.sum_parts:  # it reads no heads
            continue
        heads = [line for line in kernel.asm["ptx"].splitlines() if "global.v4.b32" in line]
        assert any("ld.global" in line for line in heads) and any("st.global" in line for line in heads)
