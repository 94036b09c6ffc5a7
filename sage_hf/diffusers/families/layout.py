"""Steps that the explicit processors share: projections into heads, query/key norms, the output projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

# attend(query, key, value, attn_mask=None, scale=None): (B, H, N, D) tensors to (B, H, Nq, Dv), as SDPA
Attend: TypeAlias = Callable[..., torch.Tensor]
# an attention module of diffusers; its submodules depend on its family
AttentionModule: TypeAlias = Any


def split_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (batch, tokens, heads · head_dim) as a view (batch, heads, tokens, head_dim)."""
    batch, tokens, channels = states.shape
    return states.view(batch, tokens, heads, channels // heads).transpose(1, 2)  # `unflatten` takes three times as long


def project_qkv(
    attn: AttentionModule, states: torch.Tensor, context: torch.Tensor | None = None, *, fused: bool = False
) -> list[torch.Tensor]:
    """Return query, key and value, (batch, heads, tokens, head_dim) each; keys and values are of the context, if any.

    Args:
        fused: project as diffusers' `Fused…` processors do, by the weights that `fuse_qkv_projections` made.
    """
    if not fused:
        source = states if context is None else context
        projected = (attn.to_q(states), attn.to_k(source), attn.to_v(source))
    elif context is None:
        projected = attn.to_qkv(states).chunk(3, dim=-1)
    else:
        projected = (attn.to_q(states), *attn.to_kv(context).chunk(2, dim=-1))
    return [split_heads(x, attn.heads) for x in projected]


def merge_heads(states: torch.Tensor) -> torch.Tensor:
    """Return (batch, heads, tokens, head_dim) as (batch, tokens, heads · head_dim)."""
    return states.transpose(1, 2).flatten(2, 3)


def join_tokens(*streams: torch.Tensor) -> torch.Tensor:
    """Concatenate (batch, heads, tokens, head_dim) tensors along tokens, laid out as `split_heads` returns them.

    In this layout PyTorch copies 16 bytes at a time.
    """
    return torch.cat([x.transpose(1, 2) for x in streams], dim=1).transpose(1, 2)


def normalize_query_key(
    norm_q: torch.nn.Module | None, norm_k: torch.nn.Module | None, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query and key, each normalised if it has a norm."""
    return (query if norm_q is None else norm_q(query)), (key if norm_k is None else norm_k(key))


def project_out(attn: AttentionModule, hidden_states: torch.Tensor) -> torch.Tensor:
    """Apply the output projection and its dropout."""
    return attn.to_out[1](attn.to_out[0](hidden_states))


def sdpa_mask(attn: AttentionModule, mask: torch.Tensor | None, key_length: int, batch: int) -> torch.Tensor | None:
    """Return the additive mask of a generic `Attention`: (batch, heads, 1 or query tokens, key tokens)."""
    if mask is None:
        return None
    mask = attn.prepare_attention_mask(mask, key_length, batch)
    return mask.view(batch, attn.heads, -1, mask.shape[-1])
