"""Patterns of layer names: shell style, with the ranges that `sage_hf.explain` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

_RANGE = re.compile(r"(?<![^.])(\d+)-(\d+)(?![^.])")
"""A part of a dotted name that stands for several numbers."""


def matches(pattern: str, layer: str) -> bool:
    """Check whether the layer's name matches the pattern, such as `blocks.*.attn1` or `blocks.0-3.attn1`."""
    return fnmatchcase(layer, pattern) or any(fnmatchcase(layer, plain) for plain in _without_ranges(pattern))


def _without_ranges(pattern: str) -> Iterator[str]:
    """Yield a pattern for each number of each range; yield nothing if there is no range."""
    if (numbers := _RANGE.search(pattern)) is None:
        return
    for number in range(int(numbers[1]), int(numbers[2]) + 1):
        pattern_of_number = f"{pattern[: numbers.start()]}{number}{pattern[numbers.end() :]}"
        yield from _without_ranges(pattern_of_number) if _RANGE.search(pattern_of_number) else (pattern_of_number,)
