// Statistics of K and V, and of a sample of Q: means, extrema, the equalizer, and which keys are heavy. A pair has a
// cluster for K and a cluster for V, whose blocks share the tokens.
#pragma once
#include "barrier.cuh"
#include "key_value.cuh"
#include "quiet_groups.cuh"
#include "rotation.cuh"

// The threads of a block hold 8 rows; a row takes tokens, or sums of tokens, whose indices differ by multiples of 8. A
// warp's rows are WARPS apart.
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

// Quads of lanes that hold a token; with CHOICE, a quad's channels are a row of a matrix product with a mean query.
constexpr int QUADS = LANES / 4;

// Statistics of 128 tokens for each warp, in shared memory.
struct Partial {
  float sum[WARPS][CHANNELS];
  uint32 largest[WARPS][CHANNELS / 2], smallest[WARPS][CHANNELS / 2];
  uint32 rejected[WARPS][CHANNELS / 2];           // ones where an element is not finite
  float squares[EQUALIZE ? WARPS : 1][CHANNELS];  // sums of them
  // Parts of tokens' scores, by row and quad: 16 of 20 places are used, to spread a warp over the banks.
  float scores[CHOICE ? 8 : 1][QUADS][20];
};

// Sum squares of rows, by channel and warp: `load` loads the thread's row of a number from 0 on. A non-finite square
// counts as 0.
template <typename Load>
DEVICE void sum_squares(int rows, Load load, float (&sums)[EQUALIZE ? WARPS : 1][CHANNELS]) {
  constexpr int LOADED = 2;  // at once
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

// Tokens, of the 128 that a block reduces, whose scores a thread compares.
constexpr int SCORED = BLOCK / STATISTICS_THREADS;
DEVICE int scored_row(int i) { return threadIdx.x / 16 + i * (8 / SCORED); }
DEVICE int scored_token(int i) { return threadIdx.x % 16 * 8 + scored_row(i); }

DEVICE float score_of(const Partial& partial, int i) {
  float score = 0.0f;
#pragma unroll
  for (int quad = 0; quad < QUADS; quad++)
    score = __fadd_rn(score, partial.scores[scored_row(i)][quad][threadIdx.x % 16]);
  return score;
}

// Return a score, or its magnitude where this exceeds the sum of the other 15 that share its scale: 8 of a `scored_row`
// and 8 of the next, of 64 tokens. Inlined, it would spill nine registers of the loop around it.
__device__ __noinline__ float choice_score(float score) {
  const float magnitude = is_finite(score) ? fabsf(score) : 0.0f;
  float sum = magnitude;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= distance == 4 ? 4 : 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  return magnitude > 0.5f * sum ? magnitude : score;
}

// Find parts of the scores of the thread's tokens by the tensor cores. Lane 4g + t has 8 channels of a row of A, and in
// B's column g the mean query of the channels of lane 4(g / 2) + t: in 16 bits, or for odd g its rounding error. So
// lane 4g + t with t = g % QUADS gets the products of its row with the row's own channels.
DEVICE void find_scores(const uint32 (&x)[16][4], const uint32 (&mean_query)[4], Partial& partial) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 + lane / LANES * WARPS, quad = lane / 4 % QUADS;
#pragma unroll
  for (int first = 0; first < 16; first += 2) {
    float scores[2];
#pragma unroll
    for (int i = 0; i < 2; i += 2) {
      float sum[4] = {};
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const uint32(&y)[4] = x[first + i], (&z)[4] = x[first + i + 1];
        const uint32 pair[4] = {y[w], z[w], y[w + 1], z[w + 1]};
        multiply(pair, mean_query[w], mean_query[w + 1], sum, sum);
      }
      scores[i] = __fadd_rn(sum[0], sum[1]), scores[i + 1] = __fadd_rn(sum[2], sum[3]);
    }
    if (lane % 4 == quad)
      *reinterpret_cast<float2*>(partial.scores[row][quad] + first) = make_float2(scores[0], scores[1]);
  }
}

