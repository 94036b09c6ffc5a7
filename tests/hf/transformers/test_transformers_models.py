"""Every tiny model computes with the exact recipe what it computes without us, and runs in low-bit numerics."""

from __future__ import annotations

import pytest
import torch

import sage_hf
from sage_hf import record
from sage_hf.transformers import attention_layers, unsupported
from tests.helpers import model_zoo
from tests.helpers.tiny_transformers import IGNORING, IN_FLOAT64, SERVED, TinyModel, of_real_tokens, run

CASES = [
    pytest.param(model, padding, id=f"{model.name}-{padding}")
    for model in SERVED
    for padding in (("none", "left", "right") if model.takes_padding else ("none",))
]


def largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()


@pytest.mark.parametrize(("tiny", "padding"), [case for case in CASES if case.values[0] in IN_FLOAT64])
def test_exact_recipe_equals_eager(tiny: TinyModel, padding: str, float64_softmax: None) -> None:
    inputs = tiny.inputs(padding)

    def output(implementation: str, dtype: torch.dtype) -> torch.Tensor:
        return of_real_tokens(run(tiny.build(implementation, dtype), **inputs), inputs).double()

    judge = output("eager", torch.float64)
    eager_error = largest(output("eager", torch.float32) - judge)
    epsilon = torch.finfo(torch.float32).eps * largest(judge)
    assert largest(output("sage_exact", torch.float32) - judge) <= 2 * eager_error + epsilon
    # In float64 too, norms and rotary embeddings compute in float32 (one rounding may differ), and so does the LSE that
    # serves the sinks of GPT-OSS.
    float64_error = largest(output("sage_exact", torch.float64) - judge)
    assert float64_error <= (eager_error if tiny.name == "gpt_oss" else epsilon)


@pytest.mark.parametrize(("tiny", "padding"), [case for case in CASES if not case.values[0].beyond_sdpa])
def test_exact_recipe_equals_sdpa_to_the_bit(tiny: TinyModel, padding: str) -> None:
    inputs = tiny.inputs(padding)
    ours, sdpa = (of_real_tokens(run(tiny.build(name), **inputs), inputs) for name in ("sage_exact", "sdpa"))
    assert torch.equal(ours, sdpa)


@pytest.mark.parametrize(("tiny", "padding"), [case for case in CASES if case.values[1] != "none"])
def test_padding_tokens_change_nothing(tiny: TinyModel, padding: str) -> None:
    inputs = tiny.inputs(padding)
    other = {**inputs, "input_ids": torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], 3)}
    assert not torch.equal(other["input_ids"], inputs["input_ids"])
    model = tiny.build("sage_exact")
    assert torch.equal(*(of_real_tokens(run(model, **given), inputs) for given in (inputs, other)))


@pytest.mark.parametrize("tiny", SERVED, ids=lambda tiny: tiny.name)
def test_every_layer_runs_the_recipe_or_says_why_not(tiny: TinyModel) -> None:
    model = tiny.build("sage3")
    exact = run(tiny.build("sage_exact"), **tiny.inputs())
    low_bit = run(model, **tiny.inputs())
    assert torch.isfinite(low_bit).all()
    layers = attention_layers(model)
    assert layers
    for layer in layers.values():
        (plan,) = record.last_plans(layer)
        if tiny.name == "gemma2":
            assert (plan.recipe, plan.reason) == ("exact", "the model caps its logits (softcap)")
        else:
            assert (plan.recipe, plan.numerics, plan.reason) == ("sage3", "emulated", "")
    assert torch.equal(low_bit, exact) == (tiny.name == "gemma2")


@pytest.mark.parametrize("tiny", SERVED, ids=lambda tiny: tiny.name)
def test_layers_are_found_by_name(tiny: TinyModel) -> None:
    model = tiny.build("eager")
    layers = attention_layers(model)
    assert all(model.get_submodule(name) is layer for name, layer in layers.items())
    expected = {"clip": 4, "t5": 6, "whisper": 6}.get(tiny.name, 2)  # decoders of encoders attend twice
    assert len(layers) == expected
    assert unsupported(model) is None


@pytest.mark.skipif(not IGNORING, reason="this transformers serves all of the models")
def test_a_model_this_transformers_does_not_serve_runs_by_default_and_says_so(hf_log: pytest.LogCaptureFixture) -> None:
    for tiny in IGNORING:
        ours, default = tiny.build("sage3"), tiny.build(None)
        assert f'{tiny.model_class} cannot run attn_implementation="sage3"' in hf_log.text
        assert torch.equal(run(ours, **tiny.inputs()), run(default, **tiny.inputs()))
        assert "does not use transformers' attention interface" in unsupported(ours) or "classes" in unsupported(ours)


@pytest.mark.parametrize("asked_by", ["keyword", "config"])
def test_a_model_that_keeps_attention_weights_gets_them(asked_by: str) -> None:
    """Persimmon's layers keep `output_attentions` to themselves; a config's is told to no layer."""
    pytest.importorskip("transformers.utils.output_capturing")
    model = model_zoo.build("persimmon", "eager")
    model.config.output_attentions = asked_by == "config"
    options = {"output_attentions": True} if asked_by == "keyword" else {}
    ids = torch.arange(2, 72).view(1, 70)
    with torch.no_grad():
        expected = model(input_ids=ids, **options).attentions
        with sage_hf.apply(model, "sage1"):
            found = model(input_ids=ids, **options).attentions
            layer = next(iter(attention_layers(model).values()))
            assert record.last_plans(layer)[-1].reason == "attention weights are asked for"
    torch.testing.assert_close(found, expected)
