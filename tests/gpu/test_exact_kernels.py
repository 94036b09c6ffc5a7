"""The kernels of exact attention on a GPU: no error but rounding, 0 in rows without a key, and replayed bit for bit."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf import record, sage_attention
from sage_kernels.dispatch import cost_model, execution, registry, replays
from sage_kernels.dispatch.plan import exact_plan
from sage_kernels.dispatch.registry import get_exact
from sage_kernels.dispatch.select import select
from sage_kernels.exact import masked_rows, sdpa
from sage_kernels.spec.call import Call, Mask
from sage_kernels.spec.recipe import get_recipe
from tests.helpers.pairwise import pairwise

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Largest relative error of a number that is rounded to nearest, with 11 and 8 bits."""


def draw_call(device, sizes, head_dim, kind="none", dtype=torch.bfloat16, scale=None, heads_first=False, seed=0):
    """Sizes are (batch, q_heads, kv_heads, q_len, kv_len)."""
    batch, q_heads, kv_heads, q_len, kv_len = sizes
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads, tokens):
        size = (batch, heads, tokens, head_dim) if heads_first else (batch, tokens, heads, head_dim)
        x = torch.randn(size, generator=generator, device=device, dtype=dtype)
        return x if heads_first else x.transpose(1, 2)

    query, key, value = normal(q_heads, q_len), normal(kv_heads, kv_len), normal(kv_heads, kv_len)
    rows, columns = torch.arange(q_len, device=device)[:, None], torch.arange(kv_len, device=device)
    masks = {
        "lengths": lambda: (columns < torch.linspace(kv_len // 3, 0, batch, device=device)[:, None])[:, None, None],
        "hole": lambda: ((columns < kv_len // 5) | (columns >= kv_len - kv_len // 3))[None, None, None],
        "lengths and a hole": lambda: (
            masks["lengths"]()
            | ((columns >= kv_len - 5) & (torch.arange(batch, device=device)[:, None, None, None] % 2 == 1))
        ),
        "window": lambda: ((rows - columns).abs() <= 100)[None, None],
        "scattered": lambda: torch.rand(batch, q_heads, q_len, kv_len, generator=generator, device=device) < 0.01,
        "bias": lambda: torch.randn(1, q_heads, q_len, kv_len, generator=generator, device=device, dtype=dtype),
        "key bias": lambda: torch.randn(batch, 1, 1, kv_len, generator=generator, device=device).masked_fill(
            columns % 3 == 0, -torch.inf
        ),
    }
    kind, causal = kind.removeprefix("causal "), kind.startswith("causal ")
    mask = masks[kind]() if kind in masks else None
    options = {"is_causal": causal, "causal_offset": kv_len - q_len if causal else 0}
    return Call(
        *(query, key, value, get_recipe("exact"), Mask.of(mask, kv_len)), **options, scale=scale or head_dim**-0.5
    )


def run(call, name):
    kernel = get_exact(name)
    assert kernel.unsupported(execution.request_of(call)) == ""
    output = kernel.attend(call)
    # What a pool hands out next is this call's memory: poison it, so that an unwritten element shows.
    torch.full_like(output, torch.nan)
    return kernel.attend(call)


def assert_rounded_twice(call, output):
    """Weights are rounded relative to their row's largest, and so is the output: no other error shows."""
    options = {"is_causal": call.is_causal, "causal_offset": call.causal_offset, "scale": call.scale}
    options["mask"] = call.mask.tensor
    truth, lse = sdpa.attention(call.query, call.key, call.value, **options)
    magnitude, _ = sdpa.attention(call.query, call.key, call.value.abs(), **options)
    empty = lse == -torch.inf
    assert not output[empty].any()
    bound = 1.1 * ROUNDING[output.dtype] * (magnitude + truth.abs()) + 1e-6
    assert ((output.double() - truth).abs() <= bound)[~empty].all()


MASKED = ("lengths", "hole", "window", "scattered", "bias", "key bias")
SIZES = ((2, 4, 4, 300, 300), (2, 6, 2, 130, 512), (1, 2, 2, 257, 1001))


@pytest.mark.parametrize(
    ("kind", "sizes", "head_dim"),
    pairwise(["none", *MASKED, "causal none", *(f"causal {kind}" for kind in MASKED)], SIZES, [32, 64, 72, 128, 256]),
)
def test_masks_of_every_kind(device, kind, sizes, head_dim):
    dtype = torch.float16 if sizes == SIZES[1] else torch.bfloat16
    call = draw_call(device, sizes, head_dim, kind, dtype, heads_first=sizes == SIZES[2])
    assert_rounded_twice(call, run(call, "masked_forward"))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["lengths", "hole", "causal lengths"])
def test_masks_of_more_keys_than_a_program_reads_itself(device, kind, head_dim):
    call = draw_call(device, (2, 4, 2, 130, 1500), head_dim, kind)
    assert_rounded_twice(call, run(call, "masked_forward"))


@pytest.mark.parametrize("scale", [-0.2, 0.05])
def test_scales_of_either_sign(device, scale):
    call = draw_call(device, (1, 2, 2, 200, 200), 64, "window", scale=scale)
    assert_rounded_twice(call, run(call, "masked_forward"))


@pytest.mark.parametrize(
    ("sizes", "kind", "head_dim"),
    pairwise(
        [(2, 8, 2, 1, 3000), (3, 4, 4, 5, 90), (1, 16, 1, 4, 20000), (2, 2, 2, 64, 1030)],
        ["none", "lengths", "hole", "causal none", "causal lengths"],
        [16, 64, 72, 128, 256],
    ),
)
def test_few_queries_over_many_keys(device, sizes, kind, head_dim):
    call = draw_call(device, sizes, head_dim, kind, heads_first=sizes[3] == 1)
    assert_rounded_twice(call, run(call, "splitkv_forward"))


@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [
        ("masked_forward", "lengths", (2, 4, 4, 300, 300)),
        ("masked_forward", "window", (1, 4, 4, 1000, 1000)),
        ("masked_forward", "bias", (1, 4, 4, 300, 301)),
        ("masked_forward", "causal none", (1, 4, 2, 100, 1000)),
        ("fa3_padded", "lengths and a hole", (4, 4, 4, 300, 300)),
        ("splitkv_forward", "lengths", (2, 8, 2, 1, 3000)),
    ],
)
def test_a_replayed_call_launches_and_gives_the_same(device, replayed, name, kind, sizes):
    call = draw_call(device, sizes, 64, kind)
    if reason := get_exact(name).unsupported(execution.request_of(call)):
        pytest.skip(reason)
    plan = exact_plan(execution.request_of(call), kernel=name)
    replay = replays.replay_of_call(call, plan, call.mask.tensor, execution.compute(call, plan))
    for seed in range(1, 3):
        other = draw_call(device, sizes, 64, kind, seed=seed)
        expected, _ = execution.compute(other, plan)
        output, _ = replay(other.query, other.key, other.value, other.mask.tensor)
        assert torch.equal(output, expected)
    assert len(replayed) == 2


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_3_where_it_is_installed(device, causal):
    call = draw_call(device, (2, 8, 2, 300, 700), 128, "causal none" if causal else "none")
    if reason := get_exact("fa3").unsupported(execution.request_of(call)):
        pytest.skip(reason)
    assert_rounded_twice(call, run(call, "fa3"))


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.parametrize("kind", ["lengths", "hole", "lengths and a hole"])
@pytest.mark.parametrize(
    "sizes",
    [(4, 4, 4, 300, 300), (3, 6, 2, 130, 512), (2, 2, 2, 257, 1001), (33, 8, 1, 40, 2100), (5, 8, 2, 1, 3000)],
    ids=str,
)
def test_flash_attention_3_with_padding_and_another_kernel_with_holes(device, sizes, kind, head_dim):
    call = draw_call(device, sizes, head_dim, kind, heads_first=sizes[0] == 2)
    if reason := get_exact("fa3_padded").unsupported(execution.request_of(call)):
        pytest.skip(reason)
    assert_rounded_twice(call, run(call, "fa3_padded"))


def test_steps_over_the_same_keys_run_by_one_kernel_and_are_right(device, routed):
    call = draw_call(device, (2, 8, 2, 1, 3000), 128)
    ran = []
    for _ in range(4):
        with record.observe(lambda one: ran.append(one.plan.kernel)):
            output = sage_attention(call.query, call.key, call.value, enable_gqa=True, recipe="sage2")
        assert_rounded_twice(call, output)
    assert len(set(ran)) == 1 and ran[0] in ("fa3", "sdpa_without_cudnn", "splitkv_forward")


@pytest.mark.parametrize("kind", ["none", "causal none", "lengths", "window", "bias", "key bias"])
@pytest.mark.parametrize("sizes", [(2, 8, 8, 77, 300), (2, 8, 2, 1, 300), (1, 4, 4, 130, 130)], ids=str)
def test_without_cudnn_the_output_is_that_of_the_backends_that_are_left(device, sizes, kind):
    call = draw_call(device, sizes, 64, kind)
    grouped = sizes[1] != sizes[2]
    if kind == "causal none":
        call = replace(call, causal_offset=0)
    options = {"mask": call.mask.tensor, "is_causal": call.is_causal, "scale": call.scale, "enable_gqa": grouped}
    tensors = call.query, call.key, call.value
    left = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(left):
        expected = sdpa.sdpa(*tensors, **options)
    assert torch.equal(sdpa.sdpa(*tensors, **options, backend=sdpa.without_cudnn), expected)


@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], ids=lambda x: x.name)
def test_without_cudnn_the_callers_own_switches_hold(device, backend):
    call = draw_call(device, (2, 4, 4, 77, 300), 64)
    tensors = call.query, call.key, call.value
    with sdpa_kernel(backend):
        expected = sdpa.pytorch_sdpa(*tensors, scale=call.scale)
        assert torch.equal(sdpa.sdpa(*tensors, scale=call.scale, backend=sdpa.without_cudnn), expected)


