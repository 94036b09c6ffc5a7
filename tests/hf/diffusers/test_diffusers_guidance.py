"""Guidance that perturbs attention: diffusers' layer-skip hooks and PAG pipelines, with our processors in place."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_layer_skip
from diffusers.hooks._helpers import AttentionProcessorRegistry
from diffusers.models.attention_dispatch import attention_backend

import sage_hf
from sage_hf import SageAttnProcessor, SageConfig, record
from sage_hf.config import LayerRule
from sage_hf.diffusers import attention_layers
from tests.helpers.families import Family, family, run
from tests.helpers.tiny_pipelines import image_autoencoder

# family -> the stack of blocks; those whose processors diffusers knows to skip, then those which it does not
REGISTERED = {
    "cogview4": "transformer_blocks",
    "z-image": "layers",
    "hunyuan-image": "transformer_blocks",
    "unet": "mid_block.attentions.0.transformer_blocks",
}
OTHERS = {
    "qwen-image": "transformer_blocks",  # unknown to diffusers 0.35
    "wan-t2v": "blocks",
    "cogvideox": "transformer_blocks",
    "sd3": "transformer_blocks",
    "sd3.5": "transformer_blocks",
    "hunyuan-video": "transformer_blocks",
}
SKIP_SCORES = {"skip_attention": False, "skip_ff": False, "skip_attention_scores": True}
SKIP_ATTENTION = {"skip_attention": True, "skip_ff": False}


def skip(model: torch.nn.Module, name: str, options: dict[str, bool] = SKIP_SCORES) -> None:
    apply_layer_skip(model, LayerSkipConfig(indices=[0], fqn=(REGISTERED | OTHERS)[name], **options))


def unskip(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "_diffusers_hook"):
            HookRegistry.check_if_exists_or_initialize(module).remove_hook("layer_skip_hook", recurse=False)


def processor(model: torch.nn.Module, recipe: str) -> None:
    model.set_attn_processor(SageAttnProcessor(recipe, "emulate"))


def apply(model: torch.nn.Module, recipe: str) -> None:
    sage_hf.apply(model, SageConfig(recipe, "emulate"))


def backend(model: torch.nn.Module, recipe: str) -> None:
    model.set_attention_backend("sage_exact" if recipe == "exact" else f"{recipe}_emulate")


Switch = Callable[[torch.nn.Module, str], None]
WAYS = (processor, apply, backend)
each_way = pytest.mark.parametrize("switch", WAYS, ids=lambda way: way.__name__)


@functools.cache
def processors_of_others() -> frozenset[type]:
    """The classes of the processors of OTHERS."""
    models = [family(name).build() for name in OTHERS]
    return frozenset(type(layer.processor) for model in models for layer in attention_layers(model).values())


@pytest.fixture
def every_family_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' registry with the processors of OTHERS in it, which diffusers' own hook refuses."""
    known = AttentionProcessorRegistry.get(diffusers.models.attention_processor.AttnProcessor2_0)
    registry = dict.fromkeys(processors_of_others(), known) | AttentionProcessorRegistry._registry
    monkeypatch.setattr(AttentionProcessorRegistry, "_registry", registry)


def hooked_by_diffusers(case: Family, options: dict[str, bool] = SKIP_SCORES) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs without and with the hook, of diffusers' own processors."""
    model, inputs = case.build(), case.make_inputs()
    plain = run(model, inputs)
    skip(model, case.name, options)
    return plain, run(model, inputs)


# Each family by one of the switches, with the hook before or after it in turn; the audit runs all.
ORDERS = list(itertools.product(WAYS, (False, True)))


