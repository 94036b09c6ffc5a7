"""FP8 e4m3: round to nearest even, saturating at 448; quantising with one scale per channel (arXiv 2411.10958)."""

from __future__ import annotations

import torch

from .reciprocal import reciprocal

E4M3_MAX = 448.0


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e4m3 value, ties to even, saturating at ±448.

    Args:
        x: float32, any shape. NaN stays NaN; ±Inf saturates to ±448.

    Returns:
        float8_e4m3fn tensor of the same shape.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one float32 scale per slice along `dim` (for V: `dim` is the token axis, so one scale per channel).

    Args:
        x: float32, any shape.
        dim: the axis over which a scale is shared.

    Returns:
        (codes, scale): float8_e4m3fn of x's shape; float32 with size 1 at `dim`, amax/448, 0 where a slice is all zero,
        NaN where it holds a non-finite value.
    """
    scale = x.abs().amax(dim, keepdim=True) * (1 / E4M3_MAX)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    return round_to_e4m3(x * reciprocal(scale)), scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values of `quantize`'s result: codes · scale, float32."""
    return codes.float() * scale
