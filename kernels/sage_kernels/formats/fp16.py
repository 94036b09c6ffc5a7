"""FP16 with one power-of-two scale, so that large bfloat16 values do not overflow and small ones do not vanish."""

from __future__ import annotations

import torch

from .power_of_two import least_power_of_two

FP16_HEADROOM = 2.0**15


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to float16 after dividing by the least power of two that brings |x| within 2¹⁵.

    Args:
        x: float32 (..., tokens, channels).

    Returns:
        (values, scale): float16 of x's shape; float32 (..., 1, 1). A non-finite element stays non-finite and does not
        change the scale of other elements.
    """
    scale = least_power_of_two(x, FP16_HEADROOM)
    return (x / scale).to(torch.float16), scale


def dequantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return values · scale in float32."""
    return values.float() * scale
