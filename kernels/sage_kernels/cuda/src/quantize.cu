// The operands of `sage2`, `sage1` and `sage_bwd` for Hopper, bit for bit as the Triton quantisers write them
// (`triton/quantize_int8.py`, `triton/quantize_v.py`), in two launches: `statistics` reads K and V for their means and
// V's scales, `quantize` reads Q, K and V. A thread's loads are 16 bytes, 8 channels of a token, and all are under way
// before it uses the first.
//
// What is rotated differs from theirs, and from the reference's, where a sum in another order rounds to another code.
//
// The host, `quantize.py`, gives the kernels' parameters, with their structs, and all compile-time constants that are
// not defined here.
//
// K and V have pairs of (batch, kv head). A pair's lines of CHANNELS: see `Line`.
#include "barrier.cuh"
#include "numbers.cuh"
#include "parameters.cuh"
#include "rotation.cuh"
#include "tokens.cuh"

static_assert(BLOCK == 128, "BLOCK must be 128 tokens, whose sum is a tree, and to whose multiple operands are padded");
static_assert(HALF_BLOCK == 64,
              "HALF_BLOCK must be 64 tokens of Q, K, or V in float16: 16 for each of a block's warps");
static_assert(SHARERS == 8,
              "SHARERS of K, or V, of a pair must be 8: a cluster, whose blocks have LANES channels each");
static_assert(VALUE_CHANNELS == 64, "VALUE_CHANNELS of V in e4m3 must be 64: 8 for each of the 8 threads of a row");
static_assert(STATISTICS_THREADS == CHANNELS, "STATISTICS_THREADS must be CHANNELS: one for each");
static_assert(QUANTIZE_THREADS == 128, "QUANTIZE_THREADS must be 128: 4 warps");
static_assert(HEADROOM_EXPONENT > 0 && HEADROOM_EXPONENT <= 15, "HEADROOM_EXPONENT of V in float16 must be 1 to 15");
static_assert(LARGEST_E4M3 == 448.0, "LARGEST_E4M3 must be 448");
static_assert(MIN_MEAN > 0.0 && MIN_MEAN < 1.0, "MIN_MEAN must be a fraction of the largest distance from the mean");
static_assert(ERROR_STEP == 1.0 / 32.0, "ERROR_STEP must be 1/32, the distance of float16 numbers around 48");
static_assert(LARGEST_MOVE == 0.5 / BLOCK, "LARGEST_MOVE of an element must be half of what it has of a block's sum");
static_assert(KEY_BLOCK == HALF_BLOCK && KEYS_PER_SCALE == 16,
              "KEY_BLOCK and KEYS_PER_SCALE must be 64 and 16: each of a block's warps finds one scale of K");
