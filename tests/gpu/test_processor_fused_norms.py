"""Norms and RoPE by the kernel on a GPU agree with every processor's own operators, and take their place."""

import pytest
import torch

from sage_hf import explain
from sage_hf.diffusers import SageAttnProcessor, fused_norms
from tests.helpers.families import Family, each_family, run
from tests.hf.diffusers.test_diffusers_fused_norms import WITH_ROPE


@each_family
def test_the_kernel_takes_the_place_of_norms_and_rotation(case: Family, monkeypatch: pytest.MonkeyPatch):
    if case.name not in WITH_ROPE:
        pytest.skip("its processor applies no RoPE that the kernel computes")
    monkeypatch.setattr(fused_norms, "_agreements", {})
    monkeypatch.setattr(fused_norms, "LARGE_SAMPLE", 0)  # elements below which PyTorch runs its own layer norms
    model = case.build(torch.bfloat16)
    inputs = case.make_inputs(torch.bfloat16)
    if hasattr(model, "rope"):
        model.rope = case.build().rope  # angles stay in float32, as in models that are loaded
    if "image_rotary_emb" in inputs:
        inputs["image_rotary_emb"] = case.make_inputs()["image_rotary_emb"]
    model.cuda().set_attn_processor(SageAttnProcessor("sage1"))
    run(model, {name: move(value) for name, value in inputs.items()})
    assert explain(model).qk_norm_rope > 0
    assert fused_norms._agreements and all(fused_norms._agreements.values())


def move(value):
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {key: move(item) for key, item in value.items()}
    return type(value)(map(move, value)) if isinstance(value, list | tuple) else value
