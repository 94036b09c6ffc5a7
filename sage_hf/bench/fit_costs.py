"""Fits of the curves of `sage_kernels.costs` to measured times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from statistics import median

import torch

from sage_kernels.costs import KEYS, Curve, Sizes, features

ROWS = (64, 128, 192, 256)
SLOTS_PER_MULTIPROCESSOR = (1, 2, 3, 4)
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
    curves: list[Curve] = []
    for _, points in sorted(kinds.items(), key=lambda item: -len(item[1])):
        whole = [one for one in points if one.sizes.kv_len % KEYS == 0]
        if len(whole) >= FEWEST_POINTS:
            curves.append(_with_factors(_fit_curve(whole, multiprocessors), points))
            continue
        alike = [curve for curve in curves if curve.runner == points[0].runner]
        if alike := alike or curves:
            curves.append(min((_scaled(curve, whole or points) for curve in alike), key=lambda curve: curve.error))
            curves[-1] = _with_factors(curves[-1], points)
    return tuple(sorted(curves, key=lambda curve: (curve.runner, curve.mask, curve.causal, curve.head_dim)))


def _fit_curve(points: Sequence[Measured], multiprocessors: int) -> Curve:
    """Return the curve with the least sum of squared relative errors."""
    first = points[0]
    us = torch.tensor([one.us for one in points], dtype=torch.float64)
    best: tuple[float, Curve] | None = None
    for rows, slots, whole in product(ROWS, SLOTS_PER_MULTIPROCESSOR, (False, True)):
        shape = (first.causal, rows, slots * multiprocessors, whole)
        rows_of_features = [features(one.sizes, *shape) for one in points]
        matrix = torch.tensor(rows_of_features, dtype=torch.float64) / us[:, None]
        if first.mask in ("none", "keys"):
            matrix[:, -1] = 0  # no mask of scores to read, and their number would mislead beyond the points
        weights, residual = _nonnegative(matrix)
        if best is None or residual < best[0]:
            kind = (first.runner, first.sizes.head_dim, first.mask, first.causal)
            best = residual, Curve(*kind, rows, slots * multiprocessors, whole, *weights)
    assert best is not None
    return best[1]


def _with_factors(curve: Curve, points: Sequence[Measured]) -> Curve:
    """Return the curve with the factors and the error that the points show."""
    plain = replace(curve, ragged=1.0, odd=1.0)
    ragged = [one.us / plain.us(one.sizes) for one in points if one.sizes.kv_len % KEYS and one.sizes.kv_len % 8 == 0]
    odd = [one.us / plain.us(one.sizes) for one in points if one.sizes.kv_len % 8]
    factors = {"ragged": median(ragged) if ragged else curve.ragged, "odd": median(odd) if odd else curve.odd}
    found = replace(curve, **factors)
    return replace(found, error=max(abs(found.us(one.sizes) / one.us - 1) for one in points))


def _nonnegative(matrix: torch.Tensor) -> tuple[list[float], float]:
    """Return non-negative weights w with matrix @ w nearest to 1, and the sum of squared differences.

    The best ones are those of plain least squares over some of the columns, whose number is small.
    """
    count = matrix.shape[1]
    target = torch.ones(matrix.shape[0], 1, dtype=matrix.dtype)
    scale = matrix.norm(dim=0).clamp_min(1e-30)
    best, least = [0.0] * count, float("inf")
    for size in range(1, count + 1):
        for columns in map(list, combinations(range(count), size)):
            if not matrix[:, columns].any(0).all():
                continue
            chosen = matrix[:, columns] / scale[columns]
            weights = torch.linalg.lstsq(chosen, target, driver="gelsd").solution
            if (weights < 0).any():
                continue
            residual = float((chosen @ weights - target).square().sum())
            if residual < least:
                least, best = residual, [0.0] * count
                for column, weight in zip(columns, (weights.flatten() / scale[columns]).tolist(), strict=True):
                    best[column] = weight
    return best, least


def _scaled(curve: Curve, points: Sequence[Measured]) -> Curve:
    """Return a curve of the points' kind whose times are another's by their median ratio."""
    first = points[0]
    kind = {"head_dim": first.sizes.head_dim, "mask": first.mask, "causal": first.causal}
    alike = replace(curve, runner=first.runner, **kind)
    ratio = median(one.us / alike.us(one.sizes) for one in points)
    names = ("launch", "token", "item", "tile", "score")
    found = replace(alike, **{name: ratio * getattr(alike, name) for name in names})
    return replace(found, error=max(abs(found.us(one.sizes) / one.us - 1) for one in points))
