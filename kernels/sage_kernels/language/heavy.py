"""Heavy keys in both forward kernels: attended to in the caller's dtype, and merged with the sums of the other keys."""

import triton
import triton.language as tl


@triton.jit
def heavy_channel(place):
    """Return the channel of K at a place of `HeavyKeys.key` (`layout.heavy_order`)."""
    return place // 32 * 32 + place % 8 // 2 * 8 + place % 32 // 8 * 2 + place % 2


@triton.jit
def heavy_scores(
    query,
    key,
    token,
    inside,
    stride_token,
    stride_channel,
    head_dim,
    scale,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return the scores of heavy keys, times `scale`: float32 (rows, KEYS).

    Args:
        query: pointer to the caller's Q of a (batch, head).
        key: pointer to `HeavyKeys.key` of a (batch, kv head), which has CHANNELS channels.
        token: the rows' indices in Q, (rows,); those that are not `inside` are not read.
    """
    # A part of Q and K in shared memory has 256 bytes a token, so that both fit at every head_dim.
    WIDTH: tl.constexpr = min(CHANNELS, 1024 // query.dtype.element_ty.primitive_bitwidth)
    x = tl.zeros((token.shape[0], KEYS), tl.float32)
    base = query + token.to(tl.int64)[:, None] * stride_token
    for part in tl.static_range(CHANNELS // WIDTH):
        place = part * WIDTH + tl.arange(0, WIDTH)
        channel = heavy_channel(place)
        at = base + channel.to(tl.int64)[None, :] * stride_channel
        q = tl.load(at, mask=inside[:, None] & (channel < head_dim)[None, :], other=0.0)
        k = tl.load(key + tl.arange(0, KEYS)[:, None] * CHANNELS + place[None, :])
        x = tl.dot(q, k.T, x, input_precision="tf32x3")
    return x * scale


@triton.jit
def merge_heavy_keys(
    x,
    value,
    row_max,
    total,
    divisor,
    output,
    p_scale_log2,
    V_CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend to heavy keys beside others, as two parts of a row are merged by their maxima and sums.

    Args:
        x: their scores in base 2, -inf where masked; float32 (rows, KEYS).
        value: pointer to `HeavyKeys.value` of a (batch, kv head).
        row_max, total, divisor, output: the others' maxima, sums of P before quantisation, what rows were divided by,
            and their output, 0 where the divisor is; P is 2 to the power of (score - row_max + p_scale_log2).

    Returns:
        (row_max, total, output): of all keys.
    """
    new_max = tl.maximum(row_max, tl.max(x, 1))
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - reference)
    p = tl.exp2(x - (reference - p_scale_log2)[:, None])
    heavy_sum = tl.sum(p, 1)
    others = divisor * decay
    divisor = others + heavy_sum
    positive = tl.where(divisor == 0.0, 1.0, divisor)
    # Divide by the sum's power of two first, lest V times P leave float32's range. P's rounding stays the same: it is
    # exact for the largest weight, which may hold nearly all of a row.
    power = (positive.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    inverse = 1.0 / power
    v = tl.load(value + tl.arange(0, KEYS)[:, None] * V_CHANNELS + tl.arange(0, V_CHANNELS)[None, :])
    p = (p * inverse[:, None]).to(v.dtype)
    output = tl.dot(p, v, output * (others * inverse)[:, None], input_precision="tf32x3")
    return new_max, total * decay + heavy_sum, output * (power / positive)[:, None]
