"""Power-of-two scales, which multiply and divide without rounding."""

from __future__ import annotations

import math

import torch


def least_power_of_two(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the least power of two s with |x| ≤ limit·s for every finite x of a (tokens, channels) slice; 1 for zeros.

    Args:
        x: float32 (..., tokens, channels).
        limit: the largest magnitude that x / s may have.

    Returns:
        float32 (..., 1, 1). Its exponent is kept within ±126, so that s and 1/s are both normal numbers.
    """
    amax = torch.where(x.isfinite(), x.abs(), 0.0).amax((-2, -1), keepdim=True)
    mantissa, exponent = torch.frexp(amax)
    limit_mantissa, limit_exponent = math.frexp(limit)
    exponent = (exponent - limit_exponent + (mantissa > limit_mantissa)).clamp(-126, 126)
    # PyTorch 2.8 returns powers of integers in the default dtype.
    return torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent.float()), 1.0)
