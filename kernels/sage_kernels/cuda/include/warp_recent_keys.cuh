// Recent keys: a warp attends to the latest keys of each of its rows in 16 bits, and merges them with
// what it has of the others, as two parts of a row are merged by their maxima and sums. It does what
// `language/recent.py` does.
//
// Each row has keys of its own, so that their scores are sums of products, in float32, and no matrix product. Lane
// 4g + t has rows g and g + 8: of Q and K eight channels of each 32 from 8t on, and of V, as of the outputs, two of
// each eight from 2t on.
#pragma once
#include "tokens.cuh"
#include "warp_heavy_keys.cuh"

// What a warp needs of them, and of its rows of Q.
struct RecentKeys {
  const uint16* query;                           // the thread's first channels of its first row
  const uint16* key;                             // and of the sequence's first key
  const uint16* value;                           // and of its V
  int64 query_stride, key_stride, value_stride;  // from token to token
  int rows;                                      // that exist, from the thread's first one on
  int channels;                                  // of Q and K, from the thread's first one on
  int value_channels;                            // likewise of V
  int latest;               // number of the latest key that the first row may attend to, if it exists
  int keys;                 // of the sequence
  const int* late;          // numbers of the late ones, if there are any
  const uint8* valid;       // of each key, 0 where it does not exist; null: all exist
  const float* mean_score;  // of the first row: its product with K's mean, which the other scores are without
  float scale;              // of scores, to base 2
  float weight_log2;        // of the largest weight, to base 2
};

// Attend to the KEYS latest keys of each row that are not among the FIRST ones.
//
// outputs: of the others, divided by `divisors`, 0 where that is. maxima, totals: of both rows, to base 2 and sums of
// weights. All become those of all these keys. HAS_VALID: `valid` counts. In place of each of the LATE late keys a row
// attends to the first key that gave way to it: one of the last of the FIRST ones.
template <int KEYS, int FIRST, int LATE, bool HAS_VALID, int BLOCKS>
DEVICE void attend_to_recent_keys(const RecentKeys& recent, float (&outputs)[BLOCKS][4], float (&maxima)[2],
                                  float (&totals)[2], float (&divisors)[2]) {
  constexpr int SECTIONS_OF_32 = CHANNELS / 32;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const bool row_exists = 8 * r < recent.rows;
    auto load = [&](const uint16* from, bool exists, uint32(&words)[SECTIONS_OF_32][4]) {
#pragma unroll
      for (int section = 0; section < SECTIONS_OF_32; section++) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (exists && section * 32 < recent.channels) x = *reinterpret_cast<const uint4*>(from + section * 32);
        words[section][0] = x.x, words[section][1] = x.y, words[section][2] = x.z, words[section][3] = x.w;
      }
    };
    uint32 q[SECTIONS_OF_32][4];
    load(recent.query + 8 * r * recent.query_stride, row_exists, q);
    const float mean_score = row_exists ? __ldg(recent.mean_score + 8 * r) : 0.0f;
#pragma unroll 1
    for (int age = 0; age < KEYS; age++) {
      const int place = recent.latest + 8 * r - age;
      bool exists = row_exists && place >= FIRST && place < recent.keys;
      if (HAS_VALID && exists) exists = recent.valid[place];
      int64 token = place;
      if constexpr (LATE > 0) {
        const int number = place & LATE - 1;
        if (exists && __ldg(recent.late + number) == place) token = FIRST - LATE + number;
      }
      uint32 k[SECTIONS_OF_32][4];
      load(recent.key + token * recent.key_stride, exists, k);
      float score = 0.0f;
#pragma unroll
      for (int section = 0; section < SECTIONS_OF_32; section++)
#pragma unroll
        for (int i = 0; i < 8; i++) score = __fmaf_rn(channel_of(q[section], i), channel_of(k[section], i), score);
      score = sum_of_quad(score);
      score = exists ? (score - mean_score) * recent.scale : -INFINITE;

      const float new_max = larger_or_nan(maxima[r], score), reference = new_max == -INFINITE ? 0.0f : new_max;
      const float decay = exp2_approximate(maxima[r] - reference);
      const float weight = exp2_approximate(score - (reference - recent.weight_log2));
      const float others = divisors[r] * decay, divisor = others + weight;
      const float inverse = 1.0f / (divisor == 0.0f ? 1.0f : divisor);
      const float of_others = others * inverse, of_key = weight * inverse;
      const uint16* value = recent.value + token * recent.value_stride;
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
        uint32 v = 0;
        if (exists && 8 * block < recent.value_channels) v = *reinterpret_cast<const uint32*>(value + 8 * block);
        float* output = outputs[block] + 2 * r;
        output[0] = __fmaf_rn(of_key, first_of(v), output[0] * of_others);
        output[1] = __fmaf_rn(of_key, second_of(v), output[1] * of_others);
      }
      maxima[r] = new_max;
      totals[r] = totals[r] * decay + weight;
      divisors[r] = divisor;
    }
  }
}
