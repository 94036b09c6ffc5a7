// The work of the NVFP4 forward kernel: a block's items, 128 rows of one (batch, head) each, and the stages of shared
// memory for tiles of keys.
#pragma once
#include "barrier.cuh"
#include "parameters.cuh"

constexpr int K_ROW = CHANNELS / 2, V_ROW = BLOCK / 2;  // bytes
constexpr int K_BYTES = BLOCK * K_ROW, V_BYTES = CHANNELS * V_ROW;
constexpr int K_SCALES = CHANNELS / GROUP, V_SCALES = BLOCK / GROUP;  // of a key, or of a channel
constexpr int FIRST_KEYS = HEAVY_KEYS - LATE_KEYS;                    // heavy keys that are not late keys
constexpr bool TAIL_CAUSAL = CAUSAL && !RECENT;                       // rows of an item see different 4-bit keys
constexpr int HEAVY_BYTES = HEAVY_KEYS * CHANNELS * 2;                // of heavy keys, or of their values

// A tile of keys with its scales, as it lies in shared memory.
struct alignas(1024) Stage {
  uint8 key[K_BYTES], value[V_BYTES];
  uint8 key_scale[BLOCK * K_SCALES];       // a key's are adjacent
  uint8 value_scale[CHANNELS * V_SCALES];  // a channel's are adjacent
  float delta[2 * BLOCK];                  // each pair twice, for two rows of accumulators
  float key_tensor_scale;
};
// Recent keys whose K and V in 16 bits fill the room of a tile's K and V.
constexpr int RECENT_TILE = K_BYTES / (2 * CHANNELS);
constexpr int COPIED_BYTES = K_BYTES + V_BYTES + BLOCK * K_SCALES;  // by the TMA
// Offsets in a stage.
constexpr int VALUE = K_BYTES, KEY_SCALE = VALUE + V_BYTES, VALUE_SCALE = KEY_SCALE + BLOCK * K_SCALES;
constexpr int DELTA = VALUE_SCALE + CHANNELS * V_SCALES, KEY_TENSOR_SCALE = DELTA + 2 * BLOCK * 4;

struct alignas(1024) Shared {
  Stage stages[STAGES];
  uint8 heavy_key[HEAVY_KEYS > 0 ? HEAVY_BYTES : 1024], heavy_value[HEAVY_KEYS > 0 ? HEAVY_BYTES : 1024];
};
static_assert(SHARED_BYTES == sizeof(Shared), "SHARED_BYTES must hold the stages and the heavy keys");

struct Barriers {
  uint64 full[STAGES], empty[STAGES], heavy_full, heavy_empty;
};

// A block's share of the work.
struct Item {
  int sequence, block;  // in this launch
  int batch, head, kv_head, first_row;
  int first_tile, last_tile;  // of keys; `last_tile` excluded

  DEVICE int64 pair(const NVFP4ForwardArguments& a) const { return static_cast<int64>(batch) * a.q_heads + head; }
  DEVICE int kv_pair(const NVFP4ForwardArguments& a) const { return batch * a.kv_heads + kv_head; }
  // Return the number of keys that some row may attend to, or 0 or less.
  DEVICE int seen_keys(const NVFP4ForwardArguments& a) const {
    const int keys = PADDED ? a.spans[batch * a.spans_stride + 2] - FIRST_KEYS : a.kv_len;
    return CAUSAL ? min(keys, first_row + BLOCK + a.causal_offset) : keys;
  }
  // Return the first recent key.
  DEVICE int first_recent(const NVFP4ForwardArguments& a) const { return max(first_row + a.recent_start, 0); }
};

// Find item `round` of this block. Causal items differ in length: the longest items of all heads come first, and blocks
// change order from round to round.
DEVICE bool next_item(const NVFP4ForwardArguments& a, int round, Item& item) {
  const int items = a.blocks * a.sequences * a.q_heads, grid = gridDim.x;
  const int index = round * grid + (CAUSAL && round % 2 ? grid - 1 - blockIdx.x : blockIdx.x);
  if (index >= items) return false;
  const int pairs = a.sequences * a.q_heads, pair = CAUSAL ? index % pairs : index / a.blocks;
  item.block = CAUSAL ? a.blocks - 1 - index / pairs : index % a.blocks;
  item.sequence = pair / a.q_heads;
  item.head = pair - item.sequence * a.q_heads;
  item.batch = a.first_sequence + item.sequence;
  item.kv_head = item.head / (a.q_heads / a.kv_heads);
  item.first_row = (a.first_block + item.block) * BLOCK;
  const int keys = RECENT ? min(item.seen_keys(a), item.first_recent(a)) : item.seen_keys(a);
  item.first_tile = PADDED ? max(a.spans[item.batch * a.spans_stride] - FIRST_KEYS, 0) / BLOCK : 0;
  item.last_tile = (max(keys, 0) + BLOCK - 1) / BLOCK;
  return true;
}

// A stage, and how often all stages were used, modulo 2.
struct Use {
  int stage = 0, parity = 0;

  DEVICE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
