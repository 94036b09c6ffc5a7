// Quantise groups of 16 numbers to NVFP4 with the bits of `formats/nvfp4.py`: the search for a scale, codes and scales.
//
// The host provides MAX_STEPS; FIRST_BIN, SEARCH_BINS, BIN_SHIFT and SEARCH_LIMIT of `search_groups`; for K, and for Q
// and V, the number of steps (KEY_SEARCHED, SEARCHED), the steps with commas between (KEY_STEPS, STEPS; 0 if there are
// none) and the table of `nvfp4.search_table`.
#pragma once
#include "numbers.cuh"

constexpr int GROUP = 16;
constexpr uint32 LARGEST_SCALE_CODE = 0x7E, NAN_SCALE_CODE = 0x7F, LEAST_NORMAL_CODE = 8;
static_assert(MAX_STEPS == 7, "MAX_STEPS must be 7: a factor and 7 steps fill a row, 32 bytes");
static_assert(SEARCHED >= 0 && SEARCHED <= MAX_STEPS, "SEARCHED steps must fit a row of the table");
static_assert(KEY_SEARCHED >= 0 && KEY_SEARCHED <= MAX_STEPS, "KEY_SEARCHED steps must fit a row of the table");
static_assert(BIN_SHIFT == 19, "BIN_SHIFT must be 19: a bin has float32's exponent and 4 more bits");

// Conversions that the GPU has as instructions.
#if __CUDA_ARCH__ >= 1000
constexpr bool NATIVE_E2M1 = true;
#else
constexpr bool NATIVE_E2M1 = false;
#endif

// A row of the search table, for the leading bits of a sixth of the group's amax: float16(1/s / 8) of the nearest scale
// s in the lower half, the code of s in the upper half; then for each step to a scale c, s/c · 2⁻¹¹ (lower half) and
// c/s · 2¹¹ in float16, NaN where c is not tried.
struct alignas(32) SearchRow {
  uint32 words[MAX_STEPS + 1];
};
constexpr uint32 SAME_RATIOS = 0x68001000;  // 2⁻¹¹ and 2¹¹

// The table's most-read rows, in shared memory: from SHARED_BIN on, for a sixth of the amax of 32 and more. The first
// 16 also serve rows down to LEAST_SHARED_BIN, for 2⁻⁵: rows a power of two apart differ only in the first word. From
// these rows, all steps lead to valid scales.
constexpr int SHARED_BIN = (127 + 5) << 4, LEAST_SHARED_BIN = (127 - 5) << 4, SHARED_ROWS = 64;
struct SharedSearch {
  uint4 first[SHARED_ROWS], others[SHARED_ROWS];  // halves of rows, to spread rows over the banks
};
struct Search {
  const SearchRow* table;
  const SharedSearch& shared;
};

// The scales that are tried around the nearest.
template <bool OF_KEY>
struct Steps {
  static constexpr int COUNT = OF_KEY ? KEY_SEARCHED : SEARCHED;
  // The steps, 0 first, 4 bits each, plus LEAST.
  static constexpr int LEAST = 4;
  static constexpr uint32 packed() {
    constexpr int of_key[] = {KEY_STEPS}, others[] = {STEPS};
    uint32 y = LEAST;
    for (int i = 0; i < COUNT; i++) y |= static_cast<uint32>((OF_KEY ? of_key[i] : others[i]) + LEAST) << 4 * (i + 1);
    return y;
  }
  static constexpr bool fit() {
    constexpr int of_key[] = {KEY_STEPS}, others[] = {STEPS};
    for (int i = 0; i < COUNT; i++) {
      const int step = OF_KEY ? of_key[i] : others[i];
      if (step < -LEAST || step > 15 - LEAST) return false;
    }
    return true;
  }
  static_assert(fit(), "steps must be -4 to 11");
};

