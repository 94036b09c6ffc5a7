"""Cosmos (1 and 2): self- and cross-attention with RoPE over the halves of a head."""

from __future__ import annotations

import torch

from sage_hf.diffusers.families.layout import Attend, AttentionModule, merge_heads, project_out, split_heads
from sage_hf.diffusers.families.registry import computes


@computes("CosmosAttnProcessor2_0")
def cosmos_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute what `CosmosAttnProcessor2_0` does, which always uses the dispatch's backend of the whole process.

    Args:
        hidden_states: (batch, tokens, dim).
        encoder_hidden_states: (batch, text tokens, text dim) in cross-attention.
        attention_mask: broadcastable to (batch, heads, query tokens, key tokens).
        image_rotary_emb: cosine and sine, each (tokens, head_dim).
    """
    from diffusers.models.embeddings import apply_rotary_emb

    context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    query = attn.norm_q(split_heads(attn.to_q(hidden_states), attn.heads))
    key = attn.norm_k(split_heads(attn.to_k(context), attn.heads))
    value = split_heads(attn.to_v(context), attn.heads)
    if image_rotary_emb is not None:
        query, key = (apply_rotary_emb(x, image_rotary_emb, use_real_unbind_dim=-2) for x in (query, key))
    states = merge_heads(attend(query, key, value, attn_mask=attention_mask)).type_as(query)
    return project_out(attn, states)
