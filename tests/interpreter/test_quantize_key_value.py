"""K's and V's operands of one launch in Triton's interpreter: bit for bit those of the separate launches."""

import pytest
import torch

from sage_kernels.recipe import RECIPES
from sage_kernels.triton.int8_forward import quantize_operands
from sage_kernels.triton.quantize_key_value import AHEAD, quantize_key_value
from sage_kernels.triton.sequences import Sequences
from sage_kernels.triton.statistics import token_statistics

SAGE2 = RECIPES["sage2"]


def draw(batch=1, kv_heads=2, tokens=300, head_dim=64, v_head_dim=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(batch, kv_heads, tokens, channels, generator=generator) * 3 + torch.arange(channels) / 16).to(
            dtype
        )
        for channels in (head_dim, v_head_dim)
    ]


def check(key, value, aheads=(AHEAD,)):
    sequences = Sequences.equal(key.shape[2])
    separate = quantize_operands(key[:, :, :1], key, value, SAGE2, Sequences.equal(1), sequences)
    expected = [separate.key, separate.key_scale, separate.value, separate.value_scale]
    expected += fields(token_statistics(key, value, SAGE2, sequences))
    for ahead in aheads:
        operands, statistics = quantize_key_value(key, value, sequences, ahead)
        for x, y in zip([*operands, *fields(statistics)], expected, strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def fields(statistics):
    return [statistics.key_mean, statistics.value_mean, statistics.value_amax, statistics.value_tensor_amax]


@pytest.mark.parametrize("head_dim, v_head_dim", [(64, 64), (128, 128), (80, 120), (128, 40), (32, 256)])
def test_every_head_dim(head_dim, v_head_dim):
    check(*draw(head_dim=head_dim, v_head_dim=v_head_dim))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129])
def test_every_dtype_and_length(dtype, tokens):
    check(*draw(kv_heads=1, tokens=tokens, dtype=dtype))


@pytest.mark.parametrize("batch, kv_heads, tokens", [(2, 2, 200), (1, 5, 60), (1, 1, 500)])
def test_no_order_changes_a_bit(batch, kv_heads, tokens):
    check(*draw(batch, kv_heads, tokens, 32, 32), aheads=(0, 1, 2, 5, 6, 1000))


def test_strides_do_not_matter():
    inputs = draw(batch=2, tokens=140, head_dim=80)
    check(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    check(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs))
    check(*(torch.nn.functional.pad(x, (0, 3), value=torch.nan)[..., :-3] for x in inputs))
    check(*(x[:, :1].expand_as(x) for x in inputs))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite(bad):
    key, value = draw(tokens=150)
    key[0, 0, 7, 2], key[0, 1, 149, 9], value[0, 0, 140, 8], value[0, 1, 0, 5] = bad, bad, bad, bad
    check(key, value)


def test_zeros_and_values_that_hardly_differ_from_their_mean():
    key, value = draw(tokens=140, dtype=torch.float32)
    key[..., 3], value[..., 4], value[..., 5] = 0.0, 0.0, 7.0
    key[0, 1], value[0, 0] = 0.0, 0.0
    check(key, value)
    check(key * 1e-40, value * 1e-40)
