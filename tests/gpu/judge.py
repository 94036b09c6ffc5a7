"""What a kernel is judged by: its recipe's reference, and exact attention in float64.

Kernel and reference have the same operands to the bit. What differs is the order of float32 sums and, where their
tiles of keys differ, the maximum relative to which P is rounded. So the kernel's error is the reference's, and it is
nearer to the reference than that is to exact attention.
"""

from dataclasses import dataclass

import torch

from sage_hf import record, sage_attention
from sage_kernels import exact, reference
from sage_kernels.recipe import RECIPES

LOW_BIT = [name for name, recipe in RECIPES.items() if recipe.qk != "exact"]
NO_KERNELS = ("reference", "sdpa")


def attend(query, key, value, recipe, *, mask=None, is_causal=False, scale=None, return_lse=True):
    """(output, lse), or the output, of the recipe by a GPU kernel, native or emulated."""
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
    return result


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
    """Assert that every head's output is as near to the reference's as that is to exact attention, and the LSEs equal.

    Without the LSE, kernels may divide by the sums of rounded weights; then output and reference are on either side of
    exact attention at worst. Returns the call's `Error`.
    """
    options = {"mask": mask, "is_causal": is_causal, "scale": scale}
    result = attend(query, key, value, recipe, return_lse=return_lse, **options)
    output, lse = result if return_lse else (result, None)
    expected, expected_lse = reference.attention(query, key, value, RECIPES[recipe], **options)
    truth, _ = exact.attention(query, key, value, **options)
    assert output.shape == truth.shape
    assert output.dtype == query.dtype

    def per_head(x):
        return x.double().abs().sum((-2, -1))

    float32 = 2**-18 * truth[0, 0].numel() * value.double().abs().amax()
    rounding = torch.finfo(query.dtype).eps * per_head(truth) + float32
    assert (per_head(output - expected) <= (1 if return_lse else 2) * per_head(expected - truth) + rounding).all()
    if lse is not None:
        assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
        finite = expected_lse > -torch.inf
        assert ((lse - expected_lse)[finite].abs() <= lse_tolerance(query, key, mask, scale)).all()
    return Error(*(per_head(x).sum().item() for x in (output - truth, expected - truth, truth)))


def lse_tolerance(query, key, mask=None, scale=None):
    """Float32 rounding of the scores, which are sums of head_dim products, and of their exponentials' sum."""
    head_dim, kv_len = query.shape[-1], key.shape[2]
    scale = head_dim**-0.5 if scale is None else abs(scale)
    largest = scale * query.double().norm(dim=-1).amax() * key.double().norm(dim=-1).amax() + 1
    if mask is not None and mask.dtype != torch.bool:
        largest = largest + torch.where(mask == -torch.inf, 0.0, mask).abs().amax()
    return 2**-20 * (head_dim + kv_len**0.5 + 8) * largest
