"""Text for terminals, which may support only ASCII."""

from __future__ import annotations

import codecs
from typing import TextIO

_SPELLED = str.maketrans(
    {"\u2500": "-", "–": "-", "—": "-", "…": "...", "×": "x", "·": "*", "→": "->", "≤": "<=", "≥": ">=", "²": "^2"}
    | {"α": "alpha", "µ": "u", "ᵀ": "^T", "σ": "sigma"}
)
_HANDLER = "sage_hf.spelled"


def _spell(error: UnicodeError) -> tuple[str, int]:
    """Return a substitute for characters that an encoding lacks, and the place to continue; a codec's error handler."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_SPELLED)
    return text.encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error(_HANDLER, _spell)


def to_ascii(text: str) -> str:
    """Return the text with non-ASCII characters spelled out: "->" for an arrow, an escape for a letter."""
    return text.encode("ascii", _HANDLER).decode()


def allow_any_text(*streams: TextIO) -> None:
    """Let the streams spell out characters that their encoding lacks, as `to_ascii` does, instead of raising an
    error."""
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_HANDLER)


def text_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table with aligned columns for a terminal."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return the same table for a Markdown page; a cell may hold any text of one line."""
    lines = ((cell.replace("|", "\\|") for cell in line) for line in (header, ["---"] * len(header), *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
