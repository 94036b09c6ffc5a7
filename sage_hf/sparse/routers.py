"""Routers choose the tiles of keys that a block of rows attends to, from means of Q and K and without training.

Each router's PyTorch code is its specification; it runs by the kernels of `sage_kernels.triton.routers` where possible.
Scores are float32, because ties between bfloat16 means would make the choice random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F

from sage_kernels.backends import router_kernels
from sage_kernels.spec.block_list import BLOCK_SIZES, BlockList
from sage_kernels.spec.checks import check_memory
from sage_kernels.spec.layout import ceil_div

SCORES_AT_ONCE = 2**25
"""Number of parts' scores that `SubBlockRouter` holds at once."""

WEIGHTS_AT_ONCE = 2**26
"""Number of attention weights, of one or several heads, that `tile_mass` holds at once."""

MOST_PARTS = 16
"""Largest number of parts of a block in the kernels."""

Keep = float | tuple[float, ...]
"""Share of the tiles that each block of rows keeps: one number for all heads, or one for each head."""


class Router(Protocol):
    """Rule that chooses tiles."""

    def route(
        self, query: torch.Tensor, key: torch.Tensor, scale: float | None = None, dense: Sequence[slice] = ()
    ) -> BlockList:
        """Return the tiles that each block of rows attends to.

        Args:
            query: (batch, q_heads, q_len, head_dim), any floating dtype.
            key: (batch, kv_heads, kv_len, head_dim); q_heads is a multiple of kv_heads.
            scale: factor of the scores, default head_dim ** -0.5.
            dense: ranges of (text) tokens that attend to all keys, and that all queries attend to.
        """


