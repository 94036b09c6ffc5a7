"""A call's output, layout, flags and plan depend on the call and on settings, not on other calls: three minutes."""

import time

import pytest
import torch

from sage_kernels.dispatch import registry
from tests.helpers import drawn_calls

SECONDS, PARTS, SEEDS = 180.0, 6, 10_000


@pytest.mark.parametrize("part", range(PARTS))
def test_calls_do_not_depend_on_others(part, device):
    end, seed = time.monotonic() + SECONDS / PARTS, part * SEEDS
    try:
        while time.monotonic() < end:
            drawn_calls.check(seed, device)
            seed += 1
            torch.cuda.empty_cache()
    finally:
        registry.forget_choices()
    assert seed > part * SEEDS + 3  # it ran some
