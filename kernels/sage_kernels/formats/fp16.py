"""FP16 values with one power-of-two scale, so that bfloat16 and float32 inputs beyond 65504 do not overflow."""

from __future__ import annotations

import torch

from .power_of_two import least_power_of_two

FP16_HEADROOM = 2.0**15


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to float16 after dividing by a power of two that is 1 unless |x| exceeds 2¹⁵.

    Args:
        x: float32 (..., tokens, channels).

    Returns:
        (values, scale): float16 of x's shape; float32 (..., 1, 1). A non-finite element stays non-finite and does not
        change the scale of the others.
    """
    scale = least_power_of_two(x, FP16_HEADROOM).clamp_min(1.0)
    return (x / scale).to(torch.float16), scale


def dequantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values of `quantize`'s result: values · scale, float32."""
    return values.float() * scale
