// The forward kernel of `sage2` for Hopper: Q·Kᵀ in INT8, softmax, P·V in e4m3, of the operands that the Triton
// quantisers write (`triton/quantize_int8.py`, `triton/quantize_v.py`).
//
// A block of the grid works through items: 64·WARPGROUPS rows of one (batch, head). One warpgroup of it has the TMA bring
// tiles of Q, K and V; each of the others holds 64 rows: their scores, weights and output are in its registers. Its
// matrix products of a tile's scores and of the last tile's P·V are begun together; while P·V runs, the scores become the
// next P. With PING_PONG the warpgroups take turns to begin theirs.
//
// e4m3 products are summed with few bits: each loses what lies below 2⁻¹³ of the sum. So after SUMMED_TILES the sums
// move to float32 sums in shared memory.
//
// Compile-time constants: HEAD_DIM 64 or 128, BLOCK_N keys a tile, WARPGROUPS 2 or 3, PING_PONG, LEAD and WAIT_AT (below),
// SUMMED_TILES, CAUSAL, PADDED, LSE, OUTPUT_FLOAT16.
#include "hopper.cuh"

constexpr int STAGES = 2;
constexpr int BLOCK_M = 64 * WARPGROUPS;
constexpr int SCORES = BLOCK_N / 2;    // of a tile in a thread's registers
constexpr int OUTPUTS = HEAD_DIM / 2;  // in a thread's registers
constexpr int CHUNK = 8, CHUNKS = SCORES / CHUNK;
constexpr int V_WIDTH = BLOCK_N % 128 == 0 ? 128 : BLOCK_N % 64 == 0 ? 64 : 32;  // keys of V side by side in shared memory
constexpr int Q_BYTES = BLOCK_M * HEAD_DIM, K_BYTES = BLOCK_N * HEAD_DIM, V_BYTES = HEAD_DIM * BLOCK_N;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? 240 : 160, PRODUCER_REGISTERS = WARPGROUPS == 2 ? 24 : 32;
constexpr int SEGMENTS = (BLOCK_N + 63) / 64;  // of a tile that have a scale of K each
constexpr float LN2 = 0.6931471805599453f;
// P is at most 2^SLACK while its row's maximum is at most SLACK (in powers of two) above the reference; e4m3 ends at 448.
constexpr float SLACK = 1.0f, P_LOG2 = 8.807354922057604f - SLACK;

struct Barriers {
  uint64 q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

template <int VALUE> struct Constant {
  static constexpr int value = VALUE;
};

// Shapes as in `int8_forward.py`.
struct Arguments {
  const float* query_scale;  // (batch, q_heads, q_rows)
  const uint16* key_scale;   // bfloat16 (batch, kv_heads, kv_rows / 64, 4): a quad's thread i has the i-th
  const float *value_scale, *value_mean;  // (batch, kv_heads, HEAD_DIM)
  const float* mean_score;   // (batch, q_heads, q_rows), or null: Q's products with K's mean, which the LSE gets
  const uint8* valid;        // (batch or 1, kv_len), as `KeyPadding` has it
  const int* spans;          // (batch or 1, 3), the same
  void* output;              // its channels are contiguous
  float* lse;                // (batch, q_heads, q_len)
  int64 output_stride_batch, output_stride_head, output_stride_token;
  int64 valid_stride, spans_stride;
  int batch, q_heads, kv_heads, q_len, kv_len, q_rows, kv_rows, v_head_dim, causal_offset, heads_at_once;
  float softmax_scale;
};

// A block's share of the work.
struct Item {
  int batch, head, kv_head, first_row;
  int begin, end;            // tiles of keys, the first one even
  int keys;                  // none at or beyond it exists
  int whole_begin, whole_keys;  // tiles from the one on, and keys before the other: without a gap

