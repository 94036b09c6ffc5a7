"""The INT8 recipes' online softmax over tiles of integer scores, and P·V."""

import math

import triton
import triton.language as tl

from ...formats.int8 import INT8_MAX
from ...formats.weights import P_SCALE
from .int8 import round_to_byte
from .tiles import as_operand

P_SCALE_LOG2 = tl.constexpr(math.log2(P_SCALE["fp8"]))
INT8_MAX_LOG2 = tl.constexpr(math.log2(INT8_MAX))
MARGIN = tl.constexpr(2.0**-22)


@triton.jit
def p_scale_log2(PV: tl.constexpr):
    """Return log2 of the factor that makes P fill its format."""
    if PV == "fp8":
        return P_SCALE_LOG2
    elif PV == "int8":
        return INT8_MAX_LOG2
    else:
        return 0.0


@triton.jit
def upper_bound(tile_max):
    """Return a bound on a tile's scores that holds after rounding in float32, and is tight within a few roundings.

    A score above it by 2⁻⁷ would wrap in `round_to_byte`.
    """
    return tile_max + tl.abs(tile_max) * MARGIN


@triton.jit
def softmax_tile(s, scale, row_max, row_sum, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PV: tl.constexpr):
    """Compute a tile of the online softmax from unmasked integer scores.

    Args:
        s: int32 (BLOCK_M, BLOCK_N).
        scale: float32 (BLOCK_M, BLOCK_N / 64, 4), for each row and the keys of one thread, times log2(e).
        row_max, row_sum: float32 (BLOCK_M,) and (BLOCK_M, 4), of earlier tiles; each thread keeps its own sum.
        PV: the format of P·V.

    Returns:
        (p, gain, decay, row_max, row_sum): p float32 (BLOCK_M, BLOCK_N), relative to the row's maximum so far, or for
        INT8 to the tile's maximum, which `gain` corrects. `decay` is the factor of the sums of earlier tiles.
    """
    s = tl.reshape(s, (BLOCK_M, BLOCK_N // 64, 8, 4, 2))
    tile_max = tl.max(tl.max(tl.max(tl.max(s, 4), 2).to(tl.float32) * scale, 1), 1)
    new_max = tl.maximum(row_max, tile_max)
    decay = tl.exp2(row_max - new_max)
    reference = upper_bound(tile_max) if PV == "int8" else new_max
    gain = tl.exp2(reference - new_max)
    p = tl.exp2(
        s.to(tl.float32) * scale[:, :, None, :, None] + (-reference + p_scale_log2(PV))[:, None, None, None, None]
    )
    row_sum = row_sum * decay[:, None]
    tile_sum = tl.sum(tl.sum(tl.sum(p, 4), 2), 1)
    row_sum += tile_sum * gain[:, None] if PV == "int8" else tile_sum
    return tl.reshape(p, (BLOCK_M, BLOCK_N)), gain, decay, new_max, row_sum


@triton.jit
def masked_softmax_tile(x, row_max, row_sum, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PV: tl.constexpr):
    """Compute `softmax_tile` from scaled scores x, -inf where masked."""
    tile_max = tl.max(x, 1)
    new_max = tl.maximum(row_max, tile_max)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - finite_max)
    reference = finite_max
    if PV == "int8":
        reference = upper_bound(tl.where(tile_max == float("-inf"), finite_max, tile_max))
    gain = tl.exp2(reference - finite_max)
    p = tl.exp2(x + (-reference + p_scale_log2(PV))[:, None])
    thread_p = tl.reshape(p, (BLOCK_M, BLOCK_N // 8, 4, 2))
    row_sum = row_sum * decay[:, None]
    tile_sum = tl.sum(tl.sum(thread_p, 3), 1)
    row_sum += tile_sum * gain[:, None] if PV == "int8" else tile_sum
    return p, gain, decay, new_max, row_sum


@triton.jit
def scale_scores(s, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return integer scores times their scales, as `softmax_tile` takes them."""
    s = tl.reshape(s, (BLOCK_M, BLOCK_N // 64, 8, 4, 2)).to(tl.float32)
    return tl.reshape(s * scale[:, :, None, :, None], (BLOCK_M, BLOCK_N))


@triton.jit
def weigh_values(p, gain, v, acc, decay, PV: tl.constexpr):
    """Return acc · decay + P·V · gain."""
    if PV == "fp16":
        return tl.dot(p.to(tl.float16), v, acc * decay[:, None])
    elif PV == "fp8":
        p = as_operand(p).to(tl.float8e4nv)
        return acc * decay[:, None] + tl.dot(p, v)
    else:
        p = round_to_byte(as_operand(p))
        return acc * decay[:, None] + tl.dot(p, v).to(tl.float32) * gain[:, None]
