// The forward kernel of the INT8 recipes for Hopper: Q·Kᵀ in INT8, softmax, P·V in e4m3 (`sage2`) or float16 (`sage1`,
// `sage_bwd`), of the operands that `quantize.cu` writes, or the Triton quantisers; Q may also come in 16 bits.
//
// A block of the grid works through items: 64 · WARPGROUPS rows of one (batch, head). One warpgroup of it has the TMA
// bring tiles of Q, K and V; each of the others holds 64 rows: their scores, weights and outputs are in its registers.
// If Q comes in 16 bits it rotates and quantises its rows. Its matrix products of a tile's scores and of the last
// tile's P·V are begun together; while P·V runs, the scores become the next P.
//
// The call's first keys, which may hold much of each row's weight, are not among K and V: a warpgroup attends to them
// in 16 bits when it is done with all others, with Q in 16 bits as it is in memory, and rescales the sums.
//
// e4m3 products are summed with few bits: each loses what lies below 2⁻¹³ of the sum. So after SUMMED_TILES the sums
// move to float32 sums in shared memory. Products in float16 are summed in float32 all along.
//
// The host, `int8_forward.py`, gives the kernel's parameters, with `Arguments`, and all compile-time constants that are
// not defined here.
#include "barrier.cuh"
#include "numbers.cuh"
#include "parameters.cuh"
#include "rotation.cuh"
#include "tma.cuh"
#include "tokens.cuh"
#include "wgmma.cuh"

static_assert(WARPGROUPS == 2 || WARPGROUPS == 3, "WARPGROUPS that attend must be 2 or 3: registers are shared out so");
static_assert(THREADS == 128 * (WARPGROUPS + 1), "THREADS must be those of WARPGROUPS, and of one that brings tiles");
static_assert(WARPGROUP_ROWS == 64, "WARPGROUP_ROWS must be 64, those of a matrix instruction");
static_assert(BLOCK_N == 96 || BLOCK_N == 128, "BLOCK_N keys of a tile must be 96 or 128: see INT8_PRODUCT");
static_assert(STAGES == 2, "STAGES must be 2: steps of even and odd tiles name their stages");
static_assert(KEY_BLOCK == 64 && KEYS_PER_SCALE == 16,
              "KEY_BLOCK and KEYS_PER_SCALE must be 64 and 16: a thread has 16 of a row's scores with 64 keys");
static_assert(LINE_BYTES == 128, "LINE_BYTES of V in float16 and of the output must be 128, the widest swizzle");
static_assert((VALUE_WIDTH == 128 || VALUE_WIDTH == 32) && BLOCK_N % VALUE_WIDTH == 0,
              "VALUE_WIDTH keys of V in e4m3, side by side in shared memory, must be 128 or 32, and divide a tile");
static_assert(SUMMED_TILES > 0 && SUMMED_TILES % 2 == 0, "SUMMED_TILES must be even: sums move after even tiles");
ASSERT_FLAG(PV_FLOAT16, "P and V are in float16, or in e4m3");
ASSERT_FLAG(CAUSAL, "a row attends to keys up to its own, or to all");
ASSERT_FLAG(PADDED, "keys may not exist, or all do");
ASSERT_FLAG(LSE, "the log-sum-exp of rows is written, or not");
ASSERT_FLAG(CENTRED, "keys have mean 0, or may have any");
ASSERT_FLAG(QUANTIZES_QUERY, "Q comes in 16 bits, to be rotated, or in INT8");
ASSERT_FLAG(HEAVY, "the first keys are heavy, or none is");
static_assert(HEAVY_KEYS == 64, "HEAVY_KEYS must be 64: see PRODUCTS_16BIT");
static_assert(!QUANTIZES_QUERY || HEAVY && !LSE, "QUANTIZES_QUERY is for heavy keys, and does not serve the LSE");

constexpr int BLOCK_M = WARPGROUP_ROWS * WARPGROUPS;
constexpr int SCORES = BLOCK_N / 2;             // of a tile in a thread's registers
constexpr int OUTPUTS = CHANNELS / 2;           // in a thread's registers
constexpr int PV_BYTES = PV_FLOAT16 ? 2 : 1;    // of an element of P and V
constexpr int WEIGHTS = SCORES * PV_BYTES / 4;  // words of P
constexpr int PV_DEPTH = 32 / PV_BYTES;         // keys of a matrix product
constexpr int CHUNK = 8, CHUNKS = SCORES / CHUNK;
// The weights of a tile are packed when P·V of the last one is done: after so many chunks it is.
constexpr int PRODUCTS_DONE = 1;
constexpr int LINE_CHANNELS = LINE_BYTES / 2;  // of V in float16 and of the output
constexpr int Q_BYTES = BLOCK_M * CHANNELS, K_BYTES = BLOCK_N * CHANNELS, V_BYTES = CHANNELS * BLOCK_N * PV_BYTES;
constexpr int SUMS_BYTES = WARPGROUP_ROWS * CHANNELS * (PV_FLOAT16 ? 2 : 4);  // of a warpgroup: sums, or outputs
constexpr int HEAVY_BYTES = HEAVY ? HEAVY_KEYS * CHANNELS * 2 : 0;            // of heavy keys, or of their values
constexpr int QUERY_STAGES = QUANTIZES_QUERY ? 1 : STAGES;                    // of Q in INT8
constexpr int TOKENS_BYTES = QUANTIZES_QUERY ? CHANNELS * 2 * 64 : 0;         // of a warpgroup's rows of Q in 16 bits
static_assert(SHARED_BYTES == QUERY_STAGES * Q_BYTES + STAGES * (K_BYTES + V_BYTES) +
                                  WARPGROUPS * (TOKENS_BYTES + SUMS_BYTES) + 2 * HEAVY_BYTES + CONTROL_BYTES,
              "SHARED_BYTES must be those of the stages of Q, K and V, of the sums, of the heavy keys, and of Control");
