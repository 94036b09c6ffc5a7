// Quantise tokens of Q, K and V to the operands of the INT8 recipes, given the statistics, and copy heavy keys.
#pragma once
#include "barrier.cuh"
#include "key_value.cuh"
#include "rotation.cuh"

// ---- Scales and codes ----

DEVICE float round_up_to_bfloat16(float x) {
  return x == x ? __uint_as_float((__float_as_uint(x) + 0xFFFF) & 0xFFFF0000) : x;
}

// float16 numbers around 48 are ERROR_STEP apart: adding 48 rounds an error of e4m3 to a multiple, and leaves the
// multiple's number in the low bits.
constexpr int ERROR_ROUNDER = 0x5200;

// Add the errors of two numbers in e4m3 to `sum`; each includes the bits of 48.
DEVICE int add_errors(float x, float y, int sum) {
  int errors;
  asm("{ .reg .b16 codes; .reg .b32 exact, nearest;\n"
      "cvt.rn.satfinite.e4m3x2.f32 codes, %2, %1;\n"
      "cvt.rn.f16x2.e4m3x2 nearest, codes;\n"
      "cvt.rn.f16x2.f32 exact, %2, %1;\n"
      "sub.rn.f16x2 exact, exact, nearest;\n"
      "add.rn.f16x2 %0, exact, %3; }"
      : "=r"(errors)
      : "f"(x), "f"(y), "r"(ERROR_ROUNDER * 0x10001));
  return __dp2a_lo(errors, 0x0101, sum);
}

// ---- Tokens ----

template <int N>
DEVICE void load_floats(const float* from, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 y = *reinterpret_cast<const float4*>(from + i);
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}

// Keeps a thread's number in shared memory while registers are scarce: the compiler computes dependent values later.
struct Kept {
  volatile int64* const at;
  DEVICE explicit Kept(int64 x) : at(slot()) { *at = x; }
  DEVICE operator int64() const { return *at; }
  static DEVICE volatile int64* slot() {
    __shared__ int64 slots[QUANTIZE_THREADS];
    return slots + threadIdx.x;
  }
};

// ---- Quantising ----

constexpr int LOADS = 16 / ROWS;  // of a warp with 16 tokens of Q or K

// Blocks of a multiprocessor: a thread uses 4 · SECTIONS registers of a tile before the rotation, 16 · SECTIONS after.
constexpr int RESIDENT = !ROTATE ? 8 : CHANNELS == 128 ? 5 : 7;

// Return whether a key, counted after the first keys, is heavy.
DEVICE bool is_chosen(const Statistics& s, uint32 pair, int token) {
  return s.chosen[pair * PLACES + token % PLACES] == token + FIRST_KEYS;
}

// Return whether any first key has given way.
DEVICE bool is_exchanged(const Statistics& s, uint32 pair) {
  const uint2 taken = *reinterpret_cast<const uint2*>(line(s, pair, TAKEN));
  return taken.x | taken.y;
}

// Replace heavy keys, or their values, among the thread's tokens `first` + `number(i)` by the keys, or values, that
// gave way.
template <int N, typename Number>
DEVICE void load_exchanged(const KeyReader& reader, const Statistics& s, uint32 pair, int first, Number number,
                           uint32 (&x)[N][4]) {
  if (!is_exchanged(s, pair)) return;
  bool chosen[N], some = false;
#pragma unroll
  for (int i = 0; i < N; i++) some |= chosen[i] = is_chosen(s, pair, first + number(i));
  if (!some) return;
#pragma unroll
  for (int i = 0; i < N; i++)
    if (chosen[i]) reader.load<true>((first + number(i)) % PLACES - PLACES - first, reader.tokens_left > 0, x[i]);
}

// The next functions are WHOLE if all tokens and channels that they write exist.

