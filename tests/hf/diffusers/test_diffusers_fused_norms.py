"""Norms and RoPE that a kernel runs in place of a processor's own are those of the processor, in every family."""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from sage_hf import explain, record
from sage_hf.diffusers import SageAttnProcessor, attention_layers, fused_norms
from sage_kernels.spec.qk_norm_rope import Rope
from tests.helpers.families import Family, each_family, family, run

WITH_ROPE = {
    *("cogvideox-1.5", "hunyuan-video", "hunyuan-video-1.5", "mochi", "wan-t2v", "wan-i2v", "ltx", "easyanimate"),
    *("flux", "flux-2", "chroma", "qwen-image", "hunyuan-image", "z-image", "cogview4", "cosmos"),
}
"""Cases whose RoPE the kernel computes."""


@pytest.fixture
def served(monkeypatch) -> list[Rope | None]:
    """Let samples of a CPU be served, by the reference; the RoPE of each call."""
    ropes: list[Rope | None] = []

    def qk_norm_rope(x, norm, rope):
        ropes.append(rope)
        return original(x, norm, rope)

    original = fused_norms.qk_norm_rope
    monkeypatch.setattr(fused_norms, "qk_norm_rope", qk_norm_rope)
    monkeypatch.setattr(fused_norms, "is_served", lambda sample: True)
    monkeypatch.setattr(fused_norms, "gains", lambda module, sample: True)
    return ropes


def queries_and_keys(
    case: Family, dtype: torch.dtype, recipe: str = "sage1", model: nn.Module | None = None
) -> list[torch.Tensor]:
    model, inputs = case.build(dtype) if model is None else model, case.make_inputs(dtype)
    model.set_attn_processor(SageAttnProcessor(recipe, "emulate"))
    calls: list[record.AttentionCall] = []
    with record.observe(calls.append):
        run(model, inputs)
    return [x for call in calls for x in (call.query, call.key)]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.audit)], ids=str)
@each_family
def test_queries_and_keys_match_the_processor(case: Family, dtype: torch.dtype, request, sage_log):
    expected = queries_and_keys(case, dtype)
    ropes = request.getfixturevalue("served")
    found = queries_and_keys(case, dtype)
    assert not any("gave different" in message for message in sage_log)
    if dtype == torch.float32:
        assert any(rope is not None for rope in ropes) == (case.name in WITH_ROPE)
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
    assert explain(model).qk_norm_rope == len(attention_layers(model))


def test_where_no_kernel_serves_nothing_changes(monkeypatch):
    monkeypatch.setattr(fused_norms, "qk_norm_rope", lambda *arguments: pytest.fail("it serves no CPU"))
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


OTHER_ANGLES = {
    "other tokens": angles(7),
    "bfloat16": angles(8, torch.bfloat16),
    "one table": (angles(8)[0],),
    "another device": [one.to("meta") for one in angles(8)],
}
CHANGES = {
    "forward hook": lambda module: module.norm_k.register_forward_hook(lambda *seen: None),
    "forward pre-hook": lambda module: module.norm_k.register_forward_pre_hook(lambda *seen: None),
    "backward hook": lambda module: module.norm_k.register_full_backward_hook(lambda *seen: None),
    "backward pre-hook": lambda module: module.norm_k.register_full_backward_pre_hook(lambda *seen: None),
    "own forward": lambda module: setattr(module.norm_k, "forward", lambda x: x),
    "another class": lambda module: setattr(module, "norm_k", nn.Identity()),
    "a namesake": lambda module: setattr(module, "norm_k", type("RMSNorm", (nn.RMSNorm,), {})(32, eps=1e-6)),
    "parametrised": lambda module: parametrize.register_parametrization(module.norm_k, "weight", nn.Identity()),
    "another dtype": lambda module: module.norm_k.double(),
    "two axes": lambda module: setattr(module, "norm_k", nn.RMSNorm((2, 32), eps=1e-6)),
    "no eps": lambda module: setattr(module.norm_k, "eps", None),
}


@pytest.mark.parametrize("change", [*CHANGES, *OTHER_ANGLES])
@torch.no_grad()
def test_norms_that_are_not_known_as_they_are_and_angles_of_another_kind_stay(served, change):
    module, processor = attention("flux")
    given = {**arguments(module), "image_rotary_emb": angles(8)}
    assert fused_norms.prepare_fused_norms(processor, module, (), (), given, False) is not None
    CHANGES.get(change, lambda module: None)(module)
    given["image_rotary_emb"] = OTHER_ANGLES.get(change, given["image_rotary_emb"])
    assert fused_norms.prepare_fused_norms(processor, module, (), (), given, False) is None


