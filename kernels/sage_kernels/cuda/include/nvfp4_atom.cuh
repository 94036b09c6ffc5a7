// A warp's matrix product in NVFP4, and the rounding of its left operand: as instructions of GPUs with FP4 (compute
// capability 12.x), or emulated on any GPU from 8.9 on, with the same fragments and the same bits except for the order
// of sums. Source of the fragments: PTX ISA, "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64".
//
// Lane 4g + t has words of 8 e2m1 codes, the first in the lowest bits:
//   A (16 rows, 64 deep):    a[0] = row g, 8t…8t+7; a[1] = row g + 8, the same; a[2], a[3] = these rows, 32 + 8t….
//   B (64 deep, 8 columns):  b[0] = column g, 8t…8t+7; b[1] = column g, 32 + 8t….
//   D (16 rows, 8 columns):  d[0], d[1] = row g, columns 2t and 2t + 1; d[2], d[3] = row g + 8, the same.
// A word of scales has 4 bytes in e4m3, each for 16 of the depth. Lane 4(m % 8) + 2·a_thread + m / 8 has row m's word,
// lane 4n + b_thread column n's. Both threads are constants: a register of scales serves 2 or 4 products.
//
// The host provides NATIVE_FP4.
#pragma once
#include "numbers.cuh"

ASSERT_FLAG(NATIVE_FP4, "whether products in NVFP4 are instructions, or emulated");

#if NATIVE_FP4
#define FP4_PRODUCT(A_THREAD, B_THREAD)                                                                       \
  if (a_thread == A_THREAD && b_thread == B_THREAD)                                                           \
  asm volatile(                                                                                               \
      "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "   \
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%13}, {%14, %15};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scales), "n"(0), "n"(A_THREAD),   \
        "r"(b_scales), "n"(0), "n"(B_THREAD))

// Add a product: d += A·B.
DEVICE void add_product(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, uint32 a_scales, uint32 b_scales,
                        int a_thread, int b_thread) {
  FP4_PRODUCT(0, 0);
  FP4_PRODUCT(0, 1);
  FP4_PRODUCT(0, 2);
  FP4_PRODUCT(0, 3);
  FP4_PRODUCT(1, 0);
  FP4_PRODUCT(1, 1);
  FP4_PRODUCT(1, 2);
  FP4_PRODUCT(1, 3);
}

// Round eight numbers ≥ 0 to e2m1, ties to even, saturating at 6; NaN becomes 6.
DEVICE uint32 to_e2m1(const float (&x)[8]) {
  uint32 codes;
  asm("{ .reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d}; }"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return codes;
}
#else
DEVICE uint32 multiply_halves(uint32 a, uint32 b) {
  uint32 y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Return the scale in byte `number` as float16, in both halves.
DEVICE uint32 scale_of(uint32 scales, int number) {
  uint32 y;
  const uint16 twice = __byte_perm(scales, 0, number * 0x11) & 0xFFFF;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(twice));
  return y;
}

// Return codes `pair` and `pair` + 4 of a word, times a scale, exactly, in float16.
DEVICE uint32 decode(uint32 codes, int pair, uint32 scale) {
  const uint32 x = codes >> 4 * pair;
  // With e2m1's bits as float16's lowest exponent bits and first fraction bit, numbers are 2⁻¹⁴ of their values.
  const uint32 small = (x & 0x00070007) << 9 | (x & 0x00080008) << 12;
  return multiply_halves(multiply_halves(small, 0x74007400), scale);
}

DEVICE void add_product(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, uint32 a_scales, uint32 b_scales,
                        int a_thread, int b_thread) {
  const int lane = threadIdx.x % 32, quad = lane / 4 * 4, half = lane % 4 / 2;
  const uint32 of_rows[2] = {__shfl_sync(~0u, a_scales, quad + 2 * a_thread),
                             __shfl_sync(~0u, a_scales, quad + 2 * a_thread + 1)};
  const uint32 of_column = __shfl_sync(~0u, b_scales, quad + b_thread);
#pragma unroll
  for (int k = 0; k < 2; k++) {  // of 32 each
    const uint32 row_scales[2] = {scale_of(of_rows[0], 2 * k + half), scale_of(of_rows[1], 2 * k + half)};
    const uint32 column_scale = scale_of(of_column, 2 * k + half), column = k == 0 ? b0 : b1;
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2)
      // A 16-bit product may take a lane's elements in any order of the depth, if A and B agree.
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(decode(a[2 * k], pair, row_scales[0])), "r"(decode(a[2 * k + 1], pair, row_scales[1])),
            "r"(decode(a[2 * k], pair + 1, row_scales[0])), "r"(decode(a[2 * k + 1], pair + 1, row_scales[1])),
            "r"(decode(column, pair, column_scale)), "r"(decode(column, pair + 1, column_scale)));
  }
}

DEVICE uint32 to_e2m1(const float (&x)[8]) {
  uint32 codes = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float y = fminf(x[i], 6.0f);
    // Around 1.5·2²² times the power of two below y, float32 has the spacing that e2m1 has at y. Products are exact.
    const float power = __int_as_float(max(__float_as_int(y) & 0x7F800000, 0x3F800000));
    const float rounded = __fmaf_rn(power, -6291456.0f, __fmaf_rn(power, 6291456.0f, y));
    // Times 2⁻¹²⁶, e2m1's least normal number, 1, becomes float32's, and e2m1's only subnormal a float32 subnormal.
    codes |= __float_as_uint(__fmul_rn(rounded, 1.1754943508222875e-38f)) >> 22 << 4 * i;
  }
  return codes;
}
#endif

// Return twice the sum of eight e2m1 numbers ≥ 0.
DEVICE int doubled_sum(uint32 codes) {
  const uint32 low = look_up(0x03020100, 0x0C080604, codes), high = look_up(0x03020100, 0x0C080604, codes >> 16);
  return __dp4a(high, 0x01010101u, __dp4a(low, 0x01010101u, 0u));
}

// Decode four numbers in e4m3, the first from the lowest byte.
DEVICE void from_e4m3(uint32 codes, float (&x)[4]) {
  uint32 halves[2];
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(codes));
#pragma unroll
  for (int i = 0; i < 4; i += 2)
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(x[i]), "=f"(x[i + 1])
        : "r"(halves[i / 2]));
}
