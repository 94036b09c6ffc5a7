// The consumers of the NVFP4 forward kernel: warps that attend to tiles, 16 rows each.
#pragma once
#include "mma.cuh"
#include "numbers.cuh"
#include "nvfp4_atom.cuh"
#include "nvfp4_items.cuh"
#include "tokens.cuh"
#include "warp_heavy_keys.cuh"
#include "warp_recent_keys.cuh"

constexpr int KEY_BLOCKS = BLOCK / 8;                        // of a matrix product's columns, in a tile
constexpr int CHANNEL_BLOCKS = CHANNELS / 8;                 // likewise of V
constexpr int QK_STEPS = CHANNELS / 64;                      // products in the depth of Q·Kᵀ
constexpr int PV_STEPS = BLOCK / 64;                         // and of P·V
constexpr int SECTIONS = BLOCK / 32;                         // of 32 keys; a thread has 8 scores of each, in two rows
constexpr bool HAS_ROW_SUM = LSE || !QUANTIZED_DENOMINATOR;  // weights are summed before they are quantised
// Quantised weights are summed by a product with ones, or by the lanes. Where unquantised weights are summed too, the
// product's saved instructions outweigh the tensor cores' clocks.
constexpr bool SUMS_BY_PRODUCT = QUANTIZED_DENOMINATOR && HAS_ROW_SUM,
               SUMS_BY_LANES = QUANTIZED_DENOMINATOR && !HAS_ROW_SUM;
constexpr uint32 ONES = 0x22222222, SCALES_OF_1 = 0x38383838;  // in e2m1 and in e4m3
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float P_LOG2 = LARGEST_P_LOG2, E2M1_LARGEST_LOG2 = 2.584962500721156f;
constexpr float E4M3_ROUNDS_TO_0 = 0.0009765625f;  // the largest number that e4m3 rounds to 0

DEVICE float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Return a byte as a number, by a permutation; the compiler would use the special function unit.
DEVICE int byte_of(uint32 x, int number) { return look_up(x, 0, 0x4440 + number); }
DEVICE float from_neighbour(float x, int distance) { return __shfl_xor_sync(~0u, x, distance); }
DEVICE uint32 from_neighbour(uint32 x, int distance) { return __shfl_xor_sync(~0u, x, distance); }

// 16 rows. Lane 4g + t has scores and outputs of rows g and g + 8: element i of a block of 8 columns belongs to row g +
// i / 2 * 8 and column 2t + i % 2. K's tokens are ordered so that a thread has 8 consecutive keys, from 8t on, of each
// 32: block b of the 32 holds numbers 2b and 2b + 1 of the thread's 8.
//
// A scale of P serves 16 keys, which two lanes have. An even lane finds the scales of row g, an odd lane of row g + 8:
// the lane's own row. So a warp computes each scale only twice.
struct Consumer {
  const NVFP4ForwardArguments& a;
  const Tokens& query_tokens;
  Shared& shared;
  Barriers& barriers;
  int warp, lane, quad, row;  // row: the first of the thread's two, in the item

  Item item;
  uint32 q[QK_STEPS][4], q_scales;
  float q_factor;
  float row_max;      // of the own row, in base 2
  float denominator;  // sum of its quantised weights; SUMS_BY_LANES: twice the sum of the lane's groups of 16
  float row_sum;      // sum of its unquantised weights, in the lane's groups
  float acc[CHANNEL_BLOCKS][4];

  DEVICE bool is_odd() const { return lane & 1; }
  DEVICE int own_row() const { return row + 8 * (lane & 1); }

  // Return the sum of two lanes' values for the own row, given this lane's values for both rows.
  template <typename Number>
  DEVICE Number of_own_row(Number first, Number second) const {
    return (is_odd() ? second : first) + from_neighbour(is_odd() ? first : second, 1);
  }
  // Find values for both of the thread's rows, given the own row's.
  DEVICE void share(float value, float& first, float& second) const {
    const float other = from_neighbour(value, 1);
    first = is_odd() ? other : value, second = is_odd() ? value : other;
  }

