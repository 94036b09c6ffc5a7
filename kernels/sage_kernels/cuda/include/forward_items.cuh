// The forward kernel's work, divided into items, and its constants and shared memory. The host, `int8_forward.py`,
// provides all compile-time constants not defined here.
#pragma once
#include "barrier.cuh"
#include "parameters.cuh"
#include "rotation.cuh"
#include "tokens.cuh"

static_assert(WARPGROUPS == 2 || WARPGROUPS == 3, "WARPGROUPS that attend must be 2 or 3: see CONSUMER_REGISTERS");
static_assert(THREADS == 128 * (WARPGROUPS + 1), "THREADS must cover WARPGROUPS and a warpgroup that loads tiles");
static_assert(WARPGROUP_ROWS == 64, "WARPGROUP_ROWS must be 64, as in an MMA instruction");
static_assert(BLOCK_N == 96 || BLOCK_N == 128, "BLOCK_N keys of a tile must be 96 or 128: see INT8_PRODUCT");
static_assert(STAGES == 2, "STAGES must be 2: steps of even and odd tiles name their stages");
static_assert(KEY_BLOCK == 64 && KEYS_PER_SCALE == 16,
              "KEY_BLOCK and KEYS_PER_SCALE must be 64 and 16: a thread has 16 of a row's scores with 64 keys");
static_assert(LINE_BYTES == 128, "LINE_BYTES of V in float16 and of the output must be 128, the widest swizzle");
static_assert((VALUE_WIDTH == 128 || VALUE_WIDTH == 32) && BLOCK_N % VALUE_WIDTH == 0,
              "VALUE_WIDTH keys of V in e4m3, adjacent in shared memory, must be 128 or 32, and divide a tile");
static_assert(SUMMED_TILES > 0 && SUMMED_TILES % 2 == 0, "SUMMED_TILES must be even: sums move after even tiles");
ASSERT_FLAG(PV_FLOAT16, "whether P and V are in float16, or in e4m3");
ASSERT_FLAG(CAUSAL, "whether rows attend only to keys up to their own");
ASSERT_FLAG(PADDED, "whether some keys may be missing");
ASSERT_FLAG(LSE, "whether rows' log-sum-exp is written");
ASSERT_FLAG(CENTRED, "whether keys have mean 0");
ASSERT_FLAG(QUANTIZES_QUERY, "whether Q comes in 16 bits, to be rotated, or in INT8");
ASSERT_FLAG(HEAVY, "whether some keys are heavy");
ASSERT_FLAG(LISTS, "whether an item attends only to the tiles of a list");
static_assert(HEAVY_KEYS == 64, "HEAVY_KEYS must be 64: see PRODUCTS_16BIT");
static_assert(LATE_KEYS == 0 || LATE_KEYS == 16 && HEAVY && CAUSAL, "LATE_KEYS must be 0, or 16 in a causal call");
static_assert(MEAN_PARTS == 8, "MEAN_PARTS must be 8: see SHARED_16BIT_PRODUCT");
static_assert(!QUANTIZES_QUERY || HEAVY && !LSE, "QUANTIZES_QUERY needs HEAVY, and does not serve the LSE");
static_assert(LIST_HEAD == 2, "LIST_HEAD must be 2: a list begins with two counts");
static_assert(!LISTS || WARPGROUPS == 2 && BLOCK_N == 128 && !HEAVY,
              "LISTS need items of 128 rows, tiles of 128 keys, and no heavy keys");

