"""Find out which compilers are installed, without importing them."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec


@lru_cache(maxsize=1)
def triton_version() -> tuple[int, int] | None:
    """Return (major, minor) of the installed Triton, None without one."""
    try:
        spec = find_spec("triton")
    except (ImportError, ValueError):  # its import is blocked
        spec = None
    if spec is None:
        return None
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:  # distributed under another name
        version = import_module("triton").__version__
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
