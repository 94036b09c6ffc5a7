"""The latest keys of causal rows: attended to in the caller's dtype, and merged with the sums of the other keys."""

import triton
import triton.language as tl

from .scores import LOG2E, base_2
from .tokens import tail_source

WIDTH = tl.constexpr(32)  # channels of Q and K that are multiplied at once, with an output that fills the registers


@triton.jit
def attend_recent_keys(
    query,
    key,
    value,
    late,
    mask,
    row,
    token,
    kv_start,
    q_len,
    kv_len,
    head_dim,
    v_head_dim,
    causal_offset,
    softmax_scale,
    mean_score,
    query_stride_token,
    query_stride_channel,
    key_stride_token,
    key_stride_channel,
    value_stride_token,
    value_stride_channel,
    mask_stride_row,
    mask_stride_column,
    row_max,
    total,
    divisor,
    output,
    p_scale_log2,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    FIRST: tl.constexpr,
    LATE: tl.constexpr,
    MASK: tl.constexpr,
):
    """Attend to the KEYS latest keys of each row that are not heavy, as two parts of a row are merged.

    Each row has keys of its own, so that their scores are sums of products, in float32, and no matrix product.

    Args:
        query, key, value, mask: pointers to the caller's Q, K and V of a (batch, head), and its mask as in
            `mask_scores`.
        row, token: indices of the rows in their sequence, and in Q, (rows,).
        late: as in `attend_heavy_keys`; in place of such a key a row attends to the first key that gave way to it.
        kv_start: index in K of the sequence's first key.
        q_len, kv_len, causal_offset: of the sequence, which begins with FIRST keys that are heavy, or gave way.
        mean_score: the rows' products with K's mean, which the other scores are without, (rows,).
        row_max, total, divisor, output: the others' maxima, sums of P before quantisation, what rows were divided by,
            and their output, 0 where the divisor is; P is 2 to the power of (score - row_max + p_scale_log2).

    Returns:
        (row_max, total, divisor, output): of all these keys.
    """
    v_channel = tl.arange(0, V_CHANNELS)
    query += token.to(tl.int64)[:, None] * query_stride_token
    for age in tl.range(0, KEYS, num_stages=1):
        column = row + causal_offset - age
        exists = (row < q_len) & (column >= FIRST) & (column < kv_len)
        source = column
        if LATE > 0:
            source = FIRST + tail_source(tl.maximum(column - FIRST, 0), late, 0, FIRST, LATE)
        key_token = (kv_start + source).to(tl.int64)[:, None]
        x = -mean_score
        for first in tl.range(0, CHANNELS, WIDTH, num_stages=1):
            channel = first + tl.arange(0, WIDTH)
            inside = exists[:, None] & (channel < head_dim)[None, :]
            channel = channel.to(tl.int64)[None, :]
            q = tl.load(query + channel * query_stride_channel, mask=inside, other=0.0).to(tl.float32)
            k = tl.load(key + key_token * key_stride_token + channel * key_stride_channel, mask=inside, other=0.0)
            x += tl.sum(q * k.to(tl.float32), 1)
        x *= softmax_scale * LOG2E
        if MASK == "bool" or MASK == "additive":
            at = mask + row.to(tl.int64) * mask_stride_row + column.to(tl.int64) * mask_stride_column
            if MASK == "bool":
                exists = exists & (tl.load(at, mask=exists, other=0) != 0)
            else:
                x += base_2(tl.load(at, mask=exists, other=float("-inf")))
        x = tl.where(exists, x, float("-inf"))
        new_max = tl.maximum(row_max, x)
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - reference)
        p = tl.exp2(x - (reference - p_scale_log2))
        others = divisor * decay
        divisor = others + p
        inverse = 1.0 / tl.where(divisor == 0.0, 1.0, divisor)
        at = value + key_token * value_stride_token + v_channel.to(tl.int64)[None, :] * value_stride_channel
        v = tl.load(at, mask=exists[:, None] & (v_channel < v_head_dim)[None, :], other=0.0).to(tl.float32)
        output = output * (others * inverse)[:, None] + (p * inverse)[:, None] * v
        row_max, total = new_max, total * decay + p
    return row_max, total, divisor, output