ASSERT_FLAG(PV_FLOAT16, "V is in float16, with its mean and one scale for all channels, or in e4m3");
ASSERT_FLAG(MEAN_SCORE, "Q's products with K's mean are written, or not");
ASSERT_FLAG(ROTATE, "Q and K are rotated, or not");
ASSERT_FLAG(PADDED, "keys may not exist, or all do");
ASSERT_FLAG(BALANCE, "Q and K are balanced before they are rotated, or not");
ASSERT_FLAG(CHOICE, "heavy keys are chosen, or the first ones");
static_assert(ROTATE || !BALANCE, "BALANCE needs ROTATE: factors are applied by the rotation");
static_assert(MAX_BALANCE > 0 && MAX_BALANCE < 15, "MAX_BALANCE must be 1 to 14: factors are normal in float16");
static_assert(MIN_VARIANCE > 0.0 && MIN_VARIANCE < 1.0, "MIN_VARIANCE must be a fraction of the squared mean");
#define ASSERT_SIGNS(NAME) \
  static_assert(NAME >= 0 && NAME <= 0xFFFFFFFF, #NAME " must be 32 bits, ones where the rotation negates a channel")
ASSERT_SIGNS(SIGNS_0);
ASSERT_SIGNS(SIGNS_1);
ASSERT_SIGNS(SIGNS_2);
ASSERT_SIGNS(SIGNS_3);
static_assert(HEAVY_KEYS == 0 || HEAVY_KEYS == HALF_BLOCK,
              "HEAVY_KEYS must be 0 or 64: a block of the grid writes those of a pair, 16 for each of its warps");
static_assert(!CHOICE || HEAVY_KEYS > 0, "CHOICE is among places of heavy keys");
static_assert(HEAVY_QUERIES == 16,
              "HEAVY_QUERIES must be 16 rows of Q: two for each of those that a block loads at once");

constexpr int PARTS = CHANNELS / VALUE_CHANNELS;  // of V in e4m3
constexpr float ONE_448TH = 1.0 / LARGEST_E4M3;

enum Line {
  KEY_MEAN,
  VALUE_INVERSE,  // what V without its mean is multiplied by; if PV_FLOAT16, its largest magnitudes
  EXTREMA,        // of V, by sharer: largest, smallest, and 1 where all are finite
  ROTATED_MEAN = EXTREMA + 3 * SHARERS,      // minus K's mean, balanced, and rotated in each section
  FACTORS = ROTATED_MEAN + ROTATE,           // in 16 bits, with the rotation's signs: see `factor_number`
  SQUARES = FACTORS + ROTATE,                // of K and then of the sample of Q, by sharer: sums
  COUNTS = SQUARES + 2 * SHARERS * BALANCE,  // of tokens that exist, by sharer: of K, then of V
  HEAVIEST = COUNTS + PADDED,                // of the keys of each sharer: see `Candidates`
  SUMS = HEAVIEST + CHOICE * SHARERS * 2 * BLOCK / CHANNELS  // of K's blocks of 128 tokens, then of V's
};
static_assert(STATISTIC_ROWS == SUMS, "STATISTIC_ROWS must be the lines of a pair before its sums");

DEVICE float* line(const Statistics& s, uint32 pair, uint32 number) {
  return s.lines + (static_cast<int64>(pair) * (SUMS + 2 * s.sums) + number) * CHANNELS;
}

// Return which keys of a batch element exist, from its first one on, be it heavy or not.
DEVICE const uint8* all_valid(const Statistics& s, uint32 batch) {
  return s.valid + batch * static_cast<int64>(s.valid_stride);
}

// Reads keys, or values, of which some may not exist: those behind the places of heavy ones, or all with `before` 0.
struct KeyReader : Reader {
  const uint8* valid;

  DEVICE KeyReader(const Tokens& x, const Statistics& s, uint32 pair, int token, int tokens, int channel, int channels,
                   int before = HEAVY_KEYS)
      : Reader(x, pair / s.kv_heads, pair % s.kv_heads, token, tokens, channel, channels),
        valid(PADDED ? all_valid(s, pair / s.kv_heads) + before + token : nullptr) {}

  DEVICE bool has(int number) const { return Reader::has(number) && (!PADDED || valid[number]); }

  DEVICE void skip(int tokens) {
    Reader::skip(tokens);
    if (PADDED) valid += tokens;
  }
};

// Return whether N tokens of K and V exist, from `first` on; all threads of the block call.
template <int N>
DEVICE bool all_exist(const Statistics& s, uint32 pair, uint32 first) {
  if (first + N > s.kv_len) return false;
  return !PADDED || __syncthreads_and(all_valid(s, pair / s.kv_heads)[HEAVY_KEYS + first + threadIdx.x % N]);
}

// Return the larger halves; NaN where one is NaN.
DEVICE uint32 larger(uint32 x, uint32 y) {
  uint32 z;
  if (FLOAT16)
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
// Return the smaller halves; NaN where one is NaN.
DEVICE uint32 smaller(uint32 x, uint32 y) {
  uint32 z;
  if (FLOAT16)
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// ---- Scales and codes ----

DEVICE float round_up_to_bfloat16(float x) {
  return x == x ? __uint_as_float((__float_as_uint(x) + 0xFFFF) & 0xFFFF0000) : x;
}

// float16 numbers around 48 are ERROR_STEP apart: adding it rounds an error of e4m3 to a multiple, whose number is then
// in the low bits.
constexpr int ERROR_ROUNDER = 0x5200;

// Add to `sum` the errors of two numbers in e4m3, each counted with the bits of 48.
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

DEVICE float exp2_of_integer(int exponent) { return __int_as_float((exponent + 127) << 23); }

// ---- Tokens ----

template <int N>
DEVICE void load_floats(const float* from, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 y = *reinterpret_cast<const float4*>(from + i);
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}

// Keeps a thread's number in shared memory while its registers have more urgent ones: the compiler computes what
// depends on it afterwards.
struct Kept {
  volatile int64* const at;
  DEVICE explicit Kept(int64 x) : at(slot()) { *at = x; }
  DEVICE operator int64() const { return *at; }
  static DEVICE volatile int64* slot() {
    __shared__ int64 slots[QUANTIZE_THREADS];
    return slots + threadIdx.x;
  }
};

// ---- Statistics ----

// The threads of a block hold 8 rows: tokens, or sums of tokens, whose index differs by multiples of 8. Rows of a warp
// differ by WARPS.
constexpr int WARPS = 8 / ROWS;

// Sum the elements from `at` on that lie STEP apart, by a tree of halves.
template <int STEP = 1, int N>
DEVICE float tree_sum(const float (&x)[N], int at = 0) {
  if constexpr (STEP == N)
    return x[at];
  else
    return __fadd_rn(tree_sum<2 * STEP>(x, at), tree_sum<2 * STEP>(x, at + STEP));
}

// Sum the rows of a warp, in the tree's order.
DEVICE float sum_of_warp(float x) {
#pragma unroll
  for (int distance = 16; distance >= LANES; distance /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// What is known of 128 tokens, in the block's shared memory, by warp.
struct Partial {
  float sum[WARPS][CHANNELS];
  uint32 largest[WARPS][CHANNELS / 2], smallest[WARPS][CHANNELS / 2];
  uint32 rejected[WARPS][CHANNELS / 2];          // ones where an element is not finite
  float squares[BALANCE ? WARPS : 1][CHANNELS];  // sums of them
};

// Sum squares of rows, by channel and warp: `load` gives a row by number, of those of the thread from 0 on. A square
// that is not finite counts as 0.
template <typename Load>
DEVICE void sum_squares(int rows, Load load, float (&sums)[BALANCE ? WARPS : 1][CHANNELS]) {
  constexpr int LOADED = 4;  // at once
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float squares[8] = {};
#pragma unroll 1
  for (int first = 0; first < rows; first += LOADED) {
    uint32 x[LOADED][4];
#pragma unroll
    for (int i = 0; i < LOADED; i++) load(first + i, x[i]);
#pragma unroll
    for (int i = 0; i < LOADED; i++)
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const float y = channel_of(x[i], c), square = __fmul_rn(y, y);
        squares[c] = __fadd_rn(squares[c], is_finite(square) ? square : 0.0f);
      }
  }
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const float sum = sum_of_warp(squares[c]);
    if (lane < LANES) sums[warp][lane * 8 + c] = sum;
  }
}

// Scores of a thread's tokens, of the 128 that a block reduces.
constexpr int SCORES = 16 / LANES;
DEVICE int scored_token(int i) {
  return (threadIdx.x % LANES * SCORES + i) * 8 + threadIdx.x / 32 + threadIdx.x % 32 / LANES * WARPS;
}

// Add the scores of 16 tokens over the LANES that hold them: each lane gets those of SCORES.
DEVICE void share_scores(const float (&of_lane)[16], float (&scores)[SCORES]) {
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; i++) x[i] = of_lane[i];
#pragma unroll
  for (int distance = LANES / 2, left = 8; distance > 0; distance /= 2, left /= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < left; i++) {
      const float kept = upper ? x[i + left] : x[i], given = upper ? x[i] : x[i + left];
      x[i] = __fadd_rn(kept, __shfl_xor_sync(~0u, given, distance));
    }
  }
#pragma unroll
  for (int i = 0; i < SCORES; i++) scores[i] = x[i];
}

// Reduce 128 tokens of K, or of V. CAREFUL leaves out what is not finite or not there; otherwise there are 128 tokens.
// With CHOICE, find K's products with a mean query.
template <bool OF_VALUE, bool CAREFUL>
DEVICE void reduce_tokens(const KeyReader& reader, const float* mean_query, Partial& partial, float (&scores)[SCORES]) {
  constexpr bool SQUARES = BALANCE && !OF_VALUE && !CAREFUL, SCORED = CHOICE && !OF_VALUE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32 x[16][4];
#pragma unroll
  for (int i = 0; i < 16; i++) reader.load<false>(i * 8, CAREFUL ? reader.has(i * 8) : reader.left > 0, x[i]);
  float products[16] = {};
#pragma unroll
  for (int w = 0; w < 4; w++) {
    uint32 largest, smallest, rejected = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      uint32 pair = x[i][w], low = pair, high = pair;
      if (CAREFUL) {
        const uint32 bad = not_finite(pair), absent = reader.has(i * 8) ? bad : ~0u;
        rejected |= bad;
        x[i][w] = pair & ~bad;
        high = pair & ~absent | (EXPONENTS | 0x80008000) & absent;
        low = pair & ~absent | EXPONENTS & absent;
      }
      if (!OF_VALUE) continue;
      largest = i == 0 ? high : larger(largest, high);
      smallest = i == 0 ? low : smaller(smallest, low);
    }
    float sum[2], squares[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float y[16];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        y[i] = half ? second_of(x[i][w]) : first_of(x[i][w]);
        if (SQUARES) squares[half] = __fmaf_rn(y[i], y[i], squares[half]);
        if (SCORED) products[i] = __fmaf_rn(y[i], mean_query[lane % LANES * 8 + w * 2 + half], products[i]);
      }
      sum[half] = sum_of_warp(tree_sum(y));
      if (SQUARES) squares[half] = sum_of_warp(squares[half]);
    }
#pragma unroll
    for (int distance = 16; OF_VALUE && distance >= LANES; distance /= 2) {
      largest = larger(largest, __shfl_xor_sync(~0u, largest, distance));
      smallest = smaller(smallest, __shfl_xor_sync(~0u, smallest, distance));
      if (CAREFUL) rejected |= __shfl_xor_sync(~0u, rejected, distance);
    }
    if (lane < LANES) {
      const int at = lane * 4 + w;
      reinterpret_cast<float2*>(partial.sum[warp])[at] = make_float2(sum[0], sum[1]);
      if (SQUARES) reinterpret_cast<float2*>(partial.squares[warp])[at] = make_float2(squares[0], squares[1]);
      if (!OF_VALUE) continue;
      partial.largest[warp][at] = largest;
      partial.smallest[warp][at] = smallest;
      partial.rejected[warp][at] = rejected;
    }
  }
  if (SCORED) share_scores(products, scores);
}

