// Find the spans of keys that exist (`operands.KeyPadding`): a block handles a batch element.
#include "parameters.cuh"

static_assert(THREADS == 1024, "THREADS must be 1024: a block handles a batch element");

extern "C" __global__ void __launch_bounds__(THREADS) find_spans(FIND_SPANS_PARAMETERS) {
  __shared__ int first, hole, end;
  const uint8* key_mask = arguments.key_mask + static_cast<int64>(blockIdx.x) * arguments.kv_len;
  if (threadIdx.x == 0) first = hole = arguments.kv_len, end = 0;
  __syncthreads();
  int thread_first = arguments.kv_len, thread_end = 0;
  for (int key = threadIdx.x; key < arguments.kv_len; key += THREADS)
    if (key_mask[key]) thread_first = min(thread_first, key), thread_end = key + 1;
  atomicMin(&first, thread_first);
  atomicMax(&end, thread_end);
  __syncthreads();
  for (int key = first + 1 + threadIdx.x; key < arguments.kv_len; key += THREADS)
    if (!key_mask[key]) {
      atomicMin(&hole, key);
      break;
    }
  __syncthreads();
  if (threadIdx.x == 0) {
    int* spans = arguments.spans + 3 * blockIdx.x;
    spans[0] = first, spans[1] = hole, spans[2] = end;
  }
}
