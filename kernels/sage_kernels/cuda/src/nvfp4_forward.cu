// The forward kernel of the NVFP4 recipes for consumer Blackwell: Q·Kᵀ and P·V in NVFP4, of the operands that
// `quantize_nvfp4.cu` writes, or the Triton quantisers. With emulated products it runs on other GPUs, to be tested.
//
// A block of the grid works through items: 128 rows of one (batch, head). One warp of it brings tiles of 128 keys: K,
// V, their scales and the scores of Q's means. Each of the other eight holds 16 rows: their scores, weights and outputs
// are in its registers, and weights become the left operand of P·V where they are.
//
// The call's first keys, which may hold much of each row's weight, are not among K and V: a warp attends to them in 16
// bits when it is done with all others (`warp_heavy_keys.cuh`). Before that it attends so to the latest keys of causal
// rows (`warp_recent_keys.cuh`): tiles of 32, which come through the same stages, behind those in 4 bits.
//
// The host, `nvfp4_forward.py`, gives the kernel's parameters, with `Arguments`, and all compile-time constants that
// are not defined here.
#include "nvfp4_items.cuh"
#include "nvfp4_producer.cuh"
#include "nvfp4_rows.cuh"
#include "wgmma.cuh"

static_assert(WARPS == 8 && THREADS == 32 * (WARPS + 4),
              "THREADS must be those of 8 WARPS that attend, and of a warpgroup that gives them its registers");
static_assert(BLOCK == 128, "BLOCK of rows and of keys must be 128: a warp has 16 rows, and a tensor scale 128 tokens");
static_assert(GROUP == 16, "GROUP of elements with a scale must be 16, as the matrix units have it");
static_assert(HEAVY_KEYS == 0 || HEAVY_KEYS == 64, "HEAVY_KEYS must be 0 or 64");
static_assert(LATE_KEYS == 0 || LATE_KEYS == 16 && HEAVY_KEYS > 0 && CAUSAL,
              "LATE_KEYS must be 0, or 16 of a causal call's");
ASSERT_FLAG(CAUSAL, "a row attends to keys up to its own, or to all");
ASSERT_FLAG(RECENT, "the latest keys of a causal call's rows are in 16 bits, or as the others");
static_assert(CAUSAL || !RECENT, "RECENT keys are those of a causal call");
ASSERT_FLAG(PADDED, "keys may not exist, or all do");
ASSERT_FLAG(LSE, "the log-sum-exp of rows is written, or not");
ASSERT_FLAG(SMOOTH_Q, "scores of Q's means are added, or there are none");
ASSERT_FLAG(QUANTIZED_DENOMINATOR, "rows are divided by sums of quantised weights, or of weights before that");

constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;

extern "C" __global__ void __launch_bounds__(THREADS, 1) nvfp4_forward(NVFP4_FORWARD_PARAMETERS) {
  extern __shared__ __align__(1024) uint8 dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  __shared__ Barriers barriers;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) init(barriers.full[i], 1 + 32), init(barriers.empty[i], WARPS * WARP_ARRIVALS);
    init(barriers.heavy_full, 1), init(barriers.heavy_empty, WARPS * WARP_ARRIVALS);
  }
  fence_shared();
  __syncthreads();
  if (warp >= WARPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (warp > WARPS) return;
    produce(arguments, key, value, heavy_key, heavy_value, key_tokens, value_tokens, shared, barriers);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    Consumer consumer{arguments, query_tokens, shared, barriers};
    consumer.warp = warp;
    consumer.lane = lane;
    consumer.quad = lane % 4;
    consumer.row = warp * 16 + lane / 4;
    consumer.run();
  }
}
