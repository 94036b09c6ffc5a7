// The forward kernel of `sage2` for Hopper: Q·Kᵀ in INT8, softmax, P·V in e4m3, of the operands that the Triton
// quantisers write (`triton/quantize_int8.py`, `triton/quantize_v.py`).
//
// A block of the grid attends for 64 rows of one (batch, head), in one warpgroup: their scores, weights and outputs are
// in its registers, tiles of K and V come by TMA. Its matrix products of a tile's scores and of the last tile's P·V are
// begun together; while P·V runs, the scores become the next P. Several blocks share a multiprocessor, and none waits
// for another: where one has no matrix product or no exponential to begin, others have.
//
// e4m3 products are summed with few bits: each loses what lies below 2⁻¹³ of the sum. So after SUMMED_TILES the sums
// move to float32 sums in local memory.
//
// Compile-time constants: HEAD_DIM 64 or 128, BLOCK_N keys a tile, RESIDENT blocks a multiprocessor, SUMMED_TILES
// (even), CAUSAL, LSE, OUTPUT_FLOAT16.
#include "hopper.cuh"

constexpr int BLOCK_M = 64;
constexpr int STAGES = 2;              // of K and of V in shared memory
constexpr int SCORES = BLOCK_N / 2;    // of a tile in a thread's registers
constexpr int OUTPUTS = HEAD_DIM / 2;  // in a thread's registers
constexpr int CHUNK = 8, CHUNKS = SCORES / CHUNK;
// The weights of a tile are packed when P·V of the last one is done: after so many chunks it is.
constexpr int PRODUCTS_DONE = 1;
constexpr int V_WIDTH = BLOCK_N % 128 == 0 ? 128 : BLOCK_N % 64 == 0 ? 64 : 32;  // keys of V side by side in memory
constexpr int Q_BYTES = BLOCK_M * HEAD_DIM, K_BYTES = BLOCK_N * HEAD_DIM, V_BYTES = HEAD_DIM * BLOCK_N;
constexpr int SEGMENTS = (BLOCK_N + 63) / 64;  // of a tile that have a scale of K each
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// A row's weights are relative to a reference, which its maximum may exceed by SLACK powers of two; e4m3 ends at 448.
constexpr float SLACK = 1.0f, P_LOG2 = 8.807354922057604f - SLACK;

struct Arguments {
  const float* query_scale;  // (batch, q_heads, q_rows)
  const uint16* key_scale;   // bfloat16 (batch, kv_heads, kv_rows / 64, 4): thread i of a quad has the i-th
  const float *value_scale, *value_mean;  // (batch, kv_heads, HEAD_DIM)
  const float* mean_score;                // (batch, q_heads, q_rows): Q's products with K's mean, which the LSE gets
  float* lse;                             // (batch, q_heads, q_len)
  int batch, q_heads, kv_heads, q_len, kv_len, q_rows, kv_rows, causal_offset, heads_at_once;
  float softmax_scale;
};

struct Shared {
  alignas(1024) uint8 q[Q_BYTES];
  alignas(1024) uint8 k[STAGES][K_BYTES];  // in the end, the outputs
  alignas(1024) uint8 v[STAGES][V_BYTES];
  uint64 q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};
static_assert(STAGES * K_BYTES >= BLOCK_M * HEAD_DIM * 2);

// A block's share of the work.
struct Item {
  int batch, head, kv_head, first_row;
  int tiles;  // of keys, from the first one on; at least 1, of which a row may see nothing
};

// Causal items differ in length: the longest of as many heads as stay in the L2 cache come first.
DEVICE Item this_item(const Arguments& a) {
  const int blocks = (a.q_len + BLOCK_M - 1) / BLOCK_M, index = blockIdx.x;
  int block, pair;
  if (CAUSAL) {
    const int group = index / (blocks * a.heads_at_once), within = index - group * blocks * a.heads_at_once;
    const int heads = min(a.heads_at_once, a.batch * a.q_heads - group * a.heads_at_once);
    block = blocks - 1 - within / heads;
    pair = group * a.heads_at_once + within % heads;
  } else {
    block = index % blocks;
    pair = index / blocks;
  }
  Item item;
  item.batch = pair / a.q_heads;
  item.head = pair - item.batch * a.q_heads;
  item.kv_head = item.head / (a.q_heads / a.kv_heads);
  item.first_row = block * BLOCK_M;
  const int keys = CAUSAL ? min(a.kv_len, item.first_row + BLOCK_M + a.causal_offset) : a.kv_len;
  item.tiles = max(1, (keys + BLOCK_N - 1) / BLOCK_N);
  return item;
}