// Reduce 128 tokens of K, or of V. CAREFUL leaves out non-finite elements and missing tokens; otherwise all 128 tokens
// exist. With CHOICE, find K's products with a mean query, which `prepare` makes while the tokens are being loaded.
// Return whether a sum of the thread is not finite.
template <bool OF_VALUE, bool CAREFUL, typename Prepare>
DEVICE bool reduce_tokens(const KeyReader& reader, Prepare prepare, const uint32 (&mean_query)[4], Partial& partial) {
  constexpr bool SQUARES = EQUALIZE && !OF_VALUE && !CAREFUL;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32 x[16][4];
#pragma unroll
  for (int i = 0; i < 16; i++) reader.load<false>(i * 8, CAREFUL ? reader.has(i * 8) : reader.tokens_left > 0, x[i]);
  prepare();
  if constexpr (CHOICE && !OF_VALUE) {
#pragma unroll
    for (int i = 0; CAREFUL && i < 16; i++)
#pragma unroll
      for (int w = 0; w < 4; w++) x[i][w] &= ~not_finite(x[i][w]);
    find_scores(x, mean_query, partial);
  }
  float zero = 0.0f;
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
      }
      sum[half] = sum_of_warp(tree_sum(y));
      zero = __fmaf_rn(sum[half], 0.0f, zero);
      if (!SQUARES) continue;
      squares[half] = sum_of_warp(squares[half]);
      zero = __fmaf_rn(squares[half], 0.0f, zero);
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
  return zero != 0.0f;
}

// Sum channel `threadIdx.x` over the warps.
template <int N>
DEVICE float total_of_warps(const float (&sum)[N][CHANNELS]) {
  float x[N];
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = sum[i][threadIdx.x];
  return tree_sum(x);
}

// A block's heaviest keys, in a pair's lines: the key with the largest score among tokens whose numbers are the same
// modulo BLOCK. Of equal keys the first is preferred.
struct Candidates {
  float scores[BLOCK];
  int keys[BLOCK];
};
static_assert(sizeof(Candidates) == 2 * BLOCK * 4, "Candidates must fill their lines");

DEVICE Candidates& candidates(const Statistics& s, uint32 pair, uint32 sharer) {
  return *reinterpret_cast<Candidates*>(line(s, pair, HEAVIEST + sharer * (2 * BLOCK / CHANNELS)));
}

DEVICE bool is_heavier(float score, int key, float than, int other) {
  return score > than || score == than && key < other;
}

// Load the thread's part of the queries whose mean chooses heavy keys, as `transforms.heavy_places` and `late_keys`
// say; return their number.
DEVICE float load_queries(const Tokens& query, const Statistics& s, const Equalizer& b, uint32 pair,
                          uint32 (&x)[2][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32 group = b.q_heads / s.kv_heads, batch = pair / s.kv_heads, first_head = pair % s.kv_heads * group;
  const uint32 earlier = LATE ? b.q_len / 2 : 0, counted = b.q_len - earlier, rows = group * counted;
  const uint32 distance = (rows + HEAVY_QUERIES - 1) / HEAVY_QUERIES;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32 row = (i * 8 + warp + lane / LANES * WARPS) * distance, head = row / counted;
    const Reader reader(query, batch, first_head + head, earlier + row % counted, b.q_len, lane % LANES * 8,
                        s.head_dim);
    reader.load<false>(0, row < rows && reader.tokens_left > 0, x[i]);
  }
  return (rows + distance - 1) / distance;
}

// Sum queries by channel and warp. Non-finite elements count as 0.
DEVICE void sum_queries(const uint32 (&x)[2][4], Partial& partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const float y = channel_of(x[0], c), z = channel_of(x[1], c);
    const float sum = sum_of_warp(__fadd_rn(is_finite(y) ? y : 0.0f, is_finite(z) ? z : 0.0f));
    if (lane < LANES) partial.sum[warp][lane * 8 + c] = sum;
  }
}

