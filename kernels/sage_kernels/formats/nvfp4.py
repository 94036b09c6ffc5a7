"""NVFP4: e2m1 elements in groups of 16 with one e4m3 scale each, and one float32 scale per tensor slice.

The group scale maps the group's amax to 6, the largest e2m1 value (arXiv 2505.11594, section 3.1). A neighbouring e4m3
scale often fits the other 15 elements better; trying several and keeping the one of least squared error costs time only
in the quantiser (arXiv 2512.02010 tries two, amax to 6 and to 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .fp8 import E4M3_MAX, round_to_e4m3
from .power_of_two import least_power_of_two

GROUP = 16
E2M1_MAX = 6.0
LARGEST_E4M3_CODE = 0x7E
FLOAT32_EXPONENT = 0x7F800000
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class NVFP4Tensor:
    """A tensor in NVFP4, grouped along its last axis.

    Attributes:
        codes: uint8 (..., n/2); two e2m1 codes a byte, the first element in the low nibble; bit 3 of a code is the
            sign.
        scale: float8_e4m3fn (..., n/16); positive.
        tensor_scale: float32 (..., 1, 1); a power of two.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the values, float32 (..., n): e2m1 · e4m3 scale · tensor scale."""
        magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=self.codes.device)
        table = torch.cat((magnitudes, -magnitudes))
        elements = table[torch.stack((self.codes & 0xF, self.codes >> 4), -1).long().flatten(-2)]
        values = elements.unflatten(-1, (-1, GROUP)) * self.scale.float().unsqueeze(-1)
        return values.flatten(-2) * self.tensor_scale


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e2m1 value, ties to the even code, saturating at ±6; float32 in and out. NaN stays NaN."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    # The spacing of values at x: half the power of two below |x|, but no finer than 0.5.
    power = (x.view(torch.int32) & FLOAT32_EXPONENT).view(torch.float32)
    step = power.clamp_(min=1.0).mul_(0.5)
    return x.div_(step).round_().mul_(step)


def power_of_two_scale(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor scale: the least power of two s with |x| ≤ 448·6·s for every finite x of a slice; 1 for zeros.

    Group scales then use e4m3's range without saturating. A slice is the last two dimensions.

    Args:
        x: float32 (..., tokens, channels).

    Returns:
        float32 (..., 1, 1).
    """
    return least_power_of_two(x, E4M3_MAX * E2M1_MAX)


def round_groups(x: torch.Tensor, scale_steps: tuple[int, int] = (0, 0)) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every group; return its elements and scale, unpacked.

    Args:
        x: float32 (..., n), n a multiple of 16, already divided by the tensor scale.
        scale_steps: (lowest, highest): besides e4m3(amax/6), the e4m3 scales from `lowest` codes below it (≤ 0) to
            `highest` codes above it (≥ 0) are tried. The least squared error wins; among equals the one tried first:
            the nearest code, below before above.

    Returns:
        (elements, scale): float32 (..., n/16, 16) of e2m1 values; float32 (..., n/16, 1) of e4m3 values, NaN where the
        group holds a non-finite value. The element is x divided by the *rounded* scale.
    """
    groups = x.unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    scale = round_to_e4m3(amax * (1 / E2M1_MAX))
    elements = _scale_and_round(groups, scale.float())
    if scale_steps == (0, 0):
        return elements, scale.float()
    codes = scale.view(torch.uint8).int()
    scale = scale.float()
    error = _squared_error(elements * scale, groups)
    for step in sorted(range(scale_steps[0], scale_steps[1] + 1), key=lambda step: (abs(step), step)):
        if step == 0:
            continue
        other = (codes + step).clamp(0, LARGEST_E4M3_CODE).to(torch.uint8).view(torch.float8_e4m3fn).float()
        other_elements = _scale_and_round(groups, other)
        other_error = _squared_error(other_elements * other, groups)
        better = other_error < error
        elements = torch.where(better, other_elements, elements)
        scale = torch.where(better, other, scale)
        error = torch.where(better, other_error, error)
    return elements, scale


def _scale_and_round(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # A scale rounds to 0 only where all elements are below 1/4, which rounds to 0 unscaled.
    return round_to_e2m1(groups * (1 / torch.where(scale == 0, 1.0, scale)))


def _squared_error(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each group, summed by adjacent pairs so that kernels choose the same scales."""
    error = (values - groups).square()
    while error.shape[-1] > 1:
        error = error[..., 0::2] + error[..., 1::2]
    return error


def quantize(
    x: torch.Tensor, scale_steps: tuple[int, int] = (0, 0), tensor_scale: torch.Tensor | None = None
) -> NVFP4Tensor:
    """Quantise along the last axis.

    Args:
        x: float32 (..., tokens, n), n a multiple of 16.
        scale_steps: see `round_groups`.
        tensor_scale: float32 broadcastable to (..., 1, 1), powers of two; default `power_of_two_scale(x)`. Ones give
            the published SageAttention3, whose groups saturate above 2688.

    Raises:
        ValueError: n is not a multiple of 16.
    """
    if x.shape[-1] % GROUP:
        raise ValueError(f"NVFP4 groups {GROUP} elements along the last axis; got {x.shape[-1]}: pad it with zeros")
    if tensor_scale is None:
        tensor_scale = power_of_two_scale(x)
    elements, scale = round_groups(x / tensor_scale, scale_steps)
    elements = elements.flatten(-2).contiguous()
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=x.device)
    codes = (
        torch.bucketize(elements.abs().nan_to_num(), magnitudes).to(torch.uint8) | (elements < 0).to(torch.uint8) << 3
    )
    pairs = codes.unflatten(-1, (-1, 2))
    return NVFP4Tensor(pairs[..., 0] | pairs[..., 1] << 4, scale.squeeze(-1).to(torch.float8_e4m3fn), tensor_scale)


def quantize_dequantize(
    x: torch.Tensor, scale_steps: tuple[int, int] = (0, 0), tensor_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `quantize(x, ...).dequantize()` without packing; float32 of x's shape."""
    if tensor_scale is None:
        tensor_scale = power_of_two_scale(x)
    elements, scale = round_groups(x / tensor_scale, scale_steps)
    return (elements * scale).flatten(-2) * tensor_scale
