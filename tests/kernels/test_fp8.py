"""FP8 e4m3 against the format's definition."""

import math
from bisect import bisect
from functools import partial

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


def step(x: torch.Tensor) -> torch.Tensor:
    """Distance between e4m3's numbers around x."""
    exponent = torch.frexp(x.abs().clamp_min(2.0**-6)).exponent - 4
    return torch.ldexp(torch.ones_like(x), exponent)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Channels of which the largest magnitude is 448."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * (448 / x.abs().amax(-2, keepdim=True))


def test_rounding_that_keeps_sums_is_as_it_is_defined():
    """Redone number by number, in exact arithmetic."""
    x = normal(300, 12)
    x[:, 3:6] *= torch.logspace(-6, 0, 300)[:, None]
    x[:, 6:9] = x[:, 6:9].round()
    x[:, 9:11] = torch.tensor([272.0, -272.0])
    values = sorted(value for value in ALL.tolist() if value == value)

    def nearest(exact: float) -> float:
        at = min(bisect(values, exact), len(values) - 1)
        low, high = values[max(at - 1, 0)], values[at]
        if exact - low == high - exact:
            return low if ALL.tolist().index(abs(low)) % 2 == 0 else high
        return low if exact - low < high - exact else high

    expected = torch.empty_like(x)
    for channel in range(x.shape[1]):
        for block in range(0, x.shape[0], 128):
            column = x[block : block + 128, channel]
            halves = column.half().tolist()
            errors = [round((half - nearest(exact)) * 32) for half, exact in zip(halves, column.tolist(), strict=True)]
            total = sum(errors) / 32
            for token, exact in enumerate(column.tolist()):
                move = math.copysign(min(abs(total) / 128, abs(exact) / 256), total)
                moved = torch.tensor(exact, dtype=torch.float64) + move
                expected[block + token, channel] = nearest(moved.float().item())
    assert torch.equal(fp8.round_keeping_sums(x).float(), expected)


@pytest.mark.parametrize("tokens", [1, 2, 100, 128, 300])
def test_an_element_is_off_by_half_a_step_and_by_what_it_is_moved(tokens):
    x = normal(50, tokens, 16) * torch.logspace(-6, 0, 16)
    error = (fp8.round_keeping_sums(x).float() - x).abs()
    moved = 1 / 256 if tokens == 1 else 1 / 16  # a token alone: by 1/128 of its own error
    # Two roundings of float32 numbers up to 448 are part of it.
    assert (error <= step(x) * (1 / 2 + moved) + 2.0**-14).all()
    if tokens >= 100:
        assert (error > step(x) / 2).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_128_tokens_are_off_by_less_than_with_rounding_to_the_nearest(sign):
    """The numbers have one step and are spread evenly. To the nearest, errors have the variance step²/12 each. Moved by
    their mean m, which has the deviation step/√(12·128), a share |m|/step of the numbers goes to the next one: their
    count has that binomial variance, 0.0204·step² for each number, a quarter of the former.
    """
    x = sign * (256 + 192 * torch.rand(256, 128, 16, generator=torch.Generator().manual_seed(2)))
    nearest, kept = (
        (codes.float() - x).double().sum(-2).square().mean()
        for codes in (fp8.round_to_e4m3(x), fp8.round_keeping_sums(x))
    )
    assert abs(nearest / (128 * 32**2 / 12) - 1) < 0.1
    assert kept < nearest / 3


def test_equal_tokens_go_to_the_nearest_unless_they_are_almost_in_the_middle():
    """All have one error. Moved by all of it, they would go the wrong way from a quarter of a step on."""
    x = normal(4096, 1).mT.expand(128, -1)
    error = (x - fp8.round_to_e4m3(x).float()).abs()
    near = error < step(x) * 7 / 16 - 2.0**-14
    assert 0.8 < near.float().mean() < 1
    assert torch.equal(fp8.round_keeping_sums(x).float()[near], fp8.round_to_e4m3(x).float()[near])


def test_blocks_and_channels_know_nothing_of_each_other_and_tokens_have_no_order():
    x = normal(2, 300, 8)
    codes = fp8.round_keeping_sums(x).float()
    for block in range(0, 300, 128):
        assert torch.equal(
            fp8.round_keeping_sums(x[:, block : block + 128, 2:3]).float(), codes[:, block : block + 128, 2:3]
        )
    order = torch.cat([start + torch.randperm(length) for start, length in ((0, 128), (128, 128), (256, 44))])
    assert torch.equal(fp8.round_keeping_sums(x[:, order]).float(), codes[:, order])


def test_tokens_that_are_zero_stay_so_and_change_no_other():
    x = normal(2, 200, 8)
    codes = fp8.round_keeping_sums(x).float()
    padded = fp8.round_keeping_sums(torch.nn.functional.pad(x, (0, 0, 0, 56))).float()
    assert torch.equal(padded[:, :200], codes)
    assert not padded[:, 200:].any()


QUANTIZERS = [partial(fp8.quantize, dim=-2), fp8.quantize_value]


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_a_channel_is_scaled_by_its_own_amax_and_a_zero_channel_stays_zero(quantize):
    x = torch.randn(2, 100, 8, generator=torch.Generator().manual_seed(0))
    x[..., 3] = 0.0
    x[..., 5] *= 1e-6
    codes, scale = quantize(x)
    result = fp8.dequantize(codes, scale)
    assert torch.equal(result[..., 3], x[..., 3])
    # Half a unit in the last place of 3 mantissa bits, and half a subnormal step of the channel's scale.
    moved = 0 if quantize is QUANTIZERS[0] else 2**-8
    assert ((result - x).abs() <= x.abs() * (2**-4 + moved) + scale * 2**-10).all()


@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_element_poisons_its_channel_and_nothing_else(quantize, bad):
    x = torch.randn(1, 150, 4, generator=torch.Generator().manual_seed(1))
    clean = fp8.dequantize(*quantize(x))
    x[0, 7, 2] = bad
    result = fp8.dequantize(*quantize(x))
    assert result[..., 2].isnan().all()
    assert torch.equal(result[..., [0, 1, 3]], clean[..., [0, 1, 3]])
