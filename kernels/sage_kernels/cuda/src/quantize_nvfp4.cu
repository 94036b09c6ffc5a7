// Write the operands of `sage3` and `sage3_paper`, bit for bit as `triton/quantize/nvfp4.py`, in three launches:
// `reduce` sums blocks of K, V and a sample of Q, `means` adds these sums, `quantize` reads Q, K and V.
//
// The host, `quantize_nvfp4.py`, provides the kernels' parameters, their structs, and all compile-time constants not
// defined here.
#include "barrier.cuh"
#include "nvfp4_heavy.cuh"
#include "nvfp4_statistics.cuh"
#include "nvfp4_tokens.cuh"
#include "nvfp4_values.cuh"
#include "parameters.cuh"

static_assert(BLOCK == 128, "BLOCK must be 128 tokens: a tree sums them, and operands are padded to a multiple");
static_assert(REDUCE_THREADS == 256, "REDUCE_THREADS must be 256: 8 warps");
static_assert(MEANS_THREADS == 8 * CHANNELS, "MEANS_THREADS must be 8 for each channel");
static_assert(QUANTIZE_THREADS == BLOCK * CHANNELS / 32,
              "QUANTIZE_THREADS must be one for each 32 elements of a block");
static_assert(RESIDENT_THREADS % QUANTIZE_THREADS == 0, "RESIDENT_THREADS of a multiprocessor must be whole blocks");
static_assert(ROTATION == 1 || ROTATION == 16 || ROTATION == 32 || ROTATION == CHANNELS,
              "ROTATION must be 1 (none), CHANNELS, or a thread's 16 or 32 channels");
static_assert(HEAVY_KEYS == 0 || HEAVY_KEYS == 64, "HEAVY_KEYS must be 0 or 64: a block writes a pair's heavy keys");
static_assert(MIN_MEAN > 0.0 && MIN_MEAN < 1.0, "MIN_MEAN must be a fraction of the largest distance from the mean");
static_assert(MIN_VARIANCE > 0.0 && MIN_VARIANCE < 1.0, "MIN_VARIANCE must be a fraction of the squared mean");
static_assert(MAX_EQUALIZER > 0 && MAX_EQUALIZER < 16,
              "MAX_EQUALIZER must be 1 to 15: its fourth power is a float32 number");
ASSERT_FLAG(SMOOTH_Q, "whether Q's means are subtracted and written");
ASSERT_FLAG(SMOOTH_K, "whether K's mean is subtracted");
ASSERT_FLAG(SMOOTH_V, "whether V's mean is subtracted where it is large");
ASSERT_FLAG(EQUALIZE, "whether Q and K are equalized");
ASSERT_FLAG(TENSOR_SCALE, "whether blocks of Q and K, and heads of V, have a power of two as scale");
ASSERT_FLAG(MEAN_SCORE, "whether Q's products with K's mean are written");
ASSERT_FLAG(PADDED, "whether keys may be left out");
ASSERT_FLAG(PACKED, "whether sequences lie one after the other");
static_assert(EQUALIZER_QUERIES == BLOCK,
              "EQUALIZER_QUERIES must be BLOCK: these rows of Q are reduced like a block of K");
ASSERT_FLAG(CHOICE, "whether heavy keys are chosen, or the first keys");
static_assert(!CHOICE || HEAVY_KEYS > 0, "CHOICE needs HEAVY_KEYS");
ASSERT_FLAG(LATE, "whether chosen keys are late keys, or take first keys' places");
static_assert(!LATE || CHOICE, "LATE needs CHOICE");
static_assert(!CHOICE || PLACES == 64 || PLACES == 16, "PLACES of chosen keys must be 64 or 16");
static_assert(FIRST_KEYS == HEAVY_KEYS - LATE * PLACES, "FIRST_KEYS must be HEAVY_KEYS without the late keys");
static_assert(HEAVY_MARGIN > 0.0, "HEAVY_MARGIN must be more than 0: equal keys keep their places");
static_assert(HEAVY_QUERIES == 16, "HEAVY_QUERIES must be 16 rows of Q, which a block loads at once");

