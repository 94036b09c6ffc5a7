// The forward kernel's producers: threads that bring items with Q, K and V, of which none waits for a free stage of the
// others.
#pragma once
#include "forward_items.cuh"
#include "tma.cuh"

// Show the consumers an item, or that there is none, behind a wait for a free stage.
DEVICE void show_item(bool exists, const Item& item, Item& shown, uint64& full) {
  if (exists) {
    shown = item;
  } else {
    shown.tiles = 0;
    arrive(full);
  }
}

// Bring items with tiles of Q in INT8, by the first thread.
DEVICE void load_queries(const Arguments& a, const TensorMap& query, uint8* q, Factors* factors, Item* items,
                         Barriers& b) {
  if (threadIdx.x % 128 != 0) return;
  Item item;
#pragma unroll 1
  for (int round = 0;; round++) {
    const bool exists = next_item(a, round, item);
    const int stage = round % STAGES;
    wait(b.q_empty[stage], round / STAGES & 1 ^ 1);
    show_item(exists, item, items[stage], b.q_full[stage]);
    if (!exists) return;
    const int row = item.pair(a) * a.q_rows + item.first_row;
    const int scales_bytes = min(BLOCK_M, a.q_rows - item.first_row) * 4;
    arrive_expecting(b.q_full[stage], Q_BYTES + scales_bytes);
#pragma unroll
    for (int i = 0; i < WARPGROUPS; i++)
      load_box(query, q + stage * Q_BYTES + i * WARPGROUP_ROWS * CHANNELS, b.q_full[stage], row + i * WARPGROUP_ROWS,
               0);
    load_bytes(a.query_scale + row, factors[stage].line, b.q_full[stage], scales_bytes);
  }
}

// Bring items with tiles of Q in 16 bits, by the first thread: none of them is what the stream's previous kernels
// write, but the factors are.
DEVICE void load_tokens(const Arguments& a, const TensorMap& query, uint8* tokens, Factors& factors, Item* items,
                        Barriers& b) {
  if (threadIdx.x % 128 != 0) return;
  Item item;
#pragma unroll 1
  for (int round = 0;; round++) {
    const bool exists = next_item(a, round, item);
    wait(b.q_empty[0], round & 1 ^ 1);
    show_item(exists, item, items[0], b.q_full[0]);
    if (!exists) return;
    arrive_expecting(b.q_full[0], WARPGROUPS * TOKENS_BYTES + CHANNELS * 4);
#pragma unroll
    for (int i = 0; i < WARPGROUPS * CHANNELS / LINE_CHANNELS; i++) {
      constexpr int PARTS = CHANNELS / LINE_CHANNELS;
      load_box(query, tokens + i * (WARPGROUP_ROWS * LINE_BYTES), b.q_full[0], item.batch, item.head,
               item.first_row + i / PARTS * WARPGROUP_ROWS, i % PARTS * LINE_CHANNELS);
    }
    if (round == 0) wait_for_previous_kernel();
    load_bytes(a.query_factors + item.kv_pair(a) * static_cast<int64>(a.query_factors_stride), factors.line,
               b.q_full[0], CHANNELS * 4);
  }
}

// Bring tiles of K, or of V: `load` begins to bring an item's tile of that number to a stage, `end` follows the last.
// It does not follow the tile that completes a round: the stage of that is free only when all warpgroups have left what
// they do not attend to, and they wait for what `end` brings before they do.
template <typename Load, typename End>
DEVICE void produce_tiles(const Arguments& a, int bytes, uint64 (&full)[STAGES], uint64 (&empty)[STAGES], Load load,
                          End end) {
  Item item;
  int uses = 0;
#pragma unroll 1
  for (int round = 0; next_item(a, round, item); round++) {
#pragma unroll 1
    for (int tile = 0; tile < item.tiles + item.tiles % STAGES; tile++, uses++) {
      const int stage = uses % STAGES;
      wait(empty[stage], uses / STAGES & 1 ^ 1);
      arrive_expecting(full[stage], bytes);
      load(item, tile, stage);
      if (tile == item.tiles - 1) end(item, round);
    }
  }
}

// Bring tiles of K, and what an item's outputs need in the end: the scales of V, and heavy keys with their values.
DEVICE void produce_keys(const Arguments& a, const TensorMap& key, const TensorMap& heavy_key,
                         const TensorMap& heavy_value, uint8* k, uint8* heavy, ValueScales& scales, Barriers& b) {
  produce_tiles(
      a, K_BYTES, b.k_full, b.k_empty,
      [&](const Item& item, int tile, int stage) {
        load_box(key, k + stage * K_BYTES, b.k_full[stage], item.kv_pair(a), item.tile(tile) * BLOCK_N, 0);
      },
      [&](const Item& item, int round) {
        const int64 of_head = static_cast<int64>(item.kv_pair(a)) * CHANNELS;
        wait(b.ending_empty, round & 1 ^ 1);
        arrive_expecting(b.ending_full, HEAVY_KEY_BYTES + HEAVY_BYTES + 2 * CHANNELS * 4);
        load_bytes(a.value_scale + of_head, scales.scale, b.ending_full, CHANNELS * 4);
        load_bytes(a.value_mean + of_head, scales.mean, b.ending_full, CHANNELS * 4);
        if constexpr (HEAVY) {
#pragma unroll
          for (int i = 0; i < CHANNELS / LINE_CHANNELS; i++) {
            const int pair = item.kv_pair(a), column = i * LINE_CHANNELS;
            load_box(heavy_key, heavy + i * HEAVY_KEY_LINES, b.ending_full, pair * (HEAVY_KEYS + MEAN_ROWS), column);
            load_box(heavy_value, heavy + HEAVY_KEY_BYTES + i * HEAVY_KEYS * LINE_BYTES, b.ending_full,
                     pair * HEAVY_KEYS, column);
          }
        }
      });
}

DEVICE void produce_values(const Arguments& a, const TensorMap& value, uint8* v, Barriers& b) {
  const auto load = [&](const Item& item, int tile, int stage) {
    if (PV_FLOAT16) {
#pragma unroll
      for (int i = 0; i < CHANNELS / LINE_CHANNELS; i++)
        load_box(value, v + stage * V_BYTES + i * BLOCK_N * LINE_BYTES, b.v_full[stage], item.kv_pair(a),
                 item.tile(tile) * BLOCK_N, i * LINE_CHANNELS);
    } else {
#pragma unroll
      for (int i = 0; i < BLOCK_N / VALUE_WIDTH; i++)
        load_box(value, v + stage * V_BYTES + i * CHANNELS * VALUE_WIDTH, b.v_full[stage], item.kv_pair(a) * CHANNELS,
                 item.tile(tile) * BLOCK_N + i * VALUE_WIDTH);
    }
  };
  produce_tiles(a, V_BYTES, b.v_full, b.v_empty, load, [](const Item&, int) {});
}
