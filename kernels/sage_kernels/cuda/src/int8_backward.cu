// Gradients of attention with Q·Kᵀ in INT8, and P and dS in 16 bits, in one pass (SageBwd, arXiv 2505.11594): a tile
// takes five products, for S, dP, dV, dK and dQ.
//
// A block of the grid holds BLOCK keys of a head of K, 64 in each of two warpgroups, and walks tile by tile over the
// queries of the heads that share these keys. The warpgroups compute transposed scores, Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ, so
// that P and dS are register operands of dV += Pᵀ·dO and dK += dSᵀ·Q. They store dSᵀ in shared memory for dQ = dS·K,
// which the TMA adds to memory. With 64 channels a third warpgroup, which also loads the tiles, computes dQ transposed,
// with Kᵀ in registers. With 128 channels registers do not suffice: each of the first two computes 64 channels of dQ.
//
// Shared memory is the bottleneck, so with 64 channels K in INT8 and V stay in registers too.
//
// Tiles in shared memory have 64 rows; 16-bit tiles have 64 channels a row, and the next 64 channels follow. The TMA
// swizzles all tiles. The host, `int8_backward.py`, provides the parameters, their structs, and all compile-time
// constants not defined here.
#include "backward_memory.cuh"
#include "backward_products.cuh"
#include "backward_rows.cuh"
#include "barrier.cuh"
#include "numbers.cuh"
#include "parameters.cuh"

static_assert(STAGES == (CHANNELS == 64 ? 4 : 2),
              "STAGES of queries must be 4 with 64 channels, else 2: they fill shared memory");
static_assert(THREADS == 384, "THREADS must be 384: two warpgroups for the keys, one that loads tiles");

constexpr bool SEPARATE_DQ = CHANNELS == 64;  // a third warpgroup computes dQ
constexpr int KEY_REGISTERS = SEPARATE_DQ ? 200 : 240, OTHER_REGISTERS = SEPARATE_DQ ? 104 : 24;
constexpr int CODE_BYTES = TILE * CHANNELS, TILE_BYTES = 2 * CODE_BYTES;  // of 64 tokens: in INT8, in 16 bits
constexpr int STAGE_BYTES = CODE_BYTES + 2 * TILE_BYTES;                  // codes, dO, Q
constexpr int DS_BYTES = BLOCK * LINE_BYTES;
constexpr int BUFFERS = 2;  // of dS
// Tiles of dQ that the TMA adds at the same time: as many as shared memory holds.
constexpr int TILES_ON_WAY = SEPARATE_DQ || SUMS == FLOAT16_SUMS ? 2 : 1,
              PARTS_ON_WAY = SEPARATE_DQ ? 2 : 2 * TILES_ON_WAY;
constexpr int EVERY_TILE = 1 << 30;  // exceeds all numbers of tiles or tokens

struct Barriers {
  uint64 keys_full, full[STAGES], empty[STAGES], ds_full[BUFFERS], ds_empty[BUFFERS];
  uint64 sums_full[PARTS_ON_WAY], sums_empty[PARTS_ON_WAY];
};
struct Shared {
  uint8 key_codes[2][CODE_BYTES], value[2][TILE_BYTES], key[2][TILE_BYTES], stages[STAGES][STAGE_BYTES];
  uint8 ds[BUFFERS][DS_BYTES], sums[PARTS_ON_WAY][PART_BYTES], statistics[STAGES][STATISTICS_BYTES];
  Barriers barriers;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES must hold Shared");

// A block's work: `steps` tiles of queries; each head of the group has `count` tiles, from `begin` on. Blocks of keys
// of one head start at different tiles, `begin` + `start`, so that they add to different sums. `parts` blocks of the
// grid share the steps of each of the last blocks of keys, and write partial sums of dK and dV.
struct Item {
  Range queries, keys;
  int sequence, head, first_key, begin, start, count, first_step, steps;
  int partial;  // index of the partial sums, or -1

