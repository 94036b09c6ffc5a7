// Heavy keys of a warp's rows. They lie in shared memory, with the 16-byte parts of their lines swizzled by key; K's
// channels are in the order of `layout.heavy_order`.
#pragma once
#include "warp_16bit_keys.cuh"

// Heavy keys, and limits of a warp's rows.
struct HeavyKeys {
  uint32 keys, values;    // addresses in shared memory
  int seen_keys;          // if IS_CAUSAL: keys that the thread's first row may attend to
  const int* late;        // numbers of the late keys, if any
  const uint8* key_mask;  // of each key, 0 where it does not exist; null: all exist
  float scale;            // of scores, to base 2
  float p_log2;           // of the largest P, to base 2
};

// Attend to KEYS heavy keys.
//
// acc, row_max, row_sum, denominators: see `merge_keys`. IS_CAUSAL, HAS_KEY_MASK: `seen_keys` and `key_mask` count. The
// last LATE of the heavy keys are late keys: rows that see a late key do not attend here to the first key that gave way
// to it.
template <int KEYS, int LATE, bool IS_CAUSAL, bool HAS_KEY_MASK, int BLOCKS>
DEVICE void attend_to_heavy_keys(const HeavyKeys& heavy, const QueryRows& query, float (&acc)[BLOCKS][4],
                                 float (&row_max)[2], float (&row_sum)[2], float (&denominators)[2]) {
  constexpr int LINE = 2 * LINE_CHANNELS * KEYS;
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // compute addresses here, to keep no registers from item to item
  const int quad = lane % 4;
  [[maybe_unused]] uint32 sees_late = 0;  // bits of the thread's late keys, a quarter of all, for each row
  if constexpr (LATE > 0) {
#pragma unroll
    for (int i = 0; i < LATE / 2; i++) {
      const int key = i % (LATE / 4) / 2 * 8 + i % 2, row = i / (LATE / 4) * 8;
      if (__ldg(heavy.late + key + 2 * quad) < heavy.seen_keys + row) sees_late |= 1u << i;
    }
    asm volatile("" : "+r"(sees_late));  // keep one register, not the keys' numbers
  }
  float x[KEYS / 8][4] = {};
  auto load_key = [&](uint32(&k)[4], int section, int block) {
    load_matrices(k, heavy.keys + section / 2 * LINE + (8 * block + lane % 8) * 128 +
                         ((section % 2 * 4 + lane / 8) ^ lane % 8) * 16);
  };
  find_16bit_scores<KEYS>(query, load_key, x);
  uint32 exists[2] = {~0u, ~0u};
  if (HAS_KEY_MASK) {
#pragma unroll
    for (int i = 0; i < 2; i++) exists[i] = __ballot_sync(~0u, heavy.key_mask[i * 32 + lane]) >> 2 * quad;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int seen = heavy.seen_keys + 8 * r;
    auto is_hidden = [&](int key) {
      if constexpr (LATE > 0) {
        const bool sees = sees_late >> (r * (LATE / 4) + key % LATE / 8 * 2 + key % 2) & 1;
        if (key >= KEYS - LATE) return !sees;
        if (key >= KEYS - 2 * LATE && sees) return true;
      }
      return IS_CAUSAL && key + 2 * quad >= seen || HAS_KEY_MASK && !(exists[key / 32] >> key % 32 & 1);
    };
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
      float& score = x[i / 2][2 * r + i % 2];
      score = is_hidden(i / 2 * 8 + i % 2) ? -INFINITE : score * heavy.scale;
    }
  }
  merge_keys<KEYS>(x, heavy.values, heavy.p_log2, lane, acc, row_max, row_sum, denominators);
}
