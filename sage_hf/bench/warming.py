"""Calls made once in several processes, so that the caches on disk hold what is compiled before it is timed.

Compilers take seconds for each kernel, one after another within a process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")

PROCESSES = 16


def call_in_processes(function: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call a function once for each item, in the order of the items, in up to PROCESSES new processes.

    Args:
        function: of a module, so that another process finds it. What it raises is ignored: the call that follows here
            fails alike, and says so.
        items: what can be pickled.
    """
    with ProcessPoolExecutor(
        min(PROCESSES, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        wait([pool.submit(_quietly, function, item) for item in items])


def _quietly(function: Callable[[Item], object], item: Item) -> None:
    with contextlib.suppress(Exception):
        function(item)
