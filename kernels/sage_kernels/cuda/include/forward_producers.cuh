// The forward kernel's producers: threads that load items with Q, K and V. No producer waits for another's free stage.
#pragma once
#include "forward_items.cuh"
#include "tma.cuh"

// Show the consumers an item, or that there is none, after a wait for a free stage.
DEVICE void show_item(bool exists, const Item& item, Item& shown, uint64& full) {
  if (exists) {
    shown = item;
  } else {
    shown.tiles = 0;
    arrive(full);
  }
}

// Load items with tiles of Q in INT8, by the first thread.
DEVICE void load_queries(const Int8ForwardArguments& a, const TensorMap& query, uint8* q, Factors* factors, Item* items,
                         TakenPlace& taken, Barriers& b) {
  if (threadIdx.x % 128 != 0) return;
  Item item;
#pragma unroll 1
  for (int round = 0;; round++) {
    bool exists = !LISTS && next_item(a, round, false, taken, item);
    const int stage = round % STAGES;
    wait(b.q_empty[stage], round / STAGES & 1 ^ 1);
    if (LISTS) exists = take_item(a, round, item);
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

// Load items with tiles of Q in 16 bits, by the first thread. Only the factors come from the stream's previous kernels.
DEVICE void load_tokens(const Int8ForwardArguments& a, const TensorMap& query, uint8* tokens, Factors& factors,
                        Item* items, TakenPlace& taken, Barriers& b) {
  if (threadIdx.x % 128 != 0) return;
  Item item;
#pragma unroll 1
  for (int round = 0;; round++) {
    const bool exists = next_item(a, round, false, taken, item);
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
    if (round == 0) grid_dependency_wait();
    load_bytes(a.query_factors + item.kv_pair(a) * static_cast<int64>(a.query_factors_stride), factors.line,
               b.q_full[0], CHANNELS * 4);
  }
}

// Return whether this block has an item `round`; with LISTS, the item that `load_queries` shows.
DEVICE bool find_item(const Int8ForwardArguments& a, int round, const Item* items, bool takes, TakenPlace& taken,
                      Barriers& b, Item& item) {
  if (!LISTS) return next_item(a, round, takes, taken, item);
  const int stage = round % STAGES;
  wait(b.q_full[stage], round / STAGES & 1);
  item = items[stage];
  arrive(b.q_empty[stage]);
  return item.tiles > 0;
}

// Return the first key of a tile that `produce_tiles` names.
DEVICE int first_key(const Item& item, int tile) { return (LISTS ? tile : item.tile(tile)) * BLOCK_N; }

// Load tiles of K, or of V: `load` starts to load an item's tile to a stage, `end` follows the last tile. Tiles have
// their numbers in the item, or in its list; after a list an empty stage completes a round. `end` comes before the tile
// that completes a round: this tile's stage gets free only when all warpgroups free the tiles that they skip, and
// before that they wait for `end`'s data. The thread that loads K `takes` an item's place when it has started to load
// the previous item's last tile.
template <typename Load, typename End>
DEVICE void produce_tiles(const Int8ForwardArguments& a, const Item* items, bool takes, TakenPlace& taken, Barriers& b,
                          uint64 (&full)[STAGES], uint64 (&empty)[STAGES], Load load, End end) {
  Item item;
  int uses = 0;
#pragma unroll 1
  for (int round = 0; find_item(a, round, items, takes, taken, b, item); round++) {
    const int* listed = LISTS ? item.listed(a) : nullptr;
    int following = LISTS ? listed[0] : 0;
#pragma unroll 1
    for (int tile = 0; tile < item.tiles + item.tiles % STAGES; tile++, uses++) {
      const int stage = uses % STAGES, listed_tile = following;
      if (LISTS) following = listed[tile + 1];  // before the wait
      wait(empty[stage], uses / STAGES & 1 ^ 1);
      if (LISTS && tile == item.tiles) {
        arrive(full[stage]);
        continue;
      }
      load(item, LISTS ? listed_tile : tile, stage);
      if (tile == item.tiles - 1) end(item, round);
    }
  }
}

// Load tiles of K, with LISTS also their scales, and for an item's end the scales of V, and heavy keys with their
// values.
DEVICE void produce_keys(const Int8ForwardArguments& a, const TensorMap& key, const TensorMap& heavy_key,
                         const TensorMap& heavy_value, uint8* k, uint8* heavy, ValueScales& scales, const Item* items,
                         ListedTile* listed, TakenPlace& taken, Barriers& b) {
  produce_tiles(
      a, items, true, taken, b, b.k_full, b.k_empty,
      [&](const Item& item, int tile, int stage) {
        if constexpr (LISTS) {
          constexpr int SCALES = BLOCK_N / KEYS_PER_SCALE;
          const int tiles = a.kv_rows / BLOCK_N, existing = min(tile, tiles - 1);  // an empty list names `tiles`
          listed[stage].number = tile;
          arrive_expecting(b.k_full[stage], K_BYTES + SCALES * 2);
          load_bytes(a.key_scale + (item.kv_pair(a) * static_cast<int64>(tiles) + existing) * SCALES,
                     listed[stage].scale, b.k_full[stage], SCALES * 2);
        } else {
          arrive_expecting(b.k_full[stage], K_BYTES);
        }
        load_box(key, k + stage * K_BYTES, b.k_full[stage], item.kv_pair(a), first_key(item, tile), 0);
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

DEVICE void produce_values(const Int8ForwardArguments& a, const TensorMap& value, uint8* v, const Item* items,
                           TakenPlace& taken, Barriers& b) {
  const auto load = [&](const Item& item, int tile, int stage) {
    arrive_expecting(b.v_full[stage], V_BYTES);
    if (PV_FLOAT16) {
#pragma unroll
      for (int i = 0; i < CHANNELS / LINE_CHANNELS; i++)
        load_box(value, v + stage * V_BYTES + i * BLOCK_N * LINE_BYTES, b.v_full[stage], item.kv_pair(a),
                 first_key(item, tile), i * LINE_CHANNELS);
    } else {
#pragma unroll
      for (int i = 0; i < BLOCK_N / VALUE_WIDTH; i++)
        load_box(value, v + stage * V_BYTES + i * CHANNELS * VALUE_WIDTH, b.v_full[stage], item.kv_pair(a) * CHANNELS,
                 first_key(item, tile) + i * VALUE_WIDTH);
    }
  };
  produce_tiles(a, items, false, taken, b, b.v_full, b.v_empty, load, [](const Item&, int) {});
}
