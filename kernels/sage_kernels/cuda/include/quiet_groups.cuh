// Groups of K's tokens that count in its mean and in the equalizer, as `transforms.quiet_keys` says.
#pragma once
#include "numbers.cuh"

static_assert(LOUD_GROUPS == 8, "LOUD_GROUPS must be 8: the same threads reduce a group's blocks");
static_assert(LOUD > 1.0, "LOUD must be more than 1: the median group is quiet");

// Return the number of a group's tokens, of `tokens` in all.
DEVICE int tokens_of_group(int tokens, int group) {
  const int blocks = tokens / BLOCK, whole = (blocks + LOUD_GROUPS - 1 - group) / LOUD_GROUPS;
  return whole * BLOCK + (blocks % LOUD_GROUPS == group ? tokens % BLOCK : 0);
}

// Return which groups are quiet, a bit for each; a warp's lanes call with the mean square of group
// `threadIdx.x % LOUD_GROUPS`.
DEVICE uint32 quiet_groups(float mean_square) {
  const int group = threadIdx.x % LOUD_GROUPS;
  int some = 0, rank = 0;
#pragma unroll
  for (int i = 0; i < LOUD_GROUPS; i++) {
    const float other = __shfl_sync(~0u, mean_square, i);
    if (!(other > 0.0f)) continue;
    some++;
    rank += other < mean_square || other == mean_square && i < group;
  }
  const uint32 medians = __ballot_sync(~0u, mean_square > 0.0f && rank == (some - 1) / 2);
  const float median = __shfl_sync(~0u, mean_square, medians == 0 ? 0 : __ffs(medians) - 1);
  return __ballot_sync(~0u, !(mean_square > __fmul_rn(median, static_cast<float>(LOUD))));
}
