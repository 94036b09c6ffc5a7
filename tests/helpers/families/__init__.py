"""A tiny model of every diffusers family, built from its config, and the inputs of one forward pass."""

from __future__ import annotations

import pytest

from tests.helpers.families.family import Family, run
from tests.helpers.families.images import IMAGES
from tests.helpers.families.inputs import BATCH, Inputs
from tests.helpers.families.sounds import SOUNDS
from tests.helpers.families.videos import VIDEOS

__all__ = ["BATCH", "FAMILIES", "Family", "Inputs", "each_family", "family", "run"]

FAMILIES = (*VIDEOS, *IMAGES, *SOUNDS)


def family(name: str) -> Family:
    """The family of that name."""
    return next(case for case in FAMILIES if case.name == name)


each_family = pytest.mark.parametrize("case", FAMILIES, ids=str)
