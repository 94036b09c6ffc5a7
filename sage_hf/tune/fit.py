"""Fits of the curves of `sage_kernels.dispatch.curves` to measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import torch

from sage_kernels.dispatch.curves import Curve, Sizes, features

Shape = tuple[int, int, int, bool]
"""Rows, keys, slots and whether rounds are whole: the fields of `Curve` that are tried."""
ROWS = (64, 128, 192, 256)
KEYS = (64, 128, 176)
SLOTS_PER_MULTIPROCESSOR = (1, 2, 3, 4)
WIDTHS: tuple[Callable[[int], int], ...] = (
    lambda head_dim: -(-head_dim // 32) * 32,
    lambda head_dim: -(-head_dim // 64) * 64,
    lambda head_dim: 1 << (head_dim - 1).bit_length(),
    lambda head_dim: next(width for width in (64, 96, 128, 192, 256) if head_dim <= width),
)
"""Head_dims to which kernels may pad one."""
WIDTH = 128
RIDGE = 1e-9
OWN_POINTS = 10
"""Points of a head_dim from which it has a curve of its own."""
FEWEST_POINTS = 8
"""Points of all head_dims from which there are curves."""


@dataclass(frozen=True)
class Measured:
    """Time of one call in microseconds, with the fields of `Curve` that say of which kind it is."""

    runner: str
    mask: str
    causal: bool
    sizes: Sizes
    us: float


def fit(measured: Iterable[Measured], multiprocessors: int) -> tuple[Curve, ...]:
    """Return a curve for each runner, kind of mask, causality and head_dim that was measured.

    A head_dim of few points has the curve of all head_dims together; kinds of fewer points still have none.
    """
    kinds: dict[tuple[str, str, bool], dict[int, list[Measured]]] = {}
    for one in measured:
        kinds.setdefault((one.runner, one.mask, one.causal), {}).setdefault(one.sizes.head_dim, []).append(one)
    curves = []
    for of_head_dims in kinds.values():
        few = {head_dim: points for head_dim, points in of_head_dims.items() if len(points) < OWN_POINTS}
        curves += [
            _fit_one(points, multiprocessors) for head_dim, points in of_head_dims.items() if head_dim not in few
        ]
        together = [one for points in of_head_dims.values() for one in points]
        if few and len(together) >= FEWEST_POINTS:
            curves += _fit_together(together, few, multiprocessors)
    return tuple(sorted(curves, key=lambda curve: curve.kind))


def _fit_one(points: Sequence[Measured], multiprocessors: int) -> Curve:
    """Return the curve of points of one head_dim with the least sum of squared relative errors."""
    shapes = _shapes(multiprocessors)
    found = [[features(one.sizes, one.causal, *shape) for one in points] for shape in shapes]
    best, (launch, token, item, tile, score) = _best_weights(found, points)
    return _with_error(Curve(*_kind(points[0]), *shapes[best], launch, token, item, tile, score), points)


def _fit_together(
    points: Sequence[Measured], few: Mapping[int, Sequence[Measured]], multiprocessors: int
) -> Iterator[Curve]:
    """Yield curves of the head_dims of few points, whose weights grow with the head_dim as all points say.

    A kernel pads head_dims to one of WIDTHS. A curve lies by its own points the nearer to them the more there are.
    """
    shapes = list(product(_shapes(multiprocessors), WIDTHS))
    found = [[_wide_features(one, shape, width) for one in points] for shape, width in shapes]
    best, (launch, token, item, item_width, tile, tile_width, score) = _best_weights(found, points)
    shape, width = shapes[best]
    for head_dim, own in few.items():
        wide = width(head_dim) / WIDTH
        weights = launch, token * wide, item + item_width * wide, tile + tile_width * wide, score
        curve = Curve(*_kind(own[0]), *shape, *weights)
        apart = sum(math.log(one.us / curve.us(one.sizes)) for one in own) / (len(own) + OWN_POINTS / 4)
        scaled = Curve(*_kind(own[0]), *shape, *(math.exp(apart) * weight for weight in weights))
        yield _with_error(scaled, own)


def _wide_features(one: Measured, shape: Shape, width: Callable[[int], int]) -> tuple[float, ...]:
    constant, tokens, rounds, tiles, scores = features(one.sizes, one.causal, *shape)
    wide = width(one.sizes.head_dim) / WIDTH
    return constant, tokens * wide, rounds, rounds * wide, tiles, tiles * wide, scores


def _shapes(multiprocessors: int) -> list[Shape]:
    slots = [count * multiprocessors for count in SLOTS_PER_MULTIPROCESSOR]
    return list(product(ROWS, KEYS, slots, (False, True)))


def _kind(one: Measured) -> tuple[str, int, str, bool]:
    return one.runner, one.sizes.head_dim, one.mask, one.causal


def _best_weights(
    found: Sequence[Sequence[Sequence[float]]], points: Sequence[Measured]
) -> tuple[int, tuple[float, ...]]:
    """Return which of several lists of the points' features fits their times best, and its weights."""
    us = torch.tensor([one.us for one in points], dtype=torch.float64)
    matrices = torch.tensor(found, dtype=torch.float64) / us[:, None]
    if points[0].mask.split(",")[0] in ("none", "keys"):
        matrices[..., -1] = 0  # no mask of scores to read, and their number would mislead beyond the points
    weights, residuals = _nonnegative(matrices)
    best = int(residuals.argmin())
    return best, tuple(weights[best].tolist())


def _with_error(curve: Curve, points: Sequence[Measured]) -> Curve:
    """Return the curve with its error."""
    squares = [math.log(one.us / curve.us(one.sizes)) ** 2 for one in points]
    return replace(curve, error=math.sqrt(sum(squares) / len(squares)))


def _nonnegative(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return non-negative weights w with matrix @ w nearest to 1 for each matrix, and the sums of squared differences.

    Args:
        matrices: (number, points, columns).

    Returns:
        (number, columns) and (number,). The best weights are those of plain least squares over some of the columns,
        whose number is small.
    """
    number, points, count = matrices.shape
    scale = matrices.norm(dim=1).clamp_min(1e-30)
    scaled = matrices / scale[:, None]
    products, sums = scaled.mT @ scaled, scaled.sum(1)
    best, least = matrices.new_zeros(number, count), matrices.new_full((number,), float("inf"))
    for size in range(1, count + 1):
        for columns in map(list, combinations(range(count), size)):
            chosen = products[:, columns][:, :, columns]
            ridge = RIDGE * torch.eye(size, dtype=matrices.dtype)  # columns may be alike, or 0
            weights = torch.linalg.solve(chosen + ridge, sums[:, columns])
            fitted = (weights[:, None] @ chosen @ weights[..., None]).flatten()
            residuals = points - 2 * (weights * sums[:, columns]).sum(1) + fitted
            better = (weights >= 0).all(1) & (residuals < least)
            least = torch.where(better, residuals, least)
            found = torch.zeros_like(best)
            found[:, columns] = weights
            best = torch.where(better[:, None], found, best)
    return best / scale, least
