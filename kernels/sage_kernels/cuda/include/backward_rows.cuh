// Find tokens for the backward kernels, in equal or packed sequences. A tile has TILE queries, a block has BLOCK keys;
// operands hold whole blocks of a sequence.
#pragma once
#include "numbers.cuh"
#include "parameters.cuh"

static_assert(CHANNELS == 64 || CHANNELS == 128, "CHANNELS of an operand's row must be 64 or 128");
ASSERT_FLAG(FLOAT16, "whether gradients and operands are in float16, or in bfloat16");
// The format in which dQ is summed. In float16 and INT32 sums, products are scaled by a factor of each query.
enum Sums { FLOAT32_SUMS, FLOAT16_SUMS, INT32_SUMS };
constexpr bool SCALED = SUMS != FLOAT32_SUMS;
static_assert(SUMS == FLOAT32_SUMS || SUMS == FLOAT16_SUMS || SUMS == INT32_SUMS,
              "SUMS must name a member of the enum");
static_assert(TILE == 64, "TILE must be 64 queries: the rows of a warpgroup's products");
static_assert(BLOCK == 2 * TILE, "BLOCK must be 128 keys: 64 for each of two warpgroups");

constexpr int PARTS = CHANNELS / 64;  // of a tile of dQ, 64 channels each
constexpr int SUM_BYTES = SUMS == FLOAT16_SUMS ? 2 : 4, PART_BYTES = TILE * 64 * SUM_BYTES;  // of a part's sums
constexpr int AT_ONCE = 16 / SUM_BYTES, ACCESSES = 32 / AT_ONCE;  // a thread's sums in an access, and its accesses
// Floats of a tile: pairs (scale, LSE), deltas, and if SCALED factors.
constexpr int STATISTICS = (SCALED ? 4 : 3) * TILE, DELTAS = 2 * TILE, FACTORS = 3 * TILE;
constexpr int STATISTICS_BYTES = STATISTICS * 4;

// A sequence's tokens: the first in the caller's tensors, their number, and the first row in operands.
struct Range {
  int start, length, operand_start;
};

DEVICE Range range_of(const Axis& axis, int sequence) {
  if (!axis.ranges) return {0, axis.tokens, 0};
  const int* range = axis.ranges + 3 * sequence;
  return {range[0], range[1], range[2]};
}

// Return the first row of a sequence's head in operands (operand batch, heads, rows).
DEVICE int64 operand_row(const Axis& axis, const Range& range, int sequence, int head, int heads) {
  if (axis.ranges) return static_cast<int64>(head) * axis.rows + range.operand_start;
  return (static_cast<int64>(sequence) * heads + head) * axis.rows;
}

DEVICE int tiles_of(int tokens) { return (tokens + TILE - 1) / TILE; }
DEVICE int blocks_of(int tokens) { return (tokens + BLOCK - 1) / BLOCK; }

// The block of keys at a number in the order of blocks: block by block, over the heads taken together.
struct Place {
  int sequence, head, block;

  DEVICE Place(const Order& order, int number, const Axis& keys) {
    const int of_group = blocks_of(keys.tokens) * order.heads_at_once, group = number / of_group;
    const int first = group * order.heads_at_once, together = min(order.heads_at_once, order.pairs - first);
    number -= group * of_group;
    const int pair = first + number % together;
    sequence = pair / order.kv_heads, head = pair % order.kv_heads, block = number / together;
  }
};

// Round two numbers to the gradients' dtype; the first is in the lower half.
DEVICE uint32 pack(float a, float b) { return FLOAT16 ? pack_float16(a, b) : pack_bfloat16(a, b); }