// Quantise HALF_BLOCK tokens of Q of one (batch, q head): a warp has 16 in a row.
template <bool WHOLE>
DEVICE void quantize_plain_query(const Tokens& query, const Statistics& s, const Operands& o, uint32 pair,
                                 uint32 block) {
  const uint32 batch = pair / o.q_heads, head = pair % o.q_heads;
  const int lane = threadIdx.x % 32, channel = lane % LANES * 8;
  const int first = block * HALF_BLOCK + threadIdx.x / 32 * 16 + lane / LANES;
  const Reader reader(query, batch, head, first, o.q_len, channel, s.head_dim);
  auto has = [&](int number) { return WHOLE || reader.has(number); };
  uint32 x[LOADS][4];
#pragma unroll
  for (int i = 0; i < LOADS; i++) reader.load<true>(i * ROWS, has(i * ROWS), x[i]);
  const int64 row = static_cast<int64>(pair) * o.q_blocks * BLOCK + first;

  if (MEAN_SCORE) {
    grid_dependency_wait();
    float mean[8];
    load_floats(line(s, batch * s.kv_heads + head / (o.q_heads / s.kv_heads), KEY_MEAN) + channel, mean);
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      float score = 0.0f;
#pragma unroll
      for (int c = 0; c < 8; c++) score = __fmaf_rn(channel_of(x[i], c), mean[c], score);
#pragma unroll
      for (int distance = 1; distance < LANES; distance *= 2) score += __shfl_xor_sync(~0u, score, distance);
      if (lane % LANES == 0) o.mean_score[row + i * ROWS] = score;
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) pin(x[i]);  // they become float32 again below, which saves registers
  }

  quantize_tokens(
      x, [&](int number, float scale) { o.query_scale[row + number * ROWS] = scale; },
      [&](int number, uint2 codes) {
        *reinterpret_cast<uint2*>(o.query + (row + number * ROWS) * CHANNELS + channel) = codes;
      });
}

// Quantise HALF_BLOCK tokens of K of one pair. A warp's tokens share a scale: the same threads of the forward kernel
// get their scores.
template <bool WHOLE>
DEVICE void quantize_plain_key(const Tokens& key, const Statistics& s, const Operands& o, uint32 pair, uint32 block) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = lane % LANES * 8, of_load = lane / LANES;
  const int first = block * HALF_BLOCK + of_load / 2 * 8 + warp * 2 + of_load % 2;
  constexpr int APART = ROWS / 2 * 8;  // between a thread's tokens
  const KeyReader reader(key, s, pair, first, s.kv_len, channel, s.head_dim);
  auto has = [&](int number) { return WHOLE || reader.has(number); };
  uint32 x[LOADS][4];
#pragma unroll
  for (int i = 0; i < LOADS; i++) reader.load<true>(i * APART, has(i * APART), x[i]);
  grid_dependency_wait();
  if constexpr (CHOICE) load_exchanged(reader, s, pair, first, [](int i) { return i * APART; }, x);
  float mean[8];
  load_floats(line(s, pair, KEY_MEAN) + channel, mean);
  // Rounding is monotonic: the extrema of K - mean are K's extrema minus the mean.
  float largest = 0.0f;
  bool some = false;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    uint32 high, low;
    some = false;
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      if (has(i * APART)) {
        high = some ? larger(high, x[i][w]) : x[i][w], low = some ? smaller(low, x[i][w]) : x[i][w];
        some = true;
      }
    for (uint32 extremum : {high, low}) {
      largest = larger_magnitude(largest, __fsub_rn(first_of(extremum), mean[2 * w]));
      largest = larger_magnitude(largest, __fsub_rn(second_of(extremum), mean[2 * w + 1]));
    }
  }
  if (!some) largest = 0.0f;
#pragma unroll
  for (int i = 0; i < LOADS; i++) pin(x[i]);  // the mean is subtracted again below, which saves registers
  largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
  const float scale = round_up_to_bfloat16(int8_scale(largest)), inverse = reciprocal(scale);
  if (lane == 0)
    o.key_scale[(static_cast<int64>(pair) * s.blocks * 2 + block) * 4 + warp] =
        scale == scale ? __float_as_uint(scale) >> 16 : 0x7FFF;
  const int64 row = static_cast<int64>(pair) * s.blocks * BLOCK + first;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    float y[8];
#pragma unroll
    for (int c = 0; c < 8; c++) y[c] = __fsub_rn(channel_of(x[i], c), mean[c]);
    const bool keep = has(i * APART) && inverse == inverse;
    *reinterpret_cast<uint2*>(o.key + (row + i * APART) * CHANNELS + channel) = codes_of(y, inverse, keep);
  }
}

