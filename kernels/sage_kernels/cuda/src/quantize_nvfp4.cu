// The operands of `sage3` and `sage3_paper`, bit for bit as `triton/quantize/nvfp4.py` writes them, in three launches:
// `reduce` reads K, V and a sample of Q for the sums of their blocks, `means` adds these up, `quantize` reads Q, K and
// V.
//
// The host, `quantize_nvfp4.py`, gives the kernels' parameters, with their structs, and all compile-time constants that
// are not defined here.
#include "barrier.cuh"
#include "nvfp4.cuh"
#include "parameters.cuh"
#include "token_statistics.cuh"
#include "tokens.cuh"

static_assert(BLOCK == 128, "BLOCK must be 128 tokens, whose sum is a tree, and to whose multiple operands are padded");
static_assert(REDUCE_THREADS == 256, "REDUCE_THREADS must be 256: 8 warps");
static_assert(MEANS_THREADS == 8 * CHANNELS, "MEANS_THREADS must be 8 for each channel");
static_assert(QUANTIZE_THREADS == BLOCK * CHANNELS / 32, "QUANTIZE_THREADS must be one for 32 elements of a block");
static_assert(RESIDENT_THREADS % QUANTIZE_THREADS == 0, "RESIDENT_THREADS of a multiprocessor must be whole blocks");
static_assert(ROTATION == 1 || ROTATION == 16 || ROTATION == 32 || ROTATION == CHANNELS,
              "ROTATION must be 1 for none, CHANNELS, or 16 or 32, which a thread has");
static_assert(HEAVY_KEYS == 0 || HEAVY_KEYS == 64, "HEAVY_KEYS must be 0 or 64: a block of the grid writes a pair's");
static_assert(MIN_MEAN > 0.0 && MIN_MEAN < 1.0, "MIN_MEAN must be a fraction of the largest distance from the mean");
static_assert(MIN_VARIANCE > 0.0 && MIN_VARIANCE < 1.0, "MIN_VARIANCE must be a fraction of the squared mean");
static_assert(MAX_BALANCE > 0 && MAX_BALANCE < 16, "MAX_BALANCE must be 1 to 15: its fourth power is a float32 number");
ASSERT_FLAG(SMOOTH_Q, "Q's means are subtracted, and written");
ASSERT_FLAG(SMOOTH_K, "K's mean is subtracted");
ASSERT_FLAG(SMOOTH_V, "V's mean is subtracted where it is large");
ASSERT_FLAG(BALANCE, "Q and K are balanced");
ASSERT_FLAG(TENSOR_SCALE, "blocks of Q and K, and heads of V, have a power of two as their scale");
ASSERT_FLAG(MEAN_SCORE, "Q's products with K's mean are written");
ASSERT_FLAG(PADDED, "keys may be left out");
ASSERT_FLAG(CHOICE, "heavy keys are chosen, or the first ones");
static_assert(!CHOICE || HEAVY_KEYS > 0, "CHOICE is among places of heavy keys");
static_assert(HEAVY_MARGIN > 0.0, "HEAVY_MARGIN must be more than 0: equal keys keep their places");
static_assert(HEAVY_QUERIES == 16, "HEAVY_QUERIES must be 16 rows of Q, which a block loads at once");

// ---- Statistics ----

constexpr int KEY_LINES = 2, VALUE_LINES = 4;  // of a block: sums and sums of squares; sums, largest, smallest, finite

// Of a pair of (batch, kv head): the lines of K's blocks, of V's, and those of each of its heads of Q, of K's kind.
DEVICE float* line(const Statistics& s, uint32 pair, uint32 number) {
  const uint32 lines = (KEY_LINES + VALUE_LINES) * s.sums + KEY_LINES * (s.q_heads / s.kv_heads);
  return s.lines + (static_cast<int64>(pair) * lines + number) * CHANNELS;
}

// Return whether a key counts; they are numbered from the first of all on.
DEVICE bool counts(const Statistics& s, uint32 batch, int key) {
  return !PADDED || s.valid[batch * s.valid_stride + key] != 0;
}

// Reads rows of which PADDED leaves those out that do not count, as keys or, where Q is as long as K, as queries. Of
// the keys' flags it skips as many as of their rows.
struct PaddedReader : Reader {
  const int* valid;
  int distance;

