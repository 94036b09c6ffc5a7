"""The reference gradients' formulas and roundings.

With operands that nothing has rounded, the formulas are autograd's in float64. With the INT8 that a forward kept, they
differ from dense float64 of the same operands by no more than the rounding of P, dS and their partners, element by
element.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from sage_kernels.exact import sdpa
from sage_kernels.formats import int8
from sage_kernels.reference import backward as subject
from sage_kernels.reference import forward as reference
from sage_kernels.spec import transforms
from sage_kernels.spec.layout import Lengths, padded_channels, padded_rows
from sage_kernels.spec.operands import Saved
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.blocks import as_mask, draw_blocks
from tests.helpers.calls import new_backward_call, new_call
from tests.helpers.gradients import (
    BWD,
    FLOAT32,
    PLAIN,
    ROTATED,
    TRANSFORMED,
    TRANSFORMED_INT8,
    UNIT,
    autograd,
    draw,
    gradients,
)

# The formulas: nothing is rounded.


def unrounded(query, key, lse, scale, lengths, recipe):
    """`Saved` of operands that nothing has quantised: float64 Q, K without its mean, and scales of 1."""
    group, channels = query.shape[1] // key.shape[1], padded_channels(query.shape[-1])
    query, key = (F.pad(x, (0, channels - x.shape[-1])) for x in (query, key))
    equalizer = lse.new_empty(0)
    if recipe.equalize:
        sequences = query.shape[0] if lengths is None else len(lengths.cu_seqlens_q) - 1
        generator = torch.Generator().manual_seed(2)
        equalizer = torch.randint(-2, 3, (sequences, key.shape[1], channels), generator=generator).double().exp2()

        def factors(cu_seqlens):
            if lengths is None:
                return equalizer.unsqueeze(2)
            return equalizer.repeat_interleave(cu_seqlens.diff(), 0).transpose(0, 1).unsqueeze(0)

        query = query * factors(lengths and lengths.cu_seqlens_q).repeat_interleave(group, 1)
        key = key / factors(lengths and lengths.cu_seqlens_k)
    if recipe.rotate:
        query, key = transforms.rotate(query), transforms.rotate(key)
    if lengths is None:
        mean = key.mean(2, keepdim=True)
        lse = lse - scale * (query @ mean.repeat_interleave(group, 1).mT).squeeze(-1)
        query = F.pad(query, (0, 0, 0, padded_rows(query.shape[2]) - query.shape[2]))
        key = F.pad(key - mean, (0, 0, 0, padded_rows(key.shape[2]) - key.shape[2]))
    else:
        packed = []
        for x, starts in ((query, lengths.cu_seqlens_q.tolist()), (key, lengths.cu_seqlens_k.tolist())):
            rows = x.new_full((*x.shape[:2], padded_rows(starts[-1], len(starts) - 1), channels), torch.nan)
            for i, (start, stop) in enumerate(pairwise(starts)):
                first = padded_rows(start, i)
                rows[:, :, first : first + padded_rows(stop - start)] = 0
                rows[:, :, first : first + stop - start, : x.shape[-1]] = x[:, :, start:stop]
            packed.append(rows)
        query, key = packed
    key_scale = key.new_ones(*key.shape[:2], key.shape[2] // 64, 4)
    return Saved(query, query.new_ones(query.shape[:3]), key, key_scale, equalizer, lse)


class Unrounded(torch.autograd.Function):
    """Exact attention in float64, whose gradient is the reference's."""

    @staticmethod
    def forward(ctx, query, key, value, recipe, scale, lengths, key_mask, options, tiles):
        mask = None if key_mask is None else key_mask[:, None, None]
        causality = {name: x for name, x in options.items() if name != "blocks"}
        if options.get("blocks") is not None:
            listed = as_mask(options["blocks"], query.shape[2], key.shape[2])
            mask = listed if mask is None else mask & listed
        if lengths is None:
            output, lse = sdpa.attention(query, key, value, mask=mask, scale=scale, **causality)
        else:
            output = query.new_zeros(*query.shape[:3], value.shape[-1])
            lse = query.new_full(query.shape[:3], -torch.inf)
            q_starts, k_starts = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
            for i, start in enumerate(q_starts[:-1]):
                queries, keys = slice(start, q_starts[i + 1]), slice(k_starts[i], k_starts[i + 1])
                parts = (query[:, :, queries], key[:, :, keys], value[:, :, keys])
                output[:, :, queries], lse[:, :, queries] = sdpa.attention(*parts, scale=scale, **causality)
        ctx.save_for_backward(value, output, *unrounded(query, key, lse, scale, lengths, recipe))
        ctx.rest = (recipe, scale, lengths, key_mask, options, tiles)
        return output

    @staticmethod
    def backward(ctx, gradient):
        value, output, *saved = ctx.saved_tensors
        recipe, scale, lengths, key_mask, options, tiles = ctx.rest
        shared = {"lengths": lengths, "key_mask": key_mask, "scale": scale, **options}
        call = new_backward_call(gradient, value, output, Saved(*saved), recipe, 6, **shared)
        return *subject.backward(call, **tiles), *(None,) * 6


