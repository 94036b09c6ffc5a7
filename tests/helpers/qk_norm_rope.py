"""Cases of QK-norm and RoPE, and what judges their outputs and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sage_kernels.reference import qk_norm_rope as reference
from sage_kernels.spec.qk_norm_rope import Norm, Rope


@dataclass(frozen=True)
class QKNormRopeCase:
    """A call of `qk_norm_rope`.

    Attributes:
        sizes: batch, tokens, heads, head_dim.
        norm: "", "rms", "rounded" (an RMSNorm rounded before its weight), "bare" (without weight), "layer", "tokens"
            (an RMSNorm of all heads of a token) or "token layers".
        table: "", or the kind of its tables: "pairs" (an angle for each pair), "channels" (an angle for each channel),
            "heads" (an angle for each pair of each head), "batch" (of each batch element), "complex", "own" (in the
            tensor's dtype).
        offset, halves: as in `Rope`.
        heads_first: x is a view of (batch, heads, tokens, head_dim).
    """

    sizes: tuple[int, int, int, int]
    norm: str = ""
    table: str = ""
    offset: int = 0
    halves: bool = False
    heads_first: bool = False

    @property
    def across_heads(self) -> bool:
        return self.norm.startswith("token")

    def draw(
        self, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> tuple[torch.Tensor, Norm | None, Rope | None]:
        """Draw x and what to do with it, by torch's global generator."""
        batch, tokens, heads, head_dim = self.sizes

        def draw(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(sizes).to(device, dtype)

        if self.heads_first:
            x = (3 * draw(batch, heads, tokens, head_dim) + 1).transpose(1, 2)
        else:
            x = 3 * draw(batch, tokens, heads, head_dim) + 1
        norm, rope = None, None
        if self.norm:
            kind = "layer" if "layer" in self.norm else "rms"
            vectors = [1 + draw(heads * head_dim if self.across_heads else head_dim) / 4 for _ in range(2)]
            weight = None if self.norm == "bare" else vectors[0]
            bias = vectors[1] if kind == "layer" else None
            norm = Norm(kind, 1e-5, weight, bias, self.across_heads, self.norm == "rounded")
        if self.table:
            angles = draw(tokens, head_dim // 2, dtype=torch.float32)
            cosine, sine = angles.cos(), angles.sin()
            if self.table == "channels":
                cosine, sine = draw(2, tokens, head_dim, dtype=torch.float32)
            if self.table == "heads":
                cosine, sine = draw(2, tokens, heads, head_dim // 2, dtype=torch.float32)
            if self.table in ("batch", "own"):
                cosine, sine = draw(2, batch, tokens, 1, head_dim, dtype=torch.float32)
            if self.table == "own":
                cosine, sine = cosine.to(dtype), sine.to(dtype)
            rope = Rope(cosine, sine, self.offset, self.halves)
            if self.table == "complex":
                rope = replace(rope, cosine=torch.complex(cosine, sine), sine=None)
        return x, norm, rope

    def judge(self, output: torch.Tensor, x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> None:
        """Compare an output with float64, and with the reference's bits."""
        expected = reference.qk_norm_rope(x, norm, rope)
        assert output.dtype == x.dtype and output.shape == x.shape and output.is_contiguous()
        if norm is None:  # each operation rounds as PyTorch's does
            assert torch.equal(output, expected)
            return
        exact_norm, exact_rope = in_float64(norm), in_float64(rope)
        normalized = reference.qk_norm_rope(x.double(), exact_norm, None)
        exact = normalized if exact_rope is None else reference.apply_rope(normalized, exact_rope)
        # Each rounding of the norm errs by half an ulp, which the rotation spreads over both channels of a pair; then
        # the rotation's own roundings: one of the result, and one of each product in tables of x's dtype.
        half = torch.finfo(x.dtype).eps / 2
        roundings = 2 if norm.rounds and norm.weight is not None else 1
        spread = normalized.abs()
        if exact_rope is not None:
            both = replace(exact_rope, cosine=exact_rope.cosine.abs(), sine=-exact_rope.sine.abs())
            spread = torch.maximum(reference.apply_rope(spread, both), _turned(spread, both))
            roundings += self.table == "own"
        bound = half * (roundings * spread + (exact.abs() if exact_rope is not None else 0)) * 1.02 + 1e-6
        assert ((output.double() - exact).abs() <= bound).all()
        # A sum in another order moves one rounding in thousands.
        assert (output == expected).float().mean() > 0.99

    def judge_gradients(
        self,
        found: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        gradient: torch.Tensor,
        x: torch.Tensor,
        norm: Norm | None,
        rope: Rope | None,
    ) -> None:
        """Compare gradients with those of the reference in float64, unrounded: they are rounded once."""
        wide = x.double().requires_grad_()
        exact_norm = in_float64(norm)
        vectors = [] if exact_norm is None else [exact_norm.weight, exact_norm.bias]
        inputs = [wide, *(one.requires_grad_() for one in vectors if one is not None)]
        output = reference.qk_norm_rope(wide, exact_norm, in_float64(rope))
        expected = torch.autograd.grad(output, inputs, gradient.double())
        given = [one for one in found if one is not None]
        assert len(given) == len(expected)
        for own, exact in zip(given, expected, strict=True):
            error = (own.double() - exact).norm() / exact.norm()
            assert error <= torch.finfo(x.dtype).eps / 2 + 1e-5


def in_float64(what: Norm | Rope | None) -> Norm | Rope | None:
    """Return a norm that rounds nothing, or a rotation, in float64."""
    if what is None:
        return None
    if isinstance(what, Rope):
        cosine, sine = what.tables()
        return replace(what, cosine=cosine.double(), sine=sine.double())
    weight, bias = (None if one is None else one.detach().double() for one in (what.weight, what.bias))
    return replace(what, weight=weight, bias=bias, rounds=False)


def _turned(spread: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Return |b| · |cosine| + |a| · |sine| of the second channels, which `rotate` subtracts."""
    return reference.apply_rope(spread, replace(rope, sine=-rope.sine))


NORMS = "", "rms", "rounded", "bare", "layer", "tokens", "token layers"
TABLES = "", "pairs", "channels", "heads", "batch", "complex", "own"
SIZES = (2, 19, 3, 64), (1, 21, 6, 128), (1, 5, 5, 72), (2, 7, 12, 16), (1, 3, 1, 32)

CASES = (
    *(QKNormRopeCase(SIZES[i % len(SIZES)], norm, heads_first=i % 2 == 0) for i, norm in enumerate(NORMS) if norm),
    *(
        QKNormRopeCase(SIZES[i % len(SIZES)], NORMS[i % len(NORMS)], table, (0, 3, -2)[i % 3], i % 2 == 1, i % 4 > 1)
        for i, table in enumerate([table for table in TABLES[1:] for _ in range(4)])
    ),
)
"""Every norm, and every table with neighbours and with halves."""
