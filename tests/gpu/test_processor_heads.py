"""Norms and rotation by the kernel on a GPU agree with every processor's own operators, and take their place."""

import pytest
import torch

from sage_hf import explain
from sage_hf.diffusers import SageAttnProcessor, heads
from tests.helpers.families import Family, each_family, run
from tests.hf.diffusers.test_diffusers_heads import ROTATED

FLOAT32_ANGLES = "wan-t2v", "wan-i2v", "cogvideox-1.5"  # whose angles this model casts to bfloat16, as tests build it


@each_family
def test_the_kernel_takes_the_place_of_norms_and_rotation(case: Family, monkeypatch: pytest.MonkeyPatch):
    if case.name not in ROTATED or case.name in FLOAT32_ANGLES:
        pytest.skip("its processor rotates nothing, or by angles that the kernel does not take")
    monkeypatch.setattr(heads, "_agreements", {})
    model = case.build(torch.bfloat16).cuda()
    inputs = {name: move(value) for name, value in case.make_inputs(torch.bfloat16).items()}
    model.set_attn_processor(SageAttnProcessor("sage1"))
    run(model, inputs)
    assert explain(model).norm_rope > 0
    assert all(heads._agreements.values())


def move(value):
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {key: move(item) for key, item in value.items()}
    return type(value)(map(move, value)) if isinstance(value, list | tuple) else value
