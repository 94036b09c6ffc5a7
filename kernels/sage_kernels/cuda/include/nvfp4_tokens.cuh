// Quantise tokens of Q and K to NVFP4, given the statistics.
#pragma once
#include "nvfp4.cuh"
#include "nvfp4_heavy.cuh"
#include "raw_tokens.cuh"

constexpr int WARPS = QUANTIZE_THREADS / 32;
constexpr float NORM = ROTATION == 128  ? 0.08838834764831845
                       : ROTATION == 64 ? 0.125
                       : ROTATION == 32 ? 0.17677669529663687
                       : ROTATION == 16 ? 0.25
                                        : 1.0;
// Return a channel's place in shared memory: threads of a token read from different banks.
DEVICE int spread_out(int channel) { return channel + channel / 32 * 4; }

struct SharedTokens {
  Partial<WARPS, false, false> partial;
  // Factors of channels; shifts of channels, for tokens that exist, and zeros.
  alignas(16) float factors[CHANNELS + CHANNELS / 8], shifts[2][CHANNELS + CHANNELS / 8];
  uint32 largest[2][WARPS];  // of this block, and of the previous block
};

// Rotate a token's channels, 32 in each of its threads, but leave the factors of the thread's groups to `norms`.
// Afterwards these groups are `first_group()` and `second_group()`.
DEVICE void rotate(float (&x)[2][GROUP], float (&norms)[2]) {
#pragma unroll
  for (int distance = 1; distance < GROUP; distance *= 2)
#pragma unroll
    for (int i = 0; i < 2 * GROUP; i++)
      if (!(i & distance)) {
        float &a = x[i / GROUP][i % GROUP], &b = x[i / GROUP][i % GROUP + distance];
        const float difference = __fsub_rn(a, b);
        a = __fadd_rn(a, b), b = difference;
      }
  // A butterfly of distance 16 n leaves one of its two numbers with the thread, and sends the other to the thread with
  // its partner for distance 32 n. A thread that has the second of two partners gets minus their difference.
  const int t = threadIdx.x % TOKEN_THREADS;
  const float sign = t & 1 ? -1.0f : 1.0f, next_sign = t & 2 ? -1.0f : 1.0f;
  norms[0] = norms[1] = NORM;
  if (ROTATION == CHANNELS) {
    if (TOKEN_THREADS == 4 && t & 2) norms[0] = NORM * sign;
    norms[1] = norms[0] * (TOKEN_THREADS == 4 ? next_sign : sign);
  }
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    float &a = x[0][i], &b = x[1][i];
    if (ROTATION == CHANNELS) {
      float kept = __fmaf_rn(sign, b, a), got = __shfl_xor_sync(~0u, __fmaf_rn(-sign, b, a), 1);
      if (TOKEN_THREADS == 4) {
        const float sent = __fmaf_rn(-next_sign, got, kept);
        kept = __fmaf_rn(next_sign, got, kept);
        got = __shfl_xor_sync(~0u, sent, 2);
      }
      a = __fadd_rn(kept, got), b = __fsub_rn(kept, got);
    } else if (ROTATION == 32) {
      const float difference = __fsub_rn(a, b);
      a = __fadd_rn(a, b), b = difference;
    }
  }
}
DEVICE int first_group() {
  return ROTATION == CHANNELS ? threadIdx.x % TOKEN_THREADS : threadIdx.x % TOKEN_THREADS * 2;
}
DEVICE int second_group() { return first_group() + (ROTATION == CHANNELS ? TOKEN_THREADS : 1); }

// Return a group's largest finite magnitude, given its largest.
DEVICE float largest_finite(const float (&x)[GROUP], float largest) {
  if (largest < INFINITE) return largest;
  float y = 0.0f;
  if (ROTATION == 1)  // otherwise none is finite
#pragma unroll
    for (int i = 0; i < GROUP; i++) y = fmaxf(y, is_finite(x[i]) ? fabsf(x[i]) : 0.0f);
  return y;
}