// Reduce up to `sum_run` blocks of a pair's K or V, or a head's sample of Q.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS, RESIDENT_THREADS / REDUCE_THREADS)
    reduce(REDUCE_PARAMETERS) {
  launch_dependents();
  using ValueBlock = Partial<REDUCE_THREADS / 32, false, true>;
  __shared__ union {
    KeyBlock of_key;
    ValueBlock of_value;
  } partial;
  const int channel = threadIdx.x, eight = channel % 32 % LANES * 8, first = KeyBlock::first_token();
  const uint32 of_pair = 2 * statistics.sum_runs, group = statistics.q_heads / statistics.kv_heads;
  if (blockIdx.x >= statistics.pairs * of_pair) {
    const uint32 number = blockIdx.x - statistics.pairs * of_pair, pair = number / group;
    const uint32 batch = number / statistics.q_heads;
    const Sequence of = queries_of(statistics, batch);
    const int step = sample_step(of.length);
    Reader reader = read(query, batch, number % statistics.q_heads, of, first * step, eight, statistics.head_dim);
    reader.stride *= step;
    reader.tokens_left = eight < statistics.head_dim ? samples_of(of.length) - first : 0;
    auto reduce_rows = [&](const auto& rows) { return reduce_block(rows, true, partial.of_key); };
    const Reduced reduced = are_queries_padded(statistics)
                                ? reduce_rows(PaddedReader(reader, statistics, batch, first * step, step))
                                : reduce_rows(reader);
    if (channel >= CHANNELS) return;
    float* into = query_line(statistics, pair, number % group) + channel;
    into[0] = reduced.sum, into[CHANNELS] = reduced.squares;
    return;
  }
  const uint32 pair = blockIdx.x / of_pair, number = blockIdx.x % of_pair, batch = pair / statistics.kv_heads;
  const bool of_value = number >= statistics.sum_runs;
  uint32 block = (of_value ? number - statistics.sum_runs : number) * statistics.sum_run;
  const Sequence of = keys_of(statistics, batch);
  const uint32 last = min(block + statistics.sum_run, of.blocks());
  auto read_block = [&](const Tokens& tokens, int channels) {
    const Reader rows = read(tokens, batch, pair % statistics.kv_heads, of, block * BLOCK + first, eight, channels);
    return PaddedReader(rows, statistics, batch, block * BLOCK + first, 1);
  };
  auto lacks_some = [&] {
    if ((block + 1) * BLOCK > of.length) return true;
    return PADDED && !__syncthreads_and(counts(statistics, batch, block * BLOCK + threadIdx.x % BLOCK));
  };
  if (of_value) {
#pragma unroll 1
    for (; block < last; block++) {
      const Reduced reduced = reduce_block(read_block(value, statistics.v_head_dim), lacks_some(), partial.of_value);
      if (channel < CHANNELS) {
        float* into = line(statistics, pair, block, KEY_LINES) + channel;
        into[0] = reduced.sum, into[CHANNELS] = reduced.largest, into[2 * CHANNELS] = reduced.smallest;
        into[3 * CHANNELS] = reduced.finite;
      }
      __syncthreads();  // until `partial` has been read
    }
    return;
  }
  float mean[8];
  if (CHOICE && block < last) find_mean_query(query, statistics, pair, mean);
#pragma unroll 1
  for (; block < last; block++) {
    const PaddedReader reader = read_block(key, statistics.head_dim);
    if (CHOICE) write_scores(reader, mean, statistics, pair, block);
    if (SMOOTH_K || EQUALIZE) {
      const Reduced reduced = reduce_block(reader, lacks_some(), partial.of_key);
      if (channel < CHANNELS) {
        float* into = line(statistics, pair, block) + channel;
        into[0] = reduced.sum, into[CHANNELS] = reduced.squares;
      }
      __syncthreads();
    }
  }
}

