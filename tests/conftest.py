"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest

from sage_kernels import registry


@pytest.fixture(autouse=True)
def unrouted() -> Iterator[None]:
    """Kernels run whatever they support, however small the calls of a test are; `routed` undoes it."""
    registry.set_routing(False)
    yield
    registry.set_routing(True)


@pytest.fixture
def routed(unrouted: None) -> None:
    """Calls take exact attention where low bits would be slower, as for users."""
    registry.set_routing(True)