def test_plans_name_the_kernel_that_shares_keys_for_decoding(device, routed):
    request = replace(execution.request_of(draw_call(device, (2, 8, 2, 1, 3000), 128)), recipe="sage2")
    if registry.exact_kernels(request):
        assert select(replace(request, mask="keys")).kernel == "splitkv_forward"
        assert select(request).kernel in ("sdpa_without_cudnn", "fa3")  # which take any length


def test_steps_behind_a_growing_cache_are_right_from_the_first_call(device, routed, monkeypatch):
    monkeypatch.setattr(cost_model, "GROWING_CACHE_BYTES", 0)
    monkeypatch.setattr(cost_model, "NEW_LENGTH_US", -cost_model.EXACT_HOST_US)
    registry.forget_choices()
    for kv_len in (1000, 1001, 1002):
        call = draw_call(device, (2, 8, 2, 1, kv_len), 128, seed=kv_len)
        for _ in range(3):
            output = sage_attention(call.query, call.key, call.value, enable_gqa=True, recipe="sage2")
            assert_rounded_twice(call, output)


@pytest.mark.parametrize(("q_heads", "q_len"), [(4, 200), (8, 130)])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_batch_elements_without_a_key_give_zeros_and_get_no_gradient(device, head_dim, q_heads, q_len):
    call = draw_call(device, (3, q_heads, 4, q_len, 200), head_dim)
    mask = (torch.arange(200, device=device) < torch.tensor([200, 0, 50], device=device)[:, None])[:, None, None]
    inputs = [x.clone().requires_grad_() for x in (call.query, call.key, call.value)]
    output = masked_rows.attend_with_zero_rows(*inputs, mask=mask, enable_gqa=True)
    weights = torch.randn_like(output)
    gradients = torch.autograd.grad(output, inputs, weights)
    assert not any(x[1].any() for x in (output, *gradients))
    truths = [x.double().detach().requires_grad_() for x in inputs]
    truth, _ = sdpa.attention(*truths, mask=mask)
    for found, expected in zip(gradients, torch.autograd.grad(truth, truths, weights.double()), strict=True):
        kept = torch.tensor([0, 2])
        error = (found.double() - expected)[kept].abs().sum() / expected[kept].abs().sum()
        assert error < 4 * ROUNDING[torch.bfloat16]  # of the output, weights, their gradient, and the result


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], ids=lambda x: x.name)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("head_dim", [32, 72, 128, 256])
@pytest.mark.parametrize("kind", ["rows", "elements", "rows of heads"])
def test_rows_that_a_mask_of_minus_infinity_hides_are_zeros(device, kind, head_dim, dtype, backend):
    call = draw_call(device, (3, 4, 4, 130, 77 if kind == "elements" else 200), head_dim, dtype=dtype)
    rows, heads = (1, 1) if kind == "elements" else (130, 4 if kind == "rows of heads" else 1)
    allowed = torch.rand(3, heads, rows, call.kv_len, device=device) < 0.9
    allowed[1] &= kind != "elements"
    allowed[:, :, ::50] &= kind == "elements"
    inputs = [x.clone().requires_grad_() for x in (call.query, call.key, call.value)]
    with sdpa_kernel(backend):
        try:
            sdpa.sdpa(*inputs, mask=allowed)
        except RuntimeError as error:
            pytest.skip(f"{backend.name} serves no such call: {str(error).splitlines()[0]}")
        output = masked_rows.attend_with_zero_rows(*inputs, mask=allowed)
    gradients = torch.autograd.grad(output, inputs, torch.randn_like(output))
    hidden = ~allowed.any(-1).expand(3, 4, 130)
    assert hidden.any() and not output[hidden].any() and not gradients[0][hidden].any()
    assert all(x.isfinite().all() for x in (output, *gradients))
    assert kind != "elements" or not any(x[1].any() for x in gradients)
    truth, _ = sdpa.attention(call.query, call.key, call.value, mask=allowed)
    assert (output - truth).abs().max() <= 4 * ROUNDING[dtype] * call.value.abs().max()


def test_kernels_that_give_zeros_are_detected(device, monkeypatch):
    monkeypatch.setattr(masked_rows, "_gives_zeros_by_kind", {})
    mask = torch.zeros(1, 1, 40, 40, device=device, dtype=torch.bfloat16)
    mask[:, :, 3] = -torch.inf
    call = draw_call(device, (1, 2, 2, 40, 40), 64)
    tensors = call.query, call.key, call.value
    plain = sdpa.sdpa
    monkeypatch.setattr(sdpa, "sdpa", lambda *inputs, **options: plain(*inputs, **options) + 1.0)
    output = masked_rows.attend_with_zero_rows(*tensors, mask=mask)
    assert set(masked_rows._gives_zeros_by_kind.values()) == {False} and not output[:, :, 3].any()
