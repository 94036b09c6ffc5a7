"""Loads of tiles from the quantisers' operands. Operands are padded to whole tiles, so loads need no masks."""

import triton
import triton.language as tl

from .launch import INTERPRETED, ON_AMD


@triton.jit
def load_key(key, row, BLOCK_N: tl.constexpr, CHANNELS: tl.constexpr, TMA: tl.constexpr):
    """Load BLOCK_N rows of K's operand from `row` on: (BLOCK_N, CHANNELS)."""
    if TMA:
        return key.load([tl.cast(row, tl.int32), 0])
    else:
        token = row + tl.arange(0, BLOCK_N)
        return tl.load(key + token.to(tl.int64)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :])


@triton.jit
def load_key_scale(key_scale, row, BLOCK_N: tl.constexpr):
    """Load the scales of a tile that begins at `row`: float32 (blocks of 64, 4 threads); it may be part of a block."""
    BLOCKS: tl.constexpr = (BLOCK_N + 63) // 64
    scale = tl.load(key_scale + row // 64 * 4 + tl.arange(0, BLOCKS * 4)).to(tl.float32)
    return tl.reshape(scale, (BLOCKS, 4))


@triton.jit
def load_value(
    value, head, row, rows, BLOCK_N: tl.constexpr, V_CHANNELS: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr
):
    """Load BLOCK_N tokens of V's operand, from the head's row `row` on: (BLOCK_N, V_CHANNELS)."""
    if not TRANSPOSED:
        return load_key(value, head * rows + row, BLOCK_N, V_CHANNELS, TMA)
    elif TMA:
        return value.load([tl.cast(head * V_CHANNELS, tl.int32), tl.cast(row, tl.int32)]).T
    else:
        channel = head * V_CHANNELS + tl.arange(0, V_CHANNELS)
        return tl.load(value + channel[:, None] * rows + (row + tl.arange(0, BLOCK_N))[None, :]).T


@triton.jit
def as_operand(x):
    """Permute the columns of a float32 accumulator so that it becomes an 8-bit left operand without moving registers.

    x is (rows, columns). Transposed operands hold their tokens in the same order (`operand_token`).
    """
    columns = tl.reshape(x, (x.shape[0], x.shape[1] // 16, 2, 4, 2))
    return tl.reshape(tl.permute(columns, (0, 1, 3, 2, 4)), (x.shape[0], x.shape[1]))


@triton.jit
def operand_token(position):
    """Return the token at a position of a transposed operand; of each 16: 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15."""
    return position // 16 * 16 + position // 2 % 2 * 8 + position // 4 % 4 * 2 + position % 2


@triton.jit
def optimization_barrier(x):
    """Hide x (int32) from the compiler, so derived values are recomputed after a loop instead of kept in registers."""
    if INTERPRETED:
        return x
    elif ON_AMD:
        return tl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v", [x], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