  DEVICE Item(const BackwardArguments& a, int number) {
    const int split = number - a.order.whole_blocks, part = split < 0 ? 0 : split % a.parts,
              parts = split < 0 ? 1 : a.parts;
    partial = split < 0 || parts == 1 ? -1 : split;
    const Place place(a.order, split < 0 ? number : a.order.whole_blocks + split / parts, a.keys);
    sequence = place.sequence, head = place.head, first_key = place.block * BLOCK;
    queries = range_of(a.queries, sequence), keys = range_of(a.keys, sequence);
    bool attended = first_key < keys.length;
    if (a.spans) {
      const int* span = a.spans + static_cast<int64>(sequence) * a.spans_stride;
      attended &= first_key + BLOCK > span[0] && first_key < span[2];
    }
    const int tiles = attended ? tiles_of(queries.length) : 0;
    begin = a.is_causal ? min(max(first_key - a.causal_offset, 0) / TILE, tiles) : 0;
    count = tiles - begin;
    start = a.is_causal || !count ? 0 : static_cast<int>(static_cast<int64>(first_key) * count / a.keys.tokens);
    const int64 all = static_cast<int64>(count) * a.group;
    first_step = static_cast<int>(all * part / parts);
    steps = static_cast<int>(all * (part + 1) / parts) - first_step;
  }

  // Return whether a key of the sequence exists.
  DEVICE bool exists(const BackwardArguments& a, int key) const {
    if (key >= keys.length) return false;
    return !a.key_mask || a.key_mask[static_cast<int64>(sequence) * a.key_mask_stride + key];
  }
};

// An item's tiles in the order of its steps: head by head.
struct Walk {
  int member, tile;

  DEVICE Walk(const Item& item) {
    const int count = max(item.count, 1);
    member = item.first_step / count;
    tile = item.begin + (item.start + item.first_step % count) % count;
  }
  DEVICE void next(const Item& item) {
    if (++tile == item.begin + item.count) tile = item.begin;
    if (tile == item.begin + item.start) member++;
  }
  // Return the tile's first row in the operands of all heads of Q.
  DEVICE int64 row(const BackwardArguments& a, const Item& item) const {
    const int q_heads = a.order.kv_heads * a.group;
    return operand_row(a.queries, item.queries, item.sequence, item.head * a.group + member, q_heads) + tile * TILE;
  }
};

// ---- Loading tiles ----

// Load 64 rows of a head in 16 bits.
DEVICE void load_tile(const TensorMap& map, uint8* into, uint64& barrier, int batch, int head, int row) {
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    load_box(map, into + part * CHUNK_BYTES, barrier, batch, head, row, part * 64);
}

DEVICE void load_keys(const Maps& maps, const BackwardArguments& a, const Item& item, Shared& shared) {
  uint64& barrier = shared.barriers.keys_full;
  const int batch = a.keys.ranges ? 0 : item.sequence, row = item.keys.operand_start + item.first_key;
  arrive_expecting(barrier, 2 * (CODE_BYTES + 2 * TILE_BYTES));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    load_box(maps.key_codes, shared.key_codes[i], barrier, batch, item.head, row + i * 64, 0);
    load_tile(maps.value, shared.value[i], barrier, batch, item.head, row + i * 64);
    load_tile(maps.key, shared.key[i], barrier, batch, item.head, row + i * 64);
  }
}

DEVICE void load_queries(const Maps& maps, const BackwardArguments& a, const Item& item, const Walk& walk,
                         Shared& shared, int stage) {
  uint64& barrier = shared.barriers.full[stage];
  uint8* into = shared.stages[stage];
  const int batch = a.queries.ranges ? 0 : item.sequence, head = item.head * a.group + walk.member;
  const int row = item.queries.operand_start + walk.tile * TILE;
  arrive_expecting(barrier, STAGE_BYTES + STATISTICS_BYTES);
  load_box(maps.query_codes, into, barrier, batch, head, row, 0);
  load_tile(maps.gradient, into + CODE_BYTES, barrier, batch, head, row);
  load_bytes(a.statistics + walk.row(a, item) / TILE * STATISTICS, shared.statistics[stage], barrier, STATISTICS_BYTES);
  load_tile(maps.query, into + CODE_BYTES + TILE_BYTES, barrier, batch, head, row);
}

// ---- dQ ----

DEVICE uint8* sums_of(const BackwardArguments& a, const Item& item, const Walk& walk, int part) {
  return a.sums + (walk.row(a, item) / TILE * PARTS + part) * PART_BYTES;
}