// Quantise a group times `factor`: return its codes, set its scale's code. largest: the products' largest magnitude, or
// NaN.
template <bool OF_KEY>
DEVICE uint2 quantize(float (&x)[GROUP], float factor, float largest, const Search& search, uint32& scale) {
  if constexpr (Steps<OF_KEY>::COUNT > 0) {
    uint32 halves[GROUP / 2];
    pack_group(x, factor, halves);
    const float rounded = half_of(pack_float16(largest, 0.0f));
    return search_group<OF_KEY>(halves, rounded, search, scale);
  } else {
    if (ROTATION > 1 || TENSOR_SCALE)
#pragma unroll
      for (int i = 0; i < GROUP; i++) x[i] = __fmul_rn(x[i], factor);
    return quantize_group(x, largest, scale);
  }
}

// Quantise blocks of 128 tokens of Q, or of K, of one (batch, head): from `first` to before `last`.
template <bool IS_QUERY>
DEVICE void quantize_tokens(const Tokens& tokens, const Statistics& s, const Operands& o, uint32 pair, uint32 first,
                            uint32 last, RawTokens& raw, SharedSearch& rows, SharedTokens& shared) {
  const uint32 heads = IS_QUERY ? s.q_heads : s.kv_heads, group = IS_QUERY ? s.q_heads / s.kv_heads : 1;
  const uint32 batch = pair / heads, head = pair % heads, pair_of_key = batch * s.kv_heads + head / group;
  const Sequence of = IS_QUERY ? queries_of(s, batch) : tail_of(s, batch);
  const int length = of.length;
  last = min(last, of.blocks());
  if (PACKED && first >= last) return;
  Reader next = token_reader(tokens, PACKED ? 0 : batch, head, of.start + first * BLOCK, of.start + length, s.head_dim);
  const int token = threadIdx.x / TOKEN_THREADS, channel = threadIdx.x % TOKEN_THREADS * 32;
  const float* factors = s.factors + static_cast<int64>(pair_of_key) * FACTORS * CHANNELS;
  constexpr bool SMOOTH = IS_QUERY ? SMOOTH_Q : SMOOTH_K;
  bring_tokens(next, raw);
  grid_dependency_wait();
  if (threadIdx.x < CHANNELS) {
    const int at = spread_out(threadIdx.x);
    shared.factors[at] = factors[(IS_QUERY ? OF_QUERY : OF_KEY) * CHANNELS + threadIdx.x];
    shared.shifts[0][at] = IS_QUERY ? 0.0f : factors[SHIFT_OF_KEY * CHANNELS + threadIdx.x];
    shared.shifts[1][at] = 0.0f;
  }
  const Search search{reinterpret_cast<const SearchRow*>(IS_QUERY ? o.search : o.key_search), rows};
  load_search<!IS_QUERY>(search.table, rows);
  const int chosen = IS_QUERY ? -1 : chosen_at(s, pair, token);
#pragma unroll 1
  for (uint32 block = first; block < last; block++) {
    const int64 first_row = first_of_head(pair, heads, IS_QUERY ? o.q_rows : o.kv_rows) + of.row + block * BLOCK;
    const int number = block * BLOCK + token;
    const bool moved = CHOICE && !IS_QUERY && number == chosen;
    bool exists = number < length;
    if (PADDED && !IS_QUERY) exists = exists && counts(s, batch, (moved ? exchanged(number) : number) + FIRST_KEYS);
    uint32 words[4][4];
    wait_for_tokens();
    if (IS_QUERY && SMOOTH) __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 y = *raw.at(threadIdx.x / 32, token % WARP_TOKENS, threadIdx.x % TOKEN_THREADS * 4 + i);
      words[i][0] = y.x, words[i][1] = y.y, words[i][2] = y.z, words[i][3] = y.w;
    }
    if (PADDED && !IS_QUERY && !exists)
#pragma unroll
      for (int i = 0; i < 16; i++) words[i / 4][i % 4] = 0;
    if (CHOICE && !IS_QUERY && moved && exists) {
      const Reader reader = read(tokens, batch, head, of, exchanged(number), channel, s.head_dim);
#pragma unroll
      for (int i = 0; i < 4; i++) reader.load<false>(0, channel + i * 8 < s.head_dim, words[i], i * 8);
    }
    if (IS_QUERY && SMOOTH) {
      const int count = min(length - static_cast<int>(block) * BLOCK, BLOCK);
      const RawReader reader(raw, shared.partial.first_token(), count);
      const Reduced reduced = reduce_block(reader, count < BLOCK, shared.partial);
      if (threadIdx.x < CHANNELS) {
        const float mean = __fdiv_rn(reduced.sum, static_cast<float>(count));
        o.query_mean[(first_row / BLOCK) * CHANNELS + threadIdx.x] = mean;
        shared.shifts[0][spread_out(threadIdx.x)] = -__fmul_rn(mean, shared.factors[spread_out(threadIdx.x)]);
      }
      __syncthreads();
    } else {
      __syncwarp();
    }
    if (block + 1 < last) bring_tokens(next, raw);
    if (IS_QUERY && MEAN_SCORE) {
      const float* means = s.key_mean + static_cast<int64>(pair_of_key) * CHANNELS + channel;
      float score = 0.0f;
#pragma unroll
      for (int i = 0; i < 32; i++) score = __fmaf_rn(channel_of(words[i / 8], i % 8), __ldg(means + i), score);
#pragma unroll
      for (int distance = 1; distance < TOKEN_THREADS; distance *= 2) score += __shfl_xor_sync(~0u, score, distance);
      if (threadIdx.x % TOKEN_THREADS == 0) o.mean_score[first_row + token] = score;
    }
    const float* factor_of = shared.factors + spread_out(channel);
    const float* shift_of = shared.shifts[!exists] + spread_out(channel);
    float x[2][GROUP];
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      float4 factor = make_float4(1.0f, 1.0f, 1.0f, 1.0f), shift = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (EQUALIZE || ROTATION > 1) factor = *reinterpret_cast<const float4*>(factor_of + i);
      if (SMOOTH) shift = *reinterpret_cast<const float4*>(shift_of + i);
      // Factors are powers of two: this rounds like the difference from the mean.
      float* y = x[i / GROUP] + i % GROUP;
      y[0] = __fmaf_rn(channel_of(words[i / 8], i % 8), factor.x, shift.x);
      y[1] = __fmaf_rn(channel_of(words[i / 8], i % 8 + 1), factor.y, shift.y);
      y[2] = __fmaf_rn(channel_of(words[i / 8], i % 8 + 2), factor.z, shift.z);
      y[3] = __fmaf_rn(channel_of(words[i / 8], i % 8 + 3), factor.w, shift.w);
    }
    float norms[2] = {1.0f, 1.0f};
    if (ROTATION > 1) rotate(x, norms);
    // Rounding is monotonic: the largest of the products is the product of the largest.
    float largest[2];
