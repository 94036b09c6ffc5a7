"""Causal attention whose operands are rounded to FP8 (e4m3) in training, registered with transformers as NAME.

Q and K have a scale for each token, V has a scale for each channel, and P = exp(S - max) a constant scale; the
denominator is the sum before rounding. The gradient passes each rounding unchanged (the straight-through estimator,
arXiv 1308.3432).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "fp8"
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Round x to e4m3 with a scale; its gradient is x's."""
    low = (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return x + (low - x).detach()


def scale_of(x: Tensor, dim: int) -> Tensor:
    """Return the scale that maps the largest element along a dimension to e4m3's largest number."""
    return (x.detach().abs().amax(dim, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return causal attention, float32 (batch, q_heads, tokens, head_dim), of as many keys as queries.

    Args:
        query: (batch, q_heads, tokens, head_dim).
        key, value: (batch, kv_heads, tokens, head_dim); a key head serves q_heads / kv_heads query heads.
        scale: factor of the scores.
    """
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    query, key, value = (x.float() for x in (query, key, value))
    query, key, value = (rounded(x, scale_of(x, dim)) for x, dim in ((query, -1), (key, -1), (value, -2)))
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.mT * scale).masked_fill(later, -torch.inf)
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return rounded(weights, weights.new_tensor(1 / LARGEST)) @ value / weights.sum(-1, keepdim=True)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers.

    Raises:
        ValueError: the call has a mask, or more keys than queries.
    """
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        raise ValueError("it takes causal attention of whole texts without a mask only")
    output = attention(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