PACKED = Lengths(
    torch.tensor([0, 5, 5, 20], dtype=torch.int32), torch.tensor([0, 9, 12, 33], dtype=torch.int32), 15, 21
)
CASES = {
    "plain": {"is_causal": False},
    "causal": {"is_causal": True},
    "causal, later queries": {"is_causal": True, "causal_offset": 13},
    "causal, rows without a key": {"is_causal": True, "causal_offset": -7},
    "padding": {"is_causal": False, "key_mask": True},
    "causal, padding": {"is_causal": True, "key_mask": True},
    "packed": {"is_causal": False, "lengths": PACKED},
    "packed, causal, rows without a key": {"is_causal": True, "causal_offset": -2, "lengths": PACKED},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", [PLAIN, ROTATED, TRANSFORMED], ids=["plain", "rotated", "equalized"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_formulas_are_the_gradient_of_attention(case, recipe, kv_heads):
    options = dict(CASES[case])
    lengths, key_mask = options.pop("lengths", None), None
    batch = 2 if lengths is None else 1
    query, key, value, _ = (
        x.double().requires_grad_() for x in draw(batch, 4, kv_heads, 20, 33, 6, 5, dtype=torch.float64)
    )
    if options.pop("key_mask", False):
        key_mask = torch.rand(2, 33, generator=torch.Generator().manual_seed(1)) < 0.6
        key_mask[1, :4] = False  # with causality, rows without a key
        key_mask[0, 0] = True
    tiles = {"block_m": 16, "block_n": 16}
    rest = (recipe, 0.3, lengths, key_mask, options, tiles)
    assert torch.autograd.gradcheck(lambda *x: Unrounded.apply(*x, *rest), (query, key, value), fast_mode=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_formulas_hold_across_tiles_and_chunks(is_causal, monkeypatch):
    query, key, value, gradient = draw(2, 4, 2, 300, 270, 6, 5, dtype=torch.float64)
    expected = autograd(query, key, value, gradient, is_causal=is_causal, scale=0.3)
    monkeypatch.setattr(sdpa, "ELEMENTS_PER_CHUNK", 2 * 4 * 128 * 64)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    options = {"is_causal": is_causal}
    output = Unrounded.apply(*leaves, PLAIN, 0.3, None, None, options, {"block_m": 64, "block_n": 128})
    actual = torch.autograd.grad(output, leaves, gradient)
    # float64 sums of 300 terms, and the cancellation in P ∘ (dP - δ).
    assert all(torch.allclose(x, y, rtol=1e-10, atol=1e-12) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "causal_offset": -20}, {"key_mask": True}])
def test_the_formulas_are_the_gradient_of_attention_over_a_block_list(sizes, options, monkeypatch):
    """Rows without a tile, tails, keys that no block lists, lists in another order than the tiles'."""
    query, key, value, gradient = draw(2, 4, 2, 270, 300, 6, 5, dtype=torch.float64)
    options = {"is_causal": False, "blocks": draw_blocks(2, 4, 270, 300, *sizes, share=0.4), **options}
    key_mask = None
    if options.pop("key_mask", False):
        key_mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(1)) < 0.6
    mask = as_mask(options["blocks"], 270, 300)
    truths = [x.clone().requires_grad_() for x in (query, key, value)]
    causality = {name: x for name, x in options.items() if name != "blocks"}
    allowed = mask if key_mask is None else mask & key_mask[:, None, None]
    truth, _ = sdpa.attention(*truths, mask=allowed, scale=0.3, **causality)
    expected = torch.autograd.grad(truth, truths, gradient)
    monkeypatch.setattr(sdpa, "ELEMENTS_PER_CHUNK", 2 * 4 * 128 * 64)
    for tiles in ((64, 64), (128, 128), (16, 32)):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        rest = (PLAIN, 0.3, None, key_mask, options, dict(zip(("block_m", "block_n"), tiles, strict=True)))
        actual = torch.autograd.grad(Unrounded.apply(*leaves, *rest), leaves, gradient)
        assert all(torch.allclose(x, y, rtol=1e-10, atol=1e-12) for x, y in zip(actual, expected, strict=True))


