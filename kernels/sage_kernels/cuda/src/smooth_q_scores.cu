// Scores of Q's means: each block's mean of Q times K. Smoothing Q removes them, `nvfp4_forward.cu` adds them back.
//
// The tensor cores multiply the caller's K, in 16 bits, by each mean in two 16-bit parts, whose sum has an error of
// 2⁻¹⁷ of the mean in bfloat16 and 2⁻²² in float16; the product with K's mean is subtracted afterwards. A warp holds
// the keys of 32 places of a tile in registers, and multiplies them by all means, 16 at a time.
#include "mma.cuh"
#include "parameters.cuh"
#include "tokens.cuh"

ASSERT_FLAG(CHOICE, "whether heavy keys are chosen, or the first keys");
static_assert(BLOCK == 128 && THREADS == 128, "THREADS must be 4 warps, each with 32 keys of a BLOCK");

constexpr int SECTIONS = CHANNELS / 32;  // a thread has 8 channels of each
constexpr int MEANS = 16, KEY_BLOCKS = 4;

extern "C" __global__ void __launch_bounds__(THREADS) smooth_q_scores(SMOOTH_Q_SCORES_PARAMETERS) {
  const auto& a = arguments;
  const int tiles = a.kv_rows / BLOCK, tile = blockIdx.x % tiles, pair = blockIdx.x / tiles;
  const int sequence = pair / a.q_heads, head = pair % a.q_heads, batch = a.first_sequence + sequence;
  const int kv_head = head / (a.q_heads / a.kv_heads), warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            quad = lane % 4;
  const int64 kv_pair = static_cast<int64>(batch) * a.kv_heads + kv_head;
  // The first of the warp's 32 keys; `token` is the key that a place holds.
  const int first_key = tile * BLOCK + warp * 32;
  const uint16* keys = key.first + batch * key.batch_stride + kv_head * key.head_stride + 8 * quad;
  uint32 k[KEY_BLOCKS][SECTIONS][4];
#pragma unroll
  for (int block = 0; block < KEY_BLOCKS; block++) {
    const int place = lane / 4, token = first_key + block * 2 + place / 2 * 8 + place % 2;
    int source = token;  // or, if this key is heavy, the key that gave way to it
    if (CHOICE && a.chosen[kv_pair * a.places + token % a.places] == token + a.first_keys)
      source = token % a.places - a.places;
#pragma unroll
    for (int section = 0; section < SECTIONS; section++) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (token < a.kv_len && section * 32 + 8 * quad < a.head_dim)
        x = *reinterpret_cast<const uint4*>(keys + source * key.token_stride + section * 32);
      k[block][section][0] = x.x, k[block][section][1] = x.y, k[block][section][2] = x.z, k[block][section][3] = x.w;
    }
  }
  const float* key_mean = a.key_mean + kv_pair * a.key_mean_channels + 8 * quad;
  const float key_scale = 1.0f / a.key_tensor_scale[kv_pair * tiles + tile];
  const int64 first_row = (static_cast<int64>(batch) * a.q_heads + head) * a.q_blocks + a.first_block;
  float* into = a.delta + static_cast<int64>(pair) * a.delta_blocks * a.kv_rows + first_key + 2 * quad;
#pragma unroll 1
  for (int first = 0; first < a.blocks; first += MEANS) {
    const int mean = first + lane / 4;
    float scores[KEY_BLOCKS][4] = {}, shifts[2] = {};
#pragma unroll
    for (int section = 0; section < SECTIONS; section++) {
      uint32 high[2][4], low[2][4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float* from = a.query_mean + (first_row + mean + 8 * r) * CHANNELS + section * 32 + 8 * quad;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float2 x = mean + 8 * r < a.blocks ? __ldg(reinterpret_cast<const float2*>(from) + i) : float2{};
          high[r][i] = pack_16bit<FLOAT16>(x.x, x.y);
          const float y[2] = {first_of(high[r][i]), second_of(high[r][i])};
          low[r][i] = pack_16bit<FLOAT16>(x.x - y[0], x.y - y[1]);
          const int channel = section * 32 + 2 * i;
          if (channel + 8 * quad < a.key_mean_channels) {
            shifts[r] = __fmaf_rn(y[0] + first_of(low[r][i]), __ldg(key_mean + channel), shifts[r]);
            shifts[r] = __fmaf_rn(y[1] + second_of(low[r][i]), __ldg(key_mean + channel + 1), shifts[r]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32 left[2][4] = {{high[0][i], high[1][i], high[0][i + 1], high[1][i + 1]},
                                   {low[0][i], low[1][i], low[0][i + 1], low[1][i + 1]}};
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
          for (int block = 0; block < KEY_BLOCKS; block++)
            add_16bit_product<FLOAT16>(scores[block], left[part], k[block][section][i], k[block][section][i + 1]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = mean + 8 * r;
      const float shift = sum_of_quad(shifts[r]);
      if (row >= a.blocks) continue;
      const float factor = key_scale / a.query_tensor_scale[first_row + row];
#pragma unroll
      for (int block = 0; block < KEY_BLOCKS; block++) {
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int place = 2 * quad + i, token = first_key + block * 2 + place / 2 * 8 + place % 2;
          y[i] = token < a.kv_len ? (scores[block][2 * r + i] - shift) * factor : 0.0f;
        }
        *reinterpret_cast<float2*>(into + static_cast<int64>(row) * a.kv_rows + 8 * block) = make_float2(y[0], y[1]);
      }
    }
  }
}