// Sum channel `threadIdx.x` of the tokens or sums that the block reduced.
template <int N>
DEVICE float total_of_warps(const float (&sum)[N][CHANNELS]) {
  float x[N];
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = sum[i][threadIdx.x];
  return tree_sum(x);
}

// The keys that a block finds to be the heaviest, in a pair's lines: those with the largest score among tokens whose
// numbers are the same modulo BLOCK. Of two keys the first is preferred.
struct Candidates {
  float scores[BLOCK];
  int keys[BLOCK];
};
static_assert(sizeof(Candidates) == 2 * BLOCK * 4, "Candidates must fill their lines");
constexpr int NO_KEY = 0x7FFFFFFF;

DEVICE Candidates& candidates(const Statistics& s, uint32 pair, uint32 sharer) {
  return *reinterpret_cast<Candidates*>(line(s, pair, HEAVIEST + sharer * (2 * BLOCK / CHANNELS)));
}

DEVICE bool is_heavier(float score, int key, float than, int other) {
  return score > than || score == than && key < other;
}

// Find the mean query by which heavy keys are chosen, times the scores' factor, as `transforms.heavy_places` says.
DEVICE void find_mean_query(const Tokens& query, const Statistics& s, const Balance& b, uint32 pair, float* mean,
                            Partial& partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32 group = b.q_heads / s.kv_heads, batch = pair / s.kv_heads, first_head = pair % s.kv_heads * group;
  const uint32 rows = group * b.q_len, distance = (rows + HEAVY_QUERIES - 1) / HEAVY_QUERIES;
  uint32 x[2][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32 row = (i * 8 + warp + lane / LANES * WARPS) * distance, head = row / b.q_len;
    const Reader reader(query, batch, first_head + head, row % b.q_len, b.q_len, lane % LANES * 8, s.head_dim);
    reader.load<false>(0, row < rows && reader.left > 0, x[i]);
  }
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const float y = channel_of(x[0], c), z = channel_of(x[1], c);
    const float sum = sum_of_warp(__fadd_rn(is_finite(y) ? y : 0.0f, is_finite(z) ? z : 0.0f));
    if (lane < LANES) partial.sum[warp][lane * 8 + c] = sum;
  }
  __syncthreads();
  const float count = (rows + distance - 1) / distance;
  mean[threadIdx.x] = __fmul_rn(__fdiv_rn(total_of_warps(partial.sum), count), b.softmax_scale);
  __syncthreads();
}

