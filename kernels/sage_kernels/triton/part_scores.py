"""Kernel of the router by parts of blocks: scores of all pairs of parts, summed for each pair of blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..language.launch import launch
from ..language.scores import LN2, LOG2E
from ..layout import ceil_div, power_of_two

TILE = 64  # parts of Q, and of K, that a program multiplies at once
DEPTH = 32  # channels at once


def part_scores(q_means: torch.Tensor, k_means: torch.Tensor, scale: float, parts_m: int, parts_n: int) -> torch.Tensor:
    """Compute `routing.part_scores`; numbers of parts are powers of two, at most 16."""
    batch, q_heads, q_parts, channels = q_means.shape
    kv_heads, k_parts = k_means.shape[1:3]
    q_means, k_means = q_means.contiguous(), k_means.contiguous()
    row_blocks, tiles = ceil_div(q_parts, parts_m), ceil_div(k_parts, parts_n)
    scores = q_means.new_empty(batch, q_heads, row_blocks, tiles)
    launch(
        sum_parts,
        (ceil_div(q_parts, TILE) * ceil_div(k_parts, TILE), q_heads, batch),
        q_means=q_means,
        k_means=k_means,
        scores=scores,
        q_parts=q_parts,
        k_parts=k_parts,
        row_blocks=row_blocks,
        tiles=tiles,
        kv_heads=kv_heads,
        channels=channels,
        scale=float(scale),
        PARTS_M=parts_m,
        PARTS_N=parts_n,
        TILE=TILE,
        CHANNELS=max(DEPTH, power_of_two(channels)),
        DEPTH=DEPTH,
        num_warps=4,
    )
    return scores


@triton.jit
def sum_parts(
    q_means,
    k_means,
    scores,
    q_parts,
    k_parts,
    row_blocks,
    tiles,
    kv_heads,
    channels,
    scale,
    PARTS_M: tl.constexpr,
    PARTS_N: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write the scores of TILE / PARTS_M blocks of rows and TILE / PARTS_N tiles of one (batch, q head)."""
    q_heads = tl.num_programs(1)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.cdiv(k_parts, TILE)
    row, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    q_part, k_part = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    q_means += (batch * q_heads + head) * q_parts * channels
    k_means += (batch * kv_heads + head // (q_heads // kv_heads)) * k_parts * channels
    s = tl.zeros((TILE, TILE), tl.float32)
    for first in tl.static_range(0, CHANNELS, DEPTH):
        channel = first + tl.arange(0, DEPTH)
        exists = (channel < channels)[None, :]
        q = tl.load(q_means + q_part[:, None] * channels + channel[None, :], (q_part < q_parts)[:, None] & exists, 0.0)
        k = tl.load(k_means + k_part[:, None] * channels + channel[None, :], (k_part < k_parts)[:, None] & exists, 0.0)
        s = tl.dot(q, k.T, s, input_precision="tf32x3")
    real = (q_part < q_parts)[:, None] & (k_part < k_parts)[None, :]
    s = tl.where(real, s * (scale * LOG2E), float("-inf"))
    s = tl.reshape(s, (TILE // PARTS_M, PARTS_M, TILE // PARTS_N, PARTS_N))
    largest = tl.max(tl.max(s, 3), 1)
    offset = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.sum(tl.exp2(s - offset[:, None, :, None]), 3), 1)
    block = row * (TILE // PARTS_M) + tl.arange(0, TILE // PARTS_M)
    tile = column * (TILE // PARTS_N) + tl.arange(0, TILE // PARTS_N)
    into = scores + ((batch * q_heads + head) * row_blocks + block)[:, None] * tiles + tile[None, :]
    inside = (block < row_blocks)[:, None] & (tile < tiles)[None, :]
    tl.store(into, (tl.log2(total) + offset) * LN2, inside)
