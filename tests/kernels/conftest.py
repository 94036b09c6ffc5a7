"""Fixtures of the kernels' tests."""

import pytest

from sage_kernels.cuda import compiler
from sage_kernels.dispatch.select import select


@pytest.fixture
def can_compile(monkeypatch):
    """A machine that compiles every CUDA kernel."""
    monkeypatch.setattr(compiler, "unavailable", lambda *_: "")
    select.cache_clear()
    yield
    select.cache_clear()