// Choose a pair's heavy keys from the candidates of all sharers; a block's first threads call, one for each place.
DEVICE void choose_heavy_key(const Statistics& s, uint32 pair, int place) {
  float largest = -INFINITE;
  int chosen = NO_KEY;
#pragma unroll
  for (int i = 0; i < SHARERS * (BLOCK / HEAVY_KEYS); i++) {
    const Candidates& some = candidates(s, pair, i % SHARERS);
    const int at = place + i / SHARERS * HEAVY_KEYS;
    const float score = some.scores[at];
    const int key = some.keys[at];
    if (is_heavier(score, key, largest, chosen)) largest = score, chosen = key;
  }
  s.chosen[pair * HEAVY_KEYS + place] = chosen;
}

struct Found {
  float largest, smallest;
  bool finite;  // all are
  float squares;
  int count;  // of tokens that exist, if some may not
};

// Reduce the block's share of the blocks of 128 tokens of K, or of V: write their sums, return V's extrema of channel
// `threadIdx.x`, and the sum of K's squares; with CHOICE write K's candidates for heavy keys.
template <bool OF_VALUE>
DEVICE Found reduce_blocks(KeyReader reader, const Statistics& s, uint32 pair, const uint8* valid, float* sums,
                           const float* mean_query, Partial& partial) {
  constexpr bool SQUARES = BALANCE && !OF_VALUE, SCORED = CHOICE && !OF_VALUE;
  const int channel = threadIdx.x, tokens = s.kv_len + HEAVY_KEYS;
  float* sum = sums + blockIdx.x % SHARERS * CHANNELS + channel;
  float largest = -INFINITE, smallest = INFINITE, squares = 0.0f;
  bool finite = true;
  int count = 0, heaviest[SCORES];
  float heaviest_score[SCORES];
#pragma unroll
  for (int i = 0; i < SCORES; i++) heaviest_score[i] = -INFINITE, heaviest[i] = NO_KEY;
#pragma unroll 1
  for (int block = blockIdx.x % SHARERS; block < s.sums; block += SHARERS) {
    bool careful = (block + 1) * BLOCK > tokens;
    float scores[SCORES];
    if (PADDED) {
      int exist = 0;
      for (int token = block * BLOCK + channel; token < (block + 1) * BLOCK; token += STATISTICS_THREADS)
        exist += __syncthreads_count(token < tokens && valid[token]);
      careful |= exist < BLOCK;
      count += exist;
    }
    if (!careful) {
      reduce_tokens<OF_VALUE, false>(reader, mean_query, partial, scores);
      __syncthreads();
      bool exceeds = !is_finite(total_of_warps(partial.sum));
      if (SQUARES) exceeds |= !is_finite(total_of_warps(partial.squares));
      careful = __syncthreads_or(exceeds);
    }
    if (careful) {
      reduce_tokens<OF_VALUE, true>(reader, mean_query, partial, scores);
      if (SQUARES)  // read again: a thread lacks registers for this beside the other
        sum_squares(
            16, [&](int i, uint32(&x)[4]) { reader.load<false>(i * 8, reader.has(i * 8), x); }, partial.squares);
    }
#pragma unroll
    for (int i = 0; SCORED && i < SCORES; i++) {
      const int token = block * BLOCK + scored_token(i);
      const bool exists = !careful || token < tokens && (!PADDED || valid[token]);
      const bool scored = exists && is_finite(scores[i]);
      float score = scored ? scores[i] : -INFINITE;
      // The first keys keep their places unless others' scores exceed theirs by the margin, or they have none.
      if (token < HEAVY_KEYS) score = scored ? __fadd_rn(score, HEAVY_MARGIN) : INFINITE;
      if (score > heaviest_score[i]) heaviest_score[i] = score, heaviest[i] = token;
    }
    __syncthreads();
    *sum = total_of_warps(partial.sum);
    if (SQUARES) squares = __fadd_rn(squares, total_of_warps(partial.squares));
    sum += SHARERS * CHANNELS;
    reader.skip(SHARERS * BLOCK);
#pragma unroll
    for (int i = 0; OF_VALUE && i < WARPS; i++) {
      auto half = [&](const uint32* words) { return float_of(words[channel / 2] >> channel % 2 * 16 & 0xFFFF); };
      largest = fmaxf(largest, half(partial.largest[i]));
      smallest = fminf(smallest, half(partial.smallest[i]));
      finite &= !(partial.rejected[i][channel / 2] >> channel % 2 * 16 & 1);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; SCORED && i < SCORES; i++) {
    Candidates& found = candidates(s, pair, blockIdx.x % SHARERS);
    found.scores[scored_token(i)] = heaviest_score[i], found.keys[scored_token(i)] = heaviest[i];
  }
  return {largest, smallest, finite, squares, count};
}

// Return a channel's mean, from the sums of blocks: 128 of them by a tree, these in order. A cluster's blocks have
// LANES channels each; all of a block's threads call, those of the first LANES get the mean.
DEVICE float mean_of_blocks(const float* sums, int blocks, float tokens) {
  __shared__ float partial[WARPS][LANES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp + lane / LANES * WARPS;
  float total = 0.0f;
#pragma unroll 1
  for (int first = 0; first < blocks; first += BLOCK) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int block = first + i * 8 + row;
      x[i] = block < blocks ? sums[static_cast<int64>(block) * CHANNELS + lane % LANES] : 0.0f;
    }
    const float of_warp = sum_of_warp(tree_sum(x));
    if (lane < LANES) partial[warp][lane] = of_warp;
    __syncthreads();
    float y[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; i++) y[i] = partial[i][lane % LANES];
    total = __fadd_rn(total, tree_sum(y));
    __syncthreads();
  }
  return __fdiv_rn(total, tokens);
}

