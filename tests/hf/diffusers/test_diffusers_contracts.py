"""Expectations that models and pipelines of diffusers have of the processors in their layers."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn

import sage_hf
from sage_hf.app.prediction import predict
from sage_hf.config import SageConfig
from sage_hf.diffusers import SageAttnProcessor, UnsupportedAttentionError, attention_layers
from tests.helpers import tiny_pipelines as tiny
from tests.helpers.families import Family, family, run

Inputs = dict[str, Any]


def build(name: str, **config: Any) -> nn.Module:
    return Family(name, name, config, dict).build()


def ace_step() -> tuple[nn.Module, Inputs]:
    """Layers with a window of 4 tokens in turn with full ones."""
    model = build(
        "AceStepTransformer1DModel",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_key_value_heads=1,
        head_dim=16,
        in_channels=12,
        audio_acoustic_hidden_dim=4,
        sliding_window=4,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    inputs = {
        "hidden_states": torch.randn(1, 64, 4),
        "timestep": torch.tensor([0.5]),
        "timestep_r": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, 5, 32),
        "context_latents": torch.randn(1, 64, 8),
    }
    return model, inputs


ENTRY_POINTS = {
    "apply": lambda model, recipe: sage_hf.apply(model, recipe),
    "processor": lambda model, recipe: model.set_attn_processor(SageAttnProcessor(recipe)),
    "backend": lambda model, recipe: model.set_attention_backend("sage_exact" if recipe == "exact" else recipe),
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
@pytest.mark.parametrize("recipe", ["exact", "sage1"])
def test_a_sliding_window_stays_when_another_model_chose_flash_attention(entry_point, recipe, monkeypatch):
    model, inputs = ace_step()
    expected = run(model, inputs)
    entry_point(model, recipe)
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.FLASH)
    assert (run(model, inputs) - expected).norm() < (1e-6 if recipe == "exact" else 0.01) * expected.norm()


def test_a_model_of_ours_keeps_its_recipe_when_its_backend_is_set_or_reset(sage_log):
    model = family("flux").build()
    model.set_attn_processor(SageAttnProcessor("sage2"))
    model.set_attention_backend("native")
    assert any("does not reach" in message for message in sage_log)
    model.reset_attention_backend()
    backends = {module.processor._attention_backend.value for module in attention_layers(model).values()}
    assert backends == {"sage2"}


def any_flow() -> tuple[nn.Module, Inputs]:
    model = build("AnyFlowFARTransformer3DModel", freq_dim=16, ffn_dim=32, num_layers=1, chunk_partition=(1, 1))
    inputs = {
        "hidden_states": torch.randn(1, 2, 4, 8, 8),
        "timestep": torch.full((1, 2), 500.0),
        "r_timestep": torch.full((1, 2), 250.0),
        "encoder_hidden_states": torch.randn(1, 8, 16),
        "chunk_partition": [1, 1],
    }
    return model, inputs


@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_layers_that_need_flex_attention_keep_it_and_explain_says_so(entry_point, sage_log):
    model, inputs = any_flow()
    expected = run(model, inputs)
    before = dict(model.attn_processors)
    handle = entry_point(model, "exact")
    torch.testing.assert_close(run(model, inputs), expected)
    assert any("works with the attention backends flex, _native_flex alone" in message for message in sage_log)
    rows = sage_hf.explain(model).rows
    kept = [row for row in rows if "alone" in row.reason]
    assert kept and all(row.calls > 0 for row in rows if row not in kept)
    if handle is not None:
        handle.restore()
        assert all(model.attn_processors[name] is processor for name, processor in before.items())


def test_a_plan_says_which_layers_will_stay_as_they_are(tmp_path):
    model, _ = any_flow()
    model.save_pretrained(tmp_path)
    planned = predict(tmp_path, SageConfig("sage2"), torch.device("cpu"))
    with sage_hf.apply(model, "sage2"):
        applied = sage_hf.explain(model)
    assert [(row.layer, row.asked) for row in planned.rows] == [(row.layer, row.asked) for row in applied.rows]
    kept, run_by_us = planned.rows
    assert kept.asked == kept.recipe == "" and "alone" in kept.reason and run_by_us.recipe == "sage2"
    assert "its own" in str(planned)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_a_model_whose_layers_all_need_flex_attention_is_refused(entry_point):
    model = build(
        "LTX2VideoDiffusionDecoderModel",
        latent_channels=4,
        decoder_head_dim=8,
        decoder_stage_channels=(64, 32, 16, 16, 8),
        decoder_stage_depths=(1, 1, 1, 1, 1),
        decoder_t_emb_dim=8,
    )
    before = dict(model.attn_processors)
    with pytest.raises(ValueError, match="works with the attention backends flex, _native_flex alone"):
        entry_point(model, "exact")
    assert all(model.attn_processors[name] is processor for name, processor in before.items())


@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
@pytest.mark.parametrize("recipe", [pytest.param("exact", marks=pytest.mark.audit), "sage1"])
def test_masks_that_flex_attention_alone_reads_are_left_to_it(entry_point, recipe, sage_log, monkeypatch):
    """Kandinsky 5 chooses tiles of its video by a BlockMask, and tells its users to switch to FlexAttention."""
    model, inputs = family("kandinsky-5").draw()
    inputs["hidden_states"] = torch.randn(1, 3, 32, 32, 4)
    inputs["visual_rope_pos"] = [torch.arange(3), torch.arange(16), torch.arange(16)]
    inputs["sparse_params"] = {"sta_mask": torch.eye(12).bool()[None, None], "to_fractal": True, "P": 0.5}
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE)  # put back after it
    model.set_attention_backend("flex")
    expected = run(model, inputs)
    entry_point(model, recipe)
    assert (run(model, inputs) - expected).norm() < (1e-6 if recipe == "exact" else 0.01) * expected.norm()
    (row,) = (row for row in sage_hf.explain(model).rows if "visual" in row.layer and "self_attention" in row.layer)
    assert (row.calls, row.reason) == (0, "FlexAttention ran, which alone reads the layer's mask, a BlockMask")
    assert any("a BlockMask" in message for message in sage_log)


def qwen_image_21() -> tuple[nn.Module, Inputs]:
    """Text, and 4 × 4 latents; four of these are one of the text encoder's image tokens."""
    model = build("QwenImage21Transformer2DModel", context_in_dim=16)
    image = torch.tensor([[False] * 7 + [True] * 4])
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 4, 4)]],
        "img_mask": image,
    }
    return model, inputs


