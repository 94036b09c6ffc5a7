from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

import sage_hf  # noqa: F401


@pytest.fixture(autouse=True)
def fresh_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the classes that were warned of, and the compiled code, of other tests."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    monkeypatch.setattr("sage_hf.diffusers.install._warned", set())
    monkeypatch.setattr("sage_hf.diffusers.processor._logged", set())


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
