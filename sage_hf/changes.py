"""Changes of models that can be undone, by whoever holds the model: a dropped handle loses none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sage_hf.attributes import CHANGES

Undo = list[Callable[[], object]]
"""Functions that undo a change, the last one first; a copy or a pickle of the model has copies that undo its own."""


class Change:
    """Change of a model that is in force until it is undone.

    The model holds it, not a table: what undoes it may refer to the model, and is gone or copied with it.
    """

    def __init__(self, model: nn.Module, undo: Undo) -> None:
        self.model = model
        self._undo = undo
        vars(model).setdefault(CHANGES, []).append(self)

    @property
    def is_in_force(self) -> bool:
        """Check whether it has not been undone."""
        return self in changes_of(self.model)

    def undo(self) -> None:
        """Undo this change, and before it all later ones; do nothing if it is not in force."""
        while self.is_in_force:
            changes = changes_of(self.model)
            last = changes[-1]
            while last._undo:
                last._undo.pop()()
            changes.remove(last)
            if not changes:
                delattr(self.model, CHANGES)


def changes_of(model: nn.Module) -> list[Change]:
    """Return the changes of a model that are in force, the latest last."""
    return vars(model).get(CHANGES, [])


def inner(model: Any) -> Any:
    """Return the model that a compiled one wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)