// Channels of Q in 16 bits that a thread has a part of at once: three warpgroups have no registers for 128.
constexpr int HEAVY_CHANNELS = WARPGROUPS == 2 ? CHANNELS : 64;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? 232 : 160, PRODUCER_REGISTERS = WARPGROUPS == 2 ? 40 : 32;
constexpr int HEAVY_SCORES = HEAVY_KEYS / 2;                     // in a thread's registers
constexpr int HEAVY_LINE = HEAVY_KEYS * LINE_BYTES / 16;         // of heavy keys, or their values, as descriptors count
constexpr int SEGMENTS = (BLOCK_N + KEY_BLOCK - 1) / KEY_BLOCK;  // of a tile that have a scale of K each
// The sums of a row's weights are products of these with ones, where that is faster. They are sums of what e4m3 or
// float16 makes of the weights: of e4m3's, the LSE asks for more.
constexpr bool SUMS_BY_PRODUCT = PV_FLOAT16 ? CHANNELS == 64 : !LSE;
// Rows need no mask behind the last key, whose tile holds zeros there: no row's maximum is below their score, because
// scores of keys without their mean have mean 0; and their weights are erased before these are summed.
constexpr bool ERASES = CENTRED && SUMS_BY_PRODUCT && !PV_FLOAT16 && !CAUSAL && !PADDED;
// An item's last tile of half as many keys, which heavy keys leave of a multiple of BLOCK_N, takes half of the softmax.
constexpr bool HALVES = ERASES && BLOCK_N == 128;
// Warpgroups whose rows see none of the item's last tiles leave them to the others.
constexpr bool SKIPS = CAUSAL && !PADDED;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// A row's weights are relative to a reference, which its maximum may exceed by SLACK powers of two: then they are as
// large as P's format allows.
constexpr float SLACK = PV_FLOAT16 ? 8.0f : 2.0f, P_LOG2 = LARGEST_P_LOG2 - SLACK;
static_assert(P_LOG2 > 0.0f && LARGEST_P_LOG2 < (PV_FLOAT16 ? 16.0f : 9.0f),
              "LARGEST_P_LOG2 must be above SLACK, and within the format of P");

struct Barriers {
  uint64 q_full[STAGES], q_empty[STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint64 ending_full, ending_empty;
};

// What comes with a tile of Q: the scales of its rows, or in 16 bits the factors of their rotation (`rotate`).
struct alignas(16) Factors {
  float line[QUANTIZES_QUERY ? CHANNELS : BLOCK_M];
};

// What comes with the heavy keys, and is needed when all others are done.
struct alignas(16) ValueScales {
  float scale[CHANNELS], mean[CHANNELS];
};

// A block's share of the work.
struct Item {
  int batch, head, kv_head, first_row;
  int tiles;            // of keys; at least 1, of which a row may see nothing
  int first, in_order;  // the tile to begin with, and how many follow one another; the one before it comes last