  DEVICE int pair(const Arguments& a) const { return batch * a.q_heads + head; }
  DEVICE int kv_pair(const Arguments& a) const { return batch * a.kv_heads + kv_head; }
};

// Item `round` of this block. Causal items differ in length: the longest of as many heads as stay in the L2 cache come
// first, and blocks change order from round to round.
DEVICE bool next_item(const Arguments& a, int round, Item& item) {
  const int blocks = (a.q_len + BLOCK_M - 1) / BLOCK_M, pairs = a.batch * a.q_heads;
  int index = round * gridDim.x + (CAUSAL && round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  if (round * static_cast<int>(gridDim.x) >= blocks * pairs) return false;
  int block, pair;
  if (index >= blocks * pairs) index = -1;
  if (CAUSAL) {
    const int group = index / (blocks * a.heads_at_once), within = index - group * blocks * a.heads_at_once;
    const int heads = min(a.heads_at_once, pairs - group * a.heads_at_once);
    block = blocks - 1 - within / heads;
    pair = group * a.heads_at_once + within % heads;
  } else {
    block = index % blocks;
    pair = index / blocks;
  }
  item.batch = pair / a.q_heads;
  item.head = pair % a.q_heads;
  item.kv_head = item.head / (a.q_heads / a.kv_heads);
  item.first_row = block * BLOCK_M;
  item.begin = item.whole_begin = 0;
  item.keys = item.whole_keys = a.kv_len;
  if (PADDED) {
    const int* spans = a.spans + item.batch * a.spans_stride;
    item.begin = spans[0] / BLOCK_N & ~1;
    item.whole_begin = (spans[0] + BLOCK_N - 1) / BLOCK_N;
    item.whole_keys = spans[1];
    item.keys = spans[2];
  }
  if (CAUSAL) item.keys = min(item.keys, item.first_row + BLOCK_M + a.causal_offset);
  item.end = index < 0 ? item.begin : max(item.begin, (item.keys + BLOCK_N - 1) / BLOCK_N);
  if (index < 0) item.first_row = a.q_len;
  return true;
}

// What thread 0 of each brings: K and Q must not wait for a free stage of V.
DEVICE void produce_keys(const Arguments& a, const TensorMap& query, const TensorMap& key, uint8* q, uint8* k, Barriers& b) {
  Item item;
  int stage_uses = 0;
  #pragma unroll 1
  for (int round = 0, used = 0; next_item(a, round, item); round++) {
    if (item.begin == item.end) continue;
    wait(b.q_empty, used++ & 1 ^ 1);
    arrive_expecting(b.q_full, Q_BYTES);
    #pragma unroll
    for (int i = 0; i < WARPGROUPS; i++)
      load_box(query, q + i * 64 * HEAD_DIM, b.q_full, item.pair(a) * a.q_rows + item.first_row + i * 64, 0);
    #pragma unroll 1
    for (int tile = item.begin; tile < item.end + (item.end & 1); tile++, stage_uses++) {
      const int stage = stage_uses % STAGES;
      wait(b.k_empty[stage], stage_uses / STAGES & 1 ^ 1);
      arrive_expecting(b.k_full[stage], K_BYTES);
      load_box(key, k + stage * K_BYTES, b.k_full[stage], item.kv_pair(a) * a.kv_rows + tile * BLOCK_N, 0);
    }
  }
}

DEVICE void produce_values(const Arguments& a, const TensorMap& value, uint8* v, Barriers& b) {
  Item item;
  int stage_uses = 0;
  #pragma unroll 1
  for (int round = 0; next_item(a, round, item); round++) {
    #pragma unroll 1
    for (int tile = item.begin; tile < item.end + (item.end & 1); tile++, stage_uses++) {
      const int stage = stage_uses % STAGES;
      wait(b.v_empty[stage], stage_uses / STAGES & 1 ^ 1);
      arrive_expecting(b.v_full[stage], V_BYTES);
      #pragma unroll
      for (int i = 0; i < BLOCK_N / V_WIDTH; i++)
        load_box(value, v + stage * V_BYTES + i * HEAD_DIM * V_WIDTH, b.v_full[stage], item.kv_pair(a) * HEAD_DIM,
                 tile * BLOCK_N + i * V_WIDTH);
    }
  }
}

// The 64 rows of one warpgroup. A thread has the scores and outputs of rows `row` and `row` + 8; element i of `scores` is
// of row i / 2 % 2 and of key i / 4 * 8 + quad * 2 + i % 2 of the tile.
struct Consumer {
  const Arguments& a;
  Barriers& barriers;

  float4* sums;  // the thread's float32 outputs, every 128th of these
  uint64 q, k, v;
  int warpgroup, quad, row;
  bool leader;  // of its warp, for barriers

  Item item;
  int limit[2];  // keys before it are allowed
  int exists;    // PADDED: bit i / 4 * 2 + i % 2 of the masked tile
  const uint16* key_scale;
  int scores[SCORES];
  uint32 weights[SCORES / 4];
  float outputs[OUTPUTS];
  float row_scale[2], next_key_scale[SEGMENTS], scale[2][SEGMENTS];
  float reference[2], exponent[2], decay[2], row_sum[2], sums_reference[2];
  bool grows, has_sums;
  int parity;  // of the barriers in this round of stages

  DEVICE void take_turn() {
    if (PING_PONG) sync_threads(1 + warpgroup, 256);
  }
  DEVICE void pass_turn() {
    if (PING_PONG) arrive_threads(1 + (warpgroup + 1) % WARPGROUPS, 256);
  }

  // The segment of scores[i] in an even or odd tile: its block of 64 keys, counted from the tile's first.
  static constexpr DEVICE int segment(int odd, int i) { return (odd * BLOCK_N % 64 + i / 4 * 8) / 64; }

  DEVICE void load_key_scale(int tile) {
    #pragma unroll
    for (int i = 0; i < SEGMENTS; i++) {
      const int block = min(tile * BLOCK_N / 64 + i, a.kv_rows / 64 - 1);
      next_key_scale[i] = from_bfloat16(key_scale[block * 4 + quad]);
    }
  }

  DEVICE bool allowed(int tile, int i) const {
    const bool before = tile * BLOCK_N + i / 4 * 8 + quad * 2 + i % 2 < limit[i / 2 % 2];
    return before && (!PADDED || exists >> (i / 4 * 2 + i % 2) & 1);
  }

  DEVICE void load_exists(int tile) {
    exists = 0;
    const uint8* valid = a.valid + item.batch * a.valid_stride;
    #pragma unroll
    for (int i = 0; i < SCORES; i++) {
      if (i & 2) continue;
      const int key = tile * BLOCK_N + i / 4 * 8 + quad * 2 + i % 2;
      if (key < a.kv_len && valid[key]) exists |= 1 << (i / 4 * 2 + i % 2);
    }
  }

  // Scales of a tile, and its rows' maxima: a row whose maximum has outgrown its reference by SLACK gets a new one.
  template <int ODD, bool MASKED> DEVICE void find_maxima(int tile) {
    #pragma unroll
    for (int i = 0; i < SEGMENTS; i++) scale[0][i] = row_scale[0] * next_key_scale[i], scale[1][i] = row_scale[1] * next_key_scale[i];
    load_key_scale(tile + 1);
    constexpr int NO_KEY = -2147483647 - 1;
    if (MASKED) {
      if (PADDED) load_exists(tile);
      #pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!allowed(tile, i)) scores[i] = NO_KEY;
    }
    float largest[2] = {-INFINITE, -INFINITE};
    #pragma unroll
    for (int part = 0; part < SEGMENTS; part++) {
      int x[4] = {NO_KEY, NO_KEY, NO_KEY, NO_KEY};  // two chains for each row
      #pragma unroll
      for (int i = 0; i < SCORES; i += 4) {
        if (segment(ODD, i) != part) continue;
        int &first = x[i / 4 % 2 * 2], &second = x[i / 4 % 2 * 2 + 1];
        first = max(max(first, scores[i]), scores[i + 1]);
        second = max(max(second, scores[i + 2]), scores[i + 3]);
      }
      x[0] = max(x[0], x[2]), x[1] = max(x[1], x[3]);
      #pragma unroll
      for (int r = 0; r < 2; r++)
        if (!MASKED || x[r] != NO_KEY) largest[r] = fmaxf(largest[r], static_cast<float>(x[r]) * scale[r][part]);
    }
    grows = __any_sync(~0u, largest[0] > reference[0] + SLACK || largest[1] > reference[1] + SLACK);
    if (grows) {
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        float x = largest[r];
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        x = fmaxf(x, reference[r]);
        decay[r] = MASKED && x == -INFINITE ? 1.0f : exp2_approximate(reference[r] - x);
        reference[r] = x;
        row_sum[r] *= decay[r];
      }
    }
    exponent[0] = P_LOG2 - reference[0], exponent[1] = P_LOG2 - reference[1];
  }

  // The three stages of a chunk of 8 scores on their way to weights. Adding 0 · (a result of LEAD chunks before) keeps the
  // compiler from converting all scores first and then waiting for one exponential after the other.
  template <int ODD, bool MASKED> DEVICE void begin_chunk(int tile, int chunk) {
    float base[2] = {exponent[0], exponent[1]};
    if (chunk >= LEAD) {
      const float before = __int_as_float(scores[(chunk - LEAD) * CHUNK]);
      base[0] = __fmaf_rn(before, 0.0f, base[0]), base[1] = __fmaf_rn(before, 0.0f, base[1]);
    }
    #pragma unroll
    for (int i = chunk * CHUNK; i < (chunk + 1) * CHUNK; i++) {
      const int r = i / 2 % 2;
      float x = __fmaf_rn(static_cast<float>(scores[i]), scale[r][segment(ODD, i)], base[r]);
      if (MASKED && !allowed(tile, i)) x = -INFINITE;
      scores[i] = __float_as_int(x);
    }
  }
  DEVICE void exponentiate_chunk(int chunk) {
    #pragma unroll
    for (int i = chunk * CHUNK; i < (chunk + 1) * CHUNK; i++) {
      const float p = exp2_approximate(__int_as_float(scores[i]));
      row_sum[i / 2 % 2] += p;
      scores[i] = __float_as_int(p);
    }
  }
  DEVICE void end_chunk(int chunk) {
    const int i = chunk * CHUNK;
    auto p = [&](int n) { return __int_as_float(scores[i + n]); };
    weights[i / 4] = to_e4m3(p(0), p(1), p(4), p(5));
    weights[i / 4 + 1] = to_e4m3(p(2), p(3), p(6), p(7));
  }

  DEVICE void begin_scores(int stage) {
    #pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) add_product(scores, q + 2 * i, k + stage * (K_BYTES / 16) + 2 * i, i > 0);
    commit_products();
  }
  DEVICE void begin_outputs(int stage) {
    #pragma unroll
    for (int i = 0; i < BLOCK_N / 32; i++) {
      const int at = i * 32 / V_WIDTH * (HEAD_DIM * V_WIDTH) + i * 32 % V_WIDTH;
      add_product(outputs, weights + 4 * i, v + (stage * V_BYTES + at) / 16);
    }
    commit_products();
  }

  DEVICE void decay_outputs() {
    #pragma unroll
    for (int i = 0; i < OUTPUTS; i++) outputs[i] *= decay[i / 2 % 2];
  }

  // Add the outputs to the float32 sums, and begin them anew, or with the sums if these are the last.
  template <bool LAST> DEVICE void move_sums() {
    const float gain[2] = {exp2_approximate(sums_reference[0] - reference[0]), exp2_approximate(sums_reference[1] - reference[1])};
    #pragma unroll
    for (int i = 0; i < OUTPUTS / 4; i++) {
      float* x = outputs + 4 * i;
      float4 sum = has_sums ? sums[i * 128] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      sum = make_float4(__fmaf_rn(sum.x, gain[0], x[0]), __fmaf_rn(sum.y, gain[0], x[1]), __fmaf_rn(sum.z, gain[1], x[2]),
                        __fmaf_rn(sum.w, gain[1], x[3]));
      if (!LAST) sums[i * 128] = sum;
      x[0] = LAST ? sum.x : 0.0f, x[1] = LAST ? sum.y : 0.0f, x[2] = LAST ? sum.z : 0.0f, x[3] = LAST ? sum.w : 0.0f;
    }
    sums_reference[0] = reference[0], sums_reference[1] = reference[1];
    has_sums = true;
  }

  // P·V of the last tile runs while this tile's scores become weights.
  template <int ODD, bool MASKED> DEVICE void step(int tile) {
    take_turn();
    fence_products();
    begin_scores(ODD);
    fence_products();
    begin_outputs(ODD ^ 1);
    pass_turn();
    wait_products<1>();
    pin(scores);
    if (leader) arrive(barriers.k_empty[ODD]);
    find_maxima<ODD, MASKED>(tile);
    #pragma unroll
    for (int c = 0; c < LEAD; c++) begin_chunk<ODD, MASKED>(tile, c);
    #pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      exponentiate_chunk(c);
      if (c + LEAD < CHUNKS) begin_chunk<ODD, MASKED>(tile, c + LEAD);
      if (c == WAIT_AT) {
        pin(scores);
        // These waits are branches, above which the compiler does not move the wait for P·V.
        if (tile + 1 < item.end) wait(barriers.k_full[ODD ^ 1], parity ^ ODD);
        wait(barriers.v_full[ODD], parity);
        wait_products<0>();
        pin(outputs);
        if (leader) arrive(barriers.v_empty[ODD ^ 1]);
        #pragma unroll
        for (int done = 0; done < c; done++) end_chunk(done);
      }
      if (c > WAIT_AT) end_chunk(c - 1);
    }
    end_chunk(CHUNKS - 1);
    pin(weights);
    if (grows) decay_outputs();
    if (ODD == 0 && (tile - item.begin) % SUMMED_TILES == 0) move_sums<false>();
  }

