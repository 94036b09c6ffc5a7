"""Fits of the curves of `sage_kernels.dispatch.curves` to measured times."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import torch

from sage_kernels.dispatch.curves import (
    NOMINAL_WIDTH,
    CallSizes,
    CostCurve,
    CostWeights,
    ItemOrder,
    ItemSchedule,
    Regime,
    work,
)

ROWS = (64, 128, 192, 256)
KEYS = (64, 128, 176, 192)
ITEMS_PER_MULTIPROCESSOR = (1, 2, 3, 4)
ORDERS = get_args(ItemOrder)
WIDTHS = (tuple(range(32, 257, 32)), (64, 128, 192, 256), (16, 32, 64, 128, 256), (64, 96, 128, 192, 256))
"""Head dimensions to which kernels pad: multiples of 32 and of 64, powers of 2, and FlashAttention 3's sizes."""
PER_WIDTH = [CostWeights._fields.index(name) for name in ("queries", "keys", "wide_item", "wide_tile", "ragged")]
FEWEST = 8
"""Smallest number of calls, over all head_dims, for a curve."""
FEWEST_OF_A_WIDTH = 20
"""Smallest number of calls of a padded head_dim for a separate curve."""
SWEEPS = 60
"""Sweeps of descent for all schedules."""
BEST_SCHEDULES = 8
"""Number of schedules whose descent continues."""
LAST_SWEEPS = 400
"""Sweeps of descent for the best schedules."""


@dataclass(frozen=True)
class MeasuredTime:
    """Time of one call in microseconds, with the fields of `CostCurve` that name the call's kind."""

    provider: str
    mask: str
    causal: bool
    sizes: CallSizes
    us: float
    regime: Regime = ""


def fit(measured: Iterable[MeasuredTime], multiprocessors: int) -> tuple[CostCurve, ...]:
    """Fit a curve to each provider, kind of mask, causality and regime with at least FEWEST calls.

    The curve is for all head_dims; padded head_dims with FEWEST_OF_A_WIDTH calls also have a separate curve.
    """
    kinds: dict[tuple[str, str, bool, Regime], list[MeasuredTime]] = {}
    for point in measured:
        kinds.setdefault((point.provider, point.mask, point.causal, point.regime), []).append(point)
    curves = []
    for calls in kinds.values():
        if len(calls) < FEWEST:
            continue
        curve = _fit_one(calls, multiprocessors)
        curves.append(curve)
        for low, high in sorted({_padded_alike(curve.schedule.widths, call.sizes.head_dim) for call in calls}):
            calls_of_width = [call for call in calls if low <= call.sizes.head_dim <= high]
            if FEWEST_OF_A_WIDTH <= len(calls_of_width) < len(calls):
                curves.append(replace(_fit_one(calls_of_width, multiprocessors), head_dims=(low, high)))
    return tuple(
        sorted(curves, key=lambda curve: (curve.provider, curve.mask, curve.regime, curve.causal, curve.head_dims))
    )


def _padded_alike(widths: Sequence[int], head_dim: int) -> tuple[int, int]:
    """Return the smallest and the largest head_dim that are padded to the same width as this head_dim."""
    index = bisect_left(widths, head_dim)
    return (widths[index - 1] + 1 if index else 1), widths[index]


def _fit_one(calls: Sequence[MeasuredTime], multiprocessors: int) -> CostCurve:
    """Return the curve with the least sum of squared relative errors."""
    kind, head_dims = calls[0], {call.sizes.head_dim for call in calls}
    grouped = any(call.sizes.q_heads != call.sizes.kv_heads for call in calls)
    slots = [count * multiprocessors for count in ITEMS_PER_MULTIPROCESSOR]
    packs, widths = (False, True)[: 1 + grouped], WIDTHS if len(head_dims) > 1 else WIDTHS[:1]
    nominal_schedules = [ItemSchedule(*sizes, (NOMINAL_WIDTH,)) for sizes in product(ROWS, KEYS, slots, ORDERS, packs)]
    schedules = [
        replace(nominal_schedule, widths=padded) for padded, nominal_schedule in product(widths, nominal_schedules)
    ]
    us = torch.tensor([call.us for call in calls], dtype=torch.float64)
    # The padded head_dim is only a factor of some columns.
    nominal = [replace(call.sizes, head_dim=NOMINAL_WIDTH) for call in calls]
    works = [[work(sizes, kind.causal, schedule) for sizes in nominal] for schedule in nominal_schedules]
    factors = [[_padded_alike(padded, call.sizes.head_dim)[1] / NOMINAL_WIDTH for call in calls] for padded in widths]
    columns = torch.tensor(works, dtype=torch.float64).expand(len(widths), -1, -1, -1).clone()
    columns[..., PER_WIDTH] *= torch.tensor(factors, dtype=torch.float64)[:, None, :, None]
    if kind.mask in ("none", "keys"):
        columns[..., -1] = 0.0  # there is no attention bias to read
    relative = columns.flatten(0, 1) / us[:, None]
    best = _nonnegative(relative, SWEEPS)[1].topk(BEST_SCHEDULES, largest=False).indices
    weights, errors = _nonnegative(relative[best], LAST_SWEEPS)
    least = int(errors.argmin())
    schedule, fitted = schedules[int(best[least])], CostWeights(*weights[least].tolist())
    served = _padded_alike(schedule.widths, min(head_dims))[0], _padded_alike(schedule.widths, max(head_dims))[1]
    curve = CostCurve(kind.provider, kind.mask, kind.causal, served, schedule, fitted, regime=kind.regime)
    squares = [math.log(call.us / curve.us(call.sizes)) ** 2 for call in calls]
    return replace(curve, error=math.sqrt(sum(squares) / len(squares)))


def _nonnegative(matrices: torch.Tensor, sweeps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find non-negative weights w with matrix @ w near 1 for each matrix, by coordinate descent.

    Args:
        matrices: (number, calls, columns).

    Returns:
        Weights (number, columns), and sums of squared differences (number,).
    """
    scale = matrices.norm(dim=1).clamp_min(1e-30)
    scaled = matrices / scale[:, None]
    products, sums = scaled.mT @ scaled, scaled.sum(1)
    weights = torch.zeros_like(sums)
    for _, column in product(range(sweeps), range(sums.shape[1])):
        slope = sums[:, column] - (products[:, column] * weights).sum(1)
        weights[:, column] = (weights[:, column] + slope / products[:, column, column].clamp_min(1e-9)).clamp_min(0.0)
    fitted = (weights[:, None] @ products @ weights[..., None]).flatten()
    return weights / scale, matrices.shape[1] - 2 * (weights * sums).sum(1) + fitted