// A thread has the scores and outputs of rows `row` and `row` + 8: element i of `scores` is of the row number i / 2 % 2
// of these, and of key i / 4 * 8 + quad * 2 + i % 2 of the tile.
struct Attention {
  const Arguments& a;
  const TensorMap &key, &value;
  Shared& shared;
  const Item item;
  const int pair, kv_pair, thread, quad, row;

  int parity;                                // of the pair of tiles at work, in the barriers' phases
  int first_key_scale, last_key_scale;       // the thread's in the item's head
  int left[2];                               // keys of a masked tile that the rows may attend to, from quad * 2 on
  int scores[SCORES];
  uint32 weights[SCORES / 4];
  float outputs[OUTPUTS];
  float row_scale[2], next_key_scale[SEGMENTS], scale[2][SEGMENTS];
  float base[2];  // P_LOG2 - the row's reference
  float decay[2], row_sum[2], sums_base[2];
  float* sums;  // OUTPUTS of them
  bool grows, has_sums;

  DEVICE void load_keys(int stage, int tile) {
    arrive_expecting(shared.k_full[stage], K_BYTES);
    load_box(key, shared.k[stage], shared.k_full[stage], kv_pair * a.kv_rows + tile * BLOCK_N, 0);
  }
  DEVICE void load_values(int stage, int tile) {
    arrive_expecting(shared.v_full[stage], V_BYTES);
    load_box(value, shared.v[stage], shared.v_full[stage], tile * (BLOCK_N / V_WIDTH), kv_pair * HEAD_DIM, 0);
  }

  // The segment of scores[i] in an even or odd tile: its block of 64 keys, counted from the tile's first.
  static constexpr DEVICE int segment(int odd, int i) { return (odd * BLOCK_N % 64 + i / 4 * 8) / 64; }

  DEVICE void load_key_scale(int tile) {
#pragma unroll
    for (int i = 0; i < SEGMENTS; i++)
      next_key_scale[i] =
          from_bfloat16(a.key_scale[min(first_key_scale + (tile * BLOCK_N / 64 + i) * 4, last_key_scale)]);
  }

  // What a masked tile allows.
  DEVICE void load_mask(int tile) {
    const int first = tile * BLOCK_N + quad * 2;
#pragma unroll
    for (int r = 0; r < 2; r++)
      left[r] = (CAUSAL ? min(a.kv_len, item.first_row + row + 8 * r + a.causal_offset + 1) : a.kv_len) - first;
  }
  DEVICE bool allowed(int i) const { return i / 4 * 8 + i % 2 < left[i / 2 % 2]; }