// Copy the shared rows, if there are any steps; all threads of a block call, and synchronise.
template <bool OF_KEY>
DEVICE void load_search(const SearchRow* table, SharedSearch& shared) {
  constexpr int ROWS = SEARCH_BINS - (SHARED_BIN - FIRST_BIN);
  static_assert(ROWS > 48 && ROWS <= SHARED_ROWS, "SHARED_ROWS must hold the table's last rows");
  const uint4* from = reinterpret_cast<const uint4*>(table + SHARED_BIN - FIRST_BIN);
  for (int i = threadIdx.x; Steps<OF_KEY>::COUNT > 0 && i < 2 * ROWS; i += QUANTIZE_THREADS)
    (i % 2 ? shared.others : shared.first)[i / 2] = __ldg(from + i);
  __syncthreads();
}

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
// Multiply both halves of a by the lower half of b.
DEVICE uint32 multiply_by_lower(uint32 a, uint32 b) {
  uint32 y;
  asm("{ .reg .b16 l, h; .reg .b32 both; mov.b32 {l, h}, %2; mov.b32 both, {l, l}; mul.rn.f16x2 %0, %1, both; }"
      : "=r"(y)
      : "r"(a), "r"(b));
  return y;
}
// Multiply both halves of a by b's upper half, and add c.
DEVICE uint32 fma_by_upper(uint32 a, uint32 b, uint32 c) {
  uint32 y;
  asm("{ .reg .b16 l, h; .reg .b32 both; mov.b32 {l, h}, %2; mov.b32 both, {h, h}; fma.rn.f16x2 %0, %1, both, %3; }"
      : "=r"(y)
      : "r"(a), "r"(b), "r"(c));
  return y;
}
// Return the sum of both halves, in both halves.
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

