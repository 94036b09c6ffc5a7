"""P and dS in INT8 with a scale per row, as the left operand of the next product."""

import triton
import triton.language as tl

from ..formats.int8 import INT8_MAX
from ..language.formats import max_or_nan
from ..language.int8 import magnitude, round_to_byte
from ..language.launch import INTERPRETED
from ..language.tiles import as_operand

FULL = tl.constexpr(INT8_MAX)
# Rows whose largest element lies below become zeros: the reciprocal would not be finite.
SMALLEST = tl.constexpr(1e-36)


@triton.jit
def largest(x, axis: tl.constexpr):
    """Largest magnitude along an axis; NaN where one is NaN. The interpreter's own reductions alone are fast."""
    if INTERPRETED:
        return tl.max(magnitude(x), axis).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.abs(x), axis, max_or_nan)


@triton.jit
def codes_per_unit(row_max):
    return tl.full(row_max.shape, FULL, tl.float32) / tl.maximum(row_max, SMALLEST)


@triton.jit
def byte_rows(x, row_max):
    """Rows of x in int8, 127 at `row_max`, as the left operand of a product."""
    return round_to_byte(as_operand(x * codes_per_unit(row_max)[:, None]))
