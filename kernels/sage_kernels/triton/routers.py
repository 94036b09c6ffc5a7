"""Kernels of routers: means of blocks, scores of pairs of blocks, and the tiles with the largest scores.

Three launches make a block list: the first reads Q or K once; the second keeps the scores of parts of blocks in
registers and writes one score for a pair of blocks; the third selects the tiles of a block of rows without sorting, by
searching the bits of the smallest score that is kept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..spec.layout import ceil_div, power_of_two
from .common.launch import MASK_AXES, TOKEN_AXES, launch, strides

SIDES = (128, 64)  # means of queries and of keys that a program of `score_pairs` multiplies
LARGEST = tl.constexpr(0xFFFFFFFF)


class BlockMeans(NamedTuple):
    """Means of the blocks of Q and K, of real tokens.

    Attributes:
        query, key: bfloat16 (2, batch, heads, blocks, channels), contiguous: the rounded means, and their rounding
            errors. The sums of both have 16 bits.
        query_similarity, key_similarity: float32 (batch, heads, blocks), the mean cosine of all pairs of tokens of a
            block; None if not requested.
    """

    query: torch.Tensor
    key: torch.Tensor
    query_similarity: torch.Tensor | None
    key_similarity: torch.Tensor | None


def block_means(query: torch.Tensor, key: torch.Tensor, rows: int, keys: int, similarity: bool = False) -> BlockMeans:
    """Return the means of blocks, reading Q and K once.

    Args:
        query, key: (batch, heads, tokens, channels) float16, bfloat16 or float32, any strides.
        rows, keys: tokens per block of Q and of K, powers of two up to 128.
        similarity: compute the mean cosines too.
    """
    batch, q_heads, q_len, channels = query.shape
    kv_heads, kv_len = key.shape[1:3]
    q_shape, k_shape = (batch, q_heads, ceil_div(q_len, rows)), (batch, kv_heads, ceil_div(kv_len, keys))
    means = BlockMeans(
        query.new_empty((2, *q_shape, channels), dtype=torch.bfloat16),
        key.new_empty((2, *k_shape, channels), dtype=torch.bfloat16),
        query.new_empty(q_shape, dtype=torch.float32) if similarity else None,
        key.new_empty(k_shape, dtype=torch.float32) if similarity else None,
    )
    launch(
        reduce_blocks,
        # Heads first: programs that run at the same time read neighbouring memory if tokens hold all heads.
        (q_heads + kv_heads, max(q_shape[2], k_shape[2]), batch),
        query=query,
        key=key,
        q_means=means.query,
        k_means=means.key,
        q_similarity=means.query_similarity,
        k_similarity=means.key_similarity,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        channels=channels,
        **strides("q", query.stride(), TOKEN_AXES),
        **strides("k", key.stride(), TOKEN_AXES),
        CHANNELS=power_of_two(channels),
        ROWS=rows,
        KEYS=keys,
        # One warp per 32 tokens sums most of them in its registers, and many programs hide each other's loads.
        num_warps=max(1, max(rows, keys) * power_of_two(channels) // 4096),
    )
    return means


def block_scores(
    q_means: torch.Tensor, k_means: torch.Tensor, scale: float, parts_m: int = 1, parts_n: int = 1
) -> torch.Tensor:
    """Return log Σ exp(mean query · mean key · scale) over the parts of each pair of blocks.

    Args:
        q_means: `BlockMeans.query`, each `parts_m` of a block; the last block may have fewer.
        k_means: `BlockMeans.key`, each `parts_n` of a block.
        scale: factor of the products.
        parts_m, parts_n: powers of two up to 16; with 1 and 1 the result is the product itself.

    Returns:
        float32 (batch, q_heads, blocks of rows, tiles); products differ from float32 products by 2⁻¹⁶ of the means'
        lengths.
    """
    _, batch, q_heads, q_parts, channels = q_means.shape
    kv_heads, k_parts = k_means.shape[2:4]
    row_blocks, tiles = ceil_div(q_parts, parts_m), ceil_div(k_parts, parts_n)
    scores = q_means.new_empty((batch, q_heads, row_blocks, tiles), dtype=torch.float32)
    launch(
        score_pairs,
        (ceil_div(q_parts, SIDES[0]) * ceil_div(k_parts, SIDES[1]), q_heads, batch),
        q_means=q_means,
        k_means=k_means,
        scores=scores,
        q_parts=q_parts,
        k_parts=k_parts,
        row_blocks=row_blocks,
        tile_count=tiles,
        group=q_heads // kv_heads,
        channels=channels,
        scale=scale,
        PARTS_M=parts_m,
        PARTS_N=parts_n,
        SIDE_M=SIDES[0],
        SIDE_N=SIDES[1],
        CHUNK=32,
        num_warps=8,
        num_stages=3,
    )
    return scores


def list_most(
    scores: torch.Tensor,
    kept_counts: tuple[int, ...],
    rows: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the tiles with the largest scores; among equal scores, the first tiles.

    Args:
        scores: float32 (batch, heads, blocks of rows, tiles).
        kept_counts: how many tiles a block keeps, at least 1, for each head.
        rows: uint8 (1, 1, blocks of rows), or with the sizes of batch and heads, not 0 where a block keeps all tiles.
        columns: uint8 (1, 1, tiles), not 0 where all blocks also keep a tile; or with the sizes of batch and heads.

    Returns:
        (counts, tiles): the fields of a `BlockList`, tiles in ascending order.
    """
    return _select(scores, kept_counts, 1.0, rows, columns)


