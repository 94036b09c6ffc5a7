// Sort block lists for the forward kernel (`forward_items.cuh`): leave out tiles that no row sees, put tiles that need
// no mask first, and queue the items that attend to them.
//
// The first block of the grid makes the queue; each warp of the other blocks sorts a list. Unless spans are needed, all
// blocks run while the stream's previous kernel, a quantiser, ends; only the first block waits for that kernel, so that
// a kernel that waits for this kernel has waited for both.
#include "barrier.cuh"
#include "parameters.cuh"

static_assert(THREADS == 1024, "THREADS must be 1024, a whole block");
static_assert(BLOCK_M == 128 && BLOCK_N == 128, "BLOCK_M and BLOCK_N must be 128, as in the forward kernel's lists");
static_assert(LIST_HEAD == 2, "LIST_HEAD must be 2: a list begins with two counts");
ASSERT_FLAG(CAUSAL, "whether rows attend only to keys up to their own");
ASSERT_FLAG(PADDED, "whether some keys may be missing");

constexpr int WARPS = THREADS / 32;

// Return the number of tiles in the caller's list.
DEVICE int given_tiles(const SortArguments& a, int batch, int head, int block) {
  return min(
      max(a.counts[batch * a.counts_stride_batch + head * a.counts_stride_head + block * a.counts_stride_row], 0),
      a.places);
}

// An item by its place in order: head by head, all blocks of rows; causal items in the dense kernel's order.
struct Place {
  int pair, block;

  DEVICE Place(const SortArguments& a, int index) {
    if (CAUSAL) {
      const int group = index / (a.blocks * a.heads_at_once), within = index - group * a.blocks * a.heads_at_once;
      const int heads = min(a.heads_at_once, a.batch * a.q_heads - group * a.heads_at_once);
      block = a.blocks - 1 - within / heads;
      pair = group * a.heads_at_once + within % heads;
    } else {
      pair = index / a.blocks;
      block = index - pair * a.blocks;
    }
  }
  DEVICE int tiles(const SortArguments& a) const {
    const int batch = pair / a.q_heads;
    return given_tiles(a, batch, pair - batch * a.q_heads, block);
  }
};

// Return the sum of x over lower threads, and add the sum over all threads to `sum`; `sums` is shared memory.
DEVICE int64 add_threads(int64 x, int64* sums, int64& sum) {
  const int lane = threadIdx.x % 32;
  int64 before = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64 other = __shfl_up_sync(~0u, before, distance);
    if (lane >= distance) before += other;
  }
  __syncthreads();
  if (lane == 31) sums[threadIdx.x / 32] = before;
  __syncthreads();
  before -= x;
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    if (i < threadIdx.x / 32) before += sums[i];
    sum += sums[i];
  }
  return before;
}

// Queue the items in order, which keeps heads' keys in the L2 cache, but first the items that would end alone: longer
// than twice the mean, with less work behind them than keeps all blocks busy twice as long.
DEVICE void make_queue(const SortArguments& a) {
  __shared__ int64 sums[WARPS];
  const int items = a.blocks * a.batch * a.q_heads, run = (items + THREADS - 1) / THREADS;
  const int first = min(static_cast<int>(threadIdx.x) * run, items), end = min(first + run, items);
  int64 thread_tiles = 0, all = 0;
  for (int index = first; index < end; index++) thread_tiles += Place(a, index).tiles(a);
  const int64 before = add_threads(thread_tiles, sums, all);
  const auto visit = [&](auto queue_item) {
    int64 tiles_left = all - before;
    for (int index = first; index < end; index++) {
      const Place place(a, index);
      const int64 tiles = place.tiles(a);
      queue_item(place, tiles * items > 2 * all && tiles_left < 2 * tiles * a.blocks_at_once);
      tiles_left -= tiles;
    }
  };
  int64 thread_alone = 0, all_alone = 0;
  visit([&](const Place&, bool ends_alone) { thread_alone += ends_alone; });
  int64 next_alone = add_threads(thread_alone, sums, all_alone), next = all_alone + first - next_alone;
  int* const queue = a.queue + 1;
  visit([&](const Place& place, bool ends_alone) {
    queue[ends_alone ? next_alone++ : next++] = place.pair * a.blocks + place.block;
  });
  if (threadIdx.x == 0) a.queue[0] = 0;
}

// A tile of a list; each lane has its own.
struct Tile {
  int number;
  bool seen, whole;  // some scores count; all count

  DEVICE Tile(const SortArguments& a, const int* tiles, int place, int places, int first_row, int last_row,
              const int* spans) {
    number = place < places ? tiles[place * a.tiles_stride_place] : -1;
    const int64 first = number * static_cast<int64>(BLOCK_N), last = first + BLOCK_N - 1;
    seen = number >= 0 && first < a.kv_len;
    whole = last < a.kv_len;
    if (CAUSAL) {
      seen &= first <= last_row + a.causal_offset;
      whole &= last <= first_row + a.causal_offset;
    }
    if (PADDED) {
      seen &= first < spans[2] && last >= spans[0];
      whole &= first >= spans[0] && last < spans[1];
    }
    whole &= seen;
  }
};

DEVICE void sort_list(const SortArguments& a, int list) {
  const int block = list % a.blocks, pair = list / a.blocks, head = pair % a.list_heads, batch = pair / a.list_heads;
  const int places = given_tiles(a, batch, head, block), lane = threadIdx.x % 32;
  const int* tiles = a.tiles + batch * a.tiles_stride_batch + head * a.tiles_stride_head + block * a.tiles_stride_row;
  const int first_row = block * BLOCK_M, last_row = min(first_row + BLOCK_M, a.q_len) - 1;
  int spans[3] = {};
  if (PADDED) {
#pragma unroll
    for (int i = 0; i < 3; i++) spans[i] = a.spans[batch * a.spans_stride + i];
  }
  int whole = 0;
#pragma unroll 2
  for (int start = 0; start < places; start += 32)
    whole += __popc(__ballot_sync(~0u, Tile(a, tiles, start + lane, places, first_row, last_row, spans).whole));
  int* const into = a.lists + list * static_cast<int64>(a.list_stride);
  const uint32 before = (1u << lane) - 1;
  int next_whole = 0, next = whole;
  for (int start = 0; start < places; start += 32) {
    const Tile tile(a, tiles, start + lane, places, first_row, last_row, spans);
    const uint32 wholes = __ballot_sync(~0u, tile.whole), rest = __ballot_sync(~0u, tile.seen && !tile.whole);
    const int at = tile.whole ? next_whole + __popc(wholes & before) : next + __popc(rest & before);
    if (tile.seen) into[LIST_HEAD + at] = tile.number;
    next_whole += __popc(wholes);
    next += __popc(rest);
  }
  if (lane == 0) {
    into[0] = whole, into[1] = next;
    if (next == 0) into[LIST_HEAD] = (a.kv_len + BLOCK_N - 1) / BLOCK_N;  // past the last tile: no row sees it
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sort_lists(SORT_LISTS_PARAMETERS) {
  launch_dependents();
  const int list = (blockIdx.x - 1) * WARPS + threadIdx.x / 32;
  if (PADDED) grid_dependency_wait();
  if (blockIdx.x == 0)
    make_queue(arguments);
  else if (list < arguments.list_batches * arguments.list_heads * arguments.blocks)
    sort_list(arguments, list);
  if (!PADDED && blockIdx.x == 0) grid_dependency_wait();
}
