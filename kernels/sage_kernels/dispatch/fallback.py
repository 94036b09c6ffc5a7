"""Names of what a caller lets run where a recipe has no native kernel; importing them imports no torch."""

from __future__ import annotations

from typing import Literal

Fallback = Literal["native", "emulate", "error"]
FALLBACKS: tuple[Fallback, ...] = ("native", "emulate", "error")
