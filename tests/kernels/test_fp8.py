"""FP8 e4m3 against the format's definition."""

import pytest
import torch

from sage_kernels.formats import fp8


def e4m3_value(code: int) -> float:
    """By definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities, S.1111.111 is NaN."""
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


ALL = torch.tensor([e4m3_value(code) for code in range(256)])


def test_all_256_codes_have_the_value_of_the_definition_and_round_to_themselves():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(codes.float().nan_to_num(777.0), ALL.nan_to_num(777.0))
    assert torch.equal(fp8.round_to_e4m3(ALL).float().nan_to_num(777.0), ALL.nan_to_num(777.0))


def test_midpoints_go_to_the_even_mantissa_and_their_neighbours_to_the_nearer_value():
    """Covers every pair of neighbouring values, subnormals included."""
    values = ALL[:127]
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    even = torch.where(torch.arange(126) % 2 == 0, low, high)
    for sign in (1.0, -1.0):
        assert torch.equal(fp8.round_to_e4m3(sign * middle).float(), sign * even)
        below, above = torch.nextafter(middle, low), torch.nextafter(middle, high)
        assert torch.equal(fp8.round_to_e4m3(sign * below).float(), sign * low)
        assert torch.equal(fp8.round_to_e4m3(sign * above).float(), sign * high)


def test_large_values_saturate_and_nan_stays_nan():
    x = torch.tensor([448.0, 449.0, 464.0, 1e30, float("inf"), -float("inf"), float("nan")])
    assert fp8.round_to_e4m3(x).float()[:6].tolist() == [448.0] * 5 + [-448.0]
    assert fp8.round_to_e4m3(x).float()[6].isnan()


def test_a_channel_is_scaled_by_its_own_amax_and_a_zero_channel_stays_zero():
    x = torch.randn(2, 100, 8, generator=torch.Generator().manual_seed(0))
    x[..., 3] = 0.0
    x[..., 5] *= 1e-6
    codes, scale = fp8.quantize(x, dim=-2)
    result = fp8.dequantize(codes, scale)
    assert torch.equal(result[..., 3], x[..., 3])
    # Half a unit in the last place of 3 mantissa bits, and half a subnormal step of the channel's scale.
    assert ((result - x).abs() <= x.abs() * 2**-4 + scale * 2**-10).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_element_poisons_its_channel_and_nothing_else(bad):
    x = torch.randn(1, 50, 4, generator=torch.Generator().manual_seed(1))
    clean = fp8.dequantize(*fp8.quantize(x, dim=-2))
    x[0, 7, 2] = bad
    result = fp8.dequantize(*fp8.quantize(x, dim=-2))
    assert result[..., 2].isnan().all()
    assert torch.equal(result[..., [0, 1, 3]], clean[..., [0, 1, 3]])
