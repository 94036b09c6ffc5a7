// The producer of the NVFP4 forward kernel: a warp that loads tiles of 128 keys, with V, scales and the scores of Q's
// means, and recent and heavy keys.
#pragma once
#include "nvfp4_items.cuh"
#include "tma.cuh"
#include "tokens.cuh"
#include "warp_recent_keys.cuh"

// Copy 4 or 8 bytes to shared memory.
template <int BYTES>
DEVICE void copy_few(void* into, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(into)), "l"(from), "n"(BYTES)
               : "memory");
}

// Arrive when this thread's asynchronous copies are done.
DEVICE void arrive_when_copied(uint64& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Copy 16 bytes to shared memory, or zeros unless they exist.
DEVICE void copy_or_clear(uint32 into, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(into), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// Return the address of a channel of an item's first key or value.
DEVICE const uint16* first_token(const Tokens& x, const Item& item, int channel) {
  return x.first + item.batch * x.batch_stride + item.kv_head * x.head_stride + channel;
}

// Load tiles of recent keys and their values.
DEVICE void produce_recent(const NVFP4ForwardArguments& a, const Tokens& key_tokens, const Tokens& value_tokens,
                           const Item& item, Shared& shared, Barriers& b, Use& use) {
  static_assert(RECENT_TILE == 32, "RECENT_TILE must be 32: a lane has one key");
  const int lane = threadIdx.x % 32, part = lane % LANES;
  const uint8* key_mask = a.key_mask + static_cast<int64>(item.batch) * a.key_mask_stride;
  const int* late = a.late + item.kv_pair(a) * LATE_KEYS;
  const uint16* keys = first_token(key_tokens, item, 8 * part);
  const uint16* values = first_token(value_tokens, item, 8 * part);
#pragma unroll 1
  for (int tile = item.first_recent(a), end = item.seen_keys(a); tile < end; tile += RECENT_TILE, use.next()) {
    const uint32 stage = shared_address(&shared.stages[use.stage]);
    uint64& full = b.full[use.stage];
    wait(b.empty[use.stage], use.parity ^ 1);
    if (lane == 0) arrive(full);
    // A lane finds the place of one key; below 0: none.
    const int place = FIRST_KEYS + tile + lane;
    int source = tile + lane < end ? place : -1;
    if (PADDED && source >= 0 && !key_mask[place]) source = -1;
    if constexpr (LATE_KEYS > 0) {
      // In place of a late key, rows attend to the first key that gave way to it.
      const int number = place & LATE_KEYS - 1;
      if (source >= 0 && __ldg(late + number) == place) source = FIRST_KEYS - LATE_KEYS + number;
    }
#pragma unroll 2
    for (int i = 0; i < RECENT_TILE / ROWS; i++) {
      const int number = i * ROWS + lane / LANES, of_key = __shfl_sync(~0u, source, number);
      const int64 token = max(of_key, 0);
      copy_or_clear(stage + place_of_key(number, part), keys + token * key_tokens.token_stride,
                    of_key >= 0 && 8 * part < a.head_dim);
      copy_or_clear(stage + VALUE + place_of_value(number, part), values + token * value_tokens.token_stride,
                    of_key >= 0 && 8 * part < a.v_head_dim);
    }
    arrive_when_copied(full);
  }
}

DEVICE void produce(const NVFP4ForwardArguments& a, const TensorMap& key, const TensorMap& value,
                    const TensorMap& heavy_key, const TensorMap& heavy_value, const Tokens& key_tokens,
                    const Tokens& value_tokens, Shared& shared, Barriers& b) {
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
        if (RECENT) fence_shared();  // not only the TMA writes here
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
      // 8 bytes of V's scales are adjacent; the TMA copies 16.
#pragma unroll
      for (int channel = 0; channel < CHANNELS; channel += 32)
        copy_few<V_SCALES>(stage.value_scale + (channel + lane) * V_SCALES,
                           value_scale + static_cast<int64>(channel + lane) * (a.kv_rows / GROUP) + tile * V_SCALES);
      arrive_when_copied(full);
    }
    if (RECENT) produce_recent(a, key_tokens, value_tokens, item, shared, b, use);
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
