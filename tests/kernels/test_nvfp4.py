"""NVFP4 against tables and against nearest-value search, written independently of the implementation's arithmetic."""

import pytest
import torch

from sage_kernels.formats import nvfp4
from sage_kernels.spec.recipe import RECIPES

SAGE3_STEPS = RECIPES["sage3"].key_scale_steps

# Every e2m1 code by the format's definition: 1 sign, 2 exponent (bias 1), 1 mantissa bit.
E2M1_TABLE = [
    (-1.0) ** (code >> 3)
    * ((code & 1) * 0.5 if (code >> 1) & 3 == 0 else (1 + (code & 1) / 2) * 2.0 ** (((code >> 1) & 3) - 1))
    for code in range(16)
]


def nearest_e2m1(x: float) -> float:
    """The nearest value; of two equally near the one whose code is even; saturating."""
    return min(range(8), key=lambda code: (abs(abs(x) - E2M1_TABLE[code]), code & 1))


def test_all_16_codes_dequantize_to_the_format_definition():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = codes[0::2] | codes[1::2] << 4
    tensor = nvfp4.NVFP4Tensor(packed, torch.ones(1, dtype=torch.float8_e4m3fn), torch.ones(1, 1))
    assert tensor.dequantize().flatten().tolist() == E2M1_TABLE


def test_rounding_is_nearest_with_ties_to_the_even_code_and_saturates():
    # Steps of 1/64 hit every tie (they are multiples of 1/8 … 1) and both sides of each; 6.0…9.0 saturate.
    grid = torch.arange(-9 * 64, 9 * 64 + 1) / 64
    expected = [E2M1_TABLE[nearest_e2m1(x)] * (1 if x >= 0 else -1) for x in grid.tolist()]
    assert nvfp4.round_to_e2m1(grid).tolist() == expected


def test_the_first_element_is_in_the_low_nibble():
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 6.0, -3.0
    packed = nvfp4.quantize(x, tensor_scale=torch.ones(1, 1)).codes
    assert packed[0, 0].item() == 0x7 | (0xD << 4)


@pytest.mark.parametrize("scale_steps", [(), SAGE3_STEPS])
def test_packing_loses_nothing(scale_steps):
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)) * 10
    packed = nvfp4.quantize(x, scale_steps).dequantize()
    assert torch.equal(packed, nvfp4.quantize_dequantize(x, scale_steps))


def test_elements_are_divided_by_the_rounded_scale():
    x = torch.randn(1, 64 * 16, generator=torch.Generator().manual_seed(1))
    elements, scale = nvfp4.round_groups(x)
    groups = x.view(1, 64, 16)
    assert torch.equal(scale, (groups.abs().amax(-1, keepdim=True) * (1 / 6)).to(torch.float8_e4m3fn).float())
    signs = torch.where(groups < 0, -1.0, 1.0)
    expected = [E2M1_TABLE[nearest_e2m1(y)] for y in (groups / scale).flatten().tolist()]
    assert torch.equal(elements, torch.tensor(expected).view(1, 64, 16) * signs)


def test_zero_groups_stay_zero():
    x = torch.zeros(2, 32)
    x[0, 0] = 3.0
    result = nvfp4.quantize(x).dequantize()
    assert torch.equal(result, x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scale_steps", [(), SAGE3_STEPS])
def test_a_non_finite_element_poisons_its_group_and_nothing_else(bad, scale_steps):
    x = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(2))
    clean = nvfp4.quantize(x, scale_steps).dequantize()
    x[0, 0, 20] = bad
    result = nvfp4.quantize(x, scale_steps).dequantize()
    assert result[0, 0, 16:32].isnan().all()
    untouched = torch.ones(1, 2, 64, dtype=torch.bool)
    untouched[0, 0, 16:32] = False
    assert torch.equal(result[untouched], clean[untouched])


