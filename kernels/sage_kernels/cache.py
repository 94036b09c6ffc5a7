"""Folder that keeps what was compiled or measured on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $SAGE_KERNELS_CACHE, else sage-hf/cuda in $XDG_CACHE_HOME or ~/.cache; it need not exist."""
    if folder := os.environ.get("SAGE_KERNELS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sage-hf" / "cuda"
