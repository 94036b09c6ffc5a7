"""Which kernel serves a request, and what is said about those that do not."""

from dataclasses import replace

import pytest
import torch

from sage_hf import sage_attention
from sage_kernels import backends, ops  # noqa: F401 - `backends` registers the kernels
from sage_kernels.cuda import compiler
from sage_kernels.dispatch import execution, registry
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.dispatch.registry import forget_choices, get_backward, get_forward, get_quantizer
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.select import select
from sage_kernels.reference import forward as reference
from sage_kernels.spec.call import Call
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.triton import registration
from tests.helpers.kernels import (
    FakeBackward,
    FakeForward,
    FakeTraining,
    only_the_reference,
    registered_backwards,
    registered_kernels,
)

CPU = Request("sage3", "cpu", None, torch.bfloat16, 1, 8, 8, 1024, 1024, 64, 64, "none", False, False)
GPU = replace(CPU, device_type="cuda", capability=(9, 0))
VOLTA = replace(GPU, capability=(7, 0))


@pytest.fixture
def add_kernel():
    """Register kernels next to the reference for one test."""

    def add(name, recipe, reason=lambda request: "", native=True, trains=False):
        kind = FakeTraining if trains else FakeForward
        registry.register_forward(kind(name, recipe, native, reason))
        if trains:
            registry.register_backward(FakeBackward(f"{name}_backward", recipe, native, reason))

    with only_the_reference():
        yield add


@pytest.fixture
def newest(monkeypatch):
    """A machine whose compilers are those that every kernel wants."""
    monkeypatch.setattr(registration, "triton_version", lambda: (3, 9))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(compiler, "unavailable", lambda *_: "")
    forget_choices()
    yield
    forget_choices()


def test_a_gpu_without_a_native_kernel_runs_exact_attention_and_says_why():
    plan = select(VOLTA)
    assert (plan.kernel, plan.recipe, plan.numerics) == ("sdpa", "exact", "exact")
    assert plan.is_fallback
    assert all(word in plan.reason for word in ("compute capability", "sage3", "sage2", "sage1", 'fallback="emulate"'))


@pytest.mark.parametrize(
    ("capability", "triton", "recipe", "kernel"),
    [
        ((8, 0), (3, 9), "sage1", "int8_forward"),
        ((8, 6), (3, 9), "sage1", "int8_forward"),
        ((8, 9), (3, 9), "sage2", "int8_forward"),
        ((9, 0), (3, 4), "sage2", "int8_forward_hopper"),
        ((10, 0), (3, 8), "sage2", "int8_forward"),
        ((10, 0), (3, 9), "sage3", "nvfp4_forward"),
        ((10, 3), (3, 9), "sage3", "nvfp4_forward"),
        ((12, 0), (3, 4), "sage2", "int8_forward"),
        ((12, 0), (3, 6), "sage3", "nvfp4_forward"),
        ((12, 1), (3, 4), "exact", "sdpa"),
        ((12, 1), (3, 9), "sage3", "nvfp4_forward"),
    ],
)
def test_every_gpu_runs_the_best_recipe_it_has(monkeypatch, capability, triton, recipe, kernel):
    monkeypatch.setattr(registration, "triton_version", lambda: triton)
    monkeypatch.setattr(compiler, "unavailable", lambda *_: "")
    forget_choices()
    plan = select(replace(GPU, capability=capability, aligned=True))
    forget_choices()
    assert (plan.recipe, plan.kernel) == (recipe, kernel)
    assert plan.is_fallback == (recipe != "sage3")


def test_where_triton_is_too_old_for_fp4_the_plan_says_what_to_install(monkeypatch):
    monkeypatch.setattr(registration, "triton_version", lambda: (3, 8))
    forget_choices()
    plan = select(replace(GPU, capability=(10, 0)))
    forget_choices()
    assert plan.recipe == "sage2"
    assert 'needs Triton 3.9, installed is 3.8: pip install "triton>=3.9"' in plan.reason


@pytest.mark.parametrize(
    ("sizes", "reason"), [({"batch": 65536, "capability": (8, 0)}, "65535"), ({"dtype": torch.float64}, "dtype must")]
)
def test_reasons_name_a_kernels_limits(sizes, reason):
    assert reason in select(replace(GPU, recipe="sage1", **sizes)).reason