  DEVICE PaddedReader(const Reader& rows, const Statistics& s, uint32 batch, int row, int distance)
      : Reader(rows), valid(PADDED ? s.valid + batch * s.valid_stride + row : nullptr), distance(distance) {}

  DEVICE bool has(int number) const { return Reader::has(number) && (!PADDED || valid[number * distance] != 0); }
};

// Return the number of keys that count, at least 1; all threads of a block of MEANS_THREADS call.
DEVICE int number_of_keys(const Statistics& s, uint32 batch) {
  if (!PADDED) return s.keys;
  int count = 0;
  for (int first = 0; first < s.keys; first += MEANS_THREADS) {
    const int key = first + threadIdx.x;
    count += __syncthreads_count(key < s.keys && counts(s, batch, key));
  }
  return max(count, 1);
}

// Return likewise the number of rows of Q that decide the balance.
DEVICE bool are_queries_padded(const Statistics& s) { return PADDED && s.q_len == s.keys; }
DEVICE int number_of_samples(const Statistics& s, uint32 batch) {
  if (!are_queries_padded(s)) return max(s.samples, 1);
  const int sample = threadIdx.x;
  return max(__syncthreads_count(sample < s.samples && counts(s, batch, sample * s.sample_distance)), 1);
}

// What channels are multiplied by and what is added then, by pair: for Q, for K, what is added to K, and to what is not
// there.
enum Factor { OF_QUERY, OF_KEY, SHIFT_OF_KEY, ZEROS, FACTORS };

// ---- Choice of heavy keys ----

constexpr int PLACES = 64;  // of heavy keys, if there are any

// Write K's products with the mean query by which heavy keys are chosen (`transforms.heavy_places`), of 128 keys.
// `reader` is at the thread's first; its others follow ROWS_AT_ONCE apart.
DEVICE void write_scores(const Tokens& query, const PaddedReader& reader, const Statistics& s, uint32 pair,
                         uint32 block) {
  using Shape = Partial<REDUCE_THREADS / 32, true, false>;
  __shared__ float sums[REDUCE_THREADS / 32][CHANNELS];
  __shared__ alignas(16) float mean[CHANNELS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, eight = lane % LANES * 8;
  const uint32 group = s.q_heads / s.kv_heads, rows = group * s.q_len;
  const uint32 distance = (rows + HEAVY_QUERIES - 1) / HEAVY_QUERIES, number = Shape::first_token();
  const uint32 row = number * distance, head = pair % s.kv_heads * group + row / s.q_len;
  uint32 x[4];
  Reader(query, pair / s.kv_heads, head, row % s.q_len, s.q_len, eight, s.head_dim)
      .load<false>(0, number < HEAVY_QUERIES && row < rows && eight < s.head_dim, x);
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const float y = channel_of(x, c), sum = sum_of_warp_tokens(is_finite(y) ? y : 0.0f);
    if (lane < LANES) sums[warp][eight + c] = sum;
  }
  __syncthreads();
  const float factor = __fdiv_rn(s.softmax_scale, static_cast<float>((rows + distance - 1) / distance));
  if (threadIdx.x < CHANNELS) mean[threadIdx.x] = __fmul_rn(sum_of_warps(sums), factor);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Shape::LOADS; i++) {
    const int token = number + i * Shape::ROWS_AT_ONCE;
    reader.load<false>(i * Shape::ROWS_AT_ONCE, reader.has(i * Shape::ROWS_AT_ONCE), x);
    float score = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      x[w] &= ~not_finite(x[w]);
      const float2 q = *reinterpret_cast<const float2*>(mean + eight + 2 * w);
      score = __fmaf_rn(second_of(x[w]), q.y, __fmaf_rn(first_of(x[w]), q.x, score));
    }
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) score += __shfl_xor_sync(~0u, score, distance);
    const int key = block * BLOCK + token;
    const bool exists = key < s.keys && counts(s, pair / s.kv_heads, key) && is_finite(score);
    if (lane % LANES == 0)
      s.scores[(static_cast<int64>(pair) * s.sums + block) * BLOCK + token] = exists ? score : -INFINITE;
  }
}

