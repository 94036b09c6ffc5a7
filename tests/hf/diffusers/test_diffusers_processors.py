"""Promises of SageAttnProcessor beyond its families' numerics."""

from __future__ import annotations

import copy
import inspect
import pickle
from unittest import mock

import diffusers
import pytest
import torch
from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention, AttnProcessor, CustomDiffusionAttnProcessor2_0

import sage_hf
from sage_hf import (
    SageAttn1Processor,
    SageAttn2Processor,
    SageAttn3Processor,
    SageAttnProcessor,
    SageBwdProcessor,
    record,
)
from sage_hf.diffusers import UnsupportedAttentionError, attention_layers, bind
from tests.helpers.families import Family, each_family, family, run


@pytest.mark.parametrize(
    ("processor_class", "recipe"),
    [
        (SageAttn3Processor, "sage3"),
        (SageAttn2Processor, "sage2"),
        (SageAttn1Processor, "sage1"),
        (SageBwdProcessor, "sage_bwd"),
    ],
)
def test_processors_are_made_without_arguments_and_hold_no_weights(processor_class, recipe):
    processor = processor_class()
    assert isinstance(processor, SageAttnProcessor)
    assert not isinstance(processor, torch.nn.Module)
    assert (processor.recipe, processor.fallback) == (recipe, None)
    assert type(processor)().recipe == recipe  # as IP-Adapter loaders do


@pytest.mark.parametrize("make", [SageAttnProcessor, SageAttn3Processor])
def test_unknown_recipe_is_refused_with_those_that_exist(make):
    with pytest.raises(ValueError, match=r"sage4.*exact.*sage1.*sage2.*sage3"):
        make("sage4")


def test_unknown_fallback_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"slow.*native.*emulate.*error"):
        SageAttnProcessor("sage3", fallback="slow")


@each_family
def test_one_shared_instance_sits_in_every_layer(case):
    model, processor = case.build(), SageAttn3Processor()
    names = set(model.attn_processors)
    model.set_attn_processor(processor)

    assert set(model.attn_processors) == names == {f"{name}.processor" for name in attention_layers(model)}
    assert all(present is processor for present in model.attn_processors.values())


def test_recipe_of_a_shared_processor_may_change_between_calls():
    case = family("hunyuan-video")
    model, inputs, processor = case.build(), case.make_inputs(), SageAttnProcessor("sage3", "emulate")
    expected = run(model, inputs)
    model.set_attn_processor(processor)
    low_bit = run(model, inputs)
    processor.recipe = "exact"
    assert torch.equal(run(model, inputs), expected)
    processor.recipe = "sage3"
    assert torch.equal(run(model, inputs), low_bit)
    with pytest.raises(ValueError, match="unknown recipe 'sage9'"):
        processor.recipe = "sage9"
    assert processor.recipe == "sage3"


def test_a_setting_that_our_processors_do_not_have_is_refused_and_not_ignored():
    class Counting(SageAttnProcessor):
        calls = 0

    processor = Counting("sage1")
    processor.calls = 1
    for name in ("receipe", "strength"):
        with pytest.raises(AttributeError, match=f"no setting '{name}'"):
            setattr(processor, name, "sage2")


@pytest.mark.parametrize("name", ["flux-2", "hunyuan-video", "wan-t2v"])
def test_a_processor_of_apply_may_be_set_elsewhere(name):
    """Each layer computes what it did, and gets its own processor back."""
    case = family(name)
    model, other = case.build(), case.build()
    before, expected = dict(model.attn_processors), run(model, case.make_inputs())
    handle = sage_hf.apply(model, "exact")
    processor = list(model.attn_processors.values())[-1]
    for one in (model, other):
        one.set_attn_processor(processor)
        assert all(present is processor for present in one.attn_processors.values())
        assert torch.equal(run(one, case.make_inputs()), expected)
    handle.restore()
    assert all(present is before[name] for name, present in model.attn_processors.items())
    assert torch.equal(run(model, case.make_inputs()), expected)


def test_bind_chooses_without_changing_the_module():
    model = family("wan-t2v").build()
    for module in attention_layers(model).values():
        before, attributes = module.processor, dict(vars(module))
        assert bind(module, "sage2", "emulate").recipe == "sage2"
        assert module.processor is before
        assert vars(module) == attributes


