from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import sage_hf  # noqa: F401
from sage_hf import record


@pytest.fixture(autouse=True)
def fresh_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and once-only messages of other tests forgotten."""
    record.clear()
    monkeypatch.setattr("sage_hf.diffusers.install._warned", set())
    monkeypatch.setattr("sage_hf.diffusers.processor._displacing", set())


@pytest.fixture
def sage_log() -> Iterator[list[str]]:
    """Messages logged by sage_hf, which does not propagate to the root logger."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect()
    logger = logging.getLogger("sage_hf")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
