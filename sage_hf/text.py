"""Text for terminals."""

from __future__ import annotations


def text_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table with aligned columns for a terminal."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["─" * width for width in widths])
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
