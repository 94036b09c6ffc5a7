"""INT8 and FP16 quantisation against their definitions."""

import pytest
import torch

from sage_kernels.formats import fp16, int8


@pytest.mark.parametrize("tokens_per_scale", [1, 16, 64])
def test_codes_are_the_nearest_integers_of_x_over_its_groups_scale(tokens_per_scale):
    x = torch.randn(2, 3, 128, 40, generator=torch.Generator().manual_seed(0)).double()
    codes, scale = int8.quantize(x.float(), tokens_per_scale)
    amax = x.view(2, 3, -1, tokens_per_scale * 40).abs().amax(-1).repeat_interleave(tokens_per_scale, -1)
    assert torch.equal(scale.squeeze(-1), (amax.float() * (1 / 127)))
    assert codes.dtype == torch.int8
    assert codes.abs().amax() == 127
    # Nearest: no other integer is nearer, up to the rounding of the float32 quotient.
    assert ((codes.double() - x / scale.double()).abs() <= 0.5 + 127 * 2**-23).all()


def test_ties_go_to_the_even_integer():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 3.5]])
    assert int8.quantize(x, 1)[0].tolist() == [[127, 0, 2, -2, 4]]


def test_minus_128_is_not_used():
    x = -torch.rand(64, 64, generator=torch.Generator().manual_seed(1))
    assert int8.quantize(x, 1)[0].amin() == -127


@pytest.mark.parametrize("tiny", [0.0, 1e-42])
def test_zero_and_subnormal_groups_do_not_divide_by_zero(tiny):
    x = torch.full((2, 8), tiny)
    x[1] = 1.0
    result = int8.dequantize(*int8.quantize(x, 1))
    assert result.isfinite().all()
    assert (result[0] - x[0]).abs().max() <= 1e-42
    assert torch.equal(result[1], torch.ones(8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_element_poisons_its_group_and_nothing_else(bad):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
    clean = int8.dequantize(*int8.quantize(x, 16))
    x[3, 3] = bad
    result = int8.dequantize(*int8.quantize(x, 16))
    assert result[:16].isnan().all()
    assert torch.equal(result[16:], clean[16:])


def test_fp16_rounds_once_and_never_overflows():
    x = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(3))
    assert torch.equal(fp16.dequantize(*fp16.quantize(x)), x.half().float())  # nothing of x is subnormal in float16
    for factor in (2.0**-60, 2.0**60):
        assert torch.equal(fp16.dequantize(*fp16.quantize(x * factor)), x.half().float() * factor)
    large = x * (3e38 / x.abs().amax())
    values, scale = fp16.quantize(large)
    assert values.isfinite().all()
    result = fp16.dequantize(values, scale)
    assert ((result - large).abs() <= large.abs() * 2**-11 + scale * 2**-25).all()
