"""Symmetric INT8 with one float32 scale per group of consecutive tokens (arXiv 2410.02367, section 4.3)."""

from __future__ import annotations

import torch

INT8_MAX = 127.0


def quantize(x: torch.Tensor, tokens_per_scale: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups of `tokens_per_scale` consecutive tokens, all their channels sharing one scale.

    Args:
        x: float32 (..., tokens, channels); `tokens` a multiple of `tokens_per_scale`.
        tokens_per_scale: 1 gives one scale per token.

    Returns:
        (codes, scale): int8 (..., tokens, channels) in [-127, 127], ties to even; float32 (..., tokens, 1), amax/127,
        0 where a group is all zero, NaN where it holds a non-finite value.
    """
    groups = x.unflatten(-2, (-1, tokens_per_scale))
    scale = groups.abs().amax((-2, -1), keepdim=True) * (1 / INT8_MAX)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    codes = torch.where(scale > 0, groups / scale, 0.0).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return codes.flatten(-3, -2), scale.expand(*groups.shape[:-1], 1).flatten(-3, -2)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values of `quantize`'s result: codes · scale, float32."""
    return codes.float() * scale
