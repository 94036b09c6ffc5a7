"""The self-check finds Triton's kernels right, on a GPU that is none of those that its bounds were tried on."""

from dataclasses import replace

import pytest
import torch

from sage_kernels import backends  # noqa: F401 - `backends` registers the kernels
from sage_kernels.dispatch import examination, kv_kernels
from sage_kernels.dispatch.examination import CheckCase
from sage_kernels.dispatch.plan import Plan
from sage_kernels.dispatch.request import Request
from sage_kernels.triton import kv_append, kv_decode
from sage_kernels.triton.registration import TritonKVKernel
from tests.helpers.portable_fp4 import without_inline_assembly

ADA = (8, 9)
REQUEST = Request("sage2", "cuda", ADA, torch.bfloat16, 2, 2, 2, 200, 333, 64, 64, "none", False, False)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Ada's kernels, and cases that the interpreter runs in seconds."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: ADA)
    monkeypatch.setattr(examination, "Q_LEN", 72)
    monkeypatch.setattr(examination, "KV_LEN", 150)


@pytest.mark.parametrize(
    ("case", "backward"),
    [
        (CheckCase("sage2", q_heads=4), ""),
        pytest.param(CheckCase("sage_bwd", grad=True), "int8_backward", marks=pytest.mark.audit),
    ],
    ids=["sage2", "gradients"],
)
def test_a_right_kernel_passes(case, backward):
    plan = Plan(REQUEST, "int8_forward", case.recipe, "native", (), "int8_quantize", backward)
    found = examination.examine(plan, case, torch.device("cpu"))
    assert {one.kernel for one in found} == {"int8_forward", "int8_quantize"} | ({backward} if backward else set())
    for one in found:
        assert one.reason == ""
        assert 0 < one.distance < 1


def test_the_native_nvfp4_kernel_passes(monkeypatch):
    """Imitate consumer Blackwell, with its tensor cores' products and roundings in portable functions."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    without_inline_assembly(monkeypatch)
    request = replace(REQUEST, recipe="sage3", capability=(12, 0))
    plan = Plan(request, "nvfp4_forward", "sage3", "native", (), "nvfp4_quantize")
    forward, quantizer = examination.examine(plan, CheckCase("sage3"), torch.device("cpu"))
    assert (forward.kernel, quantizer.kernel) == ("nvfp4_forward", "nvfp4_quantize")
    assert forward.reason == "" and 0 < forward.distance < 1


class InterpretedKVKernel(TritonKVKernel):
    """The kernel on a CPU's tensors."""

    def unsupported(self, cache, query):
        return ""

    def append(self, cache, key, value):
        kv_append.append(cache, key, value)

    def decode(self, *arguments):
        return kv_decode.decode(*arguments, (9, 0))


@pytest.mark.parametrize(("format", "head_dim"), [("int4", 128), ("int8", 64)])
def test_the_kv_caches_kernel_passes(format, head_dim, monkeypatch):
    kernels = {"kv_decode": InterpretedKVKernel(), "reference": kv_kernels.reference_kv_kernel()}
    monkeypatch.setattr(kv_kernels, "_kernels", kernels)
    found = examination.examine_kv(format, head_dim, torch.device("cpu"))
    assert (found.kernel, found.reason) == ("kv_decode", "")
    assert 0 < found.distance < 1
