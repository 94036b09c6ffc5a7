// Memory-bound passes before and after the backward kernel: `prepare_keys` and `prepare_queries` write its operands and
// zero the sums of dQ, `finish_query_gradient` rounds these sums, and `finish_key_gradients` adds and rounds partial
// sums of dK and dV.
//
// A thread holds 8 channels of a token, LANES threads hold a token. The host, `int8_backward.py`, provides the
// parameter structs and all compile-time constants not defined here.
#include "backward_rows.cuh"
#include "numbers.cuh"
#include "parameters.cuh"
#include "tokens.cuh"

static_assert(THREADS == 256, "THREADS must be 256: the loops over a tile's rows and sums divide by it");
constexpr int TOKENS_AT_ONCE = THREADS / LANES, LOADS = TILE / TOKENS_AT_ONCE;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NORM = CHANNELS == 128 ? 0.08838834764831845f : 0.125f;  // 1/√CHANNELS
// SCALED sums reach half of their type's range at the bound of a row's |dQ|; factors are at most 2¹²⁰.
constexpr float SUMS_RANGE = SUMS == FLOAT16_SUMS ? 32768.0f : 1073741824.0f;
constexpr float SMALLEST_BOUND = SUMS_RANGE * 7.52316384526264e-37f;

// Undo the rotation of a token's codes; their sums are exact. `signs` has a bit for each of the thread's channels.
DEVICE void unrotate(float (&x)[8], uint32 signs) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (!(i & distance)) {
        const float a = x[i], b = x[i + distance];
        x[i] = a + b, x[i + distance] = a - b;
      }
#pragma unroll
  for (int lane = 1; lane < LANES; lane *= 2)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float other = __shfl_xor_sync(~0u, x[i], lane);
      x[i] = threadIdx.x & lane ? other - x[i] : x[i] + other;
    }
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = (signs >> i & 1 ? -x[i] : x[i]) * NORM;
}

// Return the thread's byte of the rotation's signs.
DEVICE uint32 signs_of(const Restoring& restoring, int channel) {
  const uint32 word = channel < 32   ? restoring.signs_0
                      : channel < 64 ? restoring.signs_1
                      : channel < 96 ? restoring.signs_2
                                     : restoring.signs_3;
  return word >> channel % 32;
}

// Return a token's values in 16 bits: decode its codes, and undo rotation and equalizer.
template <bool OF_QUERY>
DEVICE uint4 restored(uint2 codes, float scale, const Restoring& restoring, int64 kv_pair, int channel) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int word = i < 4 ? codes.x : codes.y;
    x[i] = static_cast<float>(word << (24 - i % 4 * 8) >> 24);
  }
  if (restoring.rotated) unrotate(x, signs_of(restoring, channel));
  if (restoring.equalizer) {
    const float* factors = restoring.equalizer + kv_pair * CHANNELS + channel;
#pragma unroll
    for (int i = 0; i < 8; i++)  // powers of two, by which K was divided and Q multiplied
      x[i] *= OF_QUERY ? __int_as_float(0x7F000000 - __float_as_int(factors[i])) : factors[i];
  }
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= scale;
  return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

DEVICE uint4 words_of(const uint32 (&x)[4]) { return make_uint4(x[0], x[1], x[2], x[3]); }

DEVICE float finite_magnitude(float x) { return is_finite(x) ? fabsf(x) : 0.0f; }

// Return the block's maxima of x.x and of x.y.
DEVICE float2 largest_of_block(float2 x) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float2 of_warp[WARPS];
  auto largest_of_lanes = [&](int lanes) {
#pragma unroll
    for (int distance = 1; distance < lanes; distance *= 2) {
      x.x = fmaxf(x.x, __shfl_xor_sync(~0u, x.x, distance));
      x.y = fmaxf(x.y, __shfl_xor_sync(~0u, x.y, distance));
    }
  };
  largest_of_lanes(32);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warp[threadIdx.x % WARPS];
  largest_of_lanes(WARPS);
  return x;
}