// Rotate and quantise the tokens of `quantize_plain_query`.
template <bool WHOLE>
DEVICE void quantize_rotated_query(const Tokens& query, const Statistics& s, const Operands& o, uint32 pair,
                                   uint32 block) {
  const uint32 batch = pair / o.q_heads, head = pair % o.q_heads;
  const uint32 pair_of_key = batch * s.kv_heads + head / (o.q_heads / s.kv_heads);
  const int lane = threadIdx.x % 32, t = lane % 4, channel = t * 8;
  const int first = block * HALF_BLOCK + threadIdx.x / 32 * 16 + lane / 4;
  constexpr int APART = 8;  // between a thread's tokens
  TileWords x;
  load_tile<WHOLE>(Reader(query, batch, head, first, o.q_len, channel, s.head_dim), APART, s.head_dim, x);
  const Kept kept(static_cast<int64>(pair) * o.q_blocks * BLOCK + first);
  grid_dependency_wait();

  if (MEAN_SCORE) {
    const float* means = line(s, pair_of_key, KEY_MEAN) + channel;
    float scores[TILE_ROWS] = {};
#pragma unroll
    for (int section = 0; section < SECTIONS; section++) {
      float mean[8];
      load_floats(means + section * SECTION, mean);
#pragma unroll
      for (int i = 0; i < TILE_ROWS; i++)
#pragma unroll
        for (int c = 0; c < 8; c++) scores[i] = __fmaf_rn(channel_of(x[i][section], c), mean[c], scores[i]);
    }
#pragma unroll
    for (int i = 0; i < TILE_ROWS; i++) {
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) scores[i] += __shfl_xor_sync(~0u, scores[i], distance);
      if (t == 0) o.mean_score[kept + i * APART] = scores[i];
    }
  }

  const float* factors = line(s, pair_of_key, FACTORS) + channel;
  const int64 row = kept;
  const float scale = rotate_query(x, factors, [&](int i, int section, uint2 codes) {
    *reinterpret_cast<uint2*>(o.query + (row + i * APART) * CHANNELS + channel + section * SECTION) = codes;
  });
  if (t < TILE_ROWS) o.query_scale[row + t * APART] = scale;
}

// Rotate and quantise the tokens of `quantize_plain_key`.
template <bool WHOLE>
DEVICE void quantize_rotated_key(const Tokens& key, const Statistics& s, const Operands& o, uint32 pair, uint32 block) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, channel = lane % 4 * 8;
  const int first = block * HALF_BLOCK + g / 2 * 8 + warp * 2 + g % 2;
  constexpr int APART = 32;  // between a thread's tokens
  const KeyReader reader(key, s, pair, first, s.kv_len, channel, s.head_dim);
  const Kept kept(static_cast<int64>(pair) * s.blocks * BLOCK + first);
  TileWords x;
  load_tile<WHOLE>(reader, APART, s.head_dim, x);
  grid_dependency_wait();
  // Issue all loads before waiting for the first.
  const float* means = line(s, pair, ROTATED_MEAN) + channel;
  const float* factors = means + (FACTORS - ROTATED_MEAN) * CHANNELS + 4;
  float mean[SECTIONS][8];
  uint4 factor[SECTIONS];
#pragma unroll
  for (int section = 0; section < SECTIONS; section++) {
    load_floats(means + section * SECTION, mean[section]);
    factor[section] = *reinterpret_cast<const uint4*>(factors + section * SECTION);
  }
  if constexpr (CHOICE) {
    const bool exchanged = is_exchanged(s, pair);
#pragma unroll
    for (int i = 0; i < TILE_ROWS; i++) {
      const int token = first + i * APART;
      if (!exchanged || !is_chosen(s, pair, token)) continue;
#pragma unroll
      for (int section = 0; section < SECTIONS; section++)
        reader.load<true>(token % PLACES - PLACES - first, section * SECTION + channel < s.head_dim, x[i][section],
                          section * SECTION);
    }
  }
  TileFloats y;
  auto of_section = [&](int section) { return factor[section]; };
  rotate(x, of_section, y, [&](int section, float (&of_first)[8], float (&of_second)[8]) {
#pragma unroll
    for (int c = 0; c < 8; c++) {
      of_first[c] = WHOLE || reader.has(0) ? mean[section][c] : 0.0f;
      of_second[c] = WHOLE || reader.has(APART) ? mean[section][c] : 0.0f;
    }
  });
  float largest = larger_magnitude(largest_of(y[0]), largest_of(y[1]));
  largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
  const float scale = round_up_to_bfloat16(int8_scale(__fmul_rn(largest, NORM))), inverse = reciprocal(scale);
  const int64 row = kept;
  if (lane == 0) o.key_scale[row / HALF_BLOCK * 4 + warp] = scale == scale ? __float_as_uint(scale) >> 16 : 0x7FFF;