@pytest.mark.parametrize(
    ("request_", "kernel"), [(CPU, "reference"), (VOLTA, "reference"), (GPU, "nvfp4_forward_emulated")]
)
def test_emulate_gives_the_recipes_numerics_on_any_device(request_, kernel):
    plan = select(request_, "emulate")
    assert (plan.kernel, plan.recipe, plan.numerics) == (kernel, "sage3", "emulated")


@pytest.mark.parametrize("request_", [CPU, GPU])
def test_error_refuses_what_is_not_native_and_says_what_to_do(request_):
    with pytest.raises(KernelUnavailableError, match='fallback="native"'):
        select(request_, "error")


def test_the_best_native_recipe_of_the_device_stands_in(add_kernel):
    add_kernel("ampere", "sage1")
    assert select(GPU).recipe == "sage1"
    add_kernel("hopper", "sage2")
    plan = select(GPU)
    assert (plan.kernel, plan.recipe, plan.numerics, plan.is_fallback) == ("hopper", "sage2", "native", True)
    add_kernel("blackwell", "sage3")
    plan = select(GPU)
    assert (plan.kernel, plan.is_fallback) == ("blackwell", False)
    assert select(GPU, "error").kernel == "blackwell"


def test_a_native_kernel_is_preferred_to_the_emulation_even_when_registered_later(add_kernel):
    add_kernel("blackwell", "sage3")
    assert select(GPU, "emulate").kernel == "blackwell"


def test_a_kernel_that_cannot_serve_is_passed_over_with_its_reason(add_kernel):
    add_kernel("narrow", "sage2", lambda request: "head_dim above 64" if request.head_dim > 64 else "")
    assert select(GPU).kernel == "narrow"
    plan = select(replace(GPU, head_dim=128))
    assert ("sage2 by narrow", "head_dim above 64") in plan.passed_over
    assert "head_dim above 64" in plan.reason


def test_a_stand_in_is_judged_by_its_own_recipe(add_kernel):
    seen = []
    add_kernel("spy", "sage1", lambda request: seen.append(request.recipe) or "")
    select(GPU)
    assert seen == ["sage1"]


@pytest.mark.parametrize("sizes", [{"q_len": 15}, {"q_len": 1}, {"kv_len": 63}])
def test_short_calls_are_exact_unless_emulation_is_asked_for(sizes):
    short = replace(CPU, **sizes)
    assert select(short).kernel == "sdpa"
    assert "too short" in select(short).reason
    assert select(short, "emulate").kernel == "reference"


def test_a_kernel_without_a_backward_pass_is_passed_over_where_gradients_are_wanted(add_kernel):
    add_kernel("forward", "sage_bwd")
    request = replace(GPU, recipe="sage_bwd")
    assert select(request).kernel == "forward"
    plan = select(replace(request, grad=True))
    assert plan.kernel == "sdpa"
    assert ("sage_bwd by forward", "forward only") in plan.passed_over
    assert select(replace(request, grad=True), "emulate").kernel == "reference"
    add_kernel("both", "sage_bwd", trains=True)
    assert select(replace(request, grad=True)).kernel == "both"


def test_forward_only_recipes_run_exactly_with_gradients(add_kernel):
    add_kernel("both", "sage2", trains=True)
    plan = select(replace(GPU, recipe="sage2", grad=True))
    assert plan.kernel == "sdpa" and "sage2" in plan.reason and "gradients" in plan.reason
    with pytest.raises(KernelUnavailableError, match=r"sage2.*gradients"):
        select(replace(GPU, recipe="sage2", grad=True), "error")


@pytest.mark.parametrize("sizes", [{"head_dim": 8}, {"head_dim": 12}, {"v_head_dim": 15}, {"head_dim": 272}])
@pytest.mark.parametrize("request_", [CPU, GPU, replace(CPU, recipe="sage_bwd", grad=True)])
def test_an_unserved_head_dim_runs_exactly_unless_forbidden(request_, sizes):
    request_ = replace(request_, **sizes)
    for fallback in ("native", "emulate"):
        plan = select(request_, fallback)
        assert (plan.kernel, plan.reason) == ("sdpa", "head_dim outside 16…256")
    with pytest.raises(KernelUnavailableError, match="head_dim outside 16…256"):
        select(request_, "error")


