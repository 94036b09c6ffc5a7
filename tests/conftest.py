"""Fixtures of all tests."""

import gc
from collections.abc import Iterator

import pytest

from tests.helpers.forks import Forks

# What a process of pytest that runs no tests loads too: fixtures import torch, which takes seconds.

# A test makes many objects that live as long as it does, and little garbage: look for it seldom.
gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True)
def unrouted() -> Iterator[None]:
    """Kernels run whatever they support, however small the calls of a test are; `routed` undoes it."""
    from sage_kernels.dispatch.select import set_routing

    set_routing(False)
    yield
    set_routing(True)


@pytest.fixture
def routed(unrouted: None) -> None:
    """Calls take exact attention where low bits would be slower, as for users."""
    from sage_kernels.dispatch.select import set_routing

    set_routing(True)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Fresh processes for what depends on which modules are imported, and when: `forks.run(code)`."""
    with Forks() as forks:
        yield forks


@pytest.fixture(scope="module", autouse=True)
def imported_is_no_garbage() -> None:
    """Exempt all that is in use by now from garbage collection: of so many modules, a full one takes half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that what ends with the process is freed
