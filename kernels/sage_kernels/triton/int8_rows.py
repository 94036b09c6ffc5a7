"""Quantisation of P and dS to INT8 with a scale per row, as left operands of the next product."""

import triton
import triton.language as tl

from ..formats.int8 import INT8_MAX
from .common.formats import max_or_nan
from .common.int8 import magnitude, round_to_byte
from .common.launch import INTERPRETED
from .common.tiles import as_operand

CODE_MAX = tl.constexpr(INT8_MAX)
# Rows whose largest magnitude is below this become zeros: its reciprocal would not be finite.
MIN_ROW_MAX = tl.constexpr(1e-36)


@triton.jit
def max_magnitude(x, axis: tl.constexpr):
    """Return the largest magnitude along an axis, NaN where an element is NaN."""
    if INTERPRETED:  # in the interpreter only built-in reductions are fast
        return tl.max(magnitude(x), axis).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.abs(x), axis, max_or_nan)


@triton.jit
def codes_per_unit(row_max):
    """Return 127 / row_max, the factor of a row before rounding."""
    return tl.full(row_max.shape, CODE_MAX, tl.float32) / tl.maximum(row_max, MIN_ROW_MAX)


@triton.jit
def quantize_rows(x, row_max):
    """Return rows of x in int8, scaled so that `row_max` is 127, as the left operand of a product."""
    return round_to_byte(as_operand(x * codes_per_unit(row_max)[:, None]))
