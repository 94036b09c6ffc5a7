"""Fits of the curves of `sage_kernels.curves` to measured times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from statistics import median

import torch

from sage_kernels.costs import Table
from sage_kernels.curves import KEYS, Curve, Sizes, features

ROWS = (64, 128, 192, 256)
SLOTS_PER_MULTIPROCESSOR = (1, 2, 3, 4)
DRIFT = 0.1
"""Share by which GPUs of one name differ in speed."""
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
        even = [one for one in points if one.sizes.kv_len % KEYS == 0]
        if len(even) >= FEWEST_POINTS:
            curves[kind] = _fit_curve(even, multiprocessors)
        elif alike := _alike(kind, curves):
            curves[kind] = min((_scaled(curve, even or points) for curve in alike), key=lambda curve: curve.error)
    return tuple(_with_measured(curve, kinds[kind]) for kind, curve in sorted(curves.items()))


def _alike(
    kind: tuple[str, str, bool, int], curves: dict[tuple[str, str, bool, int], Curve], least: int = 0
) -> list[Curve]:
    """Return the curves of the same runner, mask and causality; without any, of the same runner, else all.

    Args:
        kind: runner, mask, causality and head_dim.
        curves: by kind.
        least: how many of the kind's facts they must share.
    """
    for parts in (parts for parts in (3, 1, 0) if parts >= least):
        if found := [curve for other, curve in curves.items() if other[:parts] == kind[:parts]]:
            return found
    return []


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
            launch, token, item, tile, score = weights
            best = residual, Curve(*kind, rows, slots * multiprocessors, whole, launch, token, item, tile, score)
    assert best is not None
    return best[1]


def _with_measured(curve: Curve, points: Sequence[Measured]) -> Curve:
    """Return the curve with what was measured, and with its error."""
    factors = {one.sizes: one.us / curve.formula(one.sizes) for one in points}
    measured = tuple(
        (sizes.batch, sizes.q_heads, sizes.kv_heads, sizes.q_len, sizes.kv_len, factor)
        for sizes, factor in factors.items()
    )
    return replace(curve, measured=measured, error=max(abs(1 / factor - 1) for factor in factors.values()))


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
    alike = replace(curve, runner=first.runner, head_dim=first.sizes.head_dim, mask=first.mask, causal=first.causal)
    ratio = median(one.us / alike.us(one.sizes) for one in points)
    names = ("launch", "token", "item", "tile", "score")
    found = replace(alike, **{name: ratio * getattr(alike, name) for name in names})
    return replace(found, error=max(abs(found.us(one.sizes) / one.us - 1) for one in points))


def extended(table: Table, measured: Iterable[Measured]) -> Table:
    """Return a table whose curves also know the calls of a run, in place of what they knew of the same ones.

    Runs differ by their GPUs' clocks. What a call takes by runners that this run has not measured is scaled by how much
    longer it takes here than the table knew, the median over the others, of which those that differ by more than DRIFT
    do for another reason. A kind that the table lacks gets the formula of the next larger head_dim's curve, else of
    another one of its runner and mask; without any, its calls are left out.
    """
    calls: dict[tuple[str, bool, Sizes], dict[str, float]] = {}
    for one in measured:
        calls.setdefault((one.mask, one.causal, one.sizes), {})[one.runner] = one.us
    kinds: dict[tuple[str, str, bool, int], list[Measured]] = {}
    for (mask, causal, sizes), us in calls.items():
        known = _known(table, mask, causal, sizes)
        ratios = [us[runner] / known[runner] for runner in us if runner in known]
        drift = median([ratio for ratio in ratios if abs(ratio - 1.0) < DRIFT] or [1.0])
        scaled = {runner: time * drift for runner, time in known.items()}
        for runner, time in (scaled | us).items():
            one = Measured(runner, mask, causal, sizes, time)
            kinds.setdefault((runner, mask, causal, sizes.head_dim), []).append(one)
    curves = {(curve.runner, curve.mask, curve.causal, curve.head_dim): curve for curve in table.curves}
    for kind, points in kinds.items():
        base = curves.get(kind) or table.curve(*kind) or next(iter(_alike(kind, curves, least=3)), None)
        if base is None:
            continue
        curve = replace(base, head_dim=kind[3], measured=base.measured if kind in curves else ())
        found = _with_measured(curve, points)
        new = {call[:-1] for call in found.measured}
        known_calls = (*(call for call in curve.measured if call[:-1] not in new), *found.measured)
        error = max(abs(1 / factor - 1) for *_, factor in known_calls)
        curves[kind] = replace(found, measured=known_calls, error=error)
    return replace(table, curves=tuple(curve for _, curve in sorted(curves.items())))


def _known(table: Table, mask: str, causal: bool, sizes: Sizes) -> dict[str, float]:
    """Return what a call takes by those runners by which the table knows it."""
    call = (sizes.batch, sizes.q_heads, sizes.kv_heads, sizes.q_len, sizes.kv_len)
    return {
        curve.runner: curve.us(sizes)
        for curve in table.curves
        if (curve.mask, curve.causal, curve.head_dim) == (mask, causal, sizes.head_dim)
        and any(one[:-1] == call for one in curve.measured)
    }