  DEVICE int tile(int number) const {
    return !PADDED ? number : number < in_order ? first + number : max(0, first - 1);
  }
  DEVICE int pair(const Arguments& a) const { return batch * a.q_heads + head; }
  DEVICE int kv_pair(const Arguments& a) const { return batch * a.kv_heads + kv_head; }
};

// What lies in shared memory behind the tiles.
struct alignas(256) Control {
  uint32 ones[8 * 32 / 4];  // 8 rows of 32 bytes, whose products with weights are their sums
  Barriers barriers;
  ValueScales value_scales;
  Factors factors[QUERY_STAGES];
  Item items[QUERY_STAGES];
};
static_assert(sizeof(Control) <= CONTROL_BYTES, "CONTROL_BYTES must be at least those of Control");

// Item `round` of this block. Causal items differ in length: the longest of as many heads as stay in the L2 cache come
// first, and blocks change order from round to round.
DEVICE bool next_item(const Arguments& a, int round, Item& item) {
  const int blocks = (a.q_len + BLOCK_M - 1) / BLOCK_M, items = blocks * a.batch * a.q_heads, grid = gridDim.x;
  const int index = round * grid + (CAUSAL && round % 2 ? grid - 1 - blockIdx.x : blockIdx.x);
  if (index >= items) return false;
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
  item.batch = pair / a.q_heads;
  item.head = pair - item.batch * a.q_heads;
  item.kv_head = item.head / (a.q_heads / a.kv_heads);
  item.first_row = block * BLOCK_M;
  int keys = PADDED ? a.spans[item.batch * a.spans_stride + 2] - HEAVY * HEAVY_KEYS : a.kv_len;
  if (CAUSAL) keys = min(keys, item.first_row + BLOCK_M + a.causal_offset);
  item.in_order = (keys + BLOCK_N - 1) / BLOCK_N;
  item.first = 0;
  int before = 0;
  if (PADDED) {
    const int first_key = max(a.spans[item.batch * a.spans_stride] - HEAVY * HEAVY_KEYS, 0);
    before = first_key % BLOCK_N != 0;
    item.first = first_key / BLOCK_N + before;
    item.in_order -= item.first;
  }
  item.tiles = max(1, max(0, item.in_order) + before);
  return true;
}

// ---- Producers: threads that bring Q, K and V, of which none waits for a free stage of the others ----

// Show the consumers an item, or that there is none, behind a wait for a free stage.
DEVICE void show_item(bool exists, const Item& item, Item& shown, uint64& full) {
  if (exists) {
    shown = item;
  } else {
    shown.tiles = 0;
    arrive(full);
  }
}

// Bring items with tiles of Q in INT8, by the first thread.
DEVICE void load_queries(const Arguments& a, const TensorMap& query, uint8* q, Factors* factors, Item* items,
                         Barriers& b) {
  if (threadIdx.x % 128 != 0) return;
  Item item;
#pragma unroll 1
  for (int round = 0;; round++) {
    const bool exists = next_item(a, round, item);
    const int stage = round % STAGES;
    wait(b.q_empty[stage], round / STAGES & 1 ^ 1);
    show_item(exists, item, items[stage], b.q_full[stage]);
    if (!exists) return;
    const int row = item.pair(a) * a.q_rows + item.first_row;
    const int scales_bytes = min(BLOCK_M, a.q_rows - item.first_row) * 4;
    arrive_expecting(b.q_full[stage], Q_BYTES + scales_bytes);
#pragma unroll
    for (int i = 0; i < WARPGROUPS; i++)
      load_box(query, q + stage * Q_BYTES + i * WARPGROUP_ROWS * CHANNELS, b.q_full[stage], row + i * WARPGROUP_ROWS,
               0);
    load_bytes(a.query_scale + row, factors[stage].line, b.q_full[stage], scales_bytes);
  }
}

// Bring items with tiles of Q in 16 bits, by the first thread: none of them is what the stream's previous kernels
// write, but the factors are.
DEVICE void load_tokens(const Arguments& a, const TensorMap& query, uint8* tokens, Factors& factors, Item* items,
                        Barriers& b) {
  if (threadIdx.x % 128 != 0) return;
  Item item;
#pragma unroll 1
  for (int round = 0;; round++) {
    const bool exists = next_item(a, round, item);
    wait(b.q_empty[0], round & 1 ^ 1);
    show_item(exists, item, items[0], b.q_full[0]);
    if (!exists) return;
    arrive_expecting(b.q_full[0], WARPGROUPS * TOKENS_BYTES + CHANNELS * 4);
#pragma unroll
    for (int i = 0; i < WARPGROUPS * CHANNELS / LINE_CHANNELS; i++) {
      constexpr int PARTS = CHANNELS / LINE_CHANNELS;
      load_box(query, tokens + i * (WARPGROUP_ROWS * LINE_BYTES), b.q_full[0], item.batch, item.head,
               item.first_row + i / PARTS * WARPGROUP_ROWS, i % PARTS * LINE_CHANNELS);
    }
    if (round == 0) wait_for_previous_kernel();
    load_bytes(a.query_factors + item.kv_pair(a) * static_cast<int64>(a.query_factors_stride), factors.line,
               b.q_full[0], CHANNELS * 4);
  }
}

// Bring tiles of K, or of V: `load` begins to bring an item's tile of that number to a stage, `end` follows the last.
template <typename Load, typename End>
DEVICE void produce_tiles(const Arguments& a, int bytes, uint64 (&full)[STAGES], uint64 (&empty)[STAGES], Load load,
                          End end) {
  Item item;
  int uses = 0;
#pragma unroll 1
  for (int round = 0; next_item(a, round, item); round++) {
#pragma unroll 1
    for (int tile = 0; tile < item.tiles + item.tiles % STAGES; tile++, uses++) {
      const int stage = uses % STAGES;
      wait(empty[stage], uses / STAGES & 1 ^ 1);
      arrive_expecting(full[stage], bytes);
      load(item, tile, stage);
    }
    end(item, round);
  }
}

// Bring tiles of K, and what an item's outputs need in the end: the scales of V, and heavy keys with their values.
DEVICE void produce_keys(const Arguments& a, const TensorMap& key, const TensorMap& heavy_key,
                         const TensorMap& heavy_value, uint8* k, uint8* heavy, ValueScales& scales, Barriers& b) {
  produce_tiles(
      a, K_BYTES, b.k_full, b.k_empty,
      [&](const Item& item, int tile, int stage) {
        load_box(key, k + stage * K_BYTES, b.k_full[stage], item.kv_pair(a), item.tile(tile) * BLOCK_N, 0);
      },
      [&](const Item& item, int round) {
        const int64 of_head = static_cast<int64>(item.kv_pair(a)) * CHANNELS;
        wait(b.ending_empty, round & 1 ^ 1);
        arrive_expecting(b.ending_full, 2 * HEAVY_BYTES + 2 * CHANNELS * 4);
        load_bytes(a.value_scale + of_head, scales.scale, b.ending_full, CHANNELS * 4);
        load_bytes(a.value_mean + of_head, scales.mean, b.ending_full, CHANNELS * 4);
        if constexpr (HEAVY) {
#pragma unroll
          for (int i = 0; i < CHANNELS / LINE_CHANNELS; i++) {
            uint8* lines = heavy + i * HEAVY_KEYS * LINE_BYTES;
            const int row = item.kv_pair(a) * HEAVY_KEYS;
            load_box(heavy_key, lines, b.ending_full, row, i * LINE_CHANNELS);
            load_box(heavy_value, lines + HEAVY_BYTES, b.ending_full, row, i * LINE_CHANNELS);
          }
        }
      });
}

DEVICE void produce_values(const Arguments& a, const TensorMap& value, uint8* v, Barriers& b) {
  const auto load = [&](const Item& item, int tile, int stage) {
    if (PV_FLOAT16) {
#pragma unroll
      for (int i = 0; i < CHANNELS / LINE_CHANNELS; i++)
        load_box(value, v + stage * V_BYTES + i * BLOCK_N * LINE_BYTES, b.v_full[stage], item.kv_pair(a),
                 item.tile(tile) * BLOCK_N, i * LINE_CHANNELS);
    } else {
#pragma unroll
      for (int i = 0; i < BLOCK_N / VALUE_WIDTH; i++)
        load_box(value, v + stage * V_BYTES + i * CHANNELS * VALUE_WIDTH, b.v_full[stage], item.kv_pair(a) * CHANNELS,
                 item.tile(tile) * BLOCK_N + i * VALUE_WIDTH);
    }
  };
  produce_tiles(a, V_BYTES, b.v_full, b.v_empty, load, [](const Item&, int) {});
}

// A thread's part of HEAVY_CHANNELS of two rows of Q in 16 bits: of each SECTION it has 8, which `heavy_order` brings
// to its places in two matrix products.
using HeavyWords = uint32[2][HEAVY_CHANNELS / SECTION][4];

// The 64 rows of one warpgroup. A thread has the scores and outputs of rows `row` and `row` + 8: element i of `scores`
// is of the row number i / 2 % 2 of these, and of key i / 4 * 8 + quad * 2 + i % 2 of the tile.
struct Consumer {
  const Arguments& a;
  const Tokens& query;
  const TensorMap& output;
  Barriers& barriers;
  const ValueScales& value_scales;
  const Factors* factors;  // of the stages of Q
  const Item* items;       // of the stages of Q
  uint8* shared_sums;      // of the warpgroup: its float32 sums, and its outputs on their way to memory
  const uint8* tokens;     // of the warpgroup: its rows of Q in 16 bits
  uint8* codes;            // of the warpgroup: those in INT8, of the first stage
  uint32 tokens_descriptor;
  uint32 q, k, v, ones;  // descriptors, those of Q, K and V of the first stages
  int warpgroup, thread, quad, row;

