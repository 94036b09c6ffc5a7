"""The reciprocal of a scale: elements are multiplied by it, which costs a kernel one division a group, not one each."""

from __future__ import annotations

import torch

SMALLEST_NORMAL = 2.0**-126


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale in float32; 0 for a scale below the normal numbers, whose elements then all become 0. NaN stays NaN."""
    return torch.where(scale < SMALLEST_NORMAL, 0.0, 1 / scale)
