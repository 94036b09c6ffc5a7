// Warpgroup matrix products, and the registers of warpgroups. Source of the formats: PTX ISA, sections "wgmma" and
// "setmaxnreg".
#pragma once
#include "types.cuh"

template <int REGISTERS>
DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Return the lower half of the descriptor of an operand in shared memory whose rows along K are WIDTH bytes, swizzled
// over WIDTH bytes. A step of 16 bytes along K adds 1. A transposed operand's rows lie along N; the part beyond their
// first WIDTH bytes begins `apart` bytes behind.
DEVICE uint32 descriptor(const void* tile, int apart = 16) {
  return static_cast<uint32>(apart / 16) << 16 | (shared_address(tile) & 0x3FFFF) >> 4;
}
// LAYOUT is the upper half of the descriptor.
template <int WIDTH>
constexpr uint32 SWIZZLE = WIDTH == 128  ? 1
                           : WIDTH == 64 ? 2
                                         : 3;
template <int WIDTH>
constexpr uint32 LAYOUT = SWIZZLE<WIDTH> << 30 | 8 * WIDTH / 16;

#define ACCUMULATORS_4 "%0, %1, %2, %3"
#define ACCUMULATORS_32                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ACCUMULATORS_48 \
  ACCUMULATORS_32       \
  ", "                  \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define ACCUMULATORS_64 \
  ACCUMULATORS_48       \
  ", "                  \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OPERANDS_4(kind, x) kind(x[0]), kind(x[1]), kind(x[2]), kind(x[3])
#define OPERANDS_8(kind, x, i)                                                                                \
  kind(x[i]), kind(x[i + 1]), kind(x[i + 2]), kind(x[i + 3]), kind(x[i + 4]), kind(x[i + 5]), kind(x[i + 6]), \
      kind(x[i + 7])
#define OPERANDS_32(kind, x) \
  OPERANDS_8(kind, x, 0), OPERANDS_8(kind, x, 8), OPERANDS_8(kind, x, 16), OPERANDS_8(kind, x, 24)
#define OPERANDS_48(kind, x) OPERANDS_32(kind, x), OPERANDS_8(kind, x, 32), OPERANDS_8(kind, x, 40)
#define OPERANDS_64(kind, x) OPERANDS_48(kind, x), OPERANDS_8(kind, x, 48), OPERANDS_8(kind, x, 56)

// x (64 rows × 2·N columns of a warpgroup's registers) = A·Bᵀ, or += if ADD; A and B in INT8, 32 deep, with rows of
// WIDTH bytes.
#define INT8_PRODUCT(N, COLUMNS, A, B, LAYOUT_AT, ADD_AT)                                                       \
  template <int WIDTH, bool ADD>                                                                                \
  DEVICE void add_product(int (&x)[N], uint32 a, uint32 b) {                                                    \
    asm volatile(                                                                                               \
        "{ .reg .b64 a, b;\n"                                                                                   \
        "mov.b64 a, {" A ", " LAYOUT_AT                                                                         \
        "};\n"                                                                                                  \
        "mov.b64 b, {" B ", " LAYOUT_AT                                                                         \
        "};\n"                                                                                                  \
        "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.s32.s8.s8 {" ACCUMULATORS_##N "}, a, b, " ADD_AT "; }" \
        : OPERANDS_##N("+r", x)                                                                                 \
        : "r"(a), "r"(b), "n"(LAYOUT<WIDTH>), "n"(ADD));                                                        \
  }
INT8_PRODUCT(48, "96", "%48", "%49", "%50", "%51")
INT8_PRODUCT(64, "128", "%64", "%65", "%66", "%67")

