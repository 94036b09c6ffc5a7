"""Sums and extrema over tokens, in the order of `transforms.sum_of_tokens`."""

import triton
import triton.language as tl

from ...language.tokens import load_tokens
from ...layout import BLOCK
from .choice import is_finite

BLOCK_ROWS = tl.constexpr(BLOCK)


@triton.jit
def reduce_block(
    x,
    valid,
    start,
    first,
    length,
    channels,
    stride_token,
    stride_channel,
    CHANNELS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    FILTERED: tl.constexpr,
    SQUARED: tl.constexpr = False,
    valid_step=1,
):
    """Reduce the 128 tokens from `first` on: (sum, largest, smallest, 1 where all are finite), each (CHANNELS,).

    The sum is a tree of halves over sixteen groups of 8 tokens, loaded in the order in which it adds them, then over
    the 8. With FILTERED, tokens that do not count and elements that are not finite are left out; otherwise all elements
    are reduced, zeros beyond the length included, and the last result is 1. With SQUARED, elements are squared first.
    """
    channel = tl.arange(0, CHANNELS)
    largest = tl.full((8, CHANNELS), float("-inf"), tl.float32)
    smallest = tl.full((8, CHANNELS), float("inf"), tl.float32)
    finite = tl.full((8, CHANNELS), 1.0, tl.float32)
    for leaf in tl.static_range(16):
        group = leaf % 2 * 8 + leaf // 2 % 2 * 4 + leaf // 4 % 2 * 2 + leaf // 8
        token = first + group * 8 + tl.arange(0, 8)
        tile, counts = load_tokens(
            x, valid, start, token, length, channel, channels, stride_token, stride_channel, HAS_VALID, valid_step
        )
        if SQUARED:
            tile *= tile
        if FILTERED:
            present = is_finite(tile)
            finite = tl.minimum(finite, present.to(tl.float32))
            tile = tl.where(present, tile, 0.0)
            present = present & counts[:, None]
            largest = tl.maximum(largest, tl.where(present, tile, float("-inf")))
            smallest = tl.minimum(smallest, tl.where(present, tile, float("inf")))
        else:
            largest = tl.maximum(largest, tile)
            smallest = tl.minimum(smallest, tile)
        if leaf % 2 == 0:
            of_1 = tile
        else:
            tile = of_1 + tile
            if leaf % 4 == 1:
                of_2 = tile
            else:
                tile = of_2 + tile
                if leaf % 8 == 3:
                    of_4 = tile
                else:
                    tile = of_4 + tile
                    if leaf == 7:
                        of_8 = tile
                    else:
                        total = of_8 + tile
    for level in tl.static_range(3):
        total = tl.reshape(total, (2, 4 >> level, CHANNELS))
        upper, lower = tl.split(tl.permute(total, (1, 2, 0)))
        total = upper + lower
    return tl.reshape(total, (CHANNELS,)), tl.max(largest, 0), tl.min(smallest, 0), tl.min(finite, 0)


@triton.jit
def all_true(x):
    return tl.min(x.to(tl.int32), 0) == 1


@triton.jit
def valid_tokens(valid, length, HAS_VALID: tl.constexpr):
    """Return the number of tokens that count, at least 1, in float32."""
    count = length
    if HAS_VALID:
        token = tl.arange(0, 4096)
        count = 0
        for first in range(0, length, 4096):
            some = tl.load(valid + first + token, mask=first + token < length, other=0)
            count += tl.sum((some != 0).to(tl.int32), 0)
    return tl.maximum(count, 1).to(tl.float32)


@triton.jit
def mean_of_blocks(parts, valid, blocks, length, stride, CHANNELS: tl.constexpr, HAS_VALID: tl.constexpr):
    """Return the mean over a sequence from its blocks' sums: a tree over each 128 blocks, then these sums in order."""
    total = tl.zeros((CHANNELS,), tl.float32)
    for group in range(0, blocks, BLOCK_ROWS):
        some, _largest, _smallest, _finite = reduce_block(
            parts, None, 0, group, blocks, CHANNELS, stride, 1, CHANNELS, False, False
        )
        total += some
    return tl.div_rn(total, tl.zeros_like(total) + valid_tokens(valid, length, HAS_VALID))
