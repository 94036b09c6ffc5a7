// Quantise groups of 16 numbers to NVFP4 with the bits of `formats/nvfp4.py`: the search for a scale, codes and scales.
//
// The host gives MAX_STEPS; SEARCHED, the number of `Recipe.scale_steps`; STEPS, these with commas between (0 where
// there are none); and the table of `nvfp4.search_table`.
#pragma once
#include "numbers.cuh"

constexpr int GROUP = 16;
constexpr uint32 LARGEST_SCALE_CODE = 0x7E, NAN_SCALE_CODE = 0x7F, LEAST_NORMAL_CODE = 8;
static_assert(MAX_STEPS == 7, "MAX_STEPS and the reciprocal must be a row of the table, 32 bytes");
static_assert(SEARCHED >= 0 && SEARCHED <= MAX_STEPS, "SEARCHED steps must fit a row of the table");
constexpr int SCALE_STEPS[] = {STEPS};

// What the GPU converts by itself.
#if __CUDA_ARCH__ >= 1000
constexpr bool NATIVE_E2M1 = true;
#else
constexpr bool NATIVE_E2M1 = false;
#endif

// A row of the search's table, for a nearest scale s: for each step the ratios s/c · 2⁻¹¹ (lower half) and c/s · 2¹¹ in
// float16, NaN where c is not tried; then 1/s, 1 where s is 0.
struct alignas(32) SearchRow {
  uint32 ratios[MAX_STEPS];
  float inverse;
};

