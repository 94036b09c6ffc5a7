// Sums over tokens and their squares, in the order of `transforms.sum_of_tokens`, and extrema. The threads of a block
// reduce 128 tokens at once: a thread has 8 channels, 16 bytes, of a few tokens.
#pragma once
#include "tokens.cuh"

DEVICE uint32 larger(uint32 x, uint32 y) {
  uint32 z;
  if (FLOAT16)
    asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else
    asm("max.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
DEVICE uint32 smaller(uint32 x, uint32 y) {
  uint32 z;
  if (FLOAT16)
    asm("min.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else
    asm("min.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Sum by a tree of halves.
template <int N>
DEVICE float sum_of_halves(const float (&x)[N]) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    float y[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) y[i] = __fadd_rn(x[i], x[i + N / 2]);
    return sum_of_halves<N / 2>(y);
  }
}

// Sum the tokens of a warp, in the tree's order.
DEVICE float sum_of_warp_tokens(float x) {
#pragma unroll
  for (int distance = 16; distance >= LANES; distance /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// Statistics of 128 tokens for each warp of a block, in shared memory.
template <int WARPS, bool SQUARES, bool EXTREMA>
struct Partial {
  static constexpr int ROWS_AT_ONCE = WARPS * ROWS;  // tokens that the block loads at once
  static constexpr int LOADS = 128 / ROWS_AT_ONCE;   // tokens of a thread
  float sums[WARPS][CHANNELS], squares[SQUARES ? WARPS : 1][CHANNELS];
  uint32 largest[EXTREMA ? WARPS : 1][CHANNELS / 2], smallest[EXTREMA ? WARPS : 1][CHANNELS / 2];
  uint32 rejected[EXTREMA ? WARPS : 1][CHANNELS / 2];  // ones where an element is not finite

  // Return the first token that the thread reduces; its next tokens follow ROWS_AT_ONCE apart.
  static DEVICE int first_token() { return threadIdx.x % 32 / LANES * WARPS + threadIdx.x / 32; }
};

// Statistics of channel `threadIdx.x` of 128 tokens.
struct Reduced {
  float sum, squares, largest, smallest;
  bool finite;
};

// Reduce WORDS of the four words that a thread has of each token, from number `first_word` on; `has` tells which tokens
// exist, by number. CAREFUL leaves out missing tokens and non-finite elements; otherwise all 128 tokens exist: return
// whether all elements of the warp are finite, or false if the sums are too large to tell.
template <bool CAREFUL, int WORDS, typename Has, int LOADS, int WARPS, bool SQUARES, bool EXTREMA>
DEVICE bool reduce_words(const uint32 (&x)[LOADS][WORDS], int first_word, Has has,
                         Partial<WARPS, SQUARES, EXTREMA>& partial) {
  static_assert(LOADS == Partial<WARPS, SQUARES, EXTREMA>::LOADS, "LOADS must be a thread's tokens");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    float first[LOADS], second[LOADS];
    uint32 largest, smallest, rejected = 0;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      uint32 pair = x[i][w], low = pair, high = pair;
      if (CAREFUL) {
        const uint32 bad = not_finite(pair), absent = has(i) ? bad : ~0u;
        rejected |= bad;
        pair &= ~bad;
        high = pair & ~absent | (EXPONENTS | 0x80008000) & absent;
        low = pair & ~absent | EXPONENTS & absent;
      }
      first[i] = first_of(pair), second[i] = second_of(pair);
      largest = i == 0 ? high : larger(largest, high);
      smallest = i == 0 ? low : smaller(smallest, low);
    }
    const int at = lane * 4 + first_word + w;
    auto sum = [&](const float (&y)[LOADS]) { return sum_of_warp_tokens(sum_of_halves(y)); };
    const float2 sums = make_float2(sum(first), sum(second));
    if (lane < LANES) reinterpret_cast<float2*>(partial.sums[warp])[at] = sums;
    if constexpr (SQUARES) {
      auto square = [](float y) {
        const float z = __fmul_rn(y, y);
        return CAREFUL && !is_finite(z) ? 0.0f : z;
      };
#pragma unroll
      for (int i = 0; i < LOADS; i++) first[i] = square(first[i]), second[i] = square(second[i]);
      const float2 squares = make_float2(sum(first), sum(second));
      if (lane < LANES) reinterpret_cast<float2*>(partial.squares[warp])[at] = squares;
      total += squares.x + squares.y;
    } else {
      total += sums.x + sums.y;
    }
    if constexpr (EXTREMA) {
#pragma unroll
      for (int distance = 16; distance >= LANES; distance /= 2) {
        largest = larger(largest, __shfl_xor_sync(~0u, largest, distance));
        smallest = smaller(smallest, __shfl_xor_sync(~0u, smallest, distance));
        if (CAREFUL) rejected |= __shfl_xor_sync(~0u, rejected, distance);
      }
      if (lane < LANES) {
        partial.largest[warp][at] = largest, partial.smallest[warp][at] = smallest;
        partial.rejected[warp][at] = rejected;
      }
    }
  }
  return is_finite(total);
}

template <int WARPS>
DEVICE float sum_of_warps(const float (&x)[WARPS][CHANNELS]) {
  float y[WARPS];
#pragma unroll
  for (int i = 0; i < WARPS; i++) y[i] = x[i][threadIdx.x];
  return sum_of_halves(y);
}

// Reduce 128 tokens; the reader is at the thread's first. All threads call, the first CHANNELS get the result.
template <typename AnyReader, int WARPS, bool SQUARES, bool EXTREMA>
DEVICE Reduced reduce_block(const AnyReader& reader, bool careful, Partial<WARPS, SQUARES, EXTREMA>& partial) {
  using Shape = Partial<WARPS, SQUARES, EXTREMA>;
  constexpr int LOADS = Shape::LOADS, APART = Shape::ROWS_AT_ONCE;
  auto has = [&](int number) { return reader.has(number * APART); };
  if (!careful) {
    uint32 x[LOADS][4];
#pragma unroll
    for (int i = 0; i < LOADS; i++) reader.load<false>(i * APART, reader.tokens_left > 0, x[i]);
    careful = __syncthreads_or(!reduce_words<false>(x, 0, has, partial));
  }
  if (careful) {
#pragma unroll 1
    for (int word = 0; word < 4; word++) {
      uint32 x[LOADS][1];
#pragma unroll
      for (int i = 0; i < LOADS; i++) x[i][0] = has(i) ? reader.load_word(i * APART, word) : 0;
      reduce_words<true>(x, word, has, partial);
    }
    __syncthreads();
  }
  const int channel = threadIdx.x;
  Reduced reduced = {};
  if (channel >= CHANNELS) return reduced;
  reduced.sum = sum_of_warps(partial.sums);
  if constexpr (SQUARES) reduced.squares = sum_of_warps(partial.squares);
  if constexpr (EXTREMA) {
    auto half = [&](const uint32* words) { return float_of(words[channel / 2] >> channel % 2 * 16 & 0xFFFF); };
    reduced.largest = half(partial.largest[0]), reduced.smallest = half(partial.smallest[0]);
    uint32 rejected = partial.rejected[0][channel / 2];
#pragma unroll
    for (int i = 1; i < WARPS; i++) {
      reduced.largest = fmaxf(reduced.largest, half(partial.largest[i]));
      reduced.smallest = fminf(reduced.smallest, half(partial.smallest[i]));
      rejected |= partial.rejected[i][channel / 2];
    }
    reduced.finite = !(rejected >> channel % 2 * 16 & 1);
  }
  return reduced;
}