// Sum the squares of the block's share of a pair's sample of Q: those of channel `threadIdx.x`.
DEVICE float squares_of_sample(const Tokens& query, const Statistics& s, const Balance& b, uint32 pair,
                               Partial& partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32 group = b.q_heads / s.kv_heads, batch = pair / s.kv_heads, first_head = pair % s.kv_heads * group;
  const uint32 rows = group * b.samples, first = blockIdx.x % SHARERS * 8 + warp + lane / LANES * WARPS;
  // Where as many queries as keys may be padding, the same are.
  const bool padded = PADDED && b.q_len == s.kv_len + HEAVY_KEYS;
  sum_squares((rows + SHARERS * 8 - 1) / (SHARERS * 8),
              [&](int i, uint32(&x)[4]) {
                const uint32 row = first + i * SHARERS * 8, head = row / b.samples,
                             token = row % b.samples * b.distance;
                const bool exists = row < rows && (!padded || all_valid(s, batch)[token]);
                const Reader reader(query, batch, first_head + head, token, b.q_len, lane % LANES * 8, s.head_dim);
                reader.load<false>(0, exists && reader.left > 0, x);
              },
              partial.squares);
  __syncthreads();
  const float total = total_of_warps(partial.squares);
  __syncthreads();
  return total;
}

// Return a sum of counts by sharer, at least 1.
DEVICE float total_count(const float* counts) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < SHARERS; i++) total += counts[i];
  return fmaxf(total, 1.0f);
}

// Return the number of sampled queries of a head that exist.
DEVICE float sampled_queries(const Statistics& s, const Balance& b, uint32 pair) {
  if (!PADDED || b.q_len != s.kv_len + HEAVY_KEYS) return b.samples;
  int count = 0;
  for (uint32 i = threadIdx.x % 32; i < b.samples; i += 32)
    count += all_valid(s, pair / s.kv_heads)[i * b.distance] != 0;
  return max(__reduce_add_sync(~0u, count), 1);
}

// Return the exponent of the factor of a channel, as `transforms.balance` finds it, given K's mean, and how many keys
// and queries were counted. Squares are summed in another order than there: where the logarithm lies between two
// integers it may be the other one.
DEVICE int balance_exponent(const Statistics& s, uint32 pair, uint32 channel, float mean, float keys, float queries) {
  float of_key = 0.0f, of_query = 0.0f;
#pragma unroll
  for (int i = 0; i < SHARERS; i++) {
    of_key = __fadd_rn(of_key, line(s, pair, SQUARES + i)[channel]);
    of_query = __fadd_rn(of_query, line(s, pair, SQUARES + SHARERS + i)[channel]);
  }
  of_key = __fdiv_rn(of_key, keys);
  of_query = __fdiv_rn(of_query, queries);
  const float square = __fmul_rn(mean, mean);
  const float variance = fmaxf(__fsub_rn(of_key, square), __fmul_rn(square, MIN_VARIANCE));
  if (!(of_query > 0.0f && variance > 0.0f)) return 0;
  const float exponent = rintf(log2f(__fdiv_rn(variance, of_query)) * 0.25f);
  return static_cast<int>(fminf(fmaxf(exponent, -MAX_BALANCE), MAX_BALANCE));
}

// Return the place of a channel's factor of Q, or of K, in a pair's line: both have 8 channels in turn, so that what a
// lane wants lies as far apart as its channels of ROTATED_MEAN do.
DEVICE int factor_number(int channel, bool of_key) { return channel / 8 * 16 + of_key * 8 + channel % 8; }

// Return in 16 bits 2^exponent with the sign of a channel in the rotation.
DEVICE uint16 factor(int exponent, uint32 channel) {
  const uint32 all[4] = {SIGNS_0, SIGNS_1, SIGNS_2, SIGNS_3};
  uint32 signs = all[0];
#pragma unroll
  for (int i = 1; i < CHANNELS / 32; i++)
    if (channel / 32 == i) signs = all[i];
  return (FLOAT16 ? exponent + 15 << 10 : exponent + 127 << 7) | (signs >> channel % 32 & 1) << 15;
}

// Write what `quantize` needs for the rotation. All threads of the cluster of K of a pair call, with K's mean and the
// channel that they have in those of the first LANES threads.
DEVICE void prepare_rotation(const Statistics& s, const Balance& b, uint32 pair, uint32 channel, float mean,
                             float keys) {
  uint16* factors = reinterpret_cast<uint16*>(line(s, pair, FACTORS));
  float queries = 0.0f;
  if (BALANCE && threadIdx.x < 32) queries = sampled_queries(s, b, pair) * (b.q_heads / s.kv_heads);
  if (threadIdx.x < LANES) {
    const int exponent = BALANCE ? balance_exponent(s, pair, channel, mean, keys, queries) : 0;
    if (BALANCE) b.factors[pair * CHANNELS + channel] = exp2_of_integer(exponent);
    factors[factor_number(channel, false)] = factor(exponent, channel);
    factors[factor_number(channel, true)] = factor(-exponent, channel);
  }
  __syncwarp();
  sync_cluster();
  if (blockIdx.x % SHARERS != 0) return;
  float x = -__fmul_rn(line(s, pair, KEY_MEAN)[threadIdx.x], float_of(factors[factor_number(threadIdx.x, true)]));
#pragma unroll
  for (int distance = 1; distance < SECTION; distance *= 2) {
    const float other = __shfl_xor_sync(~0u, x, distance);
    x = threadIdx.x & distance ? __fsub_rn(other, x) : __fadd_rn(x, other);
  }
  line(s, pair, ROTATED_MEAN)[threadIdx.x] = x;
}

// Threads of a multiprocessor, at least: a thread has 64 registers of tokens; with more threads, more than two spill.
constexpr int RESIDENT_CHANNELS = PADDED || ROTATE && !BALANCE ? 384 : 512;