@pytest.mark.parametrize("mask", ["bool", "additive"])
def test_with_an_attention_bias_low_bits_gain_only_with_more_keys_in_even_rows_on_a_gpu(mask):
    short = replace(GPU, recipe="sage1", capability=(8, 0), mask=mask, kv_len=1023)
    assert select(short).reason.startswith("fewer than 1024 keys together with an attention bias")
    assert "no multiple of 8" in select(replace(short, kv_len=3907)).reason
    for served in (replace(short, kv_len=1024), replace(short, mask="keys"), replace(short, mask="none")):
        assert select(served).kernel == "int8_forward"
    for fallback in ("emulate", "error"):
        assert select(short, fallback).kernel == "int8_forward"
    assert select(replace(short, recipe="sage_bwd", grad=True)).kernel == "int8_forward"
    assert select(replace(short, device_type="cpu", capability=None)).kernel == "reference"


def test_equal_reasons_compare_equal_whatever_the_sizes():
    """The log prints each reason once; a size in it would print it at every decoding step."""
    assert select(replace(CPU, q_len=1, kv_len=100)).reason == select(replace(CPU, q_len=1, kv_len=101)).reason


def test_two_kernels_of_one_name_are_refused():
    with pytest.raises(ValueError, match="registered already"):
        registry.register_forward(get_forward("reference"))
    with pytest.raises(ValueError, match="registered already"):
        registry.register_backward(get_backward("int8_backward"))
    with pytest.raises(ValueError, match="registered already"):
        registry.register_quantizer(get_quantizer("int8_quantize"))


def test_a_request_holds_the_facts_of_its_tensors():
    query, key, value = torch.zeros(2, 8, 5, 64), torch.zeros(2, 4, 7, 64), torch.zeros(2, 4, 7, 32)
    request = Request.of(query, key, value, torch.zeros(1, 1, 1, 7, dtype=torch.bool), False, "sage2", True)
    assert request == Request("sage2", "cpu", None, torch.float32, 2, 8, 4, 5, 7, 64, 32, "keys", False, True)
    assert Request.of(query, key, value, torch.zeros(1, 1, 5, 7, dtype=torch.bool)).mask == "bool"
    assert Request.of(query, key, value, torch.zeros(1, 1, 1, 7)).mask == "additive"
    assert Request.of(query, key, value).mask == "none"
    assert Request.of(query, key, value, grad=True) == replace(Request.of(query, key, value), grad=True)


# What kernels compute.

# A value that no recipe's field has by default.
OTHERS = {
    "smooth_q": True,
    "smooth_k": True,
    "smooth_v": True,
    "rotate": True,
    "equalize": True,
    "tensor_scale": False,
    "scale_steps": (-1, 1),
    "key_scale_steps": (-1, 1),
    "denominator": "quantized_p",
}
KERNELS = registered_kernels()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("field", OTHERS)
def test_a_field_that_a_kernel_would_ignore_makes_it_pass_the_recipe_over(name, field):
    kernel = KERNELS[name]
    served = [recipe for recipe in RECIPES.values() if kernel.serves(recipe)]
    assert served
    for recipe in served:
        changed = replace(recipe, **{field: OTHERS[field]})
        assert changed == recipe or field in kernel.recipes.honours or not kernel.serves(changed), recipe.name


@pytest.mark.parametrize(
    "name", ["int8_quantize", "int8_forward", "nvfp4_quantize", "nvfp4_forward", "nvfp4_forward_cuda"]
)
def test_heavy_keys_are_64_or_none_and_have_no_gradients(name):
    kernel = KERNELS[name]
    for recipe in RECIPES.values():
        served = kernel.serves(replace(recipe, heavy_keys=0))
        assert kernel.serves(replace(recipe, heavy_keys=64)) == (served and recipe.backward is None)
        assert not kernel.serves(replace(recipe, heavy_keys=32))


