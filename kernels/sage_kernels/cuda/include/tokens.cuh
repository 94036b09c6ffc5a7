// Read tokens of Q, K and V in 16 bits, and quantise tokens of Q to INT8. A thread has 8 channels of a token, 16 bytes.
//
// The host provides `Tokens`, which is Q, K or V: channels are contiguous, strides count elements.
#pragma once
#include "numbers.cuh"
#include "parameters.cuh"

static_assert(CHANNELS == 64 || CHANNELS == 128, "CHANNELS of an operand's row must be 64 or 128");
ASSERT_FLAG(FLOAT16, "whether Q, K, V and the output are in float16, or in bfloat16");
static_assert(LARGEST_INT8 == 127.0, "LARGEST_INT8 must be 127: `to_int8` does not saturate");

constexpr int LANES = CHANNELS / 8;  // that hold a token
constexpr int ROWS = 32 / LANES;     // tokens that a warp loads at once
constexpr float SMALLEST_NORMAL = 1.1754943508222875e-38f, ONE_127TH = 1.0 / LARGEST_INT8;
// float32 numbers around 1.5·2²³ are integers: adding ROUNDER rounds to nearest even, and leaves the integer in the low
// bits.
constexpr float ROUNDER = 12582912.0f;

// ---- 16-bit numbers, two in a word ----

DEVICE float float_of(uint32 x) {
  float y;
  if (FLOAT16)
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(static_cast<uint16>(x)));
  else
    y = __uint_as_float(x << 16);
  return y;
}
DEVICE float first_of(uint32 x) { return float_of(x & 0xFFFF); }
DEVICE float second_of(uint32 x) { return FLOAT16 ? float_of(x >> 16) : __uint_as_float(x & 0xFFFF0000); }

DEVICE float channel_of(const uint32 (&x)[4], int i) { return i % 2 ? second_of(x[i / 2]) : first_of(x[i / 2]); }

// ---- Reading ----

// Reads eight channels of tokens from a first token on; zeros where none exist.
struct Reader {
  const uint16* from;
  int64 stride;
  int tokens_left;

  DEVICE Reader(const Tokens& x, uint32 batch, uint32 head, int token, int tokens, int channel, int channels)
      : from(x.first + batch * x.batch_stride + head * x.head_stride + token * x.token_stride + channel),
        stride(x.token_stride),
        tokens_left(channel < channels ? tokens - token : 0) {}

  DEVICE bool has(int number) const { return number < tokens_left; }

  DEVICE void skip(int tokens) {
    from += tokens * stride;
    tokens_left -= tokens;
  }

  // Load token `number`, from `channels` behind the reader's channel on; if LAST, nobody reads it again.
  template <bool LAST>
  DEVICE void load(int number, bool exists, uint32 (&x)[4], int channels = 0) const {
    const uint4* at = reinterpret_cast<const uint4*>(from + number * stride + channels);
    const uint4 y = !exists ? make_uint4(0, 0, 0, 0) : LAST ? __ldcs(at) : *at;
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }

  // Return one of the four words of token `number`, which exists.
  DEVICE uint32 load_word(int number, int word) const {
    return reinterpret_cast<const uint32*>(from + number * stride)[word];
  }
};

// ---- Numbers that are not finite ----

constexpr uint32 EXPONENTS = FLOAT16 ? 0x7C007C00 : 0x7F807F80,
                 LOWEST_EXPONENT_BITS = FLOAT16 ? 0x04000400 : 0x00800080;

DEVICE bool is_finite(float x) { return fabsf(x) < INFINITE; }

// Return ones in the halves that are infinite or NaN.
DEVICE uint32 not_finite(uint32 x) { return (((x & EXPONENTS) + LOWEST_EXPONENT_BITS) >> 15 & 0x00010001) * 0xFFFF; }

// ---- INT8 ----

DEVICE float reciprocal(float scale) { return scale < SMALLEST_NORMAL ? 0.0f : __frcp_rn(scale); }

// Return the larger magnitude; NaN if either is NaN.
DEVICE float larger_magnitude(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(fabsf(y)));
  return z;
}

// Return the scale of tokens with this largest magnitude; NaN unless it is finite.
DEVICE float int8_scale(float largest) {
  return largest < INFINITE ? __fmul_rn(largest, ONE_127TH) : __int_as_float(0x7FC00000);
}

// Return the lowest bytes of four words; the first is in the lowest byte.
DEVICE uint32 pack_bytes(uint32 a, uint32 b, uint32 c, uint32 d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Round four numbers to INT8; the first is in the lowest byte.
DEVICE uint32 to_int8(float a, float b, float c, float d) {
  auto rounded = [](float x) { return __float_as_uint(__fadd_rn(x, ROUNDER)); };
  return pack_bytes(rounded(a), rounded(b), rounded(c), rounded(d));
}

// Return the codes of 8 channels times `inverse`; zeros unless `keep`.
DEVICE uint2 codes_of(const float (&x)[8], float inverse, bool keep) {
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] = __fmul_rn(x[i], inverse);
  return keep ? make_uint2(to_int8(y[0], y[1], y[2], y[3]), to_int8(y[4], y[5], y[6], y[7])) : make_uint2(0, 0);
}

// Quantise the tokens of a warp's N loads: for each load's number, one thread puts the scale, all threads put the
// codes.
template <int N, typename PutScale, typename PutCodes>
DEVICE void quantize_tokens(const uint32 (&x)[N][4], PutScale put_scale, PutCodes put_codes) {
  const int lane = threadIdx.x % 32;
  // 16-bit magnitudes order like integers; a word has two tokens' magnitudes.
  uint32 largest[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    auto of_token = [](const uint32(&y)[4]) {
      constexpr uint32 MAGNITUDES = 0x7FFF7FFF;
      return __vmaxu2(__vmaxu2(y[0] & MAGNITUDES, y[1] & MAGNITUDES), __vmaxu2(y[2] & MAGNITUDES, y[3] & MAGNITUDES));
    };
    const uint32 even = of_token(x[2 * i]), odd = of_token(x[2 * i + 1]);
    largest[i] = __vmaxu2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2)
      largest[i] = __vmaxu2(largest[i], __shfl_xor_sync(~0u, largest[i], distance));
  }
  // A lane computes one token's scale for all the token's lanes.
  const int number = lane % N;
  uint32 magnitudes = largest[0];
#pragma unroll
  for (int i = 1; i < N / 2; i++)
    if (number / 2 == i) magnitudes = largest[i];
  const float scale = int8_scale(float_of(magnitudes >> number % 2 * 16 & 0xFFFF));
  const float inverse = reciprocal(scale);
  if (lane % LANES < N) put_scale(number, scale);
#pragma unroll
  for (int i = 0; i < N; i++) {
    float y[8];
#pragma unroll
    for (int c = 0; c < 8; c++) y[c] = channel_of(x[i], c);
    const float of_token = __shfl_sync(~0u, inverse, lane / LANES * LANES + i);
    put_codes(i, codes_of(y, of_token, of_token == of_token));
  }
}
