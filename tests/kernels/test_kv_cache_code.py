"""Machine code of the KV cache's kernels on every architecture: tensor cores read the codes, and nothing spills."""

import pytest
import torch
import triton

from sage_kernels.dispatch.support import NVIDIA_CAPABILITIES
from sage_kernels.spec.kv_cache import KVCache
from sage_kernels.spec.kv_format import get_format
from sage_kernels.testing.aot import compile_launch, machine_code
from sage_kernels.triton import kv_append, kv_decode
from sage_kernels.triton.common.launch import recording
from sage_kernels.triton.kv_decode_kernels import attend_to_kv_part

pytestmark = [
    pytest.mark.audit,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]
SHARED_BYTES = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024}
SMALLEST_SHARED = 99 * 1024


@pytest.mark.parametrize("capability", NVIDIA_CAPABILITIES, ids=str)
@pytest.mark.parametrize(("format", "head_dim", "q_len"), [("int4", 128, 1), ("int8", 128, 1), ("int4", 64, 1),
                                                            ("int8", 64, 1), ("int4", 128, 16)])  # fmt: skip
@pytest.mark.parametrize("counted", [False, True])
def test_no_kernel_spills_and_all_fit(counted, format, head_dim, q_len, capability):
    key = torch.zeros(1, 8, 1000, head_dim, dtype=torch.bfloat16)
    query = torch.zeros(1, 32, q_len, head_dim, dtype=torch.bfloat16)
    cache = KVCache(get_format(format), key)
    with recording() as launches:
        kv_append.append(cache, key, key)
        if counted:
            cache.fix_capacity(1024)
            cache.counts_on_device = True
        kv_decode.decode(cache, query, key[:, :, :q_len], key[:, :, :q_len], None, 0.1, capability)
    assert [launch.kernel.__name__ for launch in launches] == [
        *["append_tokens"] * 2, "attend_to_kv_part", "merge_kv_parts",
    ]  # fmt: skip
    for launch in launches:
        kernel = compile_launch(launch, capability)
        assert kernel.metadata.shared <= SHARED_BYTES.get(capability, SMALLEST_SHARED), launch.kernel.__name__
        code = machine_code(kernel.asm["cubin"])
        assert code.instructions.spills == 0, launch.kernel.__name__
        if launch.kernel is attend_to_kv_part:
            assert code.instructions.matrix_products > 0