  Item item;
  int tiles;                            // of the item that the warpgroup's rows attend to, at least 1
  int first_key_scale, last_key_scale;  // the thread's in the item's head
  int left[2];                          // keys of a masked tile that the rows may attend to, from quad * 2 on
  uint32 exists[BLOCK_N / 32];          // bits of keys of a masked tile, from quad * 2 on
  int scores[SCORES];
  uint32 weights[WEIGHTS];
  float outputs[OUTPUTS];
  float row_scale[2], next_key_scale[SEGMENTS], scale[2][SEGMENTS];
  float base[2];  // P_LOG2 - the row's reference
  float decay[2], row_sum[2], sums_base[2];
  float tile_sum[4];  // of the weights: by the matrix product, two equal ones of `row`, then of `row` + 8
  bool grows, has_sums;
  int q_stage, parity;

  DEVICE void sync_warpgroup() { sync_threads(1 + warpgroup, 128); }

  // The segment of scores[i] in an even or odd tile: its block of KEY_BLOCK keys, counted from the tile's first.
  static constexpr DEVICE int segment(int odd, int i) { return (odd * BLOCK_N % KEY_BLOCK + i / 4 * 8) / KEY_BLOCK; }

  DEVICE void load_key_scale(int number) {
    const int tile = item.tile(number);
#pragma unroll
    for (int i = 0; i < SEGMENTS; i++)
      next_key_scale[i] =
          from_bfloat16(a.key_scale[min(first_key_scale + (tile * BLOCK_N / KEY_BLOCK + i) * 4, last_key_scale)]);
  }

  // Find the keys that a masked tile allows.
  DEVICE void load_mask(int number) {
    const int first = item.tile(number) * BLOCK_N + quad * 2;
#pragma unroll
    for (int r = 0; r < 2; r++)
      left[r] = (CAUSAL ? min(a.kv_len, item.first_row + row + 8 * r + a.causal_offset + 1) : a.kv_len) - first;
    if (PADDED) {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 32; i++) {
        const int key = first - quad * 2 + i * 32 + thread % 32;
        const bool is_valid = key < a.kv_len && valid()[HEAVY * HEAVY_KEYS + key];
        exists[i] = __ballot_sync(~0u, is_valid) >> quad * 2;
      }
    }
  }
  // Of the item's batch element: from its first key on, be it heavy or not.
  DEVICE const uint8* valid() const { return a.valid + item.batch * static_cast<int64>(a.valid_stride); }
  DEVICE bool allowed(int i) const {
    const int key = i / 4 * 8 + i % 2;
    return key < left[i / 2 % 2] && (!PADDED || exists[key / 32] >> key % 32 & 1);
  }

  // Find a tile's scales and its rows' maxima: where one has outgrown its reference by SLACK, it becomes the reference.
  template <int ODD, bool MASKED, bool HALF = false>
  DEVICE void find_maxima(int number) {
#pragma unroll
    for (int i = 0; i < SEGMENTS; i++) {
      scale[0][i] = row_scale[0] * next_key_scale[i];
      scale[1][i] = row_scale[1] * next_key_scale[i];
    }
    load_key_scale(number + 1);
    constexpr int NO_KEY = -2147483647 - 1;
    if (MASKED) {
      load_mask(number);
#pragma unroll
      for (int i = 0; i < SCORES; i++)
        if (!allowed(i)) scores[i] = NO_KEY;
    }
    float largest[2] = {-INFINITE, -INFINITE};
#pragma unroll
    for (int part = 0; part < (HALF ? 1 : SEGMENTS); part++) {
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
        if (!SUMS_BY_PRODUCT) row_sum[r] *= decay[r];
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
      if (!SUMS_BY_PRODUCT) row_sum[i / 2 % 2] += p;
      scores[i] = __float_as_int(p);
    }
  }
  DEVICE void pack_chunk(int chunk) {
    auto p = [&](int i) { return __int_as_float(scores[chunk * CHUNK + i]); };
    if (PV_FLOAT16) {
#pragma unroll
      for (int i = 0; i < 4; i++) weights[4 * chunk + i] = pack_float16(p(2 * i), p(2 * i + 1));
    } else {
      weights[2 * chunk] = to_e4m3(p(0), p(1), p(4), p(5));
      weights[2 * chunk + 1] = to_e4m3(p(2), p(3), p(6), p(7));
    }
  }
  // `await_products` waits until the matrix products have read the weights of the last tile.
  template <int ODD, bool MASKED, bool HALF = false, typename Await>
  DEVICE void weigh_scores(Await await_products) {
    constexpr int LAST = (HALF ? CHUNKS / 2 : CHUNKS) - 1;
    begin_chunk<ODD, MASKED>(0);
#pragma unroll
    for (int c = 0; c <= LAST; c++) {
      exponentiate_chunk(c);
      if (c < LAST) begin_chunk<ODD, MASKED>(c + 1);
      if (c == PRODUCTS_DONE) {
        pin(scores);
        await_products();
#pragma unroll
        for (int i = 0; i < c; i++) pack_chunk(i);
      } else if (c > PRODUCTS_DONE) {
        pack_chunk(c - 1);
      }
    }
    pack_chunk(LAST);
    pin(weights);
  }

