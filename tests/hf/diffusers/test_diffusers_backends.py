"""diffusers' own switches: attention backends by name, on models that dispatch and on models that do not."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
    dispatch_attention_fn,
)

from sage_hf import SageAttn3Processor, SageAttnProcessor, record, sage_attention
from sage_hf.diffusers import attention_layers
from sage_hf.names import NAMES
from sage_kernels.dispatch.plan import KernelUnavailableError
from tests.helpers.families import family, run

RECIPES = ("sage3", "sage3_paper", "sage2", "sage1", "sage_bwd", "sage_bwd_int8")
DISPATCHING = ("wan-i2v", "ltx", "flux", "qwen-image", "chroma")
DISPATCH = "dispatch_attention_fn"
DIRECT = ("cogvideox", "mochi", "sd3", "unet")


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    """(batch, tokens, heads, head_dim), as diffusers lays tensors out."""
    torch.manual_seed(0)
    return [torch.randn(2, 70, 4, 32) for _ in range(3)]


def dispatch(qkv: list[torch.Tensor], backend: str, **kwargs: object) -> torch.Tensor:
    return dispatch_attention_fn(*qkv, backend=AttentionBackendName(backend), **kwargs)


def native_and_ours(qkv: list[torch.Tensor], **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
    return dispatch(qkv, "native", **kwargs), dispatch(qkv, "sage_exact", **kwargs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_and_fallback_has_a_name(recipe):
    expected = {recipe, f"{recipe}_native", f"{recipe}_emulate", f"{recipe}_error", "sage_exact"}
    assert expected <= set(NAMES)
    for name in expected:
        member = AttentionBackendName(name)
        assert member == name and member.value == name and member is AttentionBackendName[name.upper()]
        assert member in list(AttentionBackendName)
        assert getattr(AttentionBackendName, name.upper()) is member
        assert pickle.loads(pickle.dumps(member)) is member and copy.deepcopy(member) is member


def test_names_of_diffusers_are_not_taken():
    assert AttentionBackendName.SAGE.value == "sage"
    assert len({member.value for member in AttentionBackendName}) == len(AttentionBackendName.__members__)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.rand(2, 4, 70, 70) < 0.7},
        {"attn_mask": torch.rand(2, 1, 1, 70) < 0.7},
        {"attn_mask": torch.randn(70, 70)},
    ],
    ids=lambda arguments: ",".join(arguments) or "none",
)
def test_exact_backend_equals_the_native_one_to_the_bit(qkv, arguments):
    native, ours = native_and_ours(qkv, **arguments)
    assert torch.equal(ours, native)


def test_a_key_padding_mask_applies_to_every_head_and_query(qkv):
    mask = torch.rand(2, 70) < 0.7
    assert torch.equal(
        dispatch(qkv, "sage_exact", attn_mask=mask), dispatch(qkv, "native", attn_mask=mask[:, None, None])
    )


def test_grouped_heads_are_honoured(qkv):
    query, key, value = qkv
    native, ours = native_and_ours([query, key[:, :, :2], value[:, :, :2]], enable_gqa=True)
    assert torch.equal(ours, native)


@pytest.mark.parametrize("name", ["sage3_emulate", "sage_exact"])
def test_backend_returns_the_log_sum_exp_that_the_front_door_returns(qkv, name):
    recipe, fallback = NAMES[name]
    out, lse = dispatch(qkv, name, attention_kwargs={"return_lse": True})
    heads_first = [x.transpose(1, 2) for x in qkv]
    expected, expected_lse = sage_attention(*heads_first, recipe=recipe, fallback=fallback, return_lse=True)
    assert torch.equal(out, expected.transpose(1, 2))
    assert torch.equal(lse, expected_lse)


def test_dropout_is_exact_attentions(qkv, caplog):
    assert dispatch(qkv, "sage3", dropout_p=0.1).isfinite().all()
    assert "sage3 computes no attention dropout" in caplog.text


def test_error_backend_refuses_what_the_hardware_lacks(qkv):
    with pytest.raises(KernelUnavailableError):
        dispatch(qkv, "sage3_error")


def test_checks_of_diffusers_pass(qkv, monkeypatch):
    monkeypatch.setattr(_AttentionBackendRegistry, "_checks_enabled", True)
    assert dispatch(qkv, "sage3_emulate").shape == qkv[0].shape


@pytest.mark.parametrize("name", DISPATCHING + DIRECT)
def test_set_attention_backend_works_and_is_undone(name):
    case = family(name)
    model, bystander, inputs = case.build(), case.build(), case.make_inputs()
    expected, originals = run(model, inputs), dict(model.attn_processors)
    active = _AttentionBackendRegistry._active_backend
    model.set_attention_backend("sage2_emulate")
    model.set_attention_backend("sage3_emulate")

    assert not torch.equal(run(model, inputs), expected)
    assert all(
        {plan.recipe for plan in record.last_plans(module)} == {"sage3"} for module in attention_layers(model).values()
    )
    assert _AttentionBackendRegistry._active_backend is active
    assert torch.equal(run(bystander, inputs), expected)
    model.reset_attention_backend()
    assert model.attn_processors == originals
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("name", ["cogvideox", "wan-t2v"])
def test_another_backend_takes_over_from_ours(name):
    model, inputs = family(name).draw()
    expected, originals = run(model, inputs), dict(model.attn_processors)
    model.set_attention_backend("sage3_emulate")
    model.set_attention_backend("native")
    assert model.attn_processors == originals
    assert torch.equal(run(model, inputs), expected)
    model.reset_attention_backend()


def test_processors_set_by_the_user_outlive_a_backend_and_say_so(sage_log):
    model, processor = family("wan-t2v").build(), SageAttn3Processor()
    model.set_attn_processor(processor)
    model.set_attention_backend("sage2")
    model.reset_attention_backend()
    assert all(present is processor for present in model.attn_processors.values())
    model.set_attention_backend("native")
    assert "4 layers with a SageAttnProcessor" in sage_log[-1]
    with pytest.raises(ValueError, match="recipe"):
        next(iter(attention_layers(model).values())).set_attention_backend("native")


def test_an_unknown_backend_is_refused_with_those_that_exist():
    model = family("cogvideox").build()
    originals = dict(model.attn_processors)
    model.set_attention_backend("sage3")
    ours = dict(model.attn_processors)
    with pytest.raises(ValueError, match=r"sage3_emulate|sage_exact"):
        model.set_attention_backend("sage4")
    assert model.attn_processors == ours
    model.reset_attention_backend()
    assert model.attn_processors == originals


COSMOS_DISPATCHES = hasattr(importlib.import_module("diffusers.models.transformers.transformer_cosmos"), DISPATCH)


@pytest.mark.parametrize(
    "name",
    [*DISPATCHING, pytest.param("cosmos", marks=pytest.mark.skipif(not COSMOS_DISPATCHES, reason="calls SDPA here"))],
)
def test_the_context_manager_switches_models_that_dispatch(name, sage_log):
    model, inputs = family(name).draw()
    expected = run(model, inputs)
    with attention_backend("sage_exact"):
        assert torch.equal(run(model, inputs), expected)
    with attention_backend("sage3_emulate"):
        assert not torch.equal(run(model, inputs), expected)
    assert {plan.recipe for plan in record.outcomes_outside_layers()} == {"exact", "sage3"}
    assert torch.equal(run(model, inputs), expected)
    assert not any("no effect" in message for message in sage_log)


@pytest.mark.parametrize(
    ("name", "processor"), [("cogvideox", "CogVideoXAttnProcessor2_0"), ("mochi", "MochiAttnProcessor2_0")]
)
def test_the_context_manager_says_where_it_has_no_effect(name, processor, sage_log):
    model, inputs = family(name).draw()
    with attention_backend("native"):
        expected = run(model, inputs)
    assert not sage_log
    for _ in range(2):
        with attention_backend("sage3"):
            assert torch.equal(run(model, inputs), expected)
    warnings = [message for message in sage_log if processor in message]
    assert len(warnings) == 1 and 'set_attention_backend("sage3")' in warnings[0]


def test_processors_of_ours_keep_their_recipe_inside_the_context_manager():
    model, inputs = family("flux").draw()
    expected = run(model, inputs)
    model.set_attn_processor(SageAttnProcessor("exact"))
    with attention_backend("sage3_emulate"):
        assert torch.equal(run(model, inputs), expected)


def test_a_module_that_dispatches_takes_our_backend_by_itself():
    model, inputs = family("flux").draw()
    expected = run(model, inputs)
    model.transformer_blocks[0].attn.set_attention_backend("sage3_emulate")
    assert not torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("backend", ["sage3_emulate", "sage_exact"])
def test_backends_compile_without_graph_breaks(qkv, backend, compilable_dispatch):
    function = torch.compile(lambda *tensors: dispatch(list(tensors), backend), fullgraph=True, backend="aot_eager")
    assert torch.equal(function(*qkv), dispatch(qkv, backend))
