"""The fastest mix of recipes whose predicted loss stays within a limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from sage_hf.config import LayerRule, SageConfig, StepRule


@dataclass(frozen=True)
class StepRange:
    """Denoising steps `start` to `stop` (excluded), which run one recipe."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"step {self.start}" if len(self) == 1 else f"steps {self.start}-{self.stop - 1}"


def step_ranges(num_steps: int, count: int) -> tuple[StepRange, ...]:
    """Divide the steps into at most `count` ranges: the first step, the last step, and equal parts of the steps in
    between.

    Raises:
        ValueError: there is no step, or `count` is less than three.
    """
    if num_steps < 1 or count < 3:
        raise ValueError(f"expected at least one step and three ranges, got {num_steps} steps and {count} ranges")
    middle = max(0, num_steps - 2)
    parts = min(count - 2, middle)
    bounds = {0, num_steps, min(1, num_steps), max(num_steps - 1, 0)}
    bounds |= {1 + middle * part // parts for part in range(parts)}
    ordered = sorted(bounds)
    return tuple(StepRange(start, stop) for start, stop in pairwise(ordered))


@dataclass(frozen=True)
class Mix:
    """Choice of a recipe, as an index, for every layer and range of steps, in the form that a SageConfig can hold.

    Attributes:
        rows: the recipe of each layer that runs one recipe at all steps; None where `columns` decides.
        columns: the recipe of each range, in the other layers.
    """

    rows: tuple[int | None, ...]
    columns: tuple[int, ...]

    def cells(self) -> np.ndarray:
        """Return the recipe of every layer (row) and range (column), int64."""
        return np.array([self.columns if row is None else [row] * len(self.columns) for row in self.rows])

    def total(self, values: np.ndarray) -> float:
        """Return the sum of values (layers, ranges, recipes) over all cells, taken at each cell's recipe."""
        return float(np.take_along_axis(values, self.cells()[..., None], axis=2).sum())

    def config(self, recipes: Sequence[str], layers: Sequence[str], ranges: Sequence[StepRange | None]) -> SageConfig:
        """Return the mix as a configuration; a range is None where the model has no steps.

        The last steps count from the end, so that the rules fit more or fewer steps too.
        """
        rules = [
            LayerRule(layer, recipes[row]) for layer, row in zip(layers, self.rows, strict=True) if row is not None
        ]
        steps: Counter[int] = Counter()
        for column, span in zip(self.columns, ranges, strict=True):
            steps[column] += 1 if span is None else len(span)
        default = steps.most_common(1)[0][0]
        spans = [(column, span) for column, span in zip(self.columns, ranges, strict=True) if span is not None]
        step_rules = []
        for column, group in groupby(spans, key=itemgetter(0)):
            joined = [span for _, span in group]
            start, stop = joined[0].start, joined[-1].stop
            last = spans[-1][1].stop
            rule = StepRule(start, stop, recipes[column])
            if column != default:
                step_rules.append(replace(rule, start=start - last, stop=None) if stop == last else rule)
        return SageConfig(recipes[default], layers=tuple(rules), steps=tuple(step_rules))


def fastest_mix(losses: np.ndarray, costs: np.ndarray, limit: float, start: Sequence[int | None] = ()) -> Mix:
    """Find a mix of little cost whose losses add up to at most `limit`.

    Greedy: begin with the fastest recipe everywhere, and take the change of one layer or of one range that removes most
    loss for its cost, until the sum is within the limit. Then take back or exchange changes as long as this saves cost
    and the sum stays within the limit.

    Args:
        losses: (layers, ranges, recipes), the loss that each recipe adds; the last recipe is the most accurate.
        costs: (layers, ranges, recipes), in any unit.
        limit: the largest sum of losses. If no mix has it, the most accurate recipe runs everywhere.
        start: recipes of layers that must not change; None for layers that may change.

    Returns:
        The mix.
    """
    num_layers, num_ranges, num_recipes = losses.shape
    fixed = tuple(start) or (None,) * num_layers
    mix = Mix(fixed, (0,) * num_ranges)

    def changes(mix: Mix) -> Iterator[tuple[Mix, float, float]]:
        """Yield each mix that differs in one layer or range, with its loss and cost."""
        for other in _neighbours(mix, fixed, num_recipes):
            yield other, other.total(losses), other.total(costs)

    loss, cost = mix.total(losses), mix.total(costs)
    while loss > limit:
        better = [change for change in changes(mix) if change[1] < loss]
        if not better:
            return Mix(tuple(num_recipes - 1 if row is None else row for row in fixed), (num_recipes - 1,) * num_ranges)
        mix, loss, cost = max(better, key=lambda change: (loss - change[1]) / max(change[2] - cost, 1e-12 * cost))
    while saving := [change for change in changes(mix) if change[1] <= limit and change[2] < cost * (1 - 1e-9)]:
        mix, loss, cost = min(saving, key=lambda change: change[2])
    return mix


def _neighbours(mix: Mix, fixed: Sequence[int | None], num_recipes: int) -> Iterable[Mix]:
    for layer, row in enumerate(mix.rows):
        if fixed[layer] is None:
            for recipe in (None, *range(num_recipes)):
                if recipe != row:
                    yield replace(mix, rows=(*mix.rows[:layer], recipe, *mix.rows[layer + 1 :]))
    for place, column in enumerate(mix.columns):
        for recipe in range(num_recipes):
            if recipe != column:
                yield replace(mix, columns=(*mix.columns[:place], recipe, *mix.columns[place + 1 :]))