  DEVICE void begin_scores(int stage) {
    const uint32 of_item = q + q_stage * (Q_BYTES / 16), of_stage = k + stage * (K_BYTES / 16);
    add_product<CHANNELS, false>(scores, of_item, of_stage);
#pragma unroll
    for (int i = 1; i < CHANNELS / 32; i++) add_product<CHANNELS, true>(scores, of_item + 2 * i, of_stage + 2 * i);
    commit_products();
  }
  // Erase the weights of the item's last tile that keys beyond the last one have.
  DEVICE void erase_weights() {
    const int left = a.kv_len - (tiles - 1) * BLOCK_N - quad * 2;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      uint32 kept = 0;
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (c * 16 + i / 2 * 8 + i % 2 < left) kept |= 0xFFu << 8 * i;
      weights[2 * c] &= kept;
      weights[2 * c + 1] &= kept;
    }
  }

  template <bool ADD>
  DEVICE void sum_weights(const uint32* part) {
    if constexpr (PV_FLOAT16)
      add_float16_product<32, false, ADD>(tile_sum, part, ones);
    else
      add_product<32, ADD>(tile_sum, part, ones);
  }
  DEVICE void begin_sums() {
    if constexpr (SUMS_BY_PRODUCT) {
      sum_weights<false>(weights);
#pragma unroll
      for (int i = 1; i < BLOCK_N / PV_DEPTH; i++) sum_weights<true>(weights + 4 * i);
    }
  }
  template <bool WITH_SUMS>
  DEVICE void begin_outputs(int stage) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / PV_DEPTH; i++) {
      if constexpr (PV_FLOAT16) {
        add_float16_product<128, true, true>(outputs, weights + 4 * i,
                                             v + (stage * V_BYTES + i * PV_DEPTH * LINE_BYTES) / 16);
      } else {
        const int at = i * 32 / VALUE_WIDTH * (CHANNELS * VALUE_WIDTH) + i * 32 % VALUE_WIDTH;
        add_product<VALUE_WIDTH, true>(outputs, weights + 4 * i, v + (stage * V_BYTES + at) / 16);
      }
    }
    if (WITH_SUMS) begin_sums();
    commit_products();
  }

  // The products that sum the last tile's weights are done.
  DEVICE void add_tile_sum() {
    pin(tile_sum);
    if (SUMS_BY_PRODUCT) row_sum[0] += tile_sum[0], row_sum[1] += tile_sum[2];
  }

  // The warpgroup's shared memory is free again, and all its threads have passed here.
  DEVICE void reclaim_shared_sums() {
    if (thread == 0) wait_until_read();
    sync_warpgroup();
  }

  // Add the outputs to the float32 sums, and begin them anew, or with the sums if these are the last.
  template <bool LAST>
  DEVICE void move_sums(const float (&base)[2]) {
    float4* sums = reinterpret_cast<float4*>(shared_sums) + thread;
    if (!has_sums) reclaim_shared_sums();
    float gain[2] = {0.0f, 0.0f};
    if (has_sums) {
#pragma unroll
      for (int r = 0; r < 2; r++) gain[r] = exp2_approximate(base[r] - sums_base[r]);
    }
#pragma unroll
    for (int i = 0; i < OUTPUTS / 4; i++) {
      float* x = outputs + 4 * i;
      float4 sum = has_sums ? sums[i * 128] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      sum = make_float4(__fmaf_rn(sum.x, gain[0], x[0]), __fmaf_rn(sum.y, gain[0], x[1]),
                        __fmaf_rn(sum.z, gain[1], x[2]), __fmaf_rn(sum.w, gain[1], x[3]));
      if (!LAST) sums[i * 128] = sum;
      x[0] = LAST ? sum.x : 0.0f, x[1] = LAST ? sum.y : 0.0f, x[2] = LAST ? sum.z : 0.0f, x[3] = LAST ? sum.w : 0.0f;
    }
    sums_base[0] = base[0], sums_base[1] = base[1];
    has_sums = true;
  }

  // P·V of the last tile runs while this tile's scores become weights.
  template <int ODD, bool MASKED, bool HALF = false>
  DEVICE void step(int tile) {
    fence_products();
    begin_scores(ODD);
    fence_products();
    begin_outputs<true>(ODD ^ 1);
    wait_products<1>();
    pin(scores);
    arrive_as_warp(barriers.k_empty[ODD]);
    find_maxima<ODD, MASKED, HALF>(tile);
    weigh_scores<ODD, MASKED, HALF>([&] {
      // The compiler moves no wait for products above these, which are branches.
      if (tile + 1 < tiles) wait(barriers.k_full[ODD ^ 1], parity ^ ODD);
      wait(barriers.v_full[ODD], parity);
      wait_products<0>();
      pin(outputs);
      add_tile_sum();
      arrive_as_warp(barriers.v_empty[ODD ^ 1]);
    });
    if (grows) {
      if (SUMS_BY_PRODUCT) row_sum[0] *= decay[0], row_sum[1] *= decay[1];
#pragma unroll
      for (int i = 0; i < OUTPUTS; i++) outputs[i] *= decay[i / 2 % 2];
    }
    if (!PV_FLOAT16 && ODD == 0 && tile % SUMMED_TILES == 0) move_sums<false>(base);
  }

  // Load the thread's part of N sections of rows `row` and `row` + 8 of Q in 16 bits, from `first_channel` on.
  template <int N>
  DEVICE void load_query(int first_channel, uint32 (&x)[2][N][4]) {
    if constexpr (QUANTIZES_QUERY) {
      int line = row % WARPGROUP_ROWS, place = quad;
      asm volatile("" : "+r"(line), "+r"(place));  // addresses are computed here, not kept in registers all along
      const uint8* at = tokens + line * LINE_BYTES;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const uint8* part = at + i / 2 * (WARPGROUP_ROWS * LINE_BYTES) + ((i % 2 * 4 + place ^ line % 8) * 16);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const uint4 y = *reinterpret_cast<const uint4*>(part + 8 * r * LINE_BYTES);
          x[r][i][0] = y.x, x[r][i][1] = y.y, x[r][i][2] = y.z, x[r][i][3] = y.w;
        }
      }
    } else {
      int channel = first_channel + quad * 8, token = item.first_row + row;
      asm volatile("" : "+r"(channel), "+r"(token));
#pragma unroll
      for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
          const Reader reader(query, item.batch, item.head, token + 8 * r, a.q_len, channel + i * SECTION, a.head_dim);
          reader.load<true>(0, reader.has(0), x[r][i]);
        }
      }
    }
  }

  // Rotate and quantise the warpgroup's rows of Q, into the order that the TMA would leave them in.
  DEVICE void quantize_query() {
    TileWords x;
    load_query(0, x);
    const int line = row % WARPGROUP_ROWS;
    uint8* const into = codes + line * CHANNELS + quad % 2 * 8;
    const float scale = rotate_query(x, factors[0].line + quad * 8, [&](int r, int section, uint2 eight) {
      // 8 rows further on, parts are exchanged likewise.
      const int part = section * 2 + quad / 2 ^ line * CHANNELS / 128 % (CHANNELS / 16);
      *reinterpret_cast<uint2*>(into + 8 * r * CHANNELS + part * 16) = eight;
    });
#pragma unroll
    for (int r = 0; r < 2; r++)
      row_scale[r] = __shfl_sync(~0u, scale, thread % 32 / 4 * 4 + r) * (a.softmax_scale * LOG2E);
    fence_shared();
    sync_warpgroup();
  }

  template <bool TRANSPOSED, int N>
  DEVICE void add_16bit_product(float (&x)[N], const uint32* left, uint32 right) {
    if constexpr (FLOAT16)
      add_float16_product<LINE_BYTES, TRANSPOSED, true>(x, left, right);
    else
      add_bfloat16_product<LINE_BYTES, TRANSPOSED, true>(x, left, right);
  }

  // Return the descriptor of the heavy keys, which lie behind the tiles of K and V, and the sums; it is computed where
  // it is used, not kept in a register all along.
  DEVICE uint32 heavy_keys() const {
    uint32 first = k;
    asm volatile("" : "+r"(first));
    return first + (STAGES * (K_BYTES + V_BYTES) + WARPGROUPS * SUMS_BYTES) / 16;
  }

  // Begin the products of the rows of Q and the heavy keys, both in shared memory.
  DEVICE void begin_heavy_scores(float (&x)[HEAVY_SCORES]) {
    uint32 left = tokens_descriptor;
    asm volatile("" : "+r"(left));
    const uint32 right = heavy_keys();
#pragma unroll
    for (int i = 0; i < CHANNELS / 16; i++) {
      const uint32 a = left + i / 4 * (WARPGROUP_ROWS * LINE_BYTES / 16) + i % 4 * 2;
      const uint32 b = right + i / 4 * HEAVY_LINE + i % 4 * 2;
      if (i == 0)
        add_shared_16bit_product<LINE_BYTES, FLOAT16, false>(x, a, b);
      else
        add_shared_16bit_product<LINE_BYTES, FLOAT16, true>(x, a, b);
    }
    commit_products();
  }

  // Compute the products of the rows of Q and the heavy keys; `heavy_query` has the first HEAVY_CHANNELS of Q.
  DEVICE void find_heavy_scores(HeavyWords& heavy_query, float (&x)[HEAVY_SCORES]) {
    const uint32 right = heavy_keys();
#pragma unroll
    for (int i = 0; i < HEAVY_SCORES; i++) x[i] = 0.0f;
#pragma unroll
    for (int channel = 0; channel < CHANNELS; channel += HEAVY_CHANNELS) {
      if (channel > 0) load_query(channel, heavy_query);
      fence_products();
#pragma unroll
      for (int i = 0; i < HEAVY_CHANNELS / 16; i++) {
        const auto &first = heavy_query[0][i / 2], &second = heavy_query[1][i / 2];
        const int word = i % 2 * 2;
        const uint32 left[4] = {first[word], second[word], first[word + 1], second[word + 1]};
        add_16bit_product<false>(x, left, right + (channel / 64 + i / 4) * HEAVY_LINE + i % 4 * 2);
      }
      commit_products();
      wait_products<0>();
      pin(x);
    }
  }

  // Round two weights of heavy keys, which are at most 1; the first is in the lower half.
  static DEVICE uint32 pack_16bit(float a, float b) {
    if (FLOAT16) return pack_float16(a, b);
    uint32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
  }

  // Make the heavy keys' scores x, but for Q's factor, their weights p, and add these to the rows' sums: relative to
  // the others' weights, unless they outgrow 1. `others` is what these have of the sums, and the outputs are to be
  // multiplied by `factor`, which also divides by the power of two near the sum, lest V times a weight be infinite.
  DEVICE void weigh_heavy_keys(float (&x)[HEAVY_SCORES], uint32 (&p)[HEAVY_SCORES / 2], float (&factor)[2],
                               float (&others)[2]) {
    int place = quad;
    asm volatile("" : "+r"(place));
    uint32 heavy_exists[2] = {~0u, ~0u};
    if (PADDED) {
#pragma unroll
      for (int i = 0; i < 2; i++) heavy_exists[i] = __ballot_sync(~0u, valid()[i * 32 + thread % 32]) >> place * 2;
    }
    const int seen = item.first_row + row + a.causal_offset + HEAVY_KEYS + 1 - place * 2;
    auto hidden = [&](int i) {
      const int key = i / 4 * 8 + i % 2;
      return CAUSAL && key >= seen + i / 2 % 2 * 8 || PADDED && !(heavy_exists[key / 32] >> key % 32 & 1);
    };
    const float scale = a.softmax_scale * LOG2E;
    float largest[2] = {-INFINITE, -INFINITE}, shift[2];
#pragma unroll
    for (int i = 0; i < HEAVY_SCORES; i++)
      if (!hidden(i)) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], x[i]);
    // A weight is at most 2^LARGEST: then the sum of all is at most 2.
    constexpr float LARGEST = -6.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
      if (!(CAUSAL || PADDED) || largest[r] != -INFINITE) largest[r] *= scale;
      const int exponent = __float_as_int(row_sum[r]) >> 23;
      factor[r] = exponent == 0 ? 1.0f : __int_as_float(254 - exponent << 23);
      if (exponent != 0) base[r] -= exponent - 127;
      const float before = base[r];
      base[r] = fminf(before, LARGEST - largest[r]);
      if (base[r] != INFINITE) factor[r] *= exp2_approximate(base[r] - before);
      others[r] = row_sum[r] * factor[r];
      shift[r] = base[r] == INFINITE ? 0.0f : base[r];
    }
    float sum[4] = {};  // two chains for each row
