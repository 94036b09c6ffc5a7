"""The NVFP4 quantisers in Triton's interpreter: bit for bit what the specification gives."""

from dataclasses import replace

import pytest
import torch

from sage_kernels.formats import nvfp4
from sage_kernels.reference import forward as reference
from sage_kernels.spec import transforms
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.operands import NVFP4Operands
from sage_kernels.spec.recipe import get_recipe
from tests.helpers.calls import new_call
from tests.helpers.triton_calls import quantize as quantize_call

SAGE3 = replace(get_recipe("sage3"), heavy_keys=0)
# Without the search for scales, which the interpreter is slow at, for promises that do not depend on it.
PLAIN = replace(SAGE3, scale_steps=(), key_scale_steps=())


def random_inputs(
    q_len: int, kv_len: int, head_dim: int, v_head_dim: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> list[torch.Tensor]:
    """Q, K, V with 2 query heads and 1 kv head, loud channels and means."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for heads, tokens, channels in ((2, q_len, head_dim), (1, kv_len, head_dim), (1, kv_len, v_head_dim)):
        loud = torch.randn(1, heads, 1, channels, generator=generator).mul(1.5).exp()
        x = torch.randn(1, heads, tokens, channels, generator=generator) + torch.randn(channels, generator=generator)
        tensors.append((x * loud).to(dtype))
    return tensors


def quantize(query, key, value, recipe=SAGE3, key_mask=None, return_lse=False) -> NVFP4Operands:
    key_mask = None if key_mask is None else key_mask.reshape(-1, key.shape[2])
    return quantize_call(new_call(query, key, value, recipe, return_lse=return_lse), key_mask)


def values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return nvfp4.NVFP4Tensor(codes, scale.view(torch.float8_e4m3fn), torch.ones(1)).dequantize()


def of_blocks(tensor_scale: torch.Tensor) -> torch.Tensor:
    return tensor_scale.repeat_interleave(reference.BLOCK_M, -1).unsqueeze(-1)


def keys_of_rows(rows: int) -> torch.Tensor:
    """Which key each row of K's operand holds."""
    p = torch.arange(32)
    return (torch.arange(0, rows, 32)[:, None] + p // 8 * 2 + p % 8 // 2 * 8 + p % 2).flatten()


def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal, NaN where the other has NaN."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def check(query, key, value, recipe=SAGE3, key_mask=None) -> None:
    """Every value of the operands is the reference's, and what lies beyond the inputs is 0."""
    operands = quantize(query, key, value, recipe, key_mask)
    expected = reference.quantize_operands(query, key, value, recipe, key_mask)
    q = values(operands.query, operands.query_scale) * of_blocks(operands.query_tensor_scale)
    k = values(operands.key, operands.key_scale) * of_blocks(operands.key_tensor_scale)
    k = torch.empty_like(k).index_copy_(2, keys_of_rows(k.shape[2]), k)
    v = values(operands.value, operands.value_scale).transpose(-1, -2)
    for name, x, y in (("query", q, expected.query), ("key", k, expected.key), ("value", v, expected.value)):
        inside = x[:, :, : y.shape[2], : y.shape[3]]
        assert equal(inside, y), name
        assert x.nan_to_num().count_nonzero() == inside.nan_to_num().count_nonzero(), name
    assert torch.equal(operands.value_tensor_scale.flatten(), expected.value_scale.flatten()[:1].expand(1))
    if recipe.smooth_q:
        assert torch.equal(operands.query_mean[..., : query.shape[3]], expected.query_mean)
        assert operands.query_mean[..., query.shape[3] :].count_nonzero() == 0


@pytest.mark.parametrize(
    "head_dim, v_head_dim",
    [
        (16, 16),
        (40, 64),
        (128, 96),
        *(pytest.param(*sizes, marks=pytest.mark.audit) for sizes in ((64, 80), (80, 40), (96, 128))),
    ],
)
def test_operands_match_the_reference_for_every_head_dim(head_dim, v_head_dim):
    check(*random_inputs(150, 100, head_dim, v_head_dim, seed=head_dim))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_operands_match_the_reference_for_every_dtype(dtype):
    check(*random_inputs(33, 129, 64, 64, dtype))


@pytest.mark.parametrize("name", ["sage3_paper", "no rotation", "equalize", "four over six"])
def test_operands_match_the_reference_for_every_recipe(name):
    recipes = {
        "sage3_paper": get_recipe("sage3_paper"),
        "no rotation": replace(PLAIN, rotate=False, smooth_q=False),
        "equalize": replace(PLAIN, equalize=True),
        "four over six": replace(SAGE3, scale_steps=(4,), key_scale_steps=(4,), smooth_v=False),
    }
    check(*random_inputs(130, 140, 64, 64), recipes[name])


def test_strides_do_not_matter():
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_inputs(40, 70, 80, 64)]
    check(*inputs, PLAIN)
    padded = [torch.nn.functional.pad(x, (0, 3))[..., :-3] for x in inputs]
    check(*padded, PLAIN)
    check(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs), PLAIN)


