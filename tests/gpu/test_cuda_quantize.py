"""The operands of quantize.cu are those of the Triton quantisers, bit for bit, whatever runs at the same time.

Those that are rotated are the reference's, but for what sums in another order do.
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from sage_kernels.cuda import compiler, quantize
from sage_kernels.cuda.registration import CudaInt8Quantizer
from sage_kernels.dispatch.execution import request_of
from sage_kernels.formats import int8
from sage_kernels.spec.layout import heavy_order, natural_order, power_of_two, thread_order
from sage_kernels.spec.operands import MEAN_PARTS, KeyPadding
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.spec.transforms import equalize, exchange, heavy_places, mean_of_tokens, quiet_keys, rotate
from sage_kernels.triton.common.padding import key_padding
from tests.helpers import calls, triton_calls
from tests.helpers.layouts import lay_out
from tests.helpers.pairwise import pairwise

pytestmark = [
    pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable()),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
RECIPE_OF_PV = {"fp8": "sage2", "fp16": "sage1"}
OPERANDS = ("query", "query_scale", "key", "key_scale", "value", "value_scale", "value_mean")
LAYOUTS = ("contiguous", "tokens first", "packed", "one head for all")
FULL_SIZES = [(4, 32, 4096, 128), (4, 32, 4096, 64), (2, 32, 16_384, 128), (1, 24, 119_056, 128)]


def draw(*shape, heads=None, q_len=None, v_head_dim=None, dtype=torch.bfloat16, seed=0):
    """Q, K and V, of which K and V have means."""
    generator = torch.Generator("cuda").manual_seed(seed)
    batch, kv_heads, tokens, head_dim = shape

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    query = normal(batch, heads or kv_heads, q_len or tokens, head_dim)
    key = normal(*shape) + normal(head_dim)
    value = normal(*shape[:3], v_head_dim or head_dim) + normal(v_head_dim or head_dim)
    return [x.to(dtype) for x in (query, key, value)]


def triton_operands(query, key, value, pv="fp8", return_lse=False):
    return triton_calls.quantize(calls.new_call(query, key, value, plain(pv), return_lse=return_lse))


def with_fields(pv, **fields):
    """Return the recipe of P·V's format with those fields."""
    return replace(get_recipe(RECIPE_OF_PV[pv]), **fields)


def plain(pv):
    """Return the recipe with no transforms but means: its operands have the same bits from all quantisers."""
    return with_fields(pv, rotate=False, equalize=False, heavy_keys=0)


def quantized(inputs, pv="fp8", return_lse=False, leaves_query=False):
    call = calls.new_call(*inputs, plain(pv), return_lse=return_lse)
    assert CudaInt8Quantizer().unsupported(request_of(call)) == ""
    return quantize.quantize_operands(call, leaves_query=leaves_query)


def differing(actual, expected):
    """Names of the operands that differ in bits, shape or dtype; a NaN is like any other."""

    def differ(x, y):
        if x.shape != y.shape or x.dtype != y.dtype:
            return True
        if x.dtype.is_floating_point:
            nan = x.float().isnan()
            if not torch.equal(nan, y.float().isnan()):
                return True
            x, y = ((z.float() if z.dtype == torch.float8_e4m3fn else z).masked_fill(nan, 0.0) for z in (x, y))
        return not torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))

    return [name for name in OPERANDS if differ(getattr(actual, name), getattr(expected, name))]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("pv", RECIPE_OF_PV)