def test_processors_that_name_no_backend_run_the_recipe_all_the_same():
    model, inputs = qwen_image_21()
    expected = run(model, inputs)
    with sage_hf.apply(model, "exact"):
        torch.testing.assert_close(run(model, inputs), expected)
    with sage_hf.apply(model, sage_hf.SageConfig("sage1", fallback="emulate")):
        found = run(model, inputs)
        assert {(row.recipe, row.calls) for row in sage_hf.explain(model).rows} == {("sage1", 2)}
    with sage_hf.apply(model, sage_hf.SageConfig("sage_bwd", fallback="emulate")):
        model(**inputs, return_dict=False)[0].sum().backward()
        calls = {(row.recipe, row.calls) for row in sage_hf.explain(model).rows}
        assert calls == {("sage_bwd", 1), ("exact", 1)}  # text: causal behind a prefix, which is a mask
    assert 0 < (found - expected).norm() < 0.02 * expected.norm()
    assert _AttentionBackendRegistry.get_active_backend()[0].value == "native"


@pytest.mark.parametrize("wraps", [False, True])
def test_a_processor_of_diffusers_that_was_patched_is_refused(wraps, monkeypatch):
    call = AttnProcessor2_0.__call__

    def half(self, *args, **kwargs):
        return call(self, *args, **kwargs) / 2

    monkeypatch.setattr(AttnProcessor2_0, "__call__", functools.wraps(call)(half) if wraps else half)
    with pytest.raises(UnsupportedAttentionError, match="AttnProcessor2_0"):
        sage_hf.apply(family("unet").build(), "exact")