// Make the thread's part of B for `find_scores`.
DEVICE void split_query(const float* mean, uint32 (&words)[4]) {
  const int lane = threadIdx.x % 32, channel = (lane / 8 * 4 + lane % 4) * 8;
  const bool is_error = lane / 4 % 2;  // the rounding error of 16 bits
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const bool exists = lane / 8 < QUADS;
    float x = exists ? mean[channel + 2 * w] : 0.0f, y = exists ? mean[channel + 2 * w + 1] : 0.0f;
    const uint32 nearest = FLOAT16 ? pack_float16(x, y) : pack_bfloat16(x, y);
    x = __fsub_rn(x, first_of(nearest)), y = __fsub_rn(y, second_of(nearest));
    words[w] = !is_error ? nearest : FLOAT16 ? pack_float16(x, y) : pack_bfloat16(x, y);
  }
}

// Choose a pair's heavy keys from the candidates of all sharers, and mark the places whose keys give way; a block's
// first CHOOSERS threads call.
constexpr int CHOOSERS = PLACES < 32 ? 32 : PLACES;
DEVICE void choose_heavy_key(const Statistics& s, uint32 pair, int thread) {
  float largest = -INFINITE;
  int chosen = NO_KEY;
#pragma unroll 16
  for (int i = 0; i < CLUSTER_BLOCKS * (BLOCK / CHOOSERS); i++) {
    const Candidates& some = candidates(s, pair, i % CLUSTER_BLOCKS);
    const int at = thread + i / CLUSTER_BLOCKS * CHOOSERS;
    const float score = some.scores[at];
    const int key = some.keys[at];
    if (is_heavier(score, key, largest, chosen)) largest = score, chosen = key;
  }
#pragma unroll
  for (int distance = PLACES; distance < CHOOSERS; distance *= 2) {
    const float score = __shfl_xor_sync(~0u, largest, distance);
    const int key = __shfl_xor_sync(~0u, chosen, distance);
    if (is_heavier(score, key, largest, chosen)) largest = score, chosen = key;
  }
  const bool gives_way = chosen != FIRST_KEYS - PLACES + thread % PLACES;
  if (thread < PLACES) s.chosen[pair * PLACES + thread] = LATE && !gives_way ? NO_KEY : chosen;
  const uint32 taken = __ballot_sync(~0u, gives_way);
  uint32* into = reinterpret_cast<uint32*>(line(s, pair, TAKEN));
  if (thread % 32 == 0) into[thread / 32] = taken;
  if (CHOOSERS == 32 && thread == 0) into[1] = 0;
}

