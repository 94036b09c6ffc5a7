"""The generic `Attention`: UNets, VAEs, token refiners; with RoPE added, Allegro and Lumina."""

from __future__ import annotations

import math

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


@computes("AttnProcessor2_0", "AllegroAttnProcessor2_0", fused="FusedAttnProcessor2_0")
def generic_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    temb: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    fused: bool = False,
) -> torch.Tensor:
    """Compute what `AttnProcessor2_0` does, or `AllegroAttnProcessor2_0` with `image_rotary_emb`.

    Args:
        hidden_states: (batch, tokens, dim) or (batch, dim, height, width); the output has the same shape.
        encoder_hidden_states: (batch, context tokens, context dim) in cross-attention.
        attention_mask: additive mask for `Attention.prepare_attention_mask`.
        temb: condition of the spatial norm that some VAEs have.
        image_rotary_emb: arguments of diffusers' `apply_rotary_emb_allegro`; applied in self-attention only.
        fused: as in `project_qkv`.
    """
    residual = hidden_states
    if attn.spatial_norm is not None:
        hidden_states = attn.spatial_norm(hidden_states, temb)
    image_shape = hidden_states.shape if hidden_states.ndim == 4 else None
    if image_shape is not None:
        hidden_states = hidden_states.flatten(2).transpose(1, 2)

    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    mask = sdpa_mask(attn, attention_mask, context.shape[1], context.shape[0])
    if attn.group_norm is not None:
        hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
    if encoder_hidden_states is not None and attn.norm_cross:
        encoder_hidden_states = attn.norm_encoder_hidden_states(encoder_hidden_states)

    query, key, value = project_qkv(attn, hidden_states, encoder_hidden_states, fused=fused)
    query, key = normalize_query_key(attn.norm_q, attn.norm_k, query, key)
    if image_rotary_emb is not None and not attn.is_cross_attention:
        from diffusers.models.embeddings import apply_rotary_emb_allegro

        query, key = (apply_rotary_emb_allegro(x, *image_rotary_emb) for x in (query, key))

    states = merge_heads(attend(query, key, value, attn_mask=mask)).to(query.dtype)
    states = project_out(attn, states)
    if image_shape is not None:
        states = states.transpose(-1, -2).reshape(image_shape)
    if attn.residual_connection:
        states = states + residual
    return states / attn.rescale_output_factor


@computes("Lumina2AttnProcessor2_0")
def lumina2_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: torch.Tensor | None = None,
    base_sequence_length: int | None = None,
) -> torch.Tensor:
    """Compute what `Lumina2AttnProcessor2_0` does: attention with grouped KV heads and complex RoPE.

    Args:
        attention_mask: (batch, key tokens), nonzero where a key is valid.
        image_rotary_emb: complex, (batch, tokens, head_dim / 2).
        base_sequence_length: if given, scores are multiplied by sqrt(log(tokens) / log(base_sequence_length)).
    """
    from diffusers.models.embeddings import apply_rotary_emb

    tokens = hidden_states.shape[1]
    query = attn.to_q(hidden_states)
    dtype, head_dim = query.dtype, query.shape[-1] // attn.heads
    query, key, value = (
        x.unflatten(2, (-1, head_dim))
        for x in (query, attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states))
    )
    query, key = normalize_query_key(attn.norm_q, attn.norm_k, query, key)
    if image_rotary_emb is not None:
        query, key = (apply_rotary_emb(x, image_rotary_emb, use_real=False) for x in (query, key))
    query, key = query.to(dtype), key.to(dtype)
    groups = attn.heads // key.shape[2]
    key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))

    scale = attn.scale
    if base_sequence_length is not None:
        scale = math.sqrt(math.log(tokens, base_sequence_length)) * attn.scale
    if attention_mask is not None:
        attention_mask = attention_mask.bool().view(hidden_states.shape[0], 1, 1, -1)

    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    states = merge_heads(attend(query, key, value, attn_mask=attention_mask, scale=scale)).type_as(query)
    return project_out(attn, states)


@computes("LuminaAttnProcessor2_0")
def lumina_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    query_rotary_emb: torch.Tensor | None = None,
    key_rotary_emb: torch.Tensor | None = None,
    base_sequence_length: int | None = None,
) -> torch.Tensor:
    """Compute what `LuminaAttnProcessor2_0` does: as `lumina2_attention`, normalised across heads and not projected.

    Args:
        attention_mask: (batch, key tokens), nonzero where a key is valid.
        query_rotary_emb, key_rotary_emb: complex, (1, tokens, head_dim / 2); the text's keys have none.
        base_sequence_length: see `lumina2_attention`; it counts in self-attention only.

    Returns:
        (batch, tokens, heads, head_dim): the model adds self-attention and cross-attention before it merges heads.
    """
    from diffusers.models.embeddings import apply_rotary_emb

    query, key = attn.to_q(hidden_states), attn.to_k(encoder_hidden_states)
    dtype, head_dim = query.dtype, query.shape[-1] // attn.heads
    query, key = normalize_query_key(attn.norm_q, attn.norm_k, query, key)
    query, key, value = (x.unflatten(2, (-1, head_dim)) for x in (query, key, attn.to_v(encoder_hidden_states)))
    if query_rotary_emb is not None:
        query = apply_rotary_emb(query, query_rotary_emb, use_real=False)
    if key_rotary_emb is not None:
        key = apply_rotary_emb(key, key_rotary_emb, use_real=False)
    query, key = query.to(dtype), key.to(dtype)
    groups = attn.heads // key.shape[2]
    key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))

    scale = None if key_rotary_emb is None else attn.scale
    if scale is not None and base_sequence_length is not None:
        scale *= math.sqrt(math.log(hidden_states.shape[1], base_sequence_length))
    mask = attention_mask.bool().view(hidden_states.shape[0], 1, 1, -1)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return attend(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2).to(dtype)
