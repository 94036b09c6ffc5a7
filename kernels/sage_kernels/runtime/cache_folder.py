"""Folder of kernels compiled and costs measured on this machine, and the warning that compilation takes a while."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds: more than reading a compiled kernel from a cache takes."""
_announced = threading.Event()
_lock = threading.Lock()


def cache_folder() -> Path:
    """Return $SAGE_KERNELS_CACHE, else sage-hf/cuda in $XDG_CACHE_HOME or ~/.cache; it need not exist."""
    if folder := os.environ.get("SAGE_KERNELS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sage-hf" / "cuda"


def announce_compilation() -> None:
    """Warn, once in a process, that GPU kernels are being compiled."""
    with _lock:
        if not _announced.is_set():
            logger.warning(
                "compiling GPU kernels: a first call takes up to half a minute; later calls and processes find them in "
                "the caches of Triton and of sage-hf (%s)",
                cache_folder(),
            )
            _announced.set()


@contextlib.contextmanager
def announcing_if_slow() -> Iterator[None]:
    """Call `announce_compilation` while the block runs, if the block takes longer than reading a compiled kernel."""
    if _announced.is_set():
        yield
        return
    timer = threading.Timer(PATIENCE, announce_compilation)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
