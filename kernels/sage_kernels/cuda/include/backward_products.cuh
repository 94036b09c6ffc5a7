// The backward kernel's 64 × 64 matrix products A·B, in two forms: += if ADD, else =. With =, sums are outputs only, so
// that the compiler keeps no registers alive for them.
#pragma once
#include "wgmma.cuh"

constexpr int LINE_BYTES = 128;               // of 64 channels in 16 bits, adjacent in shared memory
constexpr int CHUNK_BYTES = 64 * LINE_BYTES;  // 64 tokens of 64 channels; the next 64 channels follow

// x = A·B in INT8, 32 deep; A in registers, B with rows of CHANNELS bytes.
#define INT8_64X64(SUMS)                                                                                        \
  asm volatile(                                                                                                 \
      "{ .reg .b64 b;\n"                                                                                        \
      "mov.b64 b, {%36, %37};\n"                                                                                \
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" ACCUMULATORS_32 "}, {%32, %33, %34, %35}, b, %38; }" \
      : OPERANDS_32(SUMS "r", x)                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(LAYOUT<CHANNELS>), "n"(ADD))
template <bool ADD>
DEVICE void multiply_int8(int (&x)[32], const uint32* a, uint32 b) {
  if constexpr (ADD)
    INT8_64X64("+");
  else
    INT8_64X64("=&");
}

// x = A·B in INT8; both in shared memory, with such rows.
#define SHARED_INT8_64X64(SUMS)                                                              \
  asm volatile(                                                                              \
      "{ .reg .b64 a, b;\n"                                                                  \
      "mov.b64 a, {%32, %34};\n"                                                             \
      "mov.b64 b, {%33, %34};\n"                                                             \
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" ACCUMULATORS_32 "}, a, b, %35; }" \
      : OPERANDS_32(SUMS "r", x)                                                             \
      : "r"(a), "r"(b), "n"(LAYOUT<CHANNELS>), "n"(ADD))
template <bool ADD>
DEVICE void multiply_shared_int8(int (&x)[32], uint32 a, uint32 b) {
  if constexpr (ADD)
    SHARED_INT8_64X64("+");
  else
    SHARED_INT8_64X64("=&");
}

// x = A·B in 16 bits, 16 deep; both TRANSPOSED, with rows across the summed axis, or neither, with rows along it.
#define SHARED_64X64(TYPE, SUMS)                                                       \
  asm volatile(                                                                        \
      "{ .reg .b64 a, b;\n"                                                            \
      "mov.b64 a, {%32, %34};\n"                                                       \
      "mov.b64 b, {%33, %34};\n"                                                       \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" ACCUMULATORS_32 \
      "}, a, b, %35, 1, 1, %36, "                                                      \
      "%36; }"                                                                         \
      : OPERANDS_32(SUMS "f", x)                                                       \
      : "r"(a), "r"(b), "n"(LAYOUT<LINE_BYTES>), "n"(ADD), "n"(TRANSPOSED))
template <bool TRANSPOSED, bool ADD>
DEVICE void multiply_shared(float (&x)[32], uint32 a, uint32 b) {
  if constexpr (FLOAT16 && ADD)
    SHARED_64X64("f16", "+");
  else if constexpr (FLOAT16)
    SHARED_64X64("f16", "=&");
  else if constexpr (ADD)
    SHARED_64X64("bf16", "+");
  else
    SHARED_64X64("bf16", "=&");
}

// x = A·B in 16 bits, 16 deep; A in registers, B TRANSPOSED or not.
#define REGISTERS_64X64(TYPE, SUMS)                                                    \
  asm volatile(                                                                        \
      "{ .reg .b64 b;\n"                                                               \
      "mov.b64 b, {%36, %37};\n"                                                       \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" ACCUMULATORS_32 \
      "}, {%32, %33, %34, %35}, b, "                                                   \
      "%38, 1, 1, %39; }"                                                              \
      : OPERANDS_32(SUMS "f", x)                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(LAYOUT<LINE_BYTES>), "n"(ADD), "n"(TRANSPOSED))
template <bool TRANSPOSED, bool ADD>
DEVICE void multiply_registers(float (&x)[32], const uint32* a, uint32 b) {
  if constexpr (FLOAT16 && ADD)
    REGISTERS_64X64("f16", "+");
  else if constexpr (FLOAT16)
    REGISTERS_64X64("f16", "=&");
  else if constexpr (ADD)
    REGISTERS_64X64("bf16", "+");
  else
    REGISTERS_64X64("bf16", "=&");
}

// x (64 × CHANNELS) += A·B in 16 bits, 16 deep; A in registers, B transposed.
DEVICE void add_to_gradient(float (&x)[CHANNELS / 2], const uint32* a, uint32 b) {
  if constexpr (FLOAT16)
    add_float16_product<LINE_BYTES, true, true>(x, a, b);
  else
    add_bfloat16_product<LINE_BYTES, true, true>(x, a, b);
}

// Keep the values of registers that products read until the products are done.
template <int N>
DEVICE void keep(const uint32 (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" ::"r"(x[i]) : "memory");
}