// Store a thread's products to shared memory as SUMS, in the order in which `finish_query_gradient` reads them. If
// SCALED, product i is multiplied by `factor(i)`.
template <typename Factor>
DEVICE void put_products(const float (&x)[32], uint8* into, Factor factor) {
  const uint32 at = shared_address(into) + threadIdx.x % 128 * 16;
#pragma unroll
  for (int i = 0; i < ACCESSES; i++) {
    float words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (SUMS == FLOAT16_SUMS) {
        const int first = 8 * i + 2 * j;
        words[j] = __uint_as_float(pack_float16(x[first] * factor(first), x[first + 1] * factor(first + 1)));
      } else {
        const int element = 4 * i + j;
        words[j] = SUMS == INT32_SUMS ? __int_as_float(__float2int_rn(x[element] * factor(element))) : x[element];
      }
    }
    store_shared4(at + i * 2048, words[0], words[1], words[2], words[3]);
  }
}

// ---- The warpgroups of the keys ----

// Rows of P, dS and the gradients are 64 keys; a thread holds rows `row` and `row` + 8, columns 8j + 2·quad and 8j +
// 2·quad + 1.
struct Keys {
  const BackwardArguments& a;
  Shared& shared;
  const int warpgroup, thread = threadIdx.x % 128, lane = thread % 32, quad = lane % 4,
                       row = thread / 32 * 16 + lane / 4;

  DEVICE Keys(const BackwardArguments& a, Shared& shared, int warpgroup) : a(a), shared(shared), warpgroup(warpgroup) {}