def test_keys_that_do_not_count_are_zero_and_influence_nothing():
    query, key, value = random_inputs(40, 100, 64, 64)
    key_mask = torch.rand(1, 1, 100, 1, generator=torch.Generator().manual_seed(1)) > 0.3
    key, value = torch.where(key_mask, key, 1e30), torch.where(key_mask, value, torch.nan)
    check(query, key, value, PLAIN, key_mask)
    check(query, key, value, PLAIN, torch.zeros_like(key_mask))


def test_padding_tokens_decide_nothing_as_queries_either():
    query, key, value = random_inputs(100, 100, 64, 64)
    key_mask = torch.rand(1, 1, 100, 1, generator=torch.Generator().manual_seed(1)) > 0.3
    check(torch.where(key_mask, query, 100 * query[..., :1]), key, value, PLAIN, key_mask)


def test_zeros_stay_zeros():
    query, key, value = random_inputs(120, 100, 64, 64)
    query[:, :, 60:] = 0
    check(query, torch.zeros_like(key), torch.zeros_like(value))
    check(torch.zeros_like(query), key, value, replace(SAGE3, smooth_q=False))


def test_tiny_and_huge_values_use_the_tensor_scale():
    query, key, value = random_inputs(40, 60, 64, 64, torch.float32)
    check(query * 2.0**-120, key * 2.0**-140, value * 2.0**100)


@pytest.mark.parametrize(
    "bad", [torch.nan, *(pytest.param(x, marks=pytest.mark.audit) for x in (torch.inf, -torch.inf))]
)
def test_a_non_finite_value_spoils_the_same_elements_as_in_the_reference(bad):
    query, key, value = random_inputs(40, 150, 64, 80)
    query[0, 0, 3, 5], key[0, 0, 7, 2], value[0, 0, 140, 8] = bad, bad, bad
    check(query, key, value)
    check(query, key, value, get_recipe("sage3_paper"))


def test_codes_and_scales_match_the_format():
    """The bits themselves, not only the values."""
    query, key, value = random_inputs(128, 128, 64, 64)
    operands = quantize(query, key, value)
    factor = transforms.equalize(query.float(), key.float(), smooth_q=True) if SAGE3.equalize else torch.ones(1)
    x = transforms.rotate(transforms.smooth_blocks(query.float(), 128)[0] * factor)
    expected = nvfp4.quantize(x, SAGE3.scale_steps)
    assert torch.equal(operands.query, expected.codes)
    assert torch.equal(operands.query_scale, expected.scale.view(torch.uint8))
    x = transforms.smooth_value(value.float())[0].transpose(-1, -2).contiguous()
    expected = nvfp4.quantize(x, SAGE3.scale_steps)
    assert torch.equal(operands.value, expected.codes)
    assert torch.equal(operands.value_scale, expected.scale.view(torch.uint8))


def test_mean_score_is_the_product_with_the_mean_of_k():
    query, key, value = random_inputs(70, 140, 64, 64)
    operands = quantize(query, key, value, PLAIN, return_lse=True)
    expected = query.double() @ transforms.mean_of_tokens(key.float()).double().transpose(-1, -2)
    # 64 products summed in float32.
    bound = 64 * 2.0**-24 * (query.double().abs() @ transforms.mean_of_tokens(key.float()).double().abs().mT)
    assert ((operands.mean_score[:, :, :70, None] - expected).abs() <= bound).all()


def test_ragged_sequences_are_quantised_as_if_alone():
    query, key, value = random_inputs(200, 200, 64, 64)
    cu_seqlens = torch.tensor([0, 70, 70, 200], dtype=torch.int32)
    call = new_call(query, key, value, PLAIN, lengths=Lengths(cu_seqlens, cu_seqlens, 130, 130))
    packed = quantize_call(call)
    for start, length, first in call.token_axes[0].ranges.tolist():
        if length == 0:
            continue
        tokens, rows = slice(start, start + length), slice(first, first + -(-length // 128) * 128)
        alone = quantize(query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], PLAIN)
        for name in ("query", "query_scale", "key", "key_scale"):
            assert torch.equal(getattr(packed, name)[:, :, rows], getattr(alone, name)), name
        blocks = slice(rows.start // 128, rows.stop // 128)
        for name in ("query_tensor_scale", "query_mean", "key_tensor_scale"):
            assert torch.equal(getattr(packed, name)[:, :, blocks], getattr(alone, name)), name
        assert torch.equal(packed.value[..., rows.start // 2 : rows.stop // 2], alone.value)
        assert torch.equal(packed.value_scale[..., rows.start // 16 : rows.stop // 16], alone.value_scale)
