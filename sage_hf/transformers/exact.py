"""Exact attention with features that PyTorch's SDPA lacks: capped logits (Gemma 2) and attention sinks (GPT-OSS)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sage_kernels.exact.sdpa import apply_mask, nothing_attended, rows_per_chunk


def exact_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Compute softmax(softcap * tanh(scale * Q·Kᵀ / softcap) + mask) · V, with the sink in the softmax's denominator.

    The result is differentiable with respect to every tensor. The softmax is computed in float32 (float64 for float64
    inputs), for some query rows at a time, so memory is linear in sequence length.

    Args:
        query: (batch, q_heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim or v_head_dim); q_heads is a multiple of kv_heads.
        attn_mask: bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len).
        is_causal: row i attends only to keys 0…i, among those that attn_mask allows.
        scale: factor of Q·Kᵀ; default head_dim ** -0.5.
        softcap: bound on the magnitude of the logits, before the mask.
        sinks: (q_heads,) logits of one additional key per head, whose value is zero.
        dropout_p: dropout probability of the attention weights.

    Returns:
        (batch, q_heads, q_len, v_head_dim), in query's dtype. Rows with no allowed key are 0.
    """
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    if 0 in (batch, q_heads, q_len, kv_len):
        return nothing_attended(query, key, value)
    scale = head_dim**-0.5 if scale is None else scale
    dtype = torch.promote_types(query.dtype, torch.float32)
    mask = None if attn_mask is None else attn_mask.expand(batch, q_heads, q_len, kv_len)
    sink = None if sinks is None else sinks.to(dtype).reshape(1, q_heads, 1, 1)

    def attend(start: int, stop: int) -> torch.Tensor:
        grouped = query[:, :, start:stop].reshape(batch, kv_heads, -1, head_dim)
        logits = (grouped @ key.transpose(2, 3)).view(batch, q_heads, stop - start, kv_len).to(dtype) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = apply_mask(logits, mask, is_causal, start, 0)
        highest = logits.detach().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
        if sink is not None:
            highest = torch.maximum(highest, sink.detach())
        weights = torch.exp(logits - highest)
        total = weights.sum(dim=-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - highest)
        weights = (weights / total.clamp(min=torch.finfo(dtype).tiny)).to(value.dtype)
        weights = F.dropout(weights, p=dropout_p)
        output = weights.view(batch, kv_heads, -1, kv_len) @ value
        return output.view(batch, q_heads, stop - start, value.shape[-1])

    rows = rows_per_chunk(batch * q_heads, kv_len)
    chunks = [(start, min(start + rows, q_len)) for start in range(0, q_len, rows)]
    if len(chunks) > 1 and torch.is_grad_enabled():
        return torch.cat([checkpoint(attend, *chunk, use_reentrant=False) for chunk in chunks], dim=2)
    return torch.cat([attend(*chunk) for chunk in chunks], dim=2)