  // Scales of a tile, and its rows' maxima: where one has outgrown its reference by SLACK, it becomes the reference.
  template <int ODD, bool MASKED>
  DEVICE void find_maxima(int tile) {
#pragma unroll
    for (int i = 0; i < SEGMENTS; i++) {
      scale[0][i] = row_scale[0] * next_key_scale[i];
      scale[1][i] = row_scale[1] * next_key_scale[i];
    }
    load_key_scale(tile + 1);
    constexpr int NO_KEY = -2147483647 - 1;
    if (MASKED) {
      load_mask(tile);
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!allowed(i)) scores[i] = NO_KEY;
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
    constexpr float limit = P_LOG2 + SLACK;
    grows = __any_sync(~0u, largest[0] + base[0] > limit || largest[1] + base[1] > limit);
    if (grows) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float x = largest[r];
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        const float before = base[r];
        base[r] = fminf(before, P_LOG2 - x);
        decay[r] = MASKED && base[r] == INFINITE ? 1.0f : exp2_approximate(base[r] - before);
        row_sum[r] *= decay[r];
      }
    }
  }

  // The three stages of a chunk of 8 scores on their way to weights. Adding 0 · (a result of the chunk before) keeps
  // the compiler from scaling all scores first and then waiting for one exponential after the other.
  template <int ODD, bool MASKED>
  DEVICE void begin_chunk(int chunk) {
    float shift[2] = {base[0], base[1]};
    if (chunk > 0) {  // of the same row: what is not finite stays there
      const int* before = scores + (chunk - 1) * CHUNK;
      shift[0] = __fmaf_rn(__int_as_float(before[0]), 0.0f, base[0]);
      shift[1] = __fmaf_rn(__int_as_float(before[2]), 0.0f, base[1]);
    }
#pragma unroll
    for (int i = chunk * CHUNK; i < (chunk + 1) * CHUNK; i++) {
      const int r = i / 2 % 2;
      float x = __fmaf_rn(static_cast<float>(scores[i]), scale[r][segment(ODD, i)], shift[r]);
      if (MASKED && !allowed(i)) x = -INFINITE;
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
  DEVICE void pack_chunk(int chunk) {
    auto p = [&](int i) { return __int_as_float(scores[chunk * CHUNK + i]); };
    weights[2 * chunk] = to_e4m3(p(0), p(1), p(4), p(5));
    weights[2 * chunk + 1] = to_e4m3(p(2), p(3), p(6), p(7));
  }
  // `await_products` waits until the matrix products have read the weights of the last tile.
  template <int ODD, bool MASKED, typename Await>
  DEVICE void weigh_scores(Await await_products) {
    begin_chunk<ODD, MASKED>(0);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      exponentiate_chunk(c);
      if (c + 1 < CHUNKS) begin_chunk<ODD, MASKED>(c + 1);
      if (c == PRODUCTS_DONE) {
        pin(scores);
        await_products();
#pragma unroll
        for (int i = 0; i < c; i++) pack_chunk(i);
      } else if (c > PRODUCTS_DONE) {
        pack_chunk(c - 1);
      }
    }
    pack_chunk(CHUNKS - 1);
    pin(weights);
  }

  DEVICE void begin_scores(int stage) {
    const uint32 q = descriptor(shared.q), k = descriptor(shared.k[stage]);
    add_product<HEAD_DIM, false>(scores, q, k);
#pragma unroll
    for (int i = 1; i < HEAD_DIM / 32; i++) add_product<HEAD_DIM, true>(scores, q + 2 * i, k + 2 * i);
    commit_products();
  }
  DEVICE void begin_outputs(int stage) {
    const uint32 v = descriptor(shared.v[stage]);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 32; i++) {
      const int at = i * 32 / V_WIDTH * (HEAD_DIM * V_WIDTH) + i * 32 % V_WIDTH;
      add_product<V_WIDTH>(outputs, weights + 4 * i, v + at / 16);
    }
    commit_products();
  }

  DEVICE void begin(float* memory) {
    sums = memory;
    asm volatile("" : "+l"(sums));  // as far as the compiler knows, elsewhere: it keeps them in memory
    parity = 0;
    has_sums = false;
    first_key_scale = kv_pair * (a.kv_rows / 16) + quad;
    last_key_scale = first_key_scale + a.kv_rows / 16 - 4;
    load_key_scale(0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      row_sum[r] = 0.0f;
      base[r] = INFINITE;
      const int at = min(item.first_row + row + 8 * r, a.q_rows - 1);
      row_scale[r] = a.query_scale[static_cast<int64>(pair) * a.q_rows + at] * (a.softmax_scale * LOG2E);
    }
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) outputs[i] = 0.0f;
  }

  // Add the outputs to the float32 sums, and begin them anew, or with the sums if these are the last.
  template <bool LAST>
  DEVICE void move_sums() {
    const float gain[2] = {exp2_approximate(base[0] - sums_base[0]), exp2_approximate(base[1] - sums_base[1])};
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
      const float sum = has_sums ? __fmaf_rn(sums[i], gain[i / 2 % 2], outputs[i]) : outputs[i];
      if (!LAST) sums[i] = sum;
      outputs[i] = LAST ? sum : 0.0f;
    }
    sums_base[0] = base[0], sums_base[1] = base[1];
    has_sums = true;
  }

  // P·V of the last tile runs while this tile's scores become weights.
  template <int ODD, bool MASKED>
  DEVICE void step(int tile) {
    fence_products();
    begin_scores(ODD);
    fence_products();
    begin_outputs(ODD ^ 1);
    wait_products<1>();
    pin(scores);
    arrive_as_warp(shared.k_empty[ODD]);
    find_maxima<ODD, MASKED>(tile);
    weigh_scores<ODD, MASKED>([&] {
      // The compiler moves no wait for products above these, which are branches.
      if (tile + 1 < item.tiles) wait(shared.k_full[ODD ^ 1], parity ^ ODD);
      wait(shared.v_full[ODD], parity);
      wait_products<0>();
      pin(outputs);
      arrive_as_warp(shared.v_empty[ODD ^ 1]);
      if (thread == 0) {
        if (tile + 2 < item.tiles) {
          wait(shared.k_empty[ODD], parity);
          load_keys(ODD, tile + 2);
        }
        if (tile + 1 < item.tiles) {
          wait(shared.v_empty[ODD ^ 1], parity ^ ODD ^ 1);
          load_values(ODD ^ 1, tile + 1);
        }
      }
      __syncwarp();
    });
    if (grows) {
#pragma unroll
      for (int i = 0; i < OUTPUTS; i++) outputs[i] *= decay[i / 2 % 2];
    }
    if (ODD == 0 && tile % SUMMED_TILES == 0) move_sums<false>();
  }

  template <bool MASKED>
  DEVICE void weigh_first_tile() {
    find_maxima<0, MASKED>(0);
    weigh_scores<0, MASKED>([&] {
      if (item.tiles > 1) wait(shared.k_full[1], parity);
      wait(shared.v_full[0], parity);
      if (thread == 0 && item.tiles > 2) {
        wait(shared.k_empty[0], parity);
        load_keys(0, 2);
      }
      __syncwarp();
    });
  }

  DEVICE void attend() {
    int whole = a.kv_len / BLOCK_N;  // tiles that need no mask
    if (CAUSAL) whole = min(whole, max(item.first_row + a.causal_offset + 1, 0) / BLOCK_N);
    wait(shared.q_full, 0);
    wait(shared.k_full[0], parity);
    fence_products();
    begin_scores(0);
    wait_products<0>();
    pin(scores);
    arrive_as_warp(shared.k_empty[0]);
    if (whole > 0)
      weigh_first_tile<false>();
    else
      weigh_first_tile<true>();
    int tile = 1;
#pragma unroll 1
    for (; tile + 1 < whole; tile += 2) {
      step<1, false>(tile);
      parity ^= 1;
      step<0, false>(tile + 1);
    }
#pragma unroll 1
    for (; tile < item.tiles; tile++) {
      step<1, true>(tile);
      if (++tile == item.tiles) break;
      parity ^= 1;
      step<0, true>(tile);
    }
    fence_products();
    begin_outputs((item.tiles - 1) % STAGES);
    wait_products<0>();
    pin(outputs);
    if (has_sums) move_sums<true>();
  }

  // The outputs go to shared memory in the TMA's order: 64 channels of a row are 128 bytes, whose 16-byte parts are
  // exchanged from row to row.
  DEVICE void store(const TensorMap& output) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float total = row_sum[r];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      inverse[r] = total == 0.0f ? 0.0f : 1.0f / total;
      const int at = item.first_row + row + 8 * r;
      if (LSE && quad == 0 && at < a.q_len) {
        float natural = (__log2f(total) - base[r]) * LN2;
        if (a.mean_score != nullptr)
          natural += a.softmax_scale * a.mean_score[static_cast<int64>(pair) * a.q_rows + at];
        a.lse[static_cast<int64>(pair) * a.q_len + at] = total == 0.0f ? -INFINITE : natural;
      }
    }
    uint8* staged = shared.k[0];
    const float2* gains = reinterpret_cast<const float2*>(a.value_scale + kv_pair * HEAD_DIM) + quad;
    const float2* means = reinterpret_cast<const float2*>(a.value_mean + kv_pair * HEAD_DIM) + quad;
    __syncthreads();  // all have read the last K
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) {
      const float2 gain = gains[i * 4], mean = means[i * 4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float x = inverse[r] == 0.0f ? 0.0f : outputs[4 * i + 2 * r] * inverse[r] * gain.x + mean.x;
        const float y = inverse[r] == 0.0f ? 0.0f : outputs[4 * i + 2 * r + 1] * inverse[r] * gain.y + mean.y;
        const int line = row + 8 * r, part = i % 8 ^ line % 8;
        *reinterpret_cast<uint32*>(staged + i / 8 * (BLOCK_M * 128) + line * 128 + part * 16 + quad * 4) =
            OUTPUT_FLOAT16 ? to_float16(x, y) : to_bfloat16(x, y);
      }
    }
    fence_shared();
    __syncthreads();
    if (thread == 0) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 64; i++)
        store_box(output, staged + i * (BLOCK_M * 128), item.batch, item.head, item.first_row, i * 64);
      wait_until_read();
    }
  }
};