#pragma unroll
  for (int i = 0; i < TILE_ROWS; i++)
    put_codes(y[i], inverse, [&](int section, uint2 codes) {
      *reinterpret_cast<uint2*>(o.key + (row + i * APART) * CHANNELS + channel + section * SECTION) = codes;
    });
}

template <bool WHOLE>
DEVICE void quantize_query(const Tokens& query, const Statistics& s, const Operands& o, uint32 pair, uint32 block) {
  if constexpr (ROTATE)
    quantize_rotated_query<WHOLE>(query, s, o, pair, block);
  else
    quantize_plain_query<WHOLE>(query, s, o, pair, block);
}
template <bool WHOLE>
DEVICE void quantize_key(const Tokens& key, const Statistics& s, const Operands& o, uint32 pair, uint32 block) {
  if constexpr (ROTATE)
    quantize_rotated_key<WHOLE>(key, s, o, pair, block);
  else
    quantize_plain_key<WHOLE>(key, s, o, pair, block);
}

// Scale HALF_BLOCK tokens of V of one pair in float16, 16 consecutive tokens a warp: divide them by the least power of
// two, within 2^±126, that brings the largest finite magnitude within 2^HEADROOM_EXPONENT.
template <bool WHOLE>
DEVICE void scale_value(const Tokens& value, const Statistics& s, const Operands& o, uint32 pair, uint32 block) {
  const int lane = threadIdx.x % 32, channel = lane % LANES * 8;
  const int first = block * HALF_BLOCK + threadIdx.x / 32 * 16 + lane / LANES;
  const KeyReader reader(value, s, pair, first, s.kv_len, channel, s.v_head_dim);
  uint32 x[LOADS][4];
#pragma unroll
  for (int i = 0; i < LOADS; i++) reader.load<true>(i * ROWS, WHOLE || reader.has(i * ROWS), x[i]);
  grid_dependency_wait();
  if constexpr (CHOICE) load_exchanged(reader, s, pair, first, [](int i) { return i * ROWS; }, x);
  const float* amax = line(s, pair, VALUE_INVERSE);
  uint32 largest = 0;
#pragma unroll
  for (int i = 0; i < CHANNELS; i += 32) largest = max(largest, __float_as_uint(amax[i + lane]));
  largest = __reduce_max_sync(~0u, largest);
  const int above = static_cast<int>(largest >> 23) - 127 + ((largest & 0x7FFFFF) != 0) - HEADROOM_EXPONENT;
  const int exponent = largest == 0 ? 0 : min(max(above, -126), 126);
  if (block == 0 && threadIdx.x < CHANNELS) s.value_scale[pair * CHANNELS + threadIdx.x] = exp2_of_integer(exponent);
  const float inverse = exp2_of_integer(-exponent);
  const int64 row = static_cast<int64>(pair) * s.blocks * BLOCK + first;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    uint32 y[4];
#pragma unroll
    for (int w = 0; w < 4; w++)
      y[w] = pack_float16(__fmul_rn(first_of(x[i][w]), inverse), __fmul_rn(second_of(x[i][w]), inverse));
    reinterpret_cast<uint4*>(o.value)[(row + i * ROWS) * LANES + lane % LANES] = make_uint4(y[0], y[1], y[2], y[3]);
  }
}

