"""Results of benchmarks: facts about machine and source, JSON files, and rows kept from an earlier run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from sage_hf.files import replacing

Row = dict[str, Any]
BenchmarkResult = dict[str, Any]
"""Facts, and "rows"; some benchmarks have more tables of rows."""

PACKAGES = (
    *("sage-hf", "triton", "diffusers", "transformers", "accelerate"),
    *("fa3-fwd", "nvidia-cudnn-frontend", "sageattention", "sageattention2"),
)
COMMIT = "SAGE_HF_COMMIT"
"""Environment variable that names the commit of the source where there is no git checkout."""


def facts(device: torch.device) -> BenchmarkResult:
    """Return facts about the machine, the versions and the source."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if on_gpu else "",
        "torch": torch.__version__,
        "triton": packages.pop("triton", ""),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "packages": packages,
        "commit": os.environ.get(COMMIT) or _commit_of_the_checkout(),
        "date": date.today().isoformat(),
    }


def _commit_of_the_checkout() -> str:
    """Return the commit of the checkout that holds this file; "" for an installed package, or without git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        git = ["git", "-C", str(root), "rev-parse", "HEAD"]
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def reason(error: Exception) -> str:
    """Return the type and the first line of an error, for a row's "unavailable"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def path_of(folder: Path, result: BenchmarkResult, benchmark: str) -> Path:
    """Return the file of a benchmark's result: <gpu>-<benchmark>.json."""
    return folder / f"{re.sub('[^a-z0-9]+', '-', result['gpu'].lower())}-{benchmark}.json"


def read(path: Path) -> BenchmarkResult | None:
    """Return the result in a file; None if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write(path: Path, result: BenchmarkResult) -> None:
    """Write a result to a file, and make its folder; an interrupted run leaves the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(to_json(result), encoding="utf-8")


def to_json(result: BenchmarkResult) -> str:
    """Return a result as JSON, with one line for each row of each of its tables."""

    def lines(rows: Sequence[Row]) -> str:
        return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]"

    def is_table(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(row, dict) for row in value)

    named = (
        f"{json.dumps(name)}: {lines(value) if is_table(value) else json.dumps(value, ensure_ascii=False)}"
        for name, value in result.items()
    )
    return "{\n" + ",\n".join(named) + "\n}\n"


def earlier_rows(path: Path, now: BenchmarkResult, table: str = "rows") -> list[Row]:
    """Return the rows of a file's table; none if machine, versions or commit were others.

    Args:
        path: the file, which need not exist.
        now: the facts of this run.
        table: name of the table, which the file need not have.
    """
    before = read(path) or {}
    is_same = all(name in before and before[name] == fact for name, fact in now.items() if name != "date")
    return before.get(table, []) if is_same else []


class ResumedResult:
    """A result that is written row by row, and continues an earlier run's file; see `earlier_rows`.

    Attributes:
        path: the JSON file.
        result: facts and tables.
    """

    def __init__(self, path: Path, facts: BenchmarkResult, tables: Sequence[str]) -> None:
        self.path = path
        self.result: BenchmarkResult = facts | {table: earlier_rows(path, facts, table) for table in tables}

    def has(self, table: str, **key: Any) -> bool:
        """Return whether a table has a row with this key."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.result[table])

    def add(self, table: str, *rows: Row) -> None:
        """Add rows, write the file, and print the rows."""
        self.result[table] += rows
        write(self.path, self.result)
        for row in rows:
            print(table, row, flush=True)


def merged(rows: Sequence[Row], earlier: Sequence[Row], key: Callable[[Row], Any], order: Sequence[Any]) -> list[Row]:
    """Return rows, and the earlier rows that have other keys.

    Args:
        rows: the new rows.
        earlier: see `earlier_rows`.
        key: function that returns a row's key.
        order: keys in the order of the rows; rows with other keys follow.
    """
    by_key = {key(row): row for row in (*earlier, *rows)}
    places = {row_key: place for place, row_key in enumerate(order)}
    return [by_key[row_key] for row_key in sorted(by_key, key=lambda row_key: places.get(row_key, len(order)))]
