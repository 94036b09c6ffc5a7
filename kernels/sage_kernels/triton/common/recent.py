"""The latest keys of causal rows: attended to in the caller's dtype, and merged with the sums of the other keys."""

import triton
import triton.language as tl

from .heavy import merge_keys
from .launch import ON_AMD
from .scores import LOG2E, mask_scores
from .tokens import tail_source


@triton.jit
def attend_recent_keys(
    query,
    key,
    value,
    key_mask,
    late,
    mask,
    row,
    token,
    start,
    end,
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
    row_sum,
    denominator,
    acc,
    p_scale_log2,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,
    LATE: tl.constexpr,
    MASK: tl.constexpr,
):
    """Attend to keys start…end - 1 that a causal row sees, BLOCK_N at once, and merge them with the other keys.

    Args:
        query, key, value, mask: pointers to the caller's Q, K and V of a (batch, head), and its mask as in
            `mask_scores`.
        key_mask: pointer to the flags of keys that count in any row of the batch element; not read without a mask.
        late: as in `attend_heavy_keys`; in place of such a key a row attends to the first key that gave way to it.
        row, token: indices of the rows in their sequence, and in Q, (rows,).
        start, end: positions among the sequence's keys, which begin with FIRST keys that are heavy or gave way; FIRST ≤
            start.
        kv_start: index in K of the sequence's first key.
        q_len, kv_len, causal_offset: the sequence's.
        mean_score: the rows' products with K's mean, which the other scores lack, (rows,).
        row_max, row_sum, denominator, acc, p_scale_log2: as in `merge_keys`.

    Returns:
        (row_max, row_sum, denominator, acc) over all keys.
    """
    WIDTH: tl.constexpr = CHANNELS if BLOCK_N > 16 else 32
    WIDE: tl.constexpr = value.dtype.element_ty.primitive_bitwidth == 32 and (CHANNELS > 128 or V_CHANNELS > 128)
    THREEFOLD: tl.constexpr = "bf16x3" if ON_AMD else "tf32x3"
    PRECISION: tl.constexpr = "ieee" if WIDE else THREEFOLD
    v_channel = tl.arange(0, V_CHANNELS)
    query += token.to(tl.int64)[:, None] * query_stride_token
    for first in tl.range(start, end, BLOCK_N, num_stages=1):
        column = first + tl.arange(0, BLOCK_N)
        counts = column < end
        if MASK == "bool" or MASK == "additive":
            counts = counts & (tl.load(key_mask + column, mask=counts, other=0) != 0)
        source = column
        if LATE > 0:
            source = FIRST + tail_source(column - FIRST, late, 0, FIRST, LATE)
        key_token = (kv_start + source).to(tl.int64)
        x = tl.zeros((row.shape[0], BLOCK_N), tl.float32)
        for part in tl.range(0, CHANNELS, WIDTH, num_stages=1):
            channel = part + tl.arange(0, WIDTH)
            inside = (channel < head_dim)[None, :]
            channel = channel.to(tl.int64)[None, :]
            q = tl.load(query + channel * query_stride_channel, mask=(row < q_len)[:, None] & inside, other=0.0)
            at = key + key_token[:, None] * key_stride_token + channel * key_stride_channel
            k = tl.load(at, mask=counts[:, None] & inside, other=0.0)
            x = tl.dot(q, k.T, x, input_precision=PRECISION)
        x = (x - mean_score[:, None]) * (softmax_scale * LOG2E)
        x = mask_scores(
            x, mask, row, column, q_len, kv_len, causal_offset, mask_stride_row, mask_stride_column, True, MASK
        )
        values = value + key_token[:, None] * value_stride_token
        values += v_channel.to(tl.int64)[None, :] * value_stride_channel
        v_counts = counts[:, None] & (v_channel < v_head_dim)[None, :]
        row_max, row_sum, denominator, acc = merge_keys(
            x, values, v_counts, row_max, row_sum, denominator, acc, p_scale_log2, PRECISION
        )
    return row_max, row_sum, denominator, acc