@pytest.mark.parametrize("name", [name for name in KERNELS if "backward" not in name])
def test_heavy_keys_are_the_heaviest_or_the_first(name):
    """Every quantiser chooses them; to forward kernels, which get them as operands, it is all one."""
    for recipe in RECIPES.values():
        if KERNELS[name].serves(recipe) and recipe.heavy_keys:
            assert all(KERNELS[name].serves(replace(recipe, heavy_choice=choice)) for choice in ("first", "heaviest"))


def test_hoppers_quantiser_serves_the_means_that_it_takes():
    kernel = KERNELS["int8_quantize_hopper"]
    for name in ("sage1", "sage2", "sage_bwd"):
        assert kernel.serves(RECIPES[name])
        for field in OTHERS:
            changed = replace(RECIPES[name], **{field: OTHERS[field]})
            assert kernel.serves(changed) == (field == "rotate" or changed == RECIPES[name])
        assert not kernel.serves(replace(RECIPES[name], smooth_k=False))
    assert not kernel.serves(replace(RECIPES["sage2"], smooth_v=False))
    assert not kernel.serves(RECIPES["sage_bwd_int8"])


def test_a_backward_kernel_serves_the_formats_that_it_computes():
    for backward, served in (
        ("16bit", {"int8_backward", "int8_backward_fused", "reference_backward"}),
        ("int8", {"int8_backward", "reference_backward"}),
        (None, set()),
    ):
        recipe = replace(RECIPES["sage_bwd"], backward=backward)
        assert {name for name, kernel in registered_backwards().items() if kernel.serves(recipe)} == served


@pytest.fixture
def smoothed(monkeypatch):
    """A recipe of that name that no fast kernel computes."""
    monkeypatch.setitem(RECIPES, "sage1", replace(RECIPES["sage1"], smooth_q=True))
    forget_choices()
    yield RECIPES["sage1"]
    forget_choices()


@pytest.mark.usefixtures("newest")
def test_a_recipe_that_no_fast_kernel_computes_runs_on_the_reference(smoothed):
    request = replace(GPU, recipe="sage1", aligned=True)
    plan = select(request, "emulate")
    assert (plan.kernel, plan.recipe, plan.numerics, plan.quantizer) == ("reference", "sage1", "emulated", "")
    assert select(request).kernel == "sdpa"
    with pytest.raises(KernelUnavailableError):
        select(request, "error")


def test_the_reference_honours_what_made_the_others_pass_the_recipe_over(smoothed):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 80, 64, generator=generator) for _ in range(3)]
    output, _ = ops.attention(*inputs, recipe="sage1", fallback="emulate")
    assert torch.equal(output, reference.attention(*inputs, smoothed)[0])
    assert not torch.equal(output, reference.attention(*inputs, replace(smoothed, smooth_q=False))[0])


# The kernels of a plan.

TRAINING = replace(GPU, recipe="sage_bwd", grad=True, aligned=True, head_dim=128, v_head_dim=128)


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize(
    ("change", "kernels"),
    [
        ({}, ("int8_forward_hopper", "int8_quantize_hopper", "int8_backward_fused")),
        ({"mask": "keys"}, ("int8_forward_hopper", "int8_quantize_hopper", "int8_backward_fused")),
        ({"aligned": False}, ("int8_forward_hopper", "int8_quantize", "int8_backward_fused")),
        ({"packed": True}, ("int8_forward", "int8_quantize", "int8_backward_fused")),
        ({"head_dim": 64, "v_head_dim": 64}, ("int8_forward_hopper", "int8_quantize_hopper", "int8_backward_fused")),
        ({"q_len": 64, "kv_len": 64}, ("int8_forward_hopper", "int8_quantize_hopper", "int8_backward_fused")),
        ({"mask": "bool"}, ("int8_forward", "int8_quantize", "int8_backward")),
        ({"head_dim": 60, "v_head_dim": 60, "aligned": False}, ("int8_forward", "int8_quantize", "int8_backward")),
        ({"head_dim": 32, "v_head_dim": 32}, ("int8_forward", "int8_quantize", "int8_backward")),
        ({"head_dim": 256, "v_head_dim": 256}, ("int8_forward", "int8_quantize", "int8_backward")),
        ({"recipe": "sage_bwd_int8"}, ("int8_forward", "int8_quantize", "int8_backward")),
        ({"capability": (8, 0)}, ("int8_forward", "int8_quantize", "int8_backward")),
        ({"grad": False}, ("int8_forward_hopper", "int8_quantize_hopper", "")),
        ({"grad": False, "recipe": "sage2"}, ("int8_forward_hopper", "int8_quantize_hopper", "")),
        ({"grad": False, "recipe": "exact"}, ("sdpa", "", "")),
    ],
)
def test_a_plan_names_the_quantiser_and_the_backward_kernel(change, kernels):
    plan = select(replace(TRAINING, **change))
    assert (plan.kernel, plan.quantizer, plan.backward) == kernels
    assert (plan.outcome.kernel, plan.outcome.quantizer, plan.outcome.backward) == kernels