#pragma unroll
    for (int i = 0; i < HEAVY_SCORES; i++) {
      x[i] = hidden(i) ? 0.0f : exp2_approximate(__fmaf_rn(x[i], scale, shift[i / 2 % 2]));
      if (i % 2) p[i / 2] = pack_16bit(x[i - 1], x[i]);
      sum[i / 2 % 2 * 2 + i % 2] += x[i];
    }
    pin(p);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float of_row = sum[2 * r] + sum[2 * r + 1];
      of_row += __shfl_xor_sync(~0u, of_row, 1);
      of_row += __shfl_xor_sync(~0u, of_row, 2);
      row_sum[r] = others[r] + of_row;
    }
  }

  // Bring the outputs to the scale of V in 16 bits, times the factor, add V's mean for the others' weights, and P·V of
  // the heavy keys.
  DEVICE void add_heavy_outputs(const uint32 (&p)[HEAVY_SCORES / 2], const float (&factor)[2],
                                const float (&others)[2]) {
    int place = quad;
    asm volatile("" : "+r"(place));
#pragma unroll
    for (int i = 0; i < CHANNELS / 8; i++) {
      const float2 value_scale = reinterpret_cast<const float2*>(value_scales.scale)[i * 4 + place];
      const float2 mean = reinterpret_cast<const float2*>(value_scales.mean)[i * 4 + place];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float* y = outputs + 4 * i + 2 * r;
        y[0] = __fmaf_rn(y[0], value_scale.x * factor[r], mean.x * others[r]);
        y[1] = __fmaf_rn(y[1], value_scale.y * factor[r], mean.y * others[r]);
      }
    }
    pin(outputs);
    const uint32 values = heavy_keys() + HEAVY_BYTES / 16 + (HEAVY_LINE - 1 << 16);
    fence_products();