  DEVICE void run(const Item& item) {
    Barriers& barriers = shared.barriers;
    float dk[CHANNELS / 2], dv[CHANNELS / 2], dp[32];
    int s[32];
#pragma unroll
    for (int i = 0; i < CHANNELS / 2; i++) dk[i] = dv[i] = 0.0f;
    const int first_key = item.first_key + warpgroup * 64, key = first_key + row;
    const int64 scales =
        operand_row(a.keys, item.keys, item.sequence, item.head, a.order.kv_heads) / 64 + first_key / 64;
    const float key_scale = from_bfloat16(a.key_scale[scales * 4 + lane / 4 / 2]);
    // A key that exists has weights P for queries from key - offset on. Tiles from `masked_end` on need no mask.
    int hidden_below[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int from = a.is_causal ? key + i * 8 - a.causal_offset : -EVERY_TILE;
      hidden_below[i] = (item.exists(a, key + i * 8) ? from : EVERY_TILE) - quad * 2;
    }
    int masked_end = a.is_causal ? tiles_of(max(first_key + 63 - a.causal_offset, 0)) : 0;
    if (__any_sync(~0u, hidden_below[0] > EVERY_TILE / 2 || hidden_below[1] > EVERY_TILE / 2)) masked_end = EVERY_TILE;

    const uint32 stages = descriptor(shared.stages, CHUNK_BYTES);
    const int matrix = lane / 8, of_matrix = lane % 8, line = thread / 32 * 16 + of_matrix + 8 * (matrix % 2);
    const uint32 ds_at =
        shared_address(shared.ds) + warpgroup * CHUNK_BYTES + line * LINE_BYTES + ((matrix / 2) ^ of_matrix) * 16;
    const uint32 statistics_at = shared_address(shared.statistics) + quad * 16;
    int tile = Walk(item).tile;
    wait(barriers.keys_full, 0);
    [[maybe_unused]] const uint32 key_codes = descriptor(shared.key_codes[warpgroup]);
    [[maybe_unused]] const uint32 value = descriptor(shared.value[warpgroup], CHUNK_BYTES);
    [[maybe_unused]] uint32 k[CHANNELS / 32][4], v[CHANNELS / 16][4];
    if (SEPARATE_DQ) {
#pragma unroll
      for (int i = 0; i < CHANNELS / 32; i++)
        load_matrices(k[i], shared_address(shared.key_codes[warpgroup]) + line * CHANNELS +
                                ((i * 2 + matrix / 2) ^ line / 2 % 4) * 16);
#pragma unroll
      for (int i = 0; i < CHANNELS / 16; i++)
        load_matrices(v[i], shared_address(shared.value[warpgroup]) + line * LINE_BYTES +
                                ((i * 2 + matrix / 2) ^ of_matrix) * 16);
    }
#pragma unroll 1
    for (int step = 0; step < item.steps; step++) {
      const int stage = step % STAGES, buffer = step % BUFFERS;
      const uint32 codes = stages + stage * (STAGE_BYTES / 16), gradient = codes + CODE_BYTES / 16,
                   query = gradient + TILE_BYTES / 16, statistics = statistics_at + stage * STATISTICS_BYTES;
      wait(barriers.full[stage], step / STAGES & 1);
      wgmma_fence();
      if constexpr (SEPARATE_DQ) {
        multiply_int8<false>(s, k[0], codes);
        multiply_int8<true>(s, k[1], codes + 2);
        wgmma_commit();
        multiply_registers<false, false>(dp, v[0], gradient);
#pragma unroll
        for (int i = 1; i < CHANNELS / 16; i++) multiply_registers<false, true>(dp, v[i], gradient + i * 2);
      } else {
        multiply_shared_int8<false>(s, key_codes, codes);
#pragma unroll
        for (int i = 1; i < CHANNELS / 32; i++) multiply_shared_int8<true>(s, key_codes + 2 * i, codes + 2 * i);
        wgmma_commit();
        multiply_shared<false, false>(dp, value, gradient);
#pragma unroll
        for (int i = 1; i < CHANNELS / 16; i++) {
          const int at = i / 4 * (CHUNK_BYTES / 16) + i % 4 * 2;
          multiply_shared<false, true>(dp, value + at, gradient + at);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
      pin(s);

      auto hide = [&](float (&x)[32]) {
        if (tile >= masked_end) return;
        const int low = hidden_below[0] - tile * TILE, high = hidden_below[1] - tile * TILE;
#pragma unroll
        for (int i = 0; i < 32; i++)
          if ((i / 2 % 2 ? high : low) > i / 4 * 8 + i % 2) x[i] = 0.0f;
      };
      float p[32];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float4 x = load_shared4(statistics + j * 64);  // scale and LSE of two queries
        const float scale[2] = {x.x * key_scale, x.z * key_scale}, lse[2] = {x.y, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
          p[4 * j + i] = exp2_approximate(__fmaf_rn(static_cast<float>(s[4 * j + i]), scale[i % 2], -lse[i % 2]));
      }
      hide(p);
      uint32 packed_p[16], ds[16];
#pragma unroll
      for (int i = 0; i < 16; i++) packed_p[i] = pack(p[2 * i], p[2 * i + 1]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; i++) add_to_gradient(dv, packed_p + 4 * i, gradient + i * 16 * LINE_BYTES / 16);
      wgmma_commit();
      wgmma_wait<1>();
      pin(dp);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float2 delta = load_shared2(statistics - quad * 8 + DELTAS * 4 + j * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) dp[4 * j + i] = p[4 * j + i] * (dp[4 * j + i] - (i % 2 ? delta.y : delta.x));
      }
      hide(dp);
#pragma unroll
      for (int i = 0; i < 16; i++) ds[i] = pack(dp[2 * i], dp[2 * i + 1]);
      if (SEPARATE_DQ) wait(barriers.ds_empty[buffer], step / BUFFERS & 1 ^ 1);
#pragma unroll
      for (int i = 0; i < 4; i++) store_matrices((ds_at + buffer * DS_BYTES) ^ (i * 32), ds + 4 * i);
      fence_shared();
      __syncwarp();
      if (SEPARATE_DQ) arrive_as_warp(barriers.ds_full[buffer]);

      wgmma_fence();
      [[maybe_unused]] float dq[32];
      if (!SEPARATE_DQ) {
        sync_threads(1, 256);  // both warpgroups wrote dS, and read dS of two steps ago
        const uint32 left = descriptor(shared.ds[buffer], CHUNK_BYTES),
                     right = descriptor(shared.key, CHUNK_BYTES) + warpgroup * (CHUNK_BYTES / 16);
        multiply_shared<true, false>(dq, left, right);
#pragma unroll
        for (int i = 1; i < 8; i++)
          multiply_shared<true, true>(dq, left + i * 128, right + i / 4 * (TILE_BYTES / 16) + i % 4 * 128);
        wgmma_commit();
      }
#pragma unroll
      for (int i = 0; i < 4; i++) add_to_gradient(dk, ds + 4 * i, query + i * 16 * LINE_BYTES / 16);
      wgmma_commit();
      if (!SEPARATE_DQ) {
        float factors[2] = {};  // of the thread's two queries in dQ
        if (SCALED) {
          const uint32 at = shared_address(shared.statistics[stage]) + (FACTORS + row) * 4;
          factors[0] = load_shared(at), factors[1] = load_shared(at + 8 * 4);
        }
        wgmma_wait<1>();
        pin(dq);
        pin(dv);
        const int part = step % TILES_ON_WAY * 2 + warpgroup;
        wait(barriers.sums_empty[part], step / TILES_ON_WAY & 1 ^ 1);
        put_products(dq, shared.sums[part], [&](int i) { return factors[i / 2 % 2]; });
        fence_shared();
        __syncwarp();
        arrive_as_warp(barriers.sums_full[part]);
      }
      wgmma_wait<0>();
      pin(dv);
      pin(dk);
      keep(packed_p);
      keep(ds);
      arrive_as_warp(barriers.empty[stage]);
      if (++tile == item.begin + item.count) tile = item.begin;
    }
    store(dk, dv);
  }

  DEVICE void store(const float (&dk)[CHANNELS / 2], const float (&dv)[CHANNELS / 2]) const {
    // Reread these indices, so that the loop keeps no registers for them.
    int block, number;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    const Item item(a, block);
    const int channel = number % 4 * 2;
    auto rows_of = [&](const Gradient& x, int key) {
      return x.first + item.sequence * x.batch_stride + item.head * x.head_stride +
             (item.keys.start + key) * x.token_stride;
    };
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int key = item.first_key + number / 32 * 16 + number % 32 / 4 + half * 8;
      if (key >= item.keys.length) continue;
      // A non-finite dO, times weights of 0, must not count.
      const bool counts = item.exists(a, key) && !(a.is_causal && key >= item.queries.length + a.causal_offset);
      if (item.partial >= 0) {
        float* row = a.partials + (static_cast<int64>(item.partial) * 2 * BLOCK + key - item.first_key) * CHANNELS;
#pragma unroll
        for (int i = 0; i < CHANNELS / 8; i++) {
          const int first = 4 * i + 2 * half;
          float2 of_key = make_float2(dk[first] * a.softmax_scale, dk[first + 1] * a.softmax_scale);
          float2 of_value = make_float2(dv[first], dv[first + 1]);
          if (!counts) of_key = of_value = make_float2(0.0f, 0.0f);
          *reinterpret_cast<float2*>(row + i * 8 + channel) = of_key;
          *reinterpret_cast<float2*>(row + BLOCK * CHANNELS + i * 8 + channel) = of_value;
        }
        continue;
      }
      uint16 *key_row = rows_of(a.key_gradient, key), *value_row = rows_of(a.value_gradient, key);
#pragma unroll
      for (int i = 0; i < CHANNELS / 8; i++) {
        const int at = i * 8 + channel, first = 4 * i + 2 * half;
        const uint32 of_key = pack(dk[first] * a.softmax_scale, dk[first + 1] * a.softmax_scale);
        const uint32 of_value = pack(dv[first], dv[first + 1]);
        if (at < a.head_dim) *reinterpret_cast<uint32*>(key_row + at) = counts ? of_key : 0;
        if (at < a.v_head_dim) *reinterpret_cast<uint32*>(value_row + at) = counts ? of_value : 0;
      }
    }
  }
};

