"""A kernel that is wrong on a GPU that nobody has tested is found before it runs, passed over, and remembered."""

import logging
from dataclasses import dataclass, replace

import pytest
import torch

import sage_hf
from sage_hf import record
from sage_kernels import kv_cache
from sage_kernels.dispatch import (
    examination,
    execution,
    kv_kernels,
    qk_norm_rope_kernels,
    registry,
    self_check,
    verdicts,
)
from sage_kernels.dispatch.plan import Plan
from sage_kernels.dispatch.registry import forget_choices
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.select import select
from sage_kernels.reference.registration import ReferenceForward, ReferenceKVKernel, ReferenceQKNormRopeKernel
from sage_kernels.spec.kv_cache import KVCache
from sage_kernels.spec.kv_format import get_format
from sage_kernels.spec.recipe import get_recipe
from tests.helpers.kernels import FakeBackward, FakeForward, FakeQuantizer, FakeTraining, only_the_reference

UNTESTED = (12, 0)
REQUEST = Request("sage3", "cuda", UNTESTED, torch.bfloat16, 1, 4, 4, 2048, 2048, 64, 64, "none", False, False)
TRAINING = replace(REQUEST, recipe="sage_bwd", grad=True)


@dataclass(frozen=True)
class DoubledScale(FakeForward):
    """Takes the scale of the scores twice."""

    def attend(self, call, quantizer):
        return super().attend(replace(call, scale=2 * call.scale), quantizer)


@dataclass(frozen=True)
class Raising(FakeForward):
    """Does not compile."""

    def attend(self, call, quantizer):
        raise RuntimeError("ptxas fatal: unknown instruction\nand more")


@dataclass(frozen=True)
class DoubledValues(FakeQuantizer):
    """Makes operands of which its forward kernel attends to twice V."""


@dataclass(frozen=True)
class OfOperands(FakeForward):
    """Attends to the operands of its quantiser."""

    takes: type | None = object

    def attend(self, call, quantizer):
        factor = 2 if isinstance(quantizer, DoubledValues) else 1
        return super().attend(replace(call, value=factor * call.value), quantizer)


@dataclass(frozen=True)
class DoubledGradients(FakeBackward):
    """Returns gradients twice as large."""

    def backward(self, call):
        return tuple(2 * x for x in super().backward(call))


@pytest.fixture
def ran():
    """Names of the fake kernels that ran, in order."""
    return []


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """No verdict is known, no kernel but the reference, and the cache is empty."""
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("SAGE_HF_SELF_CHECK", raising=False)
    self_check.forget()
    with only_the_reference():
        yield
    self_check.forget()


def register(kind, name, recipe, ran):
    registry.register_forward(kind(name, recipe, ran=ran.append))


@pytest.mark.parametrize(("kind", "why"), [(DoubledScale, "that rounding explains"), (Raising, "ptxas fatal")])
def test_a_wrong_kernel_is_found_passed_over_and_explained(kind, why, ran, caplog):
    register(kind, "wrong", "sage3", ran)
    register(FakeForward, "right", "sage2", ran)
    with caplog.at_level(logging.WARNING):
        plan = execution.select_checked(REQUEST, "native")
    assert (plan.recipe, plan.kernel) == ("sage2", "right")
    (who, reason), *_ = plan.passed_over
    assert who == "sage3 by wrong" and reason.startswith("failed its self-check: ") and why in reason
    (warning,) = caplog.messages
    assert "\n" not in warning and "wrong" in warning
    ran.clear()
    assert execution.select_checked(REQUEST, "native") == plan
    assert ran == []  # no kernel is checked twice


def test_verdicts_outlive_the_process_until_something_changes(ran, monkeypatch):
    register(DoubledScale, "wrong", "sage3", ran)
    register(FakeForward, "right", "sage2", ran)
    execution.select_checked(REQUEST, "native")
    ran.clear()
    self_check.forget()  # as a new process begins
    assert select(REQUEST).kernel == "right"
    assert execution.select_checked(REQUEST, "native").kernel == "right"
    assert ran == []
    monkeypatch.setattr(verdicts, "_source_digest", lambda: "other")
    self_check.forget()
    assert select(REQUEST).kernel == "wrong"
    assert execution.select_checked(REQUEST, "native").kernel == "right"
    assert "wrong" in ran