  template <int ODD> DEVICE void step_masked_or_not(int tile, int whole_end) {
    if (tile >= item.whole_begin && tile < whole_end) step<ODD, false>(tile);
    else step<ODD, true>(tile);
  }

  // From the item's first tile to its last; the outputs are then those of `reference`, without a scale.
  DEVICE void attend(int whole_end) {
    wait(barriers.k_full[0], parity);
    take_turn();
    fence_products();
    begin_scores(0);
    pass_turn();
    wait(barriers.v_full[0], parity);
    wait_products<0>();
    pin(scores);
    if (leader) arrive(barriers.k_empty[0]);
    find_maxima<0, true>(item.begin);
    #pragma unroll
    for (int c = 0; c < CHUNKS; c++) begin_chunk<0, true>(item.begin, c), exponentiate_chunk(c), end_chunk(c);
    if (item.begin + 1 < item.end) wait(barriers.k_full[1], parity);
    pin(weights);
    #pragma unroll 1
    for (int tile = item.begin + 1; tile < item.end; tile++) {
      step_masked_or_not<1>(tile, whole_end);
      if (++tile >= item.end) break;
      parity ^= 1;
      step_masked_or_not<0>(tile, whole_end);
    }
    if (leader) arrive(barriers.q_empty);
    const int last = (item.end - 1) % STAGES;
    take_turn();
    fence_products();
    begin_outputs(last);
    pass_turn();
    wait_products<0>();
    pin(outputs);
    if (leader) arrive(barriers.v_empty[last]);
    if (last == 0) {  // the producers bring whole rounds
      wait(barriers.k_full[1], parity);
      wait(barriers.v_full[1], parity);
      if (leader) arrive(barriers.k_empty[1]), arrive(barriers.v_empty[1]);
    }
    parity ^= 1;
    if (has_sums) move_sums<true>();
  }

