// Sort block lists for the forward kernel: tiles without a mask first, and none that does not exist or is hidden
// wholly.
//
// A warp has the list of one block of rows. The host, `block_lists.py`, gives the kernel's parameters.
#include "parameters.cuh"
#include "types.cuh"

static_assert(THREADS % 32 == 0, "THREADS must be those of whole warps");
ASSERT_FLAG(CAUSAL, "a row attends to keys up to its own, or to all");

// A tile of a list, and whether some, and whether all, of its scores count.
struct Tile {
  int number;
  bool seen, whole;
};

DEVICE Tile find_tile(const Lists& a, const int* list, int place, int count, int first_row, int last_row) {
  const int number = place < count ? list[place * a.tiles_stride_place] : -1;
  bool seen = number >= 0 && number < (a.kv_len + LIST_SIZE - 1) / LIST_SIZE;
  bool whole = seen && number < a.kv_len / LIST_SIZE;
  if (CAUSAL && seen) {
    whole &= number * LIST_SIZE + LIST_SIZE - 1 <= first_row + a.causal_offset;
    seen = number * LIST_SIZE <= last_row + a.causal_offset;
  }
  return {number, seen, whole && seen};
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_lists(SORT_LISTS_PARAMETERS) {
  const int index = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index >= a.lists) return;
  const int block = index % a.row_blocks, head = index / a.row_blocks % a.heads, batch = index / a.row_blocks / a.heads;
  const int* list = a.tiles + (batch * a.tiles_stride_batch + head * a.tiles_stride_head + block * a.tiles_stride_row);
  int* entries = a.entries + index * static_cast<int64>(max(a.places, 1) + 2);
  const int count = min(
      a.places, a.counts[batch * a.counts_stride_batch + head * a.counts_stride_head + block * a.counts_stride_row]);
  const int first_row = block * LIST_SIZE, last_row = min(first_row + LIST_SIZE, a.q_len) - 1;
  int wholes = 0;
  for (int start = 0; start < count; start += 32)
    wholes += __popc(__ballot_sync(~0u, find_tile(a, list, start + lane, count, first_row, last_row).whole));
  int before = 0, behind = wholes;
  const uint32 lower = (1u << lane) - 1;
  for (int start = 0; start < count; start += 32) {
    const Tile tile = find_tile(a, list, start + lane, count, first_row, last_row);
    const uint32 whole = __ballot_sync(~0u, tile.whole), rest = __ballot_sync(~0u, tile.seen && !tile.whole);
    if (tile.seen)
      entries[2 + (tile.whole ? before + __popc(whole & lower) : behind + __popc(rest & lower))] = tile.number;
    before += __popc(whole);
    behind += __popc(rest);
  }
  if (lane != 0) return;
  entries[0] = wholes;
  entries[1] = behind;
  if (behind == 0) entries[2] = 0;
}
