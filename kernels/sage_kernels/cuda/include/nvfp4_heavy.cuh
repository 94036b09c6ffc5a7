// Heavy keys of the NVFP4 recipes: their scores, choice and copies.
#pragma once
#include "nvfp4_statistics.cuh"

constexpr int NO_KEY = 0x7FFFFFFF;  // in place of a late key that does not exist
using KeyBlock = Partial<REDUCE_THREADS / 32, true, false>;

// Find the mean query that chooses a pair's heavy keys (`transforms.heavy_places`, `late_keys`), times the softmax
// scale: each thread's 8 channels.
DEVICE void find_mean_query(const Tokens& query, const Statistics& s, uint32 pair, float (&mean)[8]) {
  __shared__ float sums[REDUCE_THREADS / 32][CHANNELS];
  __shared__ alignas(16) float means[CHANNELS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, eight = lane % LANES * 8;
  const Sequence of = queries_of(s, pair / s.kv_heads);
  const uint32 earlier = LATE ? of.length / 2 : 0, counted = of.length - earlier, queries = max(counted, 1u);
  const uint32 group = s.q_heads / s.kv_heads, rows = group * counted;
  const uint32 distance = max((rows + HEAVY_QUERIES - 1) / HEAVY_QUERIES, 1), number = KeyBlock::first_token();
  const uint32 row = number * distance, head = pair % s.kv_heads * group + row / queries;
  uint32 x[4];
  read(query, pair / s.kv_heads, head, of, earlier + row % queries, eight, s.head_dim)
      .load<false>(0, number < HEAVY_QUERIES && row < rows && eight < s.head_dim, x);
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const float y = channel_of(x, c), sum = sum_of_warp_tokens(is_finite(y) ? y : 0.0f);
    if (lane < LANES) sums[warp][eight + c] = sum;
  }
  __syncthreads();
  const float factor = __fdiv_rn(s.softmax_scale, static_cast<float>(max((rows + distance - 1) / distance, 1)));
  if (threadIdx.x < CHANNELS) means[threadIdx.x] = __fmul_rn(sum_of_warps(sums), factor);
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 8; c++) mean[c] = means[eight + c];
}

// Write the scores of 128 keys: their products with the mean query. `reader` is at the thread's first key; its next
// keys follow ROWS_AT_ONCE apart.
DEVICE void write_scores(const PaddedReader& reader, const float (&mean)[8], const Statistics& s, uint32 pair,
                         uint32 block) {
  constexpr int LOADS = KeyBlock::LOADS, APART = KeyBlock::ROWS_AT_ONCE;
  static_assert(LANES == 2 * LOADS, "LANES must be twice the lanes that end with a score");
  const int lane = threadIdx.x % 32;
  float scores[LOADS];
  auto multiply = [&](bool careful) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      uint32 x[4];
      reader.load<false>(i * APART, reader.has(i * APART), x);
      scores[i] = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; w++) {
        if (careful) x[w] &= ~not_finite(x[w]);
        scores[i] = __fmaf_rn(second_of(x[w]), mean[2 * w + 1], __fmaf_rn(first_of(x[w]), mean[2 * w], scores[i]));
      }
      sum += scores[i];
    }
    return sum;
  };
  if (!is_finite(multiply(false))) multiply(true);
  // Add the other lanes' sums: at each step a lane sends half of its sums, and keeps the other half.
  int sum_of_lane = 0;
#pragma unroll
  for (int distance = 1; distance < LOADS; distance *= 2) {
    const int half = LOADS / 2 / distance;
    const bool upper = lane & distance;
    sum_of_lane += upper ? half : 0;
#pragma unroll
    for (int i = 0; i < LOADS / 2; i++)
      if (i < half) {
        const float sent = upper ? scores[i] : scores[i + half];
        scores[i] = (upper ? scores[i + half] : scores[i]) + __shfl_xor_sync(~0u, sent, distance);
      }
  }
  const float score = scores[0] + __shfl_xor_sync(~0u, scores[0], LOADS);
  const int token = KeyBlock::first_token() + sum_of_lane * APART, key = block * BLOCK + token;
  const bool exists =
      key < keys_of(s, pair / s.kv_heads).length && counts(s, pair / s.kv_heads, key) && is_finite(score);
  if (lane % LANES < LOADS) s.scores[(first_block_of(s, pair) + block) * BLOCK + token] = exists ? score : -INFINITE;
}

