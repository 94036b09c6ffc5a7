"""Stable Audio: self-attention with RoPE on the first channels of each head, cross-attention with fewer KV heads."""

from __future__ import annotations

import torch

from sage_hf.diffusers.families.layout import (
    Attend,
    AttentionModule,
    merge_heads,
    normalize_query_key,
    project_out,
    sdpa_mask,
)
from sage_hf.diffusers.families.registry import computes


@computes("StableAudioAttnProcessor2_0")
def stable_audio_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute what `StableAudioAttnProcessor2_0` does in `StableAudioDiTModel`.

    Args:
        attention_mask: for `Attention.prepare_attention_mask`.
        rotary_emb: (cos, sin), each (tokens, channels to rotate).
    """
    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    mask = sdpa_mask(attn, attention_mask, context.shape[1], context.shape[0])
    query = attn.to_q(hidden_states)
    head_dim = query.shape[-1] // attn.heads
    query, key, value = (
        x.unflatten(2, (-1, head_dim)).transpose(1, 2) for x in (query, attn.to_k(context), attn.to_v(context))
    )
    groups = attn.heads // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    query, key = normalize_query_key(attn.norm_q, attn.norm_k, query, key)
    if rotary_emb is not None:
        query = _rotate(query, rotary_emb)
        key = key if attn.is_cross_attention else _rotate(key, rotary_emb)

    states = merge_heads(attend(query, key, value, attn_mask=mask)).to(query.dtype)
    return project_out(attn, states)


def _rotate(x: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate in float32 as many of the first channels as the embedding has."""
    from diffusers.models.embeddings import apply_rotary_emb

    rotated, unrotated = x.float().tensor_split([rotary_emb[0].shape[-1]], dim=-1)
    rotated = apply_rotary_emb(rotated, rotary_emb, use_real=True, use_real_unbind_dim=-2)
    return torch.cat((rotated, unrotated), dim=-1).to(x.dtype)
