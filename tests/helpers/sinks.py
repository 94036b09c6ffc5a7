"""Tensors of a head whose rows park most of their weight on a sink, as language models do on their first token."""

import torch

from sage_kernels import exact

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sink(q_len: int, kv_len: int, head_dim: int, *, heads: int = 1, share: float = 0.8, at: int = 0) -> Tensors:
    """Draw Q, K and V, float32 (1, heads, tokens, head_dim); key `at`, whose V is small, has about that share."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, n, head_dim, generator=generator) for n in (q_len, kv_len, kv_len))
    direction = torch.nn.functional.normalize(torch.randn(head_dim, generator=generator), dim=0)
    query += (6 - query @ direction)[..., None] * direction
    key -= (key @ direction)[..., None] * direction
    _, lse = exact.attention(query, key, value)
    score = lse.mean().item() + torch.tensor(share / (1 - share)).log().item()
    value += torch.randn(head_dim, generator=generator)
    key[:, :, at] = direction * (score * head_dim**0.5 / 6)
    value[:, :, at] = 0.02 * torch.randn(heads, head_dim, generator=generator)
    return query, key, value
