// Load words and matrices from shared memory to registers, and multiply a warp's matrices in 16 bits. Source of the
// formats: PTX ISA, sections "ldmatrix" and "mma".
#pragma once
#include "numbers.cuh"

// Load words from shared memory, at a multiple of their bytes in all.
DEVICE void load_words(uint32 (&x)[1], uint32 address) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x[0]) : "r"(address) : "memory");
}
DEVICE void load_words(uint32 (&x)[2], uint32 address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
}
DEVICE void load_words(uint32 (&x)[4], uint32 address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// Load four matrices of 8 rows of 16 bytes: lane i gives the address of row i % 8 of matrix i / 8, and lane 4g + t gets
// word t of row g of each.
DEVICE void load_matrices(uint32 (&x)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// Load four matrices of 8×8 elements of 16 bits likewise: lane 4g + t gets elements g of rows 2t and 2t + 1.
DEVICE void load_transposed(uint32 (&x)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// Add a product of 16 rows and 8 columns, 16 deep, of float16 or bfloat16.
template <bool IS_FLOAT16>
DEVICE void add_16bit_product(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
#define PRODUCT_16BIT(TYPE)                                                           \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if (IS_FLOAT16)
    PRODUCT_16BIT("f16");
  else
    PRODUCT_16BIT("bf16");
#undef PRODUCT_16BIT
}

// Round two numbers to float16 or bfloat16; the first is in the lower half.
template <bool IS_FLOAT16>
DEVICE uint32 pack_16bit(float x, float y) {
  if (IS_FLOAT16) return pack_float16(x, y);
  uint32 z;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
  return z;
}

// Return the sum over the four threads of a product's row.
DEVICE float sum_of_quad(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
