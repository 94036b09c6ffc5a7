"""QK-norm and RoPE in plain PyTorch: the specification of `qk_norm_rope`."""

from __future__ import annotations

import torch

from ..spec.qk_norm_rope import Norm, Rope


def qk_norm_rope(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
    """Apply QK-norm and RoPE to heads; round to the dtype of x after each step.

    Args:
        x: (batch, tokens, heads, head_dim); float64 is computed in float64.
        norm, rope: the norm and the RoPE, if any.
    """
    normalized = x if norm is None else normalize(x, norm)
    return normalized if rope is None else apply_rope(normalized, rope)


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


def apply_rope(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Return x with its pairs of channels (a, b) replaced by (a · cosine - b · sine, b · cosine + a · sine)."""
    tokens = x.shape[1]
    first = min(max(0, -rope.offset), tokens)
    last = max(first, min(tokens, rope.rows - rope.offset))
    before, rotated, after = x[:, :first], x[:, first:last], x[:, last:]
    cosine, sine = rope.tables()
    if cosine.dtype != x.dtype:
        rotated = _widened(rotated)
    (cosine_a, cosine_b), (sine_a, sine_b) = (
        _by_pair(table, x.shape[3], rope.halves, slice(first + rope.offset, last + rope.offset))
        for table in (cosine, sine)
    )
    a, b = _pairs(rotated, rope.halves)
    pairs = a * cosine_a - b * sine_a, b * cosine_b + a * sine_b
    rotated = torch.cat(pairs, -1) if rope.halves else torch.stack(pairs, -1).flatten(-2)
    return torch.cat((before, rotated.to(x.dtype), after), 1)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _pairs(x: torch.Tensor, halves: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second channels of pairs."""
    a, b = x.chunk(2, -1) if halves else x.unflatten(-1, (-1, 2)).unbind(-1)
    return a, b


def _by_pair(table: torch.Tensor, head_dim: int, halves: bool, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table's rows for both channels of pairs, each (batch or 1, rows, heads or 1, head_dim / 2)."""
    if table.dim() == 2:
        table = table[:, None]
    if table.dim() == 3:
        table = table[None]
    table = table[:, rows]
    return _pairs(table, halves) if table.shape[-1] == head_dim else (table, table)
