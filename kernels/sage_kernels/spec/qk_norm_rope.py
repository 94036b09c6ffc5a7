"""QK-norm and RoPE: models apply both to the heads of queries and keys before attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, eq=False, slots=True)
class Norm:
    """Norm of the channels of a head, in float32.

    Attributes:
        kind: "rms" (RMSNorm, arXiv 1910.07467) or "layer" (LayerNorm, arXiv 1607.06450).
        eps: a number added to the mean square, or to the variance.
        weight, bias: (head_dim,), or with `across_heads` (heads · head_dim,); None: absent. Only "layer" has a bias.
        across_heads: all heads of a token have one norm.
        rounds: the norm is rounded to the tensor's dtype before it is multiplied by `weight`, which has that dtype;
            otherwise the product is rounded once.
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    across_heads: bool = False
    rounds: bool = False

    @property
    def facts(self) -> tuple[object, ...]:
        """Return all fields except tensors, and which tensors are present."""
        return self.kind, self.eps, self.across_heads, self.rounds, self.weight is None, self.bias is None


@dataclass(frozen=True, eq=False, slots=True)
class Rope:
    """RoPE: pairs of channels are rotated by angles that depend on the token (arXiv 2104.09864).

    Attributes:
        cosine, sine: (rows, channels), (rows, heads, channels) or (batch, rows, heads, channels), where batch and heads
            may be 1. `channels` is head_dim / 2, one angle for each pair, or head_dim. In float32 the result is
            rounded once. In the tensor's dtype each product and their sum are rounded, as in transformers. Without
            `sine`, `cosine` has one complex64 number for each pair.
        offset: token i has row i + offset; tokens without a row stay as they are.
        halves: channel i is paired with channel i + head_dim / 2; otherwise with its neighbour.
    """

    cosine: torch.Tensor
    sine: torch.Tensor | None = None
    offset: int = 0
    halves: bool = False

    @property
    def rows(self) -> int:
        """Return the number of tokens that have angles."""
        return self.cosine.shape[1 if self.cosine.dim() == 4 else 0]

    @property
    def facts(self) -> tuple[object, ...]:
        """Return all fields except tensors, and which tensors are present."""
        return self.offset, self.halves, self.sine is None

    def strides(self) -> tuple[int, int, int, int]:
        """Return the strides of `cosine` along batch, rows, heads and channels; 0 where all share the same values."""
        sizes, strides = self.cosine.shape, self.cosine.stride()
        if len(sizes) == 2:
            return 0, strides[0], 0, strides[1]
        batch = strides[0] if len(sizes) == 4 and sizes[0] > 1 else 0
        row, head, channel = strides[-3:]
        return batch, row, head if sizes[-2] > 1 else 0, channel

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine; for complex numbers, views of their two parts."""
        return (self.cosine.real, self.cosine.imag) if self.sine is None else (self.cosine, self.sine)


def check_norm_and_rope(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> None:
    """Raise ValueError if norm or RoPE does not fit x, (batch, tokens, heads, head_dim)."""
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"x must be (batch, tokens, heads, head_dim) of a float dtype, got {x.dtype} {tuple(x.shape)}")
    batch, _, heads, head_dim = x.shape
    others = [] if norm is None else [norm.weight, norm.bias]
    others += [] if rope is None else [rope.cosine, rope.sine]
    if other_devices := [str(one.device) for one in others if one is not None and one.device != x.device]:
        raise ValueError(f"x is on {x.device}, and norm or RoPE on {', '.join(other_devices)}")
    if norm is not None:
        channels = heads * head_dim if norm.across_heads else head_dim
        for name, vector in (("weight", norm.weight), ("bias", norm.bias)):
            if vector is not None and vector.shape != (channels,):
                raise ValueError(f"the norm's {name} must be ({channels},), got {tuple(vector.shape)}")
        if norm.kind == "rms" and norm.bias is not None:
            raise ValueError("RMSNorm has no bias")
    if rope is None:
        return
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} has no pairs for RoPE")
    if (rope.sine is None) != rope.cosine.is_complex():
        raise ValueError("RoPE has complex numbers, or cosine and sine")
    channels_of_table = (head_dim // 2,) if rope.sine is None else (head_dim // 2, head_dim)
    for name, table in zip(("cosine", "sine"), rope.tables(), strict=True):
        *outer, channels = table.shape
        fits = channels in channels_of_table and 1 <= len(outer) <= 3 and outer[-3:-2] in ([], [1], [batch])
        fits = fits and table.dtype in (torch.float32, x.dtype) and table.shape == rope.cosine.shape
        if not fits or (len(outer) > 1 and outer[-1] not in (1, heads)):
            raise ValueError(f"{name} {table.dtype} {tuple(table.shape)} does not fit x {tuple(x.shape)}: see Rope")
