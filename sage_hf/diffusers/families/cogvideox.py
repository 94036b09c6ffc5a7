"""Attention over [text, video] in one sequence: CogVideoX 1 and 1.5, CogView3+, ConsisID; CogView4."""

from __future__ import annotations

import torch

from sage_hf.diffusers.families.layout import (
    Attend,
    AttentionModule,
    merge_heads,
    normalize_query_key,
    project_out,
    project_qkv,
    sdpa_mask,
)
from sage_hf.diffusers.families.registry import computes


@computes("CogVideoXAttnProcessor2_0", fused="FusedCogVideoXAttnProcessor2_0")
def cogvideox_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `CogVideoXAttnProcessor2_0` does: attention over [text, video] with RoPE on the video tokens only.

    Args:
        hidden_states: (batch, video tokens, dim).
        encoder_hidden_states: (batch, text tokens, dim).
        image_rotary_emb: cosine and sine, each (video tokens, head_dim); None in CogVideoX-2B.
        fused: as in `project_qkv`.

    Returns:
        Video and text, shaped like hidden_states and encoder_hidden_states.
    """
    from diffusers.models.embeddings import apply_rotary_emb

    text_length = encoder_hidden_states.shape[1]
    states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    mask = sdpa_mask(attn, attention_mask, states.shape[1], states.shape[0])

    query, key, value = project_qkv(attn, states, fused=fused)
    query, key = normalize_query_key(attn.norm_q, attn.norm_k, query, key)
    if image_rotary_emb is not None:
        query[:, :, text_length:] = apply_rotary_emb(query[:, :, text_length:], image_rotary_emb)
        if not attn.is_cross_attention:
            key[:, :, text_length:] = apply_rotary_emb(key[:, :, text_length:], image_rotary_emb)

    states = project_out(attn, merge_heads(attend(query, key, value, attn_mask=mask)))
    return states[:, text_length:], states[:, :text_length]


@computes("CogView4AttnProcessor")
def cogview4_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `CogView4AttnProcessor` does: attention over [text, image], where RoPE pairs the halves of a head.

    Args:
        hidden_states: (batch, image tokens, dim).
        encoder_hidden_states: (batch, text tokens, dim).
        attention_mask: (batch, text tokens), nonzero where a token is valid. As in CogView4, it becomes an additive
            bias of 1 where both tokens are valid and 0 elsewhere.
        image_rotary_emb: cosine and sine, each (image tokens, head_dim).

    Returns:
        Image and text, shaped like hidden_states and encoder_hidden_states.
    """
    from diffusers.models.embeddings import apply_rotary_emb

    text_length, image_length = encoder_hidden_states.shape[1], hidden_states.shape[1]
    dtype = encoder_hidden_states.dtype
    states = torch.cat([encoder_hidden_states, hidden_states], dim=1)

    query, key, value = project_qkv(attn, states)
    query, key = (x.to(dtype) for x in normalize_query_key(attn.norm_q, attn.norm_k, query, key))
    if image_rotary_emb is not None:
        for x in (query, key):
            x[:, :, text_length:] = apply_rotary_emb(x[:, :, text_length:], image_rotary_emb, use_real_unbind_dim=-2)

    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must be (batch, text tokens), got {tuple(attention_mask.shape)}")
        valid = torch.nn.functional.pad(attention_mask.to(query.device) != 0, (0, image_length), value=True)
        attention_mask = (valid[:, None, :, None] & valid[:, None, None, :]).to(query.dtype)

    states = project_out(attn, merge_heads(attend(query, key, value, attn_mask=attention_mask)).type_as(query))
    return states[:, text_length:], states[:, :text_length]
