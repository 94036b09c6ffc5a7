"""Device functions for e4m3 and e2m1, with the bits of `sage_kernels.formats`.

Functions named `native_…` use instructions of GPUs with FP4; all others run on any GPU and in the interpreter. Both
give the same bits.
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
    """Return the larger of a and b, NaN when either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def encode_e4m3(x):
    """Encode float32 ≥ 0 as uint8 e4m3, rounding to nearest even, saturating at 448; NaN stays NaN."""
    bits = tl.minimum(x, E4M3_MAX).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # float32 numbers around 2²³ are integers, so adding 2²³ rounds x / 2⁻⁹ to the code of a subnormal.
    subnormal = (x * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(x < E4M3_MIN_NORMAL, subnormal, normal)
    return tl.where(x == x, code, E4M3_NAN).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """Decode uint8 e4m3 ≥ 0 to float16, exact."""
    value = ((code.to(tl.uint16) & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
    return tl.where(code == E4M3_NAN, float("nan"), value).to(tl.float16)


@triton.jit
def round_to_e2m1(x):
    """Round float32 ≥ 0 to the nearest e2m1 value, ties to the even code, saturating at 6; NaN stays NaN."""
    x = tl.minimum(x, E2M1_MAX, propagate_nan=tl.PropagateNan.ALL)
    power = tl.maximum(x.to(tl.int32, bitcast=True) & FLOAT32_EXPONENT, 0x3F800000).to(tl.float32, bitcast=True)
    # Around 1.5·2²² times the power of two below x, float32 has the same spacing as e2m1 at x. Products are exact.
    return tl.fma(power, -6291456.0, tl.fma(power, 6291456.0, x))


@triton.jit
def encode_e2m1(value, x):
    """Return int32 codes of e2m1 magnitudes `value` (float32) with the signs of x; 0 has none."""
    # Times 2⁻¹²⁶, e2m1's least normal number, 1, becomes float32's, and e2m1's only subnormal becomes a float32
    # subnormal.
    code = (value * 2.0**-126).to(tl.int32, bitcast=True) >> 22
    return tl.where(code == 0, 0, code | ((x.to(tl.int32, bitcast=True) >> 28) & 8))


@triton.jit
def decode_e2m1(packed):
    """Decode e2m1, uint8 (rows, k/2) with the first element in the low nibble, to float16 (rows, k), exact."""
    low, high = (packed & 0xF).to(tl.uint16), (packed >> 4).to(tl.uint16)
    code = tl.reshape(tl.join(low, high), (packed.shape[0], packed.shape[1] * 2))
    return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def dequantize(packed, scale):
    """Decode NVFP4, uint8 codes (rows, k/2) and scales (rows, k/16), to float16 (rows, k), exact."""
    elements = decode_e2m1(packed)
    groups = tl.reshape(elements, (packed.shape[0], packed.shape[1] // 8, 16))
    return tl.reshape(groups * decode_e4m3(scale)[:, :, None], (packed.shape[0], packed.shape[1] * 2)).to(tl.float16)


@triton.jit
def native_log2(x):
    """Return the binary logarithm of x ≥ 0 by the special function unit; -inf for 0."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def split_by_8(x):
    """Split x (rows, 8n) into eight tensors (rows, n): elements 0…7 of each 8 consecutive elements."""
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
def join_by_8(x0, x1, x2, x3, x4, x5, x6, x7):
    """Join eight tensors (rows, n) to (rows, 8n), the inverse of `split_by_8`."""
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (x0.shape[0], x0.shape[1] * 8))


@triton.jit
def native_pack_e2m1(x):
    """Round float32 (rows, 8n) ≥ 0 to e2m1, ties to even, saturating at 6.

    Returns:
        (words, sums): int32 (rows, n), eight codes each, and twice the sum of their values. A byte permutation looks up
        four codes at a time in the table 0, 1, 2, 3, 4, 6, 8, 12.
    """
    x0, x1, x2, x3, x4, x5, x6, x7 = split_by_8(x)
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b8 b0, b1, b2, b3;
            .reg .b32 high, low;
            cvt.rn.satfinite.e2m1x2.f32 b0, $3, $2;
            cvt.rn.satfinite.e2m1x2.f32 b1, $5, $4;
            cvt.rn.satfinite.e2m1x2.f32 b2, $7, $6;
            cvt.rn.satfinite.e2m1x2.f32 b3, $9, $8;
            mov.b32 $0, {b0, b1, b2, b3};
            shr.u32 high, $0, 16;
            prmt.b32 low, 0x03020100, 0x0C080604, $0;
            prmt.b32 high, 0x03020100, 0x0C080604, high;
            dp4a.u32.u32 low, low, 0x01010101, 0;
            dp4a.u32.u32 $1, high, 0x01010101, low;
        }
        """,
        "=&r,=r,f,f,f,f,f,f,f,f",
        [x0, x1, x2, x3, x4, x5, x6, x7],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def native_bytes(words):
    """View int32 (rows, n) as uint8 (rows, 4n), the lowest byte first; takes no instruction.

    Correct only if a thread holds the four bytes of a word one after the other, as MMA instructions need; a test
    reads the layouts that the compiler chose.
    """
    pairs = tl.join(words, words)
    copies = tl.reshape(tl.join(pairs, pairs), (words.shape[0], words.shape[1] * 4))
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [copies], dtype=tl.uint8, is_pure=True, pack=4)