// Find the means of K and V, V's scales, and K's and Q's balance: a cluster for K of each pair, and one for V.
extern "C" __global__ void __cluster_dims__(SHARERS, 1, 1)
    __launch_bounds__(STATISTICS_THREADS, RESIDENT_CHANNELS / CHANNELS) statistics(STATISTICS_PARAMETERS) {
  let_next_kernel_start();
  const uint32 sharer = blockIdx.x % SHARERS, pair = blockIdx.x / SHARERS / 2;
  const bool of_value = blockIdx.x / SHARERS % 2;
  float* sums = line(s, pair, SUMS + of_value * s.sums);
  const int row = threadIdx.x / 32 + threadIdx.x % 32 / LANES * WARPS, all = s.kv_len + HEAVY_KEYS;
  const KeyReader reader(of_value ? value : key, s, pair, sharer * BLOCK + row, all, threadIdx.x % LANES * 8,
                         of_value ? s.v_head_dim : s.head_dim, 0);
  const uint8* valid = PADDED ? all_valid(s, pair / s.kv_heads) : nullptr;
  Found found;
  __shared__ Partial partial;
  __shared__ float mean_query[CHOICE ? CHANNELS : 1];
  if (of_value) {
    found = reduce_blocks<true>(reader, s, pair, valid, sums, mean_query, partial);
    float* extrema = line(s, pair, EXTREMA + 3 * sharer) + threadIdx.x;
    extrema[0] = found.largest, extrema[CHANNELS] = found.smallest, extrema[2 * CHANNELS] = found.finite;
  } else {
    if (BALANCE)
      line(s, pair, SQUARES + SHARERS + sharer)[threadIdx.x] = squares_of_sample(query, s, balance, pair, partial);
    if (CHOICE) find_mean_query(query, s, balance, pair, mean_query, partial);
    found = reduce_blocks<false>(reader, s, pair, valid, sums, mean_query, partial);
    if (BALANCE) line(s, pair, SQUARES + sharer)[threadIdx.x] = found.squares;
  }
  float* counts = line(s, pair, COUNTS) + of_value * SHARERS;
  if (PADDED && threadIdx.x == 0) counts[sharer] = found.count;
  sync_cluster();
  if (CHOICE && !of_value && sharer == SHARERS - 1 && threadIdx.x < HEAVY_KEYS) choose_heavy_key(s, pair, threadIdx.x);
  const float tokens = PADDED ? total_count(counts) : all;
  const uint32 channel = sharer * LANES + threadIdx.x % LANES;
  float mean = mean_of_blocks(sums + sharer * LANES, s.sums, tokens);
  if (ROTATE && !of_value) {
    if (threadIdx.x < LANES) line(s, pair, KEY_MEAN)[channel] = mean;
    prepare_rotation(s, balance, pair, channel, mean, tokens);
    return;
  }
  if (threadIdx.x >= LANES) return;
  if (!of_value) {
    line(s, pair, KEY_MEAN)[channel] = mean;
    return;
  }
  float largest = -INFINITE, smallest = INFINITE, finite = 1.0f;
#pragma unroll
  for (int i = 0; i < SHARERS; i++) {
    const float* extrema = line(s, pair, EXTREMA + 3 * i) + channel;
    largest = fmaxf(largest, extrema[0]);
    smallest = fminf(smallest, extrema[CHANNELS]);
    finite = fminf(finite, extrema[2 * CHANNELS]);
  }
  // Rounding is monotonic: the extrema of V - mean are those of V, minus the mean.
  auto spread = [&] { return fmaxf(fabsf(__fsub_rn(largest, mean)), fabsf(__fsub_rn(smallest, mean))); };
  if (PV_FLOAT16 || !(fabsf(mean) > __fmul_rn(spread(), MIN_MEAN))) mean = 0.0f;
  s.value_mean[pair * CHANNELS + channel] = mean;
  const float amax = largest < smallest ? 0.0f : spread();
  float* kept = line(s, pair, VALUE_INVERSE) + channel;
  if (PV_FLOAT16) {
    *kept = amax;
    return;
  }
  const float scale = finite == 0.0f ? __int_as_float(0x7FC00000) : __fmul_rn(amax, ONE_448TH);
  *kept = reciprocal(scale);
  s.value_scale[pair * CHANNELS + channel] = scale;
}

// ---- Quantising ----

constexpr int LOADS = 16 / ROWS;  // of a warp that has 16 tokens of Q or K

// Blocks of a multiprocessor: a thread keeps 4 · SECTIONS registers of a tile before the rotation, 16 · SECTIONS after.
constexpr int RESIDENT = !ROTATE ? 8 : CHANNELS == 128 ? 5 : 7;

// Return whether a key, counted from the first behind the places of heavy ones, is heavy and has left its place.
DEVICE bool is_chosen(const Statistics& s, uint32 pair, int token) {
  return s.chosen[pair * HEAVY_KEYS + token % HEAVY_KEYS] == token + HEAVY_KEYS;
}

// Load what is in the places of heavy keys among the thread's tokens, `number(i)` behind the `first`: the keys, or
// values, whose places these took.
template <int N, typename Number>
DEVICE void load_exchanged(const KeyReader& reader, const Statistics& s, uint32 pair, int first, Number number,
                           uint32 (&x)[N][4]) {
  bool chosen[N], some = false;
#pragma unroll
  for (int i = 0; i < N; i++) some |= chosen[i] = is_chosen(s, pair, first + number(i));
  if (!some) return;
#pragma unroll
  for (int i = 0; i < N; i++)
    if (chosen[i]) reader.load<true>((first + number(i)) % HEAVY_KEYS - HEAVY_KEYS - first, reader.left > 0, x[i]);
}

// The functions that follow are WHOLE if all tokens and channels that they write exist.

// Quantise HALF_BLOCK tokens of Q of one (batch, q head): 16 consecutive ones a warp.
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
    wait_for_previous_kernel();
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
    for (int i = 0; i < LOADS; i++) pin(x[i]);  // they become float32 again below: that takes fewer registers
  }

  quantize_tokens(
      x, [&](int number, float scale) { o.query_scale[row + number * ROWS] = scale; },
      [&](int number, uint2 codes) {
        *reinterpret_cast<uint2*>(o.query + (row + number * ROWS) * CHANNELS + channel) = codes;
      });
}