def test_a_file_that_cannot_be_read_holds_no_verdict(ran, tmp_path):
    register(FakeForward, "right", "sage3", ran)
    for content in ("", "[]", '{"verdicts": 1}', '{"verdicts": {"x": 1}}'):
        execution.select_checked(REQUEST, "native")
        (path,) = tmp_path.rglob("*.json")
        path.write_text(content)
        self_check.forget()
        ran.clear()
        assert execution.select_checked(REQUEST, "native").kernel == "right"
        assert ran == ["right"]


def test_switched_off_nothing_is_checked_and_no_verdict_counts(ran, monkeypatch):
    register(DoubledScale, "wrong", "sage3", ran)
    monkeypatch.setenv("SAGE_HF_SELF_CHECK", "0")
    assert execution.select_checked(REQUEST, "native").kernel == "wrong"
    monkeypatch.setenv("SAGE_HF_SELF_CHECK", "1")
    assert execution.select_checked(REQUEST, "native").kernel != "wrong"
    monkeypatch.setenv("SAGE_HF_SELF_CHECK", "0")
    forget_choices()
    assert execution.select_checked(REQUEST, "native").kernel == "wrong"


def test_a_tested_gpu_checks_nothing(ran):
    register(FakeForward, "right", "sage3", ran)
    for capability in self_check.TESTED:
        assert execution.select_checked(replace(REQUEST, capability=capability), "native").kernel == "right"
    assert ran == []


def test_the_quantizer_is_passed_over_where_another_makes_the_kernel_right(ran):
    registry.register_quantizer(DoubledValues("wrong", "sage3", ran=ran.append))
    registry.register_quantizer(FakeQuantizer("right", "sage3", ran=ran.append))
    register(OfOperands, "forward", "sage3", ran)
    plan = execution.select_checked(REQUEST, "native")
    assert (plan.kernel, plan.quantizer) == ("forward", "right")
    ((who, reason),) = plan.other_phases
    assert who == "wrong" and "self-check" in reason


def test_a_wrong_backward_kernel_gives_way_to_the_next(ran):
    register(FakeTraining, "forward", "sage_bwd", ran)
    registry.register_backward(DoubledGradients("wrong", "sage_bwd", ran=ran.append))
    registry.register_backward(FakeBackward("right", "sage_bwd", ran=ran.append))
    plan = execution.select_checked(TRAINING, "native")
    assert (plan.kernel, plan.backward) == ("forward", "right")
    assert not plan.is_fallback and plan.reason.startswith("wrong: failed its self-check")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_it_checks_gradients_in_any_mode(mode, ran):
    register(FakeTraining, "forward", "sage_bwd", ran)
    registry.register_backward(DoubledGradients("wrong", "sage_bwd", ran=ran.append))
    with mode(), torch.autocast("cpu", torch.bfloat16):
        assert execution.select_checked(TRAINING, "native").backward != "wrong"
        assert examination.examine_qk_norm_rope(64, torch.device("cpu")).reason == ""


def test_a_reference_that_fails_blames_no_kernel(ran, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("no deterministic implementation")

    register(FakeForward, "right", "sage3", ran)
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceForward, "attend", fails)
        assert execution.select_checked(REQUEST, "native").kernel == "right"
    self_check.forget()
    assert not verdicts.is_known(verdicts.subject("right", "sage3", 64), UNTESTED)


def test_it_waits_while_a_mode_sees_operators(ran):
    from torch.utils._python_dispatch import TorchDispatchMode

    register(FakeForward, "right", "sage3", ran)
    with TorchDispatchMode():
        execution.select_checked(REQUEST, "native")
    assert ran == []
    execution.select_checked(REQUEST, "native")
    assert ran == ["right"]


@pytest.mark.parametrize(
    "facts",
    [
        {"is_causal": True, "lower_right": True},
        {"mask": "keys", "q_heads": 8},
        {"mask": "bool", "head_dim": 128},
        {"mask": "additive", "dtype": torch.float16},
        {"mask": "block_keys", "list_sizes": (64, 128)},
        {"packed": True, "return_lse": True},
    ],
    ids=str,
)
def test_the_check_is_a_call_like_the_one_that_waits(facts, ran):
    asked = replace(REQUEST, aligned=True, **facts)
    plan = Plan(asked, "kernel", "sage3", "native")
    call = examination.CheckCase.like(plan).draw(torch.device("cpu"))
    found = execution.request_of(call)
    names = ("dtype", "head_dim", "mask", "is_causal", "lower_right", "packed", "return_lse", "list_sizes")
    assert [getattr(found, name) for name in names] == [getattr(asked, name) for name in names]
    assert (found.q_heads > found.kv_heads) == (asked.q_heads > asked.kv_heads)