// Write K's mean as rows in 16 bits: three parts, each the rounding error left by the parts before, then zeros.
DEVICE void write_mean(const Statistics& s, uint16* into, uint32 pair) {
  if (threadIdx.x >= CHANNELS) return;
  float rest = line(s, pair, KEY_MEAN)[threadIdx.x];
#pragma unroll
  for (int i = 0; i < MEAN_PARTS; i++) {
    const uint32 part = i >= 3 ? 0 : FLOAT16 ? to_float16(rest, 0.0f) : to_bfloat16(rest, 0.0f);
    into[i * CHANNELS + threadIdx.x] = part;
    rest = __fsub_rn(rest, first_of(part));
  }
}

// Copy the heavy keys of one pair, or their V, unchanged. The first keys lie before the tokens that `tokens` describes.
template <bool OF_VALUE>
DEVICE void copy_heavy(const Tokens& tokens, const Statistics& s, uint16* into, uint32 pair, bool with_mean = false) {
  const int lane = threadIdx.x % 32, channel = lane % LANES * 8, first = threadIdx.x / 32 * 16 + lane / LANES;
  const int channels = OF_VALUE ? s.v_head_dim : s.head_dim;
  const KeyReader reader(tokens, s, pair, first - FIRST_KEYS, 0, channel, channels);
  uint32 x[LOADS][4];
#pragma unroll
  for (int i = 0; !CHOICE && i < LOADS; i++) reader.load<true>(i * ROWS, reader.has(i * ROWS), x[i]);
  if (CHOICE || with_mean) grid_dependency_wait();
#pragma unroll
  for (int i = 0; CHOICE && i < LOADS; i++) {
    const int number = first + i * ROWS, choice = number - (HEAVY_KEYS - PLACES);
    const int source = choice < 0 ? number : s.chosen[pair * PLACES + choice];
    const bool exists = number < FIRST_KEYS ? reader.has(i * ROWS) : source != NO_KEY && channel < channels;
    reader.load<true>(exists ? source - first : 0, exists, x[i]);
  }
  const int64 rows = static_cast<int64>(pair) * (HEAVY_KEYS + with_mean * MEAN_PARTS);
  if (with_mean) write_mean(s, into + (rows + HEAVY_KEYS) * CHANNELS, pair);
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int64 row = rows + first + i * ROWS;
    if (OF_VALUE || with_mean) {
      reinterpret_cast<uint4*>(into)[row * LANES + lane % LANES] = make_uint4(x[i][0], x[i][1], x[i][2], x[i][3]);
    } else {  // in the order of `layout.heavy_order`
#pragma unroll
      for (int w = 0; w < 4; w++)
        reinterpret_cast<uint32*>(into)[row * (CHANNELS / 2) + channel / 32 * 16 + w * 4 + channel / 8 % 4] = x[i][w];
    }
  }
}

// BLOCK tokens and VALUE_CHANNELS channels of V, in the block's shared memory.
struct ValueBlock {
  uint32 codes[VALUE_CHANNELS][BLOCK / 4];  // e4m3; a line's 16-byte parts are swizzled every 8 channels
  int errors[4][VALUE_CHANNELS];            // of the nearest e4m3, in ERROR_STEPs: sums over each warp's tokens
};

