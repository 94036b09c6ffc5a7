"""The INT8 kernels in Triton's interpreter: operands to the bit, outputs against the reference."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from sage_kernels import ops
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.calls import draw_tensors, new_call, pack
from tests.helpers.codes import codes_agree, scales_agree
from tests.helpers.triton_calls import attend, quantize

ADA = (8, 9)
# P in FP8 with causality and in INT8 without; the audit runs all.
each_format_once = pytest.mark.parametrize(
    ("recipe", "is_causal"),
    [
        *(("sage2", True), ("sage_bwd_int8", False)),
        *(
            pytest.param(recipe, is_causal, marks=pytest.mark.audit)
            for recipe, is_causal in (("sage1", True), ("sage1", False), ("sage2", False), ("sage_bwd_int8", True))
        ),
    ],
)


draw = partial(draw_tensors, batch=1, kv_len=150, v_head_dim=64, means=True)

SIZES = {
    "float32": {},
    "head_dim 80": {"head_dim": 80, "v_head_dim": 40, "q_len": 130, "kv_len": 64},
    "float16, one key": {"dtype": torch.float16, "kv_len": 1},
}


@pytest.mark.parametrize("padding", [pytest.param(False, marks=pytest.mark.audit), True])
@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        pytest.param(recipe, sizes, marks=() if recipe == "sage2" else pytest.mark.audit, id=f"{recipe}, {name}")
        for recipe in ("sage2", "sage1", "sage_bwd_int8")
        for name, sizes in SIZES.items()
    ],
)
def test_operands_are_the_references(recipe, sizes, padding):
    """Bit for bit, but for 16-bit Q and K, which MMA instructions rotate."""
    query, key, value = draw(**sizes)
    key[0, 0, 0, 3], value[0, 1, 0, 5] = float("nan"), float("inf")
    value[..., 7] -= value[..., 7].mean()
    key_mask = torch.rand(1, key.shape[2], generator=torch.Generator().manual_seed(1)) < 0.7 if padding else None
    query[..., 9] *= 30
    recipe = replace(RECIPES[recipe], rotate=True, equalize=True)
    expected = reference.quantize_operands(
        query, key, value, recipe, None if key_mask is None else key_mask[:, None, :, None]
    )
    operands = quantize(new_call(query, key, value, recipe), key_mask)
    if recipe.smooth_v:
        assert torch.equal(operands.value_mean[:, :, None, : value.shape[-1]], expected.value_mean)
    v_values = operands.value.float()
    if recipe.pv != "fp16":
        v_values = v_values.unflatten(-1, (-1, 4, 2, 2)).transpose(-2, -3).flatten(-4).mT
    k_scale = operands.key_scale.float()[..., None, :, None].expand(-1, -1, -1, 8, 4, 2).flatten(2)
    assert torch.equal(operands.equalizer[:, :, None, : query.shape[-1]], expected.equalizer)
    assert torch.all(operands.equalizer[..., query.shape[-1] :] == 1)
    rotated = (
        (operands.query, expected.query, codes_agree),
        (operands.query_scale[..., None], expected.query_scale, scales_agree),
        (operands.key, expected.key, codes_agree),
        (k_scale[..., None], expected.key_scale, scales_agree),
    )
    for actual, wanted, agree in rotated:
        inside = actual[:, :, : wanted.shape[2]].float()
        agree = agree if query.dtype == torch.float16 else torch.equal
        assert agree(inside.nan_to_num(777.0), wanted.nan_to_num(777.0))
    for actual, wanted in (
        (v_values, expected.value),
        (operands.value_scale[:, :, None], expected.value_scale.expand(-1, -1, -1, value.shape[-1])),
    ):
        inside = actual[:, :, : wanted.shape[2], : wanted.shape[3]].float()
        assert torch.equal(inside.nan_to_num(777.0), wanted[..., : inside.shape[3]].nan_to_num(777.0))


@pytest.mark.parametrize(("tokens", "heavy_keys"), [(300, 0), (100, 64)])
def test_queries_that_are_padding_do_not_decide_the_equalizer(tokens, heavy_keys):
    query, key, value = draw(batch=2, q_len=tokens, kv_len=tokens, q_heads=2, kv_heads=1)
    key_mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(1)) < 0.5
    query = torch.where(key_mask[:, None, :, None], query, 1e6 * query[..., :1])
    recipe = replace(RECIPES["sage1"], heavy_keys=heavy_keys)
    equalizer = quantize(new_call(query, key, value, recipe), key_mask).equalizer
    expected = reference.quantize_operands(query, key, value, recipe, key_mask[:, None, :, None]).equalizer
    assert torch.equal(equalizer, expected.squeeze(2))


def test_packed_sequences_are_equalized_each_by_its_own_queries_and_keys():
    query, key, value = draw(q_len=640, kv_len=300, q_heads=2, kv_heads=1, dtype=torch.float16)
    key[:, :, 130:, 5] *= 40
    query[:, :, 300:, 7] *= 20
    starts = torch.tensor([0, 300, 300, 640], dtype=torch.int32), torch.tensor([0, 130, 150, 300], dtype=torch.int32)
    recipe = replace(RECIPES["sage1"], rotate=True, equalize=True)
    packed = quantize(new_call(query, key, value, recipe, lengths=Lengths(*starts, 340, 150)))
    for index, first, k_first in ((0, 0, 0), (2, 512, 384)):
        queries, keys = (slice(*cu_seqlens[index : index + 2].tolist()) for cu_seqlens in starts)
        alone = quantize(new_call(query[:, :, queries], key[:, :, keys], value[:, :, keys], recipe))
        assert torch.equal(packed.equalizer[index], alone.equalizer[0])
        assert torch.equal(packed.query[:, :, first : first + alone.query.shape[2]], alone.query)
        assert torch.equal(packed.key[:, :, k_first : k_first + alone.key.shape[2]], alone.key)
    assert torch.equal(packed.equalizer[1], torch.ones(1, 64))  # without queries


@pytest.mark.parametrize("magnitude", [1e-30, *(pytest.param(x, marks=pytest.mark.audit) for x in (1.0, 1e30))])
def test_v_keeps_the_sums_of_tokens_as_in_the_reference(magnitude):
    """Errors of all sizes, all of the largest and of one sign, and all equal."""
    query, key, value = draw(kv_len=300)
    value *= torch.logspace(-6, 0, 300)[:, None]
    value[..., 3] = torch.where(torch.arange(300) // 128 % 2 == 0, 272.0, -272.0)
    value[..., 5] = value[..., :1, 5]
    value[:, :, 299, :] = 448.0
    value *= magnitude
    expected = reference.quantize_operands(query, key, value, RECIPES["sage2"]).value
    actual = quantize(new_call(query, key, value, "sage2")).value
    actual = actual.float().unflatten(-1, (-1, 4, 2, 2)).transpose(-2, -3).flatten(-4).mT
    assert torch.equal(actual, expected)


def masks(q_len, kv_len):
    generator = torch.Generator().manual_seed(2)
    allowed = torch.rand(1, 2, q_len, kv_len, generator=generator) < 0.5
    allowed[:, :, 5] = False
    allowed[..., 64:128] = False
    padding = torch.zeros(1, 1, 1, kv_len).masked_fill(torch.arange(kv_len) >= 100, -1e9)
    return {
        "none": None,
        "bool": allowed,
        "one row": allowed[:, :1, :1],
        "additive": torch.randn(1, 1, q_len, kv_len, generator=generator),
        "padding": padding,
    }


# Which keys a row sees does not depend on the format of P.
QUICK = {(None, "none"), (None, "bool"), (-3, "one row"), (-3, "additive"), (-3, "padding")}


@pytest.mark.parametrize(
    ("recipe", "causal_offset", "mask"),
    [
        pytest.param(
            recipe, offset, mask, marks=() if recipe == "sage2" and (offset, mask) in QUICK else pytest.mark.audit
        )
        for recipe in ("sage2", "sage1", "sage_bwd_int8")
        for offset in (None, 0, -3, 80)
        for mask in ("none", "bool", "one row", "additive", "padding")
    ],
)
def test_the_kernels_error_is_the_references(recipe, causal_offset, mask):
    inputs = draw(q_heads=2, kv_heads=1)
    options = {
        "mask": masks(70, 150)[mask],
        "is_causal": causal_offset is not None,
        "causal_offset": causal_offset or 0,
    }
    truth, _ = sdpa.attention(*inputs, **options)
    expected, expected_lse = reference.attention(*inputs, RECIPES[recipe], block_n=64, **options)
    output, lse = attend(new_call(*inputs, recipe, **options, return_lse=True), ADA)
    # Rows whose keys are all heavy have no error but that of float32 sums.
    assert (output - truth).abs().sum() <= 1.05 * (expected - truth).abs().sum() + 2**-20 * truth.abs().sum()
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert torch.allclose(lse, expected_lse, atol=1e-4)
    assert not output[(lse == -torch.inf)].any()


@pytest.mark.parametrize("q_len", [*(pytest.param(n, marks=pytest.mark.audit) for n in (17, 64, 128)), 100])
@pytest.mark.parametrize("causal_offset", [pytest.param(0, marks=pytest.mark.audit), 40, 2**31 - 1])
def test_a_mask_of_one_row_is_causal_for_every_row(q_len, causal_offset):
    inputs = draw(q_len=q_len, kv_len=140, head_dim=128)
    options = {"mask": torch.ones(1, 1, 1, 140, dtype=torch.bool), "is_causal": True, "causal_offset": causal_offset}
    expected, expected_lse = reference.attention(*inputs, RECIPES["sage1"], block_n=64, **options)
    output, lse = attend(new_call(*inputs, "sage1", **options, return_lse=True), ADA)
    truth, _ = sdpa.attention(*inputs, **options)
    assert (output - truth).abs().sum() <= 1.05 * (expected - truth).abs().sum()
    assert torch.allclose(lse, expected_lse, atol=1e-4)


def test_a_row_of_padding_alone_attends_to_all_of_it():
    """finfo.min is not -inf, as transformers relies on where it pads on the left."""
    inputs = draw(q_len=20, kv_len=64)
    mask = torch.zeros(1, 1, 20, 64)
    mask[:, :, :4] = torch.finfo(torch.float32).min
    expected, _ = reference.attention(*inputs, RECIPES["sage1"], mask=mask, block_n=64)
    output, _ = attend(new_call(*inputs, "sage1", mask=mask), ADA)
    assert torch.allclose(output, expected, atol=1e-3)


@pytest.mark.parametrize(
    "dtype", [torch.float16, *(pytest.param(x, marks=pytest.mark.audit) for x in (torch.bfloat16, torch.float32))]
)
def test_the_largest_biases_stay_finite_and_nan_stays_nan(dtype):
    inputs = draw(q_len=20, kv_len=64)
    mask = torch.zeros(1, 1, 20, 64, dtype=dtype)
    mask[:, :, 0], mask[:, :, 1] = torch.finfo(dtype).max, torch.finfo(dtype).min
    mask[:, :, 2, 5], mask[:, :, 3, 7] = torch.finfo(dtype).max, torch.nan
    expected, _ = reference.attention(*inputs, RECIPES["sage1"], mask=mask, block_n=64)
    output, _ = attend(new_call(*inputs, "sage1", mask=mask), ADA)
    finite = [row for row in range(20) if row != 3]
    assert expected[:, :, finite].isfinite().all()
    assert torch.allclose(output[:, :, finite], expected[:, :, finite], atol=0.02)  # float16's largest rounds scores
    assert output[:, :, 3].isnan().all()


@each_format_once
def test_scores_that_float32_rounds_coarsely_make_no_weight_above_the_largest(recipe, is_causal):
    """Such a weight would, in INT8, be a negative number."""
    inputs = [x * factor for x, factor in zip(draw(), (200, 200, 1), strict=True)]
    options = {"is_causal": is_causal, "causal_offset": 80 if is_causal else 0}
    truth, lse = sdpa.attention(*inputs, **options)
    assert lse.median() > 2**16
    expected, _ = reference.attention(*inputs, RECIPES[recipe], block_n=64, **options)
    output, _ = attend(new_call(*inputs, recipe, **options), ADA)
    assert (output - truth).abs().sum() <= 1.05 * (expected - truth).abs().sum()


@pytest.mark.parametrize("scale", [-0.2, pytest.param(0.0, marks=pytest.mark.audit)])
def test_any_scale_is_honoured(scale):
    inputs = draw()
    expected, _ = reference.attention(*inputs, RECIPES["sage2"], scale=scale, block_n=64)
    output, _ = attend(new_call(*inputs, "sage2", scale=scale), ADA)
    truth, _ = sdpa.attention(*inputs, scale=scale)
    assert (output - truth).abs().sum() <= 1.05 * (expected - truth).abs().sum()


@each_format_once
def test_packed_sequences_match_separate_sequences(recipe, is_causal):
    # With causality the reference of a sequence alone has late keys from 128 on, as all packed ones have.
    q_lengths, kv_lengths, used = [130, 1, 64, 70], [130, 70, 128, 300], [200, 0, 128, 250]

    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(1, heads, sum(lengths), 32, generator=generator)
        for heads, lengths in ((2, q_lengths), (1, kv_lengths), (1, kv_lengths))
    )
    lengths = Lengths(pack(q_lengths), pack(kv_lengths), 130, 300, torch.tensor(used, dtype=torch.int32))
    options = {"is_causal": is_causal, "causal_offset": 2, "return_lse": True}
    output, lse = attend(new_call(query, key, value, recipe, **options, lengths=lengths), ADA)
    parts = [x[0].transpose(0, 1) for x in (query, key, value)]
    expected, expected_lse = ops.packed_attention(*parts, *lengths[:4], seqused_k=lengths[4], **options, recipe=recipe)
    truth, _ = ops.packed_attention(*parts, *lengths[:4], seqused_k=lengths[4], **options, recipe="exact")
    output = output[0].transpose(0, 1)
    # The reference's tiles hold other keys, so P is rounded relative to other maxima.
    assert (output - truth).abs().sum() <= 1.1 * (expected - truth).abs().sum()
    assert torch.allclose(lse[0], expected_lse, atol=1e-4)