// Return a channel's mean from the sums of blocks: a tree adds 128 block sums, and the results are added in order. A
// cluster's blocks have LANES channels each; all of a block's threads call, the first LANES get the mean. Only blocks
// of the sharers whose bits are set count. A non-finite mean becomes 0.
DEVICE float mean_of_blocks(const float* sums, int blocks, float tokens, uint32 sharers) {
  __shared__ float partial[WARPS][LANES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp + lane / LANES * WARPS;
  float total = 0.0f;
#pragma unroll 1
  for (int first = 0; first < blocks; first += BLOCK) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int block = first + i * 8 + row;
      x[i] = block < blocks && sharers >> row & 1 ? sums[static_cast<int64>(block) * CHANNELS + lane % LANES] : 0.0f;
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
  const float mean = __fdiv_rn(total, tokens);
  return is_finite(mean) ? mean : 0.0f;
}

// Sum the squares of the block's share of a pair's sample of Q, by channel and warp.
DEVICE void sum_sample(const Tokens& query, const Statistics& s, const Equalizer& b, uint32 pair, Partial& partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32 group = b.q_heads / s.kv_heads, batch = pair / s.kv_heads, first_head = pair % s.kv_heads * group;
  const uint32 rows = group * b.samples, first = blockIdx.x % CLUSTER_BLOCKS * 8 + warp + lane / LANES * WARPS;
  // With as many queries as keys, queries are padded like keys.
  const bool padded = PADDED && b.q_len == s.kv_len + FIRST_KEYS;
  sum_squares((rows + CLUSTER_BLOCKS * 8 - 1) / (CLUSTER_BLOCKS * 8),
              [&](int i, uint32(&x)[4]) {
                const uint32 row = first + i * CLUSTER_BLOCKS * 8, head = row / b.samples,
                             token = row % b.samples * b.sample_step;
                const bool exists = row < rows && (!padded || key_mask_of(s, batch)[token]);
                const Reader reader(query, batch, first_head + head, token, b.q_len, lane % LANES * 8, s.head_dim);
                reader.load<false>(0, exists && reader.tokens_left > 0, x);
              },
              partial.squares);
}

// Read the block's part of a pair's Q: write its share of the equalizer's squares, and make the thread's part of the
// mean query for `find_scores`.
DEVICE void read_queries(const Tokens& query, const Statistics& s, const Equalizer& b, uint32 pair, Partial& partial,
                         uint32 (&mean_query)[4]) {
  __shared__ float mean[CHOICE ? CHANNELS : 1];
  uint32 x[2][4];
  float count = 1.0f;
  if (CHOICE) count = load_queries(query, s, b, pair, x);
  if (EQUALIZE) sum_sample(query, s, b, pair, partial);
  if (CHOICE) sum_queries(x, partial);
  __syncthreads();
  if (EQUALIZE)
    line(s, pair, SQUARES + CLUSTER_BLOCKS + blockIdx.x % CLUSTER_BLOCKS)[threadIdx.x] =
        total_of_warps(partial.squares);
  if (!CHOICE) return;
  mean[threadIdx.x] = __fdiv_rn(total_of_warps(partial.sum), count);
  __syncthreads();
  split_query(mean, mean_query);
}

struct ChannelStatistics {
  float largest, smallest;
  bool finite;  // all elements are
  float squares;
  int count;  // of tokens that exist, if PADDED
};

// Reduce the block's share of the blocks of 128 tokens of K, or of V: write their sums, return V's extrema and the sum
// of K's squares of channel `threadIdx.x`. With K also read the block's part of Q, and with CHOICE write K's candidates
// for heavy keys.
template <bool OF_VALUE>
DEVICE ChannelStatistics reduce_blocks(KeyReader reader, const Tokens& query, const Statistics& s, const Equalizer& b,
                                       uint32 pair, const uint8* key_mask, float* sums) {
  __shared__ alignas(16) Partial partials[2];
  constexpr bool SQUARES = EQUALIZE && !OF_VALUE;
  constexpr int KEYS = CHOICE && !OF_VALUE ? SCORED : 0;
  const int channel = threadIdx.x, tokens = s.kv_len + FIRST_KEYS;
  float largest = -INFINITE, smallest = INFINITE, squares = 0.0f;
  float* sum = sums + blockIdx.x % CLUSTER_BLOCKS * CHANNELS + channel;
  bool finite = true, prepared = OF_VALUE || !(EQUALIZE || CHOICE);
  uint32 mean_query[4];
  auto prepare = [&] {  // in the partial that the first block does not use
    if (!prepared) read_queries(query, s, b, pair, partials[1], mean_query);
    prepared = true;
  };
  int count = 0, heaviest[SCORED];
  float heaviest_score[SCORED];
#pragma unroll
  for (int i = 0; i < SCORED; i++) heaviest_score[i] = -INFINITE, heaviest[i] = NO_KEY;
#pragma unroll 1
  for (int block = blockIdx.x % CLUSTER_BLOCKS; block < s.sum_blocks; block += CLUSTER_BLOCKS) {
    // Two in turn: threads write one while other threads still read the other.
    Partial& partial = partials[block / CLUSTER_BLOCKS % 2];
    bool careful = (block + 1) * BLOCK > tokens;
    if (PADDED) {
      int exist = 0;
      for (int token = block * BLOCK + channel; token < (block + 1) * BLOCK; token += STATISTICS_THREADS)
        exist += __syncthreads_count(token < tokens && key_mask[token]);
      careful |= exist < BLOCK;
      count += exist;
    }
    if (!careful) careful = __syncthreads_or(reduce_tokens<OF_VALUE, false>(reader, prepare, mean_query, partial));
    if (careful) {
      reduce_tokens<OF_VALUE, true>(reader, prepare, mean_query, partial);
      if (SQUARES)  // load again: a thread lacks registers for both
        sum_squares(
            16, [&](int i, uint32(&x)[4]) { reader.load<false>(i * 8, reader.has(i * 8), x); }, partial.squares);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      const int token = block * BLOCK + scored_token(i);
      const float raw_score = __fmul_rn(score_of(partial, i), b.softmax_scale);
      const bool scored = is_finite(raw_score) && (!careful || token < tokens && (!PADDED || key_mask[token]));
      float score = choice_score(scored ? raw_score : -INFINITE);
      // First keys stay unless another score exceeds theirs by the margin; without a score they stay. Only the last may
      // go.
      if (token < FIRST_KEYS) score = scored ? __fadd_rn(score, HEAVY_MARGIN) : INFINITE;
      if (token < FIRST_KEYS - PLACES) score = -INFINITE;
      if (score > heaviest_score[i]) heaviest_score[i] = score, heaviest[i] = token;
    }
    *sum = total_of_warps(partial.sum);
    sum += CLUSTER_BLOCKS * CHANNELS;
    if (SQUARES) squares = __fadd_rn(squares, total_of_warps(partial.squares));
    reader.skip(CLUSTER_BLOCKS * BLOCK);
#pragma unroll
    for (int i = 0; OF_VALUE && i < WARPS; i++) {
      auto half = [&](const uint32* words) { return float_of(words[channel / 2] >> channel % 2 * 16 & 0xFFFF); };
      largest = fmaxf(largest, half(partial.largest[i]));
      smallest = fminf(smallest, half(partial.smallest[i]));
      finite &= !(partial.rejected[i][channel / 2] >> channel % 2 * 16 & 1);
    }
  }
  prepare();  // a block without tokens has a share of Q
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    Candidates& heaviest_keys = candidates(s, pair, blockIdx.x % CLUSTER_BLOCKS);
    heaviest_keys.scores[scored_token(i)] = heaviest_score[i], heaviest_keys.keys[scored_token(i)] = heaviest[i];
  }
  return {largest, smallest, finite, squares, count};
}

