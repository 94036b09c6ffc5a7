"""Writable folders, and files that are replaced atomically."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def check_folder(path: Path, flag: str) -> None:
    """Raise ValueError if `path` or one of its parents exists and is not a folder; missing folders are fine."""
    for part in (path, *path.parents):
        if os.path.lexists(part) and not part.is_dir():
            kind = "a file" if part.exists() else "a link to nothing"
            raise ValueError(f"{flag} must be a folder, and {part} is {kind}")


@contextmanager
def writable_folder(path: Path, flag: str) -> Iterator[None]:
    """Make the folder `path` and check that it is writable; at the end, remove new folders that are empty.

    Raises:
        ValueError: the folder cannot be made or written to; the message names `flag`.
    """
    missing = [part for part in (path, *path.parents) if not part.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"{flag} {path} cannot be written ({reason}): give another folder") from error
        yield
    finally:
        with suppress(OSError):  # the folder holds files, or was never made
            for part in missing:
                part.rmdir()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write `path` atomically: the block writes a temporary file, which then replaces `path`.

    The temporary file has the suffix of `path` and lies next to it. If the block raises an error, the temporary file is
    removed, and `path` is not changed.
    """
    part = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