// ---- The third warpgroup ----

constexpr int LOADER = 96;  // the thread that loads tiles

// Load the keys and the first tiles.
DEVICE void begin_loads(const Maps& maps, const BackwardArguments& a, const Item& item, Walk& ahead, Shared& shared) {
  load_keys(maps, a, item, shared);
  for (int step = 0; step < STAGES && step < item.steps; step++, ahead.next(item))
    load_queries(maps, a, item, ahead, shared, step);
}

// With 128 channels: load tiles, and let the TMA add dQ, which the other warpgroups store to shared memory.
DEVICE void load_and_add(const Maps& maps, const BackwardArguments& a, const Item& item, Shared& shared) {
  Barriers& barriers = shared.barriers;
  const int thread = threadIdx.x % 128;
  if (thread == LOADER) {
    Walk ahead(item);
    begin_loads(maps, a, item, ahead, shared);
#pragma unroll 1
    for (int step = STAGES; step < item.steps; step++, ahead.next(item)) {
      wait(barriers.empty[step % STAGES], step / STAGES & 1 ^ 1);
      load_queries(maps, a, item, ahead, shared, step % STAGES);
    }
  }
  if (thread == 0) {
    Walk walk(item);
#pragma unroll 1
    for (int step = 0; step < item.steps; step++, walk.next(item)) {
      const int place = step % TILES_ON_WAY * 2;
#pragma unroll
      for (int part = 0; part < 2; part++) {
        wait(barriers.sums_full[place + part], step / TILES_ON_WAY & 1);
        add_to_memory(sums_of(a, item, walk, part), shared.sums[place + part], PART_BYTES);
      }
      if constexpr (TILES_ON_WAY == 1) {
        wait_additions_read<1>();
        arrive(barriers.sums_empty[0]);
        wait_additions_read<0>();
        arrive(barriers.sums_empty[1]);
      } else {
        wait_additions_read<2>();  // the TMA has read the previous tile, in the other two places
        if (step) arrive(barriers.sums_empty[2 - place]), arrive(barriers.sums_empty[3 - place]);
      }
    }
    wait_additions();
  }
}

