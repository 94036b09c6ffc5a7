"""Tensors of a head whose rows park most of their weight on a sink, as language models do on their first token."""

import torch

from sage_kernels.exact import sdpa
from sage_kernels.spec.transforms import HEAVY_QUERIES

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sink(q_len: int, kv_len: int, head_dim: int, *, heads: int = 1, share: float = 0.8, at: int = 0) -> Tensors:
    """Draw Q, K and V, float32 (1, heads, tokens, head_dim); key `at`, whose V is small, has about that share."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, n, head_dim, generator=generator) for n in (q_len, kv_len, kv_len))
    direction = torch.nn.functional.normalize(torch.randn(head_dim, generator=generator), dim=0)
    query += (6 - query @ direction)[..., None] * direction
    key -= (key @ direction)[..., None] * direction
    _, lse = sdpa.attention(query, key, value)
    score = lse.mean().item() + torch.tensor(share / (1 - share)).log().item()
    value += torch.randn(head_dim, generator=generator)
    key[:, :, at] = direction * (score * head_dim**0.5 / 6)
    value[:, :, at] = 0.02 * torch.randn(heads, head_dim, generator=generator)
    return query, key, value


def uniform_but_where_sampled(tokens: int, head_dim: int, late: tuple[int, ...]) -> tuple[Tensors, torch.Tensor]:
    """Draw Q, K and V, float32 (1, 1, tokens, ·), of which causal attention makes those keys late ones.

    Rows but those by which heavy keys are chosen attend to all keys that they see alike: return these rows too, bool
    (tokens,). V is the identity: a row's output has its weights.
    """
    query, key = torch.zeros(2, 1, 1, tokens, head_dim)
    later = torch.arange(tokens) - tokens // 2
    sampled = (later >= 0) & (later % -(-(tokens - tokens // 2) // HEAVY_QUERIES) == 0)
    query[:, :, sampled, 0] = 1.0
    key[:, :, late, 0] = 10.0 * head_dim**0.5
    return (query, key, torch.eye(tokens)[None, None]), ~sampled
