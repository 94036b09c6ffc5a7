// A warpgroup's rows in the forward kernel: their scores, softmax and P·V.
#pragma once
#include "forward_items.cuh"
#include "numbers.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// The 64 rows of one warpgroup. A thread has the scores and P·V of rows `row` and `row` + 8: element i of `scores`
// belongs to row `row` + i / 2 % 2 * 8 and to key i / 4 * 8 + quad * 2 + i % 2 of the tile.
struct Rows {
  const Int8ForwardArguments& a;
  const Tokens& query;
  const TensorMap& output;
  Barriers& barriers;
  const ValueScales& value_scales;
  const Factors* factors;  // of the stages of Q
  const Item* items;       // of the stages of Q
  uint8* shared_sums;      // of the warpgroup: its float32 sums, and its outputs on their way to memory
  const uint8* tokens;     // of the warpgroup: its rows of Q in 16 bits
  uint8* codes;            // of the warpgroup: its rows of Q in INT8, first stage
  uint32 tokens_descriptor;
  uint32 q, k, v, ones;  // descriptors; of Q, K and V: first stages
  int warpgroup, thread, quad, row;

  Item item;
  int tiles;                            // of the item: the warpgroup's rows attend to them; at least 1
  int first_key_scale, last_key_scale;  // the thread's in the item's head
  int allowed_keys[2];                  // keys of a masked tile that the rows may attend to, from quad * 2 on
  uint32 exists[BLOCK_N / 32];          // bits of keys of a masked tile, from quad * 2 on
  int scores[SCORES];
  uint32 p[P_WORDS];
  float acc[ACC_ELEMENTS];
  float row_scale[2], next_key_scale[SEGMENTS], scale[2][SEGMENTS];
  float row_shift[2];  // added to a row's scores in base 2: P_LOG2 - the row's reference
  float decay[2], row_sum[2], sums_shift[2];
  float tile_sum[4];  // of P, by a matrix product: `row`'s twice, then `row` + 8's twice
  bool reference_changed, has_sums;
  int q_stage, parity;
  int listed_tile;           // with LISTS: the current tile
  const ListedTile* listed;  // of the stages of K

  DEVICE void sync_warpgroup() { sync_threads(1 + warpgroup, 128); }

  // Return the segment of scores[i] in an even or odd tile: its block of KEY_BLOCK keys, counted from the tile's first.
  static constexpr DEVICE int segment(int odd, int i) { return (odd * BLOCK_N % KEY_BLOCK + i / 4 * 8) / KEY_BLOCK; }

  DEVICE void load_key_scale(int number) {
    const int tile = item.tile(number);
#pragma unroll
    for (int i = 0; i < SEGMENTS; i++)
      next_key_scale[i] =
          from_bfloat16(a.key_scale[min(first_key_scale + (tile * BLOCK_N / KEY_BLOCK + i) * 4, last_key_scale)]);
  }

  // Load the scales and number of a stage's listed tile, after the wait for it.
  DEVICE void load_listed(int stage) {
#pragma unroll
    for (int i = 0; i < SEGMENTS; i++) next_key_scale[i] = from_bfloat16(listed[stage].scale[i * 4 + quad]);
    listed_tile = listed[stage].number;
  }

  // Find the keys that a masked tile allows.
  DEVICE void load_mask(int number) {
    const int first = (LISTS ? listed_tile : item.tile(number)) * BLOCK_N + quad * 2;
#pragma unroll
    for (int r = 0; r < 2; r++)
      allowed_keys[r] = (CAUSAL ? min(a.kv_len, item.first_row + row + 8 * r + a.causal_offset + 1) : a.kv_len) - first;
    if (PADDED) {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 32; i++) {
        const int key = first - quad * 2 + i * 32 + thread % 32;
        const bool is_valid = key < a.kv_len && key_mask()[FIRST_KEYS + key];
        exists[i] = __ballot_sync(~0u, is_valid) >> quad * 2;
      }
    }
  }
  // Return which keys of the item's batch element exist, heavy keys too.
  DEVICE const uint8* key_mask() const { return a.key_mask + item.batch * static_cast<int64>(a.key_mask_stride); }
  DEVICE bool allowed(int i) const {
    const int key = i / 4 * 8 + i % 2;
    return key < allowed_keys[i / 2 % 2] && (!PADDED || exists[key / 32] >> key % 32 & 1);
  }

  // Find a tile's scales and its rows' maxima; a maximum that exceeds its reference by SLACK becomes the reference.
  template <int ODD, bool MASKED, bool HALF = false>
  DEVICE void find_row_max(int number) {
#pragma unroll
    for (int i = 0; i < SEGMENTS; i++) {
      scale[0][i] = row_scale[0] * next_key_scale[i];
      scale[1][i] = row_scale[1] * next_key_scale[i];
    }
    if (!LISTS) load_key_scale(number + 1);
    constexpr int NO_KEY = -2147483647 - 1;
    if (MASKED) {
      load_mask(number);
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!allowed(i)) scores[i] = NO_KEY;
    }
    float largest[2] = {-INFINITE, -INFINITE};
