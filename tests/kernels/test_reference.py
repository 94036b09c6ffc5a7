"""The reference against untiled float64 softmax.

`untiled` attends in float64 with the very Q, K, V that the recipe quantised; what is left between it and the reference
is the rounding of P (bounded per format below) and float32 arithmetic. So the bounds are tight where a mask, a tile, a
group of heads or a smoothing correction could go wrong, and nothing is tuned.
"""

import resource
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec import call
from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.layout import BLOCK
from sage_kernels.spec.masks import attended_rows
from sage_kernels.spec.recipe import RECIPES, Recipe
from tests.helpers.sinks import uniform_but_where_sampled

LOW_BIT = [recipe for recipe in RECIPES.values() if recipe.qk != "exact"]
# Formats and transforms in all combinations that could interfere, with P in 16 bit so that the bound is tight.
TIGHT = [
    Recipe("fp4_all_transforms", "nvfp4", "fp16", smooth_q=True, smooth_k=True, smooth_v=True, rotate=True),
    Recipe("fp4_plain", "nvfp4", "fp16"),
    Recipe("fp4_smooth_q_only", "nvfp4", "fp16", smooth_q=True),
    Recipe("int8_smooth", "int8", "fp16", smooth_k=True, smooth_v=True),
    Recipe("int8_smooth_q", "int8", "fp16", smooth_q=True, smooth_k=True),
]


def draw(batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, q_heads, q_len, head_dim, generator=generator) + torch.randn(
        head_dim, generator=generator
    )
    key = torch.randn(batch, kv_heads, kv_len, head_dim, generator=generator) + torch.randn(
        head_dim, generator=generator
    )
    value = torch.randn(batch, kv_heads, kv_len, v_head_dim, generator=generator) + 1.0
    return query.to(dtype), key.to(dtype), value.to(dtype)