  DEVICE void store(float total, int r) {
    const int at = item.first_row + row + 8 * r;
    if (at >= a.q_len) return;
    const int64 of_head = static_cast<int64>(item.kv_pair(a)) * HEAD_DIM;
    const float inverse = 1.0f / total;
    auto* into = static_cast<uint32*>(a.output) + (item.batch * a.output_stride_batch + item.head * a.output_stride_head + at * a.output_stride_token) / 2;
    #pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) {
      const int channel = i * 8 + quad * 2;
      if (channel >= a.v_head_dim) break;
      const float2 gain = *reinterpret_cast<const float2*>(a.value_scale + of_head + channel);
      const float2 mean = *reinterpret_cast<const float2*>(a.value_mean + of_head + channel);
      const float x = outputs[4 * i + 2 * r] * inverse * gain.x + mean.x, y = outputs[4 * i + 2 * r + 1] * inverse * gain.y + mean.y;
      into[channel / 2] = total == 0.0f ? 0u : (OUTPUT_FLOAT16 ? to_float16(x, y) : to_bfloat16(x, y));
    }
    if (LSE && quad == 0) {
      float natural = (reference[r] + __log2f(total) - P_LOG2) * LN2;
      if (a.mean_score != nullptr) natural += a.softmax_scale * a.mean_score[static_cast<int64>(item.pair(a)) * a.q_rows + at];
      a.lse[static_cast<int64>(item.pair(a)) * a.q_len + at] = total == 0.0f ? -INFINITE : natural;
    }
  }

  DEVICE void run() {
    parity = 0;
    Item& it = item;
    #pragma unroll 1
    for (int round = 0, used = 0; next_item(a, round, it); round++) {
      key_scale = a.key_scale + static_cast<int64>(item.kv_pair(a)) * (a.kv_rows / 64) * 4;
      int whole_end = item.whole_keys / BLOCK_N;
      if (CAUSAL) whole_end = min(whole_end, max(item.first_row + warpgroup * 64 + a.causal_offset + 1, 0) / BLOCK_N);
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const int at = item.first_row + row + 8 * r;
        limit[r] = CAUSAL ? min(item.keys, at + a.causal_offset + 1) : item.keys;
        row_sum[r] = 0.0f;
        reference[r] = -INFINITE;
      }
      #pragma unroll
      for (int i = 0; i < OUTPUTS; i++) outputs[i] = 0.0f;
      has_sums = false;
      if (item.begin < item.end) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
          const int at = min(item.first_row + row + 8 * r, a.q_len - 1);
          row_scale[r] = a.query_scale[static_cast<int64>(item.pair(a)) * a.q_rows + at] * (a.softmax_scale * 1.4426950408889634f);
        }
        load_key_scale(item.begin);
        wait(barriers.q_full, used++ & 1);
        attend(whole_end);
      }
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        float total = row_sum[r];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        store(total, r);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
int8_forward(const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
             const __grid_constant__ TensorMap value, const float* query_scale, const uint16* key_scale,
             const float* value_scale, const float* value_mean, const float* mean_score, const uint8* valid,
             const int* spans, void* output, float* lse, int64 output_stride_batch, int64 output_stride_head,
             int64 output_stride_token, int valid_stride, int spans_stride, int batch, int q_heads, int kv_heads, int q_len,
             int kv_len, int q_rows, int kv_rows, int v_head_dim, int causal_offset, int heads_at_once,
             float softmax_scale) {
  const Arguments arguments{query_scale, key_scale, value_scale, value_mean, mean_score, valid, spans, output, lse,
                            output_stride_batch, output_stride_head, output_stride_token, valid_stride, spans_stride, batch,
                            q_heads, kv_heads, q_len, kv_len, q_rows, kv_rows, v_head_dim, causal_offset, heads_at_once,
                            softmax_scale};
  extern __shared__ __align__(1024) uint8 shared[];
  uint8 *q = shared, *k = q + Q_BYTES, *v = k + STAGES * K_BYTES;
  __shared__ Barriers barriers;
  const int warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    init(barriers.q_full, 1), init(barriers.q_empty, 4 * WARPGROUPS);
    for (int i = 0; i < STAGES; i++) {
      init(barriers.k_full[i], 1), init(barriers.k_empty[i], 4 * WARPGROUPS);
      init(barriers.v_full[i], 1), init(barriers.v_empty[i], 4 * WARPGROUPS);
    }
    fence_shared();
  }
  __syncthreads();
  if (warpgroup == WARPGROUPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x % 128 == 0) produce_keys(arguments, query, key, q, k, barriers);
    if (threadIdx.x % 128 == 32) produce_values(arguments, value, v, barriers);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    if (PING_PONG && warpgroup == WARPGROUPS - 1) arrive_threads(1, 256);  // the first turn is warpgroup 0's
    const int thread = threadIdx.x % 128;
    Consumer consumer{arguments, barriers};
    consumer.sums = reinterpret_cast<float4*>(v + STAGES * V_BYTES) + warpgroup * (OUTPUTS / 4) * 128 + thread;
    consumer.q = descriptor<HEAD_DIM>(q + warpgroup * 64 * HEAD_DIM);
    consumer.k = descriptor<HEAD_DIM>(k);
    consumer.v = descriptor<V_WIDTH>(v);
    consumer.warpgroup = warpgroup;
    consumer.quad = thread % 4;
    consumer.row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    consumer.leader = thread % 32 == 0;
    consumer.run();
  }
}
