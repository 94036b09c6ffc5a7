"""Scores by which routers choose tiles, in PyTorch, and the GPU kernel for those that take long there."""

from __future__ import annotations

from importlib import import_module

import torch
import torch.nn.functional as F

from .layout import ceil_div
from .toolchain import triton_version

SCORES_AT_ONCE = 2**25
"""Number of scores of parts that PyTorch holds at once."""


def block_means(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean of each block of `size` tokens: float32 (batch, heads, blocks, channels), of real tokens."""
    tokens = x.shape[2]
    if missing := -tokens % size:
        x = F.pad(x, (0, 0, 0, missing))
    sums = x.unflatten(2, (-1, size)).sum(3, dtype=torch.float32)
    counts = (tokens - torch.arange(sums.shape[2], device=x.device) * size).clamp(max=size)
    return sums / counts[:, None]


def mean_scores(q_means: torch.Tensor, k_means: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the scores of all pairs of means.

    Args:
        q_means: float32 (batch, q_heads, q_blocks, channels).
        k_means: float32 (batch, kv_heads, kv_blocks, channels); q_heads a multiple of kv_heads.

    Returns:
        float32 (batch, q_heads, q_blocks, kv_blocks).
    """
    group = q_means.shape[1] // k_means.shape[1]
    return q_means @ k_means.repeat_interleave(group, 1).mT * scale


def part_scores(q_means: torch.Tensor, k_means: torch.Tensor, scale: float, parts_m: int, parts_n: int) -> torch.Tensor:
    """Return log Σ_ab exp(scores of the parts a of a block of rows and b of a tile of keys).

    Args:
        q_means, k_means, scale: as in `mean_scores`, of parts; those after the last one do not count.
        parts_m, parts_n: parts a block of rows and a tile of keys.

    Returns:
        float32 (batch, q_heads, blocks of rows, tiles).
    """
    if q_means.is_cuda and torch.version.hip is None and triton_version() is not None and parts_m * parts_n <= 256:
        kernel = import_module(".triton.part_scores", __package__)
        return kernel.part_scores(q_means, k_means, scale, parts_m, parts_n)
    return part_scores_reference(q_means, k_means, scale, parts_m, parts_n)


def part_scores_reference(
    q_means: torch.Tensor, k_means: torch.Tensor, scale: float, parts_m: int, parts_n: int
) -> torch.Tensor:
    """Compute `part_scores` in PyTorch, a few blocks at a time, so that memory stays bounded."""
    batch, q_heads, q_parts, _ = q_means.shape
    row_blocks, tiles = ceil_div(q_parts, parts_m), ceil_div(k_means.shape[2], parts_n)
    scores = q_means.new_empty(batch, q_heads, row_blocks, tiles)
    at_once = max(1, SCORES_AT_ONCE // max(1, batch * q_heads * parts_m * tiles * parts_n))
    for first in range(0, row_blocks, at_once):
        part = mean_scores(q_means[:, :, first * parts_m : (first + at_once) * parts_m], k_means, scale)
        missing = (0, tiles * parts_n - part.shape[3], 0, -part.shape[2] % parts_m)
        if any(missing):
            part = F.pad(part, missing, value=-torch.inf)
        part = part.unflatten(3, (tiles, parts_n)).logsumexp(-1).unflatten(2, (-1, parts_m))
        scores[:, :, first : first + at_once] = part.logsumexp(3)
    return scores
