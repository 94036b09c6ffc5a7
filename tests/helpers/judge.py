"""Judge a kernel by its recipe's reference, and by exact attention in float64.

Kernel and reference have the same operands to the bit, except for rotated elements between two INT8 codes, because a
rotation's sums have an order. They sum in different orders in float32 and, where their tiles of keys differ, round P
relative to different maxima. So the errors are alike, and kernel and reference differ by less. Hopper's kernel rounds P
relative to earlier maxima: where it rounds the weights of few keys to e4m3, one of two roundings may be nearly exact by
chance, and they are as far apart as two roundings are.
"""

import itertools
import math
from dataclasses import dataclass

import torch

from sage_hf import record, sage_attention
from sage_kernels.dispatch.examination import code_error, lse_tolerance
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import RECIPES

LOW_BIT = [name for name, recipe in RECIPES.items() if recipe.qk != "exact"]
NO_KERNELS = ("reference", "sdpa")


def attend(*inputs, **options):
    """(output, lse), or the output, of the recipe by a GPU kernel, native or emulated."""
    return attend_and_name(*inputs, **options)[0]


def attend_and_name(query, key, value, recipe, *, mask=None, is_causal=False, scale=None, return_lse=True):
    """`attend`, and the kernel's name."""
    layer = torch.nn.Identity()
    result = record.run_in_layer(
        layer,
        sage_attention,
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
        recipe=recipe,
        fallback="emulate",
        return_lse=return_lse,
    )
    (plan,) = record.last_plans(layer)
    assert plan.recipe == recipe
    assert plan.kernel not in NO_KERNELS
    return result, plan.kernel


@dataclass
class Error:
    """Sums of absolute differences to exact attention, and of exact attention's absolute values."""

    kernel: float = 0.0
    reference: float = 0.0
    size: float = 0.0

    def __add__(self, other):
        return Error(self.kernel + other.kernel, self.reference + other.reference, self.size + other.size)

    def assert_as_small_as_the_references(self):
        assert self.kernel <= 1.05 * self.reference + 2**-20 * self.size, self


def judge(query, key, value, recipe, *, mask=None, is_causal=False, scale=None, return_lse=True):
    """Assert that every head's output is as near to the reference's as that is to exact attention, or for Hopper's P in
    e4m3 as two roundings of P are, and that the LSEs are equal. Returns the call's `Error`.
    """
    options = {"mask": mask, "is_causal": is_causal, "scale": scale}
    result, kernel = attend_and_name(query, key, value, recipe, return_lse=return_lse, **options)
    output, lse = result if return_lse else (result, None)
    expected, expected_lse = reference.attention(query, key, value, RECIPES[recipe], **options)
    truth, _ = sdpa.attention(query, key, value, **options)
    assert output.shape == truth.shape
    assert output.dtype == query.dtype

    def per_head(x):
        return x.double().abs().sum((-2, -1))

    float32 = 2**-18 * truth[0, 0].numel() * value.double().abs().amax()
    rounding = torch.finfo(query.dtype).eps * per_head(truth) + float32
    if RECIPES[recipe].pv == "fp8" and kernel == "int8_forward_hopper":
        apart = distance_of_two_roundings(query, key, value, truth, **options)
    else:
        apart = per_head(expected - truth)
    assert (per_head(output - expected) <= apart + rounding).all()
    if lse is not None:
        assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
        moved, tolerance = (lse - expected_lse)[expected_lse > -torch.inf].abs(), lse_tolerance(query, key, mask, scale)
        assert (moved <= tolerance + code_error(query, key, RECIPES[recipe], scale)).all()
        assert moved.numel() == 0 or moved.mean() <= tolerance
    return Error(*(per_head(x).sum().item() for x in (output - truth, expected - truth, truth)))


def distance_of_two_roundings(query, key, value, truth, *, mask, is_causal, scale):
    """Bound, for each head, of Σ|O - O'| where P is rounded to e4m3 relative to two numbers: float64 (batch, q_heads).

    A weight is off by 2⁻⁴/m of itself at most, m its mantissa: by 2⁻⁴·√(E[m⁻²]/3) in the root of the mean square, with
    E[m⁻²] = 3/(8 ln 2) where logarithms are uniform. It moves its row by that much of p_j·v_j, or of p_j·(v_j - o)
    where rows are divided by the sums of rounded weights. A row of c channels adds up to √c times its length at most,
    and rows to four standard deviations above the mean.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    bounds = query.new_empty(query.shape[:2], dtype=torch.float64)
    for batch, head in itertools.product(*map(range, query.shape[:2])):
        kv_head = head * key.shape[1] // query.shape[1]
        scores = query[batch, head].double() @ key[batch, kv_head].double().T * scale
        of_head = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])[batch, head, None, None]
        p = sdpa.apply_mask(scores[None, None], of_head, is_causal, 0, 0)[0, 0].softmax(-1).nan_to_num(0.0)
        v, o = value[batch, kv_head].double(), truth[batch, head].double()
        square = v.square().sum(-1)
        of_difference = square - 2 * o @ v.T + o.square().sum(-1, keepdim=True)
        moved = p.square() * (square + torch.maximum(square.expand_as(p), of_difference))
        row = moved.sum(-1).sqrt() * (2**-4 / (8 * math.log(2)) ** 0.5)
        bounds[batch, head] = value.shape[-1] ** 0.5 * (row.sum() + 4 * row.square().sum().sqrt())
    return bounds
