// The tensor memory accelerator (TMA), which copies boxes of tensors. Source of the formats: PTX ISA, section
// "cp.async.bulk.tensor".
#pragma once
#include "types.cuh"

struct alignas(64) TensorMap {
  uint64 opaque[16];
};

// Boxes go to the block's own shared memory, which PTX 8.6 can say. Consumer Blackwell, whose clusters share no memory,
// would otherwise check the target by a call.
#if __CUDA_ARCH__ >= 1000
#define INTO_SHARED "shared::cta"
#else
#define INTO_SHARED "shared::cluster"
#endif

// Load the map's box at (row, column) to shared memory; `barrier` counts its bytes.
DEVICE void load_box(const TensorMap& map, void* into, uint64& barrier, int row, int column) {
  asm volatile("cp.async.bulk.tensor.2d." INTO_SHARED
               ".global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(into)),
               "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier))
               : "memory");
}

// Load the box at (batch, row, column) of a map with three axes.
DEVICE void load_box(const TensorMap& map, void* into, uint64& barrier, int batch, int row, int column) {
  asm volatile("cp.async.bulk.tensor.3d." INTO_SHARED
               ".global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(into)),
               "l"(&map), "r"(column), "r"(row), "r"(batch), "r"(shared_address(&barrier))
               : "memory");
}

// Load the box at (batch, head, row, column) of a map with four axes.
DEVICE void load_box(const TensorMap& map, void* into, uint64& barrier, int batch, int head, int row, int column) {
  asm volatile("cp.async.bulk.tensor.4d." INTO_SHARED
               ".global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
               "[%6];" ::"r"(shared_address(into)),
               "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(&barrier))
               : "memory");
}

// Load bytes, a multiple of 16, to shared memory; `barrier` counts them.
DEVICE void load_bytes(const void* from, void* into, uint64& barrier, int bytes) {
  asm volatile("cp.async.bulk." INTO_SHARED
               ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(into)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// Store a box from shared memory to the map's (batch, head, row, column), without waiting.
DEVICE void store_box(const TensorMap& map, const void* from, int batch, int head, int row, int column) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(from))
      : "memory");
}

// Wait until the TMA has read the boxes that this thread stores.
DEVICE void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