@pytest.mark.parametrize("name", ["unet", "sd3"])
def test_a_processor_of_diffusers_that_is_patched_later_runs_as_it_is(name, monkeypatch):
    model, inputs = family(name).build(), family(name).make_inputs()
    original: Any = type(next(iter(attention_layers(model).values())).processor)
    handle = sage_hf.apply(model, "sage1", fallback="emulate")
    before = run(model, inputs)
    call = original.__call__

    def without_attention(self, attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
        return hidden_states if name == "unet" else (hidden_states, encoder_hidden_states)

    monkeypatch.setattr(original, "__call__", without_attention)
    found = run(model, inputs), run(copy.deepcopy(model), inputs), run(torch.compile(model, backend="eager"), inputs)
    row = sage_hf.explain(model).rows[0]
    handle.restore()
    for one in found:
        torch.testing.assert_close(one, run(model, inputs))
    assert "__call__, which was patched" in row.reason
    monkeypatch.setattr(original, "__call__", call)
    sage_hf.apply(model, "sage1", fallback="emulate")
    assert torch.equal(run(model, inputs), before)


class NamesNoBackend:
    """A user's processor that leaves its attention to diffusers."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        heads = [
            x.unflatten(2, (attn.heads, -1)) for x in (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        ]
        return attn.to_out[0](dispatch_attention_fn(*heads).flatten(2))


def test_a_users_processor_that_names_no_backend_runs_the_recipe(sage_log):
    model, inputs = family("wan-t2v").build(), family("wan-t2v").make_inputs()
    for module in attention_layers(model).values():
        module.set_processor(NamesNoBackend())
    expected = run(model, inputs)
    with sage_hf.apply(model, "exact"):
        assert torch.equal(run(model, inputs), expected)
    sage_hf.apply(model, sage_hf.SageConfig("sage1", fallback="emulate"))
    assert not torch.equal(run(model, inputs), expected)
    assert {row.recipe for row in sage_hf.explain(model).rows} == {"sage1"}
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(run(compiled, inputs), expected)
    assert any("NamesNoBackend names no attention backend" in message for message in sage_log)


@pytest.mark.parametrize("name", ["wan-t2v", "unet"])
def test_a_users_processor_that_goes_on_with_its_base_class_computes_what_it_did(name, sage_log):
    model, inputs = family(name).build(), family(name).make_inputs()
    base: Any = type(next(iter(attention_layers(model).values())).processor)

    class GoesOn(base):
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
            if encoder_hidden_states is None:
                return super().__call__(attn, hidden_states, None, attention_mask, rotary_emb)
            context = attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states)
            heads = [x.unflatten(2, (attn.heads, -1)) for x in (attn.to_q(hidden_states), *context)]
            return 2 * attn.to_out[0](dispatch_attention_fn(*heads).flatten(2))

    GoesOn.__name__ = name  # a message is logged once for each
    for module in attention_layers(model).values():
        module.set_processor(GoesOn())
    expected = run(model, inputs)
    with sage_hf.apply(model, "exact"):
        assert torch.equal(run(model, inputs), expected)
        torch.testing.assert_close(run(torch.compile(model, backend="eager"), inputs), expected)
    assert any(f"{name} calls super() in some calls" in message for message in sage_log)
    with sage_hf.apply(model, sage_hf.SageConfig("sage1", fallback="emulate")):
        assert 0 < (run(model, inputs) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("entry_point", [sage_hf.apply, lambda model, name: model.set_attention_backend(name)])
def test_a_users_own_attention_over_ours_is_not_dropped(entry_point):
    class Doubles(SageAttnProcessor):
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return 2 * super().__call__(attn, hidden_states, *args, **kwargs)

    model, inputs = family("unet").build(), family("unet").make_inputs()
    model.set_attn_processor(Doubles("exact"))
    expected = run(model, inputs)
    with pytest.raises(UnsupportedAttentionError, match="Doubles, which overrides __call__"):
        entry_point(model, "sage2")
    assert torch.equal(run(model, inputs), expected)


class EverySecond:
    """A user's processor that keeps count, and attends in every second call."""

    calls = 0

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        self.calls += 1
        dispatched = dispatch_attention_fn(*[attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))] * 3).flatten(2)
        return attn.to_out[0](dispatched * (self.calls % 2))


def test_what_a_users_processor_writes_down_is_its_own():
    model, inputs = family("wan-t2v").build(), family("wan-t2v").make_inputs()
    processors = {name: EverySecond() for name in attention_layers(model)}
    for name, module in attention_layers(model).items():
        module.set_processor(processors[name])
    expected = [run(model, inputs) for _ in range(2)]
    with sage_hf.apply(model, "exact"):
        assert all(torch.equal(run(model, inputs), one) for one in expected)
    assert {processor.calls for processor in processors.values()} == {4}


class Weighted(nn.Module):
    """A user's processor with a weight and a setting."""

    _attention_backend = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))
        self.strength = 0.0

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        heads = [attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))] * 3
        attended = dispatch_attention_fn(*heads, backend=self._attention_backend).flatten(2)
        return attn.to_out[0](attended * self.weight) + self.strength


def test_a_users_processor_and_ours_share_their_settings():
    model, inputs = family("wan-t2v").build(), family("wan-t2v").make_inputs()
    layers = attention_layers(model).values()
    processors = [Weighted() for _ in layers]
    for module, processor in zip(layers, processors, strict=True):
        module.set_processor(processor)
    off = run(model, inputs)
    for processor in processors:
        processor.strength = 1.0
    on = run(model, inputs)
    with sage_hf.apply(model, "exact"):
        assert torch.equal(run(model, inputs), on)
        for module in layers:
            module.processor.strength = 0.0
        assert torch.equal(run(model, inputs), off)
        for processor in processors:
            processor.strength = 1.0
        assert {module.processor.strength for module in layers} == {1.0}


