"""Fixtures of the kernels' tests."""

import pytest

from sage_kernels.cuda import compiler
from sage_kernels.dispatch.registry import forget_choices


@pytest.fixture
def can_compile(monkeypatch):
    """A machine that compiles every CUDA kernel."""
    monkeypatch.setattr(compiler, "unavailable", lambda *_: "")
    forget_choices()
    yield
    forget_choices()