#pragma unroll
    for (int part = 0; part < (HALF ? 1 : SEGMENTS); part++) {
      int x[4] = {NO_KEY, NO_KEY, NO_KEY, NO_KEY};  // two chains for each row
#pragma unroll
      for (int i = 0; i < SCORES; i += 4) {
        if (segment(ODD, i) != part) continue;
        int &first = x[i / 4 % 2 * 2], &second = x[i / 4 % 2 * 2 + 1];
        first = max(max(first, scores[i]), scores[i + 1]);
        second = max(max(second, scores[i + 2]), scores[i + 3]);
      }
      x[0] = max(x[0], x[2]), x[1] = max(x[1], x[3]);
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (!MASKED || x[r] != NO_KEY) largest[r] = fmaxf(largest[r], static_cast<float>(x[r]) * scale[r][part]);
    }
    constexpr float limit = P_LOG2 + SLACK;
    reference_changed = __any_sync(~0u, largest[0] + row_shift[0] > limit || largest[1] + row_shift[1] > limit);
    if (reference_changed) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float x = largest[r];
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        const float before = row_shift[r];
        row_shift[r] = fminf(before, P_LOG2 - x);
        decay[r] = MASKED && row_shift[r] == INFINITE ? 1.0f : exp2_approximate(row_shift[r] - before);
        if (!SUMS_BY_PRODUCT) row_sum[r] *= decay[r];
      }
    }
  }

  // The three stages that turn a chunk of 8 scores into P. Adding 0 · (a result of the previous chunk) keeps the
  // compiler from scaling all scores first and then waiting for one exponential after the other.
  template <int ODD, bool MASKED>
  DEVICE void begin_chunk(int chunk) {
    float shift[2] = {row_shift[0], row_shift[1]};
    if (chunk > 0) {  // of the same row: non-finite values stay there
      const int* before = scores + (chunk - 1) * CHUNK;
      shift[0] = __fmaf_rn(__int_as_float(before[0]), 0.0f, row_shift[0]);
      shift[1] = __fmaf_rn(__int_as_float(before[2]), 0.0f, row_shift[1]);
    }
#pragma unroll
    for (int i = chunk * CHUNK; i < (chunk + 1) * CHUNK; i++) {
      const int r = i / 2 % 2;
      float x = __fmaf_rn(static_cast<float>(scores[i]), scale[r][segment(ODD, i)], shift[r]);
      if (MASKED && !allowed(i)) x = -INFINITE;
      scores[i] = __float_as_int(x);
    }
  }
  DEVICE void exponentiate_chunk(int chunk) {
#pragma unroll
    for (int i = chunk * CHUNK; i < (chunk + 1) * CHUNK; i++) {
      const float exponential = exp2_approximate(__int_as_float(scores[i]));
      if (!SUMS_BY_PRODUCT) row_sum[i / 2 % 2] += exponential;
      scores[i] = __float_as_int(exponential);
    }
  }
  DEVICE void pack_chunk(int chunk) {
    auto exponential = [&](int i) { return __int_as_float(scores[chunk * CHUNK + i]); };
    if (PV_FLOAT16) {
#pragma unroll
      for (int i = 0; i < 4; i++) p[4 * chunk + i] = pack_float16(exponential(2 * i), exponential(2 * i + 1));
    } else {
      p[2 * chunk] = to_e4m3(exponential(0), exponential(1), exponential(4), exponential(5));
      p[2 * chunk + 1] = to_e4m3(exponential(2), exponential(3), exponential(6), exponential(7));
    }
  }
  // `await_products` waits until the matrix products have read the previous tile's P.
  template <int ODD, bool MASKED, bool HALF = false, typename Await>
  DEVICE void exponentiate_scores(Await await_products) {
    constexpr int LAST = (HALF ? CHUNKS / 2 : CHUNKS) - 1;
    begin_chunk<ODD, MASKED>(0);
#pragma unroll
    for (int c = 0; c <= LAST; c++) {
      exponentiate_chunk(c);
      if (c < LAST) begin_chunk<ODD, MASKED>(c + 1);
      if (c == PRODUCTS_DONE) {
        pin(scores);
        await_products();
#pragma unroll
        for (int i = 0; i < c; i++) pack_chunk(i);
      } else if (c > PRODUCTS_DONE) {
        pack_chunk(c - 1);
      }
    }
    pack_chunk(LAST);
    pin(p);
  }

  DEVICE void begin_scores(int stage) {
    const uint32 of_item = q + q_stage * (Q_BYTES / 16), of_stage = k + stage * (K_BYTES / 16);
    add_product<CHANNELS, false>(scores, of_item, of_stage);
#pragma unroll
    for (int i = 1; i < CHANNELS / 32; i++) add_product<CHANNELS, true>(scores, of_item + 2 * i, of_stage + 2 * i);
    wgmma_commit();
  }
  // In the item's last tile, erase P after the last key.
  DEVICE void erase_p() {
    const int keys_left = a.kv_len - (tiles - 1) * BLOCK_N - quad * 2;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      uint32 kept = 0;
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (c * 16 + i / 2 * 8 + i % 2 < keys_left) kept |= 0xFFu << 8 * i;
      p[2 * c] &= kept;
      p[2 * c + 1] &= kept;
    }
  }

  template <bool ADD>
  DEVICE void sum_p(const uint32* part) {
    if constexpr (PV_FLOAT16)
      add_float16_product<32, false, ADD>(tile_sum, part, ones);
    else
      add_product<32, ADD>(tile_sum, part, ones);
  }
  DEVICE void begin_sums() {
    if constexpr (SUMS_BY_PRODUCT) {
      sum_p<false>(p);
#pragma unroll
      for (int i = 1; i < BLOCK_N / PV_DEPTH; i++) sum_p<true>(p + 4 * i);
    }
  }
  template <bool WITH_SUMS>
  DEVICE void begin_pv(int stage) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / PV_DEPTH; i++) {
      if constexpr (PV_FLOAT16) {
        add_float16_product<128, true, true>(acc, p + 4 * i, v + (stage * V_BYTES + i * PV_DEPTH * LINE_BYTES) / 16);
      } else {
        const int at = i * 32 / VALUE_WIDTH * (CHANNELS * VALUE_WIDTH) + i * 32 % VALUE_WIDTH;
        add_product<VALUE_WIDTH, true>(acc, p + 4 * i, v + (stage * V_BYTES + at) / 16);
      }
    }
    if (WITH_SUMS) begin_sums();
    wgmma_commit();
  }

  // Add the previous tile's sums of P; their products are done.
  DEVICE void add_tile_sum() {
    pin(tile_sum);
    if (SUMS_BY_PRODUCT) row_sum[0] += tile_sum[0], row_sum[1] += tile_sum[2];
  }

  // Wait until the warpgroup's shared memory is free and its threads are here.
  DEVICE void reclaim_shared_sums() {
    if (thread == 0) wait_until_read();
    sync_warpgroup();
  }

  // Add `acc` to the float32 sums, then set `acc` to 0, or if LAST to the sums.
  template <bool LAST>
  DEVICE void move_sums(const float (&row_shift)[2]) {
    float4* sums = reinterpret_cast<float4*>(shared_sums) + thread;
    if (!has_sums) reclaim_shared_sums();
    float gain[2] = {0.0f, 0.0f};
    if (has_sums) {
#pragma unroll
      for (int r = 0; r < 2; r++) gain[r] = exp2_approximate(row_shift[r] - sums_shift[r]);
    }
#pragma unroll
    for (int i = 0; i < ACC_ELEMENTS / 4; i++) {
      float* x = acc + 4 * i;
      float4 sum = has_sums ? sums[i * 128] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      sum = make_float4(__fmaf_rn(sum.x, gain[0], x[0]), __fmaf_rn(sum.y, gain[0], x[1]),
                        __fmaf_rn(sum.z, gain[1], x[2]), __fmaf_rn(sum.w, gain[1], x[3]));
      if (!LAST) sums[i * 128] = sum;
      x[0] = LAST ? sum.x : 0.0f, x[1] = LAST ? sum.y : 0.0f, x[2] = LAST ? sum.z : 0.0f, x[3] = LAST ? sum.w : 0.0f;
    }
    sums_shift[0] = row_shift[0], sums_shift[1] = row_shift[1];
    has_sums = true;
  }

  // Run the previous tile's P·V while this tile's scores become P.
  template <int ODD, bool MASKED, bool HALF = false>
  DEVICE void step(int tile) {
    wgmma_fence();
    begin_scores(ODD);
    wgmma_fence();
    begin_pv<true>(ODD ^ 1);
    if (LISTS) load_listed(ODD);
    wgmma_wait<1>();
    pin(scores);
    arrive_as_warp(barriers.k_empty[ODD]);
    find_row_max<ODD, MASKED, HALF>(tile);
    exponentiate_scores<ODD, MASKED, HALF>([&] {
      // These waits are branches: the compiler moves no wait for products above them.
      if (tile + 1 < tiles) wait(barriers.k_full[ODD ^ 1], parity ^ ODD);
      wait(barriers.v_full[ODD], parity);
      wgmma_wait<0>();
      pin(acc);
      add_tile_sum();
      arrive_as_warp(barriers.v_empty[ODD ^ 1]);
    });
    if (reference_changed) {
      if (SUMS_BY_PRODUCT) row_sum[0] *= decay[0], row_sum[1] *= decay[1];
#pragma unroll
      for (int i = 0; i < ACC_ELEMENTS; i++) acc[i] *= decay[i / 2 % 2];
    }
    if (!PV_FLOAT16 && ODD == 0 && tile % SUMMED_TILES == 0) move_sums<false>(row_shift);
  }
};
