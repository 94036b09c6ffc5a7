"""A tiny model of every diffusers family, built from its config, and the inputs of one forward pass."""

from __future__ import annotations

import pytest

from .family import Family, run
from .images import IMAGES
from .inputs import BATCH, Inputs
from .sounds import SOUNDS
from .videos import VIDEOS

__all__ = ["BATCH", "FAMILIES", "Family", "Inputs", "each_family", "family", "run"]

FAMILIES = (*VIDEOS, *IMAGES, *SOUNDS)


def family(name: str) -> Family:
    """The family of that name."""
    return next(case for case in FAMILIES if case.name == name)


each_family = pytest.mark.parametrize("case", FAMILIES, ids=str)
