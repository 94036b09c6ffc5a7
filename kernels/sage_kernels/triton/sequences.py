"""Where a sequence's tokens are: in the caller's tensors, and in the padded operands that the quantisers write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 128


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up. Triton's own is a compiled function's, and costs microseconds of every call."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n ≥ 1."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Sequences:
    """The token axis of Q, or that of K and V.

    Attributes:
        tokens: the longest sequence's length.
        rows: tokens of the padded operands for each (operand batch, head): a multiple of 128.
        packed: all sequences lie in one batch element, one after the other (`cu_seqlens`).
        ranges: int32 (batch, 3) of each sequence's start, length and start in the operands; None where every sequence
            has `tokens` tokens, from the first on.
    """

    tokens: int
    rows: int
    packed: bool = False
    ranges: torch.Tensor | None = None

    @classmethod
    def equal(cls, tokens: int) -> Sequences:
        """One sequence of that length per batch element."""
        return cls(tokens, ceil_div(tokens, BLOCK) * BLOCK)

    @classmethod
    def of_cu_seqlens(
        cls, cu_seqlens: torch.Tensor, max_tokens: int, total: int, lengths: torch.Tensor | None = None
    ) -> Sequences:
        """Sequences packed into one batch element of `total` tokens.

        Args:
            cu_seqlens: int32 (sequences + 1,): sequence i is tokens cu_seqlens[i]…cu_seqlens[i + 1] - 1.
            max_tokens: the longest sequence's length, or more. Of a longer one only so many tokens count.
            lengths: int32 (sequences,): the tokens of each that count; default all.
        """
        start, sequences = cu_seqlens[:-1], cu_seqlens.shape[0] - 1
        stored = (cu_seqlens[1:] - start).clamp(max=max_tokens)
        lengths = stored if lengths is None else torch.minimum(lengths, stored)
        # Each sequence begins a block of its own, and ends in one that no other uses.
        operand_start = (start // BLOCK + torch.arange(sequences, dtype=torch.int32, device=start.device)) * BLOCK
        ranges = torch.stack((start, lengths, operand_start), 1).int()
        return cls(max_tokens, (total // BLOCK + sequences) * BLOCK, True, ranges)

    @property
    def blocks(self) -> int:
        """Blocks of 128 tokens of the longest sequence."""
        return ceil_div(self.tokens, BLOCK)

    @property
    def rows_of_longest(self) -> int:
        """Rows of the longest sequence in the operands."""
        return self.blocks * BLOCK


def stride_of(valid: torch.Tensor | None) -> int:
    """Batch stride of a `valid`, (batch or 1, tokens) or None: 0 where all batch elements share it."""
    return 0 if valid is None or valid.shape[0] == 1 else valid.stride(0)


@triton.jit
def sequence_range(ranges, batch, tokens, RAGGED: tl.constexpr):
    """(start, length, start in the operands) of a sequence; `tokens` is everyone's length where not RAGGED."""
    if RAGGED:
        return tl.load(ranges + 3 * batch), tl.load(ranges + 3 * batch + 1), tl.load(ranges + 3 * batch + 2)
    else:
        return 0, tokens, 0


@triton.jit
def operand_row(batch, head, heads, rows, start, PACKED: tl.constexpr):
    """First row of a sequence in operands of (operand batch, heads, rows)."""
    if PACKED:
        return head * rows + start
    else:
        return (batch * heads + head) * rows
