"""Changes of models that anyone who holds the model can undo, even if the handle was dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sage_hf.attributes import CHANGES

Undo = list[Callable[[], object]]
"""Functions that undo a change, run from last to first; a copy or pickle of the model has copies for its own
changes."""


class Change:
    """Change of a model that is in force until it is undone.

    The model holds the change, not a table: the functions that undo it may refer to the model, and are deleted or
    copied with the model.
    """

    def __init__(self, model: nn.Module, undo: Undo) -> None:
        self.model = model
        self._undo = undo
        vars(model).setdefault(CHANGES, []).append(self)

    @property
    def is_in_force(self) -> bool:
        """Check that the change has not been undone."""
        return self in changes_of(self.model)

    def undo(self) -> None:
        """Undo all later changes, then this one; do nothing if it is not in force."""
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
    """Return the model that a compiled model wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)