// Choose a pair's heavy keys by their scores, as `transforms.heavy_places` says.
DEVICE void choose_heavy_keys(const Statistics& s, uint32 pair) {
  constexpr int PARTS = MEANS_THREADS / PLACES;  // of the keys that may take a place
  __shared__ float largest[PARTS][PLACES];
  __shared__ int numbers[PARTS][PLACES];
  const int place = threadIdx.x % PLACES, part = threadIdx.x / PLACES;
  const float* scores = s.scores + static_cast<int64>(pair) * s.sums * BLOCK;
  float most = -INFINITE;
  int chosen = place;
  for (int key = place + part * PLACES; key < s.keys; key += MEANS_THREADS) {
    float score = scores[key];
    if (key == place) score = score == -INFINITE ? INFINITE : __fadd_rn(score, HEAVY_MARGIN);
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
  s.chosen[pair * PLACES + place] = chosen;
}

// Return whether a key, counted from the first behind the places of heavy ones, is heavy and has left its place; and
// which one has that instead, counted likewise.
DEVICE bool is_chosen(const Statistics& s, uint32 pair, int token) {
  return s.chosen[pair * PLACES + token % PLACES] == token + PLACES;
}
DEVICE int exchanged(int token) { return token % PLACES - PLACES; }

// Reduce a block of K or V of a pair; or a head's sample of Q.
extern "C" __global__ void __launch_bounds__(REDUCE_THREADS) reduce(REDUCE_PARAMETERS) {
  let_next_kernel_start();
  constexpr int WARPS = REDUCE_THREADS / 32;
  __shared__ union {
    Partial<WARPS, true, false> with_squares;
    Partial<WARPS, false, true> with_extrema;
  } partial;
  const int channel = threadIdx.x, eight = channel % 32 % LANES * 8;
  const int first = Partial<WARPS, true, false>::first_token();
  const uint32 of_pair = 2 * s.sums, group = s.q_heads / s.kv_heads;
  if (blockIdx.x >= s.pairs * of_pair) {
    const uint32 number = blockIdx.x - s.pairs * of_pair, pair = number / group;
    Reader reader(query, number / s.q_heads, number % s.q_heads, first * s.sample_distance, s.q_len, eight, s.head_dim);
    reader.stride *= s.sample_distance;
    reader.left = eight < s.head_dim ? s.samples - first : 0;
    const uint32 batch = number / s.q_heads;
    auto reduce_rows = [&](const auto& rows) { return reduce_block(rows, true, partial.with_squares); };
    const Reduced found =
        are_queries_padded(s)
            ? reduce_rows(PaddedReader(reader, s, batch, first * s.sample_distance, s.sample_distance))
            : reduce_rows(reader);
    if (channel >= CHANNELS) return;
    float* into = line(s, pair, (KEY_LINES + VALUE_LINES) * s.sums + KEY_LINES * (number % group)) + channel;
    into[0] = found.sum, into[CHANNELS] = found.squares;
    return;
  }
  const uint32 pair = blockIdx.x / of_pair, number = blockIdx.x % of_pair;
  const bool of_value = number >= s.sums;
  const uint32 block = of_value ? number - s.sums : number;
  const uint32 batch = pair / s.kv_heads;
  const Reader rows(of_value ? value : key, batch, pair % s.kv_heads, block * BLOCK + first, s.keys, eight,
                    of_value ? s.v_head_dim : s.head_dim);
  const PaddedReader reader(rows, s, batch, block * BLOCK + first, 1);
  bool careful = (block + 1) * BLOCK > s.keys;
  if (PADDED && !careful) careful = !__syncthreads_and(counts(s, batch, block * BLOCK + threadIdx.x % BLOCK));
  if (of_value) {
    const Reduced found = reduce_block(reader, careful, partial.with_extrema);
    if (channel >= CHANNELS) return;
    float* into = line(s, pair, KEY_LINES * s.sums + VALUE_LINES * block) + channel;
    into[0] = found.sum, into[CHANNELS] = found.largest, into[2 * CHANNELS] = found.smallest;
    into[3 * CHANNELS] = found.finite;
    return;
  }
  if (CHOICE) write_scores(query, reader, s, pair, block);
  if (SMOOTH_K || BALANCE) {
    const Reduced found = reduce_block(reader, careful, partial.with_squares);
    if (channel >= CHANNELS) return;
    float* into = line(s, pair, KEY_LINES * block) + channel;
    into[0] = found.sum, into[CHANNELS] = found.squares;
  }
}

// Return a channel's mean from the sums of blocks, `apart` numbers from one to the next: 128 of them by a tree, these
// in order. A channel has 8 threads; all of them get it.
DEVICE float mean_of_blocks(const float* sums, int apart, int blocks, int tokens) {
  __shared__ float partial[8][CHANNELS];
  const int channel = threadIdx.x % CHANNELS, row = threadIdx.x / CHANNELS;
  float total = 0.0f;
#pragma unroll 1
  for (int first = 0; first < blocks; first += BLOCK) {
    float x[16], y[8];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int block = first + i * 8 + row;
      x[i] = block < blocks ? sums[static_cast<int64>(block) * apart + channel] : 0.0f;
    }
    partial[row][channel] = sum_of_halves(x);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = partial[i][channel];
    total = __fadd_rn(total, sum_of_halves(y));
    __syncthreads();
  }
  return __fdiv_rn(total, static_cast<float>(tokens));
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

// Return the variance, but no less than what sums in float32 tell from none.
DEVICE float variance_of(float mean_square, float mean) {
  const float square = __fmul_rn(mean, mean);
  return fmaxf(__fsub_rn(mean_square, square), __fmul_rn(square, MIN_VARIANCE));
}

// Return a channel's factor in the balance (`transforms.balance`), given K's mean and mean square.
DEVICE float balance_of(const Statistics& s, uint32 pair, uint32 channel, float mean, float mean_square,
                        float samples) {
  const uint32 group = s.q_heads / s.kv_heads;
  float of_query = 0.0f;
  for (uint32 member = 0; member < group; member++) {
    const float* from = line(s, pair, (KEY_LINES + VALUE_LINES) * s.sums + KEY_LINES * member) + channel;
    const float square = __fdiv_rn(from[CHANNELS], samples);
    of_query = __fadd_rn(of_query, SMOOTH_Q ? variance_of(square, __fdiv_rn(from[0], samples)) : square);
  }
  of_query = __fdiv_rn(of_query, static_cast<float>(group));
  const float variance = variance_of(mean_square, mean);
  const bool some = of_query > 0.0f && variance > 0.0f;
  const float most = __int_as_float(127 + 4 * MAX_BALANCE << 23), least = __int_as_float(127 - 4 * MAX_BALANCE << 23);
  const float ratio = fminf(fmaxf(some ? __fdiv_rn(variance, of_query) : 1.0f, least), most);
  return __int_as_float(((__float_as_int(ratio) >> 23) - 126 + 1 >> 2) + 127 << 23);
}

// Find the mean of K, or of V, of a pair, and what follows from it.
extern "C" __global__ void __launch_bounds__(MEANS_THREADS) means(MEANS_PARAMETERS) {
  const uint32 pair = blockIdx.x / 2, channel = threadIdx.x % CHANNELS, row = threadIdx.x / CHANNELS;
  const int64 at = static_cast<int64>(pair) * CHANNELS + channel;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int keys = number_of_keys(s, pair / s.kv_heads);
  if (blockIdx.x % 2 == 0) {
    constexpr int APART = KEY_LINES * CHANNELS;
    if constexpr (CHOICE) choose_heavy_keys(s, pair);
    float mean = 0.0f, factor = 1.0f;
    if (SMOOTH_K || BALANCE) mean = mean_of_blocks(line(s, pair, 0), APART, s.sums, keys);
    if (BALANCE) {
      const float square = mean_of_blocks(line(s, pair, 1), APART, s.sums, keys);
      factor = balance_of(s, pair, channel, mean, square, number_of_samples(s, pair / s.kv_heads));
    }
    if (row != 0) return;
    if (!SMOOTH_K) mean = 0.0f;
    s.key_mean[at] = mean;
    if (BALANCE) s.balance[at] = factor;
    float* factors = s.factors + static_cast<int64>(pair) * FACTORS * CHANNELS + channel;
    const float sign = sign_of_rotation(channel), inverse = __fmul_rn(sign, __fdiv_rn(1.0f, factor));
    factors[OF_QUERY * CHANNELS] = __fmul_rn(sign, factor);
    factors[OF_KEY * CHANNELS] = inverse;
    factors[SHIFT_OF_KEY * CHANNELS] = -__fmul_rn(mean, inverse);
    factors[ZEROS * CHANNELS] = 0.0f;
    return;
  }
  __shared__ float extrema[3][8][CHANNELS];
  __shared__ uint32 most;
  const float* lines = line(s, pair, KEY_LINES * s.sums);
  float largest = -INFINITE, smallest = INFINITE, finite = 1.0f;
  for (uint32 block = row; block < s.sums; block += 8) {
    const float* from = lines + (static_cast<int64>(block) * VALUE_LINES + 1) * CHANNELS + channel;
    largest = fmaxf(largest, from[0]);
    smallest = fminf(smallest, from[CHANNELS]);
    finite = fminf(finite, from[2 * CHANNELS]);
  }
  extrema[0][row][channel] = largest, extrema[1][row][channel] = smallest, extrema[2][row][channel] = finite;
  if (threadIdx.x == 0) most = 0;
  float mean = 0.0f;
  if (SMOOTH_V) mean = mean_of_blocks(lines, VALUE_LINES * CHANNELS, s.sums, keys);
  __syncthreads();
  if (row == 0) {
#pragma unroll
    for (int i = 1; i < 8; i++) {
      largest = fmaxf(largest, extrema[0][i][channel]);
      smallest = fminf(smallest, extrema[1][i][channel]);
      finite = fminf(finite, extrema[2][i][channel]);
    }
    // Rounding is monotonic: the extrema of V - mean are those of V, minus the mean.
    auto spread = [&] { return fmaxf(fabsf(__fsub_rn(largest, mean)), fabsf(__fsub_rn(smallest, mean))); };
    if (!(fabsf(mean) > __fmul_rn(spread(), MIN_MEAN))) mean = 0.0f;
    const float amax = largest < smallest ? 0.0f : spread();
    s.value_mean[at] = mean;
    s.value_amax[at] = finite == 0.0f ? __int_as_float(0x7FC00000) : amax;
    atomicMax(&most, __float_as_uint(amax));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    s.value_tensor_amax[pair] = __uint_as_float(most);
    float inverse;
    s.value_tensor_scale[pair] = TENSOR_SCALE ? least_power_of_two(__uint_as_float(most), inverse) : 1.0f;
  }
}

// ---- Q and K ----

constexpr int WARPS = QUANTIZE_THREADS / 32;
constexpr int TOKEN_LANES = CHANNELS / 32;  // threads of a token
constexpr float NORM = ROTATION == 128  ? 0.08838834764831845
                       : ROTATION == 64 ? 0.125
                       : ROTATION == 32 ? 0.17677669529663687
                       : ROTATION == 16 ? 0.25
                                        : 1.0;
// Place of a channel's number in shared memory: threads of a token read theirs from different banks.
DEVICE int spread_out(int channel) { return channel + channel / 32 * 4; }

struct SharedTokens {
  Partial<WARPS, false, false> partial;
  alignas(16) float shifts[2][CHANNELS + CHANNELS / 8];  // of tokens that are there, and zeros
  uint32 largest[WARPS];
};
struct SharedValue {
  alignas(16) uint2 codes[CHANNELS][9];  // 8, and one that spreads the rows over the banks
  alignas(8) uint8 scales[CHANNELS][8];
};
union Shared {
  SharedTokens tokens;
  SharedValue value;
};

// Rotate a token's channels, of which its threads have 32 each, but for what `norms` becomes: factors of the thread's
// groups. These are `first_group()` and `second_group()` then.
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
  // A butterfly of distance 16 n leaves one of its two numbers with the thread, the other goes to the thread that has
  // its partner in that of distance 32 n. Where a thread has the second of two partners, it has minus their difference.
  const int t = threadIdx.x % TOKEN_LANES;
  const float sign = t & 1 ? -1.0f : 1.0f, next_sign = t & 2 ? -1.0f : 1.0f;
  norms[0] = norms[1] = NORM;
  if (ROTATION == CHANNELS) {
    if (TOKEN_LANES == 4 && t & 2) norms[0] = NORM * sign;
    norms[1] = norms[0] * (TOKEN_LANES == 4 ? next_sign : sign);
  }
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    float &a = x[0][i], &b = x[1][i];
    if (ROTATION == CHANNELS) {
      float kept = __fmaf_rn(sign, b, a), got = __shfl_xor_sync(~0u, __fmaf_rn(-sign, b, a), 1);
      if (TOKEN_LANES == 4) {
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
DEVICE int first_group() { return ROTATION == CHANNELS ? threadIdx.x % TOKEN_LANES : threadIdx.x % TOKEN_LANES * 2; }
DEVICE int second_group() { return first_group() + (ROTATION == CHANNELS ? TOKEN_LANES : 1); }

// Return the largest finite magnitude of a group whose largest one is given.
DEVICE float largest_finite(const float (&x)[GROUP], float largest) {
  if (largest < INFINITE) return largest;
  float y = 0.0f;
  if (ROTATION == 1)  // otherwise none is finite
#pragma unroll
    for (int i = 0; i < GROUP; i++) y = fmaxf(y, is_finite(x[i]) ? fabsf(x[i]) : 0.0f);
  return y;
}

// Quantise a group times `factor`: return its codes, and its scale's. largest: of the products' magnitudes, NaN where
// one is.
template <bool OF_KEY>
DEVICE uint2 quantize(float (&x)[GROUP], float factor, float largest, const Operands& o, uint32& scale) {
  if constexpr (Steps<OF_KEY>::COUNT > 0) {
    uint32 halves[GROUP / 2];
    pack_group(x, factor, halves);
    const float rounded = half_of(pack_float16(largest, 0.0f));
    return search_group<OF_KEY>(halves, rounded, reinterpret_cast<const SearchRow*>(OF_KEY ? o.key_search : o.search),
                                scale);
  } else {
    if (ROTATION > 1 || TENSOR_SCALE)
#pragma unroll
      for (int i = 0; i < GROUP; i++) x[i] = __fmul_rn(x[i], factor);
    return quantize_group(x, largest, scale);
  }
}

// Quantise a block of 128 tokens of Q, or of K, of one (batch, head).
template <bool IS_QUERY>
DEVICE void quantize_tokens(const Tokens& tokens, const Statistics& s, const Operands& o, uint32 pair, uint32 block,
                            SharedTokens& shared) {
  const uint32 heads = IS_QUERY ? s.q_heads : s.kv_heads, group = IS_QUERY ? s.q_heads / s.kv_heads : 1;
  const uint32 batch = pair / heads, head = pair % heads, pair_of_key = batch * s.kv_heads + head / group;
  const int length = IS_QUERY ? s.q_len : s.kv_len;
  const int token = threadIdx.x / TOKEN_LANES, channel = threadIdx.x % TOKEN_LANES * 32;
  const int64 first_row = (static_cast<int64>(pair) * (IS_QUERY ? o.q_blocks : s.blocks) + block) * BLOCK;
  const int number = block * BLOCK + token;
  const bool moved = CHOICE && !IS_QUERY && is_chosen(s, pair, number);
  bool exists = number < length;
  if (PADDED && !IS_QUERY) exists = exists && counts(s, batch, (moved ? exchanged(number) : number) + HEAVY_KEYS);
  uint32 words[4][4];
  {
    auto load = [&](int from) {
      const Reader reader(tokens, batch, head, from, length, channel, s.head_dim);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const bool has = exists && channel + i * 8 < s.head_dim;
        const uint4 y = has ? __ldg(reinterpret_cast<const uint4*>(reader.from + i * 8)) : make_uint4(0, 0, 0, 0);
        words[i][0] = y.x, words[i][1] = y.y, words[i][2] = y.z, words[i][3] = y.w;
      }
    };
    load(number);
    if constexpr (CHOICE && !IS_QUERY)
      if (moved) load(exchanged(number));
  }
  const float* factors = s.factors + static_cast<int64>(pair_of_key) * FACTORS * CHANNELS;
  constexpr bool SMOOTH = IS_QUERY ? SMOOTH_Q : SMOOTH_K;
  if (IS_QUERY && SMOOTH) {
    const Reader reader(tokens, batch, head, block * BLOCK + shared.partial.first_token(), length,
                        threadIdx.x % 32 % LANES * 8, s.head_dim);
    const int count = min(length - static_cast<int>(block) * BLOCK, BLOCK);
    const Reduced found = reduce_block(reader, count < BLOCK, shared.partial);
    if (threadIdx.x < CHANNELS) {
      const float mean = __fdiv_rn(found.sum, static_cast<float>(count));
      o.query_mean[(first_row / BLOCK) * CHANNELS + threadIdx.x] = mean;
      shared.shifts[0][spread_out(threadIdx.x)] = -__fmul_rn(mean, factors[OF_QUERY * CHANNELS + threadIdx.x]);
      shared.shifts[1][spread_out(threadIdx.x)] = 0.0f;
    }
    __syncthreads();
  }
  if (IS_QUERY && MEAN_SCORE) {
    const float* means = s.key_mean + static_cast<int64>(pair_of_key) * CHANNELS + channel;
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) score = __fmaf_rn(channel_of(words[i / 8], i % 8), __ldg(means + i), score);
#pragma unroll
    for (int distance = 1; distance < TOKEN_LANES; distance *= 2) score += __shfl_xor_sync(~0u, score, distance);
    if (threadIdx.x % TOKEN_LANES == 0) o.mean_score[first_row + token] = score;
  }
  const float* shifts = factors + (exists ? SHIFT_OF_KEY : ZEROS) * CHANNELS;
  float x[2][GROUP];
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const int at = channel + i;
    const float* line = factors + (IS_QUERY ? OF_QUERY : OF_KEY) * CHANNELS + at;
    const float4 factor =
        BALANCE || ROTATION > 1 ? __ldg(reinterpret_cast<const float4*>(line)) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    float4 shift = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (SMOOTH && IS_QUERY) shift = *reinterpret_cast<const float4*>(shared.shifts[!exists] + spread_out(at));
    if (SMOOTH && !IS_QUERY) shift = __ldg(reinterpret_cast<const float4*>(shifts + at));
    // Factors are powers of two: this rounds as the difference from the mean does.
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
    if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = of_warp;
    __syncthreads();
    const uint32 of_block = __reduce_max_sync(~0u, shared.largest[threadIdx.x % WARPS]);
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
    codes[number] = quantize<!IS_QUERY>(x[i], factor, __fmul_rn(largest[i], inverse), o, code);
    scales[number] = code;
  }
}

