"""The self-check finds Triton's kernels right, on a GPU that is none of those that its bounds were tried on."""

import pytest
import torch

from sage_kernels import backends, examination  # noqa: F401 - `backends` registers the kernels
from sage_kernels.examination import Case
from sage_kernels.registry import Plan, Request

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
    [(Case("sage2", q_heads=4), ""), (Case("sage_bwd", grad=True), "int8_backward")],
    ids=["sage2", "gradients"],
)
def test_a_right_kernel_passes(case, backward):
    plan = Plan(REQUEST, "int8_forward", case.recipe, "native", (), "int8_quantize", backward)
    found = examination.examine(plan, case, torch.device("cpu"))
    assert {one.kernel for one in found} == {"int8_forward", "int8_quantize"} | ({backward} if backward else set())
    for one in found:
        assert one.reason == ""
        assert 0 < one.distance < 1