def list_share(
    scores: torch.Tensor, share: float, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """List tiles, largest scores first, until their shares of the scores' softmax sum to `share`, in (0, 1].

    Other arguments and the result are as in `list_most`; a share of 1 keeps all tiles.
    """
    return _select(scores, None, share, rows, columns)


def _select(
    scores: torch.Tensor,
    kept_counts: tuple[int, ...] | None,
    share: float,
    rows: torch.Tensor | None,
    columns: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, row_blocks, tile_count = scores.shape
    places = tile_count if kept_counts is None or rows is not None or columns is not None else max(kept_counts)
    counts = scores.new_empty((batch, heads, row_blocks), dtype=torch.int32)
    tiles = scores.new_empty((batch, heads, row_blocks, places), dtype=torch.int32)
    width = power_of_two(tile_count)
    launch(
        select_tiles,
        (row_blocks, heads, batch),
        scores=scores,
        kept_counts=None
        if kept_counts is None or len(set(kept_counts)) == 1
        else _on_device(kept_counts, scores.device),
        rows=rows,
        columns=columns,
        counts=counts,
        tiles=tiles,
        kept_count=0 if kept_counts is None else kept_counts[0],
        share=share,
        tile_count=tile_count,
        places=places,
        **strides("rows", _flag_strides(rows), MASK_AXES),
        **strides("columns", _flag_strides(columns), MASK_AXES),
        WIDTH=width,
        BY_SHARE=kept_counts is None,
        num_warps=min(8, max(1, width // 1024)),
    )
    return counts, tiles


def _flag_strides(flags: torch.Tensor | None) -> tuple[int, int]:
    """Return the strides of batch and head, 0 where flags are broadcast."""
    if flags is None:
        return 0, 0
    batch, head = (0 if flags.shape[dim] == 1 else flags.stride(dim) for dim in range(2))
    return batch, head


@lru_cache(maxsize=64)
def _on_device(kept_counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(kept_counts, dtype=torch.int32, device=device)


SIZES = [
    "q_len",
    "kv_len",
    "q_heads",
    "kv_heads",
    "q_parts",
    "k_parts",
    "row_blocks",
    "tile_count",
    "places",
    "group",
    "kept_count",
]


@triton.jit
def write_means(
    x,
    means,
    similarity,
    batch,
    head,
    heads,
    tokens,
    channels,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write the mean of a block of SIZE tokens of one (batch, head), and its mean cosine."""
    block, blocks = tl.program_id(1), tl.cdiv(tokens, SIZE)
    if block < blocks:
        token, channel = block * SIZE + tl.arange(0, SIZE), tl.arange(0, CHANNELS)
        inside = (token < tokens)[:, None] & (channel < channels)[None, :]
        at = x + batch * stride_batch + head * stride_head + token.to(tl.int64)[:, None] * stride_token
        values = tl.load(at + channel.to(tl.int64)[None, :] * stride_channel, mask=inside, other=0.0).to(tl.float32)
        count = tl.minimum(tokens - block * SIZE, SIZE).to(tl.float32)
        row = (batch * heads + head) * blocks + block
        mean = tl.sum(values, 0) / count
        rounded = mean.to(tl.bfloat16)
        into = means + row * channels + channel
        tl.store(into, rounded, mask=channel < channels)
        remainder = (mean - rounded.to(tl.float32)).to(tl.bfloat16)
        tl.store(into + tl.num_programs(2) * heads * blocks * channels, remainder, mask=channel < channels)
        if similarity is not None:
            length = tl.maximum(tl.sqrt(tl.sum(values * values, 1)), 1e-12)
            mean = tl.sum(values / length[:, None], 0) / count
            tl.store(similarity + row, tl.sum(mean * mean, 0))


@triton.jit(do_not_specialize=SIZES)
def reduce_blocks(
    query,
    key,
    q_means,
    k_means,
    q_similarity,
    k_similarity,
    q_len,
    kv_len,
    q_heads,
    kv_heads,
    channels,
    q_stride_batch,
    q_stride_head,
    q_stride_token,
    q_stride_channel,
    k_stride_batch,
    k_stride_head,
    k_stride_token,
    k_stride_channel,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Write the mean of one block of one (batch, head) of Q or K (`BlockMeans`)."""
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    if head < q_heads:
        write_means(
            query, q_means, q_similarity, batch, head, q_heads, q_len, channels, q_stride_batch, q_stride_head,
            q_stride_token, q_stride_channel, CHANNELS, ROWS,
        )  # fmt: skip
    else:
        write_means(
            key, k_means, k_similarity, batch, head - q_heads, kv_heads, kv_len, channels, k_stride_batch,
            k_stride_head, k_stride_token, k_stride_channel, CHANNELS, KEYS,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def score_pairs(
    q_means,
    k_means,
    scores,
    q_parts,
    k_parts,
    row_blocks,
    tile_count,
    group,
    channels,
    scale,
    PARTS_M: tl.constexpr,
    PARTS_N: tl.constexpr,
    SIDE_M: tl.constexpr,
    SIDE_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the scores of SIDE_M by SIDE_N parts of one (batch, q head)."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q_heads = tl.num_programs(1)
    along = tl.cdiv(k_parts, SIDE_N)
    row = tl.program_id(0) // along * SIDE_M + tl.arange(0, SIDE_M)
    column = tl.program_id(0) % along * SIDE_N + tl.arange(0, SIDE_N)
    q_left = tl.num_programs(2).to(tl.int64) * q_heads * q_parts * channels
    k_left = tl.num_programs(2).to(tl.int64) * (q_heads // group) * k_parts * channels
    q_means += (batch * q_heads + head) * q_parts * channels + row[:, None] * channels
    k_means += (batch * (q_heads // group) + head // group) * k_parts * channels + column[:, None] * channels
    x = tl.zeros((SIDE_M, SIDE_N), tl.float32)
    for first in range(0, channels, CHUNK):
        channel = first + tl.arange(0, CHUNK)[None, :]
        q_inside = (row < q_parts)[:, None] & (channel < channels)
        k_inside = (column < k_parts)[:, None] & (channel < channels)
        q = tl.load(q_means + channel, mask=q_inside, other=0.0)
        k = tl.load(k_means + channel, mask=k_inside, other=0.0)
        x = tl.dot(q, k.T, x)
        x = tl.dot(q, tl.load(k_means + k_left + channel, mask=k_inside, other=0.0).T, x)
        x = tl.dot(tl.load(q_means + q_left + channel, mask=q_inside, other=0.0), k.T, x)
    x *= scale
    BLOCKS: tl.constexpr = SIDE_M // PARTS_M
    TILES: tl.constexpr = SIDE_N // PARTS_N
    if PARTS_M > 1 or PARTS_N > 1:
        x = tl.where((row < q_parts)[:, None] & (column < k_parts)[None, :], x, float("-inf"))
        parts = tl.reshape(x, (BLOCKS, PARTS_M, TILES, PARTS_N))
        largest = tl.max(tl.max(parts, 3), 1)
        finite = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
        x = finite + tl.log(tl.sum(tl.sum(tl.exp(parts - finite[:, None, :, None]), 3), 1))
    block = tl.program_id(0) // along * BLOCKS + tl.arange(0, BLOCKS)
    tile = tl.program_id(0) % along * TILES + tl.arange(0, TILES)
    at = scores + ((batch * q_heads + head) * row_blocks + block.to(tl.int64)[:, None]) * tile_count + tile[None, :]
    tl.store(at, x, mask=(block < row_blocks)[:, None] & (tile < tile_count)[None, :])


@triton.jit(do_not_specialize=SIZES)
def select_tiles(
    scores,
    kept_counts,
    rows,
    columns,
    counts,
    tiles,
    kept_count,
    share,
    tile_count,
    places,
    rows_stride_batch,
    rows_stride_head,
    columns_stride_batch,
    columns_stride_head,
    WIDTH: tl.constexpr,
    BY_SHARE: tl.constexpr,
):
    """Write the tiles that one block of rows of one (batch, head) keeps.

    Their number is `kept_counts` for each head, or `kept_count` without `kept_counts`; or they reach `share`.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pair = (batch * tl.num_programs(1) + head) * tl.num_programs(0) + block
    tile = tl.arange(0, WIDTH)
    inside = tile < tile_count
    x = tl.load(scores + pair * tile_count + tile, mask=inside, other=float("-inf")) + 0.0  # -0 is 0
    x = tl.where(x == x, x, float("nan"))  # as in PyTorch, the largest
    # Unsigned integers in the order of the scores; 0 for places beyond the tiles.
    bits = x.to(tl.uint32, bitcast=True)
    order = tl.where(inside, tl.where(bits >> 31 == 0, bits | 0x80000000, bits ^ LARGEST), 0)
    bound = tl.full((1,), 0, tl.uint32)
    if not BY_SHARE:
        # The largest bound that enough tiles reach.
        if kept_counts is not None:
            kept_count = tl.load(kept_counts + head)
        for position in tl.static_range(32):
            higher = bound | (1 << (31 - position))
            reached = tl.sum((order >= higher).to(tl.int32), 0)
            bound = tl.where(reached >= kept_count, higher, bound)
        kept = order > bound
        equal = order == bound
        kept = kept | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= kept_count - tl.sum(kept.to(tl.int32), 0)))
    else:
        # The largest bound above which the shares sum to `share`: tiles above it are kept except for the last ties.
        weight = tl.where(inside, tl.exp(x - tl.max(x, 0)), 0.0)
        weight = weight / tl.sum(weight, 0)
        everything = (tl.sum(weight, 0) < share) | (share >= 1.0)
        for position in tl.static_range(32):
            higher = bound | (1 << (31 - position))
            above = tl.sum(tl.where(order > higher, weight, 0.0), 0)
            bound = tl.where(above >= share, higher, bound)
        kept = order > bound + 1
        above = tl.sum(tl.where(kept, weight, 0.0), 0)
        equal = order == bound + 1
        earlier = (tl.cumsum(equal.to(tl.int32), 0) - 1).to(tl.float32)
        kept = kept | (equal & (above + earlier * weight < share))
        kept = tl.where(everything, inside, kept)
    if rows is not None:
        whole = tl.load(rows + batch * rows_stride_batch + head * rows_stride_head + block)
        kept = tl.where(whole != 0, inside, kept)
    if columns is not None:
        flags = columns + batch * columns_stride_batch + head * columns_stride_head
        kept = kept | (tl.load(flags + tile, mask=inside, other=0) != 0)
    kept = kept & inside
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(tiles + pair * places + place, tile, mask=kept)
    tl.store(counts + pair, tl.sum(kept.to(tl.int32), 0))