@pytest.mark.parametrize("name", ["cogvideox-1.5", "wan-i2v"])
def test_processors_may_replace_each_other(name):
    model, inputs = family(name).draw()
    expected = run(model, inputs)
    model.set_attn_processor(SageAttn3Processor())
    model.set_attn_processor(SageAttn2Processor())
    for module in attention_layers(model).values():
        module.set_processor(bind(module, "sage1"))
    model.set_attn_processor(SageAttnProcessor("exact"))

    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["cogvideox", "wan-t2v"])
def test_switched_models_can_be_copied_and_pickled(name, clone):
    model, inputs = family(name).draw()
    model.set_attn_processor(SageAttnProcessor("sage3", "emulate"))
    twin = clone(model)
    assert torch.equal(run(twin, inputs), run(model, inputs))
    next(iter(twin.attn_processors.values())).recipe = "exact"
    assert next(iter(model.attn_processors.values())).recipe == "sage3"


def test_a_process_that_only_loads_switched_models_passes_every_argument_on(monkeypatch):
    model, inputs = family("cogvideox-1.5").draw()
    expected = run(model, inputs)
    model.set_attn_processor(SageAttnProcessor("exact"))
    saved = pickle.dumps(model)
    monkeypatch.delattr(SageAttnProcessor.__call__, "__signature__")
    monkeypatch.setattr("sage_hf.diffusers.layers._shown", dict.fromkeys(("self", "attn")))
    assert torch.equal(run(pickle.loads(saved), inputs), expected)


def test_linear_attention_is_refused_by_name_and_nothing_is_changed():
    cross_attention = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 32, "cross_attention_dim": 64}
    model = Family("sana", "SanaTransformer2DModel", {"num_layers": 1} | cross_attention, dict).build()
    before = dict(model.attn_processors)
    message = r"transformer_blocks\.0\.attn1.*Attention.*SanaLinearAttnProcessor2_0"
    with pytest.raises(UnsupportedAttentionError, match=message):
        model.set_attn_processor(SageAttn3Processor())
    with pytest.raises(UnsupportedAttentionError, match=message):
        model.set_attention_backend("sage3")
    assert model.attn_processors == before
    with pytest.raises(UnsupportedAttentionError, match="SanaLinearAttnProcessor2_0"):
        bind(model.transformer_blocks[0].attn1)


def test_a_dictionary_may_leave_unsupported_layers_as_they_are():
    model = family("unet").build()
    name = "mid_block.attentions.0.transformer_blocks.0.attn2"
    attention = model.get_submodule(name)
    attention.set_processor(CustomDiffusionAttnProcessor2_0(hidden_size=64, cross_attention_dim=16))
    with pytest.raises(UnsupportedAttentionError, match=rf"{name}.*drop the weights"):
        model.set_attn_processor(SageAttn3Processor())

    shared = SageAttn3Processor()
    model.set_attn_processor(
        {key: old if key == f"{name}.processor" else shared for key, old in model.attn_processors.items()}
    )
    assert isinstance(attention.processor, CustomDiffusionAttnProcessor2_0)
    assert sum(processor is shared for processor in model.attn_processors.values()) == len(model.attn_processors) - 1


def test_models_without_attention_are_refused():
    model = diffusers.T2IAdapter(channels=(32,), num_res_blocks=1)
    for switch in (model.set_attn_processor, lambda _: model.set_attention_backend("sage3")):
        with pytest.raises(UnsupportedAttentionError, match="T2IAdapter has no attention layer"):
            switch(SageAttn3Processor())


def test_assigning_a_shared_processor_behind_set_processor_says_what_to_do():
    attention = Attention(query_dim=32, heads=2, dim_head=16)
    original, states = attention.processor, torch.randn(1, 8, 32)
    expected = attention(states)
    attention.processor = SageAttn3Processor()
    for use in (
        lambda: attention(states),
        lambda: bind(attention),
        lambda: attention.set_processor(SageAttnProcessor()),
    ):
        with pytest.raises(UnsupportedAttentionError, match=r"module\.set_processor"):
            use()
    attention.set_processor(original)
    attention.set_processor(SageAttnProcessor("exact"))
    assert torch.equal(attention(states), expected)


FUSED = {"to_qkv", "to_kv", "to_added_qkv", "to_added_kv"}


