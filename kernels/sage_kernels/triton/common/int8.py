"""Scales of INT8 and rounding to it, for Triton kernels."""

import triton
import triton.language as tl

from ...formats.int8 import INT8_MAX
from ...formats.reciprocal import SMALLEST_NORMAL
from .launch import INTERPRETED

ONE_127TH = tl.constexpr(1 / INT8_MAX)
SMALLEST_SCALE = tl.constexpr(SMALLEST_NORMAL)
INFINITY_BITS = tl.constexpr(0x7F800000)
# float32 numbers around 1.5·2²³ are integers: adding it rounds to nearest even, and leaves the integer in the low bits.
ROUNDER = tl.constexpr(1.5 * 2.0**23)
BYTE_ROUNDER = tl.constexpr(1.5 * 2.0**10)


@triton.jit
def magnitude(x):
    """Return the bits of float32 |x|, which order like the numbers; non-finite x have the largest bits."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def int8_scale(amax_bits, BFLOAT16: tl.constexpr):
    """Return (scale, reciprocal) of groups with these largest magnitudes; (NaN, NaN) for a non-finite group.

    With BFLOAT16 the scale is rounded up to a bfloat16 number.
    """
    scale = amax_bits.to(tl.float32, bitcast=True) * ONE_127TH
    if BFLOAT16:
        scale = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    scale = tl.where(amax_bits < INFINITY_BITS, scale, float("nan"))
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return scale, tl.where(scale < SMALLEST_SCALE, 0.0, inverse)


@triton.jit
def round_to_int8(x):
    """Round to nearest even; NaN gives 0."""
    bits = (x + ROUNDER).to(tl.int32, bitcast=True)
    return tl.where(bits < INFINITY_BITS, bits, 0).to(tl.int8)


@triton.jit
def round_to_byte(x):
    """Round |x| ≤ 127 to the nearest integer in int8, via float16: 1.25 instructions per element.

    float16 numbers around 1.5·2¹⁰ are integers, as float32 numbers around ROUNDER are. Within 2⁻⁵ of a tie the result
    may be either neighbour.
    """
    if INTERPRETED:
        return (x.to(tl.float16) + BYTE_ROUNDER).to(tl.int16, bitcast=True).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 low, high, rounder;
                mov.b32 rounder, 0x66006600;
                cvt.rn.f16x2.f32 low, $2, $1;
                cvt.rn.f16x2.f32 high, $4, $3;
                add.rn.f16x2 low, low, rounder;
                add.rn.f16x2 high, high, rounder;
                prmt.b32 $0, low, high, 0x6420;
            }
            """,
            "=r,r,r,r,r",
            [x],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
