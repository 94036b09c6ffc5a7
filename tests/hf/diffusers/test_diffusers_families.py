"""Every family computes with the exact recipe, to the bit, what its own processors compute; and runs in low bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from sage_hf import record
from sage_hf.diffusers import SageAttnProcessor, attention_layers, bind
from sage_kernels.exact import sdpa
from tests.helpers.families import Family, each_family, run


def share(model: torch.nn.Module, recipe: str, fallback: str | None) -> None:
    model.set_attn_processor(SageAttnProcessor(recipe, fallback))


def bind_each(model: torch.nn.Module, recipe: str, fallback: str | None) -> None:
    for module in attention_layers(model).values():
        module.set_processor(bind(module, recipe, fallback))


def set_backend(model: torch.nn.Module, recipe: str, fallback: str | None) -> None:
    model.set_attention_backend("sage_exact" if recipe == "exact" else f"{recipe}_{fallback}")


Switch = Callable[[torch.nn.Module, str, str | None], None]
QUICK = {(share, torch.float32), (bind_each, torch.bfloat16)}


@pytest.mark.parametrize(
    ("switch", "dtype"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.audit)
        for case in product((share, bind_each, set_backend), (torch.float32, torch.bfloat16))
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@each_family
def test_exact_recipe_equals_the_original_processors_to_the_bit(case: Family, dtype: torch.dtype, switch: Switch):
    model, inputs = case.build(dtype), case.make_inputs(dtype)
    expected = run(model, inputs)
    switch(model, "exact", None)

    assert torch.equal(run(model, inputs), expected)
    assert expected.isfinite().all()
    for name, module in attention_layers(model).items():
        assert record.last_plans(module), f"{name} did not attend through sage_attention"


@each_family
def test_original_processors_come_back_to_the_bit(case: Family):
    model, inputs = case.build(), case.make_inputs()
    expected, originals = run(model, inputs), dict(model.attn_processors)
    share(model, "sage2", "emulate")
    assert not torch.equal(run(model, inputs), expected)
    model.set_attn_processor(dict(originals))

    assert model.attn_processors == originals
    assert torch.equal(run(model, inputs), expected)
    assert not any("sage" in attribute for module in model.modules() for attribute in vars(module))


@pytest.mark.parametrize(
    "switch",
    [share, *(pytest.param(way, marks=pytest.mark.audit) for way in (bind_each, set_backend))],
    ids=lambda way: way.__name__,
)
@each_family
def test_every_layer_runs_the_low_bit_recipe(case: Family, switch: Switch):
    model, inputs = case.build(), case.make_inputs()
    switch(model, "sage3", "emulate")
    calls: list[record.AttentionCall] = []
    with record.observe(calls.append):
        run(model, inputs)

    layers = attention_layers(model)
    for name, module in layers.items():
        plans = record.last_plans(module)
        assert plans and {(plan.recipe, plan.numerics) for plan in plans} == {("sage3", "emulated")}, name
    assert {call.layer for call in calls} == set(layers.values())
    for call in calls:
        expected = sdpa.sdpa(call.query, call.key, call.value, mask=call.attn_mask, is_causal=False, scale=call.scale)
        assert not torch.equal(call.output, expected)
        assert torch.cosine_similarity(call.output.flatten(), expected.flatten(), dim=0) > 0.9