@pytest.mark.parametrize("name", ["cogvideox-1.5", "sd3.5", "unet", "wan-t2v", "flux"])
def test_qkv_projections_may_be_fused_before_or_after(name):
    model, inputs = family(name).draw()
    originals = dict(model.attn_processors)
    model.set_attn_processor(SageAttnProcessor("exact"))
    expected = run(model, inputs)
    for _ in range(2):
        model.fuse_qkv_projections()
        assert {type(processor) for processor in model.attn_processors.values()} == {SageAttnProcessor}
        torch.testing.assert_close(run(model, inputs), expected)
        model.unfuse_qkv_projections()
        assert {type(processor) for processor in model.attn_processors.values()} == {SageAttnProcessor}
        assert torch.equal(run(model, inputs), expected)

    model.set_attn_processor(originals)
    model.fuse_qkv_projections()
    fused = dict(model.attn_processors)
    model.set_attn_processor(SageAttnProcessor("exact"))
    torch.testing.assert_close(run(model, inputs), expected)
    model.set_attn_processor(dict(fused))
    assert model.attn_processors == fused


@pytest.mark.parametrize("name", ["cogvideox-1.5", "sd3", "unet", "wan-t2v", "flux"])
def test_fused_projections_count_once_they_were_trained(name):
    model, inputs = family(name).draw()
    model.fuse_qkv_projections()
    untrained = run(model, inputs)
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if FUSED & set(name.split("."))):
            parameter.mul_(1.5)
    expected = run(model, inputs)
    assert not torch.allclose(expected, untrained)
    model.set_attn_processor(SageAttnProcessor("exact"))
    torch.testing.assert_close(run(model, inputs), expected)


