"""Parameters of tests: few of a product's combinations show what all do, and the others are audited."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[int, int, int, int]


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of one value of each axis as parameters; the marker `audit` is on those it can spare.

    Every two values of different axes are together in a combination without the marker. On a GPU most combinations are
    a kernel to compile.
    """
    cases = list(product(*map(range, map(len, axes))))
    pairs = {case: _pairs(case) for case in cases}
    missing, kept = set().union(*pairs.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        kept.add(best)
    parameters = []
    for case in cases:
        values = [axis[place] for axis, place in zip(axes, case, strict=True)]
        parameters.append(pytest.param(*values, marks=_mark(case in kept), id="-".join(map(str, values))))
    return parameters


def some(values: Sequence[Any], kept: int) -> list[Any]:
    """Return values as parameters; the marker `audit` is on those behind the first `kept`."""
    return [pytest.param(value, marks=_mark(place < kept)) for place, value in enumerate(values)]


def _pairs(case: tuple[int, ...]) -> set[Pair]:
    return {(*first, *second) for first, second in combinations(enumerate(case), 2)}


def _mark(kept: bool) -> tuple[Any, ...]:
    return () if kept else (pytest.mark.audit,)