def test_norms_stay_while_hooks_watch_all_modules(served):
    module = attention("flux")[0]
    sample = torch.zeros(1, 6, module.to_q.in_features)
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ):
        handle = register(lambda *seen: None)
        with torch.no_grad():
            assert fused_norms.norm_of(module.norm_q, sample) is None
            handle.remove()
            assert fused_norms.norm_of(module.norm_q, sample) is not None


@pytest.mark.parametrize("wraps", [False, True])
def test_a_class_whose_forward_was_patched_is_foreign(served, wraps, monkeypatch):
    module = attention("flux")[0]

    def patch(self, x):
        return x

    monkeypatch.setattr(nn.RMSNorm, "forward", functools.wraps(nn.RMSNorm.forward)(patch) if wraps else patch)
    with torch.no_grad():
        assert fused_norms.norm_of(module.norm_q, torch.zeros(1, 6, module.to_q.in_features)) is None


def shifting_k(original: type, name: str) -> type:
    """A user's copy of a processor of diffusers, which shifts K between norm and RoPE."""
    source = textwrap.dedent(inspect.getsource(original)).replace(f"class {original.__name__}", f"class {name}")
    line = "key = attn.norm_k(key)\n"
    assert line in source
    namespace = {**vars(sys.modules[original.__module__]), "__name__": "__main__"}
    exec(source.replace(line, line.replace("\n", " + 0.5\n")), namespace)
    return namespace[name]


@pytest.mark.parametrize("name", ["FluxAttnProcessor", "MyProcessor"])
def test_a_users_processor_is_known_by_itself_and_not_by_its_name(request, name):
    model = family("flux").build()
    for module in attention_layers(model).values():
        module.set_processor(shifting_k(type(module.processor), name)())
    expected = queries_and_keys(family("flux"), torch.float32, model=model)
    ropes = request.getfixturevalue("served")
    found = queries_and_keys(family("flux"), torch.float32, model=model)
    assert all(map(torch.equal, found, expected)) and not ropes


@pytest.mark.parametrize("where", ["rope", "norm"])
def test_a_kernel_that_disagrees_is_not_used(request, monkeypatch, sage_log, where):
    """The processor's module is patched, or the kernel is wrong: found at the first call, and said."""
    case, ropes = family("flux" if where == "rope" else "sd3.5"), request.getfixturevalue("served")
    expected = queries_and_keys(case, torch.float32, "exact")
    computed = fused_norms.qk_norm_rope

    def wrong(x, norm, rope):
        return computed(x, norm, rope) * 1.001

    monkeypatch.setattr(fused_norms, "qk_norm_rope", wrong)
    monkeypatch.setattr(fused_norms, "_agreements", {})
    found = queries_and_keys(case, torch.float32)
    for own, theirs in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(own, theirs)
    assert ropes and any("gave different" in message for message in sage_log)


def test_a_trial_is_seen_by_no_hook(served, monkeypatch):
    monkeypatch.setattr(fused_norms, "_agreements", {})
    case, seen = family("flux"), []
    model = case.build()
    first, *others = attention_layers(model).values()
    hooks = [child.register_forward_hook(lambda *given: seen.append(given[0])) for child in (first, first.to_q)]
    model.set_attn_processor(SageAttnProcessor("sage1", "emulate"))
    run(model, case.make_inputs())
    assert len(seen) == 2 and explain(model).qk_norm_rope == len(others)
    for hook in hooks:
        hook.remove()
    run(model, case.make_inputs())
    assert explain(model).qk_norm_rope == len(others) + 1


@pytest.mark.parametrize(("tokens", "known"), [(2**17, True), (6, False)])
def test_small_samples_are_trained_by_pytorchs_norms(served, tokens, known):
    module = attention("flux")[0]
    sample = torch.empty(1, tokens, module.to_q.in_features, requires_grad=True)
    assert (fused_norms.norm_of(module.norm_q, sample) is not None) == known
    with torch.no_grad():
        assert fused_norms.norm_of(module.norm_q, sample) is not None
