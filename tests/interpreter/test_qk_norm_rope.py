"""The kernel of norm and RoPE, and that of its gradients, compute what the reference does."""

import pytest
import torch

from sage_kernels.triton import qk_norm_rope
from tests.helpers.qk_norm_rope import CASES, QKNormRopeCase


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_computes_the_reference(case: QKNormRopeCase):
    x, norm, rope = case.draw(torch.bfloat16)
    case.judge(qk_norm_rope.forward(x, norm, rope), x, norm, rope)


@pytest.mark.parametrize("case", [case for case in CASES if not case.across_heads], ids=str)
def test_the_kernel_computes_the_gradients_of_the_reference(case: QKNormRopeCase):
    x, norm, rope = case.draw(torch.bfloat16)
    gradient = torch.randn(x.shape).to(x.dtype)
    case.judge_gradients(qk_norm_rope.backward(gradient, x, norm, rope), gradient, x, norm, rope)


def test_programs_add_up_the_parts_of_several_blocks(monkeypatch):
    monkeypatch.setattr(qk_norm_rope, "PARTS", 4)
    case = QKNormRopeCase((2, 131, 3, 64), "layer", "pairs")
    x, norm, rope = case.draw(torch.bfloat16)
    gradient = torch.randn(x.shape).to(x.dtype)
    case.judge_gradients(qk_norm_rope.backward(gradient, x, norm, rope), gradient, x, norm, rope)
