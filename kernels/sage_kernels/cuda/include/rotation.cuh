// Rotate tokens of Q and K, as `transforms.rotate` does, without its factor NORM. The tensor cores transform over the
// low five bits of a channel's number: their products of 16-bit numbers with powers of two are exact. Additions
// transform over the other bits.
//
// A warp has a tile of 16 tokens. Lane 4g + t has, of rows g and g + 8, channels 8t to 8t + 7 of each SECTION: 16 bytes
// before the rotation, and after it. In PTX ISA, section "Matrix fragments for mma.m16n8k16", columns 2t, 2t + 1, 2t +
// 8 and 2t + 9 of A's row g or g + 8 are two of our words; channels may come in any order, if B has the same order.
// Columns 2t and 2t + 1 of C are our channels 8t + 2j and 8t + 2j + 1, for product number j.
#pragma once
#include "tokens.cuh"

constexpr int SECTION = 32, SECTIONS = CHANNELS / SECTION, TILE_ROWS = 2;
constexpr float NORM = CHANNELS == 128 ? 0.08838834764831845 : 0.125;  // 1/√CHANNELS

// A lane's 16-bit numbers of a tile's rows g and g + 8, two a word.
using TileWords = uint32[TILE_ROWS][SECTIONS][4];
using TileFloats = float[TILE_ROWS][SECTIONS][8];

// Load a lane's part of a tile: `reader` is at channel 8t of row g, and row g + 8 lies `apart` tokens behind.
template <bool WHOLE, typename AnyReader>
DEVICE void load_tile(AnyReader reader, int apart, int channels, TileWords& x) {
  const int channel = threadIdx.x % 4 * 8;
#pragma unroll
  for (int section = 0; section < SECTIONS; section++, reader.from += SECTION)
#pragma unroll
    for (int i = 0; i < TILE_ROWS; i++) {
      const bool exists = WHOLE || (reader.has(i * apart) && section * SECTION + channel < channels);
      reader.template load<true>(i * apart, exists, x[i][section]);
    }
}

// Multiply by B, whose words are `low` and `high`, and add c: rows g and g + 8 of the product.
DEVICE void multiply(const uint32 (&a)[4], uint32 low, uint32 high, const float (&c)[4], float (&d)[4]) {
#define MULTIPLY(FORMAT)                                                         \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." FORMAT "." FORMAT                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]))
  if constexpr (FLOAT16)
    MULTIPLY("f16");
  else
    MULTIPLY("bf16");
#undef MULTIPLY
}

// Rotate a tile: x times the factors, plus numbers already rotated in each section, which `start` sets for (section, y
// of row g, y of row g + 8).
//
// `factors` returns a section's factors of the lane's 8 channels, in 16 bits: powers of two with the rotation's signs.
template <typename Factors, typename Start>
DEVICE void rotate(const TileWords& x, Factors factors, TileFloats& y, Start start) {
  const int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
  // B's element of channel k = 8t + 2w + e (w: word, e: half) and column g of product j, which is channel
  // o = 8(g/2) + 2j + g%2, is k's factor, negative where k & o has an odd number of ones.
  const uint32 signs = (__popc(g / 2 & t) % 2 ? 0x80008000 : 0) ^ (g % 2 ? 0x80000000 : 0);
#pragma unroll
  for (int section = 0; section < SECTIONS; section++) {
    const uint4 loaded = factors(section);
    const uint32 b[4] = {loaded.x ^ signs, loaded.y ^ signs, loaded.z ^ signs, loaded.w ^ signs};
    start(section, y[0][section], y[1][section]);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float sum[4] = {y[0][section][2 * j], y[0][section][2 * j + 1], y[1][section][2 * j], y[1][section][2 * j + 1]};
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const uint32 a[4] = {x[0][section][w], x[1][section][w], x[0][section][w + 1], x[1][section][w + 1]};
        auto negated = [&](int word) { return b[word] ^ ((j & word) == 1 || (j & word) == 2 ? 0x80008000 : 0); };
        multiply(a, negated(w), negated(w + 1), sum, sum);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) y[i / 2][section][2 * j + i % 2] = sum[i];
    }
  }
#pragma unroll
  for (int distance = 1; distance < SECTIONS; distance *= 2)
#pragma unroll
    for (int section = 0; section < SECTIONS; section++)
      if (!(section & distance))
#pragma unroll
        for (int i = 0; i < TILE_ROWS * 8; i++) {
          float &first = y[i / 8][section][i % 8], &second = y[i / 8][section + distance][i % 8];
          const float difference = __fsub_rn(first, second);
          first = __fadd_rn(first, second);
          second = difference;
        }
}

// Return the largest magnitude of a lane's part of a row, or NaN.
DEVICE float largest_of(const float (&y)[SECTIONS][8]) {
  float largest[4] = {};
#pragma unroll
  for (int i = 0; i < SECTIONS * 8; i++) largest[i % 4] = larger_magnitude(largest[i % 4], y[i / 8][i % 8]);
  return larger_magnitude(larger_magnitude(largest[0], largest[1]), larger_magnitude(largest[2], largest[3]));
}

// Round a lane's part of a row to INT8, times `inverse`, to zeros if `inverse` is NaN: `put` gets a section's 8 codes,
// from its channel 8t on.
template <typename Put>
DEVICE void put_codes(const float (&y)[SECTIONS][8], float inverse, Put put) {
  const float factor = __fmul_rn(inverse, NORM);
  auto rounded = [&](float x) { return __float_as_uint(__fmaf_rn(x, factor, ROUNDER)); };
#pragma unroll
  for (int section = 0; section < SECTIONS; section++) {
    uint32 words[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* four = y[section] + 4 * i;
      words[i] = pack_bytes(rounded(four[0]), rounded(four[1]), rounded(four[2]), rounded(four[3]));
      words[i] = inverse == inverse ? words[i] : 0;
    }
    put(section, make_uint2(words[0], words[1]));
  }
}

// Rotate a lane's part of a tile of Q and round it to INT8; every SECTION floats, `factors` has a section's factors of
// the lane's 8 channels. `put` gets the number of a row, g or g + 8, a section, and its 8 codes. Return the scale of
// row g, or if t is odd of row g + 8.
template <typename Put>
DEVICE float rotate_query(const TileWords& x, const float* factors, Put put) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  TileFloats y;
  auto of_section = [&](int section) { return *reinterpret_cast<const uint4*>(factors + section * SECTION); };
  rotate(x, of_section, y, [](int, float (&of_first)[8], float (&of_second)[8]) {
#pragma unroll
    for (int c = 0; c < 8; c++) of_first[c] = of_second[c] = 0.0f;
  });
  float largest[TILE_ROWS];
#pragma unroll
  for (int i = 0; i < TILE_ROWS; i++) {
    largest[i] = largest_of(y[i]);
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
      largest[i] = larger_magnitude(largest[i], __shfl_xor_sync(~0u, largest[i], distance));
  }
  // A lane computes one token's scale for all the token's lanes.
  const float scale = int8_scale(__fmul_rn(t % 2 ? largest[1] : largest[0], NORM)), inverse = reciprocal(scale);
#pragma unroll
  for (int i = 0; i < TILE_ROWS; i++)
    put_codes(y[i], __shfl_sync(~0u, inverse, lane / 4 * 4 + i),
              [&](int section, uint2 codes) { put(i, section, codes); });
  return scale;
}
