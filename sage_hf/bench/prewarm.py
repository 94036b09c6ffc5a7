"""Calls made once in several processes, so that the caches on disk hold what is compiled before it is timed.

Compilers take seconds for each kernel, one after another within a process.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

PROCESSES = 16


def call_in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], seconds: float | None = None
) -> list[Result]:
    """Call a function once for each item, in the order of the items, in up to PROCESSES new processes.

    Args:
        function: of a module, so that another process finds it. An error is ignored: the call that follows here
            fails alike, and says so.
        items: what can be pickled.
        seconds: how long to go on beginning calls; default until all have run.

    Returns:
        The results of the calls that ended without an error.
    """
    processes, context = min(PROCESSES, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = [pool.submit(function, item) for item in items]
        wait(futures, timeout=seconds)
        pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures if not future.cancelled() and future.exception() is None]