def untiled(query, key, value, recipe, mask=None, is_causal=False, scale=None):
    """(output, sum of P·|V|, lse) in float64 from the recipe's quantised operands; -inf rows give 0."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    batch, q_heads, q_len, _ = query.shape
    kv_len, group = key.shape[2], q_heads // key.shape[1]
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    operands = reference.quantize_operands(query, key, value, recipe, reference.counted_keys(mask))

    def heads(x):
        return x[:, :, :kv_len].double().repeat_interleave(group, 1)

    scores = operands.query.double() @ heads(operands.key).mT
    scores = scores * operands.query_scale.double() * heads(operands.key_scale).mT
    if operands.query_mean is not None:
        delta = operands.query_mean.double() @ heads(operands.smooth_key).mT
        scores = scores + delta.repeat_interleave(reference.BLOCK_M, 2)[:, :, :q_len]
    scores = scores * scale
    if mask is not None:
        mask = mask.expand(batch, q_heads, q_len, kv_len)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if is_causal:
        scores = scores.masked_fill(~torch.ones(q_len, kv_len, dtype=torch.bool).tril(), -torch.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
    value = heads(operands.value * operands.value_scale)
    output = p @ value
    if operands.value_mean is not None:
        allowed = (lse > -torch.inf).unsqueeze(-1)
        output = output + allowed * operands.value_mean.double().repeat_interleave(group, 1)
    if operands.key_mean is not None:
        lse = lse + scale * (query.double() @ operands.key_mean.double().repeat_interleave(group, 1).mT).squeeze(-1)
    # Scores of large magnitude carry float32 rounding of |q|·|k|·head_dim terms into P.
    magnitude = (query.double().norm(dim=-1, keepdim=True) * key.double().norm(dim=-1).amax() * scale + 1).squeeze(-1)
    return output, p, value.abs(), lse, magnitude


def assert_close_to_untiled(query, key, value, recipe, **arguments):
    """|reference - untiled| ≤ rounding of P to 16 bit + float32 arithmetic + rounding of the output."""
    output, lse = reference.attention(query, key, value, recipe, **arguments)
    contiguous = (x.contiguous() for x in (query, key, value))  # so that both sum, and then round, alike
    expected, p, magnitudes, expected_lse, score_size = untiled(*contiguous, recipe, **arguments)
    head_dim, kv_len = query.shape[-1], key.shape[2]
    # Relative error of exp(s): that of s, whose head_dim products round in float32 (and P's own 11 bits); the floor
    # 2**-25 is half a float16 subnormal step of P relative to the row's maximum.
    float32 = 2.0**-23 * (head_dim + kv_len**0.5 + 8)
    relative = 2.0**-11 + 4 * float32 * score_size.unsqueeze(-1)
    largest = p.amax(-1, keepdim=True)
    bound = relative * (p @ magnitudes) + 2.0**-25 * largest * magnitudes.sum(-2, keepdim=True)
    bound = 2 * bound + 4 * torch.finfo(query.dtype).eps * expected.abs() + 1e-6
    assert output.dtype == query.dtype
    assert ((output.double() - expected).abs() <= bound).all()
    finite = expected_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, finite)
    assert ((lse.double() - expected_lse)[finite].abs() <= (8 * float32 * score_size)[finite]).all()


def with_layout(x, layout):
    """The same values in other strides; "expanded" repeats the first head by a stride of 0."""
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other channel":
        return torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2]
    if layout == "expanded":
        return x[:, :1].expand_as(x)
    return x


lengths = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 255, 256, 257, 300]))


@st.composite
def requests(draw_value):
    batch, kv_heads, group = draw_value(st.sampled_from([(1, 1, 1), (2, 2, 1), (1, 2, 3), (2, 1, 2)]))
    q_len, kv_len = draw_value(lengths), draw_value(lengths)
    head_dim, v_head_dim = draw_value(st.sampled_from([(16, 16), (40, 24), (64, 64), (80, 128), (256, 16)]))
    kind = draw_value(st.sampled_from(["none", "causal", "bool", "additive", "padding"]))
    seed = draw_value(st.integers(0, 2**20))
    shape = [draw_value(st.sampled_from([1, size])) for size in (batch, kv_heads * group, q_len, kv_len)]
    dims = draw_value(st.integers(2, 4))
    return (batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim, v_head_dim, seed), kind, shape[4 - dims :]


def make_mask(kind, shape, batch, kv_len, seed):
    generator = torch.Generator().manual_seed(seed + 1)
    if kind == "bool":
        return torch.rand(shape, generator=generator) < 0.3
    if kind == "additive":
        mask = torch.randn(shape, generator=generator)
        return mask.masked_fill(torch.rand(shape, generator=generator) < 0.3, -torch.inf)
    if kind == "padding":
        kept = torch.randint(0, kv_len + 1, (batch, 1, 1, 1), generator=generator)
        return torch.arange(kv_len) < kept
    return None


@pytest.mark.parametrize("recipe", TIGHT, ids=lambda recipe: recipe.name)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    request=requests(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layouts=st.tuples(*[st.sampled_from(["contiguous", "tokens first", "every other channel", "expanded"])] * 3),
    scale=st.sampled_from([None, 0.3]),
)
def test_every_request_equals_untiled_softmax_of_the_same_operands(recipe, request, dtype, layouts, scale):
    shape, kind, mask_shape = request
    query, key, value = (with_layout(x, layout) for x, layout in zip(draw(*shape, dtype=dtype), layouts, strict=True))
    mask = make_mask(kind, mask_shape, shape[0], shape[4], shape[7])
    assert_close_to_untiled(query, key, value, recipe, mask=mask, is_causal=kind == "causal", scale=scale)


@pytest.mark.parametrize("recipe", TIGHT, ids=lambda recipe: recipe.name)
def test_strides_and_scale_do_not_matter(recipe):
    query, key, value = draw(2, 4, 2, 150, 170, 64, 64)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    wide = torch.randn(2, 4, 150, 128)
    wide[..., ::2] = query
    strided[0] = wide[..., ::2]
    plain = reference.attention(query, key, value, recipe, scale=0.3)
    assert all(torch.equal(x, y) for x, y in zip(plain, reference.attention(*strided, recipe, scale=0.3), strict=True))
    assert_close_to_untiled(query, key, value, recipe, scale=0.3)


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
def test_chunks_of_rows_do_not_change_the_result(recipe, monkeypatch):
    query, key, value = draw(1, 2, 1, 700, 300, 32, 32)
    whole = reference.attention(query, key, value, recipe, is_causal=True)
    monkeypatch.setattr(sdpa, "ELEMENTS_PER_CHUNK", 2 * 128 * 128)
    chunked = reference.attention(query, key, value, recipe, is_causal=True)
    assert torch.allclose(whole[0], chunked[0], atol=1e-6)
    assert torch.allclose(whole[1], chunked[1], atol=1e-6)


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
def test_constant_values_come_out_unchanged(recipe):
    """V = 1 shows a uniform scale error, which cosine similarity hides."""
    query, key, _ = draw(2, 2, 2, 200, 333, 64, 64)
    output, _ = reference.attention(query, key, torch.ones(2, 2, 333, 64), recipe)
    # With denominators from P the sum of P's rounding errors remains: at most half an e2m1 or e4m3 step each, 1/6.
    tolerance = 1e-5 if recipe.denominator == "quantized_p" or recipe.smooth_v else 1 / 6
    assert (output - 1).abs().max() <= tolerance
    assert (output.mean() - 1).abs() <= tolerance / 4


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
def test_uniform_scores_have_the_logarithm_of_the_length_as_lse(recipe):
    query = torch.zeros(1, 2, 130, 64)
    _, key, value = draw(1, 2, 2, 130, 517, 64, 64)
    _, lse = reference.attention(query, key, value, recipe)
    assert (lse - torch.tensor(517.0).log()).abs().max() < 1e-5


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
def test_rows_that_may_attend_to_nothing_are_zero(recipe):
    query, key, value = draw(1, 2, 2, 140, 200, 32, 32)
    mask = torch.rand(1, 2, 140, 200, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, 0, 5] = False
    mask[:, :, 130:] = False
    for form in (mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)):
        output, lse = reference.attention(query, key, value, recipe, mask=form)
        assert output.isfinite().all()
        assert not output[:, 0, 5].any()
        assert not output[:, :, 130:].any()
        assert (lse[:, :, 130:] == -torch.inf).all()
    nothing, lse = reference.attention(query, key, value, recipe, mask=torch.zeros(1, 1, 1, 200, dtype=torch.bool))
    assert not nothing.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("additive", [False, True])
def test_what_is_masked_has_no_influence_not_even_on_scales(recipe, additive):
    query, key, value = draw(1, 2, 2, 140, 200, 32, 32)
    mask = torch.ones(1, 1, 1, 200, dtype=torch.bool)
    mask[..., 60:90] = False  # padding in the middle, as Qwen-Image has it
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    clean = reference.attention(query, key, value, recipe, mask=mask)
    key[:, :, 60:90], value[:, :, 60:90] = 1e4, float("nan")
    poisoned = reference.attention(query, key, value, recipe, mask=mask)
    assert all(torch.equal(x, y) for x, y in zip(clean, poisoned, strict=True))


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
def test_padded_keys_equal_a_shorter_sequence(recipe):
    query, key, value = draw(1, 2, 2, 50, 200, 32, 32)
    mask = (torch.arange(200) < 131).view(1, 1, 1, 200)
    padded = reference.attention(query, key, value, recipe, mask=mask)
    short = reference.attention(query, key[:, :, :131], value[:, :, :131], recipe)
    assert torch.allclose(padded[0], short[0], atol=1e-5)
    assert torch.allclose(padded[1], short[1], atol=1e-5)


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
def test_each_block_of_queries_gets_its_own_correction(recipe):
    """Queries whose mean jumps from block to block: each block alone must come out as it does among the others."""
    query, key, value = draw(1, 1, 1, 512, 256, 64, 64)
    query = query * 0.1 + torch.tensor([3.0, -3.0, 5.0, 1.0]).repeat_interleave(128).view(1, 1, 512, 1)
    recipe = replace(recipe, heavy_choice="first")  # the heaviest depend on all queries
    together, _ = reference.attention(query, key, value, recipe)
    for start in range(0, 512, 128):
        block = slice(start, start + 128)
        alone, _ = reference.attention(query[:, :, block], key, value, recipe)
        truth, _ = sdpa.attention(query[:, :, block], key, value)
        # Products of other shapes sum in another order, which moves a rounding of P now and then.
        assert (together[:, :, block] - alone).abs().sum() <= 0.02 * (alone - truth).abs().sum()


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_query_spoils_its_own_row_only(recipe, bad):
    query, key, value = draw(1, 1, 1, 140, 130, 32, 32)
    query[0, 0, 7, 3] = bad
    output, _ = reference.attention(query, key, value, recipe)
    assert output[0, 0, 7].isnan().all()
    assert output[0, 0, torch.arange(140) != 7].isfinite().all()


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("bias", [-1e4, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min])
def test_padding_by_a_large_negative_bias_equals_padding_by_minus_infinity(recipe, bias):
    query, key, value = draw(1, 2, 2, 50, 200, 32, 32)
    key[:, :, 130:], value[:, :, 130:] = 50.0, 50.0
    padded = (torch.arange(200) >= 130).view(1, 1, 1, 200)
    recipe = replace(recipe, heavy_choice="first")  # as it is with a bias
    expected = reference.attention(query, key, value, recipe, mask=~padded)
    actual = reference.attention(query, key, value, recipe, mask=torch.zeros(padded.shape).masked_fill(padded, bias))
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def masked(kind, q_len, kv_len):
    generator = torch.Generator().manual_seed(3)
    if kind == "keys":
        return torch.rand(2, 1, 1, kv_len, generator=generator) < 0.7
    if kind == "bool":
        return torch.rand(1, 4, q_len, kv_len, generator=generator) < 0.5
    return torch.randn(2, 1, q_len, kv_len, generator=generator) if kind == "additive" else None


@pytest.mark.parametrize("mask", ["none", "keys", "bool", "additive"])
@pytest.mark.parametrize(("q_len", "kv_len", "offset"), [(150, 150, 0), (140, 200, 60), (90, 70, -3), (20, 300, 400)])
def test_causal_rows_of_recent_and_heavy_keys_alone_are_exact(q_len, kv_len, offset, mask):
    recipe = replace(RECIPES["sage3"], recent_keys=max(q_len + offset, kv_len))
    inputs = draw(2, 4, 2, q_len, kv_len, 40, 24)
    options = {"mask": masked(mask, q_len, kv_len), "is_causal": True, "causal_offset": offset}
    output, lse = reference.attention(*inputs, recipe, **options)
    truth, true_lse = sdpa.attention(*inputs, **options)
    assert torch.allclose(output.double(), truth, atol=1e-5)
    assert torch.allclose(lse.double(), true_lse, atol=1e-5)


@pytest.mark.parametrize("recipe", ["sage1", "sage3"])
@pytest.mark.parametrize("late", [(48,), (150, 167, 255, 53), tuple(range(130, 146))])
def test_with_late_keys_each_row_attends_once_to_each_key_that_it_sees(recipe, late):
    inputs, rows = uniform_but_where_sampled(256, 32, late)
    # Whose P·V is exact here, and rows of zeros too.
    recipe = replace(RECIPES[recipe], pv="fp16", smooth_q=False, smooth_v=False, denominator="p")
    operands = reference.quantize_operands(*inputs, recipe, is_causal=True)
    assert set(late) <= set(operands.heavy.late.flatten().tolist())
    output, lse = reference.attention(*inputs, recipe, is_causal=True)
    count = torch.arange(1.0, 257.0)
    torch.testing.assert_close(output[0, 0, rows], (torch.ones(256, 256).tril() / count[:, None])[rows])
    torch.testing.assert_close(lse[0, 0, rows], count.log()[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("causal_offset", "recent_keys"), list(product((-130, -48, 0, 1, 63, 200), (1, 64, 80, 200))))
def test_rows_have_at_least_so_many_recent_keys_and_few_more(causal_offset, recent_keys):
    """The blocks' own rows and the rounding to whole tiles make the others."""
    start = call.recent_start(causal_offset, recent_keys)
    assert start % BLOCK == 0
    for row in range(2 * BLOCK):
        recent = row + causal_offset + 1 - (start + row // BLOCK * BLOCK)
        assert recent_keys <= recent <= recent_keys + 2 * (BLOCK - 1)


@pytest.mark.parametrize(("heavy_keys", "row"), list(product((0, 64), (0, 127, 128, 131))))
def test_keys_before_the_recent_ones_are_quantised(heavy_keys, row):
    """A row whose weight is on one key has that key's V, exactly if the key is recent."""
    # A key with all the weight would be a late one.
    recipe = replace(RECIPES["sage3"], heavy_keys=heavy_keys, heavy_choice="first", recent_keys=64)
    first = heavy_keys + call.recent_start(300 - heavy_keys, 64) + row // BLOCK * BLOCK
    for chosen in (first - 20, first - 1, first, 299, row + 300):
        query, key = torch.zeros(1, 1, 132, 64), torch.zeros(1, 1, 432, 64)
        query[:, :, row, :8], key[:, :, chosen, :8] = 5.0, 50.0
        value = torch.randn(1, 1, 432, 64, generator=torch.Generator().manual_seed(chosen))
        output, _ = reference.attention(query, key, value, recipe, is_causal=True, causal_offset=300)
        error = (output[0, 0, row] - value[0, 0, chosen]).abs().mean()
        assert (error < 1e-5) == (chosen >= first) and error < 0.2


def test_without_causality_and_with_a_block_list_no_key_is_recent():
    inputs = draw(1, 2, 1, 140, 200, 32, 32)
    recipe, without = (replace(RECIPES["sage3"], recent_keys=recent) for recent in (64, 0))
    blocks = BlockList(torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32))
    for options in ({}, {"is_causal": True, "blocks": blocks}):
        outputs = [reference.attention(*inputs, one, **options)[0] for one in (recipe, without)]
        assert torch.equal(*outputs)


