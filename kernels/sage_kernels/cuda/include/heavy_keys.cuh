// The forward kernel's heavy keys, which may hold much of each row's weight, and are not part of K and V. The last
// LATE_KEYS are late keys: for rows that see a late key, the first key that gave way to it is part of K and V, and not
// heavy. After all other keys, a warpgroup attends to heavy keys in 16 bits, with Q in 16 bits, and rescales the sums.
//
// Q in 16 bits is in shared memory if the kernel quantises it; then heavy keys get their weights during the last P·V.
// Otherwise it comes from memory, in parts that registers hold.
#pragma once
#include "forward_rows.cuh"

// A thread's part of HEAVY_CHANNELS of two rows of Q in 16 bits: 8 channels of each SECTION, which `heavy_order` puts
// at the thread's places in two matrix products.
using HeavyWords = uint32[2][HEAVY_CHANNELS / SECTION][4];

// Rows with heavy keys.
struct HeavyRows : Rows {
  // Load the thread's part of N sections of rows `row` and `row` + 8 of Q in 16 bits, from `first_channel` on.
  template <int N>
  DEVICE void load_query(int first_channel, uint32 (&x)[2][N][4]) {
    if constexpr (QUANTIZES_QUERY) {
      int line = row % WARPGROUP_ROWS, place = quad;
      asm volatile("" : "+r"(line), "+r"(place));  // compute addresses here, to keep no registers
      const uint8* at = tokens + line * LINE_BYTES;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const uint8* part = at + i / 2 * (WARPGROUP_ROWS * LINE_BYTES) + ((i % 2 * 4 + place ^ line % 8) * 16);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const uint4 y = *reinterpret_cast<const uint4*>(part + 8 * r * LINE_BYTES);
          x[r][i][0] = y.x, x[r][i][1] = y.y, x[r][i][2] = y.z, x[r][i][3] = y.w;
        }
      }
    } else {
      int channel = first_channel + quad * 8, token = item.first_row + row;
      asm volatile("" : "+r"(channel), "+r"(token));
#pragma unroll
      for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
          const Reader reader(query, item.batch, item.head, token + 8 * r, a.q_len, channel + i * SECTION, a.head_dim);
          reader.load<true>(0, reader.has(0), x[r][i]);
        }
      }
    }
  }

  // Rotate and quantise the warpgroup's rows of Q, in the TMA's order.
  DEVICE void quantize_query() {
    TileWords x;
    load_query(0, x);
    const int line = row % WARPGROUP_ROWS;
    uint8* const into = codes + line * CHANNELS + quad % 2 * 8;
    const float scale = rotate_query(x, factors[0].line + quad * 8, [&](int r, int section, uint2 eight) {
      // The swizzle repeats after 8 rows.
      const int part = section * 2 + quad / 2 ^ line * CHANNELS / 128 % (CHANNELS / 16);
      *reinterpret_cast<uint2*>(into + 8 * r * CHANNELS + part * 16) = eight;
    });
#pragma unroll
    for (int r = 0; r < 2; r++)
      row_scale[r] = __shfl_sync(~0u, scale, thread % 32 / 4 * 4 + r) * (a.softmax_scale * LOG2E);
    fence_shared();
    sync_warpgroup();
  }

  template <bool TRANSPOSED, int N>
  DEVICE void add_16bit_product(float (&x)[N], const uint32* left, uint32 right) {
    if constexpr (FLOAT16)
      add_float16_product<LINE_BYTES, TRANSPOSED, true>(x, left, right);
    else
      add_bfloat16_product<LINE_BYTES, TRANSPOSED, true>(x, left, right);
  }

  // Return the descriptor of the heavy keys, which lie behind the tiles of K and V, and the sums; compute it here, to
  // keep no register.
  DEVICE uint32 heavy_keys() const {
    uint32 first = k;
    asm volatile("" : "+r"(first));
    return first + (STAGES * (K_BYTES + V_BYTES) + WARPGROUPS * SUMS_BYTES) / 16;
  }

  // Begin Q's products with the heavy keys, and with K's mean in the rows behind, all in shared memory.
  DEVICE void begin_heavy_scores(float (&x)[HEAVY_SCORES], float (&mean)[4]) {
    uint32 left = tokens_descriptor;
    asm volatile("" : "+r"(left));
    const uint32 right = heavy_keys();
#pragma unroll
    for (int i = 0; i < CHANNELS / 16; i++) {
      const uint32 a = left + i / 4 * (WARPGROUP_ROWS * LINE_BYTES / 16) + i % 4 * 2;
      const uint32 b = right + i / 4 * (HEAVY_KEY_LINES / 16) + i % 4 * 2, behind = b + HEAVY_KEYS * LINE_BYTES / 16;
      if (i == 0) {
        add_shared_16bit_product<LINE_BYTES, FLOAT16, false>(x, a, b);
        add_shared_16bit_product<LINE_BYTES, FLOAT16, false>(mean, a, behind);
      } else {
        add_shared_16bit_product<LINE_BYTES, FLOAT16, true>(x, a, b);
        add_shared_16bit_product<LINE_BYTES, FLOAT16, true>(mean, a, behind);
      }
    }
    wgmma_commit();
  }

  // Sum each row's products with the parts of K's mean.
  DEVICE void add_mean_parts(const float (&mean)[4], float (&mean_score)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      mean_score[r] = mean[2 * r] + mean[2 * r + 1];
      mean_score[r] += __shfl_xor_sync(~0u, mean_score[r], 1);
      mean_score[r] += __shfl_xor_sync(~0u, mean_score[r], 2);
    }
  }

  // Compute Q's products with the heavy keys minus its products with K's mean; `heavy_query` has the first
  // HEAVY_CHANNELS of Q.
  DEVICE void find_heavy_scores(HeavyWords& heavy_query, float (&x)[HEAVY_SCORES]) {
    const uint32 right = heavy_keys();
    int first = item.first_row + row;
    asm volatile("" : "+r"(first));
    const float* mean_score = a.mean_score + static_cast<int64>(item.pair(a)) * a.q_rows;
#pragma unroll
    for (int i = 0; i < HEAVY_SCORES; i++) x[i] = -mean_score[min(first + i / 2 % 2 * 8, a.q_len - 1)];
#pragma unroll
    for (int channel = 0; channel < CHANNELS; channel += HEAVY_CHANNELS) {
      if (channel > 0) load_query(channel, heavy_query);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < HEAVY_CHANNELS / 16; i++) {
        const auto &first = heavy_query[0][i / 2], &second = heavy_query[1][i / 2];
        const int word = i % 2 * 2;
        const uint32 left[4] = {first[word], second[word], first[word + 1], second[word + 1]};
        add_16bit_product<false>(x, left, right + (channel / 64 + i / 4) * (HEAVY_KEY_LINES / 16) + i % 4 * 2);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(x);
    }
  }

  // Round two weights of heavy keys, which are at most 1; the first is in the lower half.
  static DEVICE uint32 pack_16bit(float a, float b) { return FLOAT16 ? pack_float16(a, b) : pack_bfloat16(a, b); }

  // Turn the heavy keys' scores, x - `mean_score` before the softmax scale, into P, and add it to the rows' sums. P
  // keeps the other keys' reference, unless it outgrows 1. `others` becomes the other keys' part of the sums, `factor`
  // a factor for the outputs; it also divides by the power of two near the sum, lest V times a weight be infinite.
  DEVICE void exponentiate_heavy_scores(float (&x)[HEAVY_SCORES], const float (&mean_score)[2],
                                        uint32 (&heavy_p)[HEAVY_SCORES / 2], float (&factor)[2], float (&others)[2]) {
    int place = quad;
    asm volatile("" : "+r"(place));
    uint32 heavy_exists[2] = {~0u, ~0u};
    if (PADDED) {
#pragma unroll
      for (int i = 0; i < 2; i++) heavy_exists[i] = __ballot_sync(~0u, key_mask()[i * 32 + thread % 32]) >> place * 2;
    }
    constexpr int EIGHTS = LATE_KEYS > 0 ? LATE_KEYS / 8 : 1;  // of late keys; the thread has two of each
    [[maybe_unused]] int2 late[EIGHTS];
    if constexpr (LATE_KEYS > 0) {
#pragma unroll
      for (int i = 0; i < EIGHTS; i++)
        late[i] = __ldg(reinterpret_cast<const int2*>(a.late + item.kv_pair(a) * LATE_KEYS + i * 8) + place);
    }
    const int seen = item.first_row + row + a.causal_offset + FIRST_KEYS + 1;  // keys of the call
    auto hidden = [&](int i) {
      const int key = i / 4 * 8 + i % 2, keys = seen + i / 2 % 2 * 8;
      const bool exists = !PADDED || heavy_exists[key / 32] >> key % 32 & 1;
      if constexpr (LATE_KEYS > 0) {
        const int2 of_eight = late[i / 4 % EIGHTS];
        const bool sees_late = (i % 2 ? of_eight.y : of_eight.x) < keys;
        if (key >= FIRST_KEYS) return !sees_late;
        if (key >= FIRST_KEYS - LATE_KEYS && sees_late) return true;
      }
      return CAUSAL && key + place * 2 >= keys || !exists;
    };
    const float scale = a.softmax_scale * LOG2E;
    float largest[2] = {-INFINITE, -INFINITE}, shift[2];
#pragma unroll
    for (int i = 0; i < HEAVY_SCORES; i++) {
      if (hidden(i)) x[i] = -INFINITE;
      largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], x[i]);
    }
    // A weight is at most 2^LARGEST: then the sum of all is at most 2.
    constexpr float LARGEST = -6.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
      if (!(CAUSAL || PADDED) || largest[r] != -INFINITE) largest[r] = (largest[r] - mean_score[r]) * scale;
      const int exponent = __float_as_int(row_sum[r]) >> 23;
      factor[r] = exponent == 0 ? 1.0f : __int_as_float(254 - exponent << 23);
      if (exponent != 0) row_shift[r] -= exponent - 127;
      const float before = row_shift[r];
      row_shift[r] = fminf(before, LARGEST - largest[r]);
      if (row_shift[r] != INFINITE) factor[r] *= exp2_approximate(row_shift[r] - before);
      others[r] = row_sum[r] * factor[r];
      shift[r] = row_shift[r] == INFINITE ? 0.0f : __fmaf_rn(-mean_score[r], scale, row_shift[r]);
    }
    float sum[4] = {};  // two chains for each row
