"""Sums and extrema over tokens, in the order of `transforms.sum_of_tokens`."""

import triton
import triton.language as tl

from ...spec import transforms
from ...spec.layout import BLOCK
from ..common.tokens import load_tokens
from .choice import is_finite

BLOCK_ROWS = tl.constexpr(BLOCK)
LOUD_GROUPS = tl.constexpr(transforms.LOUD_GROUPS)
LOUD = tl.constexpr(transforms.LOUD)


@triton.jit
def reduce_block(
    x,
    token_mask,
    start,
    first,
    length,
    channels,
    stride_token,
    stride_channel,
    CHANNELS: tl.constexpr,
    HAS_TOKEN_MASK: tl.constexpr,
    FILTERED: tl.constexpr,
    SQUARED: tl.constexpr = False,
    token_mask_step=1,
    kept=None,
):
    """Reduce the 128 tokens from `first` on: (sum, largest, smallest, 1 where all are finite), each (CHANNELS,).

    The sum is a tree of halves over sixteen groups of 8 tokens, loaded in the order in which they are added, then over
    the 8 tokens. With FILTERED, tokens that do not count and elements that are not finite are left out; otherwise all
    elements are reduced, including zeros beyond the length, and the last result is 1. With SQUARED, elements are
    squared first. Of each 8 tokens, only `kept` tokens, (8,), enter the sum.
    """
    channel = tl.arange(0, CHANNELS)
    largest = tl.full((8, CHANNELS), float("-inf"), tl.float32)
    smallest = tl.full((8, CHANNELS), float("inf"), tl.float32)
    finite = tl.full((8, CHANNELS), 1.0, tl.float32)
    for leaf in tl.static_range(16):
        group = leaf % 2 * 8 + leaf // 2 % 2 * 4 + leaf // 4 % 2 * 2 + leaf // 8
        token = first + group * 8 + tl.arange(0, 8)
        tile, counts = load_tokens(
            x,
            token_mask,
            start,
            token,
            length,
            channel,
            channels,
            stride_token,
            stride_channel,
            HAS_TOKEN_MASK,
            token_mask_step,
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
        if kept is not None:
            tile = tl.where(kept[:, None], tile, 0.0)
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
def tokens_of_groups(token_mask, blocks, length, HAS_TOKEN_MASK: tl.constexpr):
    """Return the number of tokens that count in each group of `transforms.quiet_keys`: float32 (LOUD_GROUPS,)."""
    row, token = tl.arange(0, 32), tl.arange(0, BLOCK_ROWS)
    counts = tl.zeros((LOUD_GROUPS,), tl.float32)
    for first in range(0, blocks, 32):
        block = first + row
        if HAS_TOKEN_MASK:
            tokens = block[:, None] * BLOCK_ROWS + token[None, :]
            counted = (tl.load(token_mask + tokens, mask=tokens < length, other=0) != 0).to(tl.int32)
            counted_tokens = tl.sum(counted, 1)
        else:
            counted_tokens = tl.minimum(tl.maximum(length - block * BLOCK_ROWS, 0), BLOCK_ROWS)
        counts += sum_of_groups(counted_tokens.to(tl.float32))
    return counts


@triton.jit
def sum_of_groups(x):
    """Sum the values of 32 consecutive blocks, (32,), by group: (LOUD_GROUPS,)."""
    return tl.sum(tl.reshape(x, (32 // LOUD_GROUPS, LOUD_GROUPS)), 0)


@triton.jit
def quiet_groups(squares, counts, blocks, stride, CHANNELS: tl.constexpr):
    """Return which groups of K's tokens are quiet, (LOUD_GROUPS,), from the sums of squares of blocks."""
    row, channel, group = tl.arange(0, 32), tl.arange(0, CHANNELS), tl.arange(0, LOUD_GROUPS)
    total = tl.zeros((LOUD_GROUPS,), tl.float32)
    for first in range(0, blocks, 32):
        at = squares + (first + row)[:, None].to(tl.int64) * stride + channel[None, :]
        total += sum_of_groups(tl.sum(tl.load(at, mask=(first + row < blocks)[:, None], other=0.0), 1))
    mean = total / tl.maximum(counts, 1.0)
    some = mean > 0.0
    other, other_group = mean[None, :], group[None, :]
    is_less = (other < mean[:, None]) | ((other == mean[:, None]) & (other_group < group[:, None]))
    rank = tl.sum((is_less & (other > 0.0)).to(tl.int32), 1)
    is_median = some & (rank == (tl.sum(some.to(tl.int32), 0) - 1) // 2)
    median = tl.max(tl.where(is_median, mean, 0.0), 0)
    return mean <= tl.where(median > 0.0, median * LOUD, float("inf"))


@triton.jit
def mean_of_blocks(parts, tokens, blocks, stride, CHANNELS: tl.constexpr, groups=None):
    """Return the mean over a sequence from its blocks' sums: a tree over each 128 blocks, then their sums in order.

    `tokens` is the number of tokens that count. With `groups`, bool (LOUD_GROUPS,), only blocks of these groups are
    summed. A mean that is not finite counts as 0.
    """
    total = tl.zeros((CHANNELS,), tl.float32)
    for first in range(0, blocks, BLOCK_ROWS):
        some, _largest, _smallest, _finite = reduce_block(
            parts, None, 0, first, blocks, CHANNELS, stride, 1, CHANNELS, False, False, kept=groups
        )
        total += some
    mean = tl.div_rn(total, tl.zeros_like(total) + tl.maximum(tokens, 1.0))
    return tl.where(is_finite(mean), mean, 0.0)
