// Statistics for the NVFP4 recipes: sums of blocks of K and V, the means, equalizer and scales from them, and which
// keys are heavy.
#pragma once
#include "nvfp4.cuh"
#include "quiet_groups.cuh"
#include "token_statistics.cuh"

constexpr int KEY_LINES = 2, VALUE_LINES = 4;  // of a block: sums and sums of squares; sums, largest, smallest, finite

// A sequence: its first token in the tensors, its length, and its first row in the operands, a multiple of BLOCK.
struct Sequence {
  int start, length, row;

  DEVICE uint32 blocks() const { return (length + BLOCK - 1) / BLOCK; }
};
// Return a packed sequence from `ranges`, or a batch element's sequence, which has `tokens` tokens.
DEVICE Sequence sequence_of(const int* ranges, uint32 batch, int tokens) {
  if (!PACKED) return {0, tokens, 0};
  return {ranges[3 * batch], ranges[3 * batch + 1], ranges[3 * batch + 2]};
}
DEVICE Sequence queries_of(const Statistics& s, uint32 batch) { return sequence_of(s.q_ranges, batch, s.q_len); }
// Return the keys after the first keys.
DEVICE Sequence tail_of(const Statistics& s, uint32 batch) { return sequence_of(s.kv_ranges, batch, s.kv_len); }
DEVICE Sequence keys_of(const Statistics& s, uint32 batch) { return sequence_of(s.key_ranges, batch, s.keys); }

// Return the reader of a sequence's tokens from `token` on.
DEVICE Reader read(const Tokens& x, uint32 batch, uint32 head, const Sequence& of, int token, int channel,
                   int channels) {
  return Reader(x, PACKED ? 0 : batch, head, of.start + token, of.start + of.length, channel, channels);
}

// Return a head's first row, or block, in operands with `rows` rows, or blocks, for each head.
DEVICE int64 first_of_head(uint32 pair, uint32 heads, uint32 rows) {
  return static_cast<int64>(PACKED ? pair % heads : pair) * rows;
}

// Return the number of a pair's first block of K and of V.
DEVICE int64 first_block_of(const Statistics& s, uint32 pair) {
  return first_of_head(pair, s.kv_heads, s.sum_blocks) + keys_of(s, pair / s.kv_heads).row / BLOCK;
}
constexpr int LINES = KEY_LINES + VALUE_LINES;
// Return the lines of a pair's block, K's before V's; and the lines of one of the pair's heads of Q, like K's.
DEVICE float* line(const Statistics& s, uint32 pair, uint32 block, uint32 number = 0) {
  return s.lines + ((first_block_of(s, pair) + block) * LINES + number) * CHANNELS;
}
DEVICE float* query_line(const Statistics& s, uint32 pair, uint32 member) {
  return s.query_lines + static_cast<int64>(pair * (s.q_heads / s.kv_heads) + member) * (KEY_LINES * CHANNELS);
}

// Return the step between a sequence's rows of Q that decide the equalizer.
DEVICE int sample_step(int queries) { return max((queries + EQUALIZER_QUERIES - 1) / EQUALIZER_QUERIES, 1); }
DEVICE int samples_of(int queries) { return (queries + sample_step(queries) - 1) / sample_step(queries); }

// Return whether a key counts; keys are numbered from the first of all.
DEVICE bool counts(const Statistics& s, uint32 batch, int key) {
  return !PADDED || s.key_mask[batch * s.key_mask_stride + key] != 0;
}

// Reads rows; PADDED leaves out rows that do not count, as keys or, where Q is as long as K, as queries. The keys'
// flags lie `distance` apart, like the rows.
struct PaddedReader : Reader {
  const uint8* key_mask;
  int distance;

  DEVICE PaddedReader(const Reader& rows, const Statistics& s, uint32 batch, int row, int distance)
      : Reader(rows), key_mask(PADDED ? s.key_mask + batch * s.key_mask_stride + row : nullptr), distance(distance) {}

  DEVICE bool has(int number) const { return Reader::has(number) && (!PADDED || key_mask[number * distance] != 0); }
};

// Find the number of keys that count, by group; all threads of a block of MEANS_THREADS call.
DEVICE void count_keys(const Statistics& s, uint32 batch, int (&numbers)[LOUD_GROUPS]) {
  const int group = threadIdx.x;
  if (group < LOUD_GROUPS) numbers[group] = PADDED ? 0 : tokens_of_group(keys_of(s, batch).length, group);
  __syncthreads();
  for (int first = 0; PADDED && first < s.keys; first += MEANS_THREADS) {
    const int key = first + threadIdx.x;
    const uint32 counted = __ballot_sync(~0u, key < s.keys && counts(s, batch, key));
    if (threadIdx.x % 32 == 0) atomicAdd(&numbers[key / BLOCK % LOUD_GROUPS], __popc(counted));
  }
  __syncthreads();
}

// Return the number of keys of the groups whose bits are set, at least 1.
DEVICE int keys_of_groups(const int (&numbers)[LOUD_GROUPS], uint32 groups) {
  int total = 0;
#pragma unroll
  for (int i = 0; i < LOUD_GROUPS; i++) total += groups >> i & 1 ? numbers[i] : 0;
  return max(total, 1);
}

