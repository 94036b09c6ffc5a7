"""Gradients of exact attention in float64, computed a few rows at a time; the ground truth for kernels' gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .sdpa import apply_mask, rows_per_chunk


class Gradients(NamedTuple):
    """Output of attention, and the gradients of query, key and value, each in its tensor's shape."""

    output: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


def exact_gradients(
    output_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
) -> Gradients:
    """Return output and gradients of softmax(scale·Q·Kᵀ + mask)·V in float64; memory is linear in sequence length.

    Args:
        output_gradient: (batch, q_heads, q_len, v_head_dim), any floating dtype.
        query, key, value, mask, is_causal, causal_offset, scale: as in `sage_kernels.exact.sdpa.attention`.

    Returns:
        float64 `Gradients`. A row that may attend to nothing gives output 0 and gradients 0.
    """
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    query, key, value, output_gradient = (x.double() for x in (query, key, value, output_gradient))
    results = Gradients(*(torch.zeros_like(x) for x in (output_gradient, query, key, value)))
    if 0 in (batch, q_heads, q_len, kv_len):
        return results
    if mask is not None:
        mask = mask.expand(batch, q_heads, q_len, kv_len)

    def per_query_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(q_heads // kv_heads, 1)

    def per_key_head(x: Tensor) -> Tensor:
        return x.unflatten(1, (kv_heads, -1)).sum(2)

    repeated_key, repeated_value = per_query_head(key), per_query_head(value)
    rows = rows_per_chunk(batch * q_heads, kv_len)
    for start in range(0, q_len, rows):
        chunk = slice(start, start + rows)
        scores = query[:, :, chunk] @ repeated_key.mT * scale
        scores = apply_mask(scores, mask, is_causal, start, 0, causal_offset)
        p = torch.where(scores.amax(-1, keepdim=True) == -torch.inf, 0.0, scores.softmax(-1))
        gradient = output_gradient[:, :, chunk]
        dp = gradient @ repeated_value.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        results.output[:, :, chunk] = p @ repeated_value
        results.query[:, :, chunk] = ds @ repeated_key
        results.key.add_(per_key_head(ds.mT @ query[:, :, chunk]))
        results.value.add_(per_key_head(p.mT @ gradient))
    return results
