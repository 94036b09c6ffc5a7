// Keys in 16 bits, heavy or recent: a warp finds their scores, and merges them with its results of other keys, by the
// maxima and sums of both parts of a row. It does the same as `triton/common/heavy.py`.
//
// Lane 4g + t has rows g and g + 8. Keys and values lie in shared memory, in lines of 64 channels, 128 bytes.
#pragma once
#include "mma.cuh"
#include "tokens.cuh"

constexpr int LINE_CHANNELS = 64;

// A thread's two rows of Q: 8 channels, from 8t on, of each 32.
struct QueryRows {
  const uint16* first;  // channels of the first row
  int64 stride;         // from row to row
  int rows, channels;   // that exist, from there on
};

DEVICE float larger_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Compute Q·Kᵀ of KEYS keys. `load_key(k, section, block)` loads the thread's 8 channels of a section of 32, of key g
// of a block of 8.
template <int KEYS, typename LoadKey>
DEVICE void find_16bit_scores(const QueryRows& query, LoadKey load_key, float (&x)[KEYS / 8][4]) {
#pragma unroll
  for (int section = 0; section < CHANNELS / 32; section++) {
    uint32 words[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      uint4 loaded = make_uint4(0, 0, 0, 0);
      if (8 * r < query.rows && section * 32 < query.channels)
        loaded = *reinterpret_cast<const uint4*>(query.first + 8 * r * query.stride + section * 32);
      words[r][0] = loaded.x, words[r][1] = loaded.y, words[r][2] = loaded.z, words[r][3] = loaded.w;
    }
#pragma unroll
    for (int block = 0; block < KEYS / 8; block++) {
      uint32 k[4];
      load_key(k, section, block);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32 left[4] = {words[0][2 * i], words[1][2 * i], words[0][2 * i + 1], words[1][2 * i + 1]};
        add_16bit_product<FLOAT16>(x[block], left, k[2 * i], k[2 * i + 1]);
      }
    }
  }
}

// Merge KEYS keys with other keys.
//
// x: the KEYS keys' scores, to base 2, -INFINITE where hidden; overwritten. values: address of V in shared memory, in
// lines whose 16-byte parts are swizzled by key. p_log2: of the largest P, to base 2. acc: P·V of the other
// keys, divided by `denominators`, 0 where `denominators` is. row_max, row_sum: both rows' maxima, to base 2, and sums
// of P. All four are updated to cover all keys.
template <int KEYS, int BLOCKS>
DEVICE void merge_keys(float (&x)[KEYS / 8][4], uint32 values, float p_log2, int lane, float (&acc)[BLOCKS][4],
                       float (&row_max)[2], float (&row_sum)[2], float (&denominators)[2]) {
  constexpr int LINE = 2 * LINE_CHANNELS * KEYS;
  float factors[2], ends[2], inverses[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float largest = -INFINITE;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) largest = larger_or_nan(largest, x[i / 2][2 * r + i % 2]);
    largest = larger_or_nan(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = larger_or_nan(largest, __shfl_xor_sync(~0u, largest, 2));
    const float new_max = larger_or_nan(row_max[r], largest), reference = new_max == -INFINITE ? 0.0f : new_max;
    const float decay = exp2_approximate(row_max[r] - reference);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
      float& p = x[i / 2][2 * r + i % 2];
      p = exp2_approximate(p - (reference - p_log2));
      sum += p;
    }
    sum = sum_of_quad(sum);
    const float others = denominators[r] * decay, denominator = others + sum,
                positive = denominator == 0.0f ? 1.0f : denominator;
    // Divide by the sum's power of two first, lest V times P leave float32's range. P's rounding stays the same.
    const int power = __float_as_int(positive) & 0x7F800000;
    inverses[r] = __int_as_float(0x7F000000 - power);  // 1 / power
    factors[r] = others * inverses[r];
    ends[r] = __fdividef(__int_as_float(power), positive);
    row_max[r] = new_max;
    row_sum[r] = row_sum[r] * decay + sum;
    denominators[r] = denominator;
  }
#pragma unroll
  for (int block = 0; block < BLOCKS; block++)
#pragma unroll
    for (int i = 0; i < 4; i++) acc[block][i] *= factors[i / 2];
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++) {
    uint32 p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* two = x[2 * step + i / 2] + 2 * (i % 2);
      p[i] = pack_16bit<FLOAT16>(two[0] * inverses[i % 2], two[1] * inverses[i % 2]);
    }
    const int key = 16 * step + lane % 16;
#pragma unroll
    for (int block = 0; block < BLOCKS; block += 2) {
      uint32 v[4];
      load_transposed(v, values + block / 8 * LINE + key * 128 + ((block % 8 + lane / 16) ^ key % 8) * 16);
      add_16bit_product<FLOAT16>(acc[block], p, v[0], v[1]);
      add_16bit_product<FLOAT16>(acc[block + 1], p, v[2], v[3]);
    }
  }
#pragma unroll
  for (int block = 0; block < BLOCKS; block++)
#pragma unroll
    for (int i = 0; i < 4; i++) acc[block][i] *= ends[i / 2];
}
