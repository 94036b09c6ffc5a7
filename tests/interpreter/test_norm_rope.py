"""The kernel of norm and rotation and that of its gradients compute what the reference does."""

import pytest
import torch

from sage_kernels.heads import Norm, Rope
from sage_kernels.reference import norm_rope as reference
from tests.helpers.heads import CASES, HeadCase, gradients


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_the_reference(case: HeadCase):
    from sage_kernels.triton import norm_rope as kernel

    x, norm, rope = case.draw(torch.bfloat16)
    output = kernel.forward(x, norm, rope)
    case.judge(output, x, norm, rope)


@pytest.mark.parametrize("case", [case for case in CASES if not case.across_heads], ids=str)
def test_gradients_equal_those_of_the_reference(case: HeadCase):
    from sage_kernels.triton import norm_rope as kernel

    x, norm, rope = case.draw(torch.bfloat16)
    gradient = torch.randn(x.shape, dtype=x.dtype)
    found = kernel.backward(gradient, x, norm, rope)
    case.judge_gradients(found, gradient, x, norm, rope)
