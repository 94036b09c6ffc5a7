"""Reciprocal of a scale. Multiplying by it costs a kernel one division per group instead of one per element."""

from __future__ import annotations

import torch

SMALLEST_NORMAL = 2.0**-126


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale in float32; 0 for subnormal scales, so that their elements become 0. NaN stays NaN."""
    return torch.where(scale < SMALLEST_NORMAL, 0.0, 1 / scale)
