"""FP8 e4m3, saturating at 448: quantisation with a scale per slice (arXiv 2411.10958), rounding that preserves sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .reciprocal import reciprocal

E4M3_MAX = 448.0
BLOCK = 128  # consecutive tokens whose sum is preserved
ERROR_STEP = 1 / 32
LARGEST_MOVE = 1 / 256  # largest move of an element to preserve the sum, as a share of the element


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e4m3 value, ties to even, saturating at ±448.

    Args:
        x: float32, any shape. NaN stays NaN; ±Inf saturates to ±448.

    Returns:
        float8_e4m3fn tensor of the same shape.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_keeping_sums(x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 so that sums over tokens change less than if each element were rounded to nearest.

    Attention averages V over tokens. If the weights hardly differ from token to token, the output's error is the mean
    of the rounding errors. So elements are moved by that mean, in blocks of 128 consecutive tokens of a channel, and
    rounded again. No element moves by more than 1/256 of itself: a few large elements must not move many small
    elements, and equal elements, which have equal errors, must not all jump to the next number:

        e = float16(x) - nearest e4m3(x), to the nearest multiple of 1/32, ties to even
        s = Σe of the block
        result = nearest e4m3(x + sign(s)·min(|s| / 128, |x| / 256))

    The error of an element is then at most 1/2 + 1/16 of the distance between neighbours in e4m3, and 0 stays 0. Each e
    is at most 16, so a float32 sum of 128 errors is exact in any order.

    Args:
        x: float32 (..., tokens, channels), |x| ≤ 448, or NaN in a whole channel, which stays NaN.

    Returns:
        float8_e4m3fn tensor of x's shape.
    """
    tokens = x.shape[-2]
    error = ((x.half().float() - round_to_e4m3(x).float()) / ERROR_STEP).round() * ERROR_STEP
    total = F.pad(error, (0, 0, 0, -tokens % BLOCK)).unflatten(-2, (-1, BLOCK)).sum(-2)
    total = total.repeat_interleave(BLOCK, -2)[..., :tokens, :]
    move = torch.minimum(total.abs() / BLOCK, x.abs() * LARGEST_MOVE)
    return round_to_e4m3(x + torch.where(total < 0, -move, move))


def quantize(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one float32 scale per slice along `dim`, rounding to nearest.

    Args:
        x: float32, any shape.
        dim: the axis over which a scale is shared.

    Returns:
        (codes, scale): float8_e4m3fn of x's shape; float32 with size 1 at `dim`, amax/448, 0 if a slice is all zero,
        NaN if it holds a non-finite value.
    """
    scale = _scale(x, dim)
    return round_to_e4m3(x * reciprocal(scale)), scale


def quantize_value(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise V with one float32 scale per channel, by `round_keeping_sums`.

    Args:
        x: float32 (..., tokens, channels), 0 for tokens that do not count.

    Returns:
        (codes, scale) as from `quantize` along the tokens: all codes of a channel are 0 if its scale is 0, and NaN if
        its scale is NaN.
    """
    scale = _scale(x, -2)
    return round_keeping_sums(x * reciprocal(scale)), scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes · scale in float32."""
    return codes.float() * scale


def _scale(x: torch.Tensor, dim: int) -> torch.Tensor:
    scale = x.abs().amax(dim, keepdim=True) * (1 / E4M3_MAX)
    return torch.where(scale.isfinite(), scale, torch.nan)