// Return the number of a sharer's tokens that exist; if PADDED, `counts` has it for all sharers.
DEVICE float tokens_of_sharer(const Statistics& s, const float* counts, int sharer) {
  return PADDED ? counts[sharer] : tokens_of_group(s.kv_len + FIRST_KEYS, sharer);
}

// Return the number for the sharers whose bits are set, at least 1.
DEVICE float tokens_of_sharers(const Statistics& s, const float* counts, uint32 sharers) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < CLUSTER_BLOCKS; i++) total += sharers >> i & 1 ? tokens_of_sharer(s, counts, i) : 0.0f;
  return fmaxf(total, 1.0f);
}

// Return the sharers of K whose tokens are not loud, a bit for each; all of a block's threads call. Not inlined, to
// save registers in the loop before it.
__device__ __noinline__ uint32 quiet_sharers(const Statistics& s, uint32 pair, const float* counts) {
  constexpr int ALL_WARPS = STATISTICS_THREADS / 32;
  __shared__ float sums[ALL_WARPS][CLUSTER_BLOCKS];
#pragma unroll
  for (int i = 0; i < CLUSTER_BLOCKS; i++) {
    float sum = line(s, pair, SQUARES + i)[threadIdx.x];
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][i] = sum;
  }
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < ALL_WARPS; i++) sum = __fadd_rn(sum, sums[i][threadIdx.x % CLUSTER_BLOCKS]);
  return quiet_groups(__fdiv_rn(sum, fmaxf(tokens_of_sharer(s, counts, threadIdx.x % CLUSTER_BLOCKS), 1.0f)));
}

// Return the number of sampled queries of a head that exist.
DEVICE float sampled_queries(const Statistics& s, const Equalizer& b, uint32 pair) {
  if (!PADDED || b.q_len != s.kv_len + FIRST_KEYS) return b.samples;
  int count = 0;
  for (uint32 i = threadIdx.x % 32; i < b.samples; i += 32)
    count += key_mask_of(s, pair / s.kv_heads)[i * b.sample_step] != 0;
  return max(__reduce_add_sync(~0u, count), 1);
}

