// Heavy keys: a warp attends to them in 16 bits, and merges them with what it has of the others, as two
// parts of a row are merged by their maxima and sums. It does what `language/heavy.py` does.
//
// Lane 4g + t has rows g and g + 8. Keys lie in shared memory, and their values, in lines of 64 channels, 128 bytes,
// whose 16-byte parts are exchanged from row to row; K's channels are in the order of `layout.heavy_order`.
#pragma once
#include "mma.cuh"
#include "tokens.cuh"

// What a warp needs of them, and of its rows of Q in 16 bits.
struct HeavyKeys {
  uint32 keys, values;  // addresses in shared memory
  const uint16* query;  // the thread's 8 channels of the first 32, of its first row
  int64 stride;         // from row to row
  int rows;             // that exist, from the thread's first one on
  int channels;         // of Q, from the thread's first one on
  int seen;             // keys that the first row may attend to, if it may not attend to all
  const int* late;      // numbers of the late ones, if there are any
  const uint8* valid;   // of each key, 0 where it does not exist; null: all exist
  float scale;          // of scores, to base 2
  float weight_log2;    // of the largest weight, to base 2
};

DEVICE float larger_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Compute Q·Kᵀ of KEYS heavy keys.
template <int KEYS>
DEVICE void find_heavy_scores(const HeavyKeys& heavy, int lane, float (&x)[KEYS / 8][4]) {
  constexpr int LINE = 128 * KEYS;  // bytes of 64 channels
#pragma unroll
  for (int section = 0; section < CHANNELS / 32; section++) {
    uint32 words[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      uint4 loaded = make_uint4(0, 0, 0, 0);
      if (8 * r < heavy.rows && section * 32 < heavy.channels)
        loaded = *reinterpret_cast<const uint4*>(heavy.query + 8 * r * heavy.stride + section * 32);
      words[r][0] = loaded.x, words[r][1] = loaded.y, words[r][2] = loaded.z, words[r][3] = loaded.w;
    }
#pragma unroll
    for (int block = 0; block < KEYS / 8; block++) {
      uint32 k[4];
      load_matrices(k, heavy.keys + section / 2 * LINE + (8 * block + lane % 8) * 128 +
                           ((section % 2 * 4 + lane / 8) ^ lane % 8) * 16);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32 left[4] = {words[0][2 * i], words[1][2 * i], words[0][2 * i + 1], words[1][2 * i + 1]};
        add_16bit_product<FLOAT16>(x[block], left, k[2 * i], k[2 * i + 1]);
      }
    }
  }
}

// Attend to KEYS heavy keys.
//
// outputs: of the others, divided by `divisors`, 0 where that is; they become those of all keys. maxima, totals: of
// both rows, to base 2 and sums of weights; they become those of all keys. IS_CAUSAL, HAS_VALID: `seen` and `valid`
// count. The last LATE of the heavy keys are late ones: rows that see such a key do not attend here to the first key
// that gave way to it.
template <int KEYS, int LATE, bool IS_CAUSAL, bool HAS_VALID, int BLOCKS>
DEVICE void attend_to_heavy_keys(const HeavyKeys& heavy, float (&outputs)[BLOCKS][4], float (&maxima)[2],
                                 float (&totals)[2], const float (&divisors)[2]) {
  constexpr int LINE = 128 * KEYS;
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // so that addresses are computed here, not kept in registers from item to item
  const int quad = lane % 4;
  [[maybe_unused]] uint32 sees_late = 0;  // bits of the thread's late keys, a quarter of them, for each row
  if constexpr (LATE > 0) {
#pragma unroll
    for (int i = 0; i < LATE / 2; i++) {
      const int key = i % (LATE / 4) / 2 * 8 + i % 2, row = i / (LATE / 4) * 8;
      if (__ldg(heavy.late + key + 2 * quad) < heavy.seen + row) sees_late |= 1u << i;
    }
    asm volatile("" : "+r"(sees_late));  // one register, not the numbers of the keys
  }
  float x[KEYS / 8][4] = {};
  find_heavy_scores<KEYS>(heavy, lane, x);
  uint32 exists[2] = {~0u, ~0u};
  if (HAS_VALID) {
#pragma unroll
    for (int i = 0; i < 2; i++) exists[i] = __ballot_sync(~0u, heavy.valid[i * 32 + lane]) >> 2 * quad;
  }
  float factors[2], ends[2], inverses[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int seen = heavy.seen + 8 * r;
    auto is_hidden = [&](int key) {
      if constexpr (LATE > 0) {
        const bool sees = sees_late >> (r * (LATE / 4) + key % LATE / 8 * 2 + key % 2) & 1;
        if (key >= KEYS - LATE) return !sees;
        if (key >= KEYS - 2 * LATE && sees) return true;
      }
      return IS_CAUSAL && key + 2 * quad >= seen || HAS_VALID && !(exists[key / 32] >> key % 32 & 1);
    };
    float largest = -INFINITE;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
      float& score = x[i / 2][2 * r + i % 2];
      const int key = i / 2 * 8 + i % 2;
      score = is_hidden(key) ? -INFINITE : score * heavy.scale;
      largest = larger_or_nan(largest, score);
    }
    largest = larger_or_nan(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = larger_or_nan(largest, __shfl_xor_sync(~0u, largest, 2));
    const float new_max = larger_or_nan(maxima[r], largest), reference = new_max == -INFINITE ? 0.0f : new_max;
    const float decay = exp2_approximate(maxima[r] - reference);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
      float& weight = x[i / 2][2 * r + i % 2];
      weight = exp2_approximate(weight - (reference - heavy.weight_log2));
      sum += weight;
    }
    sum = sum_of_quad(sum);
    const float others = divisors[r] * decay, divisor = others + sum, positive = divisor == 0.0f ? 1.0f : divisor;
    // Divide by the sum's power of two first, lest V times P leave float32's range. P's rounding stays the same.
    const float power = __int_as_float(__float_as_int(positive) & 0x7F800000);
    inverses[r] = 1.0f / power;
    factors[r] = others * inverses[r];
    ends[r] = power / positive;
    maxima[r] = new_max;
    totals[r] = totals[r] * decay + sum;
  }
#pragma unroll
  for (int block = 0; block < BLOCKS; block++)
#pragma unroll
    for (int i = 0; i < 4; i++) outputs[block][i] *= factors[i / 2];
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++) {
    uint32 p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* weights = x[2 * step + i / 2] + 2 * (i % 2);
      p[i] = pack_16bit<FLOAT16>(weights[0] * inverses[i % 2], weights[1] * inverses[i % 2]);
    }
    const int line = 16 * step + lane % 16;
#pragma unroll
    for (int block = 0; block < BLOCKS; block += 2) {
      uint32 v[4];
      load_transposed(v, heavy.values + block / 8 * LINE + line * 128 + ((block % 8 + lane / 16) ^ line % 8) * 16);
      add_16bit_product<FLOAT16>(outputs[block], p, v[0], v[1]);
      add_16bit_product<FLOAT16>(outputs[block + 1], p, v[2], v[3]);
    }
  }
#pragma unroll
  for (int block = 0; block < BLOCKS; block++)
#pragma unroll
    for (int i = 0; i < 4; i++) outputs[block][i] *= ends[i / 2];
}
