"""A call's output, layout, flags and plan depend on the call and on settings, not on other calls."""

import pytest
import torch

from sage_kernels.dispatch import registry
from tests.helpers import drawn_calls

PROGRAMS = 8


@pytest.fixture(autouse=True)
def undone():
    """One thread, so that sums have one order; what calls remember is forgotten in the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    registry.forget_choices()


@pytest.mark.parametrize("first", [0, *(pytest.param(n * PROGRAMS, marks=pytest.mark.audit) for n in range(1, 5))])
def test_calls_do_not_depend_on_others(first):
    for seed in range(first, first + PROGRAMS):
        drawn_calls.check(seed, torch.device("cpu"))


def test_what_depends_on_earlier_calls_is_found(monkeypatch):
    """A call that answers as the first one of its kind did, whatever its values and its autocast are."""
    remembered = {}
    original = drawn_calls.call

    def call(kind, inputs, *tensors):
        if kind not in remembered:
            remembered[kind] = original(kind, inputs, *tensors)
        return remembered[kind]

    monkeypatch.setattr(drawn_calls, "call", call)
    found = 0
    for seed in range(8):
        remembered.clear()
        found += bool(drawn_calls.run(drawn_calls.draw(seed, torch.device("cpu")), torch.device("cpu")))
    assert found >= 4