#pragma unroll
    for (int i = 0; i < HEAVY_SCORES; i++) {
      const bool is_hidden = (CAUSAL || PADDED) && x[i] == -INFINITE;
      x[i] = is_hidden ? 0.0f : exp2_approximate(__fmaf_rn(x[i], scale, shift[i / 2 % 2]));
      if (i % 2) heavy_p[i / 2] = pack_16bit(x[i - 1], x[i]);
      sum[i / 2 % 2 * 2 + i % 2] += x[i];
    }
    pin(heavy_p);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float of_row = sum[2 * r] + sum[2 * r + 1];
      of_row += __shfl_xor_sync(~0u, of_row, 1);
      of_row += __shfl_xor_sync(~0u, of_row, 2);
      row_sum[r] = others[r] + of_row;
    }
  }

  // Multiply the outputs by V's scale and the factor, add V's mean times the other keys' weights, and P·V of the heavy
  // keys.
  DEVICE void add_heavy_pv(const uint32 (&heavy_p)[HEAVY_SCORES / 2], const float (&factor)[2],
                           const float (&others)[2]) {
    int place = quad;
    asm volatile("" : "+r"(place));
#pragma unroll
    for (int i = 0; i < CHANNELS / 8; i++) {
      const float2 value_scale = reinterpret_cast<const float2*>(value_scales.scale)[i * 4 + place];
      const float2 mean = reinterpret_cast<const float2*>(value_scales.mean)[i * 4 + place];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float* y = acc + 4 * i + 2 * r;
        y[0] = __fmaf_rn(y[0], value_scale.x * factor[r], mean.x * others[r]);
        y[1] = __fmaf_rn(y[1], value_scale.y * factor[r], mean.y * others[r]);
      }
    }
    pin(acc);
    const uint32 values = heavy_keys() + HEAVY_KEY_BYTES / 16 + (HEAVY_KEYS * LINE_BYTES / 16 - 1 << 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < HEAVY_KEYS / 16; i++)
      add_16bit_product<true>(acc, heavy_p + 4 * i, values + i * (16 * LINE_BYTES / 16));
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);
  }
};
