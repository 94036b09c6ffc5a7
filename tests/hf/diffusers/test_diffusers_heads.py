"""Norms and rotations that a kernel runs in place of a processor's own are those of the processor, in every family."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sage_hf import explain, record
from sage_hf.diffusers import SageAttnProcessor, attention_layers, heads
from sage_kernels.heads import Rope
from tests.helpers.families import Family, each_family, family, run

ROTATED = {
    *("cogvideox-1.5", "hunyuan-video", "hunyuan-video-1.5", "mochi", "wan-t2v", "wan-i2v", "ltx", "easyanimate"),
    *("flux", "flux-2", "chroma", "qwen-image", "hunyuan-image", "z-image", "cogview4", "cosmos"),
}
"""Cases whose queries and keys the kernel rotates."""


@pytest.fixture
def served(monkeypatch) -> list[Rope | None]:
    """Let samples of a CPU be served, by the reference; the rotation of each call."""
    ropes: list[Rope | None] = []

    def norm_rope(x, norm, rope):
        ropes.append(rope)
        return original(x, norm, rope)

    original = heads.norm_rope
    monkeypatch.setattr(heads, "norm_rope", norm_rope)
    monkeypatch.setattr(heads, "is_served", lambda sample: True)
    monkeypatch.setattr(heads, "gains", lambda module, sample: True)
    return ropes


def queries_and_keys(case: Family, dtype: torch.dtype, recipe: str = "sage1") -> list[torch.Tensor]:
    model, inputs = case.build(dtype), case.make_inputs(dtype)
    model.set_attn_processor(SageAttnProcessor(recipe, "emulate"))
    calls: list[record.AttentionCall] = []
    with record.observe(calls.append):
        run(model, inputs)
    return [x for call in calls for x in (call.query, call.key)]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.audit)], ids=str)
@each_family
def test_queries_and_keys_are_those_of_the_processor(case: Family, dtype: torch.dtype, request):
    expected = queries_and_keys(case, dtype)
    ropes = request.getfixturevalue("served")
    found = queries_and_keys(case, dtype)
    if dtype == torch.float32:
        assert any(rope is not None for rope in ropes) == (case.name in ROTATED)
    for own, theirs in zip(found, expected, strict=True):
        # Layer norms add up in another order: in later layers that moves a code of what is attended to.
        tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
        torch.testing.assert_close(own, theirs, **tolerance)


def test_the_exact_recipe_leaves_norms_to_the_processor(served):
    queries_and_keys(family("flux"), torch.float32, "exact")
    assert not served


def test_explain_counts_the_layers_whose_queries_the_kernel_normalises(served):
    case = family("flux")
    model = case.build()
    model.set_attn_processor(SageAttnProcessor("sage1", "emulate"))
    run(model, case.make_inputs())
    assert explain(model).norm_rope == len(attention_layers(model))


def test_where_no_kernel_serves_nothing_changes(monkeypatch):
    monkeypatch.setattr(heads, "norm_rope", lambda *arguments: pytest.fail("it serves no CPU"))
    queries_and_keys(family("flux"), torch.bfloat16)


def attention(case: str) -> tuple[nn.Module, object]:
    """An attention module of a family, and its processor."""
    model = family(case).build()
    module = next(one for one in model.modules() if getattr(one, "norm_q", None) is not None)
    return module, module.processor


def arguments(module: nn.Module, tokens: int = 6, text: int = 2) -> dict[str, torch.Tensor]:
    width = module.to_q.in_features
    return {"hidden_states": torch.randn(1, tokens, width), "encoder_hidden_states": torch.randn(1, text, width)}


def angles(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, 16, dtype=dtype), torch.randn(tokens, 16, dtype=dtype)


@pytest.mark.parametrize(
    "table",
    [angles(7), angles(8, torch.bfloat16), (angles(8)[0],), [one.to("meta") for one in angles(8)]],
    ids=["other tokens", "bfloat16", "one table", "another device"],
)
@torch.no_grad()
def test_angles_of_another_kind_are_left_to_the_processor(served, table):
    module, processor = attention("flux")
    given = {**arguments(module), "image_rotary_emb": angles(8)}
    assert heads.with_own_norms(processor, module, (), (), given, False) is not None
    assert heads.with_own_norms(processor, module, (), (), {**given, "image_rotary_emb": table}, False) is None


@pytest.mark.parametrize("change", ["hook", "own forward", "another class", "another dtype", "no eps", "two axes"])
@torch.no_grad()
def test_norms_that_are_not_known_as_they_are_stay(served, change):
    module, processor = attention("flux")
    given = {**arguments(module), "image_rotary_emb": angles(8)}
    assert heads.with_own_norms(processor, module, (), (), given, False) is not None
    norm = module.norm_k
    if change == "hook":
        norm.register_forward_hook(lambda *seen: None)
    elif change == "own forward":
        norm.forward = lambda x: x
    elif change == "another class":
        module.norm_k = nn.Identity()
    elif change == "another dtype":
        norm.double()
    elif change == "two axes":
        module.norm_k = nn.RMSNorm((2, 32), eps=1e-6)
    else:
        norm.eps = None
    assert heads.with_own_norms(processor, module, (), (), given, False) is None


@pytest.mark.parametrize(("tokens", "known"), [(2**17, True), (6, False)])
def test_small_samples_are_trained_by_pytorchs_norms(served, tokens, known):
    module = attention("flux")[0]
    sample = torch.empty(1, tokens, module.to_q.in_features, requires_grad=True)
    assert (heads.norm_of(module.norm_q, sample) is not None) == known
    with torch.no_grad():
        assert heads.norm_of(module.norm_q, sample) is not None
