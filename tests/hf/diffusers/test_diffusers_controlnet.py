"""ControlNets are switched like denoisers, and with the pipeline that they belong to."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel

import sage_hf
from sage_hf import SageAttnProcessor, SageConfig, record
from sage_hf.config import StepRule
from sage_hf.diffusers import attention_layers
from tests.helpers.families import family
from tests.helpers.tiny_pipelines import image_autoencoder


def controlnet(seed: int = 0) -> torch.nn.Module:
    unet = family("unet").build()
    torch.manual_seed(seed)
    model = diffusers.ControlNetModel.from_unet(unet, conditioning_channels=3).eval()
    with torch.no_grad():
        for block in (
            *model.controlnet_down_blocks,
            model.controlnet_mid_block,
            model.controlnet_cond_embedding.conv_out,
        ):
            block.weight.normal_(std=0.2)  # starts at 0, which would hide the ControlNet
    return model


def pipeline(several: bool) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    pipe = diffusers.StableDiffusionControlNetPipeline(
        image_autoencoder(),
        None,
        None,
        family("unet").build(),
        [controlnet(), controlnet(1)] if several else controlnet(),
        diffusers.EulerDiscreteScheduler(steps_offset=1),
        None,
        None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    image = torch.rand(1, 3, 64, 64)
    arguments = {
        "image": [image, image] if several else image,
        "prompt_embeds": torch.randn(1, 7, 16),
        "negative_prompt_embeds": torch.randn(1, 7, 16),
        "num_inference_steps": 2,
        "output_type": "latent",
        "return_dict": False,
    }
    return pipe, arguments


def generate(pipe: Any, arguments: dict[str, Any]) -> torch.Tensor:
    return pipe(**arguments, generator=torch.Generator().manual_seed(0))[0]


@pytest.mark.parametrize("several", [False, True])
def test_apply_switches_the_controlnets_of_a_pipeline(several: bool):
    pipe, arguments = pipeline(several)
    expected = generate(pipe, arguments)
    assert isinstance(pipe.controlnet, MultiControlNetModel) == several
    with sage_hf.apply(pipe, "exact"):
        assert torch.equal(generate(pipe, arguments), expected)
    config = SageConfig("sage3", "emulate", steps=(StepRule(0, 1, "sage1"),))
    with sage_hf.apply(pipe, config):
        record.clear()
        assert not torch.equal(generate(pipe, arguments), expected)
        rows = [row for row in sage_hf.explain(pipe).rows if row.layer.startswith("controlnet.")]
        assert {row.layer for row in rows} == {f"controlnet.{name}" for name in attention_layers(pipe.controlnet)}
        assert {row.recipe for row in rows} == {"sage1", "sage3"}
    assert torch.equal(generate(pipe, arguments), expected)


def test_a_controlnet_is_switched_alone():
    pipe, arguments = pipeline(several=False)
    expected = generate(pipe, arguments)
    pipe.controlnet.set_attn_processor(SageAttnProcessor("sage3", "emulate"))
    low_bit = generate(pipe, arguments)
    assert not torch.equal(low_bit, expected)
    pipe.controlnet.set_attention_backend("sage_exact")
    assert torch.equal(generate(pipe, arguments), expected)
    pipe.controlnet.reset_attention_backend()
    assert torch.equal(generate(pipe, arguments), low_bit)


def test_a_controlnet_without_attention_is_left_alone():
    pipe, _ = pipeline(several=False)
    pipe.controlnet = torch.nn.Conv2d(3, 3, 1)
    with sage_hf.apply(pipe, "sage3"):
        assert not any("controlnet" in row.layer for row in sage_hf.explain(pipe).rows)
