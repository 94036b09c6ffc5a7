// What Hopper's hardware does and C++ has no word for: barriers, the tensor memory accelerator (TMA), warpgroup matrix
// products. Source of the formats: PTX ISA, sections "mbarrier", "cp.async.bulk.tensor" and "wgmma".
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

#define DEVICE __device__ __forceinline__

struct alignas(64) TensorMap {
  uint64 opaque[16];
};

DEVICE uint32 shared_address(const void* p) { return static_cast<uint32>(__cvta_generic_to_shared(p)); }

// ---- Barriers ----

DEVICE void init(uint64& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals));
}

// One thread of the warp arrives.
DEVICE void arrive_as_warp(uint64& barrier) {
  asm volatile(
      "{\n.reg .pred elected;\n"
      "elect.sync _|elected, -1;\n"
      "@elected mbarrier.arrive.shared.b64 _, [%0];\n}" ::"r"(shared_address(&barrier))
      : "memory");
}

DEVICE void arrive(uint64& barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrive, and have the phase wait for so many bytes from the TMA.
DEVICE void arrive_expecting(uint64& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Wait until the phase of that parity is over.
DEVICE void wait(uint64& barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// A barrier of the hardware, by number: 0 is __syncthreads().
DEVICE void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Makes what was written to shared memory visible to the TMA and the matrix units.
DEVICE void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All threads of a cluster; what they wrote before is visible to the others.
DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The stream's next kernel may start as soon as all blocks of this one have called, or ended, if its launch allows it.
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Wait until the stream's previous kernel is over, and see all that it wrote.
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- TMA ----

// Load the map's box at (row, column) to shared memory; `barrier` is told of its bytes.
DEVICE void load_box(const TensorMap& map, void* into, uint64& barrier, int row, int column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(into)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier))
      : "memory");
}

// Of a map of three axes, at (batch, row, column).
DEVICE void load_box(const TensorMap& map, void* into, uint64& barrier, int batch, int row, int column) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared_address(into)),
      "l"(&map), "r"(column), "r"(row), "r"(batch), "r"(shared_address(&barrier))
      : "memory");
}

// Load bytes, a multiple of 16, to shared memory; `barrier` is told of them.
DEVICE void load_bytes(const void* from, void* into, uint64& barrier, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(into)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// Store a box from shared memory to the map's (batch, head, row, column), which is not waited for.
DEVICE void store_box(const TensorMap& map, const void* from, int batch, int head, int row, int column) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(from))
      : "memory");
}

// Wait until the boxes that this thread stores have been read.
DEVICE void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// ---- Warpgroup matrix products ----

template <int REGISTERS>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

DEVICE void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Uses of these registers stay behind the wait that completes them.
template <int N>
DEVICE void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <typename Integer, int N>
DEVICE void pin(Integer (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// Descriptor of an operand in shared memory whose rows along K are WIDTH bytes, swizzled over WIDTH bytes: its lower
// half. 16 bytes further along K add 1. Of a transposed operand rows lie along N, and those beyond the first WIDTH
// bytes of each are `apart` bytes behind.
DEVICE uint32 descriptor(const void* tile, int apart = 16) {
  return static_cast<uint32>(apart / 16) << 16 | (shared_address(tile) & 0x3FFFF) >> 4;
}
// The upper half.
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

// x (64 rows × 2·N columns of a warpgroup's registers) = A·Bᵀ, or += if ADD; A and B in INT8, 32 deep, their rows WIDTH
// bytes.
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

// x = A·Bᵀ in float16, or += if ADD, 16 deep; A in registers. B may lie TRANSPOSED in shared memory.
#define FLOAT16_PRODUCT(N, COLUMNS, A, B, LAYOUT_AT, ADD_AT, TRANSPOSED_AT)                                   \
  template <int WIDTH, bool TRANSPOSED, bool ADD>                                                             \
  DEVICE void add_float16_product(float (&x)[N], const uint32* a, uint32 b) {                                 \
    asm volatile(                                                                                             \
        "{ .reg .b64 b;\n"                                                                                    \
        "mov.b64 b, {" B ", " LAYOUT_AT                                                                       \
        "};\n"                                                                                                \
        "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.f16.f16 {" ACCUMULATORS_##N                      \
        "}, {" A "}, b, " ADD_AT ", 1, 1, " TRANSPOSED_AT "; }"                                               \
        : OPERANDS_##N("+f", x)                                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(LAYOUT<WIDTH>), "n"(ADD), "n"(TRANSPOSED)); \
  }
FLOAT16_PRODUCT(4, "8", "%4, %5, %6, %7", "%8", "%9", "%10", "%11")
FLOAT16_PRODUCT(32, "64", "%32, %33, %34, %35", "%36", "%37", "%38", "%39")
FLOAT16_PRODUCT(64, "128", "%64, %65, %66, %67", "%68", "%69", "%70", "%71")

// ---- Numbers ----

DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four numbers in e4m3, the first in the lowest byte.
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

// Two numbers in float16, the first in the lower half.
DEVICE uint32 pack_float16(float a, float b) {
  uint32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  return y;
}

// At most `largest` in magnitude; NaN stays NaN.
DEVICE float clamp(float x, float largest) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(largest));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-largest));
  return x;
}

// Two finite numbers of the output, or NaN, the first one in the lower half.
DEVICE uint32 to_bfloat16(float a, float b) {
  constexpr float largest = 3.3895313892515355e38f;
  uint32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(clamp(b, largest)), "f"(clamp(a, largest)));
  return y;
}
DEVICE uint32 to_float16(float a, float b) {
  constexpr float largest = 65504.0f;
  return pack_float16(clamp(a, largest), clamp(b, largest));
}
