"""Training through `sage_attention`: gradients in low bits where the recipe has them, else exact with a reason."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from sage_hf import record, sage_attention
from sage_hf.attention import attend_observed
from sage_kernels import training
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.exact import sdpa
from sage_kernels.spec.options import Options
from sage_kernels.spec.recipe import RECIPES

TRAINABLE = [name for name, recipe in RECIPES.items() if recipe.backward is not None]
LOW_BIT = [name for name in RECIPES if name != "exact"]


def draw(q_len=70, kv_len=90, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, q_len, 64), (2, kv_len, 64), (2, kv_len, 32))
    return [torch.randn(2, *size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def counted_keys(batch=2, kv_len=90):
    key_mask = torch.ones(batch, kv_len, dtype=torch.bool)
    key_mask[0, kv_len - 20 :] = False
    key_mask[-1, :13] = False
    return key_mask


def gradients_of(output, inputs):
    return torch.autograd.grad(output, inputs, torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


VALID = counted_keys()
PADDING = {
    "none": (None, None),
    "one for each sample": (VALID[:, None, None], VALID),
    "one for all samples": (VALID[:1, None, None], VALID[:1]),
    "of lower rank": (VALID[0], VALID[:1]),
    "expanded": (VALID[:, None, None].expand(2, 4, 70, 90), VALID),
    "of one value": (torch.ones(2, 1, 1, 1, dtype=torch.bool), torch.ones(2, 90, dtype=torch.bool)),
}


@pytest.mark.parametrize("recipe", TRAINABLE)
@pytest.mark.parametrize(("mask", "key_mask"), PADDING.values(), ids=PADDING)
def test_without_a_mask_and_with_padding_gradients_are_the_recipes(recipe, mask, key_mask):
    inputs = draw()
    output, lse = sage_attention(*inputs, attn_mask=mask, enable_gqa=True, recipe=recipe, return_lse=True)
    expected, expected_lse = training.attention(*inputs, key_mask=key_mask, recipe=recipe, return_lse=True)
    assert torch.equal(output, expected) and torch.equal(lse, expected_lse) and not lse.requires_grad
    alone = sage_attention(*inputs, attn_mask=mask, enable_gqa=True, recipe=recipe)
    assert torch.equal(alone, expected)
    expected_gradients = gradients_of(expected, inputs)
    assert equal(gradients_of(output, inputs), expected_gradients)
    assert equal(gradients_of(alone, inputs), expected_gradients)
    ((outcome, _),) = record.outcomes_outside_layers().items()
    assert (outcome.asked, outcome.recipe, outcome.numerics, outcome.reason) == (recipe, recipe, "emulated", "")


def test_causality_and_scale_reach_the_recipe():
    inputs = draw()
    output = sage_attention(*inputs, is_causal=True, scale=0.3, enable_gqa=True, recipe="sage_bwd")
    expected, _ = training.attention(*inputs, is_causal=True, scale=0.3)
    assert equal(gradients_of(output, inputs), gradients_of(expected, inputs))


OTHER_MASKS = {
    "of queries": torch.ones(70, 90, dtype=torch.bool).tril(20),
    "of heads": VALID[:, None, None].repeat(1, 4, 1, 1).clone(),
    "additive": torch.zeros(2, 1, 1, 90).masked_fill(~VALID[:, None, None], -torch.inf),
}


@pytest.mark.parametrize("mask", OTHER_MASKS.values(), ids=OTHER_MASKS)
def test_with_other_masks_gradients_are_exact_with_a_log_message(mask, caplog):
    inputs = draw()
    with caplog.at_level(logging.WARNING):
        output = sage_attention(*inputs, attn_mask=mask, enable_gqa=True, recipe="sage_bwd")
    expected = sage_attention(*inputs, attn_mask=mask, enable_gqa=True, recipe="exact")
    assert equal(gradients_of(output, inputs), gradients_of(expected, inputs))
    assert "sage_bwd has gradients only without a mask, or with a bool mask, the same for all queries" in caplog.text
    with pytest.raises(KernelUnavailableError, match="the same for all queries and heads: run under"):
        sage_attention(*inputs, attn_mask=mask, enable_gqa=True, recipe="sage_bwd", fallback="error")


def test_calls_that_no_kernel_trains_run_exactly_with_a_log_message(caplog):
    inputs = draw(dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        output = sage_attention(*inputs, enable_gqa=True, recipe="sage_bwd")
    assert torch.equal(output, F.scaled_dot_product_attention(*inputs, enable_gqa=True))
    assert "dtype must be one of float16, bfloat16, float32" in caplog.text
    with pytest.raises(KernelUnavailableError, match="no native kernel for recipe 'sage_bwd'") as caught:
        sage_attention(*draw(), enable_gqa=True, recipe="sage_bwd", fallback="error")
    assert "no_grad" not in str(caught.value)  # would not help


@pytest.mark.parametrize("recipe", LOW_BIT)
@pytest.mark.parametrize("mask", [*PADDING, *OTHER_MASKS])
def test_no_recipe_returns_an_output_without_its_gradient(recipe, mask):
    inputs = draw(q_len=9, kv_len=11)  # as short as decoding
    kept = torch.rand(2, 1, 9, 11, generator=torch.Generator().manual_seed(3)) < 0.7
    masks = {"of queries": kept, "of heads": kept[:, :, :1].repeat(1, 4, 1, 1), "additive": kept.float()}
    attn_mask = masks.get(mask, None if mask == "none" else kept[:, :, :1])
    output = sage_attention(*inputs, attn_mask=attn_mask, enable_gqa=True, recipe=recipe)
    exactly, _ = sdpa.attention(*(x.detach() for x in inputs), mask=attn_mask)
    assert output.requires_grad and (output - exactly).abs().max() < 0.1
    assert all(gradient.abs().sum() > 0 for gradient in gradients_of(output, inputs))


def test_short_training_calls_do_not_turn_exact():
    inputs = draw(q_len=3, kv_len=5)
    sage_attention(*inputs, enable_gqa=True, recipe="sage_bwd")
    ((outcome, _),) = record.outcomes_outside_layers().items()
    assert outcome.numerics == "emulated"


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_transforms_of_torch_func_get_exact_gradients(transform):
    query, key, value = (x.detach() for x in draw())
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))

    def loss(x, recipe):
        return sage_attention(x, key, value, recipe=recipe).square().sum()

    def derivative(recipe):
        if transform == "grad":
            return torch.func.grad(loss)(query, recipe)
        return torch.func.jvp(lambda x: loss(x, recipe), (query,), (query,))[1]

    try:
        expected = derivative("exact")
    except NotImplementedError:  # PyTorch's exact attention has no forward mode on every device
        with pytest.raises(NotImplementedError):
            derivative("sage_bwd")
        return
    assert torch.equal(derivative("sage_bwd"), expected)


def test_a_gradient_hidden_by_vmap_is_refused_rather_than_cut():
    inputs = [x.detach()[None] for x in draw()]
    inputs[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="forward only"):
        torch.func.vmap(lambda *x: sage_attention(*x, enable_gqa=True, recipe="sage_bwd"))(*inputs).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mask", ["none", "one for each sample"])
def test_checkpointing_changes_no_gradient(reentrant, mask):
    inputs, attn_mask = draw(), PADDING[mask][0]

    def layer(*tensors):
        return sage_attention(*tensors, attn_mask=attn_mask, enable_gqa=True, recipe="sage_bwd")

    plain = layer(*inputs)
    recomputed = checkpoint(layer, *inputs, use_reentrant=reentrant)
    assert torch.equal(plain, recomputed)
    gradient = torch.ones_like(plain)
    expected = torch.autograd.grad(plain, inputs, gradient)
    recomputed.backward(gradient)
    assert equal([x.grad for x in inputs], expected)


@pytest.mark.parametrize("recipe", ["exact", "sage2"])
def test_checkpointing_recomputes_what_exact_attention_saved_in_each_call(recipe):
    """The second call of a kind counts too: its replay is compared with the call itself."""
    inputs = draw(q_len=71)
    for _ in range(4):
        output = checkpoint(lambda *x: sage_attention(*x, enable_gqa=True, recipe=recipe), *inputs, use_reentrant=False)
        expected = F.scaled_dot_product_attention(*inputs, enable_gqa=True)
        assert equal(gradients_of(output, inputs), gradients_of(expected, inputs))


@pytest.mark.parametrize(
    "call",
    [
        "plain",
        *(pytest.param(one, marks=pytest.mark.audit) for one in ("causal padding", "causal", "padding", "additive")),
    ],
)
def test_one_compiled_graph_trains_at_all_lengths_as_eager_does(call):
    def layer(query, key, value, key_mask):
        mask = key_mask[:, None, None] if "padding" in call else None
        mask = torch.where(key_mask, 0.0, -3.0)[:, None, None] if call == "additive" else mask
        output, lse = attend_observed(
            query,
            key,
            value,
            mask,
            None,
            Options("causal" in call, enable_gqa=True, recipe="sage_bwd", return_lse=True),
        )
        return output * 2, lse

    counter, compilations = CompileCounterWithBackend("aot_eager"), set()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for q_len, kv_len in ((70, 90), (100, 64)):
        inputs, key_mask = draw(q_len, kv_len), counted_keys(kv_len=kv_len)
        found = []
        for function in (compiled, layer):
            output, lse = function(*inputs, key_mask)
            found.append([output, lse, *gradients_of(output, inputs)])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b) if call != "additive" else torch.allclose(a, b, atol=1e-5)
        compilations.add(counter.frame_count)
    assert len(compilations) == 1


def test_autocast_trains_in_the_autocast_dtype():
    inputs = draw()
    with torch.autocast("cpu", torch.bfloat16):
        output = sage_attention(*inputs, enable_gqa=True, recipe="sage_bwd")
    assert output.dtype == torch.bfloat16
    cast = [x.detach().bfloat16().requires_grad_() for x in inputs]
    expected = sage_attention(*cast, enable_gqa=True, recipe="sage_bwd")
    gradient = torch.ones_like(output)
    found = torch.autograd.grad(output, inputs, gradient)
    assert torch.equal(output, expected)
    assert equal(found, [x.float() for x in torch.autograd.grad(expected, cast, gradient)])


@pytest.mark.parametrize("recipe", [*LOW_BIT, "exact"])
@pytest.mark.parametrize("grad", [False, True])
def test_padding_with_causality_is_the_mask_of_both(recipe, grad, no_recent_keys):
    """The first rows of the padded sample may attend to nothing."""
    inputs = [x.requires_grad_(grad) for x in draw(q_len=90)]
    padding = VALID[:, None, None]
    full = padding & torch.ones(90, 90, dtype=torch.bool).tril()
    output, lse = attend_observed(*inputs, padding, None, Options(True, recipe=recipe, return_lse=True))
    seen = full.any(-1).expand(2, 4, 90)
    assert torch.equal(lse != -torch.inf, seen)
    assert not output[~seen].any() and (~seen).any()
    if not grad or RECIPES[recipe].backward is None:
        with_full_mask = attend_observed(*inputs, full, None, Options(recipe=recipe, return_lse=True))
        assert torch.equal(output, with_full_mask[0]) and torch.equal(lse, with_full_mask[1])
    if grad:
        gradients = gradients_of(output, inputs)
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert not gradients[0][~seen].any() and not any(x[1, :, :13].any() for x in gradients[1:])
        truth = gradients_of(sage_attention(*inputs, attn_mask=full, enable_gqa=True, recipe="exact"), inputs)
        for found, wanted in zip(gradients, truth, strict=True):
            assert (found - wanted).abs().sum() <= 0.02 * wanted.abs().sum()


@pytest.mark.parametrize("recipe", TRAINABLE)
@pytest.mark.parametrize(
    "trap", ["a zero channel of V", "V of ones", "equal keys", "zero gradient", "padding in the middle"]
)
def test_gradients_survive_what_broke_others(recipe, trap):
    """Zero scales, uniform scores, and keys that are missing between keys that are not."""
    inputs = [x.detach() for x in draw(q_len=90)]
    mask, gradient = None, torch.randn(2, 4, 90, 32, generator=torch.Generator().manual_seed(1))
    if trap == "a zero channel of V":
        inputs[2][..., 3] = 0.0
    elif trap == "V of ones":
        inputs[2][:] = 1.0
    elif trap == "equal keys":
        inputs[1][:] = inputs[1][:, :, :1]
    elif trap == "zero gradient":
        gradient.zero_()
    else:
        mask = torch.ones(2, 1, 1, 90, dtype=torch.bool)
        mask[..., 30:60] = False
    inputs = [x.requires_grad_() for x in inputs]
    found = []
    for name in (recipe, "exact"):
        output = sage_attention(*inputs, attn_mask=mask, enable_gqa=True, recipe=name)
        found.append([output, *torch.autograd.grad(output, inputs, gradient)])
    # Of an exact gradient that is 0, what remains is the rounding of rowsum(dO∘O) - rowsum(dO·Vᵀ∘P): of V's size.
    scale = [x.abs().sum() for x in found[1]]
    floor = gradient.abs().sum()
    for ours, exactly, size in zip(*found, scale, strict=True):
        assert ours.isfinite().all()
        assert (ours - exactly).abs().sum() <= 0.02 * max(size, floor)
    if mask is not None:
        assert not any(x[:, :, 30:60].any() for x in found[0][2:])
    if trap == "zero gradient":
        assert not any(x.any() for x in found[0][1:])
