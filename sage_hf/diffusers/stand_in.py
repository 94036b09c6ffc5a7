"""Stand-ins for objects of diffusers, which are not written to: a compiled call finds them as they were traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StandIn:
    """Stand-in for an object during one call: it has some attributes of its own, and all others of the object."""

    def __init__(self, original: Any, own: Mapping[str, Any]) -> None:
        self._original = original
        for name, value in own.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