@pytest.mark.parametrize("case", range(48))
def test_operands_match_triton(case, pv, device, monkeypatch):
    choose = random.Random(case)
    head_dim, v_head_dim = choose.choice(((40, 64), (64, 40), (64, 64), (80, 128), (128, 128), (128, 72)))
    batch, kv_heads, group = choose.choice(((1, 1, 1), (2, 3, 1), (3, 2, 4)))
    q_len, kv_len = choose.choice((1, 64, 129, 1000)), choose.choice((1, 63, 64, 127, 128, 129, 1000, 4096, 17_000))
    inputs = draw(
        *(batch, kv_heads, kv_len, head_dim),
        heads=kv_heads * group,
        q_len=q_len,
        v_head_dim=v_head_dim,
        dtype=torch.float32,
        seed=case,
    )
    dtype = choose.choice((torch.float16, torch.bfloat16))
    magnitude = choose.choice((1.0, 1.0, 1e-6, 1e4) if dtype == torch.float16 else (1.0, 1.0, 1e-30, 1e-38, 1e37))
    for number, x in enumerate(inputs):
        x *= magnitude
        x[..., 3], x[..., 9] = 0.0, -0.0
        x[..., 5] *= 6
        for _ in range(choose.choice((0, 0, 1, 3))):
            token = choose.choice((0, x.shape[2] // 2, x.shape[2] - 1))
            x[-1, choose.randrange(x.shape[1]), token, choose.randrange(30)] = choose.choice(
                (torch.nan, torch.inf, -torch.inf)
            )
        if choose.random() < 0.1:
            x[0, 0, :, 11] = torch.nan
        inputs[number] = lay_out(x.to(dtype), choose.choice(LAYOUTS))
    return_lse = choose.random() < 0.5
    leading = choose.choice((0, 1, 7, quantize.LEADING_QUERY_BLOCKS, 10**6))
    monkeypatch.setattr(quantize, "LEADING_QUERY_BLOCKS", leading)
    actual, expected = quantized(inputs, pv, return_lse=return_lse), triton_operands(*inputs, pv, return_lse)
    assert differing(actual, expected) == []
    assert (actual.mean_score is not None) == return_lse
    without_query = quantized(inputs, pv, leaves_query=True)
    assert without_query.query is inputs[0] and without_query.query_scale.numel() == 0
    without_query = replace(without_query, query=expected.query, query_scale=expected.query_scale)
    assert differing(without_query, expected) == []


@pytest.mark.parametrize("kv_len", [256, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_v_keeps_the_sums_of_tokens_as_in_triton(kv_len, dtype, device):
    """Errors of all sizes, all of the largest and of one sign, and all equal."""
    query, key, value = draw(2, 3, kv_len, 128, dtype=dtype)
    value *= torch.logspace(-6, 0, kv_len, device="cuda")[:, None]
    value[..., 3] = torch.where(torch.arange(kv_len, device="cuda") // 128 % 2 == 0, 272.0, -272.0)
    value[..., 5] = value[..., :1, 5]
    value[:, :, -1, :] = 448.0
    assert differing(quantized((query, key, value)), triton_operands(query, key, value)) == []


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("shape", [(2, 4, 1000, 128), (2, 4, 1000, 64), (1, 2, 5000, 80)])
def test_mean_score_is_the_product_of_queries_and_the_mean_key(shape, device):
    query, key, value = draw(*shape, heads=2 * shape[1], q_len=300)
    score = quantized((query, key, value), return_lse=True).mean_score
    mean, magnitude = (x.double().mean(2, keepdim=True).repeat_interleave(2, 1) for x in (key, key.abs()))
    expected = (query.double() * mean).sum(-1)
    # Each sum, a tree over tokens or one over channels, loses half a unit in the last place at most for each addition
    # that a term goes through.
    bound = (query.double().abs() * magnitude).sum(-1) * 2.0**-24 * (shape[-1] + 32)
    assert ((score[:, :, :300].double() - expected).abs() <= bound).all()
    assert not score[:, :, 300:].any()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("layout", "dtype", "dims", "kv_len", "pv"),
    pairwise(
        LAYOUTS,
        [torch.float16, torch.bfloat16],
        [(40, 64), (72, 128), (128, 128)],
        [65, 128, 200, 4096],
        list(RECIPE_OF_PV),
    ),
)
def test_heavy_keys_match_the_reference_and_are_left_out_of_quantisation(layout, dtype, dims, kv_len, pv, device):
    head_dim, v_head_dim = dims
    inputs = draw(2, 3, kv_len, head_dim, heads=6, q_len=130, v_head_dim=v_head_dim, dtype=dtype)
    inputs[1][0, 0, 5, 3], inputs[1][0, 0, 6, 3], inputs[2][0, 0, 7, 3] = torch.nan, torch.inf, -torch.inf
    inputs[1][:, :, 8, 4] = torch.finfo(dtype).max
    inputs[1][:, :, 64:, 4] -= 100
    _, key, value = inputs = [lay_out(x, layout) for x in inputs]
    recipe = replace(plain(pv), heavy_keys=64, heavy_choice="first")
    for return_lse in (False, True):
        call = calls.new_call(*inputs, recipe, return_lse=return_lse)
        assert CudaInt8Quantizer().serves(recipe)
        expected = triton_calls.quantize(call)
        actual = quantize.quantize_operands(call)
        assert differing(actual, expected) == []
        # Statistics add in the reference's order.
        mean = mean_of_tokens(key.float())
        of_key = torch.empty_like(actual.heavy.key)
        of_key[..., heavy_order(of_key.shape[3]).to(device)] = actual.heavy.key
        for x, y in ((of_key, key[:, :, :64]), (actual.heavy.value, value[:, :, :64])):
            channels = x.shape[3]
            assert x.dtype == dtype and x.is_contiguous() and not x[..., y.shape[3] :].any()
            assert channels == power_of_two(head_dim)
            torch.testing.assert_close(x[..., : y.shape[3]], y, rtol=0, atol=0, equal_nan=True)
        in_order = quantize.quantize_operands(replace(call, return_lse=False), leaves_query=True).heavy.key
        torch.testing.assert_close(in_order[:, :, :64], of_key, rtol=0, atol=0, equal_nan=True)
        # Three parts have the mean's 24 bits, but for those below the dtype's smallest number.
        parts = in_order[:, :, 64:].double()
        assert parts.shape[2] == MEAN_PARTS and not parts[:, :, 3:].any()
        error = (parts.sum(2, keepdim=True)[..., :head_dim] - mean.double()).abs()
        assert (error <= mean.abs() * 2.0**-24 + torch.finfo(dtype).smallest_normal).all()
        assert quantize.quantize_operands(replace(call, key=key[:, :, :64], value=value[:, :, :64])).heavy is None


def codes_of_the_reference(x, equalizer, group):
    """Rotate and quantise tokens that lack their mean: Q a scale a token, K (group 16) one for 16 in thread order.

    Returns the codes in their own order, and the scales.
    """
    x = F.pad(x, (0, equalizer.shape[-1] - x.shape[-1], 0, -x.shape[2] % 128))
    x = rotate(x * equalizer)
    if group == 1:
        codes, scale = int8.quantize(x, 1)
        return codes, scale.squeeze(-1)
    codes, scale = int8.quantize(thread_order(x), group, torch.bfloat16)
    return natural_order(codes), scale[:, :, ::group, 0].unflatten(2, (-1, 4))


def assert_like_the_reference(codes, scale, expected_codes, expected_scale, noise=0.0):
    """Check codes where scales are equal: sums in another order move few of them over a half.

    Scales of Q may differ in the last bits, those of K be the next bfloat16, seldom. Scales up to `noise` are those of
    rounding errors alone.
    """
    assert codes.shape == expected_codes.shape and scale.shape == expected_scale.shape
    nan = expected_scale.isnan()
    assert torch.equal(scale.isnan(), nan)
    finite, expected_finite = (x.float().masked_fill(nan, 0.0) for x in (scale, expected_scale))
    negligible = expected_finite <= noise
    assert (finite <= 2 * noise)[negligible].all()
    finite = torch.where(negligible, expected_finite, finite)
    of_key = scale.dtype == torch.bfloat16
    torch.testing.assert_close(finite, expected_finite, rtol=2.0**-7 if of_key else 1e-5, atol=1e-37)
    if of_key:
        same = finite == expected_finite
        assert (~same).sum() <= 0.01 * same.numel() + 1
        same &= ~negligible
        same = natural_order(same.unsqueeze(-1).expand(*same.shape, 16).flatten(2).unsqueeze(-1))
        codes, expected_codes = (torch.where(same, x, 0) for x in (codes, expected_codes))
    difference = (codes.int() - expected_codes.int()).abs()
    assert difference.max() <= 1
    assert difference.sum() <= 3e-4 * difference.numel() + 3


def assert_rotated(actual, inputs, recipe, key_mask=None, query_mask=None):
    """Check Q, K and the equalizer against the reference, given the call's Q, K and V.

    `key_mask` and `query_mask`: bool (batch or 1, 1, tokens, 1), which keys and queries exist.
    """
    query, key, _ = (x.float() for x in inputs)
    if key_mask is not None:
        key = torch.where(key_mask, key, 0.0)
    channels, group = actual.query.shape[3], query.shape[1] // key.shape[1]
    ones = torch.ones(*key.shape[:2], 1, channels, device=query.device)
    counted = key_mask
    if recipe.equalize:
        counted = quiet_keys(key, key_mask)
        expected = F.pad(equalize(query, key, counted, query_mask), (0, channels - key.shape[3]), value=1.0)
        distance = (actual.equalizer.unsqueeze(2).log2() - expected.log2()).abs()
        # Squares are summed in another order: few channels lie on the border of two exponents.
        assert distance.max() <= 1 and distance.sum() <= 0.01 * distance.numel()
        ones = actual.equalizer.unsqueeze(2)
    else:
        assert actual.equalizer is None
    mean = mean_of_tokens(key, counted)
    expected = codes_of_the_reference(query, ones.repeat_interleave(group, 1), 1)
    assert_like_the_reference(actual.query, actual.query_scale, *expected)
    smooth = key - mean if key_mask is None else torch.where(key_mask, key - mean, 0.0)
    if actual.heavy is not None:
        smooth = exchange(smooth, heavy_places(query, key, 64, query.shape[3] ** -0.5, key_mask))[:, :, 64:]
        key = key[:, :, 64:]
    smooth = F.pad(smooth, (0, 0, 0, -key.shape[2] % 128))
    expected = codes_of_the_reference(smooth, 1 / ones, 16)
    # The kernel rotates K and its mean apart: two sums of `channels` terms, times channels ** -0.5.
    largest = (F.pad(key, (0, channels - key.shape[3])) / ones).nan_to_num(0.0, 0.0, 0.0).abs().amax((2, 3), True)
    noise = largest * (channels**1.5 * 2.0**-23 / 127)
    assert_like_the_reference(actual.key, actual.key_scale, *expected, noise)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("case", "equalized", "pv"), pairwise(range(48), [False, True], list(RECIPE_OF_PV)))
def test_rotated_operands_match_the_reference(case, equalized, pv, device):
    choose = random.Random(case)
    head_dim, v_head_dim = choose.choice(((40, 64), (64, 40), (64, 64), (72, 128), (128, 128), (128, 72)))
    batch, kv_heads, group = choose.choice(((1, 1, 1), (2, 3, 1), (3, 2, 4)))
    q_len = choose.choice((1, 64, 127, 129, 1000, 5000))
    kv_len = choose.choice((1, 63, 64, 65, 127, 128, 129, 200, 1000, 4096, 17_000))
    heads = kv_heads * group
    inputs = draw(batch, kv_heads, kv_len, head_dim, heads=heads, q_len=q_len, v_head_dim=v_head_dim, seed=case)
    dtype = choose.choice((torch.float16, torch.bfloat16))
    magnitude = choose.choice((1.0, 1.0, 1e-4, 1e2) if dtype == torch.float16 else (1.0, 1.0, 1e-30, 1e8, 1e30))
    for number, x in enumerate(inputs):
        x = x.float() * magnitude
        x[..., 3], x[..., 9] = 0.0, -0.0
        x[..., 5] *= (0.01, 40, 1)[number]
        x[..., 7] *= (10, 0.001, 1)[number]
        for _ in range(choose.choice((0, 0, 1, 3))):
            token = choose.choice((0, x.shape[2] // 2, x.shape[2] - 1))
            x[-1, choose.randrange(x.shape[1]), token, choose.randrange(30)] = choose.choice(
                (torch.nan, torch.inf, -torch.inf)
            )
        if choose.random() < 0.1:
            x[0, 0, :, 11] = torch.nan
        inputs[number] = lay_out(x.to(dtype), choose.choice(LAYOUTS))
    recipe = with_fields(pv, rotate=True, equalize=equalized, heavy_keys=choose.choice((0, 64)))
    assert CudaInt8Quantizer().serves(recipe)
    heavy = 64 if 0 < recipe.heavy_keys < kv_len else 0
    plain_recipe = replace(recipe, rotate=False, equalize=False)
    for return_lse in (False, True):
        actual = quantize.quantize_operands(calls.new_call(*inputs, recipe, return_lse=return_lse))
        expected = triton_calls.quantize(calls.new_call(*inputs, plain_recipe, return_lse=return_lse))
        assert_rotated(actual, inputs, recipe)
        assert [x for x in differing(actual, expected) if x.startswith("value")] == []
        assert (actual.heavy is not None) == bool(heavy)
        assert not heavy or heavy_keys_agree(actual, expected)
        if return_lse:
            # A mean's rounding errors are relative to the mean of magnitudes, in whatever order it is added up.
            query, key = (x.float() for x in inputs[:2])
            counted = quiet_keys(key) if equalized else None
            mean, magnitude = (mean_of_tokens(x, counted).repeat_interleave(group, 1) for x in (key, key.abs()))
            score = (query.double() * mean.double()).sum(-1).float()
            bound = (query.abs() * magnitude).sum(-1).nan_to_num(0.0, 0.0, 0.0) * 2.0**-23 * head_dim
            found, rest = actual.mean_score[:, :, :q_len], actual.mean_score[:, :, q_len:]
            assert torch.equal(found.isfinite(), score.isfinite()) and not rest.any()
            difference = (found - score).masked_fill(~score.isfinite(), 0.0).abs()
            assert (difference <= bound + 1e-37).all()


def heavy_keys_agree(actual, expected):
    """Return whether the same keys are heavy, with the same bits; a NaN is like any other."""
    pairs = ((actual.heavy.key, expected.heavy.key), (actual.heavy.value, expected.heavy.value))
    return all(torch.equal(x.nan_to_num(777.0), y.nan_to_num(777.0)) for x, y in pairs)


def test_sinks_anywhere_are_heavy(device):
    """One in each part of a cluster's share of the keys, in the last ones, and behind keys that do not exist."""
    query, key, value = draw(2, 3, 4165, 128, heads=6, q_len=300)
    query += 1.0
    for head, places in enumerate(((64, 900), (3, 4164, 2000), (130, 1290, 4097, 4100))):
        key[:, head, places] = key[:, head].float().mean(-2).to(key.dtype)[:, None] + 4.0
    recipe = with_fields("fp8")
    for key_mask in (None, torch.rand(2, 4165, device=device) < 0.8):
        call = calls.new_call(query, key, value, recipe, key_mask=key_mask)
        padding = None if key_mask is None else KeyPadding.of(key_mask)
        actual = quantize.quantize_operands(call, padding)
        places = None if key_mask is None else key_mask[:, None, :, None]
        chosen = heavy_places(query.float(), key.float(), 64, call.scale, places)
        expected = key.gather(2, chosen[..., None].expand(-1, -1, -1, 128))
        if key_mask is not None:
            expected = torch.where(key_mask[:, None, :64, None], expected, 0.0)
        order = heavy_order(128).to(device)
        assert torch.equal(actual.heavy.key, expected[..., order])
        assert (chosen != torch.arange(64, device=device)).any()
        assert_rotated(actual, (query, key, value), recipe, places)


# What exists of keys 0 … n - 1, for each of the batch elements that the last number says.
VALID = (
    (lambda index, draw: index >= len(index) // 3, 1),
    (lambda index, draw: index < len(index) * 2 // 3, 1),
    (lambda index, draw: (index > 130) & (index < 400) | (index == 3), 1),
    (lambda index, draw: draw(len(index)) < 0.5, 2),
    (lambda index, draw: index < len(index), 1),
    (lambda index, draw: index < 0, 1),
    (lambda index, draw: index < 40, 1),
)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("case", "which", "rotated", "pv"), pairwise(range(4), range(len(VALID)), [False, True], list(RECIPE_OF_PV))
)
def test_keys_that_do_not_exist_count_for_nothing(case, which, rotated, pv, device):
    choose = random.Random(case)
    head_dim, v_head_dim = choose.choice(((40, 64), (64, 64), (72, 128), (128, 128)))
    kv_heads, group = choose.choice(((1, 1), (3, 1), (2, 4)))
    kv_len = choose.choice((65, 200, 1000, 4160, 17_000))
    q_len = choose.choice((kv_len, 129))
    inputs = draw(2, kv_heads, kv_len, head_dim, heads=kv_heads * group, q_len=q_len, v_head_dim=v_head_dim, seed=case)
    generator = torch.Generator("cuda").manual_seed(case)
    chosen, count = VALID[which]
    index = torch.arange(kv_len, device=device)
    rows = [chosen(index, lambda n: torch.rand(n, device=device, generator=generator)) for _ in range(count)]
    key_mask = torch.stack(rows)
    for x in inputs[1:]:
        x[~key_mask[:, None].expand(2, kv_heads, -1)] = choose.choice((torch.nan, torch.inf, 1e4))
    recipe = with_fields(pv, rotate=rotated, equalize=rotated, heavy_keys=choose.choice((0, 64)))
    call = calls.new_call(*inputs, recipe, return_lse=True)
    heavy = call.heavy_keys
    padding = KeyPadding.of(key_mask)
    actual = CudaInt8Quantizer().quantize(call, padding)
    assert torch.equal(padding.spans, key_padding(key_mask).spans)
    plain_recipe = replace(recipe, rotate=False, equalize=False)
    expected = triton_calls.quantize(calls.new_call(*inputs, plain_recipe, return_lse=True), key_mask)
    differ = differing(actual, expected)
    if rotated:
        queries = key_mask[:, None, :, None] if q_len == kv_len else None
        assert_rotated(actual, inputs, recipe, key_mask[:, None, :, None], queries)
        differ = [name for name in differ if name.startswith("value")]
    assert differ == []
    assert not heavy or heavy_keys_agree(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotation_of_the_largest_numbers(head_dim, dtype, device):
    """A factor of 2^8 with float16's largest number, and rows that are all of one size."""
    query, key, value = draw(1, 2, 1000, head_dim, dtype=dtype)
    largest = 65504.0
    query[:, :, ::2], key[:, :, ::2], key[:, :, 1::2] = 2.0**-14, largest, -largest
    query[..., 1] = largest
    key[..., 1] *= 2.0**-14
    recipe = with_fields("fp8", rotate=True, equalize=True, heavy_keys=0)
    actual = quantize.quantize_operands(calls.new_call(query, key, value, recipe))
    assert actual.equalizer.amax() == 256 and actual.equalizer.amin() < 1
    assert_rotated(actual, (query, key, value), recipe)
    assert actual.query_scale[:, :, :1000].isfinite().all() and actual.key_scale.isfinite().all()


@pytest.mark.parametrize("shape", FULL_SIZES)
def test_full_size_rotated(shape, device):
    """Also twice the same bits."""
    inputs = draw(*shape)
    recipe = with_fields("fp8", rotate=True, equalize=True, heavy_keys=64)
    first, second = (quantize.quantize_operands(calls.new_call(*inputs, recipe)) for _ in range(2))
    assert differing(first, second) == [] and torch.equal(first.equalizer, second.equalizer)
    for head in range(0, shape[1], 8):  # the reference takes much memory
        one = [x[:1, head : head + 1] for x in inputs]
        of_head = {
            name: getattr(first, name)[:1, head : head + 1]
            for name in ("query", "query_scale", "key", "key_scale", "equalizer")
        }
        assert_rotated(replace(first, **of_head), one, recipe)


@pytest.mark.parametrize("pv", RECIPE_OF_PV)
@pytest.mark.parametrize("shape", FULL_SIZES)
def test_full_size(shape, pv, device):
    inputs = draw(*shape)
    expected = triton_operands(*inputs, pv)
    assert differing(quantized(inputs, pv), expected) == []
    tokens_first = [lay_out(x, "tokens first") for x in inputs]
    assert differing(quantized(tokens_first, pv), expected) == []


def test_reruns_are_bitwise_equal(device):
    """`quantize` starts while `statistics` runs, and what one call frees the next one uses at once."""
    inputs = [draw(4, 32, 4096, 128, seed=seed) for seed in range(2)]
    expected = [triton_operands(*x) for x in inputs]
    for index in range(50):
        assert differing(quantized(inputs[index % 2]), expected[index % 2]) == []


def test_a_graph_computes_anew_with_each_replay(device):
    inputs = draw(2, 8, 4096, 128)
    quantized(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantized(inputs)
    for seed in range(1, 6):
        for x, y in zip(inputs, draw(2, 8, 4096, 128, seed=seed), strict=True):
            x.copy_(y)
        graph.replay()
        assert differing(captured, triton_operands(*inputs)) == []


def test_streams_do_not_meet(device):
    inputs = [draw(2, 16, 4096, 128, seed=seed) for seed in range(2)]
    expected = [triton_operands(*x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(quantized(x))
    torch.cuda.synchronize()
    assert all(differing(x, expected[index % 2]) == [] for index, x in enumerate(found))