  DEVICE void load_query() {
    const int64 first = item.pair(a) * a.q_rows + item.first_row;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32* codes = reinterpret_cast<const uint32*>(a.query + (first + row + 8 * r) * K_ROW) + quad;
#pragma unroll
      for (int step = 0; step < QK_STEPS; step++) {
        q[step][r] = __ldg(codes + 8 * step);
        q[step][r + 2] = __ldg(codes + 8 * step + 4);
      }
    }
    // Of four lanes, 0 and 1 have the scales of the first step, 2 and 3 of the second step.
    q_scales = __ldg(reinterpret_cast<const uint32*>(a.query_scale + (first + own_row()) * K_SCALES) +
                     (QK_STEPS > 1 ? quad / 2 : 0));
    q_factor = __ldg(a.query_tensor_scale + first / BLOCK) * (a.softmax_scale * LOG2E);
  }

  // Compute the scores of a tile, without their factor.
  DEVICE void find_scores(uint32 stage, float (&scores)[KEY_BLOCKS][4]) const {
    // Rows of K have 64 bytes, with 16-byte parts swizzled every two rows, or 32 bytes, every four.
    const int part = QK_STEPS == 2 ? (lane / 8) ^ (lane % 8 / 2) : (lane / 8 % 2) ^ (lane % 8 / 4);
    const int line = QK_STEPS == 2 ? lane % 8 : lane % 8 + lane / 16 * 8;
    const uint32 keys = stage + line * K_ROW + part * 16;
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; block++) {
      uint32 delta[4] = {};
      if (SMOOTH_Q) load_words(delta, stage + DELTA + (8 * block + 2 * quad) * 8);
#pragma unroll
      for (int i = 0; i < 4; i++) scores[block][i] = __uint_as_float(delta[i]);
    }