@dataclass(frozen=True)
class SubBlockRouter:
    """Router that scores blocks by the means of their parts, after SGLang: log Σ_ab exp(mean Q_a · mean K_b · scale).

    Attributes:
        keep: share of the tiles that a block keeps, at least one tile, without counting `dense` tiles.
        block_m, block_n: rows a block, keys a tile.
        parts_m, parts_n: number of equal parts of a block of rows and of a tile of keys. In a partial block, a part
            without tokens does not count.
    """

    keep: Keep
    block_m: int = 128
    block_n: int = 128
    parts_m: int = 4
    parts_n: int = 4

    def __post_init__(self) -> None:
        _check_keep(self.keep)
        if self.block_m % self.parts_m or self.block_n % self.parts_n:
            raise ValueError(
                f"blocks of {self.block_m} rows and {self.block_n} keys have no {self.parts_m} and {self.parts_n} "
                "equal parts"
            )

    def scores(self, query: torch.Tensor, key: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Return float32 (batch, q_heads, blocks of rows, tiles); a few blocks at a time, so memory stays linear."""
        scale = _scale(scale, query)
        q_means = block_means(query, self.block_m // self.parts_m)
        k_means = block_means(key, self.block_n // self.parts_n)
        batch, q_heads, q_parts, _ = q_means.shape
        row_blocks, tiles = ceil_div(q_parts, self.parts_m), ceil_div(k_means.shape[2], self.parts_n)
        scores = q_means.new_empty(batch, q_heads, row_blocks, tiles)
        at_once = max(1, SCORES_AT_ONCE // max(1, batch * q_heads * self.parts_m * tiles * self.parts_n))
        for first in range(0, row_blocks, at_once):
            part = q_means[:, :, first * self.parts_m : (first + at_once) * self.parts_m]
            fine = _mean_scores(part, k_means, scale)
            missing = (0, tiles * self.parts_n - fine.shape[3], 0, -fine.shape[2] % self.parts_m)
            if any(missing):
                fine = F.pad(fine, missing, value=-torch.inf)
            fine = fine.unflatten(3, (tiles, self.parts_n)).logsumexp(-1).unflatten(2, (-1, self.parts_m))
            scores[:, :, first : first + at_once] = fine.logsumexp(3)
        return scores

    def route(
        self, query: torch.Tensor, key: torch.Tensor, scale: float | None = None, dense: Sequence[slice] = ()
    ) -> BlockList:
        """Return the kept tiles; see `Router.route`."""
        kernels = _kernels(query, key, self.block_m, self.block_n, max(self.parts_m, self.parts_n))
        if kernels is None:
            return _keep_most(self.scores(query, key, scale), self.keep, query, key, dense, self.block_m, self.block_n)
        means = kernels.block_means(query, key, self.block_m // self.parts_m, self.block_n // self.parts_n)
        scores = kernels.block_scores(means.query, means.key, _scale(scale, query), self.parts_m, self.parts_n)
        kept_counts = _kept_counts(self.keep, *scores.shape[1::2])
        rows, columns = _flags(dense, query, self.block_m), _flags(dense, key, self.block_n)
        counts, tiles = kernels.list_most(scores, kept_counts, rows, columns)
        return BlockList(counts, tiles, self.block_m, self.block_n)


@dataclass(frozen=True)
class MeanRouter(SubBlockRouter):
    """Router that keeps the tiles whose mean key has the largest scores with the block's mean query.

    Attributes:
        keep, block_m, block_n: as in `SubBlockRouter`.
    """

    parts_m: int = field(default=1, init=False)
    parts_n: int = field(default=1, init=False)


@dataclass(frozen=True)
class ShareRouter:
    """Router that keeps tiles until their share of the softmax of mean scores reaches a bound (SpargeAttention).

    arXiv 2502.18137. The number of kept tiles depends on how peaked attention is. If the tokens of a block or tile
    differ, its mean says little, so nothing is left out: such a block attends to all tiles, and all blocks attend to
    such a tile.

    Attributes:
        share: bound of the cumulative share, in (0, 1].
        similarity: smallest mean cosine of two tokens of a block (including a token with itself) at which the block's
            mean represents it.
        block_m, block_n: rows a block, keys a tile.
    """

    share: float
    similarity: float = 0.0
    block_m: int = 128
    block_n: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1]; got {self.share}")

    def route(
        self, query: torch.Tensor, key: torch.Tensor, scale: float | None = None, dense: Sequence[slice] = ()
    ) -> BlockList:
        """Return the kept tiles; see `Router.route`."""
        group = query.shape[1] // key.shape[1]
        if (kernels := _kernels(query, key, self.block_m, self.block_n)) is not None:
            return self._route(kernels, query, key, _scale(scale, query), dense)
        scores = _mean_scores(block_means(query, self.block_m), block_means(key, self.block_n), _scale(scale, query))
        weights, order = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
        before = weights.cumsum(-1) - weights
        needed = before < self.share
        needed[..., :1] = True  # float32 sums may start above 0
        if self.share == 1:
            needed.fill_(True)
        kept = torch.zeros_like(needed).scatter_(-1, order, needed)
        kept |= (block_similarity(query, self.block_m) < self.similarity).unsqueeze(-1)
        kept |= (block_similarity(key, self.block_n) < self.similarity).repeat_interleave(group, 1).unsqueeze(-2)
        return _with_dense(kept, query, key, dense, self.block_m, self.block_n)

    def _route(
        self, kernels: ModuleType, query: torch.Tensor, key: torch.Tensor, scale: float, dense: Sequence[slice]
    ) -> BlockList:
        means = kernels.block_means(query, key, self.block_m, self.block_n, similarity=True)
        rows = (means.query_similarity < self.similarity).view(torch.uint8)
        columns = (means.key_similarity < self.similarity).view(torch.uint8)
        columns = columns.repeat_interleave(query.shape[1] // key.shape[1], 1)
        for flags, x, size in ((rows, query, self.block_m), (columns, key, self.block_n)):
            if (more := _flags(dense, x, size)) is not None:
                flags |= more
        scores = kernels.block_scores(means.query, means.key, scale)
        counts, tiles = kernels.list_share(scores, self.share, rows, columns)
        return BlockList(counts, tiles, self.block_m, self.block_n)


def block_means(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean of each block of `size` tokens: float32 (batch, heads, blocks, channels), over real tokens."""
    tokens = x.shape[2]
    if missing := -tokens % size:
        x = F.pad(x, (0, 0, 0, missing))
    sums = x.unflatten(2, (-1, size)).sum(3, dtype=torch.float32)
    counts = (tokens - torch.arange(sums.shape[2], device=x.device) * size).clamp(max=size)
    return sums / counts[:, None]


def block_similarity(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean cosine of all pairs of tokens of each block: float32 (batch, heads, blocks).

    Pairs of a token with itself count. The result is the squared length of the mean of the tokens' directions.
    """
    return block_means(F.normalize(x.float(), dim=-1), size).square().sum(-1)


def tile_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float | None = None,
    *,
    block_n: int = 128,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the share of each row's attention weight in each tile of keys.

    Args:
        query, key, scale: as in `Router.route`.
        block_n: keys of a tile.
        rows: int64 (rows,), the rows to measure; None: all.

    Returns:
        float32 (batch, q_heads, rows, tiles), whose sums over tiles are 1.
    """
    if rows is not None:
        query = query[:, :, rows]
    kv_heads, parts = key.shape[1], []
    group = query.shape[1] // kv_heads
    of_head = query.shape[0] * group * query.shape[2] * key.shape[2]
    at_once = max(1, WEIGHTS_AT_ONCE // max(1, of_head))
    for first in range(0, kv_heads, at_once):
        queries = query[:, first * group : (first + at_once) * group].float()
        keys = key[:, first : first + at_once].float().repeat_interleave(group, 1)
        weights = (queries @ keys.mT * _scale(scale, query)).softmax(-1)
        parts.append(F.pad(weights, (0, -key.shape[2] % block_n)).unflatten(-1, (-1, block_n)).sum(-1))
    return torch.cat(parts, 1)


def kept_mass(
    query: torch.Tensor, key: torch.Tensor, blocks: BlockList, scale: float | None = None, sampled_rows: int = 64
) -> torch.Tensor:
    """Return the share of attention weight in the listed tiles, as the mean over evenly spaced rows.

    Args:
        query, key, scale: as in `Router.route`.
        blocks: a block list for query and key.
        sampled_rows: the number of rows.

    Returns:
        float32 (batch, q_heads).
    """
    q_len = query.shape[2]
    rows = torch.linspace(0, q_len - 1, min(sampled_rows, q_len), device=query.device).long()
    mass = tile_mass(query, key, scale, block_n=blocks.block_n, rows=rows)
    return (mass * blocks.kept(key.shape[2])[:, :, rows // blocks.block_m]).sum(-1).mean(-1)


def even_budgets(mass: torch.Tensor, keep: float) -> tuple[float, ...]:
    """Return a share of tiles for each head, so that all heads keep about the same share of their attention weight.

    A head's curve is the weight in its n heaviest tiles, as the mean over rows. The level that all heads reach is the
    highest level at which they keep, on average, `keep` of all tiles.

    Args:
        mass: (batch, q_heads, rows, tiles), a result of `tile_mass`.
        keep: mean share of the tiles, in (0, 1].
    """
    _check_keep(keep)
    curves = mass.sort(-1, descending=True).values.cumsum(-1).mean((0, 2)).double()
    heads, tiles = curves.shape
    allowed = max(heads, math.floor(keep * heads * tiles + 1e-6))

    def needed(level: float) -> torch.Tensor:
        return ((curves < level).sum(-1) + 1).clamp(max=tiles)

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if int(needed(middle).sum()) <= allowed else (low, middle)
    return tuple((needed(low) / tiles).tolist())


def _scale(scale: float | None, query: torch.Tensor) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _mean_scores(q_means: torch.Tensor, k_means: torch.Tensor, scale: float) -> torch.Tensor:
    group = q_means.shape[1] // k_means.shape[1]
    return q_means @ k_means.repeat_interleave(group, 1).mT * scale


def _check_keep(keep: Keep) -> None:
    for share in keep if isinstance(keep, tuple) else (keep,):
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"keep must be a share in (0, 1], or a tuple with one for each head; got {keep!r}")


def _kernels(query: torch.Tensor, key: torch.Tensor, block_m: int, block_n: int, parts: int = 1) -> ModuleType | None:
    """Return the module of kernels for blocks of these sizes and number of parts; None: PyTorch computes."""
    check_memory(query, key)
    taken = block_m in BLOCK_SIZES and block_n in BLOCK_SIZES and parts <= MOST_PARTS
    return router_kernels(query, key) if taken else None


def _kept_counts(keep: Keep, heads: int, tiles: int) -> tuple[int, ...]:
    """Return the number of tiles that each block of rows keeps, for each head."""
    shares = keep if isinstance(keep, tuple) else (keep,) * heads
    if len(shares) != heads:
        raise ValueError(f"keep has {len(shares)} shares, one for each head, and the call has {heads} heads")
    return tuple(max(1, math.ceil(share * tiles - 1e-6)) for share in shares)


def _flags(dense: Sequence[slice], x: torch.Tensor, size: int) -> torch.Tensor | None:
    """Flag the blocks of x that hold a `dense` token, uint8 (1, 1, blocks); return None if no block does."""
    flags = None
    for tokens in dense:
        start, stop, _ = tokens.indices(x.shape[2])
        if stop > start:
            if flags is None:
                flags = torch.zeros((1, 1, ceil_div(x.shape[2], size)), dtype=torch.uint8, device=x.device)
            flags[..., start // size : ceil_div(stop, size)] = 1
    return flags


def _keep_most(
    scores: torch.Tensor,
    keep: Keep,
    query: torch.Tensor,
    key: torch.Tensor,
    dense: Sequence[slice],
    block_m: int,
    block_n: int,
) -> BlockList:
    """Keep the tiles with the largest scores; among equal scores, the first tiles."""
    tiles = scores.shape[3]
    kept_counts = _kept_counts(keep, scores.shape[1], tiles)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if len(set(kept_counts)) == 1 and all(rows.stop is not None and rows.start == rows.stop for rows in dense):
        best = order[..., : kept_counts[0]].sort(-1).values.int()
        return BlockList(best.new_full(best.shape[:3], kept_counts[0]), best, block_m, block_n)
    of_head = torch.tensor(kept_counts, device=scores.device)[:, None, None]
    most = (torch.arange(tiles, device=scores.device) < of_head).expand_as(order)
    kept = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, most)
    return _with_dense(kept, query, key, dense, block_m, block_n)


def _with_dense(
    kept: torch.Tensor, query: torch.Tensor, key: torch.Tensor, dense: Sequence[slice], block_m: int, block_n: int
) -> BlockList:
    """Keep the rows and columns of `dense` tokens as well, and return the list of kept tiles."""
    for tokens in dense:
        start, stop, _ = tokens.indices(query.shape[2])
        if stop > start:
            kept[:, :, start // block_m : ceil_div(stop, block_m)] = True
        start, stop, _ = tokens.indices(key.shape[2])
        if stop > start:
            kept[..., start // block_n : ceil_div(stop, block_n)] = True
    return BlockList.of_kept(kept, block_m, block_n)
