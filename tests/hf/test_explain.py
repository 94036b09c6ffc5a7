"""`explain` tells the kernels of each layer, before and after a run, and the reasons."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import sage_hf
from sage_hf import record
from sage_hf.config import LayerRule, SageConfig
from sage_hf.diffusers import UnsupportedAttentionError
from sage_hf.explain import Explanation, LayerRow
from sage_kernels.dispatch import cost_model, registry
from sage_kernels.dispatch.plan import exact_plan
from sage_kernels.dispatch.request import Request
from tests.helpers import tiny_pipelines as tiny
from tests.helpers.kernels import FakeBackward, FakeQuantizer, FakeTraining, only_the_reference

REQUEST = ("sage2", "cuda", (9, 0), torch.bfloat16, 1, 8, 8, 64, 64, 64, 64, "none", False, False)


def facts(pipe_or_model) -> list[tuple]:
    rows = sage_hf.explain(pipe_or_model).rows
    return [(row.layer, row.asked, row.recipe, row.kernel, row.numerics, row.calls) for row in rows]


def test_explain_says_that_an_unchanged_model_runs_its_own_attention():
    model = tiny.transformer()
    assert facts(model)[0] == ("transformer_blocks.0.attn1", "", "", "", "", 0)
    text = str(sage_hf.explain(model))
    assert "its own" in text and "CogVideoXAttnProcessor2_0" in text and "sage_hf.apply" in text


def test_explain_calls_refused_processors_unsupported():
    unet = tiny.image_pipeline().unet
    unet.set_attention_slice("max")
    with pytest.raises(UnsupportedAttentionError):
        sage_hf.apply(unet, "sage2")
    assert {row.reason for row in sage_hf.explain(unet).rows} == {"SlicedAttnProcessor is not supported"}


def test_before_any_run_it_says_so():
    model = tiny.transformer()
    with sage_hf.apply(model, "sage3"):
        assert facts(model)[0] == ("transformer_blocks.0.attn1", "sage3", "", "", "", 0)
        assert "not run yet" in str(sage_hf.explain(model))


def test_after_a_run_it_tells_recipe_kernel_numerics_and_calls():
    pipe = tiny.cogvideox()
    with sage_hf.apply(pipe, SageConfig("sage3", layers=(LayerRule("*.1.*", "exact"),))):
        tiny.latents(pipe, steps=3)
        rows = facts(pipe)
    emulated = ("sage3", "sage3", "reference", "emulated", 3)
    assert rows == [
        ("transformer_blocks.0.attn1", *emulated),
        ("transformer_blocks.1.attn1", "exact", "exact", "sdpa", "exact", 3),
        ("transformer_blocks.2.attn1", *emulated),
    ]


def test_processors_set_by_hand_are_explained_without_apply():
    pipe = tiny.cogvideox()
    pipe.transformer.set_attn_processor(sage_hf.SageAttn2Processor())
    assert {row[1] for row in facts(pipe)} == {"sage2"}
    tiny.latents(pipe, steps=2)
    assert facts(pipe)[2] == ("transformer_blocks.2.attn1", "sage2", "sage2", "reference", "emulated", 2)


def test_explain_says_why_another_recipe_ran():
    model = tiny.transformer()
    model.requires_grad_(True)
    with sage_hf.apply(model, "sage3"):
        model(**tiny.transformer_inputs())
        row = sage_hf.explain(model).rows[0]
        text = str(sage_hf.explain(model))
    assert (row.asked, row.recipe, row.kernel) == ("sage3", "exact", "sdpa")
    assert "gradients are wanted" in row.reason
    assert f"[1] {row.reason}" in text


def test_transformers_models_are_explained_however_they_were_switched():
    model = tiny.llama()
    assert "attn_implementation is" in str(sage_hf.explain(model))
    model.set_attn_implementation("sage2_emulate")
    with torch.no_grad():
        model(torch.arange(80)[None] % 32)
    assert facts(model)[0] == ("model.layers.0.self_attn", "sage2", "sage2", "reference", "emulated", 1)
    assert "model.layers.0-1.self_attn" in str(sage_hf.explain(model))


def test_what_ran_under_another_recipe_before_is_not_mixed_in():
    pipe = tiny.cogvideox()
    with sage_hf.apply(pipe, "sage2"):
        tiny.latents(pipe)
    with sage_hf.apply(pipe, "sage3"):
        tiny.latents(pipe)
        assert {row[1] for row in facts(pipe)} == {"sage3"}
    assert {row[1] for row in facts(pipe)} == {""}


def test_compiled_calls_are_counted():
    model = tiny.transformer(num_layers=1)
    try:
        with sage_hf.apply(model, "sage3"), torch.no_grad():
            model.compile(backend="eager", fullgraph=True)
            model(**tiny.transformer_inputs())
            explanation = sage_hf.explain(model)
    finally:
        torch._dynamo.reset()
    assert [(plan.recipe, calls) for plan, calls in explanation.outside_layers] == [("sage3", 1)]
    assert "compiled" in str(explanation) and "not run yet" not in str(explanation)


def test_explain_shows_the_quantiser_and_the_backward_kernel():
    queries = [torch.randn(1, 2, 64, 32, requires_grad=True) for _ in range(3)]
    with only_the_reference():
        registry.register_quantizer(FakeQuantizer("quantize", "sage_bwd"))
        registry.register_forward(FakeTraining("attend", "sage_bwd", takes=object))
        registry.register_backward(FakeBackward("differentiate", "sage_bwd"))
        model = tiny.transformer()
        layer = model.transformer_blocks[0].attn1
        layer.set_processor(sage_hf.SageAttnProcessor("sage_bwd"))
        record.run_in_layer(layer, sage_hf.sage_attention, *queries, recipe="sage_bwd")
    row = sage_hf.explain(model).rows[0]
    assert (row.kernel, row.quantizer, row.backward) == ("attend", "quantize", "differentiate")
    (line,) = [line for line in str(sage_hf.explain(model)).splitlines() if line.startswith(row.layer)]
    assert "attend, quantize, differentiate" in line


def test_explain_distinguishes_quantisers_and_backward_kernels():
    rows = [replace(ran(f"b.{i}.attn"), quantizer="one" if i < 2 else "other") for i in range(3)]
    assert [line[0].strip() for line in table(*rows)] == ["b.0-1.attn", "b.2.attn"]


def table(*rows: LayerRow) -> list[list[str]]:
    """Return the cells of each line but the heading and what is said of whole recipes."""
    lines = str(Explanation(rows)).splitlines()[2:]
    return [line.split("  ") for line in lines if not line.startswith("*")]


def test_the_table_of_costs_by_which_calls_on_a_gpu_were_routed_is_named(monkeypatch):
    model = tiny.transformer()
    sage_hf.apply(model, "sage2")
    layer = model.transformer_blocks[0].attn1
    plan = exact_plan(Request(*REQUEST))
    monkeypatch.setattr(record, "last_plans", lambda module: (plan,) * (module is layer))
    monkeypatch.setattr("sage_kernels.dispatch.select._routing", True)
    assert str(sage_hf.explain(model)).endswith(cost_model.describe_costs((9, 0)))
    assert "9.0.json (NVIDIA H200, " in cost_model.describe_costs((9, 0))
    assert "sage-hf tune" in cost_model.describe_costs((8, 6))
    monkeypatch.setattr("sage_kernels.dispatch.select._routing", False)
    assert "costs:" not in str(sage_hf.explain(model))


def test_recipes_with_heavy_keys_are_said_once():
    rows = [ran(f"b.{i}.attn", recipe) for i in range(2) for recipe in ("sage3", "sage2", "sage3_paper", "exact")]
    said = [line for line in str(Explanation(tuple(rows))).splitlines() if line.startswith("*")]
    assert [line.split(":")[0] for line in said] == ["* sage3", "* sage2"]
    assert all("64 keys" in line and "16 bits" in line and "heaviest" in line for line in said)


def test_calls_with_keys_in_16_bits_are_counted():
    model = tiny.llama()
    model.set_attn_implementation("sage3_emulate")
    with torch.no_grad():
        model(torch.arange(80)[None] % 32)
        model(torch.arange(60)[None] % 32)
    first, *_ = sage_hf.explain(model).rows
    assert (first.calls, first.heavy, first.chosen, first.recent) == (2, 1, 0, 2)
    (line,) = [line for line in str(sage_hf.explain(model)).splitlines() if line.startswith("*")]
    layers = len(sage_hf.explain(model).rows)
    assert f"in {layers} of {2 * layers} calls, the heaviest in 0, the latest in {2 * layers}" in line

    model = tiny.transformer()
    layer = model.transformer_blocks[0].attn1
    layer.set_processor(sage_hf.SageAttnProcessor("sage2"))
    inputs = [torch.randn(1, 2, 100, 32) for _ in range(3)]
    for options in ({}, {"attn_mask": torch.ones(1, 1, 1, 100, dtype=torch.bool)}, {"is_causal": True}):
        record.run_in_layer(layer, sage_hf.sage_attention, *inputs, recipe="sage2", **options)
    longer = [torch.randn(1, 2, 128, 32) for _ in range(3)]  # enough keys for late ones
    record.run_in_layer(layer, sage_hf.sage_attention, *longer, recipe="sage2", is_causal=True)
    first, *_ = sage_hf.explain(model).rows
    assert (first.calls, first.heavy, first.chosen, first.recent) == (4, 4, 3, 0)
    assert "in 4 of 4 calls, the heaviest in 3" in str(sage_hf.explain(model))


def test_explanations_of_two_runs_join_with_summed_counts():
    row = LayerRow("b.0.attn", "sage3", "sage3", "kernel", "native", calls=3, heavy=3, chosen=2, recent=1)
    other = LayerRow("b.1.attn", "sage3", "exact", "sdpa", "exact", calls=1)
    before = Explanation((row, other), costs=("costs: a",), qk_norm_rope=2)
    later = Explanation((row,), costs=("costs: a", "costs: b"), qk_norm_rope=1, sparse=(("b.0.attn", "half"),))
    whole = before.joined(later)
    assert whole.rows == (replace(row, calls=6, heavy=6, chosen=4, recent=2), other)
    assert (whole.costs, whole.qk_norm_rope) == (("costs: a", "costs: b"), 2)
    assert whole.sparse == (("b.0.attn (last video)", "half"),)
    assert Explanation(()).joined(later) == later
    assert "in 6 of 6 calls, the heaviest in 4, the latest in 2" in str(whole)


def test_names_that_it_prints_are_patterns_of_rules():
    model = tiny.transformer()
    pipe = SimpleNamespace(transformer=model, transformer_2=tiny.transformer())
    sage_hf.apply(pipe, "sage2")
    (first, second) = (line.split()[0] for line in str(sage_hf.explain(pipe)).splitlines()[2:4])
    assert (first, second) == ("transformer.transformer_blocks.0-2.attn1", "transformer_2.transformer_blocks.0-2.attn1")
    config = sage_hf.SageConfig("sage2", layers=(sage_hf.LayerRule(second, "exact"),))
    sage_hf.apply(pipe, config)
    assert [row.asked for row in sage_hf.explain(pipe).rows] == ["sage2"] * 3 + ["exact"] * 3


def ran(layer: str, recipe: str = "sage3", calls: int = 1, reason: str = "") -> LayerRow:
    return LayerRow(layer, "sage3", recipe, "kernel", "native", calls, reason)


def test_consecutive_layers_that_did_the_same_share_a_line():
    rows = [ran(f"blocks.{i}.attn", "sage2" if i == 2 else "sage3") for i in range(6)]
    assert [line[0].strip() for line in table(*rows)] == ["blocks.0-1.attn", "blocks.2.attn", "blocks.3-5.attn"]


def test_layers_of_one_kind_are_joined_past_those_between_them():
    rows = [ran(f"blocks.{i}.{kind}") for i in range(3) for kind in ("attn1", "attn2")]
    assert [line[0].strip() for line in table(*rows)] == ["blocks.0-2.attn1", "blocks.0-2.attn2"]


def test_layers_that_differ_in_calls_or_reason_are_kept_apart():
    rows = [ran("b.0.attn"), ran("b.1.attn", calls=2), ran("b.2.attn", calls=2, reason="why"), ran("b.4.attn", calls=2)]
    lines = table(*rows)
    assert [line[0].strip() for line in lines[:4]] == ["b.0.attn", "b.1.attn", "b.2.attn", "b.4.attn"]
    assert lines[4] == ["[1] why"]


def test_a_layer_that_ran_several_recipes_has_a_line_for_each():
    rows = [ran(f"b.{i}.attn", recipe) for i in range(2) for recipe in ("sage3", "sage2")]
    lines = ["  ".join(line).split() for line in table(*rows)]
    assert [line[:3] for line in lines] == [["b.0-1.attn", "sage3", "sage3"], ["sage3", "sage2", "kernel"]]
