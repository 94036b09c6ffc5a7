"""Device functions for e4m3 and e2m1, with the bits of `sage_kernels.formats`.

Arithmetic that any GPU and the interpreter have, and the conversions of GPUs with FP4 (`native`), which give the same
bits.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(16)
E2M1_MAX = tl.constexpr(6.0)
E4M3_MAX = tl.constexpr(448.0)
E4M3_NAN = tl.constexpr(0x7F)
E4M3_MIN_NORMAL = tl.constexpr(2.0**-6)
FLOAT32_EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def max_or_nan(a, b):
    """The larger; NaN when either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def encode_e4m3(x):
    """float32 ≥ 0 -> uint8 e4m3, round to nearest even, saturating at 448; NaN stays NaN."""
    bits = tl.minimum(x, E4M3_MAX).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # 2²³ + n is where float32 has the spacing 1, so the sum rounds x / 2⁻⁹, a subnormal's code.
    subnormal = (x * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(x < E4M3_MIN_NORMAL, subnormal, normal)
    return tl.where(x == x, code, E4M3_NAN).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """uint8 e4m3 ≥ 0 -> float16, exact."""
    value = ((code.to(tl.uint16) & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
    return tl.where(code == E4M3_NAN, float("nan"), value).to(tl.float16)


@triton.jit
def round_to_e2m1(x):
    """float32 ≥ 0 -> the nearest e2m1 value in float32, ties to the even code, saturating at 6. NaN stays NaN."""
    x = tl.minimum(x, E2M1_MAX, propagate_nan=tl.PropagateNan.ALL)
    power = tl.maximum(x.to(tl.int32, bitcast=True) & FLOAT32_EXPONENT, 0x3F800000).to(tl.float32, bitcast=True)
    # 1.5·2²² times the power of two below x is where float32 has e2m1's spacing there. Products are exact.
    return tl.fma(power, -6291456.0, tl.fma(power, 6291456.0, x))


@triton.jit
def encode_e2m1(value, x):
    """Codes (int32) of e2m1 magnitudes `value` (float32) with the signs of x; 0 has none."""
    # 2⁻¹²⁶ times e2m1's least normal number, 1, is float32's: both have their subnormals below, e2m1 one of them.
    code = (value * 2.0**-126).to(tl.int32, bitcast=True) >> 22
    return tl.where(code == 0, 0, code | ((x.to(tl.int32, bitcast=True) >> 28) & 8))


@triton.jit
def decode_e2m1(packed):
    """uint8 (rows, k/2), the first element in the low nibble -> float16 (rows, k), exact."""
    low, high = (packed & 0xF).to(tl.uint16), (packed >> 4).to(tl.uint16)
    code = tl.reshape(tl.join(low, high), (packed.shape[0], packed.shape[1] * 2))
    return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def dequantize(packed, scale):
    """NVFP4 (rows, k/2) with scales (rows, k/16), uint8 -> float16 (rows, k), exact."""
    elements = decode_e2m1(packed)
    groups = tl.reshape(elements, (packed.shape[0], packed.shape[1] // 8, 16))
    return tl.reshape(groups * decode_e4m3(scale)[:, :, None], (packed.shape[0], packed.shape[1] * 2)).to(tl.float16)


@triton.jit
def native_reciprocal(x):
    """1 / x by the special function unit, accurate to 1 ulp; 1 / 0 is infinite."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def split_eights(x):
    """(rows, 8n) -> the eight (rows, n) of elements 0…7 of every eight."""
    x = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 2, 2, 2))
    even, odd = tl.split(x)
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def native_pack_e2m1(x):
    """float32 (rows, 8n) -> int32 (rows, n), eight e2m1 codes each, round to nearest even, saturating at ±6."""
    x0, x1, x2, x3, x4, x5, x6, x7 = split_eights(x)
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b8 b0, b1, b2, b3;
            cvt.rn.satfinite.e2m1x2.f32 b0, $2, $1;
            cvt.rn.satfinite.e2m1x2.f32 b1, $4, $3;
            cvt.rn.satfinite.e2m1x2.f32 b2, $6, $5;
            cvt.rn.satfinite.e2m1x2.f32 b3, $8, $7;
            mov.b32 $0, {b0, b1, b2, b3};
        }
        """,
        "=r,f,f,f,f,f,f,f,f",
        [x0, x1, x2, x3, x4, x5, x6, x7],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def native_bytes(words):
    """int32 (rows, n) -> uint8 (rows, 4n), the lowest byte first; no instruction."""
    pairs = tl.join(words, words)
    copies = tl.reshape(tl.join(pairs, pairs), (words.shape[0], words.shape[1] * 4))
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [copies], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def native_sum_of_eight(words):
    """Twice the sum of the eight e2m1 ≥ 0 of each word: int32.

    A byte permutation looks codes up in the table 0, 1, 2, 3, 4, 6, 8, 12, four at a time.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 low, high;
            shr.u32 high, $1, 16;
            prmt.b32 low, 0x03020100, 0x0C080604, $1;
            prmt.b32 high, 0x03020100, 0x0C080604, high;
            dp4a.u32.u32 low, low, 0x01010101, 0;
            dp4a.u32.u32 $0, high, 0x01010101, low;
        }
        """,
        "=r,r",
        [words],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