// Find the mean of a pair's K or V, and the factors and scales that follow.
extern "C" __global__ void __launch_bounds__(MEANS_THREADS) means(MEANS_PARAMETERS) {
  const uint32 pair = blockIdx.x / 2, channel = threadIdx.x % CHANNELS, row = threadIdx.x / CHANNELS;
  const int64 at = static_cast<int64>(pair) * CHANNELS + channel;
  launch_dependents();
  grid_dependency_wait();
  __shared__ int numbers[LOUD_GROUPS];
  count_keys(statistics, pair / statistics.kv_heads, numbers);
  const int blocks = keys_of(statistics, pair / statistics.kv_heads).blocks();
  if (blockIdx.x % 2 == 0) {
    if constexpr (CHOICE) choose_heavy_keys(statistics, pair);
    float mean = 0.0f, factor = 1.0f;
    const uint32 groups = EQUALIZE ? find_quiet_groups(line(statistics, pair, 0, 1), blocks, numbers) : ~0u;
    const int keys = keys_of_groups(numbers, groups);
    if (SMOOTH_K || EQUALIZE) mean = mean_of_blocks(line(statistics, pair, 0), blocks, keys, groups);
    if (EQUALIZE) {
      const float square = mean_of_blocks(line(statistics, pair, 0, 1), blocks, keys, groups);
      factor = equalizer_of(statistics, pair, channel, mean, square,
                            number_of_samples(statistics, pair / statistics.kv_heads));
    }
    if (row != 0) return;
    if (!SMOOTH_K) mean = 0.0f;
    statistics.key_mean[at] = mean;
    if (EQUALIZE) statistics.equalizer[at] = factor;
    float* factors = statistics.factors + static_cast<int64>(pair) * FACTORS * CHANNELS + channel;
    const float sign = sign_of_rotation(channel), inverse = __fmul_rn(sign, __fdiv_rn(1.0f, factor));
    factors[OF_QUERY * CHANNELS] = __fmul_rn(sign, factor);
    factors[OF_KEY * CHANNELS] = inverse;
    factors[SHIFT_OF_KEY * CHANNELS] = -__fmul_rn(mean, inverse);
    factors[ZEROS * CHANNELS] = 0.0f;
    return;
  }
  __shared__ float extrema[3][8][CHANNELS];
  __shared__ uint32 most;
  const float* lines = line(statistics, pair, 0, KEY_LINES);
  float largest = -INFINITE, smallest = INFINITE, finite = 1.0f;
  for (int block = row; block < blocks; block += 8) {
    const float* from = lines + (static_cast<int64>(block) * LINES + 1) * CHANNELS + channel;
    largest = fmaxf(largest, from[0]);
    smallest = fminf(smallest, from[CHANNELS]);
    finite = fminf(finite, from[2 * CHANNELS]);
  }
  extrema[0][row][channel] = largest, extrema[1][row][channel] = smallest, extrema[2][row][channel] = finite;
  if (threadIdx.x == 0) most = 0;
  float mean = 0.0f;
  if (SMOOTH_V) mean = mean_of_blocks(lines, blocks, keys_of_groups(numbers, ~0u), ~0u);
  __syncthreads();
  if (row == 0) {
#pragma unroll
    for (int i = 1; i < 8; i++) {
      largest = fmaxf(largest, extrema[0][i][channel]);
      smallest = fminf(smallest, extrema[1][i][channel]);
      finite = fminf(finite, extrema[2][i][channel]);
    }
    // Rounding is monotonic: the extrema of V - mean are V's extrema minus the mean.
    auto spread = [&] { return fmaxf(fabsf(__fsub_rn(largest, mean)), fabsf(__fsub_rn(smallest, mean))); };
    if (!(fabsf(mean) > __fmul_rn(spread(), MIN_MEAN))) mean = 0.0f;
    const float amax = largest < smallest ? 0.0f : spread();
    statistics.value_mean[at] = mean;
    statistics.value_amax[at] = finite == 0.0f ? __int_as_float(0x7FC00000) : amax;
    atomicMax(&most, __float_as_uint(amax));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    statistics.value_tensor_amax[pair] = __uint_as_float(most);
    float inverse;
    statistics.value_tensor_scale[pair] = TENSOR_SCALE ? least_power_of_two(__uint_as_float(most), inverse) : 1.0f;
  }
}

struct Shared {
  RawTokens raw;
  SharedSearch search;
  union {
    SharedTokens tokens;
    SharedValue value;
  };
};
static_assert(RAW_WARPS == WARPS, "a warp must load the tokens that its threads quantise");

// Quantise K and V, from the last pair to the first, while the L2 cache holds the pairs that `reduce` read last; then
// Q. A block of the grid has up to `run` blocks of tokens.
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS, RESIDENT_THREADS / QUANTIZE_THREADS)
    quantize(QUANTIZE_PARAMETERS) {
  __shared__ Shared shared;
  const uint32 of_pair = 2 * operands.kv_runs + (HEAVY_KEYS > 0);
  if (blockIdx.x >= statistics.pairs * of_pair) {
    const uint32 number = blockIdx.x - statistics.pairs * of_pair, first = number % operands.q_runs * operands.run;
    quantize_tokens<true>(query, statistics, operands, number / operands.q_runs, first,
                          min(first + operands.run, operands.q_blocks), shared.raw, shared.search, shared.tokens);
    return;
  }
  const uint32 pair = statistics.pairs - 1 - blockIdx.x / of_pair, number = blockIdx.x % of_pair;
  if (number < 2 * operands.kv_runs) {
    const uint32 first = number % operands.kv_runs * operands.run, last = min(first + operands.run, statistics.blocks);
    if (number < operands.kv_runs)
      quantize_tokens<false>(key, statistics, operands, pair, first, last, shared.raw, shared.search, shared.tokens);
    else
      quantize_values(value, statistics, operands, pair, first, last, shared.raw, shared.search, shared.value);
  } else {
    grid_dependency_wait();
    copy_heavy(key, value, statistics, operands, pair);
  }
}