// ---- V ----

// Quantise a block of 128 tokens of V of one pair, transposed: a thread has 16 tokens of two channels.
DEVICE void quantize_value(const Tokens& tokens, const Statistics& s, const Operands& o, uint32 pair, uint32 block,
                           SharedValue& shared) {
  const int channel = threadIdx.x % (CHANNELS / 2) * 2, part = threadIdx.x / (CHANNELS / 2);
  const int first = block * BLOCK + part * GROUP, left = s.kv_len - first;
  const uint16* from = tokens.first + pair / s.kv_heads * tokens.batch_stride + pair % s.kv_heads * tokens.head_stride +
                       first * tokens.token_stride + channel;
  auto load = [](const uint16* at) { return __ldcs(reinterpret_cast<const uint32*>(at)); };
  uint32 words[GROUP];
  if (left >= GROUP && channel < s.v_head_dim) {
    const uint16* at = from;
#pragma unroll
    for (int i = 0; i < GROUP; i++, at += tokens.token_stride) words[i] = load(at);
  } else {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
      words[i] = i < left && channel < s.v_head_dim ? load(from + i * tokens.token_stride) : 0;
  }
  uint32 present = left >= GROUP ? 0xFFFF : (1 << max(left, 0)) - 1;  // tokens that are there, and count
  if constexpr (CHOICE || PADDED) {
    // A warp has the same tokens: each lane looks after one.
    const int token = first + threadIdx.x % GROUP;
    const bool leaves = CHOICE && is_chosen(s, pair, token);
    const uint32 moved = CHOICE ? __ballot_sync(~0u, leaves) & present : 0;
    if (PADDED)
      present &= __ballot_sync(
          ~0u, token < s.kv_len && counts(s, pair / s.kv_heads, (leaves ? exchanged(token) : token) + HEAVY_KEYS));
    if (moved != 0)
#pragma unroll
      for (int i = 0; i < GROUP; i++)
        if (moved >> i & 1 && channel < s.v_head_dim)
          words[i] = load(from + (exchanged(first + i) - first) * tokens.token_stride);
  }
  const float2 mean = *reinterpret_cast<const float2*>(s.value_mean + static_cast<int64>(pair) * CHANNELS + channel);
  float inverse = 1.0f;
  if (TENSOR_SCALE) least_power_of_two(s.value_tensor_amax[pair], inverse);
  const float shifts[2] = {__fmaf_rn(-mean.x, inverse, 0.0f), __fmaf_rn(-mean.y, inverse, 0.0f)};  // not -0
  float x[2][GROUP];
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    // The factor is a power of two: this rounds as the difference from the mean does.
    x[0][i] = __fmaf_rn(first_of(words[i]), inverse, shifts[0]);
    x[1][i] = __fmaf_rn(second_of(words[i]), inverse, shifts[1]);
  }
  if (present != 0xFFFF)
