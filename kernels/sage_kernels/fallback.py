"""What a caller lets run in place of a recipe that has no native kernel. Imports no torch, so that a parser may ask."""

from __future__ import annotations

from typing import Literal

Fallback = Literal["native", "emulate", "error"]
FALLBACKS: tuple[Fallback, ...] = ("native", "emulate", "error")
