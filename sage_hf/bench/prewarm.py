"""Call functions once in several processes, so that the caches on disk hold compiled kernels before they are timed.

Compilers take seconds for each kernel, one after another within a process.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, wait
from typing import TypeVar

Task = TypeVar("Task")
TaskResult = TypeVar("TaskResult")

PROCESSES = 16


def call_in_processes(
    function: Callable[[Task], TaskResult], items: Iterable[Task], seconds: float | None = None
) -> list[TaskResult]:
    """Call a function once for each item, in the order of the items, in up to PROCESSES new processes.

    Args:
        function: a function of a module, so that another process finds it. Its errors are ignored: the later call in
            this process fails in the same way, and reports it.
        items: arguments, which can be pickled.
        seconds: time after which no call begins; default: all calls run.

    Returns:
        The results of the calls that ended without an error.
    """
    processes, context = min(PROCESSES, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = [pool.submit(function, item) for item in items]
        wait(futures, timeout=seconds)
        pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures if not future.cancelled() and future.exception() is None]
