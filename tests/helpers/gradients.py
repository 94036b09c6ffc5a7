"""Random tensors, and their gradients by the reference and by PyTorch."""

from dataclasses import replace

import pytest
import torch

from sage_kernels.exact import sdpa
from sage_kernels.reference import backward as subject
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.calls import new_backward_call, new_call

BWD, BWD_INT8 = RECIPES["sage_bwd"], RECIPES["sage_bwd_int8"]
SHIPPED = [recipe for recipe in RECIPES.values() if recipe.backward is not None]
PLAIN = replace(BWD, rotate=False, equalize=False)
ROTATED = replace(PLAIN, rotate=True)
TRANSFORMED, TRANSFORMED_INT8 = (replace(recipe, rotate=True, equalize=True) for recipe in (BWD, BWD_INT8))
names = pytest.mark.parametrize("recipe", SHIPPED, ids=lambda recipe: recipe.name)

# The largest relative error of rounding to a dtype, and the spacing of float32 numbers around 1.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT32 = 2.0**-23


def draw(batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, dtype=torch.float32, sigma=1.0, seed=0):
    """Q, K, V, dO; K and V have means."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    query = normal(batch, q_heads, q_len, head_dim) * sigma
    key = normal(batch, kv_heads, kv_len, head_dim) * sigma + normal(head_dim)
    value = normal(batch, kv_heads, kv_len, v_head_dim) + normal(v_head_dim)
    gradient = normal(batch, q_heads, q_len, v_head_dim)
    return tuple(x.to(dtype) for x in (query, key, value, gradient))


def gradients(query, key, value, gradient, recipe, lengths=None, key_mask=None, is_causal=False, **options):
    """dQ, dK, dV of the reference."""
    tiles = {name: options.pop(name) for name in ("block_m", "block_n") if name in options}
    options |= {"lengths": lengths, "key_mask": key_mask, "is_causal": is_causal}
    output, saved = subject.forward(new_call(query, key, value, recipe, **options))
    call = new_backward_call(gradient, value, output, saved, recipe, query.shape[-1], **options)
    return subject.backward(call, **tiles)


def autograd(query, key, value, gradient, key_mask=None, **options):
    """dQ, dK, dV by PyTorch's autograd of exact attention in float64."""
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    output, _ = sdpa.attention(*leaves, mask=None if key_mask is None else key_mask[:, None, None], **options)
    return torch.autograd.grad(output, leaves, gradient.double())


def relative_l1(actual, truth):
    return ((actual.double() - truth).abs().sum() / truth.abs().sum()).item()
