"""The quantisers write the reference's operands, bit for bit but where MMA instructions rotate."""

import random

import pytest
import torch

from sage_kernels.formats import nvfp4
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.calls import new_call
from tests.helpers.codes import codes_agree, scales_agree
from tests.helpers.judge import LOW_BIT
from tests.helpers.layouts import LAYOUTS, lay_out
from tests.helpers.pairwise import some
from tests.helpers.triton_calls import quantize

CASES = {"int8": some(range(40), 18), "nvfp4": some(range(8), 8)}  # most are to be compiled, NVFP4's for seconds
# Of each 16 tokens of V in 8 bit, and of each 32 tokens of K in NVFP4, the place in memory of token 0, 1, 2 …
V_PLACES = torch.arange(16).view(4, 2, 2).transpose(0, 1).flatten()
K_PLACES = torch.arange(32).view(4, 4, 2).transpose(0, 1).flatten()


def in_order(x, places, dim):
    """Tokens along `dim` in natural order."""
    x = x.unflatten(dim, (-1, len(places)))
    return x.index_select(dim, places.to(x.device)).flatten(dim - 1, dim)


def int8_values(operands, recipe):
    """Kernel operands by the names and in the shapes of `reference.ReferenceOperands`, padding included."""
    value = operands.value.float()
    return {
        "query": operands.query.float(),
        "query_scale": operands.query_scale.unsqueeze(-1),
        "key": operands.key.float(),
        "key_scale": operands.key_scale.float().repeat_interleave(2, -1).repeat(1, 1, 1, 8).flatten(2).unsqueeze(-1),
        "value": value if recipe.pv == "fp16" else in_order(value, V_PLACES, -1).mT,
        "value_scale": operands.value_scale.unsqueeze(-2),
        "value_mean": operands.value_mean.unsqueeze(-2),
    }


def nvfp4_values(operands, recipe):
    def dequantize(codes, scale, tensor_scale):
        return nvfp4.NVFP4Tensor(codes, scale.view(torch.float8_e4m3fn), tensor_scale).dequantize()

    def tokens(codes, scale, tensor_scale):
        blocks = (x.unflatten(2, (-1, reference.BLOCK_M)) for x in (codes, scale))
        return dequantize(*blocks, tensor_scale[..., None, None]).flatten(2, 3)

    key = tokens(operands.key, operands.key_scale, operands.key_tensor_scale)
    values = {
        "query": tokens(operands.query, operands.query_scale, operands.query_tensor_scale),
        "key": in_order(key, K_PLACES, -2),
        "value": dequantize(operands.value, operands.value_scale, operands.value.new_ones(1, 1, 1, 1).float()).mT,
        "value_scale": operands.value_tensor_scale[..., None, None],
        "value_mean": operands.value_mean.unsqueeze(-2),
        "key_mean": operands.statistics.key_mean.unsqueeze(-2),
    }
    return values if operands.query_mean is None else values | {"query_mean": operands.query_mean}


def draw(case, device):
    """Q, K, V and which keys count, with a channel of zeros, a loud one, and now and then a NaN."""
    choose = random.Random(case)
    generator = torch.Generator(device).manual_seed(case)
    batch, kv_heads, group = choose.choice(((1, 1, 1), (2, 2, 1), (1, 2, 3), (3, 1, 2)))
    q_len, kv_len = choose.choice((1, 63, 64, 127, 128, 129, 300)), choose.choice((1, 15, 64, 129, 500))
    head_dim, v_head_dim = choose.choice(((16, 16), (40, 24), (64, 64), (80, 128), (128, 96), (256, 16)))
    dtype = choose.choice((torch.float16, torch.bfloat16, torch.float32))
    magnitude = choose.choice((1.0, 1.0, 1e-6, 1e4))
    inputs = []
    for heads, tokens, channels in (
        (kv_heads * group, q_len, head_dim),
        (kv_heads, kv_len, head_dim),
        (kv_heads, kv_len, v_head_dim),
    ):
        x = torch.randn(batch, heads, tokens, channels, device=device, generator=generator)
        x = (x + torch.randn(channels, device=device, generator=generator)) * magnitude
        x[..., 3], x[..., 5] = 0.0, x[..., 5] * 6
        if choose.random() < 0.3:
            x[-1, 0, tokens // 2, 7] = torch.nan
        inputs.append(lay_out(x.to(dtype), choose.choice(LAYOUTS)))
    key_mask = None
    if choose.random() < 0.5:
        key_mask = torch.rand(choose.choice((1, batch)), kv_len, device=device, generator=generator) < 0.7
    return inputs, key_mask


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("recipe", "case"),
    [pytest.param(name, *case.values, marks=case.marks) for name in LOW_BIT for case in CASES[RECIPES[name].qk]],
)
def test_operands_are_the_references_and_zero_behind_them(recipe, case, device):
    (query, key, value), key_mask = draw(case, device)
    recipe = RECIPES[recipe]
    values = int8_values if recipe.qk == "int8" else nvfp4_values
    operands = quantize(new_call(query, key, value, recipe), key_mask)
    contiguous = (x.contiguous() for x in (query, key, value))
    expected = reference.quantize_operands(
        *contiguous, recipe, None if key_mask is None else key_mask[:, None, :, None]
    )
    for name, actual in values(operands, recipe).items():
        wanted = getattr(expected, name)
        if wanted is None:
            wanted = actual[..., :0]
        elif wanted.shape[-1] == 1:
            wanted = wanted.expand(*actual.shape[:2], -1, actual.shape[-1])
        inside = actual[:, :, : wanted.shape[2], : wanted.shape[3]]
        agree = torch.equal
        if recipe.qk == "int8" and recipe.rotate and query.dtype != torch.float32:  # by MMA instructions
            agreements = {
                "query": codes_agree,
                "key": codes_agree,
                "query_scale": scales_agree,
                "key_scale": scales_agree,
            }
            agree = agreements.get(name, agree)
        assert agree(inside.nan_to_num(777.0), wanted.nan_to_num(777.0)), name
        assert not actual[:, :, wanted.shape[2] :].any() and not actual[..., wanted.shape[3] :].any(), name
