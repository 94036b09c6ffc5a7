"""Results of a study, written row by row, so that a run continues an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_hf.bench import results


class Results:
    """The tables of a JSON file, and the keys of rows that need no new measurement."""

    def __init__(self, path: Path, facts: dict[str, Any], tables: Sequence[str]) -> None:
        """Keep the tables of a run whose facts are the same, except for the date."""
        before = results.read(path) or {}
        same_facts = all(before.get(name) == value for name, value in facts.items() if name != "date")
        self.path = path
        self.result = facts | {name: before.get(name, []) if same_facts else [] for name in tables}

    def has(self, table: str, **key: Any) -> bool:
        """Return whether a table has a row with this key."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.result[table])

    def add(self, table: str, *rows: dict[str, Any]) -> None:
        """Add rows, write the file, and print the rows."""
        self.result[table] += rows
        results.write(self.path, self.result)
        for row in rows:
            print(table, row, flush=True)