#pragma unroll
    for (int i = 0; i < GROUP; i++)
      if (!(present >> i & 1)) x[0][i] = x[1][i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32 code;
    if constexpr (SEARCHED > 0) {
      uint32 halves[GROUP / 2];
#pragma unroll
      for (int n = 0; n < GROUP / 2; n++)
        halves[n] = pack_float16(x[i][n / 2 * 4 + n % 2], x[i][n / 2 * 4 + n % 2 + 2]);
      shared.codes[channel + i][part] =
          search_group<false>(halves, largest_half(halves), reinterpret_cast<const SearchRow*>(o.search), code);
    } else {
      shared.codes[channel + i][part] = quantize_group(x[i], largest_magnitude(x[i]), code);
    }
    shared.scales[channel + i][part] = code;
  }
  __syncthreads();
  const int row = threadIdx.x / 4, quarter = threadIdx.x % 4;
  const int64 block_of_row = (static_cast<int64>(pair) * CHANNELS + row) * s.blocks + block;
  const uint2 low = shared.codes[row][2 * quarter], high = shared.codes[row][2 * quarter + 1];
  reinterpret_cast<uint4*>(o.value)[block_of_row * 4 + quarter] = make_uint4(low.x, low.y, high.x, high.y);
  if (quarter == 0)
    reinterpret_cast<uint2*>(o.value_scale)[block_of_row] = *reinterpret_cast<const uint2*>(shared.scales[row]);
}