@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
def test_the_size_of_a_tile_of_keys_hardly_matters(block_n, monkeypatch):
    tiles = []
    monkeypatch.setattr(reference, "_quantize_p", lambda p, recipe: tiles.append(p.shape[-1]) or p)
    query, key, value = draw(1, 2, 1, 100, 300, 32, 32)
    output, lse = reference.attention(query, key, value, RECIPES["sage3"], block_n=block_n)
    assert set(tiles) == {block_n}
    expected, expected_lse = reference.attention(query, key, value, RECIPES["sage3"])
    assert torch.allclose(output, expected, atol=1e-5)
    assert torch.allclose(lse, expected_lse, atol=1e-5)


def test_other_tile_sizes_are_refused():
    with pytest.raises(ValueError, match="block_n 48 is not supported: use 16, 32, 64 or 128"):
        reference.attention(*draw(1, 1, 1, 20, 20, 32, 32), RECIPES["sage3"], block_n=48)


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
def test_float16_values_at_the_end_of_their_range_do_not_overflow(recipe):
    query, key, value = draw(1, 1, 1, 300, 300, 32, 32)
    value = (torch.rand(value.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1) * 65504
    output, _ = reference.attention((query * 10).half(), key.half(), value.half(), recipe)
    assert output.isfinite().all()


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("element", [torch.inf, -torch.inf, torch.nan])
def test_an_infinite_value_never_becomes_a_finite_number(recipe, element):
    query, key, value = (x.half() for x in draw(1, 1, 1, 300, 300, 32, 32))
    value[0, 0, 130, 3] = element
    output, _ = reference.attention(query, key, value, recipe)
    assert not output[..., 3].isfinite().any()


@pytest.mark.parametrize("recipe", [RECIPES[name] for name in ("sage3", "sage2", "sage1")], ids=lambda r: r.name)
@pytest.mark.parametrize("magnitude", [2.0**-100, 2.0**100])
def test_the_magnitude_of_values_does_not_matter(recipe, magnitude):
    query, key, value = draw(1, 1, 1, 100, 100, 32, 32)
    expected, _ = reference.attention(query, key, value, recipe)
    scaled, _ = reference.attention(query, key, value * magnitude, recipe)
    assert torch.allclose(scaled / magnitude, expected, atol=1e-6)


def test_an_expanded_mask_costs_what_it_stores():
    mask = torch.zeros(1, 1, 1, 2**20).expand(1, 8, 2**20, 2**20)  # 8 TiB if it were materialised
    assert reference.counted_keys(mask).shape == (1, 1, 2**20, 1)
    assert attended_rows(mask).shape == (1, 1, 1, 1)


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
def test_zero_value_channels_stay_zero_and_large_bfloat16_values_do_not_overflow(recipe):
    query, key, value = draw(1, 2, 2, 100, 128, 32, 32, dtype=torch.bfloat16)
    value[..., 5] = 0.0
    output, _ = reference.attention(query, key, value, recipe)
    assert not output[..., 5].any()
    large, _ = reference.attention(query, key, (value * 1e30).contiguous(), recipe)
    assert large.isfinite().all()


@pytest.mark.parametrize("recipe", LOW_BIT, ids=lambda recipe: recipe.name)
def test_inputs_are_not_changed_and_reruns_are_equal(recipe):
    inputs = draw(1, 2, 2, 100, 128, 32, 32)
    before = [x.clone() for x in inputs]
    first = reference.attention(*inputs, recipe)
    second = reference.attention(*inputs, recipe)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_smaller_recipes_are_more_accurate_in_the_order_of_their_bits():
    query, key, value = draw(1, 2, 2, 512, 512, 64, 64)
    truth, _ = sdpa.attention(query, key, value)

    def error(name):
        return (
            (reference.attention(query, key, value, RECIPES[name])[0] - truth).abs().sum() / truth.abs().sum()
        ).item()

    assert error("sage1") < error("sage2") < error("sage3") < error("sage3_paper")


@pytest.mark.parametrize("recipe", ["sage3", "sage2"])
def test_smoothing_v_costs_nothing_where_v_has_no_mean_and_the_sequence_is_long(recipe):
    """Weights of 16,384 keys average their errors down to a hundredth, but not what all errors have in common."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 64, generator=generator).bfloat16() for n in (64, 16384, 16384))
    smooth = replace(RECIPES[recipe], scale_steps=(), key_scale_steps=())
    truth, _ = sdpa.attention(query, key, value)
    errors = [
        (reference.attention(query.float(), key.float(), value.float(), variant)[0] - truth).abs().sum()
        for variant in (smooth, replace(smooth, smooth_v=False))
    ]
    assert errors[0] <= 1.02 * errors[1]


def test_the_judge_agrees_with_torch_in_float64():
    query, key, value = (x.double() for x in draw(2, 4, 2, 33, 57, 40, 24))
    mask = torch.rand(2, 1, 33, 57, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0, 0, 3] = False
    output, lse = sdpa.attention(query, key, value, mask=mask)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(output, expected, atol=1e-12)
    assert (lse[0, :, 3] == -torch.inf).all()
    causal, _ = sdpa.attention(query, key, value, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.allclose(causal, expected, atol=1e-12)


MEMORY_PROBE = """
import resource, torch
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.reference import forward as reference
query, key, value = (torch.randn(1, 1, 6144, 64) for _ in range(3))
reference.attention(query[:, :, :256], key[:, :, :256], value[:, :, :256], RECIPES["sage3"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reference.attention(query, key, value, RECIPES["sage3"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_linear_in_length(forks):
    """1×1×6144×64 within 125 MB beyond the inputs; the scores alone would be 151 MB."""
    assert hasattr(resource, "RUSAGE_SELF")
    assert int(forks.run(MEMORY_PROBE)) * 1024 < 1.25e8