// Quantise HALF_BLOCK tokens of K of one pair: those of a warp share a scale, they are the keys whose scores the same
// threads of the forward kernel get.
template <bool WHOLE>
DEVICE void quantize_plain_key(const Tokens& key, const Statistics& s, const Operands& o, uint32 pair, uint32 block) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = lane % LANES * 8, of_load = lane / LANES;
  const int first = block * HALF_BLOCK + of_load / 2 * 8 + warp * 2 + of_load % 2;
  constexpr int APART = ROWS / 2 * 8;  // tokens of a thread
  const KeyReader reader(key, s, pair, first, s.kv_len, channel, s.head_dim);
  auto has = [&](int number) { return WHOLE || reader.has(number); };
  uint32 x[LOADS][4];
#pragma unroll
  for (int i = 0; i < LOADS; i++) reader.load<true>(i * APART, has(i * APART), x[i]);
  wait_for_previous_kernel();
  if constexpr (CHOICE) load_exchanged(reader, s, pair, first, [](int i) { return i * APART; }, x);
  float mean[8];
  load_floats(line(s, pair, KEY_MEAN) + channel, mean);
  // Rounding is monotonic: the extrema of K - mean are those of K, minus the mean.
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
  for (int i = 0; i < LOADS; i++) pin(x[i]);  // the mean is subtracted again below: that takes fewer registers
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

