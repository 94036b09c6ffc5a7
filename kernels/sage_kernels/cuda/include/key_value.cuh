// K and V as the kernels of quantize.cu read them, and the places of a (batch, kv head) pair's statistics.
#pragma once
#include "tokens.cuh"

constexpr int PARTS = CHANNELS / VALUE_CHANNELS;  // of V in e4m3
constexpr float ONE_448TH = 1.0 / LARGEST_E4M3;

enum Line {
  KEY_MEAN,
  VALUE_INVERSE,                                // factor of V minus its mean; if PV_FLOAT16, V's largest magnitudes
  EXTREMA,                                      // of V, by sharer: largest, smallest, and 1 where all are finite
  ROTATED_MEAN = EXTREMA + 3 * CLUSTER_BLOCKS,  // K's negated mean, equalized, rotated in each section
  FACTORS = ROTATED_MEAN + ROTATE,              // in 16 bits, with the rotation's signs: see `factor_number`
  SQUARES = FACTORS + ROTATE,                   // sums: of K, then of the sample of Q, by sharer
  COUNTS = SQUARES + 2 * CLUSTER_BLOCKS * EQUALIZE,  // of tokens that exist, by sharer: of K, then of V
  HEAVIEST = COUNTS + PADDED,                        // of the keys of each sharer: see `Candidates`
  TAKEN = HEAVIEST + CHOICE * CLUSTER_BLOCKS * 2 * BLOCK / CHANNELS,  // bits of places whose first keys gave way
  SUMS = TAKEN + CHOICE                                               // of K's blocks of 128 tokens, then of V's
};
static_assert(STATISTIC_ROWS == SUMS, "STATISTIC_ROWS must be the lines of a pair before its sums");

DEVICE float* line(const Statistics& s, uint32 pair, uint32 number) {
  return s.lines + (static_cast<int64>(pair) * (SUMS + 2 * s.sum_blocks) + number) * CHANNELS;
}

constexpr int NO_KEY = 0x7FFFFFFF;  // in place of a late key that does not exist

// Return which keys of a batch element exist, heavy keys too.
DEVICE const uint8* key_mask_of(const Statistics& s, uint32 batch) {
  return s.key_mask + batch * static_cast<int64>(s.key_mask_stride);
}

// Reads keys, or values, that may not exist: after the first keys, or with `before` 0 all.
struct KeyReader : Reader {
  const uint8* key_mask;

  DEVICE KeyReader(const Tokens& x, const Statistics& s, uint32 pair, int token, int tokens, int channel, int channels,
                   int before = FIRST_KEYS)
      : Reader(x, pair / s.kv_heads, pair % s.kv_heads, token, tokens, channel, channels),
        key_mask(PADDED ? key_mask_of(s, pair / s.kv_heads) + before + token : nullptr) {}

  DEVICE bool has(int number) const { return Reader::has(number) && (!PADDED || key_mask[number]); }

  DEVICE void skip(int tokens) {
    Reader::skip(tokens);
    if (PADDED) key_mask += tokens;
  }
};

// Return whether N tokens of K and V exist, from `first` on; all threads of the block call.
template <int N>
DEVICE bool all_exist(const Statistics& s, uint32 pair, uint32 first) {
  if (first + N > s.kv_len) return false;
  return !PADDED || __syncthreads_and(key_mask_of(s, pair / s.kv_heads)[FIRST_KEYS + first + threadIdx.x % N]);
}

// Return the larger halves; NaN where either is NaN.
DEVICE uint32 larger(uint32 x, uint32 y) {
  uint32 z;
  if (FLOAT16)
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
// Return the smaller halves; NaN where either is NaN.
DEVICE uint32 smaller(uint32 x, uint32 y) {
  uint32 z;
  if (FLOAT16)
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

DEVICE float exp2_of_integer(int exponent) { return __int_as_float((exponent + 127) << 23); }
