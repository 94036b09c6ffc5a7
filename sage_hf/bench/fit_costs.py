"""Fits of the curves of `sage_kernels.curves` to measured times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from statistics import median

import torch

from sage_kernels.curves import Curve, Sizes, features

ROWS = (64, 128, 192, 256)
KEYS = (64, 128, 176)
SLOTS_PER_MULTIPROCESSOR = (1, 2, 3, 4)
RIDGE = 1e-9
FEWEST_POINTS = 5
"""Points from which a curve gets weights of its own; with fewer it is another one, of its runner if it can, scaled."""


@dataclass(frozen=True)
class Measured:
    """Time of one call in microseconds, with the fields of `Curve` that say of which kind it is."""

    runner: str
    mask: str
    causal: bool
    sizes: Sizes
    us: float


def fit(measured: Iterable[Measured], multiprocessors: int) -> tuple[Curve, ...]:
    """Return a curve for each runner, kind of mask, causality and head_dim that was measured."""
    kinds: dict[tuple[str, str, bool, int], list[Measured]] = {}
    for one in measured:
        kinds.setdefault((one.runner, one.mask, one.causal, one.sizes.head_dim), []).append(one)
    curves: dict[tuple[str, str, bool, int], Curve] = {}
    for kind, points in sorted(kinds.items(), key=lambda item: -len(item[1])):
        if len(points) >= FEWEST_POINTS:
            curves[kind] = _fit_curve(points, multiprocessors)
        elif alike := _alike(kind, curves):
            curves[kind] = min((_scaled(curve, points) for curve in alike), key=lambda curve: curve.error)
    return tuple(curve for _, curve in sorted(curves.items()))


def _alike(kind: tuple[str, str, bool, int], curves: dict[tuple[str, str, bool, int], Curve]) -> list[Curve]:
    """Return the curves of the same runner, mask and causality; without any, of the same runner, else all.

    Args:
        kind: runner, mask, causality and head_dim.
        curves: by kind.
    """
    for parts in (3, 1, 0):
        if found := [curve for other, curve in curves.items() if other[:parts] == kind[:parts]]:
            return found
    return []


def _fit_curve(points: Sequence[Measured], multiprocessors: int) -> Curve:
    """Return the curve with the least sum of squared relative errors."""
    first = points[0]
    shapes = [
        (rows, keys, slots * multiprocessors, whole)
        for rows, keys, slots, whole in product(ROWS, KEYS, SLOTS_PER_MULTIPROCESSOR, (False, True))
    ]
    found = [[features(one.sizes, first.causal, *shape) for one in points] for shape in shapes]
    us = torch.tensor([one.us for one in points], dtype=torch.float64)
    matrices = torch.tensor(found, dtype=torch.float64) / us[:, None]
    if first.mask.split(",")[0] in ("none", "keys"):
        matrices[..., -1] = 0  # no mask of scores to read, and their number would mislead beyond the points
    weights, residuals = _nonnegative(matrices)
    best = int(residuals.argmin())
    launch, token, item, tile, score = weights[best].tolist()
    kind = (first.runner, first.sizes.head_dim, first.mask, first.causal)
    return _with_error(Curve(*kind, *shapes[best], launch, token, item, tile, score), points)


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


def _scaled(curve: Curve, points: Sequence[Measured]) -> Curve:
    """Return a curve of the points' kind whose times are another's by their median ratio."""
    first = points[0]
    alike = replace(curve, runner=first.runner, head_dim=first.sizes.head_dim, mask=first.mask, causal=first.causal)
    ratio = median(one.us / alike.us(one.sizes) for one in points)
    names = ("launch", "token", "item", "tile", "score")
    found = replace(alike, **{name: ratio * getattr(alike, name) for name in names})
    return _with_error(found, points)