// Quantise what `quantize_plain_query` does, rotated.
template <bool WHOLE>
DEVICE void quantize_rotated_query(const Tokens& query, const Statistics& s, const Operands& o, uint32 pair,
                                   uint32 block) {
  const uint32 batch = pair / o.q_heads, head = pair % o.q_heads;
  const uint32 pair_of_key = batch * s.kv_heads + head / (o.q_heads / s.kv_heads);
  const int lane = threadIdx.x % 32, t = lane % 4, channel = t * 8;
  const int first = block * HALF_BLOCK + threadIdx.x / 32 * 16 + lane / 4;
  constexpr int APART = 8;  // tokens of a thread
  TileWords x;
  load_tile<WHOLE>(Reader(query, batch, head, first, o.q_len, channel, s.head_dim), APART, s.head_dim, x);
  const Kept kept(static_cast<int64>(pair) * o.q_blocks * BLOCK + first);
  wait_for_previous_kernel();

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

// Quantise what `quantize_plain_key` does, rotated.
template <bool WHOLE>
DEVICE void quantize_rotated_key(const Tokens& key, const Statistics& s, const Operands& o, uint32 pair, uint32 block) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, channel = lane % 4 * 8;
  const int first = block * HALF_BLOCK + g / 2 * 8 + warp * 2 + g % 2;
  constexpr int APART = 32;  // tokens of a thread
  const KeyReader reader(key, s, pair, first, s.kv_len, channel, s.head_dim);
  const Kept kept(static_cast<int64>(pair) * s.blocks * BLOCK + first);
  TileWords x;
  load_tile<WHOLE>(reader, APART, s.head_dim, x);
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; CHOICE && i < TILE_ROWS; i++) {
    const int token = first + i * APART;
    if (!is_chosen(s, pair, token)) continue;
#pragma unroll
    for (int section = 0; section < SECTIONS; section++)
      reader.load<true>(token % HEAVY_KEYS - HEAVY_KEYS - first, section * SECTION + channel < s.head_dim,
                        x[i][section], section * SECTION);
  }
  TileFloats y;
  const float* means = line(s, pair, ROTATED_MEAN) + channel;
  const float* factors = means + (FACTORS - ROTATED_MEAN) * CHANNELS + 4;
  rotate(x, factors, y, [&](int section, float (&of_first)[8], float (&of_second)[8]) {
    float mean[8];
    load_floats(means + section * SECTION, mean);
#pragma unroll
    for (int c = 0; c < 8; c++) {
      of_first[c] = WHOLE || reader.has(0) ? mean[c] : 0.0f;
      of_second[c] = WHOLE || reader.has(APART) ? mean[c] : 0.0f;
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

// Scale HALF_BLOCK tokens of V of one pair in float16, 16 consecutive ones a warp: divide them by the least power of
// two, within 2^±126, that brings the largest finite magnitude within 2^HEADROOM_EXPONENT.
template <bool WHOLE>
DEVICE void scale_value(const Tokens& value, const Statistics& s, const Operands& o, uint32 pair, uint32 block) {
  const int lane = threadIdx.x % 32, channel = lane % LANES * 8;
  const int first = block * HALF_BLOCK + threadIdx.x / 32 * 16 + lane / LANES;
  const KeyReader reader(value, s, pair, first, s.kv_len, channel, s.v_head_dim);
  uint32 x[LOADS][4];
#pragma unroll
  for (int i = 0; i < LOADS; i++) reader.load<true>(i * ROWS, WHOLE || reader.has(i * ROWS), x[i]);
  wait_for_previous_kernel();
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

// Write the heavy keys of one pair, without the mean, within the range of their 16 bits unless they are infinite; or
// their V as it is. If they are the first ones, they lie before the tokens that `tokens` describes.
template <bool OF_VALUE>
DEVICE void copy_heavy(const Tokens& tokens, const Statistics& s, uint16* into, uint32 pair) {
  const int lane = threadIdx.x % 32, channel = lane % LANES * 8, first = threadIdx.x / 32 * 16 + lane / LANES;
  const KeyReader reader(tokens, s, pair, first - HEAVY_KEYS, 0, channel, OF_VALUE ? s.v_head_dim : s.head_dim);
  uint32 x[LOADS][4];
#pragma unroll
  for (int i = 0; !CHOICE && i < LOADS; i++) reader.load<true>(i * ROWS, reader.has(i * ROWS), x[i]);
  if (CHOICE || !OF_VALUE) wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; CHOICE && i < LOADS; i++)
    reader.load<true>(s.chosen[pair * HEAVY_KEYS + first + i * ROWS] - first, reader.has(i * ROWS), x[i]);
  if (!OF_VALUE) {
    float mean[8];
    load_floats(line(s, pair, KEY_MEAN) + channel, mean);
#pragma unroll
    for (int i = 0; i < LOADS; i++)
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const float a = __fsub_rn(first_of(x[i][w]), mean[2 * w]), b = __fsub_rn(second_of(x[i][w]), mean[2 * w + 1]);
        const uint32 kept = not_finite(x[i][w]);
        x[i][w] = (FLOAT16 ? to_float16(a, b) : to_bfloat16(a, b)) & ~kept | x[i][w] & kept;
        if (PADDED && !reader.has(i * ROWS)) x[i][w] = 0;
      }
  }
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const int64 row = static_cast<int64>(pair) * HEAVY_KEYS + first + i * ROWS;
    if (OF_VALUE) {
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
  uint32 codes[VALUE_CHANNELS][BLOCK / 4];  // e4m3; the 16-byte parts of a line are exchanged from 8 channels to 8
  int errors[4][VALUE_CHANNELS];            // of the nearest e4m3, in ERROR_STEPs: sums over each warp's tokens
};

// Quantise BLOCK tokens and VALUE_CHANNELS channels, one of PARTS, of V of one pair, transposed. Among each 16, tokens
// lie in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: a thread has four that lie side by side, of 8 channels. They
// are rounded as `round_keeping_sums` in `formats/fp8.py` says.
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
  wait_for_previous_kernel();
  if constexpr (CHOICE) load_exchanged(reader, s, pair, first, number, x);

  const float* means = s.value_mean + pair * CHANNELS + channel;
  const float* inverses = line(s, pair, VALUE_INVERSE) + channel;
  // Scale a channel of the thread's tokens, and return the sum of its errors over the warp's tokens.
  auto scale = [&](int c, float (&y)[8]) {
    const float mean = means[c], inverse = inverses[c];
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
  // Store its codes, given the sum of the errors of all BLOCK tokens.
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
  for (int c = 0; c < 8; c += 2) {  // two channels at a time: that takes fewer registers
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

// Return the least of all threads' numbers.
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
DEVICE void find_spans(const uint8* valid, int keys, int* spans) {
  int first = keys, end = 0, hole = keys;
  for (int key = threadIdx.x; key < keys; key += QUANTIZE_THREADS)
    if (valid[key]) first = min(first, key), end = key + 1;
  first = least_of_block(first), end = -least_of_block(-end);
  for (int key = first + threadIdx.x; key < keys; key += QUANTIZE_THREADS)
    if (!valid[key]) hole = min(hole, key);
  hole = least_of_block(hole);
  if (threadIdx.x == 0) spans[0] = first, spans[1] = hole, spans[2] = end;
}

// Quantise Q, K and V, and copy heavy keys. The grid's blocks take some of Q, for which the statistics need not be
// complete; K and V, from the last pair to the first, while the L2 cache holds what `statistics` read last; the others
// of Q.
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS, RESIDENT) quantize(QUANTIZE_PARAMETERS) {
  __shared__ alignas(16) ValueBlock shared;
  let_next_kernel_start();
  if (PADDED && blockIdx.x >= gridDim.x - o.paddings) {
    const uint32 number = gridDim.x - 1 - blockIdx.x;
    find_spans(all_valid(s, number), s.kv_len + HEAVY_KEYS, o.spans + 3 * number);
    return;
  }
  const uint32 of_key = 2 * s.blocks, of_key_and_value = of_key + (PV_FLOAT16 ? 2 : PARTS) * s.blocks;
  const uint32 of_pair = of_key_and_value + (HEAVY_KEYS ? 2 : 0);
  const uint32 index = blockIdx.x - o.leading_query_blocks;
  if (blockIdx.x < o.leading_query_blocks || index >= o.pairs * of_pair) {
    const uint32 number = blockIdx.x < o.leading_query_blocks ? blockIdx.x : blockIdx.x - o.pairs * of_pair;
    const uint32 pair = number / (2 * o.q_blocks), block = number % (2 * o.q_blocks);
    if ((block + 1) * HALF_BLOCK <= o.q_len && s.head_dim == CHANNELS)
      quantize_query<true>(query, s, o, pair, block);
    else
      quantize_query<false>(query, s, o, pair, block);
    return;
  }
  const uint32 pair = o.pairs - 1 - index / of_pair, number = index % of_pair;
  if (number < of_key) {
    if (s.head_dim == CHANNELS && all_exist<HALF_BLOCK>(s, pair, number * HALF_BLOCK))
      quantize_key<true>(key, s, o, pair, number);
    else
      quantize_key<false>(key, s, o, pair, number);
  } else if (HEAVY_KEYS && number >= of_key_and_value) {
    if (number == of_key_and_value)
      copy_heavy<false>(key, s, o.heavy_key, pair);
    else
      copy_heavy<true>(value, s, o.heavy_value, pair);
  } else if (PV_FLOAT16) {
    const uint32 block = number - of_key;
    if (s.v_head_dim == CHANNELS && all_exist<HALF_BLOCK>(s, pair, block * HALF_BLOCK))
      scale_value<true>(value, s, o, pair, block);
    else
      scale_value<false>(value, s, o, pair, block);
  } else {
    const uint32 block = (number - of_key) / PARTS, part = (number - of_key) % PARTS;
    if ((part + 1) * VALUE_CHANNELS <= s.v_head_dim && all_exist<BLOCK>(s, pair, block * BLOCK))
      quantize_value<true>(value, s, o, pair, block, part, shared);
    else
      quantize_value<false>(value, s, o, pair, block, part, shared);
  }
}
