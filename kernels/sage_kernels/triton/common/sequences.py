"""Offsets of a sequence's tokens and operand rows, for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def sequence_range(ranges, batch, tokens, RAGGED: tl.constexpr):
    """Return (start, length, start in the operands) of a sequence; without RAGGED all have length `tokens`."""
    if RAGGED:
        return tl.load(ranges + 3 * batch), tl.load(ranges + 3 * batch + 1), tl.load(ranges + 3 * batch + 2)
    else:
        return 0, tokens, 0


@triton.jit
def operand_row(batch, head, heads, rows, start, PACKED: tl.constexpr):
    """Return the first row of a sequence in operands of (operand batch, heads, rows)."""
    if PACKED:
        return head * rows + start
    else:
        return (batch * heads + head) * rows
