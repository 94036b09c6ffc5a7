// Recent keys, in tiles that the producer copies to a stage: K and V in 16 bits take the place of 128 keys' K and V in
// 4 bits. It does the same as `triton/common/recent.py`.
#pragma once
#include "nvfp4_items.cuh"
#include "warp_16bit_keys.cuh"

// Return the place of 8 channels of a key in a tile: each of eight lanes that load K reads banks of its own.
DEVICE int place_of_key(int key, int part) {
  return part / 8 * 2 * LINE_CHANNELS * RECENT_TILE + key * 128 + (part % 8 ^ key % 2 * 4) * 16;
}
// Return the place of 8 channels of a key's value (`merge_keys`).
DEVICE int place_of_value(int key, int part) {
  return part / 8 * 2 * LINE_CHANNELS * RECENT_TILE + key * 128 + (part % 8 ^ key % 8) * 16;
}

// A tile of recent keys, and facts of a warp's rows.
struct RecentKeys {
  int lane;               // of the thread
  uint32 stage;           // address in shared memory
  int seen_keys;          // keys of the tile that the thread's first row may attend to; 8 more for the second
  int tile_keys;          // keys of the tile that the sequence has
  const uint8* key_mask;  // of each key of the tile, 0 where it does not exist; null: all exist
  float mean_scores[2];   // both rows' products with K's mean, which other scores lack
  float scale;            // of scores, to base 2
  float p_log2;           // of the largest P, to base 2
};

// Attend to a tile. acc, row_max, row_sum, denominators: see `merge_keys`. HAS_KEY_MASK: `key_mask` counts.
template <bool HAS_KEY_MASK, int BLOCKS>
DEVICE void attend_to_recent_keys(const RecentKeys& recent, const QueryRows& query, float (&acc)[BLOCKS][4],
                                  float (&row_max)[2], float (&row_sum)[2], float (&denominators)[2]) {
  const int lane = recent.lane, quad = lane % 4;
  float x[RECENT_TILE / 8][4] = {};
  auto load_key = [&](uint32(&k)[4], int section, int block) {
    load_words(k, recent.stage + place_of_key(8 * block + lane / 4, 4 * section + quad));
  };
  find_16bit_scores<RECENT_TILE>(query, load_key, x);
  uint32 exists = ~0u;
  if (HAS_KEY_MASK) exists = __ballot_sync(~0u, lane < recent.tile_keys && recent.key_mask[lane]) >> 2 * quad;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int room = min(recent.tile_keys, recent.seen_keys + 8 * r) - 2 * quad;
#pragma unroll
    for (int i = 0; i < RECENT_TILE / 4; i++) {
      float& score = x[i / 2][2 * r + i % 2];
      const int key = i / 2 * 8 + i % 2;
      const bool hidden = key >= room || HAS_KEY_MASK && !(exists >> key & 1);
      score = hidden ? -INFINITE : (score - recent.mean_scores[r]) * recent.scale;
    }
  }
  merge_keys<RECENT_TILE>(x, recent.stage + VALUE, recent.p_log2, lane, acc, row_max, row_sum, denominators);
}