@pytest.mark.parametrize(
    ("name", "switch", "hook_first"),
    [
        pytest.param(name, *order, marks=() if order == ORDERS[place % len(ORDERS)] else pytest.mark.audit)
        for place, name in enumerate(REGISTERED | OTHERS)
        for order in ORDERS
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_scores_are_skipped_as_with_diffusers_processors(
    name: str, hook_first: bool, switch: Switch, every_family_registered: None
):
    case = family(name)
    plain, expected = hooked_by_diffusers(case)
    assert not torch.equal(expected, plain)
    model, inputs = case.build(), case.make_inputs()
    if hook_first:
        skip(model, name)
        switch(model, "exact")
    else:
        switch(model, "exact")
        skip(model, name)
    assert torch.equal(run(model, inputs), expected)
    switch(model, "sage3")
    record.clear()
    run(model, inputs)
    for layer_name, layer in attention_layers(model).items():
        skipped = layer_name.startswith(f"{(REGISTERED | OTHERS)[name]}.0.") and not layer.is_cross_attention
        assert bool(record.last_plans(layer)) != skipped, layer_name
    unskip(model)
    switch(model, "exact")
    assert torch.equal(run(model, inputs), plain)


@pytest.mark.parametrize("name", ["cogview4", "unet", "z-image"])
def test_attention_is_skipped_as_with_diffusers_processors(name: str):
    case = family(name)
    _, expected = hooked_by_diffusers(case, SKIP_ATTENTION)
    model, inputs = case.build(), case.make_inputs()
    processor(model, "exact")
    skip(model, name, SKIP_ATTENTION)
    assert torch.equal(run(model, inputs), expected)


def test_skipping_the_attention_of_a_family_unknown_to_diffusers_is_refused():
    model, inputs = family("cogvideox").draw()
    processor(model, "exact")
    skip(model, "cogvideox", SKIP_ATTENTION)
    with pytest.raises(ValueError, match=r"CogVideoXAttnProcessor2_0.* not registered"):
        run(model, inputs)


def test_our_backends_skip_scores_in_diffusers_processors(every_family_registered: None):
    case = family("qwen-image")
    _, expected = hooked_by_diffusers(case)
    model, inputs = case.build(), case.make_inputs()
    skip(model, "qwen-image")
    with attention_backend("sage_exact"):
        assert torch.equal(run(model, inputs), expected)
    assert record.outcomes_outside_layers().total() == 1  # of the two layers


@pytest.mark.parametrize("name", ["wan-t2v", pytest.param("cogvideox", marks=pytest.mark.audit)])
def test_scores_are_skipped_in_compiled_blocks(
    name: str, request: pytest.FixtureRequest, every_family_registered: None
):
    if name == "wan-t2v":
        request.getfixturevalue("compilable_dispatch")
    case = family(name)
    _, expected = hooked_by_diffusers(case)
    model, inputs = case.build(), case.make_inputs()
    sage_hf.apply(model, SageConfig("exact", layers=(LayerRule(f"{OTHERS[name]}.0.*", "sage3"),)))
    skip(model, name)
    model.get_submodule(OTHERS[name])[0].compile(backend="eager")
    torch.testing.assert_close(run(model, inputs), expected)


UNET_INPUTS: dict[str, Any] = {"height": 64, "width": 64, "output_type": "latent", "return_dict": False}


def pag_stable_diffusion() -> tuple[Any, torch.nn.Module, dict[str, Any]]:
    model = family("unet").build()
    parts = image_autoencoder(), None, None, model, _euler(), None, None
    pipe = diffusers.StableDiffusionPAGPipeline(*parts, requires_safety_checker=False, pag_applied_layers=["mid"])
    return pipe, model, UNET_INPUTS | _embeds(16)


def pag_sd3() -> tuple[Any, torch.nn.Module, dict[str, Any]]:
    model = family("sd3").build()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.StableDiffusion3PAGPipeline(
        model, scheduler, image_autoencoder(), *[None] * 6, pag_applied_layers=["blocks.1"]
    )
    pooled = {"pooled_prompt_embeds": torch.randn(1, 8), "negative_pooled_prompt_embeds": torch.randn(1, 8)}
    return pipe, model, UNET_INPUTS | _embeds(16) | pooled


def pag_sdxl() -> tuple[Any, torch.nn.Module, dict[str, Any]]:
    added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    added |= {"projection_class_embeddings_input_dim": 6 * 8 + 8}
    model = replace(family("unet"), config=family("unet").config | added).build()
    pipe = diffusers.StableDiffusionXLPAGPipeline(
        image_autoencoder(), *[None] * 4, model, _euler(), add_watermarker=False, pag_applied_layers=["mid"]
    )
    pooled = {"pooled_prompt_embeds": torch.randn(1, 8), "negative_pooled_prompt_embeds": torch.randn(1, 8)}
    return pipe, model, UNET_INPUTS | _embeds(16) | pooled


def pag_pixart() -> tuple[Any, torch.nn.Module, dict[str, Any]]:
    config = {"attention_head_dim": 16, "cross_attention_dim": 32, "out_channels": 8, "sample_size": 8}
    config |= {"use_additional_conditions": False}
    model = Family("pixart-sigma", "PixArtTransformer2DModel", config, dict).build()
    pipe = diffusers.PixArtSigmaPAGPipeline(
        None, None, image_autoencoder(), model, diffusers.DPMSolverMultistepScheduler(), pag_applied_layers=["blocks.1"]
    )
    masks = {"prompt_attention_mask": torch.ones(1, 7), "negative_prompt_attention_mask": torch.ones(1, 7)}
    return pipe, model, UNET_INPUTS | _embeds(16) | masks | {"negative_prompt": None, "use_resolution_binning": False}


def _euler() -> Any:
    return diffusers.EulerDiscreteScheduler(steps_offset=1)


def _embeds(dim: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {"prompt_embeds": torch.randn(1, 7, dim), "negative_prompt_embeds": torch.randn(1, 7, dim)}


PAG = {"stable-diffusion": pag_stable_diffusion, "sdxl": pag_sdxl, "sd3": pag_sd3, "pixart-sigma": pag_pixart}


def generate(pipe: Any, arguments: dict[str, Any]) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipe(num_inference_steps=2, guidance_scale=3.0, pag_scale=2.0, generator=generator, **arguments)[0]


@each_way
@pytest.mark.parametrize("name", PAG)
def test_pag_pipelines_put_our_processors_back(name: str, switch: Switch):
    pipe, model, arguments = PAG[name]()
    expected = generate(pipe, arguments)
    switch(model, "exact")
    ours = dict(model.attn_processors)
    for _ in range(2):
        assert torch.equal(generate(pipe, arguments), expected)
        assert model.attn_processors == ours
    if switch is backend:
        model.reset_attention_backend()
        assert not any(isinstance(p, SageAttnProcessor) for p in model.attn_processors.values())