// x = A·Bᵀ in e4m3, or += if ADD, 32 deep; A in registers.
#define E4M3_PRODUCT(N, COLUMNS, A, B, LAYOUT_AT, ADD_AT)                                                           \
  template <int WIDTH, bool ADD>                                                                                    \
  DEVICE void add_product(float (&x)[N], const uint32* a, uint32 b) {                                               \
    asm volatile(                                                                                                   \
        "{ .reg .b64 b;\n"                                                                                          \
        "mov.b64 b, {" B ", " LAYOUT_AT                                                                             \
        "};\n"                                                                                                      \
        "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.f32.e4m3.e4m3 {" ACCUMULATORS_##N "}, {" A "}, b, " ADD_AT \
                                                                                           ", 1, 1; }"              \
        : OPERANDS_##N("+f", x)                                                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(LAYOUT<WIDTH>), "n"(ADD));                        \
  }
E4M3_PRODUCT(4, "8", "%4, %5, %6, %7", "%8", "%9", "%10")
E4M3_PRODUCT(32, "64", "%32, %33, %34, %35", "%36", "%37", "%38")
E4M3_PRODUCT(64, "128", "%64, %65, %66, %67", "%68", "%69", "%70")

// x = A·Bᵀ in 16 bits, or += if ADD, 16 deep; A in registers. B may lie TRANSPOSED in shared memory.
#define PRODUCT_16BIT(NAME, TYPE, N, COLUMNS, A, B, LAYOUT_AT, ADD_AT, TRANSPOSED_AT)                         \
  template <int WIDTH, bool TRANSPOSED, bool ADD>                                                             \
  DEVICE void NAME(float (&x)[N], const uint32* a, uint32 b) {                                                \
    asm volatile(                                                                                             \
        "{ .reg .b64 b;\n"                                                                                    \
        "mov.b64 b, {" B ", " LAYOUT_AT                                                                       \
        "};\n"                                                                                                \
        "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" ACCUMULATORS_##N            \
        "}, {" A "}, b, " ADD_AT ", 1, 1, " TRANSPOSED_AT "; }"                                               \
        : OPERANDS_##N("+f", x)                                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(LAYOUT<WIDTH>), "n"(ADD), "n"(TRANSPOSED)); \
  }
#define PRODUCTS_16BIT(NAME, TYPE)                                                      \
  PRODUCT_16BIT(NAME, TYPE, 4, "8", "%4, %5, %6, %7", "%8", "%9", "%10", "%11")         \
  PRODUCT_16BIT(NAME, TYPE, 32, "64", "%32, %33, %34, %35", "%36", "%37", "%38", "%39") \
  PRODUCT_16BIT(NAME, TYPE, 64, "128", "%64, %65, %66, %67", "%68", "%69", "%70", "%71")
PRODUCTS_16BIT(add_float16_product, "f16")
PRODUCTS_16BIT(add_bfloat16_product, "bf16")

// x = A·Bᵀ in 16 bits, or += if ADD, 16 deep; A and B in shared memory, with rows of WIDTH bytes.
#define SHARED_PRODUCT(TYPE, N, COLUMNS, A, B, LAYOUT_AT, ADD_AT)                                                   \
  asm volatile(                                                                                                     \
      "{ .reg .b64 a, b;\n"                                                                                         \
      "mov.b64 a, {" A ", " LAYOUT_AT                                                                               \
      "};\n"                                                                                                        \
      "mov.b64 b, {" B ", " LAYOUT_AT                                                                               \
      "};\n"                                                                                                        \
      "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" ACCUMULATORS_##N "}, a, b, " ADD_AT \
                                                                                                 ", 1, 1, 0, 0; }"  \
      : OPERANDS_##N("+f", x)                                                                                       \
      : "r"(a), "r"(b), "n"(LAYOUT<WIDTH>), "n"(ADD))
#define SHARED_16BIT_PRODUCT(N, COLUMNS, A, B, LAYOUT_AT, ADD_AT)           \
  template <int WIDTH, bool IS_FLOAT16, bool ADD>                           \
  DEVICE void add_shared_16bit_product(float (&x)[N], uint32 a, uint32 b) { \
    if constexpr (IS_FLOAT16)                                               \
      SHARED_PRODUCT("f16", N, COLUMNS, A, B, LAYOUT_AT, ADD_AT);           \
    else                                                                    \
      SHARED_PRODUCT("bf16", N, COLUMNS, A, B, LAYOUT_AT, ADD_AT);          \
  }
SHARED_16BIT_PRODUCT(4, "8", "%4", "%5", "%6", "%7")
SHARED_16BIT_PRODUCT(32, "64", "%32", "%33", "%34", "%35")