class Boosts:
    """A user's processor that takes a keyword of its own."""

    _attention_backend = None

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, mask=None, image_rotary_emb=None, boost=1.0):
        heads = [attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))] * 3
        attended = dispatch_attention_fn(*heads, backend=self._attention_backend).flatten(2) * boost
        return attended if encoder_hidden_states is None else (attn.to_out[0](attended), encoder_hidden_states)


def test_a_keyword_of_some_processors_is_dropped_for_the_others_as_diffusers_does(sage_log):
    model, inputs = family("flux").build(), family("flux").make_inputs()
    model.transformer_blocks[0].attn.set_processor(Boosts())
    inputs |= {"joint_attention_kwargs": {"boost": 3.0}}
    expected = run(model, inputs)
    with sage_hf.apply(model, "exact"):
        assert torch.equal(run(model, inputs), expected)
    assert any("['boost'] are not expected by FluxAttnProcessor" in message for message in sage_log)


def test_explain_says_where_attention_passed_by(sage_log):
    class Elsewhere:
        """A user's processor that dispatches in some calls only."""

        _attention_backend = None

        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
            if attn.training:
                return dispatch_attention_fn(*[hidden_states] * 3, backend=self._attention_backend)
            return hidden_states

    model = family("wan-t2v").build()
    for module in attention_layers(model).values():
        module.set_processor(Elsewhere())
    sage_hf.apply(model, "sage1")
    run(model, family("wan-t2v").make_inputs())
    assert all("Elsewhere attended by no backend" in row.reason for row in sage_hf.explain(model).rows)
    assert sum("Elsewhere attended by no backend" in message for message in sage_log) == 1


def test_every_denoiser_of_a_pipeline_is_found_by_what_it_is():
    unconditional = tiny.transformer()
    prior = build("PriorTransformer", num_layers=1, embedding_dim=16)
    vae = build("AutoencoderKL", block_out_channels=(32,), norm_num_groups=8)
    assert attention_layers(vae)
    pipe = types.SimpleNamespace(
        transformer=tiny.transformer(), unconditional_transformer=unconditional, prior=prior, vae=vae, scale=3
    )
    with sage_hf.apply(pipe, "sage2"):
        for model in (pipe.transformer, unconditional, prior):
            assert all(isinstance(one.processor, SageAttnProcessor) for one in attention_layers(model).values())
        assert not any(isinstance(one.processor, SageAttnProcessor) for one in attention_layers(vae).values())
        found = {row.layer.split(".")[0] for row in sage_hf.explain(pipe).rows}
        assert found == {"transformer", "unconditional_transformer", "prior"}


@pytest.mark.parametrize("part", ["prior", "decoder"])
def test_stable_cascades_models_are_found_where_they_are_alone(part):
    model = build(
        "StableCascadeUNet",
        conditioning_dim=16,
        block_out_channels=(16, 16),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        clip_text_pooled_in_channels=16,
        timestep_ratio_embedding_dim=8,
    )
    pipe = types.SimpleNamespace(**{part: model})
    inputs = {
        "sample": torch.randn(1, 4, 8, 8),
        "timestep_ratio": torch.tensor([0.5]),
        "clip_text_pooled": torch.randn(1, 1, 16),
    }
    expected = run(model, inputs)
    with sage_hf.apply(pipe, "exact"):
        assert torch.equal(run(model, inputs), expected)
        assert all(row.calls for row in sage_hf.explain(pipe).rows)


@pytest.mark.parametrize("case", ["cogvideox", "sd3", "unet"])
def test_restore_gives_back_what_diffusers_would_have_after_fusing_projections(case):
    model = family(case).build()
    before = dict(model.attn_processors)
    model.fuse_qkv_projections()
    fused = dict(model.attn_processors)
    assert not any(processor in before.values() for processor in fused.values())
    for change, expected in ((model.unfuse_qkv_projections, before), (model.fuse_qkv_projections, None)):
        handle = sage_hf.apply(model, "exact")
        change()
        assert all(isinstance(processor, SageAttnProcessor) for processor in model.attn_processors.values())
        handle.restore()
        now = dict(model.attn_processors)
        if expected is not None:
            assert all(now[name] is processor for name, processor in expected.items())
        else:
            assert {type(now[name]) for name in now} == {type(processor) for processor in fused.values()}


def test_a_lora_of_the_unfused_projections_counts_after_restore():
    model, inputs = family("cogvideox").draw()
    model.fuse_qkv_projections()
    handle = sage_hf.apply(model, "sage1")
    model.unfuse_qkv_projections()
    handle.restore()
    before = run(model, inputs)
    with torch.no_grad():
        next(iter(attention_layers(model).values())).to_q.weight.mul_(2)
    assert not torch.equal(run(model, inputs), before)
