"""NVFP4: e2m1 elements in groups of 16 with one e4m3 scale each, and one float32 scale per tensor slice.

The group scale maps the group's amax to 6, the largest e2m1 value (arXiv 2505.11594, section 3.1). A neighbouring e4m3
scale often fits the other 15 elements better; trying several and keeping the one of least squared error costs time only
in the quantiser (arXiv 2512.02010 tries two, amax to 6 and to 4).

The search decides by errors in float16, which GPUs compute two at a time (`best_scale`): with the same scales its
choice is as good as by errors in float32.
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
MANTISSAS = 8
"""Mantissas of e4m3, which with a step decide the ratio of two normal scales."""


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


def round_groups(x: torch.Tensor, scale_steps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every group; return its elements and scale, unpacked.

    Args:
        x: float32 (..., n), n a multiple of 16, already divided by the tensor scale.
        scale_steps: besides e4m3(amax/6), the e4m3 scales that lie so many codes above it are tried (`best_scale`).

    Returns:
        (elements, scale): float32 (..., n/16, 16) of e2m1 values; float32 (..., n/16, 1) of e4m3 values, NaN where the
        group holds a non-finite value. The element is x divided by the *rounded* scale.
    """
    groups = x.unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    scale = round_to_e4m3(amax * (1 / E2M1_MAX))
    if scale_steps:
        scale = best_scale(groups, amax, scale, scale_steps)
    scale = scale.float()
    return round_to_e2m1(groups * _reciprocal(scale)), scale


def best_scale(
    groups: torch.Tensor, amax: torch.Tensor, nearest: torch.Tensor, scale_steps: tuple[int, ...]
) -> torch.Tensor:
    """Return the scale of each group with the least squared error, of the nearest and those `scale_steps` codes above.

    Errors are float16 numbers, and each operation rounds to nearest even, to float16's subnormals too. With s the
    nearest scale, c a candidate, and ratios from `search_ratios`:

        y_i = float16(|x_i| · (1/s · 1/8))             element i, times 1/8: at most 0.8
        q_i = y_i · float16(s/c · 2⁻¹¹)                 |x_i| / c · 2⁻¹⁴, in which e2m1's 0.5 is a subnormal of float16
        q_i = (bits of q_i + 0x100) & 0xFE00            rounded to e2m1, ties away from 0
        d_i = fma(q_i, float16(c/s · 2¹¹), -y_i)        the error
        e   = fma(d_i, d_i, e), from 0 on               over even i, and over odd i; the two are added

    The least e wins; among equals the nearest scale, then the first of the steps. A candidate is left out where it or
    the nearest scale is subnormal, where it exceeds 448, and where amax · 1/c ≥ 7, which would round to 8.

    Args:
        groups: float32 (..., 16).
        amax: float32 (..., 1), NaN where the group holds a non-finite value.
        nearest: float8_e4m3fn (..., 1), amax / 6 rounded.
        scale_steps: multiples of one code, other than 0.

    Returns:
        float8_e4m3fn (..., 1).
    """
    codes = nearest.view(torch.uint8).int()
    y = (groups.abs() * (_reciprocal(nearest.float()) * 0.125)).half()
    searched = (codes >= LEAST_NORMAL_E4M3_CODE) & (codes <= LARGEST_E4M3_CODE)
    ratios = search_ratios(scale_steps).to(groups.device)[codes % MANTISSAS]
    best, least = codes, _squared_error(y, *_SAME_SCALE)
    for number, step in enumerate(scale_steps):
        code = codes + step
        allowed = searched & (code >= LEAST_NORMAL_E4M3_CODE) & (code <= LARGEST_E4M3_CODE)
        candidate = code.clamp(0, LARGEST_E4M3_CODE).to(torch.uint8).view(torch.float8_e4m3fn).float()
        allowed &= amax * _reciprocal(candidate) < E2M1_MAX + 1
        error = _squared_error(y, *ratios[..., number, :].unbind(-1))
        better = allowed & (error < least)
        best, least = torch.where(better, code, best), torch.where(better, error, least)
    return best.to(torch.uint8).view(torch.float8_e4m3fn)


