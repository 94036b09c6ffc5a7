"""RoPE that a kernel computes in place of a modelling file's function is the same to the bit."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

import sage_hf
from sage_hf import explain, record
from sage_hf.transformers import rotary
from tests.helpers.tiny_transformers import MODELS, SERVED, TinyModel, run

WITH_ROPE_FUNCTION = {"llama", "qwen2", "qwen3", "mistral", "gemma2"}
"""Models whose layers apply RoPE by the function."""


@pytest.fixture
def served(monkeypatch) -> list[torch.Size]:
    """Let tensors of a CPU be served, by the reference; the sizes of its inputs."""
    sizes: list[torch.Size] = []

    def qk_norm_rope(x, rope):
        sizes.append(x.shape)
        return original(x, rope=rope)

    original = rotary.qk_norm_rope
    monkeypatch.setattr(rotary, "qk_norm_rope", qk_norm_rope)
    monkeypatch.setattr(rotary, "is_served", lambda x: True)
    monkeypatch.setattr(rotary, "LARGE", 0)
    monkeypatch.setattr(rotary, "_agreements", {})
    return sizes


def queries_and_keys(tiny: TinyModel, implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
    calls: list[record.AttentionCall] = []
    with record.observe(calls.append):
        run(tiny.build(implementation, dtype), **tiny.inputs())
    return [x for call in calls for x in (call.query, call.key)]


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.audit), torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiny", SERVED, ids=lambda tiny: tiny.name)
def test_queries_and_keys_match_the_model(tiny: TinyModel, dtype: torch.dtype, request):
    expected = queries_and_keys(tiny, "sage1_emulate", dtype)
    sizes = request.getfixturevalue("served")
    found = queries_and_keys(tiny, "sage1_emulate", dtype)
    assert bool(sizes) == (tiny.name in WITH_ROPE_FUNCTION)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_explain_counts_the_layers_whose_rope_the_kernel_computes(served):
    model = MODELS["llama"].build("sage1_emulate")
    assert explain(model).qk_norm_rope == 0
    run(model, **MODELS["llama"].inputs())
    explanation = explain(model)
    assert explanation.qk_norm_rope == 2
    assert "qk_norm_rope: in 2 layers one kernel computes QK-norm or RoPE" in str(explanation)


@pytest.mark.parametrize("implementation", ["sdpa", "sage_exact"])
def test_layers_without_a_recipe_of_ours_run_the_function(implementation, served):
    tiny = MODELS["llama"]
    tiny.build("sage2")  # lets the class's layers use the kernel
    run(tiny.build(implementation), **tiny.inputs())
    assert not served


def test_another_rope_function_stays(served, monkeypatch):
    model = MODELS["llama"].build("sage1_emulate")
    file = sys.modules[type(model).__module__]
    other = rotary._with_kernel(lambda q, k, cos, sin: (q * cos[:, None], k * cos[:, None]))
    monkeypatch.setattr(file, rotary.ROPE_FUNCTION, other)
    q, k = torch.randn(2, 1, 2, 3, 8)
    cos, sin = torch.randn(2, 1, 3, 8)
    monkeypatch.setattr(rotary._thread, "layer", model)
    assert torch.equal(other(q, k, cos, sin)[0], q * cos[:, None])
    assert list(rotary._agreements.values()) == [False]


def test_the_layers_output_has_gradients(served, monkeypatch):
    monkeypatch.setattr(rotary, "LARGE_WITH_GRADIENTS", 0)
    tiny, gradients = MODELS["llama"], []
    for on in (True, False):
        monkeypatch.setattr(rotary, "is_served", lambda x, on=on: on)
        model = tiny.build("sage_bwd")
        model(**tiny.inputs()).logits.square().sum().backward()
        gradients.append([one.grad for one in model.parameters()])
    assert served
    for own, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(own, theirs)


def test_modelling_files_are_as_they_were_once_no_model_runs_a_recipe_of_ours():
    gc.collect()  # other tests' models
    model, other = MODELS["qwen3"].build("eager"), MODELS["qwen3"].build("eager")
    file, layer = sys.modules[type(model).__module__], type(model.model.layers[0].self_attn)
    before = {**vars(file)}, {**vars(layer)}
    handle = sage_hf.apply(model, "sage2")
    assert getattr(file, rotary.ROPE_FUNCTION) is not before[0][rotary.ROPE_FUNCTION]
    other.set_attn_implementation("sage1")
    handle.restore()
    assert getattr(file, rotary.ROPE_FUNCTION) is not before[0][rotary.ROPE_FUNCTION]
    other.set_attn_implementation("sdpa")
    assert ({**vars(file)}, {**vars(layer)}) == before
    other.set_attn_implementation("sage1")
    assert getattr(file, rotary.ROPE_FUNCTION) is not before[0][rotary.ROPE_FUNCTION]
    del model, other, handle
    gc.collect()
    assert ({**vars(file)}, {**vars(layer)}) == before


def test_a_function_that_fails_with_drawn_tensors_stays(served, monkeypatch, caplog):
    def picky(q, k, cos, sin):
        assert q.shape[2] == 5
        return q, k

    other = rotary._with_kernel(picky)
    monkeypatch.setattr(rotary._thread, "layer", torch.nn.Identity())
    q, k = torch.randn(2, 1, 2, 5, 8)
    assert other(q, k, torch.ones(1, 5, 8), torch.ones(1, 5, 8))[0] is q
    assert "stays in use: comparing it with our kernel failed" in caplog.text