def test_a_users_call_runs_what_is_right_and_explain_says_why(ran, monkeypatch):
    def on_untested_gpu(call, grad=False):
        request = original(call, grad)
        return replace(request, device_type="cuda", capability=UNTESTED)

    original = execution.request_of
    monkeypatch.setattr(execution, "request_of", on_untested_gpu)
    register(DoubledScale, "wrong", "sage3", ran)
    register(FakeForward, "right", "sage2", ran)
    layer = torch.nn.Identity()
    inputs = torch.randn(3, 1, 2, 128, 64).unbind()
    output = record.run_in_layer(layer, sage_hf.sage_attention, *inputs)
    (plan,) = record.last_plans(layer)
    assert plan.kernel == "right" and "wrong: failed its self-check" in plan.reason
    call = examination.CheckCase("sage2").draw(torch.device("cpu"))
    call = replace(call, query=inputs[0], key=inputs[1], value=inputs[2], recipe=get_recipe("sage2"))
    assert torch.equal(output, registry.get_forward("reference").attend(call, None)[0])


class DoubledQKNormRope(ReferenceQKNormRopeKernel):
    """Returns heads twice as large."""

    name = "qk_norm_rope"

    def forward(self, x, norm, rope):
        return 2 * super().forward(x, norm, rope)

    def backward(self, gradient, x, norm, rope):
        return gradient, None if norm is None else norm.weight, None if norm is None else norm.bias


def test_a_wrong_kernel_of_norms_gives_way_to_pytorchs_operators(monkeypatch):
    kernels = {"qk_norm_rope": DoubledQKNormRope(), "reference": ReferenceQKNormRopeKernel()}
    monkeypatch.setattr(qk_norm_rope_kernels, "_kernels", kernels)
    x = torch.randn(2, 5, 3, 64).bfloat16()
    assert qk_norm_rope_kernels.select_qk_norm_rope_kernel(x, None, None, grad=False).name == "qk_norm_rope"
    found = examination.examine_qk_norm_rope(64, torch.device("cpu"))
    assert found.kernel == "qk_norm_rope" and "that rounding explains" in found.reason
    assert not self_check.keep_one(found, verdicts.QK_NORM_ROPE, 64, None)
    assert qk_norm_rope_kernels.select_qk_norm_rope_kernel(x, None, None, grad=False).name == "reference"


class WrongCache(ReferenceKVKernel):
    """Stores V as K, or attends with twice the scale."""

    name, native = "kv_decode", True

    def __init__(self, wrong):
        self.wrong = wrong

    def append(self, cache, key, value):
        super().append(cache, key, key if self.wrong == "stored" else value)

    def decode(self, cache, query, key, value, key_mask, scale):
        return super().decode(cache, query, key, value, key_mask, 2 * scale if self.wrong == "output" else scale)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("wrong", ["stored", "output"])
def test_a_wrong_kernel_of_the_kv_cache_gives_way_to_pytorchs_operators(wrong, format, monkeypatch):
    """Before a cache stores its first tokens, on a GPU that nobody has tested."""
    kernels = {"kv_decode": WrongCache(wrong), "reference": ReferenceKVKernel()}
    monkeypatch.setattr(kv_kernels, "_kernels", kernels)
    for module in (self_check, kv_kernels):
        monkeypatch.setattr(module, "capability_of", lambda device: UNTESTED)
    query, key, value = torch.randn(3, 1, 2, 70, 64).bfloat16().unbind()
    cache = KVCache(get_format(format), key)
    assert kv_kernels.select_kv_kernel(cache, query[:, :, -1:])[0].name == "kv_decode"
    kv_cache.store(cache, query, key, value)
    _, kernel, reason = kv_cache.decode(cache, *(x[:, :, -1:] for x in (query, key, value)), None, 0.125)
    assert kernel == "reference (emulated)" and reason.startswith("kv_decode: failed its self-check")
    assert verdicts.failure("kv_decode", verdicts.KV + format, 64, UNTESTED)


def test_a_right_kernel_of_the_kv_cache_serves_on(monkeypatch):
    monkeypatch.setattr(kv_kernels, "_kernels", {"kv_decode": WrongCache("nothing"), "reference": ReferenceKVKernel()})
    for format in ("int8", "int4", "nvfp4"):
        assert examination.examine_kv(format, 128, torch.device("cpu")) == ("kv_decode", 0.0, "")