// Write K in 16 bits, a copy of V with 0 for keys that do not exist, and the largest magnitudes of both. A block has 64
// keys.
extern "C" __global__ void __launch_bounds__(THREADS) prepare_keys(PREPARE_KEYS_PARAMETERS) {
  const int tiles = 2 * blocks_of(a.keys.tokens), tile = blockIdx.x % tiles, pair = blockIdx.x / tiles;
  const int sequence = pair / a.kv_heads, head = pair % a.kv_heads, channel = threadIdx.x % LANES * 8;
  const Range keys = range_of(a.keys, sequence);
  float2* bound = reinterpret_cast<float2*>(a.bounds) + blockIdx.x;
  if (tile / 2 * BLOCK >= keys.length) {  // whole blocks of keys are read
    if (SCALED && threadIdx.x == 0) *bound = make_float2(0.0f, 0.0f);
    return;
  }
  const int64 first = operand_row(a.keys, keys, sequence, head, a.kv_heads) + tile * TILE;
  const int thread_token = threadIdx.x / LANES;  // the thread's first token
  const Reader reader(a.value, sequence, head, keys.start + tile * TILE + thread_token, keys.start + keys.length,
                      channel, a.v_head_dim);
  uint2 codes[LOADS];
  uint32 value[LOADS][4];
  bool exists[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int number = i * TOKENS_AT_ONCE, key = tile * TILE + thread_token + number;
    codes[i] = *reinterpret_cast<const uint2*>(a.codes + (first + thread_token + number) * CHANNELS + channel);
    exists[i] = tile * TILE + thread_token + number < keys.length &&
                (!a.key_mask || a.key_mask[static_cast<int64>(sequence) * a.key_mask_stride + key]);
    if (SCALED || a.value_copy) reader.load<!SCALED>(number, exists[i] && reader.has(number), value[i]);
  }
  float2 largest = make_float2(0.0f, 0.0f);  // of K and of V
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int64 row = first + thread_token + i * TOKENS_AT_ONCE, at = row * CHANNELS + channel;
    const float scale = from_bfloat16(a.key_scale[row / 64 * 4 + row % 8 / 2]);
    const uint4 x = restored<false>(codes[i], scale, a.restoring, pair, channel);
    *reinterpret_cast<uint4*>(a.key + at) = x;
    if (a.value_copy) *reinterpret_cast<uint4*>(a.value_copy + at) = words_of(value[i]);
    if (SCALED && exists[i]) {
      const uint32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int c = 0; c < 8; c++) {
        largest.x = fmaxf(largest.x, finite_magnitude(channel_of(words, c)));
        largest.y = fmaxf(largest.y, finite_magnitude(channel_of(value[i], c)));
      }
    }
  }
  if (SCALED) {
    largest = largest_of_block(largest);
    if (threadIdx.x == 0) *bound = largest;
  }
}