# What the forward keeps.


@pytest.mark.parametrize(
    "recipe", [PLAIN, ROTATED, TRANSFORMED, TRANSFORMED_INT8], ids=["plain", "rotated", "equalized", "int8"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_forward_is_the_recipes_and_keeps_its_operands(recipe, dtype):
    query, key, value, _ = draw(2, 4, 2, 130, 200, 40, 24, dtype=dtype)
    key_mask = torch.rand(2, 200, generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"is_causal": True, "causal_offset": 9, "scale": 0.2}
    output, saved = subject.forward(new_call(query, key, value, recipe, key_mask=key_mask, **options))
    expected, lse = reference.attention(query, key, value, recipe, mask=key_mask[:, None, None], **options)
    assert torch.equal(output, expected)
    assert output.stride() == expected.stride()
    counts = key_mask[:, None, :, None]
    inputs = query.float(), torch.where(counts, key.float(), 0.0)
    key, mean = transforms.smooth(inputs[1], counts)
    mean_scores = 0.2 * (query.float() @ mean.repeat_interleave(2, 1).mT).squeeze(-1)
    # Two float32 numbers of the magnitude of |q|·|mean|.
    bound = 2.0**-22 * (query.float().norm(dim=-1) * mean.norm(dim=-1).amax() + lse.abs())
    finite = lse > -torch.inf
    assert torch.equal(saved.lse > -torch.inf, finite)
    assert ((saved.lse + mean_scores - lse).abs() <= bound)[finite].all()

    query, key = F.pad(query.float(), (0, 24)), F.pad(torch.where(counts, key, 0.0), (0, 24))
    if recipe.equalize:
        factor = transforms.equalize(*inputs, counts)
        assert torch.equal(saved.equalizer, F.pad(factor.squeeze(-2), (0, 24), value=1.0))
        query, key = query * saved.equalizer.unsqueeze(-2).repeat_interleave(2, 1), key / saved.equalizer.unsqueeze(-2)
    if recipe.rotate:
        query, key = transforms.rotate(query), transforms.rotate(key)
    codes, scale = int8.quantize(query, 1)
    assert (saved.query.dtype, saved.query_scale.dtype) == (torch.int8, torch.float32)
    assert torch.equal(saved.query, F.pad(codes, (0, 0, 0, 126)))
    assert torch.equal(saved.query_scale, F.pad(scale.squeeze(-1), (0, 126)))
    key = F.pad(key, (0, 0, 0, 56))
    assert (saved.key.shape, saved.key_scale.shape) == ((2, 2, 256, 64), (2, 2, 4, 4))
    for block in range(4):
        for thread in range(4):
            tokens = [block * 64 + 8 * j + 2 * thread + e for j in range(8) for e in (0, 1)]
            codes, scale = int8.quantize(key[:, :, tokens], 16, torch.bfloat16)
            assert torch.equal(saved.key[:, :, tokens], codes)
            assert torch.equal(saved.key_scale[:, :, block, thread], scale[:, :, 0, 0])


def test_a_recipe_without_gradients_and_other_tiles_are_refused():
    query, key, value, gradient = draw(1, 2, 2, 20, 20, 32, 32)
    for recipe in (RECIPES["sage3"], RECIPES["sage2"], replace(BWD, smooth_q=True)):
        with pytest.raises(ValueError, match=f"recipe '{recipe.name}' has no gradients"):
            subject.forward(new_call(query, key, value, recipe))
    for name in ("block_m", "block_n"):
        with pytest.raises(ValueError, match=f"{name} 48 is not supported: use 16, 32, 64 or 128"):
            gradients(query, key, value, gradient, BWD, **{name: 48})


# Rounding: element by element.

SMALLEST = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}  # half a subnormal step


def rounding(x, kind, dtype, groups):
    """Bound of the error of rounding |x|; `groups` gives each element the largest |x| that shares its scale."""
    return UNIT[dtype] * x + SMALLEST[dtype] if kind == "16bit" else groups(x) / 254 * (1 + 1e-5)


def largest_of(rows, columns):
    """The largest element of each block of that many rows and columns, in every place of the block."""

    def spread(x):
        height, width = min(rows, x.shape[-2]), min(columns, x.shape[-1])
        padded = F.pad(x, (0, -x.shape[-1] % width, 0, -x.shape[-2] % height))
        blocks = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
        largest = blocks.amax((-3, -1), keepdim=True).expand_as(blocks)
        return largest.flatten(-2).flatten(-3, -2)[..., : x.shape[-2], : x.shape[-1]]

    return spread


def of_product(a, a_error, b, b_error):
    """Bound of the error of |a|ᵀ·|b|, and of its float32 sum."""
    a, b = a.abs(), b.abs()
    return a_error.mT @ (b + b_error) + a.mT @ b_error + FLOAT32 * a.shape[-2] ** 0.5 * 4 * (a.mT @ b)


def dense(saved, value, output, gradient, recipe, dtype, scale, is_causal, block_m, block_n):
    """Float64 dQ, dK, dV of one head without tiles, each with a bound of what rounding and float32 make of it."""
    kind, (q_len, kv_len), every = recipe.backward, (gradient.shape[2], value.shape[2]), 10**9
    query = saved.query[:, :, :q_len].double()
    query_scale = saved.query_scale[:, :, :q_len, None].double()
    key = saved.key[:, :, :kv_len].double()
    token = torch.arange(kv_len)
    key_scale = saved.key_scale.double()[:, :, token // 64, token % 8 // 2].unsqueeze(-1)
    value, output, gradient = value.double(), output.double(), gradient.double()

    scores = scale * (query * query_scale) @ (key * key_scale).mT
    if is_causal:
        scores = scores.masked_fill(~torch.ones(q_len, kv_len).bool().tril(), -torch.inf)
    p = torch.exp(scores - saved.lse.double().unsqueeze(-1))
    dp = gradient @ value.mT
    delta = (gradient * output).sum(-1, keepdim=True)
    ds = p * (dp - delta)

    # Float32: of exp(s), that of s and lse; of dP and δ, that of their sums.
    sizes = torch.where(p > 0, scores, 0.0).abs() + saved.lse.double().abs().unsqueeze(-1) + 1
    p_error = 8 * FLOAT32 * sizes * p
    dp_error = of_product(gradient.mT, torch.zeros_like(gradient).mT, value.mT, torch.zeros_like(value).mT)
    delta_error = FLOAT32 * 16 * (gradient * output).abs().sum(-1, keepdim=True)
    ds_error = p_error * (dp - delta).abs() + (p + p_error) * (dp_error + delta_error) + 2 * FLOAT32 * ds.abs()

    def rounded(x, error, rows, columns):
        return error + rounding(x.abs() + error, kind, dtype, largest_of(rows, columns))

    if kind == "16bit":
        query, key = query * query_scale, key * key_scale
        query_scale = key_scale = torch.ones(1, 1, 1, 1).double()
        query_error, key_error = (rounding(x.abs(), kind, dtype, None) for x in (query, key))
        partner = torch.zeros_like(gradient)
    else:
        query_error, key_error = torch.zeros_like(query), torch.zeros_like(key)
        partner = rounding(gradient.abs(), kind, dtype, largest_of(64, every))
    value_bound = of_product(p, rounded(p, p_error, block_m, 1), gradient, partner)
    folded = rounded(ds * query_scale, ds_error * query_scale, block_m, 1)
    key_bound = of_product(ds * query_scale, folded, query, query_error)
    folded = rounded(ds * key_scale.mT, ds_error * key_scale.mT, 1, block_n)
    query_bound = of_product((ds * key_scale.mT).mT, folded.mT, key, key_error)
    sums = (scale * (ds * key_scale.mT) @ key, scale * (ds * query_scale).mT @ query, p.mT @ gradient)
    return sums, (abs(scale) * query_bound, abs(scale) * key_bound, value_bound)


@pytest.mark.parametrize("kind", ["16bit", "int8"])
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tiles", [(64, 64), (16, 128), (128, 32)])
def test_gradients_differ_from_float64_by_no_more_than_their_rounding(kind, dtype, is_causal, tiles):
    recipe = replace(PLAIN, backward=kind)
    query, key, value, gradient = draw(1, 1, 1, 150, 170, 32, 24, dtype=dtype)
    scale = -0.2 if is_causal else 0.2  # nothing depends on its sign
    options = {"is_causal": is_causal, "scale": scale}
    output, saved = subject.forward(new_call(query, key, value, recipe, **options))
    actual = subject.backward(new_backward_call(gradient, value, output, saved, recipe, 32, **options), *tiles)
    expected, bounds = dense(saved, value, output, gradient, recipe, dtype, scale, is_causal, *tiles)
    for name, got, wanted, bound in zip(("dQ", "dK", "dV"), actual, expected, bounds, strict=True):
        assert got.dtype == dtype
        bound = bound + UNIT[dtype] * (wanted.abs() + bound) + SMALLEST[dtype]
        assert ((got.double() - wanted).abs() <= bound).all(), name