// With 64 channels: load tiles, compute dQᵀ = Kᵀ·dSᵀ, and let the TMA add it. A thread has channels `row` and `row` +
// 8.
DEVICE void load_and_multiply(const Maps& maps, const BackwardArguments& a, const Item& item, Shared& shared) {
  Barriers& barriers = shared.barriers;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  Walk ahead(item), walk(item);
  if (thread == LOADER) begin_loads(maps, a, item, ahead, shared);
  __syncwarp();
  wait(barriers.keys_full, 0);
  uint32 k[8][4];  // Kᵀ: 64 channels × 128 keys
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int matrix = lane / 8, of_matrix = lane % 8, key = i % 4 * 16 + of_matrix + matrix / 2 * 8;
    load_matrices_transposed(
        k[i], shared_address(shared.key[i / 4]) + key * LINE_BYTES + ((warp * 2 + matrix % 2) ^ of_matrix) * 16);
  }
#pragma unroll 1
  for (int step = 0; step < item.steps; step++, walk.next(item)) {
    const int buffer = step % BUFFERS;
    float2 factors[8] = {};
    if (SCALED) {
      const float* of_tile = a.statistics + walk.row(a, item) / TILE * STATISTICS + FACTORS;
#pragma unroll
      for (int j = 0; j < 8; j++) factors[j] = reinterpret_cast<const float2*>(of_tile)[j * 4 + lane % 4];
    }
    float dq[32];
    wait(barriers.ds_full[buffer], step / BUFFERS & 1);
    const uint32 ds = descriptor(shared.ds[buffer], CHUNK_BYTES);
    wgmma_fence();
    multiply_registers<true, false>(dq, k[0], ds);
#pragma unroll
    for (int i = 1; i < 8; i++) multiply_registers<true, true>(dq, k[i], ds + i * 128);
    wgmma_commit();
    wgmma_wait<0>();
    pin(dq);
    arrive_as_warp(barriers.ds_empty[buffer]);
    if (thread == 0) wait_additions_read<BUFFERS - 1>();
    sync_threads(1, 128);
    put_products(dq, shared.sums[buffer], [&](int i) { return i % 2 ? factors[i / 4].y : factors[i / 4].x; });
    fence_shared();
    sync_threads(1, 128);
    if (thread == 0) add_to_memory(sums_of(a, item, walk, 0), shared.sums[buffer], PART_BYTES);
    if (thread == LOADER && step + STAGES < item.steps) {
      wait(barriers.empty[step % STAGES], step / STAGES & 1);
      load_queries(maps, a, item, ahead, shared, step % STAGES);
      ahead.next(item);
    }
    __syncwarp();
  }
  if (thread == 0) wait_additions();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) int8_backward(INT8_BACKWARD_PARAMETERS) {
  extern __shared__ __align__(1024) uint8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Barriers& barriers = shared.barriers;
  if (threadIdx.x == 0) {
    init(barriers.keys_full, 1);
    for (int i = 0; i < STAGES; i++) init(barriers.full[i], 1), init(barriers.empty[i], 8 * WARP_ARRIVALS);
    for (int i = 0; i < BUFFERS; i++)
      init(barriers.ds_full[i], 8 * WARP_ARRIVALS), init(barriers.ds_empty[i], 4 * WARP_ARRIVALS);
    for (int i = 0; i < PARTS_ON_WAY; i++)
      init(barriers.sums_full[i], 4 * WARP_ARRIVALS), init(barriers.sums_empty[i], 1);
    fence_shared();
  }
  __syncthreads();
  const Item item(arguments, blockIdx.x);
  if (item.first_key >= item.keys.length) return;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup < 2) {
    setmaxnreg_inc<KEY_REGISTERS>();
    Keys(arguments, shared, warpgroup).run(item);
  } else {
    setmaxnreg_dec<OTHER_REGISTERS>();
    if (SEPARATE_DQ)
      load_and_multiply(maps, arguments, item, shared);
    else
      load_and_add(maps, arguments, item, shared);
  }
}
