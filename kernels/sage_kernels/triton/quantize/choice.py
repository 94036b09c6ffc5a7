"""Choice of heavy keys, by `transforms.heavy_places` and `late_keys`, for the kernels that compute K's statistics."""

import triton
import triton.language as tl

from ...spec import transforms
from ...spec.layout import BLOCK
from ..common.tokens import load_tokens

BLOCK_ROWS = tl.constexpr(BLOCK)
HEAVY_QUERIES = tl.constexpr(transforms.HEAVY_QUERIES)
HEAVY_MARGIN = tl.constexpr(transforms.HEAVY_MARGIN)
NO_KEY = tl.constexpr(transforms.NO_KEY)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def mean_query(
    query, q_len, group, channels, stride_head, stride_token, stride_channel, CHANNELS: tl.constexpr, LATE: tl.constexpr
):
    """Return the mean query by which heavy keys are found: float32 (CHANNELS,), 0 without a query.

    `query` points to the sequence's first token in the first head that shares the head of K. With LATE, keys are late
    keys, chosen by the later half of the queries.
    """
    if LATE:
        query += tl.cast(q_len // 2, tl.int64) * stride_token
        q_len -= q_len // 2
    rows = tl.cast(q_len, tl.int64) * group
    step = tl.maximum(tl.cdiv(rows, HEAVY_QUERIES), 1)
    q_len = tl.maximum(q_len, 1)
    row, channel = tl.arange(0, HEAVY_QUERIES) * step, tl.arange(0, CHANNELS)
    at = query + (row // q_len * stride_head + row % q_len * stride_token)[:, None]
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    x = tl.load(at + channel.to(tl.int64)[None, :] * stride_channel, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(tl.where(is_finite(x), x, 0.0), 0) / tl.maximum(tl.cdiv(rows, step), 1).to(tl.float32)


@triton.jit
def write_scores(
    scores,
    mean,
    x,
    key_mask,
    start,
    first,
    length,
    channels,
    stride_token,
    stride_channel,
    CHANNELS: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
):
    """Write products of 128 tokens of K, from `first` on, with the mean query, -inf for tokens that do not count.

    A product counts by its magnitude where `transforms.heavy_places` says so.

    Args:
        scores: pointer to the first token's score.
        mean: the result of `mean_query`, times the softmax scale.
        x, key_mask, start, length, channels, stride_token, stride_channel: K's, as in `load_tokens`.
    """
    channel = tl.arange(0, CHANNELS)
    for half in tl.static_range(2):
        row = half * (BLOCK_ROWS // 2) + tl.arange(0, BLOCK_ROWS // 2)
        tile, counts = load_tokens(
            x, key_mask, start, first + row, length, channel, channels, stride_token, stride_channel, HAS_KEY_MASK
        )
        score = tl.sum(tl.where(is_finite(tile), tile, 0.0) * mean[None, :], 1)
        exists = counts & is_finite(score)
        magnitude = tl.reshape(tl.where(exists, tl.abs(score), 0.0), (8, 4, 2))
        of_scale = tl.sum(tl.sum(magnitude, 2), 0)
        is_loud = tl.reshape(magnitude > of_scale[None, :, None] * 0.5, (BLOCK_ROWS // 2,))
        score = tl.where(is_loud, tl.abs(score), score)
        tl.store(scores + row, tl.where(exists, score, float("-inf")))


@triton.jit
def choose_keys(scores, length, FIRST: tl.constexpr, PLACES: tl.constexpr, LATE: tl.constexpr):
    """Return the keys to which the last PLACES of the FIRST keys give way: int32 (PLACES,).

    `scores` points to the scores of all keys. The result for a key that stays is its own number, or NO_KEY with LATE.
    """
    place, row = tl.arange(0, PLACES), tl.arange(0, 1024 // PLACES)
    scores += FIRST - PLACES
    length -= FIRST - PLACES
    place_score = tl.load(scores + place, mask=place < length, other=float("-inf"))
    largest, chosen = place_score + HEAVY_MARGIN, place
    for first in range(PLACES, length, 1024):
        token = first + row[:, None] * PLACES + place[None, :]
        others = tl.load(scores + token, mask=token < length, other=float("-inf"))
        heaviest, at = tl.max(others, 0, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.where(heaviest > largest, first + at * PLACES + place, chosen)
        largest = tl.maximum(largest, heaviest)
    chosen = tl.where(place_score == float("-inf"), place, chosen)
    return tl.where((chosen == place) & LATE, NO_KEY, chosen + (FIRST - PLACES))