#pragma unroll
    for (int first = 0; first < KEY_BLOCKS; first += 4) {
      // A lane has the scales of a key of each fourth block.
      uint32 scales[QK_STEPS];
      load_words(scales, stage + KEY_SCALE + (8 * (first + quad) + lane / 4) * K_SCALES);
#pragma unroll
      for (int i = 0; i < 4; i += 2 / QK_STEPS) {
        uint32 k[4];
        load_matrices(k, keys + (first + i) * 8 * K_ROW);
        if constexpr (QK_STEPS == 2) {
#pragma unroll
          for (int step = 0; step < 2; step++)
            add_product(scores[first + i], q[step], k[2 * step], k[2 * step + 1], q_scales, scales[step], step, i);
        } else {
#pragma unroll
          for (int next = 0; next < 2; next++)
            add_product(scores[first + i + next], q[0], k[2 * next], k[2 * next + 1], q_scales, scales[0], 0, i + next);
        }
      }
    }
  }

  // Return which keys of the call exist.
  DEVICE const uint8* key_mask() const { return a.key_mask + static_cast<int64>(item.batch) * a.key_mask_stride; }

  // Hide scores of keys that the thread's rows may not attend to.
  DEVICE void mask(float (&scores)[KEY_BLOCKS][4], int tile) const {
    int place = quad;
    asm volatile("" : "+r"(place));                             // compute addresses here, in few tiles
    const int keys_left = a.kv_len - tile * BLOCK - 8 * place;  // keys from the thread's first on
    uint32 exists = 0;
    if (PADDED) {
      const uint8* from = key_mask() + FIRST_KEYS + tile * BLOCK + 8 * place;
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const int key = i / 8 * 32 + i % 8;
        if (key < keys_left && from[key]) exists |= 1u << i;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int room = keys_left;
      if (TAIL_CAUSAL) room = min(room, item.first_row + row + 8 * r + a.causal_offset + 1 - tile * BLOCK - 8 * place);
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const int key = i / 8 * 32 + i % 8;
        const bool hidden = (TAIL_CAUSAL || !PADDED) && key >= room || PADDED && !(exists >> i & 1);
        if (hidden) scores[i / 2][2 * r + i % 2] = -INFINITE;
      }
    }
  }

  // Attend to one more tile.
  template <bool MASKED>
  DEVICE void attend(uint32 stage, int tile) {
    float scores[KEY_BLOCKS][4];
    find_scores(stage, scores);
    uint32 key_tensor_scale[1];
    load_words(key_tensor_scale, stage + KEY_TENSOR_SCALE);
    float factor = q_factor * __uint_as_float(key_tensor_scale[0]);
    if (MASKED) {
      mask(scores, tile);
      factor = larger_or_nan(factor, SMALLEST_NORMAL);  // -inf · 0 would be NaN
    }
    // The largest score of each 16 keys of the own row.
    float largest[SECTIONS];
#pragma unroll
    for (int section = 0; section < SECTIONS; section++) {
      float of_row[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        of_row[r] = scores[4 * section][2 * r];
#pragma unroll
        for (int i = 1; i < 8; i++) of_row[r] = larger_or_nan(of_row[r], scores[4 * section + i / 2][2 * r + i % 2]);
      }
      const float others = from_neighbour(is_odd() ? of_row[0] : of_row[1], 1);
      largest[section] = larger_or_nan(is_odd() ? of_row[1] : of_row[0], others);
    }
    float tile_max = larger_or_nan(larger_or_nan(largest[0], largest[1]), larger_or_nan(largest[2], largest[3]));
    tile_max = larger_or_nan(tile_max, from_neighbour(tile_max, 2));
    const float new_max = larger_or_nan(row_max, tile_max * factor);
    const float reference = MASKED && new_max == -INFINITE ? 0.0f : new_max;
    if (__any_sync(~0u, row_max != new_max)) scale_sums(exp2_approximate(row_max - reference));
    row_max = new_max;

    // Scales of P, a sixth of the largest weight.
    const float shift = reference - P_LOG2;
    float step[SECTIONS];
#pragma unroll
    for (int section = 0; section < SECTIONS; section++)
      step[section] = exp2_approximate(__fmaf_rn(largest[section], factor, -(shift + E2M1_LARGEST_LOG2)));
    const uint32 codes = to_e4m3(step[0], step[1], step[2], step[3]);
    // For the tensor cores: of four lanes, 0 and 1 have scales of the first 64 keys, 2 and 3 of the last 64.
    const uint32 p_scales = __byte_perm(codes, from_neighbour(codes, 2), quad < 2 ? 0x5140 : 0x3726);
    from_e4m3(codes, step);
    // To divide by the scale, subtract its logarithm. Where the scale is 0, weights may be arbitrary, since e2m1 is
    // finite and products are 0, unless unrounded weights are summed.
    float divisor[SECTIONS], offsets[2][SECTIONS];
#pragma unroll
    for (int section = 0; section < SECTIONS; section++) {
      divisor[section] = HAS_ROW_SUM ? larger_or_nan(step[section], E4M3_ROUNDS_TO_0) : step[section];
      share(shift + log2_approximate(divisor[section]), offsets[0][section], offsets[1][section]);
    }

    uint32 doubled_sums[2] = {};
    float sums[4] = {};
    const int part = lane / 8 % 2, line = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int half = 0; half < PV_STEPS; half++) {
      uint32 p[4];
      float of_eight[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = i % 2, section = 2 * half + i / 2;
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
          x[j] = exp2_approximate(__fmaf_rn(scores[4 * section + j / 2][2 * r + j % 2], factor, -offsets[r][section]));
        if (HAS_ROW_SUM) of_eight[i] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
        p[i] = to_e2m1(x);
        // Sums of 16 keys are below 2⁸.
        if (SUMS_BY_LANES) doubled_sums[r] += doubled_sum(p[i]) << 8 * section;
      }
      if (HAS_ROW_SUM) {
#pragma unroll
        for (int i = 0; i < 4; i += 2)
          row_sum = __fmaf_rn(of_own_row(of_eight[i], of_eight[i + 1]), divisor[2 * half + i / 2], row_sum);
      }
      if (SUMS_BY_PRODUCT) add_product(sums, p, ONES, ONES, p_scales, SCALES_OF_1, half, 0);
      // Rows of V have 64 bytes, with 16-byte parts swizzled every two rows.
      const uint32 values = stage + VALUE + line * V_ROW + ((2 * half + part) ^ (line / 2 % 4)) * 16;
#pragma unroll
      for (int first = 0; first < CHANNEL_BLOCKS; first += 4) {
        uint32 scales[1];
        load_words(scales, stage + VALUE_SCALE + (8 * (first + quad) + lane / 4) * V_SCALES + 4 * half);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          uint32 v[4];
          load_matrices(v, values + (first + i) * 8 * V_ROW);
#pragma unroll
          for (int next = 0; next < 2; next++)
            add_product(acc[first + i + next], p, v[2 * next], v[2 * next + 1], p_scales, scales[0], half, i + next);
        }
      }
    }
    if (SUMS_BY_LANES) {
      const uint32 of_row = of_own_row(doubled_sums[0], doubled_sums[1]);
#pragma unroll
      for (int section = 0; section < SECTIONS; section++)
        denominator = __fmaf_rn(static_cast<float>(byte_of(of_row, section)), step[section], denominator);
    } else if (SUMS_BY_PRODUCT) {
      denominator += is_odd() ? sums[2] : sums[0];
    }
  }

  // Multiply all sums of each row by a factor, given the own row's.
  DEVICE void scale_sums(float factor) {
    float factors[2];
    share(factor, factors[0], factors[1]);
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; block++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[block][i] *= factors[i / 2];
    denominator *= factor, row_sum *= factor;
  }

  // Divide the outputs by their sums of weights, and apply V's scale and mean.
  DEVICE void finish(const float (&denominators)[2]) {
    const float scale = __ldg(a.value_tensor_scale + item.kv_pair(a));
    const float* means = a.value_mean + static_cast<int64>(item.kv_pair(a)) * a.mean_channels;
    const float factors[2] = {scale / (denominators[0] == 0.0f ? 1.0f : denominators[0]),
                              scale / (denominators[1] == 0.0f ? 1.0f : denominators[1])};
#pragma unroll
    for (int block = 0; block < CHANNEL_BLOCKS; block++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int channel = 8 * block + 2 * quad + i % 2;
        const float mean = channel < a.mean_channels ? __ldg(means + channel) : 0.0f;
        acc[block][i] = denominators[i / 2] == 0.0f ? 0.0f : __fmaf_rn(acc[block][i], factors[i / 2], mean);
      }
  }

  // Return the number, of all keys, of the latest key that the thread's first row may attend to.
  DEVICE int latest_key() const { return item.first_row + row + a.causal_offset + FIRST_KEYS; }

  // Return the thread's rows of Q in 16 bits.
  DEVICE QueryRows query_rows() const {
    const int token = item.first_row + row;
    const uint16* first = query_tokens.first + item.batch * query_tokens.batch_stride +
                          item.head * query_tokens.head_stride + token * query_tokens.token_stride;
    return {first + 8 * quad, query_tokens.token_stride, a.q_len - token, a.head_dim - 8 * quad};
  }

  // Return the heavy keys for the thread's rows.
  DEVICE HeavyKeys heavy_keys() const {
    HeavyKeys heavy;
    heavy.keys = shared_address(shared.heavy_key), heavy.values = shared_address(shared.heavy_value);
    heavy.seen_keys = latest_key() + 1;
    heavy.late = LATE_KEYS > 0 ? a.late + item.kv_pair(a) * LATE_KEYS : nullptr;
    heavy.key_mask = PADDED ? key_mask() : nullptr;
    heavy.scale = a.softmax_scale * LOG2E;
    heavy.p_log2 = P_LOG2;
    return heavy;
  }

  // Return the fields that all tiles of recent keys share for the thread's rows.
  DEVICE RecentKeys recent_keys() const {
    RecentKeys recent;
    recent.lane = lane;
    const float* mean_score = a.mean_score + item.pair(a) * a.q_rows + item.first_row + row;
    recent.mean_scores[0] = __ldg(mean_score), recent.mean_scores[1] = __ldg(mean_score + 8);
    recent.scale = a.softmax_scale * LOG2E;
    recent.p_log2 = P_LOG2;
    return recent;
  }

  // Write the outputs of an item, recent and heavy keys included, and its log-sum-exp. `step` attends to the next
  // stage.
  template <typename Step>
  DEVICE void end_item(int round, Step step) {
    // Compute addresses here, to keep no registers in the main loop.
    asm volatile("" : "+r"(lane), "+r"(quad), "+r"(row), "+r"(item.first_row));
    float both_max[2], both_sum[2], both_denominator[2];  // of the thread's rows
    if (HAS_ROW_SUM) row_sum += from_neighbour(row_sum, 2);
    if (SUMS_BY_LANES) denominator = 0.5f * (denominator + from_neighbour(denominator, 2));
    share(row_max, both_max[0], both_max[1]);
    share(row_sum, both_sum[0], both_sum[1]);
    share(QUANTIZED_DENOMINATOR ? denominator : row_sum, both_denominator[0], both_denominator[1]);
    finish(both_denominator);
    [[maybe_unused]] const QueryRows query = query_rows();
    if constexpr (RECENT) {
      RecentKeys recent = recent_keys();
#pragma unroll 1
      for (int tile = item.first_recent(a), keys = item.seen_keys(a); tile < keys; tile += RECENT_TILE)
        step([&](uint32 stage) {
          if (item.first_row + warp * 16 + 15 + a.causal_offset < tile) return;  // no row of the warp sees it
          recent.stage = stage;
          recent.tile_keys = keys - tile;
          recent.seen_keys = latest_key() + 1 - FIRST_KEYS - tile;
          recent.key_mask = PADDED ? key_mask() + FIRST_KEYS + tile : nullptr;
          attend_to_recent_keys<PADDED>(recent, query, acc, both_max, both_sum, both_denominator);
        });
    }
    if constexpr (HEAVY_KEYS > 0) {
      wait(barriers.heavy_full, round & 1);
      attend_to_heavy_keys<HEAVY_KEYS, LATE_KEYS, CAUSAL, PADDED>(heavy_keys(), query, acc, both_max, both_sum,
                                                                  both_denominator);
      __syncwarp();
      if (lane < WARP_ARRIVALS) arrive(barriers.heavy_empty);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = item.first_row + row + 8 * r;
      if (token >= a.q_len) continue;
      uint16* into = a.output + item.batch * a.output_stride_batch + item.head * a.output_stride_head +
                     token * a.output_stride_token;
#pragma unroll
      for (int block = 0; block < CHANNEL_BLOCKS; block++) {
        const int channel = 8 * block + 2 * quad;
        const float x = acc[block][2 * r], y = acc[block][2 * r + 1];
        if (channel < a.v_head_dim)
          *reinterpret_cast<uint32*>(into + channel) = FLOAT16 ? to_float16(x, y) : to_bfloat16(x, y);
      }
      if (LSE && quad == 0) {
        const float mean_score = __ldg(a.mean_score + item.pair(a) * a.q_rows + token);
        const float natural = (both_max[r] + __log2f(both_sum[r]) - P_LOG2) * LN2 + a.softmax_scale * mean_score;
        a.lse[item.pair(a) * a.q_len + token] = both_sum[r] == 0.0f ? -INFINITE : natural;
      }
    }
  }

  DEVICE void run() {
    Use use;
    uint32 stages = shared_address(&shared), full = shared_address(barriers.full),
           empty = shared_address(barriers.empty);
    asm volatile("" : "+r"(stages), "+r"(full), "+r"(empty));  // else addresses are computed for each tile
#pragma unroll 1
    for (int round = 0; next_item(a, round, item); round++) {
      load_query();
      row_max = -INFINITE, denominator = row_sum = 0.0f;
#pragma unroll
      for (int block = 0; block < CHANNEL_BLOCKS; block++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[block][i] = 0.0f;
      // Tiles that need no mask.
      int whole = 0, end = a.kv_len / BLOCK;
      if (PADDED) {
        const int* spans = a.spans + item.batch * a.spans_stride;
        whole = (max(spans[0] - FIRST_KEYS, 0) + BLOCK - 1) / BLOCK;
        end = max(spans[1] - FIRST_KEYS, 0) / BLOCK;
      }
      if (RECENT) end = min(end, item.last_tile);
      if (TAIL_CAUSAL) end = min(end, max(item.first_row + warp * 16 + a.causal_offset + 1, 0) / BLOCK);
      auto step = [&](auto attend_to) {
        wait(full + 8 * use.stage, use.parity);
        attend_to(stages + use.stage * static_cast<uint32>(sizeof(Stage)));
        __syncwarp();
        if (lane < WARP_ARRIVALS) arrive(empty + 8 * use.stage);
        use.next();
      };
      int tile = item.first_tile;
#pragma unroll 1
      while (true) {
#pragma unroll 1
        for (; whole <= tile && tile < end; tile++) step([&](uint32 stage) { attend<false>(stage, tile); });
        if (tile >= item.last_tile) break;
        step([&](uint32 stage) { attend<true>(stage, tile++); });
      }
      end_item(round, step);
    }
  }
};
