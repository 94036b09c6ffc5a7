// Write the operands of `sage2`, `sage1` and `sage_bwd` for Hopper, bit for bit as the Triton quantisers
// (`triton/quantize/int8.py`, `triton/quantize/value.py`), in two launches: `statistics` reads K and V for their means
// and V's scales, `quantize` reads Q, K and V. A thread loads 16 bytes, 8 channels of a token, at a time, and issues
// all loads before it uses the first.
//
// Rotated operands differ from Triton's and the reference's where a sum in another order rounds to another code.
//
// The host, `quantize.py`, provides the kernels' parameters, their structs, and all compile-time constants not defined
// here.
//
// A pair is a (batch, kv head) of K and V. `Line` names a pair's lines of CHANNELS.
#include "barrier.cuh"
#include "int8_operands.cuh"
#include "int8_statistics.cuh"
#include "parameters.cuh"

static_assert(BLOCK == 128, "BLOCK must be 128 tokens: a tree sums them, and operands are padded to a multiple");
static_assert(HALF_BLOCK == 64,
              "HALF_BLOCK must be 64 tokens of Q, K, or V in float16: 16 for each of a block's warps");
static_assert(CLUSTER_BLOCKS == 8,
              "CLUSTER_BLOCKS of a pair's K, or V, must be 8: blocks of a cluster, each with LANES channels");
static_assert(CLUSTER_BLOCKS == LOUD_GROUPS, "CLUSTER_BLOCKS must be LOUD_GROUPS: a sharer's blocks of K are a group");
static_assert(VALUE_CHANNELS == 64, "VALUE_CHANNELS of V in e4m3 must be 64: 8 for each of the 8 threads of a row");
static_assert(STATISTICS_THREADS == CHANNELS, "STATISTICS_THREADS must be CHANNELS: a thread for each");
static_assert(QUANTIZE_THREADS == 128, "QUANTIZE_THREADS must be 128: 4 warps");
static_assert(HEADROOM_EXPONENT > 0 && HEADROOM_EXPONENT <= 15, "HEADROOM_EXPONENT of V in float16 must be 1 to 15");
static_assert(LARGEST_E4M3 == 448.0, "LARGEST_E4M3 must be 448");
static_assert(MIN_MEAN > 0.0 && MIN_MEAN < 1.0, "MIN_MEAN must be a fraction of the largest distance from the mean");
static_assert(ERROR_STEP == 1.0 / 32.0, "ERROR_STEP must be 1/32, the spacing of float16 numbers around 48");
static_assert(LARGEST_MOVE == 0.5 / BLOCK, "LARGEST_MOVE must be half of an element's share of a block's sum");
static_assert(KEY_BLOCK == HALF_BLOCK && KEYS_PER_SCALE == 16,
              "KEY_BLOCK and KEYS_PER_SCALE must be 64 and 16: each of a block's warps finds one scale of K");
