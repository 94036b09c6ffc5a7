"""NVFP4: e2m1 elements in groups of 16 with one e4m3 scale each, and one float32 scale per tensor slice.

The group scale maps the group's amax to 6, the largest e2m1 value (arXiv 2505.11594, section 3.1). A neighbouring e4m3
scale often fits the other 15 elements better; trying several scales and keeping the scale of least squared error costs
time only in the quantiser (arXiv 2512.02010 tries two, amax to 6 and to 4).

The search works in float16, which GPUs compute two at a time (`search_groups`): with the same scales its choice is as
good as a choice by errors in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .fp8 import E4M3_MAX, round_to_e4m3
from .power_of_two import least_power_of_two

GROUP = 16
E2M1_MAX = 6.0
LARGEST_E4M3_CODE = 0x7E
FLOAT32_EXPONENT = 0x7F800000
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEAST_NORMAL_E4M3_CODE = 8


@dataclass(frozen=True)
class NVFP4Tensor:
    """A tensor in NVFP4, grouped along its last axis.

    Attributes:
        codes: uint8 (..., n/2); two e2m1 codes per byte, the first element in the low nibble; bit 3 of a code is the
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
    # The spacing of values at x is half the power of two below |x|, but no finer than 0.5.
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


def round_groups(x: torch.Tensor, scale_steps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every group; return its elements and scale, unpacked.

    Args:
        x: float32 (..., n), n a multiple of 16, already divided by the tensor scale.
        scale_steps: in addition to e4m3(amax/6), e4m3 scales so many codes above it are tried (`search_groups`).

    Returns:
        (elements, scale): float32 (..., n/16, 16) of e2m1 values; float32 (..., n/16, 1) of e4m3 values, NaN if the
        group holds a non-finite value. An element is x divided by the *rounded* scale.
    """
    groups = x.unflatten(-1, (-1, GROUP))
    if scale_steps:
        return search_groups(groups, scale_steps)
    amax = groups.abs().amax(-1, keepdim=True)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    scale = round_to_e4m3(amax * (1 / E2M1_MAX)).float()
    # A scale rounds to 0 only if all elements are below 1/4, and these round to 0 unscaled.
    inverse = 1 / torch.where(scale == 0, 1.0, scale)
    return round_to_e2m1(groups * inverse) + 0.0, scale  # 0 has no sign


def search_groups(groups: torch.Tensor, scale_steps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups with the scale of least squared error: the nearest, or one `scale_steps` codes above it.

    Everything is computed in float16; each operation rounds to nearest even, also to float16's subnormals:

        h_i = float16(x_i)
        v   = max |h_i| · (1/6) in float32              its e4m3 number, ties away from 0, is the nearest scale s
        y_i = h_i · float16(1/s · 1/8)                  element i, times 1/8: at most 0.8
        q_i = y_i · float16(s/c · 2⁻¹¹)                 x_i / c · 2⁻¹⁴, in which e2m1's 0.5 is a subnormal of float16
        q_i = (bits of q_i + 0x100) & 0xFE00            rounded to e2m1, ties away from 0
        d_i = fma(q_i, float16(c/s · 2¹¹), -y_i)        the error of a candidate c, with the ratios of `search_ratios`
        e   = fma(d_i, d_i, e), from 0 on               over i with i & 2 = 0, and over the others; the two are added

    The least e wins; among equals the nearest scale, then the first of the steps. The winner's q_i are the elements. A
    candidate is left out if it is subnormal or exceeds 448, and if max |x_i| / c could be 7, which rounds to 8: judged
    by v rounded up to its leading five bits. If v is below 2⁻⁶, s is the next subnormal above and no other scale is
    tried. If v is 464 or more, the group is treated as if it held a non-finite value.

    Args:
        groups: float32 (..., 16).
        scale_steps: multiples of one code, other than 0.

    Returns:
        as `round_groups`.
    """
    groups = (groups + 0.0).half()  # no -0, except where elements round to it
    amax = groups.abs().amax(-1, keepdim=True).float()
    finite = amax < SEARCH_LIMIT
    sixth = torch.where(finite, amax, 0.0) * (1 / E2M1_MAX)
    bins = ((sixth.view(torch.int32) >> BIN_SHIFT) - FIRST_BIN).clamp(min=0)
    codes = _nearest_codes().to(groups.device)[bins]
    y = groups * (1 / _decode(codes) * 0.125).half()
    ratios = search_ratios(scale_steps).to(groups.device)[bins]
    same = search_ratios((0,)).to(groups.device)[-1]
    best, up, least = codes, same[..., 0].expand(codes.shape), _squared_error(y, *same.unbind(-1))
    for number, step in enumerate(scale_steps):
        ratio = ratios[..., number, :]
        error = _squared_error(y, *ratio.unbind(-1))
        better = error < least  # false where the ratio is NaN
        best, least = torch.where(better, codes + step, best), torch.where(better, error, least)
        up = torch.where(better, ratio[..., 0], up)
    elements = _round_magnitudes(y * up).float() * 2.0**14
    return torch.where(finite, elements, torch.nan), torch.where(finite, _decode(best), torch.nan)


BIN_SHIFT = 19
"""Number of bits of a float32 number after the four bits that follow its leading 1."""
FIRST_BIN = ((127 - 9) << 4) - 1
"""The leading bits of numbers just below 2⁻⁹, e4m3's least number."""
BINS = ((127 + 8) << 4) + 13 - FIRST_BIN
"""Number of leading-bit patterns of v in `search_groups`: one for all v below 2⁻⁹, then up to 464."""
SEARCH_LIMIT = 464 * E2M1_MAX


def _nearest_codes() -> torch.Tensor:
    """Return the codes of the nearest scale by the leading bits of v, int32 (BINS,)."""
    leading = torch.arange(BINS, device="cpu") + FIRST_BIN
    subnormal = ((leading << BIN_SHIFT).int().view(torch.float32) * 512).int() + 1
    normal = (leading + 1 >> 1) - ((127 - 7) << 3)
    return torch.where(leading < (127 - 6) << 4, subnormal, normal.clamp(max=LARGEST_E4M3_CODE)).int()


@lru_cache(maxsize=8)
def search_ratios(scale_steps: tuple[int, ...]) -> torch.Tensor:
    """Return the factors of `search_groups`: float16 (BINS, steps, 2) of s/c · 2⁻¹¹ and c/s · 2¹¹.

    The first index is by the leading bits of v. A quotient is rounded to float32, then to float16. Left-out candidates
    have NaN.
    """
    leading = torch.arange(BINS, device="cpu")[:, None] + FIRST_BIN
    codes, steps = _nearest_codes()[:, None], torch.tensor(scale_steps, dtype=torch.int32, device="cpu")
    candidates = codes + steps
    s, c = _decode(codes), _decode(candidates.clamp(LEAST_NORMAL_E4M3_CODE, LARGEST_E4M3_CODE))
    amax = (leading + 1 << BIN_SHIFT).int().view(torch.float32) * E2M1_MAX
    allowed = (candidates >= LEAST_NORMAL_E4M3_CODE) & (candidates <= LARGEST_E4M3_CODE)
    allowed &= (leading >= (127 - 6) << 4) & ((steps >= 0) | (amax < (E2M1_MAX + 1) * c))
    ratios = torch.stack((s / c * 2.0**-11, c / s * 2.0**11), -1).half()
    return torch.where(allowed[..., None], ratios, torch.nan)


MAX_STEPS = 7
"""Scales other than the nearest that kernels can try."""
STEPS_ROW = BINS
"""Row of `search_table` that holds the steps."""


@lru_cache(maxsize=16)
def search_table(scale_steps: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the table of kernels that search: int32 (BINS + 1, 8), a row for each first index of `search_ratios`.

    The first word of a row has float16(1/s · 1/8) in the lower half and the code of s in the upper half; then, for each
    step, the ratios of `search_ratios` are the lower and upper half of a word. The last row has the steps, from the
    second word on.

    Raises:
        ValueError: there are more than 7 steps.
    """
    if len(scale_steps) > MAX_STEPS:
        raise ValueError(f"{len(scale_steps)} scale_steps are not supported: kernels try up to {MAX_STEPS}")
    table = torch.zeros(BINS + 1, MAX_STEPS + 1, dtype=torch.int32, device="cpu")
    codes = _nearest_codes()
    table[:BINS, 0] = codes << 16 | (1 / _decode(codes) * 0.125).half().view(torch.int16)
    if scale_steps:
        table[:BINS, 1 : 1 + len(scale_steps)] = search_ratios(scale_steps).view(torch.int32).squeeze(-1)
        table[STEPS_ROW, 1 : 1 + len(scale_steps)] = torch.tensor(scale_steps, dtype=torch.int32, device="cpu")
    return table.to(device)


def _decode(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()


def _round_magnitudes(q: torch.Tensor) -> torch.Tensor:
    """Round float16 numbers, times 2¹⁴, to e2m1 as `search_groups` does."""
    return (q.view(torch.int16) + 0x100 & -0x200).view(torch.float16)


def _squared_error(y: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the error e of `search_groups`, float16 (..., 1), given y and the ratios, (..., 1)."""
    # A float32 product of two float16 numbers is exact, and so is this difference, by the ranges in `search_groups`.
    d = (_round_magnitudes(y * up).float() * down.float() - y.float()).half()
    first, second = d.unflatten(-1, (-1, 2, 2)).unbind(-2)
    sums = []
    for part in (first.flatten(-2), second.flatten(-2)):
        error = part[..., :1] * part[..., :1]
        for i in range(1, part.shape[-1]):
            error = _fused(part[..., i : i + 1], error)
        sums.append(error)
    return sums[0] + sums[1]


def _fused(d: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Return d² + error ≥ 0 in float16, rounded once."""
    exact = d.double().square() + error.double()
    # Truncate to float32, with a 1 in the last place if bits were cut: then rounding again rounds the exact sum.
    bits = exact.view(torch.int64)
    cut = bits & 0x1FFFFFFF
    return ((bits - cut) | (cut != 0).long() << 29).view(torch.float64).float().half()


def quantize(
    x: torch.Tensor, scale_steps: tuple[int, ...] = (), tensor_scale: torch.Tensor | None = None
) -> NVFP4Tensor:
    """Quantise along the last axis.

    Args:
        x: float32 (..., tokens, n), n a multiple of 16.
        scale_steps: see `round_groups`.
        tensor_scale: float32 broadcastable to (..., 1, 1), powers of two; default `power_of_two_scale(x)`. Scales of 1
            give the published SageAttention3, whose groups saturate above 2688.

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
    numbers = elements.nan_to_num()
    codes = torch.bucketize(numbers.abs(), magnitudes).to(torch.uint8) | numbers.signbit().to(torch.uint8) << 3
    pairs = codes.unflatten(-1, (-1, 2))
    return NVFP4Tensor(pairs[..., 0] | pairs[..., 1] << 4, scale.squeeze(-1).to(torch.float8_e4m3fn), tensor_scale)


def quantize_dequantize(
    x: torch.Tensor, scale_steps: tuple[int, ...] = (), tensor_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `quantize(x, ...).dequantize()` without packing; float32 of x's shape."""
    if tensor_scale is None:
        tensor_scale = power_of_two_scale(x)
    elements, scale = round_groups(x / tensor_scale, scale_steps)
    return (elements * scale).flatten(-2) * tensor_scale