// Return the larger magnitudes of both halves, NaN where either is.
DEVICE uint32 larger_halves(uint32 a, uint32 b) {
  uint32 y;
  asm("{ .reg .b32 x, z; abs.f16x2 x, %1; abs.f16x2 z, %2; max.NaN.f16x2 %0, x, z; }" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
DEVICE float half_of(uint32 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(static_cast<uint16>(x)));
  return y;
}

// Pack a group's elements, times `factor`, as float16: words of elements 0 and 2, 1 and 3, 4 and 6, 5 and 7, … Zeros
// lose their sign.
DEVICE void pack_group(const float (&x)[GROUP], float factor, uint32 (&halves)[GROUP / 2]) {
#pragma unroll
  for (int i = 0; i < GROUP / 2; i++) {
    const int first = i / 2 * 4 + i % 2;
    halves[i] = pack_float16(__fmaf_rn(x[first], factor, 0.0f), __fmaf_rn(x[first + 2], factor, 0.0f));
  }
}

// Return the largest magnitude of packed elements, NaN if any is.
DEVICE float largest_half(const uint32 (&halves)[GROUP / 2]) {
  uint32 y = halves[0];
#pragma unroll
  for (int i = 1; i < GROUP / 2; i++) y = larger_halves(y, halves[i]);
  y = larger_halves(y, y >> 16 | y << 16);
  return half_of(y & 0x7FFF);
}

// Return the codes of eight elements, given as float16 times 2^-14 in the order of `pack_group`.
DEVICE uint32 codes_of_halves(const uint32* halves) {
  uint32 y[4];
#pragma unroll
  for (int i = 0; i < 4; i++) y[i] = halves[i] + 0x01000100;
  const uint32 even = __byte_perm(y[0], y[2], 0x7531), odd = __byte_perm(y[1], y[3], 0x7531);
  const uint32 lower = even >> 1 & 0x07070707 | even >> 4 & ~0x07070707;
  const uint32 upper = odd << 3 & 0x70707070 | odd & ~0x70707070;
  return lower & 0x0F0F0F0F | upper & 0xF0F0F0F0;
}

// Quantise a group with the scale that `nvfp4.search_groups` chooses: return its codes, set its scale's code.
//
// halves: the elements in the order of `pack_group`. largest: their largest magnitude, or NaN.
template <bool OF_KEY>
DEVICE uint2 search_group(uint32 (&halves)[GROUP / 2], float largest, const Search& search, uint32& scale) {
  using S = Steps<OF_KEY>;
  const bool finite = largest < static_cast<float>(SEARCH_LIMIT);
  const int bits = __float_as_int(__fmul_rn(finite ? largest : 0.0f, 1.0f / 6.0f));
  const bool is_shared = bits >= LEAST_SHARED_BIN << BIN_SHIFT;
  // The scale's exponent below the shared row's, and the row's number.
  const int exponent = max((SHARED_BIN >> 4) - (bits >> 23), 0),
            number = (bits >> BIN_SHIFT) + 16 * exponent - SHARED_BIN;
  const SearchRow* row = search.table + max(bits >> BIN_SHIFT, FIRST_BIN) - FIRST_BIN;
  uint4 low, high;
  if (is_shared) {
    low = search.shared.first[number], high = search.shared.others[number];
    low.x += exponent * ((1 << 10) - (8 << 16));
  } else {
    low = __ldg(reinterpret_cast<const uint4*>(row)), high = __ldg(reinterpret_cast<const uint4*>(row) + 1);
  }
  const uint32 ratios[MAX_STEPS + 1] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < GROUP / 2; i++) halves[i] = multiply_by_lower(halves[i], ratios[0]);
  // Return the error in the upper half, whose bits order like errors, and four times the candidate's number below.
  auto error_of = [&](uint32 ratio, uint32 number) {
    uint32 error;
#pragma unroll
    for (int i = 0; i < GROUP / 2; i++) {
      const uint32 q = multiply_by_lower(halves[i], ratio) + 0x01000100 & 0xFE00FE00;
      const uint32 d = fma_by_upper(q, ratio, negate_halves(halves[i]));
      error = i == 0 ? multiply_halves(d, d) : fma_halves(d, d, error);
    }
    return __byte_perm(sum_of_halves(error), 4 * number, 0x3254);
  };
  uint32 least = error_of(SAME_RATIOS, 0);
#pragma unroll
  for (uint32 i = 1; i <= S::COUNT; i++) least = min(least, error_of(ratios[i], i));
  const uint32 best = least & 0x1F;
  uint32 ratio = SAME_RATIOS;
  if (best > 0) {
    const uint4* half = best < 16 ? search.shared.first : search.shared.others;
    ratio = is_shared ? reinterpret_cast<const uint32*>(half + number)[best / 4 % 4] : __ldg(row->words + best / 4);
  }
  scale = (ratios[0] >> 16) + (S::packed() >> best & 0xF) - S::LEAST;
#pragma unroll
  for (int i = 0; i < GROUP / 2; i++) halves[i] = multiply_by_lower(halves[i], ratio);
  uint2 codes = make_uint2(codes_of_halves(halves), codes_of_halves(halves + 4));
  if (!finite) scale = NAN_SCALE_CODE, codes = make_uint2(0, 0);
  return codes;
}

// Encode eight numbers times `factor`, below 7, as e2m1, the first in the lowest bits; 0 has no sign.
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
  // Times 2⁻¹⁴, e2m1's numbers are float16's with e2m1's codes in bits 9 to 11, the least as a subnormal.
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

// Quantise a group without a search: return its codes, set its scale's code.
//
// x: overwritten. largest: the largest magnitude, or NaN.
DEVICE uint2 quantize_group(float (&x)[GROUP], float largest, uint32& scale) {
  const bool finite = largest < INFINITE;
  scale = e4m3_code(__fmul_rn(finite ? largest : 0.0f, 1.0f / 6.0f));
  const float value = scale < LEAST_NORMAL_CODE ? __fmul_rn(static_cast<float>(scale), 1.0f / 512)
                                                : __int_as_float(scale + (127 - 7 << 3) << 20);
  const float factor = scale == 0 ? 1.0f : __frcp_rn(value);
  if (!NATIVE_E2M1 && (scale < LEAST_NORMAL_CODE || scale == LARGEST_SCALE_CODE)) {  // coarse, or saturated
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
