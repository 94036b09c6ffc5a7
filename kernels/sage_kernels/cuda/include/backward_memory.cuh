// Shared memory of the backward kernel: matrices of registers, and sums that the TMA adds to memory. Source of the
// formats: PTX ISA, sections "stmatrix", "ldmatrix" and "cp.reduce.async.bulk".
#pragma once
#include "backward_rows.cuh"

// Store a thread's part of a tile of four 8 × 8 matrices in 16 bits; lane l gives the address of row l % 8 of matrix
// l / 8.
DEVICE void store_matrices(uint32 at, const uint32* x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
// Load a thread's part of four such matrices.
DEVICE void load_matrices(uint32 (&x)[4], uint32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
DEVICE void load_matrices_transposed(uint32 (&x)[4], uint32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}

DEVICE float4 load_shared4(uint32 at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
  return x;
}
DEVICE float2 load_shared2(uint32 at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
  return x;
}
DEVICE float load_shared(uint32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
  return x;
}
DEVICE void store_shared4(uint32 at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// Let the TMA add SUMS from shared memory to memory, without waiting.
#define ADD_TO_MEMORY(OPERATION)                                                                               \
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." OPERATION " [%0], [%1], %2;" ::"l"(into), \
               "r"(shared_address(from)), "r"(bytes)                                                           \
               : "memory")
DEVICE void add_to_memory(void* into, const void* from, int bytes) {
  if constexpr (SUMS == FLOAT32_SUMS)
    ADD_TO_MEMORY("add.f32");
  else if constexpr (SUMS == FLOAT16_SUMS)
    ADD_TO_MEMORY("add.noftz.f16");
  else
    ADD_TO_MEMORY("add.s32");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Wait until all except PENDING of this thread's additions have read shared memory.
template <int PENDING>
DEVICE void wait_additions_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Wait until this thread's additions are done.
DEVICE void wait_additions() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