constexpr int BLOCK_M = WARPGROUP_ROWS * WARPGROUPS;
constexpr int SCORES = BLOCK_N / 2;             // of a tile in a thread's registers
constexpr int ACC_ELEMENTS = CHANNELS / 2;      // in a thread's registers
constexpr int PV_BYTES = PV_FLOAT16 ? 2 : 1;    // of an element of P and V
constexpr int P_WORDS = SCORES * PV_BYTES / 4;  // words of P
constexpr int PV_DEPTH = 32 / PV_BYTES;         // keys of a matrix product
constexpr int CHUNK = 8, CHUNKS = SCORES / CHUNK;
// A tile's P is packed once the previous tile's P·V is done: after PRODUCTS_DONE chunks.
constexpr int PRODUCTS_DONE = 1;
constexpr int LINE_CHANNELS = LINE_BYTES / 2;  // of V in float16 and of the output
constexpr int Q_BYTES = BLOCK_M * CHANNELS, K_BYTES = BLOCK_N * CHANNELS, V_BYTES = CHANNELS * BLOCK_N * PV_BYTES;
constexpr int SUMS_BYTES = WARPGROUP_ROWS * CHANNELS * (PV_FLOAT16 ? 2 : 4);  // of a warpgroup: sums, or outputs
constexpr int MEAN_ROWS = QUANTIZES_QUERY ? MEAN_PARTS : 0;                   // behind the heavy keys
constexpr int HEAVY_BYTES = HEAVY ? HEAVY_KEYS * CHANNELS * 2 : 0;            // of the values of heavy keys
constexpr int HEAVY_KEY_BYTES = HEAVY_BYTES + MEAN_ROWS * CHANNELS * 2;       // of heavy keys, with the rows behind
constexpr int QUERY_STAGES = QUANTIZES_QUERY ? 1 : STAGES;                    // of Q in INT8
constexpr int TOKENS_BYTES = QUANTIZES_QUERY ? CHANNELS * 2 * 64 : 0;         // of a warpgroup's rows of Q in 16 bits
static_assert(SHARED_BYTES == QUERY_STAGES * Q_BYTES + STAGES * (K_BYTES + V_BYTES) +
                                  WARPGROUPS * (TOKENS_BYTES + SUMS_BYTES) + HEAVY_KEY_BYTES + HEAVY_BYTES +
                                  CONTROL_BYTES,
              "SHARED_BYTES must hold the stages of Q, K and V, the sums, the heavy keys, and Control");
// Channels of Q in 16 bits that registers hold at once: three warpgroups lack registers for 128.
constexpr int HEAVY_CHANNELS = WARPGROUPS == 2 ? CHANNELS : 64;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 2 ? 232 : 160, PRODUCER_REGISTERS = WARPGROUPS == 2 ? 40 : 32;
constexpr int FIRST_KEYS = HEAVY ? HEAVY_KEYS - LATE_KEYS : 0;          // not part of K and V
constexpr int HEAVY_SCORES = HEAVY_KEYS / 2;                            // in a thread's registers
constexpr int HEAVY_KEY_LINES = (HEAVY_KEYS + MEAN_ROWS) * LINE_BYTES;  // of heavy keys: LINE_CHANNELS of each
constexpr int SEGMENTS = (BLOCK_N + KEY_BLOCK - 1) / KEY_BLOCK;         // of a tile, each with a scale of K
// Where it is faster, products with ones sum a row's P. They sum rounded numbers; e4m3 rounds too coarsely for
// the LSE.
constexpr bool SUMS_BY_PRODUCT = PV_FLOAT16 ? CHANNELS == 64 : !LSE;
// Rows need no mask after the last key, where the tile holds zeros: the zeros' score exceeds no row's maximum, because
// scores of keys without their mean have mean 0; and their P is erased before the sum. Scores of a list's tiles
// may have any mean.
constexpr bool ERASES = CENTRED && SUMS_BY_PRODUCT && !PV_FLOAT16 && !CAUSAL && !PADDED && !LISTS;
// A last tile that is at most half full takes half of the softmax. Without the heavy keys, a multiple of BLOCK_N keys
// ends with such a tile.
constexpr bool HALVES = ERASES && BLOCK_N == 128;
// Causal items differ in length: a free block takes the next from a queue.
constexpr bool QUEUE = CAUSAL && !LISTS;
// Warpgroups skip the item's last tiles if their rows do not see them.
constexpr bool SKIPS = CAUSAL && !PADDED && !LISTS;
static_assert(!SKIPS || ((WARPGROUPS - 1) * WARPGROUP_ROWS + BLOCK_N - 1) / BLOCK_N <= STAGES,
              "a warpgroup must skip at most STAGES of an item's tiles: the last waits until the first is free");
