"""Norm and rotation of heads in plain PyTorch: the specification of `norm_rope`."""

from __future__ import annotations

import torch

from ..heads import Norm, Rope


def norm_rope(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
    """Normalise and rotate heads; rounded to the dtype of x after each.

    Args:
        x: (batch, tokens, heads, head_dim); float64 is computed in float64.
        norm, rope: what to do, if any.
    """
    normalized = x if norm is None else normalize(x, norm)
    return normalized if rope is None else rotate(normalized, rope)


def normalize(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return x · weight / sqrt(mean(x²) + eps), or (x - mean) · weight / sqrt(variance + eps) + bias."""
    wide, dims = _widened(x), (-2, -1) if norm.across_heads else (-1,)
    if norm.kind == "layer":
        wide = wide - wide.mean(dims, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + norm.eps)
    shape = x.shape[-2:] if norm.across_heads else x.shape[-1:]
    if norm.weight is not None:
        y = (y.to(x.dtype) if norm.rounds else y) * norm.weight.view(shape)
    if norm.bias is not None:
        y = y + norm.bias.view(shape)
    return y.to(x.dtype)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Return x with its pairs of channels (a, b) replaced by (a · cosine - b · sine, b · cosine + a · sine)."""
    tokens, head_dim = x.shape[1], x.shape[3]
    first = min(max(0, -rope.offset), tokens)
    last = max(first, min(tokens, rope.rows - rope.offset))
    cosine, sine = (
        _by_pair(table, head_dim, rope.halves)[:, first + rope.offset : last + rope.offset]
        for table in (rope.cosine, rope.sine)
    )
    before, rotated, after = x[:, :first], _widened(x[:, first:last]), x[:, last:]
    a, b = rotated.chunk(2, -1) if rope.halves else rotated.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = a * cosine - b * sine, b * cosine + a * sine
    rotated = torch.cat(pairs, -1) if rope.halves else torch.stack(pairs, -1).flatten(-2)
    return torch.cat((before, rotated.to(x.dtype), after), 1)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _by_pair(table: torch.Tensor, head_dim: int, halves: bool) -> torch.Tensor:
    """Return a table as (batch or 1, rows, heads or 1, head_dim / 2)."""
    if table.dim() == 2:
        table = table[:, None]
    if table.dim() == 3:
        table = table[None]
    if table.shape[-1] == head_dim:
        table = table[..., : head_dim // 2] if halves else table[..., ::2]
    return table
