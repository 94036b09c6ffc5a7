// The producer of the NVFP4 forward kernel: a warp that brings tiles of 128 keys, with V, scales and the scores of Q's
// means, and heavy keys.
#pragma once
#include "nvfp4_items.cuh"
#include "tma.cuh"

// Copy 4 or 8 bytes to shared memory.
template <int BYTES>
DEVICE void copy_few(void* into, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(into)), "l"(from), "n"(BYTES)
               : "memory");
}

// Arrive when what this thread copies by `copy_few` is there.
DEVICE void arrive_when_copied(uint64& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

DEVICE void produce(const Arguments& a, const TensorMap& key, const TensorMap& value, const TensorMap& heavy_key,
                    const TensorMap& heavy_value, Shared& shared, Barriers& b) {
  const int lane = threadIdx.x % 32;
  Item item;
  Use use;
#pragma unroll 1
  for (int round = 0; next_item(a, round, item); round++) {
    const int64 row = static_cast<int64>(item.kv_pair(a)) * a.kv_rows;
    const uint8* key_scale = a.key_scale + row * K_SCALES;
    const uint8* value_scale = a.value_scale + static_cast<int64>(item.kv_pair(a)) * CHANNELS * (a.kv_rows / GROUP);
    const float* delta =
        a.delta +
        ((static_cast<int64>(item.sequence) * a.q_heads + item.head) * a.delta_blocks + item.block) * a.kv_rows;
#pragma unroll 1
    for (int tile = item.first_tile; tile < item.last_tile; tile++, use.next()) {
      Stage& stage = shared.stages[use.stage];
      uint64& full = b.full[use.stage];
      wait(b.empty[use.stage], use.parity ^ 1);
      if (lane == 0) {
        arrive_expecting(full, COPIED_BYTES);
        load_box(key, stage.key, full, static_cast<int>(row) + tile * BLOCK, 0);
        load_box(value, stage.value, full, item.kv_pair(a) * CHANNELS, tile * V_ROW);
        load_bytes(key_scale + static_cast<int64>(tile) * BLOCK * K_SCALES, stage.key_scale, full, BLOCK * K_SCALES);
        copy_few<4>(&stage.key_tensor_scale, a.key_tensor_scale + row / BLOCK + tile);
      }
      if (SMOOTH_Q) {
#pragma unroll
        for (int i = 0; i < BLOCK; i += 32)
          copy_few<8>(stage.delta + 2 * (i + lane), delta + tile * BLOCK + (i + lane) / 2 * 2);
      }
      // Scales of V lie 8 bytes together, and the TMA copies 16.
#pragma unroll
      for (int channel = 0; channel < CHANNELS; channel += 32)
        copy_few<V_SCALES>(stage.value_scale + (channel + lane) * V_SCALES,
                           value_scale + static_cast<int64>(channel + lane) * (a.kv_rows / GROUP) + tile * V_SCALES);
      arrive_when_copied(full);
    }
    if (HEAVY_KEYS > 0) {
      wait(b.heavy_empty, round & 1 ^ 1);
      if (lane == 0) {
        arrive_expecting(b.heavy_full, 2 * HEAVY_BYTES);
#pragma unroll
        for (int channel = 0; channel < CHANNELS; channel += 64) {
          load_box(heavy_key, shared.heavy_key + channel * 2 * HEAVY_KEYS, b.heavy_full, item.kv_pair(a) * HEAVY_KEYS,
                   channel);
          load_box(heavy_value, shared.heavy_value + channel * 2 * HEAVY_KEYS, b.heavy_full,
                   item.kv_pair(a) * HEAVY_KEYS, channel);
        }
      }
    }
  }
}