// Write Q in 16 bits, statistics, a copy of dO with 0 in rows that see no key, and dQ = 0. A block has a tile.
extern "C" __global__ void __launch_bounds__(THREADS, 4) prepare_queries(PREPARE_QUERIES_PARAMETERS) {
  const int tiles = tiles_of(a.queries.tokens), tile = blockIdx.x % tiles, pair = blockIdx.x / tiles;
  const int sequence = pair / a.q_heads, head = pair % a.q_heads, channel = threadIdx.x % LANES * 8;
  const Range queries = range_of(a.queries, sequence);
  if (tile * TILE >= queries.length) return;
  const int kv_heads = a.q_heads / a.group, kv_pair = sequence * kv_heads + head / a.group;
  const int64 first = operand_row(a.queries, queries, sequence, head, a.q_heads) + tile * TILE;
  float4* sums = reinterpret_cast<float4*>(a.sums + first / TILE * (PARTS * PART_BYTES));
#pragma unroll
  for (int i = 0; i < PARTS * PART_BYTES / 16 / THREADS; i++)
    sums[i * THREADS + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  const int thread_token = threadIdx.x / LANES;  // the thread's first token
  const int token = queries.start + tile * TILE + thread_token, end = queries.start + queries.length;
  const Reader gradient_reader(a.gradient, sequence, head, token, end, channel, a.v_head_dim);
  const Reader output_reader(a.output, sequence, head, token, end, channel, a.v_head_dim);
  uint2 codes[LOADS];
  uint32 gradient[LOADS][4], output[LOADS][4];
  float lse[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int number = i * TOKENS_AT_ONCE;
    codes[i] = *reinterpret_cast<const uint2*>(a.codes + (first + thread_token + number) * CHANNELS + channel);
    gradient_reader.load<false>(number, gradient_reader.has(number), gradient[i]);
    output_reader.load<true>(number, output_reader.has(number), output[i]);
    lse[i] = token + number < end ? a.lse[sequence * a.lse_batch + head * a.lse_head + token + number] : -INFINITE;
  }
  float2 largest = make_float2(0.0f, 0.0f);  // of K and of V
  if (SCALED) {
    const float2* bounds = reinterpret_cast<const float2*>(a.bounds) + static_cast<int64>(kv_pair) * a.key_tiles;
    for (int i = threadIdx.x; i < a.key_tiles; i += THREADS)
      largest = make_float2(fmaxf(largest.x, bounds[i].x), fmaxf(largest.y, bounds[i].y));
    largest = largest_of_block(largest);
  }
  float* statistics = a.statistics + first / TILE * STATISTICS;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int number = thread_token + i * TOKENS_AT_ONCE;
    const int64 row = first + number, at = row * CHANNELS + channel;
    const bool has_key = lse[i] != -INFINITE;
    float delta = 0.0f, magnitude = 0.0f;
#pragma unroll
    for (int c = 0; c < 4; c++) gradient[i][c] = has_key ? gradient[i][c] : 0;
#pragma unroll
    for (int c = 0; c < 8; c++) {
      delta += channel_of(gradient[i], c) * channel_of(output[i], c);
      magnitude += fabsf(channel_of(gradient[i], c));
    }
#pragma unroll
    for (int lane = 1; lane < LANES; lane *= 2) {
      delta += __shfl_xor_sync(~0u, delta, lane);
      if (SCALED) magnitude += __shfl_xor_sync(~0u, magnitude, lane);
    }
    if (a.gradient_copy) *reinterpret_cast<uint4*>(a.gradient_copy + at) = words_of(gradient[i]);
    if (channel == 0) {
      statistics[DELTAS + number] = delta;
      if (SCALED) {
        // |dQ| ≤ Σ P·|dP - δ|·|K|, and |dP| ≤ Σ|dO|·max|V|; a bound that is not finite makes dQ NaN.
        const float bound = (magnitude * largest.y + fabsf(delta)) * largest.x;
        statistics[FACTORS + number] = SUMS_RANGE / (bound < SMALLEST_BOUND ? SMALLEST_BOUND : bound);
      }
    }
    const float scale = a.query_scale[row];
    *reinterpret_cast<uint4*>(a.query + at) = restored<true>(codes[i], scale, a.restoring, kv_pair, channel);
    if (channel == 0)  // an LSE of infinity makes P 0
      reinterpret_cast<float2*>(statistics)[number] =
          make_float2(scale * a.softmax_scale * LOG2E, has_key ? lse[i] * LOG2E : INFINITE);
  }
}

