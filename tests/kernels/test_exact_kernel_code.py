"""Machine code of the kernels of exact attention on Hopper: MMA instructions, and no spills. `make audit`."""

import pytest
import torch
import triton

from sage_kernels.spec.call import Call, Mask
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.testing.aot import compile_launch, machine_code
from sage_kernels.triton import masked_forward, nonprefix_forward, splitkv_forward
from sage_kernels.triton.common.launch import recording

pytestmark = [
    pytest.mark.audit,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]

HOPPER = (9, 0)
SHARED_BYTES = 227 * 1024  # that a program may have


def call_of(head_dim, kind="none", q_len=1000, kv_len=2048, causal=False, dtype=torch.bfloat16):
    options = {"device": "meta", "dtype": dtype}
    query = torch.empty(2, q_len, 8, head_dim, **options).transpose(1, 2)
    key, value = (torch.empty(2, kv_len, 2, head_dim, **options).transpose(1, 2) for _ in range(2))
    masks = {
        "keys": torch.empty(2, 1, 1, kv_len, dtype=torch.bool, device="meta"),
        "bool": torch.empty(1, 1, q_len, kv_len, dtype=torch.bool, device="meta"),
        "additive": torch.empty(1, 8, q_len, kv_len, **options),
    }
    mask = Mask.of(masks.get(kind), kv_len)
    offset = kv_len - q_len if causal else 0
    return Call(query, key, value, get_recipe("exact"), mask, causal, offset, 0.1)


def compiled(attend, call):
    with recording() as launches:
        attend(call)
    for launch in launches:
        kernel = compile_launch(launch, HOPPER)
        yield launch.kernel.__name__, machine_code(kernel.asm["cubin"]), kernel.metadata.shared


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_leaving_elements_to_another_kernel_costs_no_spills(head_dim, multiprocessors):
    def attend(call):
        nonprefix_forward.attend_nonprefix(call, lambda *arguments: None, 8)

    ((name, code, shared),) = compiled(attend, call_of(head_dim, "keys"))
    assert name == "nonprefix_forward" and code.instructions.matrix_opcodes == {"HGMMA"}
    assert code.instructions.spills == 0 and shared <= SHARED_BYTES // (1 if head_dim > 128 else 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "keys", "bool", "additive"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_with_masks_hoppers_matrix_units_run_without_spills(head_dim, kind, causal, dtype):
    names = []
    for name, code, shared in compiled(masked_forward.attend, call_of(head_dim, kind, causal=causal, dtype=dtype)):
        names.append(name)
        assert code.instructions.spills == 0
        # Programs on one multiprocessor hide each other's softmax.
        programs = 1 if kind == "additive" or head_dim > 128 else 3 if head_dim <= 64 else 2
        assert shared <= SHARED_BYTES // programs
        if name == "masked_forward":
            assert code.instructions.matrix_opcodes == {"HGMMA"}
    assert names[-1] == "masked_forward" and ("list_allowed" in names) == (kind in ("keys", "bool"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_with_a_mask_of_few_keys_one_launch_suffices_without_spills(head_dim, causal):
    ((name, code, _),) = compiled(masked_forward.attend, call_of(head_dim, "keys", 300, 512, causal))
    assert name == "masked_forward" and code.instructions.spills == 0


@pytest.fixture
def multiprocessors(monkeypatch):
    for module in (nonprefix_forward, splitkv_forward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)


@pytest.mark.parametrize("kind", ["none", "keys"])
@pytest.mark.parametrize("q_len", [1, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_queries_run_without_spills(multiprocessors, head_dim, q_len, kind):
    call = call_of(head_dim, kind, q_len=q_len, kv_len=8192, causal=q_len > 1)
    names = []
    for name, code, shared in compiled(splitkv_forward.attend, call):
        names.append(name)
        assert code.instructions.spills == 0 and shared <= SHARED_BYTES
    assert names == ["attend_to_part", "merge_parts"]