#pragma unroll
    for (int i = 0; i < HEAVY_KEYS / 16; i++)
      add_16bit_product<true>(outputs, p + 4 * i, values + i * (16 * LINE_BYTES / 16));
    commit_products();
    wait_products<0>();
    pin(outputs);
  }

  // Write the outputs, by way of shared memory in the TMA's order: a row's channels lie in lines of LINE_BYTES, whose
  // 16-byte parts are exchanged from row to row.
  DEVICE void store() {
    int first_line = row % WARPGROUP_ROWS;
    // Addresses are computed here, not kept in registers all along; where the main loop is full they are spilled
    // anyway.
    if (PV_FLOAT16 || SUMS_BY_PRODUCT) asm volatile("" : "+r"(first_line));
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float total = row_sum[r];
      inverse[r] = total == 0.0f ? 0.0f : 1.0f / total;
      const int at = item.first_row + row + 8 * r;
      if (LSE && quad == 0 && at < a.q_len) {
        const int64 pair = item.pair(a);
        float natural = (__log2f(total) - base[r]) * LN2;
        if (a.mean_score != nullptr) natural += a.softmax_scale * a.mean_score[pair * a.q_rows + at];
        a.lse[pair * a.q_len + at] = total == 0.0f ? -INFINITE : natural;
      }
    }
    reclaim_shared_sums();