@pytest.mark.parametrize("name", ["cogvideox", "mochi", "sd3", "unet", "allegro", "lumina2", "wan-t2v", "cosmos"])
def test_projections_stay_calls_so_that_lora_layers_take_part(name):
    class Doubled(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.base(states) * 2

    model, inputs = family(name).draw()
    for module in attention_layers(model).values():
        module.to_v = Doubled(module.to_v)
    expected = run(model, inputs)
    model.set_attn_processor(SageAttnProcessor("exact"))
    assert torch.equal(run(model, inputs), expected)


def test_non_contiguous_inputs_are_taken_as_they_are():
    torch.manual_seed(0)
    attention = Attention(query_dim=32, heads=2, dim_head=16)
    states, context = torch.randn(32, 2, 70).permute(1, 2, 0), torch.randn(2, 140, 32)[:, ::2]
    expected = attention(states, context)
    attention.set_processor(SageAttnProcessor("exact"))
    assert torch.equal(attention(states, context), expected)


@pytest.mark.parametrize(
    ("options", "shape", "context"),
    [
        ({"norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 2.0}, (2, 32, 9, 8), None),
        ({"spatial_norm_dim": 3, "_from_deprecated_attn_block": True, "upcast_softmax": True}, (2, 32, 9, 8), None),
        ({"cross_attention_dim": 12, "cross_attention_norm": "layer_norm"}, (2, 70, 32), (2, 13, 12)),
        ({"qk_norm": "rms_norm", "bias": True}, (2, 70, 32), None),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_generic_attention_honours_every_option_to_the_bit(options, shape, context):
    torch.manual_seed(0)
    attention = Attention(query_dim=32, heads=2, dim_head=16, **options)
    inputs = {"hidden_states": torch.randn(shape)}
    if context is not None:
        inputs["encoder_hidden_states"] = torch.randn(context)
    if "spatial_norm_dim" in options:
        inputs["temb"] = torch.randn(2, 3, 4, 4)
    expected = attention(**inputs)
    attention.set_processor(SageAttnProcessor("exact"))
    assert torch.equal(attention(**inputs), expected)


def test_a_layer_is_inspected_only_for_further_keywords(monkeypatch):
    attn, x, context = Attention(query_dim=32, cross_attention_dim=32, heads=2, dim_head=16), *torch.randn(2, 1, 8, 32)
    expected = attn(x, encoder_hidden_states=context)
    attn.set_processor(SageAttnProcessor("exact"))
    inspected = mock.Mock(side_effect=inspect.signature)
    monkeypatch.setattr(attention_processor.inspect, "signature", inspected)
    torch.testing.assert_close(attn(x, context), expected)
    assert not inspected.called
    torch.testing.assert_close(attn(x, encoder_hidden_states=context, unknown=1), expected)  # diffusers warns
    assert inspected.called


def test_a_module_without_a_processor_cannot_start_with_a_shared_one():
    with pytest.raises(UnsupportedAttentionError, match="no processor yet"):
        Attention(query_dim=32, heads=2, dim_head=16, processor=SageAttn3Processor())


@pytest.mark.parametrize("name", ["cogvideox", "wan-t2v"])
def test_gradients_match_exact_attention(name):
    model, inputs = family(name).draw()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(**inputs, return_dict=False)[0].square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    model.set_attn_processor(SageAttn3Processor())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(), expected, strict=True))


def test_joint_attention_refuses_a_mask_it_would_ignore():
    model, inputs = family("sd3").draw()
    model.set_attn_processor(SageAttnProcessor("exact"))
    with pytest.raises(ValueError, match="attention_mask"):
        run(model, inputs | {"joint_attention_kwargs": {"attention_mask": torch.ones(2, 13)}})


def test_other_processors_that_take_over_are_logged(sage_log):
    model = family("unet").build()
    originals = dict(model.attn_processors)
    model.set_attn_processor(SageAttn3Processor())
    model.set_attn_processor(dict(originals))
    model.set_attn_processor(SageAttn3Processor())
    assert not sage_log
    model.set_attention_slice("max")
    assert len(sage_log) == 1 and "SlicedAttnProcessor replaces SageAttn3Processor" in sage_log[0]
    model.set_attn_processor(originals)
    assert not any("sage" in attribute for module in model.modules() for attribute in vars(module))


def test_each_class_that_takes_over_is_logged_whatever_its_name(sage_log):
    for _ in range(2):
        model = family("unet").build()
        model.set_attn_processor(SageAttn3Processor())
        model.set_attn_processor(type("Namesake", (AttnProcessor,), {})())
    assert len(sage_log) == 2 and all("Namesake replaces" in message for message in sage_log)


def test_each_class_that_stays_is_logged_whatever_its_name(sage_log):
    def attend(self, attn, hidden_states, *args):
        return dispatch_attention_fn(hidden_states, hidden_states, hidden_states)

    model = family("wan-t2v").build()
    for layer in (model.blocks[0].attn1, model.blocks[0].attn2):
        layer.set_processor(type("Namesake", (), {"__call__": attend, "_SUPPORTED_BACKENDS": ("flex",)})())
    model.set_attention_backend("sage2")
    assert len(sage_log) == 2 and all("Namesake works with" in message for message in sage_log)


@pytest.mark.parametrize("way", ["set_processor", "assigned", "set_attention_slice"])
@pytest.mark.parametrize("switch", ["shared", "apply", "backend"])
def test_putting_back_the_very_processor_that_was_there_works(switch, way):
    model, inputs = family("unet").draw()
    if switch == "shared":
        model.set_attn_processor(SageAttnProcessor("sage2", "emulate"))
    elif switch == "apply":
        handle = sage_hf.apply(model, sage_hf.SageConfig("sage2", "emulate"))
    else:
        model.set_attention_backend("sage2_emulate")
    ours, expected = dict(model.attn_processors), run(model, inputs)
    if way == "assigned":  # as pipelines with perturbed-attention guidance do
        for module in attention_layers(model).values():
            module.processor = AttnProcessor()
    elif way == "set_processor":  # as attend-and-excite and self-attention guidance do
        model.set_attn_processor(AttnProcessor())
    else:
        model.set_attention_slice("max")
    run(model, inputs)
    model.set_attn_processor(dict(ours))
    assert model.attn_processors == ours
    assert torch.equal(run(model, inputs), expected)
    if switch == "shared":
        return
    handle.restore() if switch == "apply" else model.reset_attention_backend()
    assert {type(processor).__name__ for processor in model.attn_processors.values()} == {"AttnProcessor2_0"}


@pytest.mark.audit  # of one family, tests/hf/test_schedule.py compiles blocks each time
@pytest.mark.parametrize("name", ["cogvideox-1.5", "sd3.5", "wan-t2v"])
def test_blocks_compile_without_graph_breaks(name, request):
    if name == "wan-t2v":
        request.getfixturevalue("compilable_dispatch")
    model, inputs = family(name).draw()
    exact = run(model, inputs)
    processor = SageAttnProcessor("sage3", "emulate")
    model.set_attn_processor(processor)
    low_bit = run(model, inputs)
    for block in getattr(model, "transformer_blocks", None) or model.blocks:
        block.compile(fullgraph=True, backend="eager")

    assert torch.equal(run(model, inputs), low_bit)
    assert {plan.recipe for plan in record.outcomes_outside_layers()} == {"sage3"}
    processor.recipe = "exact"
    assert torch.equal(run(model, inputs), exact)