// ---- Heavy keys ----

// Round two numbers to the tokens' 16 bits, beyond the largest to infinity; the first is in the lower half.
DEVICE uint32 pack_halves(float a, float b) {
  uint32 y;
  if (FLOAT16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  return y;
}

// Write the heavy keys of one pair without the mean, and their V as it is. If they are the first ones, they lie before
// the tokens that `Tokens` describes.
DEVICE void copy_heavy(const Tokens& key, const Tokens& value, const Statistics& s, const Operands& o, uint32 pair) {
  for (int number = threadIdx.x; number < HEAVY_KEYS * LANES; number += QUANTIZE_THREADS) {
    const int token = number / LANES, channel = number % LANES * 8;
    const int64 row = static_cast<int64>(pair) * HEAVY_KEYS + token;
    const int source = CHOICE ? s.chosen[row] : token;
    const bool exists = counts(s, pair / s.kv_heads, source);
    auto load = [&](const Tokens& tokens, int channels, uint32(&x)[4]) {
      Reader(tokens, pair / s.kv_heads, pair % s.kv_heads, source - HEAVY_KEYS, 0, channel, channels)
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

// Quantise K and V, from the last pair to the first, while the L2 cache holds what `reduce` read last; then Q.
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS, RESIDENT_THREADS / QUANTIZE_THREADS)
    quantize(QUANTIZE_PARAMETERS) {
  __shared__ Shared shared;
  wait_for_previous_kernel();
  const uint32 of_pair = 2 * s.blocks + (HEAVY_KEYS > 0);
  if (blockIdx.x >= s.pairs * of_pair) {
    const uint32 number = blockIdx.x - s.pairs * of_pair;
    quantize_tokens<true>(query, s, o, number / o.q_blocks, number % o.q_blocks, shared.tokens);
    return;
  }
  const uint32 pair = s.pairs - 1 - blockIdx.x / of_pair, number = blockIdx.x % of_pair;
  if (number < s.blocks)
    quantize_tokens<false>(key, s, o, pair, number, shared.tokens);
  else if (number < 2 * s.blocks)
    quantize_value(value, s, o, pair, number - s.blocks, shared.value);
  else
    copy_heavy(key, value, s, o, pair);
}
