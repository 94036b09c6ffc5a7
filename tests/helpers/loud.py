"""Tensors of which one key, or one of several packed documents, is a thousand times as loud as all others."""

import torch

from sage_kernels.spec.layout import Lengths

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LENGTHS = (200, 300, 130)
LOUD_DOCUMENT = slice(200, 500)


def loud_key(kv_len: int, place: int, head_dim: int, *, times: float = 1000.0, heads: int = 4) -> Tensors:
    """Draw Q, K and V, float32 (1, heads, tokens, head_dim), 256 queries; key `place` is so many times as loud."""
    generator = torch.Generator().manual_seed(place)
    query, key, value = (torch.randn(1, heads, n, head_dim, generator=generator) for n in (256, kv_len, kv_len))
    key[:, :, place] *= times
    return query, key, value


def documents(device: torch.device | str, *, loud: bool, heads: int = 2, head_dim: int = 64) -> tuple[Tensors, Lengths]:
    """Draw Q, K and V of three documents, bfloat16 (1, heads, tokens, head_dim); the second one may be loud."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), head_dim, generator=generator) for _ in range(3))
    if loud:
        for x in (query, key, value):
            x[:, :, LOUD_DOCUMENT] *= 1000.0
    starts = torch.tensor((0, *LENGTHS)).cumsum(0).int().to(device)
    lengths = Lengths(starts, starts, max(LENGTHS), max(LENGTHS))
    query, key, value = (x.to(device, torch.bfloat16) for x in (query, key, value))
    return (query, key, value), lengths
