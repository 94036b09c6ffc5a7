"""On a GPU the recipes have the numerics they have on a CPU, and what runs instead of them is said."""

import pytest
import torch

from sage_hf import record, sage_attention
from sage_kernels.exact import sdpa
from sage_kernels.formats import fp8, fp16, int8, nvfp4
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import RECIPES

LOW_BIT = [name for name, recipe in RECIPES.items() if recipe.qk != "exact"]
FORWARD_ONLY = [name for name in LOW_BIT if RECIPES[name].backward is None]
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def draw(q_heads=4, kv_heads=2, q_len=300, kv_len=500, head_dim=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, length, head_dim, generator=generator).to(dtype)
        for heads, length in ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_formats_are_bit_identical_to_the_cpus(magnitude):
    x = torch.randn(2, 3, 512, 64, generator=torch.Generator().manual_seed(1)) * magnitude
    x[0, 0, :16] = 0.0
    x[1, 1, 5, 5] = float("nan")

    def quantized(x):
        packed = nvfp4.quantize(x, RECIPES["sage3"].scale_steps)
        parts = {"nvfp4 codes": packed.codes, "nvfp4 scale": packed.scale, "nvfp4 tensor scale": packed.tensor_scale}
        for name, (codes, scale) in {
            "int8": int8.quantize(x, 16),
            "fp8": fp8.quantize(x, -2),
            "fp8 value": fp8.quantize_value(x),
            "fp16": fp16.quantize(x),
        }.items():
            parts |= {f"{name} codes": codes, f"{name} scale": scale}
        return {name: part.double().nan_to_num(1e300).cpu() for name, part in parts.items()}

    cpu, gpu = quantized(x), quantized(x.cuda())
    assert {name: (cpu[name] != gpu[name]).sum().item() for name in cpu} == dict.fromkeys(cpu, 0)


@pytest.mark.parametrize("recipe", LOW_BIT)
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"attn_mask": torch.rand(2, 1, 300, 500) < 0.5}])
def test_emulation_has_the_error_of_the_cpus(recipe, arguments):
    """Sums in another order move a rounding of P now and then, not the error as a whole."""
    inputs = draw()
    options = {"mask": arguments.get("attn_mask"), "is_causal": arguments.get("is_causal", False)}
    truth, _ = sdpa.attention(*inputs, **options)
    expected, _ = reference.attention(*inputs, RECIPES[recipe], **options)
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    output = sage_attention(*(x.cuda() for x in inputs), **on_gpu, enable_gqa=True, recipe=recipe, fallback="emulate")
    assert (output.cpu() - truth).abs().sum() <= 1.05 * (expected - truth).abs().sum()


def plan_of(*inputs, **arguments):
    layer = torch.nn.Identity()
    record.run_in_layer(layer, sage_attention, *inputs, **arguments)
    (plan,) = record.last_plans(layer)
    return plan


INT8_KERNELS = ("int8_forward_hopper", "int8_forward")  # the latter where NVRTC is missing


@pytest.mark.skipif(CAPABILITY != (9, 0), reason="says what runs on sm_90")
def test_on_hopper_sage3_runs_as_sage2_and_is_emulated_where_asked_for():
    inputs = [x.cuda() for x in draw(kv_heads=4, dtype=torch.bfloat16)]
    plan = plan_of(*inputs)
    assert (plan.recipe, plan.numerics) == ("sage2", "native")
    assert plan.kernel in INT8_KERNELS
    assert 'fallback="emulate"' in plan.reason
    plan = plan_of(*inputs, fallback="emulate")
    assert (plan.recipe, plan.kernel, plan.numerics) == ("sage3", "nvfp4_forward_emulated", "emulated")
    for recipe, kernels in (("sage1", INT8_KERNELS), ("sage2", INT8_KERNELS)):
        plan = plan_of(*inputs, recipe=recipe, fallback="error")
        assert (plan.recipe, plan.numerics) == (recipe, "native")
        assert plan.kernel in kernels


def test_short_calls_run_exactly_and_the_plan_says_why():
    inputs = [x.cuda() for x in draw(kv_heads=4, q_len=1, dtype=torch.bfloat16)]
    plan = plan_of(*inputs)
    assert (plan.kernel, plan.numerics) == ("sdpa", "exact")
    assert "too short" in plan.reason


def test_exact_attention_with_grouped_queries_and_a_mask_needs_linear_memory():
    query, key, value = (x.cuda() for x in draw(8, 2, 8192, 8192, dtype=torch.bfloat16))
    mask = torch.ones(2, 1, 1, 8192, dtype=torch.bool, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sage_attention(query, key, value, attn_mask=mask, enable_gqa=True, recipe="exact")
    scores = 2 * 8 * 8192 * 8192 * 2
    assert torch.cuda.max_memory_allocated() - before < scores / 4


@pytest.mark.parametrize("recipe", FORWARD_ONLY)
@pytest.mark.parametrize("fallback", ["native", "emulate"])
def test_gradients_of_forward_only_recipes_match_exact_attention(recipe, fallback):
    inputs = [x.cuda().requires_grad_() for x in draw(kv_heads=4, dtype=torch.bfloat16)]
    weights = torch.randn(2, 4, 300, 64, device="cuda")
    (sage_attention(*inputs, recipe=recipe, fallback=fallback) * weights).sum().backward()
    expected = [x.detach().double().requires_grad_() for x in inputs]
    (torch.nn.functional.scaled_dot_product_attention(*expected) * weights).sum().backward()
    for x, y in zip(inputs, expected, strict=True):
        # PyTorch's kernel keeps P and dS in bfloat16.
        assert (x.grad - y.grad).abs().sum() <= 2**-6 * y.grad.abs().sum()
