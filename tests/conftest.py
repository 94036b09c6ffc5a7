"""Fixtures of all tests."""

import gc
from collections.abc import Iterator

import pytest

from sage_kernels.dispatch.select import set_routing
from tests.helpers.forks import Forks


@pytest.fixture(autouse=True)
def unrouted() -> Iterator[None]:
    """Kernels run whatever they support, however small the calls of a test are; `routed` undoes it."""
    set_routing(False)
    yield
    set_routing(True)


@pytest.fixture
def routed(unrouted: None) -> None:
    """Calls take exact attention where low bits would be slower, as for users."""
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
