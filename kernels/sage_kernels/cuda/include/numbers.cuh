// Number formats and conversions.
#pragma once
#include "types.cuh"

DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Round four numbers to e4m3; the first is in the lowest byte.
DEVICE uint32 to_e4m3(float a, float b, float c, float d) {
  uint32 y;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high}; }"
      : "=r"(y)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
}

DEVICE float from_bfloat16(uint16 x) { return __uint_as_float(static_cast<uint32>(x) << 16); }

#define INFINITE __int_as_float(0x7F800000)

// Round two numbers to float16; the first is in the lower half.
DEVICE uint32 pack_float16(float a, float b) {
  uint32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  return y;
}
// Round two numbers to bfloat16; the first is in the lower half.
DEVICE uint32 pack_bfloat16(float a, float b) {
  uint32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  return y;
}

// Round two numbers as `transforms.round_finite` does: finite numbers beyond the dtype's range become its largest
// number; infinities become NaN, by x · 0 + x. The first is in the lower half.
DEVICE uint32 to_bfloat16(float a, float b) {
  uint32 y;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(__fmaf_rn(b, 0.0f, b)), "f"(__fmaf_rn(a, 0.0f, a)));
  return y;
}
DEVICE uint32 to_float16(float a, float b) {
  uint32 y;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(__fmaf_rn(b, 0.0f, b)), "f"(__fmaf_rn(a, 0.0f, a)));
  return y;
}

// Look up the bytes of a table of 8 by four numbers below 8, each in 4 bits; unlike __byte_perm, do not mask the
// numbers.
DEVICE uint32 look_up(uint32 first_four, uint32 others, uint32 numbers) {
  uint32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(first_four), "r"(others), "r"(numbers));
  return y;
}