extern "C" __global__ void __launch_bounds__(128, RESIDENT)
    int8_forward(const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key,
                 const __grid_constant__ TensorMap value, const __grid_constant__ TensorMap output,
                 const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Item item = this_item(a);
  const int thread = threadIdx.x, pair = item.batch * a.q_heads + item.head;
  Attention attention{a, key, value, shared, item, pair, item.batch * a.kv_heads + item.kv_head, thread, thread % 4,
                      thread / 32 * 16 + thread % 32 / 4};
  if (thread == 0) {
    init(shared.q_full, 1);
    for (int i = 0; i < STAGES; i++) {
      init(shared.k_full[i], 1), init(shared.k_empty[i], 4);
      init(shared.v_full[i], 1), init(shared.v_empty[i], 4);
    }
    fence_shared();
  }
  wait_for_previous_kernel();
  if (thread == 0) {
    arrive_expecting(shared.q_full, Q_BYTES);
    load_box(query, shared.q, shared.q_full, pair * a.q_rows + item.first_row, 0);
    for (int i = 0; i < min(STAGES, item.tiles); i++) attention.load_keys(i, i), attention.load_values(i, i);
  }
  __syncthreads();
  float sums[OUTPUTS];
  attention.begin(sums);
  attention.attend();
  attention.store(output);
}
