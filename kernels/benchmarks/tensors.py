"""Q, K and V to measure on: drawn ones, and the activations of trained models."""

from __future__ import annotations

import torch

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gaussian(batch: int, heads: int, tokens: int, head_dim: int, seed: int = 0) -> Triple:
    """Independent standard normal Q, K, V, float32 (batch, heads, tokens, head_dim)."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, heads, tokens, head_dim, generator=generator) for _ in range(3))
    return query, key, value


def dit_like(batch: int, heads: int, tokens: int, head_dim: int, seed: int = 0) -> Triple:
    """Q, K, V with what makes a diffusion transformer's hard to quantise, float32 (batch, heads, tokens, head_dim).

    Neighbouring tokens are correlated (a moving average over 16), every 16th channel of Q and K is 6 times louder, K has a
    bias per channel of 3 times its deviation, V one of half its deviation.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def correlated() -> torch.Tensor:
        noise = draw(batch, heads, tokens + 15, head_dim)
        average = noise.unfold(2, 16, 1).mean(-1) * 4
        return 0.8 * average + 0.6 * draw(batch, heads, tokens, head_dim)

    loud = torch.ones(head_dim)
    loud[::16] = 6.0
    query = (correlated() + draw(1, heads, 1, head_dim)) * loud
    key = (correlated() + 3 * draw(1, heads, 1, head_dim)) * loud
    return (
        query / loud.norm() * head_dim**0.5,
        key / loud.norm() * head_dim**0.5,
        correlated() + 0.5 * draw(1, heads, 1, head_dim),
    )