#pragma unroll
    for (int i = 0; i < 2; i++) largest[i] = __fmul_rn(largest_magnitude(x[i]), fabsf(norms[i]));
    float inverse = 1.0f, scale = 1.0f;
    if (TENSOR_SCALE) {
      const float of_thread = fmaxf(largest_finite(x[0], largest[0]), largest_finite(x[1], largest[1]));
      const uint32 of_warp = __reduce_max_sync(~0u, __float_as_uint(of_thread));
      if (threadIdx.x % 32 == 0) shared.largest[block % 2][threadIdx.x / 32] = of_warp;
      __syncthreads();
      const uint32 of_block = __reduce_max_sync(~0u, shared.largest[block % 2][threadIdx.x % WARPS]);
      scale = least_power_of_two(__uint_as_float(of_block), inverse);
    }
    if (threadIdx.x == 0) (IS_QUERY ? o.query_tensor_scale : o.key_tensor_scale)[first_row / BLOCK] = scale;
    const int place = IS_QUERY ? token : token / 32 * 32 + token % 8 / 2 * 8 + token % 32 / 8 * 2 + token % 2;
    const int64 row = first_row + place;
    uint2* codes = reinterpret_cast<uint2*>(IS_QUERY ? o.query : o.key) + row * (CHANNELS / GROUP);
    uint8* scales = (IS_QUERY ? o.query_scale : o.key_scale) + row * (CHANNELS / GROUP);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int number = i == 0 ? first_group() : second_group();
      const float factor = __fmul_rn(norms[i], inverse);
      uint32 code;
      codes[number] = quantize<!IS_QUERY>(x[i], factor, __fmul_rn(largest[i], inverse), search, code);
      scales[number] = code;
    }
  }
}
