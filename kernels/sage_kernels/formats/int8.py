"""Symmetric INT8 with one scale per group of consecutive tokens (arXiv 2410.02367, section 4.3)."""

from __future__ import annotations

import torch

from .reciprocal import reciprocal

INT8_MAX = 127.0


def quantize(
    x: torch.Tensor, tokens_per_scale: int, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups of `tokens_per_scale` consecutive tokens, all their channels sharing one scale.

    Args:
        x: float32 (..., tokens, channels); `tokens` a multiple of `tokens_per_scale`.
        tokens_per_scale: 1 gives one scale per token.
        scale_dtype: float32, or bfloat16: then scales are rounded up, and codes are made with the rounded scales.

    Returns:
        (codes, scale): int8 (..., tokens, channels) in [-127, 127], ties to even; (..., tokens, 1) in scale_dtype,
        amax/127, 0 if a group is all zero, NaN if it holds a non-finite value.
    """
    groups = x.unflatten(-2, (-1, tokens_per_scale))
    scale = groups.abs().amax((-2, -1), keepdim=True) * (1 / INT8_MAX)
    finite = scale.isfinite()
    if scale_dtype == torch.bfloat16:
        scale = ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    scale = torch.where(finite, scale, torch.nan)
    codes = (groups * reciprocal(scale)).nan_to_num(0.0).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return codes.flatten(-3, -2), scale.expand(*groups.shape[:-1], 1).flatten(-3, -2).to(scale_dtype)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes · scale in float32."""
    return codes.float() * scale