ASSERT_FLAG(PV_FLOAT16, "whether V is in float16, with its mean and one scale for all channels, or in e4m3");
ASSERT_FLAG(MEAN_SCORE, "whether Q's products with K's mean are written");
ASSERT_FLAG(ROTATE, "whether Q and K are rotated");
ASSERT_FLAG(PADDED, "whether some keys may be missing");
ASSERT_FLAG(EQUALIZE, "whether Q and K are equalized before they are rotated");
ASSERT_FLAG(CHOICE, "whether heavy keys are chosen, or the first keys");
ASSERT_FLAG(QUEUE, "whether the forward kernel takes items from a queue");
static_assert(ROTATE || !EQUALIZE, "EQUALIZE needs ROTATE: factors are applied by the rotation");
static_assert(MAX_EQUALIZER > 0 && MAX_EQUALIZER < 15, "MAX_EQUALIZER must be 1 to 14: factors are normal in float16");
static_assert(MIN_VARIANCE > 0.0 && MIN_VARIANCE < 1.0, "MIN_VARIANCE must be a fraction of the squared mean");
#define ASSERT_SIGNS(NAME) \
  static_assert(NAME >= 0 && NAME <= 0xFFFFFFFF, #NAME " must be 32 bits, ones where the rotation negates a channel")
ASSERT_SIGNS(SIGNS_0);
ASSERT_SIGNS(SIGNS_1);
ASSERT_SIGNS(SIGNS_2);
ASSERT_SIGNS(SIGNS_3);
static_assert(HEAVY_KEYS == 0 || HEAVY_KEYS == HALF_BLOCK,
              "HEAVY_KEYS must be 0 or 64: a block writes a pair's heavy keys, 16 for each of its warps");
static_assert(MEAN_PARTS == 8, "MEAN_PARTS must be 8 rows of a matrix product: three parts of K's mean, then zeros");
static_assert(!CHOICE || HEAVY_KEYS > 0, "CHOICE needs HEAVY_KEYS");
ASSERT_FLAG(LATE, "whether chosen keys are late keys, or take first keys' places");
static_assert(!LATE || CHOICE, "LATE needs CHOICE");
static_assert(PLACES == 64 || PLACES == 16,
              "PLACES of chosen keys must be 64 or 16, which divide a block's candidates");
static_assert(FIRST_KEYS == HEAVY_KEYS - LATE * PLACES, "FIRST_KEYS must be HEAVY_KEYS without the late keys");
static_assert(HEAVY_MARGIN > 0.0, "HEAVY_MARGIN must be more than 0: equal keys keep their places");
static_assert(HEAVY_QUERIES == 16, "HEAVY_QUERIES must be 16 rows of Q: a block loads eight rows at once, twice");

// Least number of a multiprocessor's threads: a thread has 64 registers of tokens; with more threads, over two spill.
constexpr int RESIDENT_CHANNELS = PADDED || ROTATE && !EQUALIZE ? 384 : 512;

// Find the means of K and V, V's scales, and K's and Q's equalizer: each pair has a cluster for K and a cluster for V.
extern "C" __global__ void __cluster_dims__(CLUSTER_BLOCKS, 1, 1)
    __launch_bounds__(STATISTICS_THREADS, RESIDENT_CHANNELS / CHANNELS) statistics(STATISTICS_PARAMETERS) {
  launch_dependents();
  const uint32 sharer = blockIdx.x % CLUSTER_BLOCKS, pair = blockIdx.x / CLUSTER_BLOCKS / 2;
  const bool of_value = blockIdx.x / CLUSTER_BLOCKS % 2;
  float* sums = line(statistics, pair, SUMS + of_value * statistics.sum_blocks);
  const int row = threadIdx.x / 32 + threadIdx.x % 32 / LANES * WARPS, all = statistics.kv_len + FIRST_KEYS;
  const KeyReader reader(of_value ? value : key, statistics, pair, sharer * BLOCK + row, all, threadIdx.x % LANES * 8,
                         of_value ? statistics.v_head_dim : statistics.head_dim, 0);
  const uint8* key_mask = PADDED ? key_mask_of(statistics, pair / statistics.kv_heads) : nullptr;
  ChannelStatistics reduced;
  if (of_value) {
    reduced = reduce_blocks<true>(reader, query, statistics, equalizer, pair, key_mask, sums);
    float* extrema = line(statistics, pair, EXTREMA + 3 * sharer) + threadIdx.x;
    extrema[0] = reduced.largest, extrema[CHANNELS] = reduced.smallest, extrema[2 * CHANNELS] = reduced.finite;
  } else {
    reduced = reduce_blocks<false>(reader, query, statistics, equalizer, pair, key_mask, sums);
    if (EQUALIZE) line(statistics, pair, SQUARES + sharer)[threadIdx.x] = reduced.squares;
  }
  float* counts = line(statistics, pair, COUNTS) + of_value * CLUSTER_BLOCKS;
  if (PADDED && threadIdx.x == 0) counts[sharer] = reduced.count;
  sync_cluster();
  const uint32 sharers = EQUALIZE && !of_value ? quiet_sharers(statistics, pair, counts) : ~0u;
  const float tokens = tokens_of_sharers(statistics, counts, sharers);
  const uint32 channel = sharer * LANES + threadIdx.x % LANES;
  float mean = mean_of_blocks(sums + sharer * LANES, statistics.sum_blocks, tokens, sharers);
  if (ROTATE && !of_value) {
    if (threadIdx.x < LANES) line(statistics, pair, KEY_MEAN)[channel] = mean;
    prepare_rotation(statistics, equalizer, pair, channel, mean, sharers, tokens);
  }
  if (CHOICE && !of_value && sharer == CLUSTER_BLOCKS - 1 && threadIdx.x < CHOOSERS)
    choose_heavy_key(statistics, pair, threadIdx.x);
  if (ROTATE && !of_value) return;
  if (threadIdx.x >= LANES) return;
  if (!of_value) {
    line(statistics, pair, KEY_MEAN)[channel] = mean;
    return;
  }
  float largest = -INFINITE, smallest = INFINITE, finite = 1.0f;
#pragma unroll
  for (int i = 0; i < CLUSTER_BLOCKS; i++) {
    const float* extrema = line(statistics, pair, EXTREMA + 3 * i) + channel;
    largest = fmaxf(largest, extrema[0]);
    smallest = fminf(smallest, extrema[CHANNELS]);
    finite = fminf(finite, extrema[2 * CHANNELS]);
  }
  // Rounding is monotonic: the extrema of V - mean are V's extrema minus the mean.
  auto spread = [&] { return fmaxf(fabsf(__fsub_rn(largest, mean)), fabsf(__fsub_rn(smallest, mean))); };
  if (PV_FLOAT16 || !(fabsf(mean) > __fmul_rn(spread(), MIN_MEAN))) mean = 0.0f;
  statistics.value_mean[pair * CHANNELS + channel] = mean;
  const float amax = largest < smallest ? 0.0f : spread();
  float* kept = line(statistics, pair, VALUE_INVERSE) + channel;
  if (PV_FLOAT16) {
    *kept = amax;
    return;
  }
  const float scale = finite == 0.0f ? __int_as_float(0x7FC00000) : __fmul_rn(amax, ONE_448TH);
  *kept = reciprocal(scale);
  statistics.value_scale[pair * CHANNELS + channel] = scale;
}

// Quantise Q, K and V, and copy heavy keys. The grid's blocks take a part of Q, before the statistics need be complete;
// then K and V, from the last pair to the first, while the L2 cache holds the pairs that `statistics` read last; then
// the rest of Q.
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS, RESIDENT) quantize(QUANTIZE_PARAMETERS) {
  __shared__ alignas(16) ValueBlock shared;
  launch_dependents();
  if (QUEUE && blockIdx.x == 0 && threadIdx.x == 0) *operands.queue = 0;
  if (PADDED && blockIdx.x >= gridDim.x - operands.paddings) {
    const uint32 number = gridDim.x - 1 - blockIdx.x;
    find_spans(key_mask_of(statistics, number), statistics.kv_len + FIRST_KEYS, operands.spans + 3 * number);
    return;
  }
  const uint32 of_key = 2 * statistics.blocks, of_key_and_value = of_key + (PV_FLOAT16 ? 2 : PARTS) * statistics.blocks;
  const uint32 of_pair = of_key_and_value + (HEAVY_KEYS ? 2 : 0);
  const uint32 index = blockIdx.x - operands.leading_query_blocks;
  if (blockIdx.x < operands.leading_query_blocks || index >= operands.pairs * of_pair) {
    const uint32 number =
        blockIdx.x < operands.leading_query_blocks ? blockIdx.x : blockIdx.x - operands.pairs * of_pair;
    const uint32 pair = number / (2 * operands.q_blocks), block = number % (2 * operands.q_blocks);
    if ((block + 1) * HALF_BLOCK <= operands.q_len && statistics.head_dim == CHANNELS)
      quantize_query<true>(query, statistics, operands, pair, block);
    else
      quantize_query<false>(query, statistics, operands, pair, block);
    return;
  }
  const uint32 pair = operands.pairs - 1 - index / of_pair, number = index % of_pair;
  if (number < of_key) {
    if (statistics.head_dim == CHANNELS && all_exist<HALF_BLOCK>(statistics, pair, number * HALF_BLOCK))
      quantize_key<true>(key, statistics, operands, pair, number);
    else
      quantize_key<false>(key, statistics, operands, pair, number);
  } else if (HEAVY_KEYS && number >= of_key_and_value) {
    if (number == of_key_and_value)
      copy_heavy<false>(key, statistics, operands.heavy_key, pair, operands.heavy_key_with_mean);
    else
      copy_heavy<true>(value, statistics, operands.heavy_value, pair);
  } else if (PV_FLOAT16) {
    const uint32 block = number - of_key;
    if (statistics.v_head_dim == CHANNELS && all_exist<HALF_BLOCK>(statistics, pair, block * HALF_BLOCK))
      scale_value<true>(value, statistics, operands, pair, block);
    else
      scale_value<false>(value, statistics, operands, pair, block);
  } else {
    const uint32 block = (number - of_key) / PARTS, part = (number - of_key) % PARTS;
    if ((part + 1) * VALUE_CHANNELS <= statistics.v_head_dim && all_exist<BLOCK>(statistics, pair, block * BLOCK))
      quantize_value<true>(value, statistics, operands, pair, block, part, shared);
    else
      quantize_value<false>(value, statistics, operands, pair, block, part, shared);
  }
}
