"""Heavy keys in `int8_forward` and `nvfp4_forward`: attended to in the caller's dtype, merged with the other keys."""

import triton
import triton.language as tl

from .launch import ON_AMD
from .scores import LOG2E, mask_scores


@triton.jit
def heavy_channel(place):
    """Return the channel of K at a place of `HeavyKeys.key` (`layout.heavy_order`)."""
    return place // 32 * 32 + place % 8 // 2 * 8 + place % 32 // 8 * 2 + place % 2


@triton.jit
def attend_heavy_keys(
    query,
    key,
    value,
    late,
    mask,
    row,
    token,
    q_len,
    kv_len,
    head_dim,
    causal_offset,
    softmax_scale,
    stride_token,
    stride_channel,
    mask_stride_row,
    mask_stride_column,
    mean_score,
    row_max,
    row_sum,
    denominator,
    acc,
    p_scale_log2,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    LATE: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Attend to heavy keys, and merge the results with the other keys' results by their maxima and sums.

    Args:
        query, mask: pointers to the caller's Q of a (batch, head), and its mask as in `mask_scores`.
        key, value, late: pointers to the `HeavyKeys` of a (batch, kv head), whose last LATE keys are late keys.
        row, token: indices of the rows in their sequence, and in Q, (rows,).
        q_len, kv_len, causal_offset: the sequence's, including its heavy keys.
        stride_token, stride_channel: strides of Q.
        mean_score: pointer to the products of the sequence's queries with K's mean, which heavy keys' scores contain
            and other keys' scores do not; None: no scores contain them.
        row_max, row_sum, denominator, acc, p_scale_log2: as in `merge_keys`.

    Returns:
        (row_max, row_sum, acc) over all keys.
    """
    # In float32 take few keys at once: each product is three products, whose operands take registers and shared memory.
    # At head_dim 256 the output takes as many registers, and the loop over the other keys would spill. Below 64
    # channels the assembler of CUDA 12.8 gives some products of all keys a wrong address in shared memory.
    # Triton 3.4 takes `max` and `min` of constants for tensors.
    WHOLE: tl.constexpr = (
        value.dtype.element_ty.primitive_bitwidth == 16
        and CHANNELS <= 128
        and V_CHANNELS <= 128
        and CHANNELS >= 64
        and V_CHANNELS >= 64
    )
    CHUNK: tl.constexpr = KEYS if WHOLE else 16
    WIDTH: tl.constexpr = CHANNELS if WHOLE else 32
    # In float32 at head_dim 256 that assembler has the same bug, so the tensor cores do not compute these products.
    WIDE: tl.constexpr = value.dtype.element_ty.primitive_bitwidth == 32 and (CHANNELS > 128 or V_CHANNELS > 128)
    THREEFOLD: tl.constexpr = "bf16x3" if ON_AMD else "tf32x3"
    PRECISION: tl.constexpr = "ieee" if WIDE else THREEFOLD
    for first in tl.range(0, KEYS, CHUNK, num_stages=1):
        column = first + tl.arange(0, CHUNK)
        x = _scores(
            query, key, token, row < q_len, column, stride_token, stride_channel, head_dim, CHANNELS, WIDTH, PRECISION
        )
        x *= softmax_scale * LOG2E
        if mean_score is not None:
            x -= tl.load(mean_score + row)[:, None] * (softmax_scale * LOG2E)
        late_scores = x
        if CAUSAL or RAGGED or MASK != "none":
            x = mask_scores(
                x, mask, row, column, q_len, kv_len, causal_offset, mask_stride_row, mask_stride_column, CAUSAL, MASK
            )
        if LATE > 0:
            # Rows that see a late key find, among the other keys, the first key that gave way to it.
            sees = tl.load(late + column % LATE)[None, :] <= row[:, None] + causal_offset
            x = tl.where(sees & (column >= KEYS - 2 * LATE)[None, :], float("-inf"), x)
            x = tl.where((column >= KEYS - LATE)[None, :], tl.where(sees, late_scores, float("-inf")), x)
        values = value + column[:, None] * V_CHANNELS + tl.arange(0, V_CHANNELS)[None, :]
        row_max, row_sum, denominator, acc = merge_keys(
            x, values, None, row_max, row_sum, denominator, acc, p_scale_log2, PRECISION
        )
    return row_max, row_sum, acc


@triton.jit
def merge_keys(x, values, counts, row_max, row_sum, denominator, acc, p_scale_log2, PRECISION: tl.constexpr):
    """Merge some keys in the caller's dtype with other keys; return (row_max, row_sum, denominator, acc) over all keys.

    Args:
        x: float32 (rows, keys) scores in base 2, -inf where masked.
        values: pointers to V, (keys, v_channels), to whose dtype P is rounded; read late, when registers are free.
        counts: which values are read (the rest count as 0); None: all.
        row_max, row_sum, denominator, acc: the other keys' maxima, sums of P before quantisation, denominators, and
            acc, 0 where the denominator is 0; P is 2 to the power of (score - row_max + p_scale_log2).
    """
    new_max = tl.maximum(row_max, tl.max(x, 1))
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(row_max - reference)
    p = tl.exp2(x - (reference - p_scale_log2)[:, None])
    keys_sum = tl.sum(p, 1)
    others = denominator * decay
    denominator = others + keys_sum
    positive = tl.where(denominator == 0.0, 1.0, denominator)
    # Divide by the sum's power of two first, so that V times P stays within float32's range. P's rounding stays the
    # same: it is exact for the largest weight, which may be nearly all of a row's weight.
    power = (positive.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    inverse = 1.0 / power
    v = tl.load(values) if counts is None else tl.load(values, mask=counts, other=0.0)
    p = (p * inverse[:, None]).to(v.dtype)
    acc = tl.dot(p, v, acc * (others * inverse)[:, None], input_precision=PRECISION)
    return new_max, row_sum * decay + keys_sum, denominator, acc * (power / positive)[:, None]


@triton.jit
def _scores(
    query,
    key,
    token,
    inside,
    column,
    stride_token,
    stride_channel,
    head_dim,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return Q·Kᵀ of some heavy keys, WIDTH channels at a time: float32 (rows, columns); `inside` rows are read."""
    x = tl.zeros((token.shape[0], column.shape[0]), tl.float32)
    base = query + token.to(tl.int64)[:, None] * stride_token
    for first in tl.range(0, CHANNELS, WIDTH, num_stages=1):
        place = first + tl.arange(0, WIDTH)
        channel = heavy_channel(place)
        at = base + channel.to(tl.int64)[None, :] * stride_channel
        q = tl.load(at, mask=inside[:, None] & (channel < head_dim)[None, :], other=0.0)
        k = tl.load(key + column[:, None] * CHANNELS + place[None, :])
        x = tl.dot(q, k.T, x, input_precision=PRECISION)
    return x
