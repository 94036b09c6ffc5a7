"""Block lists in `sage_attention`: recipes, gradients, refusals, compiled calls."""

import pytest
import torch

from sage_hf import record, sage_attention
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.exact import sdpa
from sage_kernels.spec.block_list import BlockList
from tests.helpers.blocks import as_mask, draw_blocks


def draw():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, n, 32, generator=generator) for heads, n in ((4, 300), (2, 330), (2, 330))]


def plans_of(function, *args, **kwargs):
    layer = torch.nn.Identity()
    result = record.run_in_layer(layer, function, *args, **kwargs)
    return result, record.last_plans(layer)


@pytest.mark.parametrize("recipe", ["sage2", "exact"])
def test_a_call_attends_to_the_listed_tiles(recipe):
    inputs, blocks = draw(), draw_blocks(2, 4, 300, 330, 64, 64)
    options = {"enable_gqa": True, "recipe": recipe, "blocks": blocks, "return_lse": True}
    (output, lse), (plan,) = plans_of(sage_attention, *inputs, **options)
    truth, truth_lse = sdpa.attention(*inputs, mask=as_mask(blocks, 300, 330))
    assert plan.request.mask == "blocks"
    assert torch.equal(lse == -torch.inf, truth_lse == -torch.inf)
    assert not output[lse == -torch.inf].any()
    assert (output - truth).norm() / truth.norm() < (0.05 if recipe == "sage2" else 1e-5)


def gradients_and_truth(recipe, inputs, blocks, keys=None):
    """The recipe's output and gradients for random weights of it, autograd's in float64, and the plan."""
    mask = None if keys is None else keys[:, None, None]
    leaves = [x.requires_grad_() for x in inputs]
    output, (plan,) = plans_of(sage_attention, *leaves, mask, enable_gqa=True, recipe=recipe, blocks=blocks)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    found = torch.autograd.grad((output * weight).sum(), leaves)
    query, key, value = (x.detach().double().requires_grad_() for x in inputs)
    scores = query @ key.repeat_interleave(2, 1).mT * 32**-0.5
    allowed = as_mask(blocks, 300, 330)
    if mask is not None:
        allowed = allowed & mask
    p = scores.masked_fill(~allowed, -1e300).softmax(-1) * allowed.any(-1, keepdim=True)
    truth = torch.autograd.grad((p @ value.repeat_interleave(2, 1) * weight).sum(), (query, key, value))
    return found, truth, plan


@pytest.mark.parametrize("recipe", ["sage2", "exact"])
def test_gradients_of_forward_only_recipes_are_exact_and_reported(recipe):
    inputs, blocks = [x.double() if recipe == "exact" else x for x in draw()], draw_blocks(2, 4, 300, 330, 64, 64)
    found, truth, plan = gradients_and_truth(recipe, inputs, blocks)
    for actual, expected in zip(found, truth, strict=True):
        assert (actual - expected).norm() <= 1e-5 * expected.norm()
    assert plan.kernel == "sdpa"
    if recipe == "sage2":
        assert plan.reason == "sage2 is forward only and gradients are wanted"
        with pytest.raises(KernelUnavailableError, match="sage2 is forward only"):
            sage_attention(*inputs, enable_gqa=True, recipe=recipe, blocks=blocks, fallback="error")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("recipe", ["sage_bwd", "sage_bwd_int8"])
def test_gradients_of_training_recipes_are_in_few_bits(recipe, padded):
    keys = torch.arange(330).expand(2, -1) < torch.tensor([[200], [330]]) if padded else None
    found, truth, plan = gradients_and_truth(recipe, draw(), draw_blocks(2, 4, 300, 330, 64, 64), keys)
    for actual, expected in zip(found, truth, strict=True):
        assert (actual - expected).abs().sum() <= 0.03 * expected.abs().sum()
    assert (plan.kernel, plan.backward, plan.recipe) == ("reference", "reference_backward", recipe)
    assert plan.request.mask == ("block_keys" if padded else "blocks")


def test_training_over_a_list_is_refused_where_no_native_kernel_is():
    inputs, blocks = [x.requires_grad_() for x in draw()], draw_blocks(2, 4, 300, 330)
    with pytest.raises(KernelUnavailableError, match="no native kernel"):
        sage_attention(*inputs, enable_gqa=True, recipe="sage_bwd", blocks=blocks, fallback="error")


@pytest.mark.parametrize("recipe", ["sage2", "sage_bwd"])
def test_a_compiled_call_has_the_eager_output_and_gradients(recipe):
    grad = recipe == "sage_bwd"
    inputs, blocks = [x.requires_grad_(grad) for x in draw()], draw_blocks(2, 4, 300, 330)

    def attend(query, key, value, counts, tiles):
        lists = BlockList(counts, tiles, blocks.block_m, blocks.block_n)
        return sage_attention(query, key, value, enable_gqa=True, recipe=recipe, blocks=lists)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    outputs = [function(*inputs, blocks.counts, blocks.tiles) for function in (compiled, attend)]
    assert torch.equal(*outputs)
    for found, expected in zip(*(torch.autograd.grad(x.sum(), inputs) if grad else () for x in outputs), strict=True):
        assert torch.equal(found, expected)