// Sum the partial dK and dV of the last blocks of keys, in the order of their parts. A thread sums 8 channels of a
// key's dK or dV.
extern "C" __global__ void __launch_bounds__(THREADS) finish_key_gradients(FINISH_KEY_GRADIENTS_PARAMETERS) {
  constexpr int OF_BLOCK = 2 * BLOCK / TOKENS_AT_ONCE;
  const int split = blockIdx.x / OF_BLOCK, row = blockIdx.x % OF_BLOCK * TOKENS_AT_ONCE + threadIdx.x / LANES;
  const int channel = threadIdx.x % LANES * 8, within = row % BLOCK;
  const Place place(a.order, a.order.whole_blocks + split, a.keys);
  const Range keys = range_of(a.keys, place.sequence);
  const int key = place.block * BLOCK + within;
  const bool of_key = row < BLOCK;
  if (key >= keys.length || channel >= (of_key ? a.head_dim : a.v_head_dim)) return;
  float x[8] = {};
  for (int part = 0; part < a.parts; part++) {
    const int64 line = static_cast<int64>(split * a.parts + part) * 2 * BLOCK + row;
    const float4* from = reinterpret_cast<const float4*>(a.partials + line * CHANNELS + channel);
    const float4 low = from[0], high = from[1];
    x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
    x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
  }
  const Gradient& gradient = of_key ? a.key_gradient : a.value_gradient;
  *reinterpret_cast<uint4*>(gradient.first + place.sequence * gradient.batch_stride +
                            place.head * gradient.head_stride + (keys.start + key) * gradient.token_stride + channel) =
      make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// Return a sum from its word, which holds two sums in float16: the second if `number` is odd.
DEVICE float sum_of(uint32 word, int number) {
  if (SUMS == INT32_SUMS) return static_cast<int>(word);
  if (SUMS == FLOAT32_SUMS) return __uint_as_float(word);
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16>(word >> number % 2 * 16)));
  return x;
}

// Round dQ. Its sums lie in the register order of `int8_backward`: 64 queries × 64 channels, transposed if CHANNELS is
// 64. A block of 128 threads has a part of a tile.
extern "C" __global__ void __launch_bounds__(128) finish_query_gradient(FINISH_QUERY_GRADIENT_PARAMETERS) {
  __shared__ __align__(16) uint16 rounded[TILE][64 + 8];
  const int tiles = tiles_of(a.queries.tokens), part = blockIdx.x % PARTS, number = blockIdx.x / PARTS;
  const int tile = number % tiles, pair = number / tiles, sequence = pair / a.q_heads, head = pair % a.q_heads;
  const Range queries = range_of(a.queries, sequence);
  if (tile * TILE >= queries.length) return;
  const int64 first = operand_row(a.queries, queries, sequence, head, a.q_heads) + tile * TILE;
  const uint4* sums = reinterpret_cast<const uint4*>(a.sums + (first / TILE * PARTS + part) * PART_BYTES);
  const float* factors = a.statistics + first / TILE * STATISTICS + FACTORS;
  const int thread = threadIdx.x, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < ACCESSES; i++) {
    const uint4 x = sums[i * 128 + thread];
    const uint32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int sum = i * AT_ONCE + j, line = row + sum / 2 % 2 * 8, column = sum / 4 * 8 + thread % 4 * 2 + sum % 2;
      const int query = PARTS == 1 ? column : line, channel = PARTS == 1 ? line : column;
      const float scale = SCALED ? a.softmax_scale / factors[query] : a.softmax_scale;
      rounded[query][channel] = pack(sum_of(words[j * SUM_BYTES / 4], j) * scale, 0.0f);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int query = i * 16 + thread / 8, channel = part * 64 + thread % 8 * 8, token = tile * TILE + query;
    if (token < queries.length && channel < a.head_dim)
      *reinterpret_cast<uint4*>(a.gradient.first + sequence * a.gradient.batch_stride + head * a.gradient.head_stride +
                                (queries.start + token) * a.gradient.token_stride + channel) =
          *reinterpret_cast<const uint4*>(&rounded[query][thread % 8 * 8]);
  }
}