def test_large_and_small_tensors_keep_the_relative_error_of_ordinary_ones():
    """The published format, without a tensor scale, saturates the first and loses the second in subnormal scales."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    ordinary = nvfp4.quantize_dequantize(x)
    for factor in (2.0**-20, 2.0**20):
        assert torch.equal(nvfp4.quantize_dequantize(x * factor), ordinary * factor)
        without = nvfp4.quantize_dequantize(x * factor, tensor_scale=torch.ones(1, 1))
        assert (without - x * factor).abs().sum() > 0.5 * (x * factor).abs().sum()


def test_the_tensor_scale_is_the_least_power_of_two_within_e4m3_range():
    for amax in (2688.0, 2688.0001, 5376.0, 1.0, 3e-30, 1e30):
        scale = nvfp4.power_of_two_scale(torch.tensor([[amax, 0.0]])).item()
        exact = torch.tensor(amax).item()
        assert exact / scale <= 2688.0 < 2 * exact / scale


def test_scale_search_keeps_the_best_of_the_scales_within_float16():
    x = torch.randn(1, 2000 * 16, generator=torch.Generator().manual_seed(4))
    groups = x.view(2000, 16)
    nearest = (groups.abs().amax(-1, keepdim=True) * (1 / 6)).to(torch.float8_e4m3fn)
    assert (nearest.float() >= 2.0**-6).all()
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) * (1 / 6))
    rounded_up = torch.ldexp((mantissa * 32).floor() + 1, exponent - 5)
    errors = []
    for step in (0, *SAGE3_STEPS):
        scale = (nearest.view(torch.uint8) + step).view(torch.float8_e4m3fn).double()
        candidate = nvfp4.round_to_e2m1((groups / scale).float()) * scale
        fits = (torch.tensor(step) >= 0) | (rounded_up * 6 < 7 * scale.squeeze(-1))
        errors.append(torch.where(fits, (candidate - groups).square().sum(-1), torch.inf))
    least = torch.stack(errors).amin(0).sqrt()
    found = nvfp4.quantize_dequantize(x, SAGE3_STEPS, torch.ones(1, 1)).view(2000, 16)
    found = (found.double() - groups).square().sum(-1).sqrt()
    # In units of 8 scales y < 1 is rounded three times (x, its factor, the product) and the ratio once, by 2⁻¹² each, a
    # difference < 1/8 by 2⁻¹⁵ more: for 16 elements 4·(2⁻¹⁰ + 2⁻¹⁵). Rounding 16 squares and their sums moves the root
    # by 9·2⁻¹² of it. Both candidates have these.
    absolute, relative = 8 * 4 * (2.0**-10 + 2.0**-15), 9 * 2.0**-12
    bound = least * (1 + 2 * relative) + 2 * absolute * nearest.double().squeeze(-1)
    assert (found <= bound).all()
    assert (found == least).double().mean() > 0.95


def test_scale_search_tries_no_scale_that_is_subnormal_infinite_or_too_small():
    """Scales 1.125·2⁻⁶, 2⁻⁶ and 448: none is tried below 2⁻⁶ or above 448; nor one below 7/8 of a group's sixth."""
    group = torch.tensor([6.0] + [4.5] * 15)
    tiny, least, largest = group * 2.0**-6 * 1.125, group * 2.0**-6, group * 448
    scales = nvfp4.round_groups(torch.stack((tiny, least, largest)), (-2, -1, 1, 2))[1].flatten()
    assert scales.min() >= 2.0**-6
    assert scales.max() <= 448
    for amax in torch.linspace(6 * 1.0625, 6 * 1.1875, 40):  # around the scale 1.125
        x = torch.zeros(16)
        x[0] = amax
        elements, scale = nvfp4.round_groups(x[None], (-1,))
        assert (amax / scale < 7).all() and elements.max() <= 6


def test_a_length_that_is_no_multiple_of_16_is_refused():
    with pytest.raises(ValueError, match="got 24: pad it"):
        nvfp4.quantize(torch.zeros(2, 24))
