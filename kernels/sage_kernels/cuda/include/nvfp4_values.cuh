// Quantise V to NVFP4, transposed, given the statistics.
#pragma once
#include "nvfp4.cuh"
#include "nvfp4_heavy.cuh"
#include "raw_tokens.cuh"

struct SharedValue {
  alignas(16) uint2 codes[CHANNELS][9];  // 8, and a ninth to spread rows over the banks
  alignas(8) uint8 scales[CHANNELS][8];
};

// Quantise blocks of 128 tokens of V of one pair, transposed, from `first` to before `last`: a thread has 16 tokens of
// two channels.
DEVICE void quantize_values(const Tokens& tokens, const Statistics& s, const Operands& o, uint32 pair, uint32 first,
                            uint32 last, RawTokens& raw, SharedSearch& rows, SharedValue& shared) {
  const int channel = threadIdx.x % (CHANNELS / 2) * 2, part = threadIdx.x / (CHANNELS / 2);
  const uint32 batch = pair / s.kv_heads, head = pair % s.kv_heads;
  const Sequence of = tail_of(s, batch);
  last = min(last, of.blocks());
  if (PACKED && first >= last) return;
  Reader next =
      value_reader(tokens, PACKED ? 0 : batch, head, of.start + first * BLOCK, of.start + of.length, s.v_head_dim);
  uint32* thread_words =
      reinterpret_cast<uint32*>(raw.value_at(threadIdx.x / 32, 0)) + threadIdx.x % 32;  // of its tokens
  bring_values(next, raw);
  grid_dependency_wait();
  const float2 mean = *reinterpret_cast<const float2*>(s.value_mean + static_cast<int64>(pair) * CHANNELS + channel);
  float inverse = 1.0f;
  if (TENSOR_SCALE) least_power_of_two(s.value_tensor_amax[pair], inverse);
  const float shifts[2] = {__fmaf_rn(-mean.x, inverse, 0.0f), __fmaf_rn(-mean.y, inverse, 0.0f)};  // not -0
  const Search search{reinterpret_cast<const SearchRow*>(o.search), rows};
  load_search<false>(search.table, rows);
  const int chosen = chosen_at(s, pair, part * GROUP + threadIdx.x % GROUP);
#pragma unroll 1
  for (uint32 block = first; block < last; block++) {
    const int first_token = block * BLOCK + part * GROUP, tokens_left = of.length - first_token;
    wait_for_tokens();
    uint32 present = tokens_left >= GROUP ? 0xFFFF : (1 << max(tokens_left, 0)) - 1;  // tokens that exist, and count
    if constexpr (CHOICE || PADDED) {
      // A warp has the same tokens: each lane checks one.
      const int token = first_token + threadIdx.x % GROUP;
      const bool leaves = CHOICE && token == chosen;
      uint32 moved = CHOICE ? __ballot_sync(~0u, leaves) & present : 0;
      if (PADDED)
        present &=
            __ballot_sync(~0u, token < of.length && counts(s, batch, (leaves ? exchanged(token) : token) + FIRST_KEYS));
#pragma unroll 1
      for (; moved != 0 && channel < s.v_head_dim; moved &= moved - 1) {
        const int i = __ffs(moved) - 1;
        const uint16* from = read(tokens, batch, head, of, exchanged(first_token + i), channel, s.v_head_dim).from;
        thread_words[i * 32] = *reinterpret_cast<const uint32*>(from);
      }
    }
    uint32 words[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) words[i] = thread_words[i * 32];
    __syncwarp();
    if (block + 1 < last) bring_values(next, raw);
    float x[2][GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      // The factor is a power of two: this rounds like the difference from the mean.
      x[0][i] = __fmaf_rn(first_of(words[i]), inverse, shifts[0]);
      x[1][i] = __fmaf_rn(second_of(words[i]), inverse, shifts[1]);
    }
    if (present != 0xFFFF)
#pragma unroll
      for (int i = 0; i < GROUP; i++)
        if (!(present >> i & 1)) x[0][i] = x[1][i] = 0.0f;
    if (block != first) __syncthreads();  // until the previous block's codes have been read
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32 code;
      if constexpr (SEARCHED > 0) {
        uint32 halves[GROUP / 2];
#pragma unroll
        for (int n = 0; n < GROUP / 2; n++)
          halves[n] = pack_float16(x[i][n / 2 * 4 + n % 2], x[i][n / 2 * 4 + n % 2 + 2]);
        shared.codes[channel + i][part] = search_group<false>(halves, largest_half(halves), search, code);
      } else {
        shared.codes[channel + i][part] = quantize_group(x[i], largest_magnitude(x[i]), code);
      }
      shared.scales[channel + i][part] = code;
    }
    __syncthreads();
    const int row = threadIdx.x / 4, quarter = threadIdx.x % 4;
    const int64 of_head = first_of_head(pair, s.kv_heads, CHANNELS) + row;
    const int64 block_of_row = of_head * (o.kv_rows / BLOCK) + of.row / BLOCK + block;
    const uint2 low = shared.codes[row][2 * quarter], high = shared.codes[row][2 * quarter + 1];
    reinterpret_cast<uint4*>(o.value)[block_of_row * 4 + quarter] = make_uint4(low.x, low.y, high.x, high.y);
    if (quarter == 0)
      reinterpret_cast<uint2*>(o.value_scale)[block_of_row] = *reinterpret_cast<const uint2*>(shared.scales[row]);
  }
}