#pragma unroll
    for (int i = 0; i < CHANNELS / 8; i++) {
      const int channel = i * 8 + quad * 2;
      float2 gain = make_float2(1.0f, 1.0f), mean = make_float2(0.0f, 0.0f);
      if (!HEAVY) {
        gain = *reinterpret_cast<const float2*>(value_scales.scale + channel);
        mean = *reinterpret_cast<const float2*>(value_scales.mean + channel);
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float x = inverse[r] == 0.0f ? 0.0f : outputs[4 * i + 2 * r] * inverse[r] * gain.x + mean.x;
        const float y = inverse[r] == 0.0f ? 0.0f : outputs[4 * i + 2 * r + 1] * inverse[r] * gain.y + mean.y;
        const int line = first_line + 8 * r, part = i % 8 ^ line % 8;
        *reinterpret_cast<uint32*>(shared_sums + i / 8 * (WARPGROUP_ROWS * LINE_BYTES) + line * LINE_BYTES + part * 16 +
                                   quad * 4) = FLOAT16 ? to_float16(x, y) : to_bfloat16(x, y);
      }
    }
    fence_shared();
    sync_warpgroup();
    if (thread == 0) {
#pragma unroll
      for (int i = 0; i < CHANNELS / LINE_CHANNELS; i++)
        store_box(output, shared_sums + i * (WARPGROUP_ROWS * LINE_BYTES), item.batch, item.head,
                  item.first_row + warpgroup * WARPGROUP_ROWS, i * LINE_CHANNELS);
    }
  }

  template <bool MASKED>
  DEVICE void weigh_first_tile() {
    find_maxima<0, MASKED>(0);
    weigh_scores<0, MASKED>([&] {
      if (tiles > 1) wait(barriers.k_full[1], parity);
      wait(barriers.v_full[0], parity);
    });
  }

  // Begin an item with its first tile; return how many tiles need no mask.
  DEVICE int begin_item() {
    first_key_scale = item.kv_pair(a) * (a.kv_rows / KEYS_PER_SCALE) + quad;
    last_key_scale = first_key_scale + a.kv_rows / KEYS_PER_SCALE - 4;
    load_key_scale(0);
    if constexpr (QUANTIZES_QUERY) quantize_query();
    wait(barriers.k_full[0], parity);
    fence_products();
    begin_scores(0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (!QUANTIZES_QUERY) row_scale[r] = factors[q_stage].line[row + 8 * r] * (a.softmax_scale * LOG2E);
      row_sum[r] = 0.0f;
      base[r] = INFINITE;
    }
    has_sums = false;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) outputs[i] = 0.0f;
    int whole = ERASES ? tiles : a.kv_len / BLOCK_N;
    if (PADDED) whole = max(a.spans[item.batch * a.spans_stride + 1] - HEAVY * HEAVY_KEYS, 0) / BLOCK_N;
    if (CAUSAL) whole = min(whole, max(item.first_row + warpgroup * WARPGROUP_ROWS + a.causal_offset + 1, 0) / BLOCK_N);
    if (PADDED) whole -= item.first;
    wait_products<0>();
    pin(scores);
    arrive_as_warp(barriers.k_empty[0]);
    if (whole > 0)
      weigh_first_tile<false>();
    else
      weigh_first_tile<true>();
    return whole;
  }

  // Let go of the item's tiles that the rows do not attend to; the producers bring whole rounds.
  DEVICE void leave_tiles() {
#pragma unroll 1
    for (int tile = tiles; tile < item.tiles + item.tiles % STAGES; tile++) {
      const int stage = tile % STAGES;
      if (stage == 0) parity ^= 1;
      wait(barriers.k_full[stage], parity);
      arrive_as_warp(barriers.k_empty[stage]);
      wait(barriers.v_full[stage], parity);
      arrive_as_warp(barriers.v_empty[stage]);
    }
  }

  // The last P·V of an item is done: complete its outputs.
  DEVICE void end_outputs(const float (&base)[2]) {
    pin(outputs);
    arrive_as_warp(barriers.v_empty[(tiles - 1) % STAGES]);
    leave_tiles();
    if (!PV_FLOAT16 && has_sums) move_sums<true>(base);
  }

  // Add up the sums that each thread of a row has of its own weights.
  DEVICE void gather_sums() {
    if constexpr (!SUMS_BY_PRODUCT) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
        row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
      }
    }
  }

  // End an item with its last P·V and the heavy keys, and write its outputs.
  DEVICE void end_item(int round) {
    const int last = (tiles - 1) % STAGES;
    if (ERASES) {
      erase_weights();
      pin(weights);
    }
    float x[HEAVY_SCORES], factor[2], others[2];
    uint32 p[HEAVY_SCORES / 2];
    if constexpr (QUANTIZES_QUERY) {  // P·V runs while the scores of the heavy keys become weights
      const float reference[2] = {base[0], base[1]};
      wait(barriers.ending_full, round & 1);
      fence_products();
      begin_sums();
      begin_heavy_scores(x);
      fence_products();
      begin_outputs<false>(last);
      wait_products<1>();
      pin(x);
      add_tile_sum();
      arrive_as_warp(barriers.q_empty[q_stage]);
      gather_sums();
      weigh_heavy_keys(x, p, factor, others);
      wait_products<0>();
      end_outputs(reference);
    } else {
      fence_products();
      begin_outputs<true>(last);
      arrive_as_warp(barriers.q_empty[q_stage]);
      HeavyWords heavy_query;
      wait(barriers.ending_full, round & 1);
      wait_products<0>();
      add_tile_sum();
      end_outputs(base);
      if (HEAVY) load_query(0, heavy_query);
      gather_sums();
      if constexpr (HEAVY) {
        find_heavy_scores(heavy_query, x);
        weigh_heavy_keys(x, p, factor, others);
      }
    }
    if constexpr (HEAVY) add_heavy_outputs(p, factor, others);
    store();
    arrive_as_warp(barriers.ending_empty);
  }

  DEVICE void run() {
    parity = 0;
#pragma unroll 1
    for (int round = 0;; round++) {
      q_stage = round % QUERY_STAGES;
      wait(barriers.q_full[q_stage], round / QUERY_STAGES & 1);
      item = items[q_stage];
      if (item.tiles == 0) break;
      tiles = item.tiles;
      if (SKIPS) {
        const int keys = min(a.kv_len, item.first_row + (warpgroup + 1) * WARPGROUP_ROWS + a.causal_offset);
        tiles = max(1, (max(keys, 0) + BLOCK_N - 1) / BLOCK_N);
      }
      const int whole = begin_item();
      int tile = 1;
      const bool half = HALVES && tiles > 1 && (a.kv_len - 1) % BLOCK_N < BLOCK_N / 2;
      const int end = tiles - half;
#pragma unroll 1
      for (; tile + 1 < (HALVES ? end : whole); tile += 2) {
        step<1, false>(tile);
        parity ^= 1;
        step<0, false>(tile + 1);
      }
#pragma unroll 1
      for (; tile < end; tile++) {
        step<1, !ERASES>(tile);
        if (++tile == end) break;
        parity ^= 1;
        step<0, !ERASES>(tile);
      }
      if constexpr (HALVES) {
        if (half) {
          if (tile % 2) {
            step<1, false, true>(tile);
          } else {
            parity ^= 1;
            step<0, false, true>(tile);
          }
        }
      }
      end_item(round);
      parity ^= 1;
    }
    if (thread == 0) wait_until_read();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) int8_forward(INT8_FORWARD_PARAMETERS) {
  extern __shared__ __align__(1024) uint8 shared[];
  uint8 *q = shared, *k = q + QUERY_STAGES * Q_BYTES, *v = k + STAGES * K_BYTES, *sums = v + STAGES * V_BYTES;
  uint8 *heavy = sums + WARPGROUPS * SUMS_BYTES, *tokens = heavy + 2 * HEAVY_BYTES;
  Control& control = *reinterpret_cast<Control*>(shared + SHARED_BYTES - CONTROL_BYTES);
  Barriers& barriers = control.barriers;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    constexpr int WARPS = 4 * WARPGROUPS;
    for (int i = 0; i < STAGES; i++) {
      init(barriers.q_full[i], 1), init(barriers.q_empty[i], WARPS * WARP_ARRIVALS);
      init(barriers.k_full[i], 1), init(barriers.k_empty[i], WARPS * WARP_ARRIVALS);
      init(barriers.v_full[i], 1), init(barriers.v_empty[i], WARPS * WARP_ARRIVALS);
    }
    init(barriers.ending_full, 1), init(barriers.ending_empty, WARPS * WARP_ARRIVALS);
  }
  if (threadIdx.x < sizeof(control.ones) / 4) control.ones[threadIdx.x] = PV_FLOAT16 ? 0x3C003C00 : 0x38383838;
  fence_shared();
  __syncthreads();
  if (!QUANTIZES_QUERY || threadIdx.x != 128 * WARPGROUPS) wait_for_previous_kernel();
  if (warpgroup == WARPGROUPS) {
    give_registers<PRODUCER_REGISTERS>();
    if constexpr (QUANTIZES_QUERY)
      load_tokens(arguments, query, tokens, control.factors[0], control.items, barriers);
    else
      load_queries(arguments, query, q, control.factors, control.items, barriers);
    if (thread == 32) produce_keys(arguments, key, heavy_key, heavy_value, k, heavy, control.value_scales, barriers);
    if (thread == 64) produce_values(arguments, value, v, barriers);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    Consumer consumer{arguments, query_tokens, output, barriers, control.value_scales, control.factors, control.items};
    consumer.shared_sums = sums + warpgroup * SUMS_BYTES;
    consumer.tokens = tokens + warpgroup * TOKENS_BYTES;
    consumer.tokens_descriptor = descriptor(consumer.tokens);
    consumer.codes = q + warpgroup * WARPGROUP_ROWS * CHANNELS;
    consumer.q = descriptor(q + warpgroup * WARPGROUP_ROWS * CHANNELS);
    consumer.k = descriptor(k);
    consumer.v = PV_FLOAT16 ? descriptor(v, BLOCK_N * LINE_BYTES) : descriptor(v);
    // From where K is: as an address of its own it would be computed anew for each P·V, which waits for it.
    consumer.ones = consumer.k + (SHARED_BYTES - CONTROL_BYTES - QUERY_STAGES * Q_BYTES) / 16;
    consumer.warpgroup = warpgroup;
    consumer.thread = thread;
    consumer.quad = thread % 4;
    consumer.row = warpgroup * WARPGROUP_ROWS + thread / 32 * 16 + thread % 32 / 4;
    consumer.run();
  }
}