// Quantise and transpose BLOCK tokens and VALUE_CHANNELS channels, one of PARTS, of V of one pair. Each 16 tokens lie
// in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: a thread has four adjacent tokens of 8 channels.
// `round_keeping_sums` in `formats/fp8.py` defines the rounding.
template <bool WHOLE>
DEVICE void quantize_value(const Tokens& value, const Statistics& s, const Operands& o, uint32 pair, uint32 block,
                           uint32 part, ValueBlock& shared) {
  const int first_channel = part * VALUE_CHANNELS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, eight = lane % 8, quad = lane / 8;
  const int channel = first_channel + eight * 8;
  const int first = block * BLOCK + warp * 32 + quad * 2;
  const KeyReader reader(value, s, pair, first, s.kv_len, channel, s.v_head_dim);
  auto has = [&](int number) { return WHOLE || reader.has(number); };
  auto number = [](int i) { return i / 4 * 16 + i / 2 % 2 * 8 + i % 2; };
  uint32 x[8][4];
#pragma unroll
  for (int i = 0; i < 8; i++) reader.load<true>(number(i), has(number(i)), x[i]);
  grid_dependency_wait();
  const float* means = s.value_mean + pair * CHANNELS + channel;
  const float* inverses = line(s, pair, VALUE_INVERSE) + channel;
  // Load the first channel's numbers, which also caches the other channels', before waiting for a flag.
  const float first_mean = means[0], first_inverse = inverses[0];
  if constexpr (CHOICE) load_exchanged(reader, s, pair, first, number, x);

  // Scale a channel of the thread's tokens, and return the sum of its errors over the warp's tokens.
  auto scale = [&](int c, float (&y)[8]) {
    const float mean = c == 0 ? first_mean : means[c], inverse = c == 0 ? first_inverse : inverses[c];
    int sum = -8 * ERROR_ROUNDER;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float centred = __fsub_rn(channel_of(x[i], c), mean);
      y[i] = __fmul_rn(has(number(i)) ? centred : 0.0f, inverse);
      if (i % 2) sum = add_errors(y[i - 1], y[i], sum);
    }
    sum += __shfl_xor_sync(~0u, sum, 8);
    return sum + __shfl_xor_sync(~0u, sum, 16);
  };
  // Store a channel's codes, given the sum of the errors of all BLOCK tokens.
  auto store = [&](int c, int total, float (&y)[8]) {
    const float twice = __fmul_rn(__int2float_rn(abs(total)), 2 * ERROR_STEP);
    const float part = (total < 0 ? -0.5f : 0.5f) / BLOCK;
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = __fmaf_rn(fminf(twice, fabsf(y[i])), part, y[i]);
    uint32(&line)[BLOCK / 4] = shared.codes[eight * 8 + c];
    line[(warp * 2 ^ eight) * 4 + quad] = to_e4m3(y[0], y[1], y[2], y[3]);
    line[(warp * 2 + 1 ^ eight) * 4 + quad] = to_e4m3(y[4], y[5], y[6], y[7]);
  };
#pragma unroll
  for (int c = 0; c < 8; c += 2) {  // two channels at a time, which saves registers
    float y[8], z[8];
    const int2 errors = make_int2(scale(c, y), scale(c + 1, z));
    if (quad == 0) *reinterpret_cast<int2*>(shared.errors[warp] + eight * 8 + c) = errors;
    __syncthreads();
    int2 total = make_int2(0, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int2 of_warp = *reinterpret_cast<const int2*>(shared.errors[i] + eight * 8 + c);
      total.x += of_warp.x, total.y += of_warp.y;
    }
    store(c, total.x, y);
    store(c + 1, total.y, z);
  }
  __syncthreads();
  const int64 row = static_cast<int64>(pair) * CHANNELS + first_channel;
#pragma unroll
  for (int i = 0; i < VALUE_CHANNELS / 16; i++) {
    const int line = i * 16 + threadIdx.x / 8, chunk = threadIdx.x % 8;
    uint8* into = o.value + (row + line) * s.blocks * BLOCK + block * BLOCK + chunk * 16;
    *reinterpret_cast<uint4*>(into) = *reinterpret_cast<const uint4*>(shared.codes[line] + (chunk ^ line / 8) * 4);
  }
}

// Return the least of all threads' x.
DEVICE int least_of_block(int x) {
  __shared__ int of_warps[QUANTIZE_THREADS / 32];
  x = __reduce_min_sync(~0u, x);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < QUANTIZE_THREADS / 32; i++) x = min(x, of_warps[i]);
  __syncthreads();
  return x;
}

// Find the spans of a batch element's keys: see `operands.KeyPadding`.
DEVICE void find_spans(const uint8* key_mask, int keys, int* spans) {
  int first = keys, end = 0, hole = keys;
  for (int key = threadIdx.x; key < keys; key += QUANTIZE_THREADS)
    if (key_mask[key]) first = min(first, key), end = key + 1;
  first = least_of_block(first), end = -least_of_block(-end);
  for (int key = first + threadIdx.x; key < keys; key += QUANTIZE_THREADS)
    if (!key_mask[key]) hole = min(hole, key);
  hole = least_of_block(hole);
  if (threadIdx.x == 0) spans[0] = first, spans[1] = hole, spans[2] = end;
}
