"""Names of what a caller lets run where a recipe has no native kernel; no torch is imported, so that parsers may ask."""

from __future__ import annotations

from typing import Literal

Fallback = Literal["native", "emulate", "error"]
FALLBACKS: tuple[Fallback, ...] = ("native", "emulate", "error")