_SAME_SCALE = (2.0**-11, 2.0**11)


@lru_cache(maxsize=8)
def search_ratios(scale_steps: tuple[int, ...]) -> torch.Tensor:
    """Return what `best_scale` multiplies by: float16 (8, steps, 2) of s/c · 2⁻¹¹ and c/s · 2¹¹.

    The first index is the lowest three bits of the code of s. A quotient is rounded to float32, then to float16.
    """
    scales = torch.arange(LARGEST_E4M3_CODE + 1, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    nearest = torch.arange(64, 64 + MANTISSAS)[:, None]
    s, c = scales[nearest], scales[nearest + torch.tensor(scale_steps)]
    return torch.stack((s / c * _SAME_SCALE[0], c / s * _SAME_SCALE[1]), -1).half()


MAX_STEPS = 7
"""Scales besides the nearest that kernels can try."""
STEPS_ROW = 128
"""Row of `search_table` that holds the steps."""


@lru_cache(maxsize=16)
def search_table(scale_steps: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return what kernels that search read: int32 (129, 8), a row for each code of the nearest scale s.

    A row has for each step the ratios of `search_ratios` as the lower and upper half of a word, NaN where the scale is
    left out whatever the group; and in its last word the bits of 1/s, float32, 1 where s is 0. Row 128 has the steps.

    Raises:
        ValueError: there are more than 7 steps.
    """
    if len(scale_steps) > MAX_STEPS:
        raise ValueError(f"{len(scale_steps)} scale_steps are not supported: kernels try up to {MAX_STEPS}")
    codes = torch.arange(STEPS_ROW)
    table = torch.zeros(STEPS_ROW + 1, MAX_STEPS + 1, dtype=torch.int32)
    for number, step in enumerate(scale_steps):
        code = codes + step
        allowed = (codes >= LEAST_NORMAL_E4M3_CODE) & (code >= LEAST_NORMAL_E4M3_CODE) & (code <= LARGEST_E4M3_CODE)
        ratios = torch.where(allowed[:, None], search_ratios(scale_steps)[codes % MANTISSAS, number], torch.nan)
        table[:STEPS_ROW, number] = ratios.view(torch.int32).squeeze(-1)
        table[STEPS_ROW, number] = step
    scales = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    table[:STEPS_ROW, MAX_STEPS] = _reciprocal(scales).view(torch.int32)
    return table.to(device)


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    # A scale rounds to 0 only where all elements are below 1/4, which rounds to 0 unscaled.
    return 1 / torch.where(scale == 0, 1.0, scale)


def _squared_error(y: torch.Tensor, up: torch.Tensor | float, down: torch.Tensor | float) -> torch.Tensor:
    """Return the error e of `best_scale`, float16 (..., 1), given y and the ratios, (..., 1) or numbers."""
    up, down = (torch.as_tensor(ratio, dtype=torch.float16, device=y.device) for ratio in (up, down))
    q = ((y * up).view(torch.int16) + 0x100 & -0x200).view(torch.float16)
    # A float32 product of two float16 numbers is exact, and so is this difference: see the ranges in `best_scale`.
    d = (q.float() * down.float() - y.float()).half()
    error = d[..., 0:2] * d[..., 0:2]
    for pair in range(2, GROUP, 2):
        error = _fused(d[..., pair : pair + 2], error)
    return error[..., 0:1] + error[..., 1:2]


def _fused(d: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Return d² + error ≥ 0 in float16, rounded once."""
    exact = d.double().square() + error.double()
    # To float32 by cutting off, with a one in the last place for what is cut: then rounding again rounds the exact sum.
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
    x: torch.Tensor, scale_steps: tuple[int, ...] = (), tensor_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `quantize(x, ...).dequantize()` without packing; float32 of x's shape."""
    if tensor_scale is None:
        tensor_scale = power_of_two_scale(x)
    elements, scale = round_groups(x / tensor_scale, scale_steps)
    return (elements * scale).flatten(-2) * tensor_scale