// Return the exponent of a channel's factor, as in `transforms.equalize`, given K's mean and the numbers of queries and
// of keys of the sharers whose bits are set. Squares are summed in another order than there: a logarithm halfway
// between two integers may round to the other integer.
DEVICE int equalizer_exponent(const Statistics& s, uint32 pair, uint32 channel, float mean, uint32 sharers, float keys,
                              float queries) {
  float of_key = 0.0f, of_query = 0.0f;
#pragma unroll
  for (int i = 0; i < CLUSTER_BLOCKS; i++) {
    if (sharers >> i & 1) of_key = __fadd_rn(of_key, line(s, pair, SQUARES + i)[channel]);
    of_query = __fadd_rn(of_query, line(s, pair, SQUARES + CLUSTER_BLOCKS + i)[channel]);
  }
  of_key = __fdiv_rn(of_key, keys);
  of_query = __fdiv_rn(of_query, queries);
  const float square = __fmul_rn(mean, mean);
  const float variance = fmaxf(__fsub_rn(of_key, square), __fmul_rn(square, MIN_VARIANCE));
  if (!(of_query > 0.0f && variance > 0.0f && is_finite(of_query) && is_finite(variance))) return 0;
  const float exponent = rintf(log2f(__fdiv_rn(variance, of_query)) * 0.25f);
  return static_cast<int>(fminf(fmaxf(exponent, -MAX_EQUALIZER), MAX_EQUALIZER));
}

// Return the place of a channel's factor of Q, or of K, in a pair's line: Q and K alternate every 8 channels, so that a
// lane's factors lie as far apart as its channels of ROTATED_MEAN.
DEVICE int factor_number(int channel, bool of_key) { return channel / 8 * 16 + of_key * 8 + channel % 8; }

// Return 2^exponent in 16 bits, with the rotation's sign of a channel.
DEVICE uint16 factor(int exponent, uint32 channel) {
  const uint32 all[4] = {SIGNS_0, SIGNS_1, SIGNS_2, SIGNS_3};
  uint32 signs = all[0];
#pragma unroll
  for (int i = 1; i < CHANNELS / 32; i++)
    if (channel / 32 == i) signs = all[i];
  return (FLOAT16 ? exponent + 15 << 10 : exponent + 127 << 7) | (signs >> channel % 32 & 1) << 15;
}

// Write the factors and the mean that `quantize` needs for the rotation. All threads of a pair's cluster for K call;
// `mean` and `channel` count in the first LANES threads, `sharers` and `keys` are as in `equalizer_exponent`. Not
// inlined, to save registers in the loops before it.
__device__ __noinline__ void prepare_rotation(const Statistics& s, const Equalizer& b, uint32 pair, uint32 channel,
                                              float mean, uint32 sharers, float keys) {
  uint16* factors = reinterpret_cast<uint16*>(line(s, pair, FACTORS));
  float queries = 0.0f;
  if (EQUALIZE && threadIdx.x < 32) queries = sampled_queries(s, b, pair) * (b.q_heads / s.kv_heads);
  if (threadIdx.x < LANES) {
    const int exponent = EQUALIZE ? equalizer_exponent(s, pair, channel, mean, sharers, keys, queries) : 0;
    if (EQUALIZE) b.factors[pair * CHANNELS + channel] = exp2_of_integer(exponent);
    factors[factor_number(channel, false)] = factor(exponent, channel);
    factors[factor_number(channel, true)] = factor(-exponent, channel);
  }
  __syncwarp();
  sync_cluster();
  if (blockIdx.x % CLUSTER_BLOCKS != 0) return;
  float x = -__fmul_rn(line(s, pair, KEY_MEAN)[threadIdx.x], float_of(factors[factor_number(threadIdx.x, true)]));
#pragma unroll
  for (int distance = 1; distance < SECTION; distance *= 2) {
    const float other = __shfl_xor_sync(~0u, x, distance);
    x = threadIdx.x & distance ? __fsub_rn(other, x) : __fadd_rn(x, other);
  }
  line(s, pair, ROTATED_MEAN)[threadIdx.x] = x;
}