// Return the groups of K that are not loud, a bit for each, from the blocks' sums of squares, LINES apart. All threads
// of a block of MEANS_THREADS call.
DEVICE uint32 find_quiet_groups(const float* squares, int blocks, const int (&numbers)[LOUD_GROUPS]) {
  __shared__ float sums[LOUD_GROUPS][CHANNELS / 32];
  const int channel = threadIdx.x % CHANNELS, group = threadIdx.x / CHANNELS;
  float sum = 0.0f;
  for (int block = group; block < blocks; block += LOUD_GROUPS)
    sum = __fadd_rn(sum, squares[static_cast<int64>(block) * (LINES * CHANNELS) + channel]);
#pragma unroll
  for (int distance = 16; distance >= 1; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  if (threadIdx.x % 32 == 0) sums[group][channel / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < CHANNELS / 32; i++) sum = __fadd_rn(sum, sums[threadIdx.x % LOUD_GROUPS][i]);
  return quiet_groups(__fdiv_rn(sum, static_cast<float>(max(numbers[threadIdx.x % LOUD_GROUPS], 1))));
}

// Return the number of rows of Q that decide the equalizer; all threads call.
DEVICE bool are_queries_padded(const Statistics& s) { return PADDED && s.q_len == s.keys; }
DEVICE int number_of_samples(const Statistics& s, uint32 batch) {
  const int queries = queries_of(s, batch).length, samples = samples_of(queries);
  if (!are_queries_padded(s)) return max(samples, 1);
  const int sample = threadIdx.x;
  return max(__syncthreads_count(sample < samples && counts(s, batch, sample * sample_step(queries))), 1);
}

// Numbers for each channel of a pair: Q's factor, K's factor, then the shift added to K, and to missing tokens.
enum Factor { OF_QUERY, OF_KEY, SHIFT_OF_KEY, ZEROS, FACTORS };

// Return a channel's mean from the sums of blocks, LINES apart: a tree adds 128 block sums, and the results are added
// in order. All 8 threads of a channel get it. Only blocks of the groups whose bits are set count. A non-finite mean
// becomes 0.
DEVICE float mean_of_blocks(const float* sums, int blocks, int tokens, uint32 groups) {
  __shared__ float partial[8][CHANNELS];
  const int channel = threadIdx.x % CHANNELS, row = threadIdx.x / CHANNELS;
  float total = 0.0f;
#pragma unroll 1
  for (int first = 0; first < blocks; first += BLOCK) {
    float x[16], y[8];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int block = first + i * 8 + row;
      x[i] =
          block < blocks && groups >> row & 1 ? sums[static_cast<int64>(block) * (LINES * CHANNELS) + channel] : 0.0f;
    }
    partial[row][channel] = sum_of_halves(x);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = partial[i][channel];
    total = __fadd_rn(total, sum_of_halves(y));
    __syncthreads();
  }
  const float mean = __fdiv_rn(total, static_cast<float>(tokens));
  return is_finite(mean) ? mean : 0.0f;
}

DEVICE float sign_of_rotation(uint32 channel) {
  const uint32 words[4] = {SIGNS_0, SIGNS_1, SIGNS_2, SIGNS_3};
  const uint32 place = channel % ROTATION;
  uint32 signs = words[0];
#pragma unroll
  for (int i = 1; i < CHANNELS / 32; i++)
    if (place / 32 == i) signs = words[i];
  return ROTATION > 1 && signs >> place % 32 & 1 ? -1.0f : 1.0f;
}

// Return the variance, but no less than float32 sums can tell from 0; 0 without squares, or if squares are too large.
DEVICE float variance_of(float mean_square, float mean) {
  if (!(mean_square > 0.0f)) return 0.0f;
  const float square = __fmul_rn(mean, mean);
  return fmaxf(__fsub_rn(mean_square, square), __fmul_rn(square, MIN_VARIANCE));
}

// Return a channel's factor in the equalizer (`transforms.equalize`), given K's mean and mean square.
DEVICE float equalizer_of(const Statistics& s, uint32 pair, uint32 channel, float mean, float mean_square,
                          float samples) {
  const uint32 group = s.q_heads / s.kv_heads;
  float of_query = 0.0f;
  for (uint32 member = 0; member < group; member++) {
    const float* from = query_line(s, pair, member) + channel;
    const float of_samples = __fdiv_rn(from[CHANNELS], samples), square = is_finite(of_samples) ? of_samples : 0.0f;
    of_query = __fadd_rn(of_query, SMOOTH_Q ? variance_of(square, __fdiv_rn(from[0], samples)) : square);
  }
  of_query = __fdiv_rn(of_query, static_cast<float>(group));
  const float variance = variance_of(mean_square, mean);
  const bool some = of_query > 0.0f && variance > 0.0f;
  const float most = __int_as_float(127 + 4 * MAX_EQUALIZER << 23),
              least = __int_as_float(127 - 4 * MAX_EQUALIZER << 23);
  const float ratio = fminf(fmaxf(some ? __fdiv_rn(variance, of_query) : 1.0f, least), most);
  return __int_as_float(((__float_as_int(ratio) >> 23) - 126 + 1 >> 2) + 127 << 23);
}