// Warpgroups without rows of an item skip it; three warpgroups without heavy keys lack registers for that, and must get
// whole items (`last_parts`).
constexpr bool PASSES = HEAVY || WARPGROUPS == 2;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
// A row's P is relative to a reference. The row's maximum may exceed it by SLACK powers of two: then P reaches the
// limit of its format.
constexpr float SLACK = PV_FLOAT16 ? 8.0f : 2.0f, P_LOG2 = LARGEST_P_LOG2 - SLACK;
static_assert(P_LOG2 > 0.0f && LARGEST_P_LOG2 < (PV_FLOAT16 ? 16.0f : 9.0f),
              "LARGEST_P_LOG2 must be above SLACK, and within the format of P");

struct Barriers {
  uint64 q_full[STAGES], q_empty[STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint64 ending_full, ending_empty;
};

// Loaded with a tile of Q: its rows' scales, or for Q in 16 bits the factors of its rotation (`rotate`).
struct alignas(16) Factors {
  float line[QUANTIZES_QUERY ? CHANNELS : BLOCK_M];
};

// V's scales and mean, loaded with the heavy keys for an item's end.
struct alignas(16) ValueScales {
  float scale[CHANNELS], mean[CHANNELS];
};

// A block's share of the work.
struct Item {
  int batch, head, kv_head, first_row;
  int warpgroups;  // number of the first warpgroups: they have rows of it
  int tiles;       // of keys; at least 1, even if rows see no key
  // The first tile, and the number of consecutive tiles; tile `first` - 1 comes last. With LISTS: the number of the
  // item's list, and the number of its tiles without a mask, which come first.
  int first, in_order;