DEVICE uint32 multiply_halves(uint32 a, uint32 b) {
  uint32 y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
DEVICE uint32 fma_halves(uint32 a, uint32 b, uint32 c) {
  uint32 y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
DEVICE uint32 negate_halves(uint32 a) {
  uint32 y;
  asm("neg.f16x2 %0, %1;" : "=r"(y) : "r"(a));
  return y;
}
// Multiply both halves of a by the lower one of b.
DEVICE uint32 multiply_by_lower(uint32 a, uint32 b) {
  uint32 y;
  asm("{ .reg .b16 l, h; .reg .b32 both; mov.b32 {l, h}, %2; mov.b32 both, {l, l}; mul.rn.f16x2 %0, %1, both; }"
      : "=r"(y)
      : "r"(a), "r"(b));
  return y;
}
// Multiply both halves of a by the upper one of b, and add c.
DEVICE uint32 fma_by_upper(uint32 a, uint32 b, uint32 c) {
  uint32 y;
  asm("{ .reg .b16 l, h; .reg .b32 both; mov.b32 {l, h}, %2; mov.b32 both, {h, h}; fma.rn.f16x2 %0, %1, both, %3; }"
      : "=r"(y)
      : "r"(a), "r"(b), "r"(c));
  return y;
}
// Return the sum of both halves, twice.
DEVICE uint32 sum_of_halves(uint32 a) {
  uint32 y;
  asm("{ .reg .b16 l, h; .reg .b32 lower, upper; mov.b32 {l, h}, %1; mov.b32 lower, {l, l}; mov.b32 upper, {h, h};\n"
      "add.rn.f16x2 %0, lower, upper; }"
      : "=r"(y)
      : "r"(a));
  return y;
}

// Encode x ≥ 0 as e4m3, rounding to nearest even, saturating at 448.
DEVICE uint32 e4m3_code(float x) {
#if __CUDA_ARCH__ >= 890
  uint16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(0.0f), "f"(x));
  return y;
#else
  const uint32 bits = __float_as_uint(fminf(x, 448.0f));
  const uint32 normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (127 - 7 << 3);
  // float32 numbers around 2²³ are integers, so the sum rounds x / 2⁻⁹ to the code of a subnormal.
  const uint32 subnormal = __float_as_uint(__fadd_rn(__fmul_rn(x, 512.0f), 8388608.0f)) & 0xFF;
  return x < 0.015625f ? subnormal : normal;
#endif
}

// Return the least power of two s with largest ≤ 448·6·s, 1 for 0; `inverse` becomes 1/s (`formats/power_of_two.py`).
DEVICE float least_power_of_two(float largest, float& inverse) {
  const int bits = __float_as_int(largest);
  int exponent = (bits >> 23) - 127 - 11 + ((bits & 0x7FFFFF) > 0x280000);  // 448·6 = 1.3125 · 2¹¹
  exponent = bits == 0 ? 0 : max(exponent, -126);
  inverse = __int_as_float(127 - exponent << 23);
  return __int_as_float(127 + exponent << 23);
}

// Return the code of the scale that `nvfp4.best_scale` chooses.
//
// largest: of the magnitudes, times `inverse`, which is what elements are multiplied by first.
DEVICE uint32 best_scale(const float (&x)[GROUP], float largest, uint32 nearest, float inverse,
                         const SearchRow* table) {
  const uint4* row = reinterpret_cast<const uint4*>(table + nearest);
  const uint4 low = __ldg(row), high = __ldg(row + 1);
  const uint32 ratios[MAX_STEPS + 1] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const float to_y = __fmul_rn(__fmul_rn(__uint_as_float(ratios[MAX_STEPS]), 0.125f), inverse);
  uint32 y[GROUP / 2];
#pragma unroll
  for (int i = 0; i < GROUP / 2; i++)
    y[i] = pack_float16(__fmul_rn(fabsf(x[2 * i]), to_y), __fmul_rn(fabsf(x[2 * i + 1]), to_y));
  // Return the error in both halves, whose bits order as errors do, given the ratios of a row.
  auto error_of = [&](uint32 ratio) {
    uint32 error;
#pragma unroll
    for (int i = 0; i < GROUP / 2; i++) {
      const uint32 q = multiply_by_lower(y[i], ratio) + 0x01000100 & 0xFE00FE00;
      const uint32 d = fma_by_upper(q, ratio, negate_halves(y[i]));
      error = i == 0 ? multiply_halves(d, d) : fma_halves(d, d, error);
    }
    return sum_of_halves(error);
  };
  uint32 least = error_of(0x68001000);  // 2⁻¹¹ and 2¹¹
  int best = 0;
#pragma unroll
  for (int i = 0; i < SEARCHED; i++) {
    const uint32 error = error_of(ratios[i]);
    bool better = error < least;
    if (SCALE_STEPS[i] < 0)  // a scale that is no smaller always fits
      better &= __fmul_rn(largest, __ldg(&table[max(static_cast<int>(nearest) + SCALE_STEPS[i], 0)].inverse)) < 7.0f;
    if (better) best = SCALE_STEPS[i], least = error;
  }
  return nearest + best;
}

// Encode eight numbers times `factor`, which are below 7, as e2m1, the first in the lowest bits; 0 has no sign.
DEVICE uint32 e2m1_codes(const float* x, float factor) {
#if __CUDA_ARCH__ >= 1000
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] = __fmul_rn(x[i], factor);
  uint32 codes;
  asm("{ .reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d}; }"
      : "=r"(codes)
      : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
  return codes & (((codes & 0x77777777) + 0x77777777) | 0x77777777);
#else
  // Times 2⁻¹⁴ e2m1's numbers are float16's with their codes in bits 9 to 11, the least one as a subnormal.
  const float to_half = __fmul_rn(factor, 1.0f / 16384);
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float z = __fmul_rn(x[i], to_half);
    // Around 1.5·2²² times the power of two below z, float32 has the spacing that e2m1 has at z. Products are exact.
    const float power = __int_as_float(max(__float_as_int(z) & 0x7F800000, 0x38800000));
    y[i] = __fmaf_rn(power, -6291456.0f, __fmaf_rn(power, 6291456.0f, z));
  }
  const uint32 even = __byte_perm(pack_float16(y[0], y[2]), pack_float16(y[4], y[6]), 0x7531);
  const uint32 odd = __byte_perm(pack_float16(y[1], y[3]), pack_float16(y[5], y[7]), 0x7531);
  return even >> 1 & 0x07070707 | even >> 4 & 0x08080808 | odd << 3 & 0x70707070 | odd & 0x80808080;
#endif
}

// Quantise a group: return its codes, and its scale's.
//
// largest: of the magnitudes, NaN where one is. inverse: a power of two, at most 2^±100, by which elements are
// multiplied.
DEVICE uint2 quantize_group(float (&x)[GROUP], float largest, float inverse, const SearchRow* table, uint32& scale) {
  const bool finite = largest < INFINITE;
  const float scaled = __fmul_rn(finite ? largest : 0.0f, inverse);
  scale = e4m3_code(__fmul_rn(scaled, 1.0f / 6.0f));
  if (SEARCHED > 0) scale = best_scale(x, scaled, scale, inverse, table);
  const float factor = __fmul_rn(__ldg(&table[scale].inverse), inverse);
  if (!NATIVE_E2M1 && (scale < LEAST_NORMAL_CODE || scale == LARGEST_SCALE_CODE)) {  // a coarse one, or saturated
    const float most = __fdividef(6.0f, factor);
#pragma unroll
    for (int i = 0; i < GROUP; i++) x[i] = fminf(fmaxf(x[i], -most), most);
  }
  uint2 codes = make_uint2(e2m1_codes(x, factor), e2m1_codes(x + 8, factor));
  if (!finite) scale = NAN_SCALE_CODE, codes = make_uint2(0, 0);
  return codes;
}

DEVICE float largest_magnitude(const float (&x)[GROUP]) {
  float y = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < GROUP; i++) asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(fabsf(x[i])));
  return y;
}
