// The forward kernel of the NVFP4 recipes for consumer Blackwell: Q·Kᵀ and P·V in NVFP4, of operands from
// `quantize_nvfp4.cu` or the Triton quantisers. With emulated products it runs on other GPUs, for tests.
//
// A block of the grid works through items: 128 rows of one (batch, head). One of its warps loads tiles of 128 keys: K,
// V, their scales and the scores of Q's means. Eight other warps hold 16 rows each, with scores, weights and outputs in
// registers; weights become the left operand of P·V in place.
//
// Heavy keys, which may hold much of each row's weight, are not part of K and V: after all other keys, a warp attends
// to them in 16 bits (`warp_heavy_keys.cuh`). Just before, it attends in 16 bits to the latest keys of causal rows
// (`warp_recent_keys.cuh`): tiles of 32, which follow the 4-bit tiles through the same stages.
//
// The host, `nvfp4_forward.py`, provides the parameters, with `NVFP4ForwardArguments`, and all compile-time constants
// not defined here.
#include "nvfp4_items.cuh"
#include "nvfp4_producer.cuh"
#include "nvfp4_rows.cuh"
#include "wgmma.cuh"

static_assert(WARPS == 8 && THREADS == 32 * (WARPS + 4),
              "THREADS must cover 8 WARPS that attend, and a warpgroup that gives them its registers");
static_assert(BLOCK == 128, "BLOCK of rows and of keys must be 128: a warp has 16 rows, a tensor scale 128 tokens");
static_assert(GROUP == 16, "GROUP must be 16: the tensor cores take a scale for 16 elements");
static_assert(HEAVY_KEYS == 0 || HEAVY_KEYS == 64, "HEAVY_KEYS must be 0 or 64");
static_assert(LATE_KEYS == 0 || LATE_KEYS == 16 && HEAVY_KEYS > 0 && CAUSAL,
              "LATE_KEYS must be 0, or 16 in a causal call");
ASSERT_FLAG(CAUSAL, "whether rows attend only to keys up to their own");
ASSERT_FLAG(RECENT, "whether a causal row's latest keys are in 16 bits");
static_assert(CAUSAL || !RECENT, "RECENT needs CAUSAL");
ASSERT_FLAG(PADDED, "whether some keys may be missing");
ASSERT_FLAG(LSE, "whether rows' log-sum-exp is written");
ASSERT_FLAG(SMOOTH_Q, "whether scores of Q's means are added");
ASSERT_FLAG(QUANTIZED_DENOMINATOR, "whether rows are divided by sums of quantised weights");

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
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (warp > WARPS) return;
    produce(arguments, key, value, heavy_key, heavy_value, key_tokens, value_tokens, shared, barriers);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer consumer{arguments, query_tokens, shared, barriers};
    consumer.warp = warp;
    consumer.lane = lane;
    consumer.quad = lane % 4;
    consumer.row = warp * 16 + lane / 4;
    consumer.run();
  }
}
