"""What both forward kernels do to a tile of scores and to the output."""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
FLOAT16_MAX = tl.constexpr(65504.0)
BFLOAT16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def base_2(bias):
    """Return an additive mask's elements for scores in base 2; finite ones stay so, as rows of padding alone need."""
    bias = bias.to(tl.float32)
    finite = tl.clamp(bias * LOG2E, -FLOAT32_MAX, FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(tl.abs(bias) == float("inf"), bias, finite)


@triton.jit
def store_clamped(into, x, inside):
    """Store float32 x in the pointers' dtype, which a rounded V can exceed; NaN stays NaN."""
    dtype: tl.constexpr = into.dtype.element_ty
    if dtype == tl.float16:
        x = tl.clamp(x, -FLOAT16_MAX, FLOAT16_MAX, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.bfloat16:
        x = tl.clamp(x, -BFLOAT16_MAX, BFLOAT16_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(into, x.to(dtype), mask=inside)
