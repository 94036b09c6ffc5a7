"""Weights P of the backward pass, from INT8 scores and the forward's LSE."""

import triton
import triton.language as tl


@triton.jit
def weights_of_keys(s, k_scale, q_scale, lse):
    """Return P (keys, queries) of INT8 scores; k_scale (blocks of 64 keys, 4 threads), q_scale and lse (queries,)."""
    BLOCKS: tl.constexpr = k_scale.shape[0]
    by_thread = tl.reshape(s, (BLOCKS, s.shape[0] // 8 // BLOCKS, 4, 2, s.shape[1])).to(tl.float32)
    scale = k_scale[:, :, None] * q_scale[None, None, :]
    x = by_thread * scale[:, None, :, None, :] - lse[None, None, None, None, :]
    return tl.reshape(tl.exp2(x), (s.shape[0], s.shape[1]))


@triton.jit
def weights_of_queries(s, q_scale, k_scale, lse):
    """Return P (queries, keys) of INT8 scores; q_scale and lse (queries,), k_scale (blocks of 64 keys, 4 threads)."""
    BLOCKS: tl.constexpr = k_scale.shape[0]
    by_thread = tl.reshape(s, (s.shape[0], BLOCKS, s.shape[1] // 8 // BLOCKS, 4, 2)).to(tl.float32)
    scale = q_scale[:, None, None] * k_scale[None, :, :]
    p = tl.exp2(by_thread * scale[:, :, None, :, None] - lse[:, None, None, None, None])
    return tl.reshape(p, (s.shape[0], s.shape[1]))