  DEVICE int tile(int number) const {
    return !PADDED ? number : number < in_order ? first + number : max(0, first - 1);
  }
  // Return the tiles of the item's list.
  DEVICE const int* listed(const Int8ForwardArguments& a) const {
    return a.lists + first * static_cast<int64>(a.list_stride) + LIST_HEAD;
  }
  DEVICE int pair(const Int8ForwardArguments& a) const { return batch * a.q_heads + head; }
  DEVICE int kv_pair(const Int8ForwardArguments& a) const { return batch * a.kv_heads + kv_head; }
};

// A tile of K that a list names: its number, and the scales of its keys, four for each segment.
struct alignas(16) ListedTile {
  uint16 scale[BLOCK_N / KEYS_PER_SCALE];
  int number;
};

// The place in the QUEUE that one thread takes, and two more read.
struct TakenPlace {
  uint64 full, empty;
  int place;
};

// Shared memory behind the tiles.
struct alignas(256) Control {
  uint32 ones[8 * 32 / 4];  // 8 rows of 32 bytes; products with them sum P
  Barriers barriers;
  ValueScales value_scales;
  Factors factors[QUERY_STAGES];
  Item items[QUERY_STAGES];
  ListedTile listed[STAGES];
  TakenPlace taken;
};
static_assert(static_cast<int>(sizeof(Control)) <= CONTROL_BYTES, "CONTROL_BYTES must hold Control");

// Take this block's place `round` in the QUEUE of `items` items, for two other threads too; in round 0 it is the
// block's number. In the end each block takes a place in vain, so the counter goes up `items` times in all, and is back
// at 0. Without a counter items are dealt out; blocks then change order from round to round.
DEVICE int take_place(const Int8ForwardArguments& a, int round, int items, TakenPlace& taken) {
  const int grid = gridDim.x;
  int place = round * grid + (round % 2 ? grid - 1 - blockIdx.x : blockIdx.x);
  if (round == 0) return place;
  if (a.queue != nullptr) place = grid + atomicInc(reinterpret_cast<uint32*>(a.queue), items - 1);
  wait(taken.empty, round & 1);
  taken.place = place;
  arrive(taken.full);
  return place;
}

// Get this block's place `round`, which another thread takes.
DEVICE int get_place(int round, TakenPlace& taken) {
  if (round == 0) return blockIdx.x;
  wait(taken.full, round & 1 ^ 1);
  const int place = taken.place;
  arrive(taken.empty);
  return place;
}

// Find item `round` of this block; with a QUEUE, one of three threads `takes` its place. The QUEUE has the longest
// items of a group of heads first, and starts with the group of fewer heads: in the end all blocks have short items.
// Without it, a head's last item may have fewer rows: blocks take turns with such items. Items of the last round are
// split in parts, so that more blocks get work.
DEVICE bool next_item(const Int8ForwardArguments& a, int round, bool takes, TakenPlace& taken, Item& item) {
  const int blocks = (a.q_len + BLOCK_M - 1) / BLOCK_M, items = blocks * a.batch * a.q_heads, grid = gridDim.x;
  const int turn = (blockIdx.x + round) % grid, whole = items / grid * grid;
  int index = round * grid + turn;
  if (QUEUE) index = takes ? take_place(a, round, items, taken) : get_place(round, taken);
  int first = 0, end = WARPGROUPS;
  if (!CAUSAL && index >= whole) {
    const int part = (index - whole) % a.parts;
    index = whole + (index - whole) / a.parts;
    first = part * WARPGROUPS / a.parts, end = (part + 1) * WARPGROUPS / a.parts;
  }
  if (index >= items) return false;
  int block, pair;
  if (CAUSAL) {
    const int behind = items - 1 - index, group = behind / (blocks * a.heads_at_once);
    const int within = behind - group * blocks * a.heads_at_once;
    const int heads = min(a.heads_at_once, a.batch * a.q_heads - group * a.heads_at_once);
    block = within / heads;
    pair = group * a.heads_at_once + within % heads;
  } else {
    block = index % blocks;
    pair = index / blocks;
  }
  item.batch = pair / a.q_heads;
  item.head = pair - item.batch * a.q_heads;
  item.kv_head = item.head / (a.q_heads / a.kv_heads);
  item.first_row = block * BLOCK_M + first * WARPGROUP_ROWS;
  item.warpgroups = min(end - first, (a.q_len - item.first_row + WARPGROUP_ROWS - 1) / WARPGROUP_ROWS);
  int keys = PADDED ? a.spans[item.batch * a.spans_stride + 2] - FIRST_KEYS : a.kv_len;
  if (CAUSAL) keys = min(keys, item.first_row + BLOCK_M + a.causal_offset);
  item.in_order = (keys + BLOCK_N - 1) / BLOCK_N;
  item.first = 0;
  int before = 0;
  if (PADDED) {
    const int first_key = max(a.spans[item.batch * a.spans_stride] - FIRST_KEYS, 0);
    before = first_key % BLOCK_N != 0;
    item.first = first_key / BLOCK_N + before;
    item.in_order -= item.first;
  }
  item.tiles = max(1, max(0, item.in_order) + before);
  return item.warpgroups > 0;
}

// Take the next item from the queue of LISTS, which differ in length. In round 0 a block's number is its place.
DEVICE bool take_item(const Int8ForwardArguments& a, int round, Item& item) {
  const int blocks = (a.q_len + BLOCK_M - 1) / BLOCK_M;
  const int place = round == 0 ? blockIdx.x : gridDim.x + atomicAdd(a.queue, 1);
  if (place >= blocks * a.batch * a.q_heads) return false;
  const int index = a.queue[1 + place], pair = index / blocks, block = index - pair * blocks;
  item.batch = pair / a.q_heads;
  item.head = pair - item.batch * a.q_heads;
  item.kv_head = item.head / (a.q_heads / a.kv_heads);
  item.first_row = block * BLOCK_M;
  item.warpgroups = min(WARPGROUPS, (a.q_len - item.first_row + WARPGROUP_ROWS - 1) / WARPGROUP_ROWS);
  item.first = item.batch * a.lists_of_batch + item.head * a.lists_of_head + block;
  const int* head = item.listed(a) - LIST_HEAD;
  item.in_order = head[0];
  item.tiles = max(1, head[1]);
  return true;
}