// Replace scores by their magnitude where it exceeds the sum of the other 15 of their `layout.thread_order`.
DEVICE void raise_loud_scores(float* scores, int keys) {
  for (int scale = threadIdx.x; scale < (keys + 63) / 64 * 4; scale += MEANS_THREADS) {
    float2* pairs = reinterpret_cast<float2*>(scores + scale / 4 * 64) + scale % 4;  // the next pair is 4 behind
    float sum = 0.0f, largest = 0.0f;
    auto magnitude_of = [](float score) { return is_finite(score) ? fabsf(score) : 0.0f; };
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float x = magnitude_of(pairs[4 * i].x), y = magnitude_of(pairs[4 * i].y);
      sum = __fadd_rn(sum, __fadd_rn(x, y));
      largest = fmaxf(largest, fmaxf(x, y));
    }
    if (!(largest > 0.5f * sum)) continue;  // at most one score can
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
      float& score = i % 2 ? pairs[i / 2 * 4].y : pairs[i / 2 * 4].x;
      if (magnitude_of(score) == largest) score = largest;
    }
  }
  __syncthreads();
}

// Choose a pair's heavy keys by their scores, as `transforms.heavy_places` or `late_keys` says.
DEVICE void choose_heavy_keys(const Statistics& s, uint32 pair) {
  constexpr int PARTS = MEANS_THREADS / PLACES;  // of the keys that may take a place
  __shared__ float largest[PARTS][PLACES];
  __shared__ int numbers[PARTS][PLACES];
  const int place = threadIdx.x % PLACES, part = threadIdx.x / PLACES, first = FIRST_KEYS - PLACES + place;
  float* scores = s.scores + first_block_of(s, pair) * BLOCK;
  const int keys = keys_of(s, pair / s.kv_heads).length;
  raise_loud_scores(scores, keys);
  float most = -INFINITE;
  int chosen = first;
  for (int key = first + part * PLACES; key < keys; key += MEANS_THREADS) {
    float score = scores[key];
    if (key == first) score = score == -INFINITE ? INFINITE : __fadd_rn(score, HEAVY_MARGIN);
    if (score > most) most = score, chosen = key;
  }
  largest[part][place] = most, numbers[part][place] = chosen;
  __syncthreads();
  if (part != 0) return;
#pragma unroll
  for (int i = 1; i < PARTS; i++) {
    const bool heavier = largest[i][place] > most || largest[i][place] == most && numbers[i][place] < chosen;
    if (heavier) most = largest[i][place], chosen = numbers[i][place];
  }
  s.chosen[pair * PLACES + place] = LATE && chosen == first ? NO_KEY : chosen;
}

// Return the key that has a token's place; both are counted after the first keys. If it is the token, the token is
// heavy. Tokens PLACES apart have the same place.
DEVICE int chosen_at(const Statistics& s, uint32 pair, int token) {
  return CHOICE ? s.chosen[pair * PLACES + token % PLACES] - FIRST_KEYS : -1;
}
// Return which key gave way to a heavy token.
DEVICE int exchanged(int token) { return token % PLACES - PLACES; }

// Round two numbers to the tokens' 16 bits, to infinity beyond the range; the first is in the lower half.
DEVICE uint32 pack_halves(float a, float b) {
  uint32 y;
  if (FLOAT16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  return y;
}

// Write the heavy keys of one pair minus the mean, and their V unchanged. The first keys lie before the tokens that
// `Tokens` describes.
DEVICE void copy_heavy(const Tokens& key, const Tokens& value, const Statistics& s, const Operands& o, uint32 pair) {
  for (int number = threadIdx.x; number < HEAVY_KEYS * LANES; number += QUANTIZE_THREADS) {
    const int token = number / LANES, channel = number % LANES * 8;
    const int64 row = static_cast<int64>(pair) * HEAVY_KEYS + token;
    const int choice = token - (HEAVY_KEYS - PLACES);
    const int source = CHOICE && choice >= 0 ? s.chosen[pair * PLACES + choice] : token;
    const Sequence of = tail_of(s, pair / s.kv_heads);
    const bool exists = source < keys_of(s, pair / s.kv_heads).length && counts(s, pair / s.kv_heads, source);
    auto load = [&](const Tokens& tokens, int channels, uint32(&x)[4]) {
      read(tokens, pair / s.kv_heads, pair % s.kv_heads, of, exists ? source - FIRST_KEYS : 0, channel, channels)
          .load<true>(0, exists && channel < channels, x);
    };
    uint32 k[4], v[4];
    load(key, s.head_dim, k);
    load(value, s.v_head_dim, v);
    float mean[8];
#pragma unroll
    for (int c = 0; c < 8; c++) mean[c] = exists ? s.key_mean[static_cast<int64>(pair) * CHANNELS + channel + c] : 0.0f;
    // In the order of `layout.heavy_order`.
    uint32* into = reinterpret_cast<uint32*>(o.heavy_key) + row * (CHANNELS / 2) + channel / 32 * 16 + channel / 8 % 4;
#pragma unroll
    for (int w = 0; w < 4; w++)
      into[w * 4] = pack_halves(__fsub_rn(first_of(k[w]), mean[2 * w]), __fsub_rn(second_of(k[w]), mean[2 * w + 1]));
    reinterpret_cast<uint4*>(o.heavy_value)[row * LANES + channel / 8] = make_uint4(v[0], v[1], v[2], v[3]);
  }
}