@pytest.mark.usefixtures("newest")
def test_a_plan_says_why_another_quantiser_or_backward_kernel_was_passed_over():
    assert select(TRAINING).other_phases == ()
    odd = dict(select(replace(TRAINING, head_dim=60, v_head_dim=60)).other_phases)
    assert "multiples of 8" in odd["int8_backward_fused"]
    passed_over = select(replace(TRAINING, mask="bool")).other_phases
    assert ("int8_quantize_hopper", "no masks other than key-padding masks") in passed_over
    misaligned, *_ = select(replace(TRAINING, aligned=False)).other_phases
    assert misaligned[0] == "int8_quantize_hopper" and "16 bytes" in misaligned[1]
    others = dict(select(replace(TRAINING, recipe="sage_bwd_int8")).other_phases)
    assert others.keys() == {"int8_quantize_hopper", "int8_backward_fused"}
    assert all("formats and transforms" in reason for reason in others.values())


@pytest.mark.usefixtures("newest")
def test_without_a_backward_kernel_the_next_one_serves():
    with registry.without("int8_backward_fused"):
        assert select(TRAINING).backward == "int8_backward"
    assert select(TRAINING).backward == "int8_backward_fused"


@pytest.mark.usefixtures("newest")
def test_a_substitute_has_a_brief_and_a_full_reason():
    ada = select(replace(GPU, capability=(8, 9), q_len=8192, kv_len=8192))
    assert (ada.recipe, ada.brief_reason) == ("sage2", "sage3 is not native on this device")
    assert "NVFP4 needs a Blackwell GPU" in ada.reason and "sage3, sage3" not in ada.reason
    short = select(replace(GPU, capability=(8, 9), q_len=8))
    assert short.recipe == "exact" and short.brief_reason == short.reason
    assert select(CPU).brief_reason == ""


@pytest.mark.usefixtures("newest")
def test_a_forward_kernel_without_a_backward_kernel_is_passed_over_with_all_reasons():
    plan = select(replace(TRAINING, dtype=torch.float32))
    assert plan.kernel == "sdpa"
    assert "int8_backward: gradients need float16 or bfloat16" in plan.reason


def test_a_variant_of_a_recipe_runs_by_the_kernels_of_a_plan_or_by_the_reference():
    query, key, value = torch.randn(3, 1, 2, 80, 32, generator=torch.Generator().manual_seed(0))
    emulated = select(Request.of(query, key, value, recipe="sage3_paper"))
    foreign = replace(emulated, kernel="int8_forward", quantizer="int8_quantize")
    variant = replace(RECIPES["sage3_paper"], name="no smoothing", smooth_q=False, smooth_k=False)
    expected, _ = reference.attention(query, key, value, variant, is_causal=True, scale=0.2)
    for plan in (emulated, foreign):
        call = Call(query, key, value, variant, is_causal=True, scale=0.2)
        assert torch.equal(execution.attend_by_plan(call, plan), expected)


@pytest.mark.parametrize("recipe", ["sage2", "sage_bwd"])
def test_without_kernels_a_call_is_exact_with_its_gradients(recipe):
    tensors = torch.randn(3, 1, 2, 80, 32, generator=torch.Generator().manual_seed(0)).requires_grad_().unbind()
    with registry.without(*registry.forwards):
        assert select(Request.of(*tensors, recipe=recipe)).reason == f"no kernel of {recipe} is registered"
        output = sage_attention(*tensors, recipe=recipe)
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors)
    assert torch.equal(output, expected) and output.grad_fn is not None
