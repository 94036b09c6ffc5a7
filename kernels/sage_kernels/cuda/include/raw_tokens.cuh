// Load 128 tokens of Q, K or V to shared memory while the previous block is quantised. Each warp loads its own threads'
// tokens.
#pragma once
#include "tokens.cuh"

constexpr int RAW_WARPS = 128 * CHANNELS / 32 / 32;  // 32 elements a thread
constexpr int TOKEN_THREADS = CHANNELS / 32;         // that have a token of Q or K
constexpr int WARP_TOKENS = 32 / TOKEN_THREADS;      // tokens of Q or K that a warp has

// The tokens of all warps, in parts of 16 bytes: 8 channels of a token.
struct RawTokens {
  // For Q and K: each thread's four parts by number; parts of a token lie in different banks.
  uint4 parts[RAW_WARPS][4][32 + 2];

  // Return the address of part `number` of a warp's token.
  DEVICE uint4* at(int warp, int token, int number) {
    return &parts[warp][number % 4][token * TOKEN_THREADS + number / 4];
  }
  // Return the address of 64 channels, 8 parts, of token `token` of a warp's 16 tokens of V.
  DEVICE uint4* value_at(int warp, int token) { return &parts[warp][0][0] + token * 8; }
};

// Copy 16 bytes to shared memory, or zeros.
DEVICE void copy_part(uint4* into, const uint16* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(into)), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}

// Return a lane's reader of a warp's tokens of Q or K, in the block from `first` on, before `end`.
DEVICE Reader token_reader(const Tokens& x, uint32 batch, uint32 head, int first, int end, int channels) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  return Reader(x, batch, head, first + warp * WARP_TOKENS + lane / LANES, end, lane % LANES * 8, channels);
}
// Load the reader's tokens, and move it to the next block.
DEVICE void bring_tokens(Reader& reader, RawTokens& raw) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < WARP_TOKENS; i += ROWS)
    copy_part(raw.at(warp, lane / LANES + i, lane % LANES), reader.from + i * reader.stride, reader.has(i));
  reader.skip(128);
}

// Return a lane's reader of 64 channels of a warp's 16 tokens of V.
DEVICE Reader value_reader(const Tokens& x, uint32 batch, uint32 head, int first, int end, int channels) {
  constexpr int SHARERS = CHANNELS / 64;  // warps that have the same tokens
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  return Reader(x, batch, head, first + warp / SHARERS * 16 + lane / 8, end, warp % SHARERS * 64 + lane % 8 * 8,
                channels);
}
DEVICE void bring_values(Reader& reader, RawTokens& raw) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 16; i += 4)
    copy_part(raw.value_at(warp, lane / 8 + i) + lane % 8, reader.from + i * reader.stride, reader.has(i));
  reader.skip(128);
}

// Wait until the warp's tokens are loaded.
DEVICE void wait_for_tokens() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// Reads eight channels of loaded tokens, of all warps.
struct RawReader {
  const uint4* from;
  int tokens_left;

  // Start at token `token` of the block, which has `tokens`; the next tokens lie multiples of WARP_TOKENS apart.
  DEVICE RawReader(RawTokens& raw, int token, int tokens)
      : from(raw.at(token / WARP_TOKENS, token % WARP_TOKENS, threadIdx.x % 32 % LANES)), tokens_left(tokens - token) {}

  DEVICE bool has(int number) const { return number < tokens_left; }

  template <bool LAST>
  DEVICE void load(int number, bool, uint32 (&x)[4]) const {
    const uint4 y = part(number);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
  DEVICE uint32 load_word(int number, int word) const { return reinterpret_cast<const uint32*>(&part(number))[word]; }

 private:
  DEVICE const uint4& part(int number) const {
    return from[number / WARP_TOKENS * (sizeof(RawTokens::parts[0]) / sizeof(uint4))];
  }
};
