from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

import sage_hf  # noqa: F401
from sage_hf import record


@pytest.fixture(autouse=True)
def fresh_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, once-only messages and compiled code of other tests forgotten."""
    record.clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    monkeypatch.setattr("sage_hf.diffusers.install._warned", set())
    monkeypatch.setattr("sage_hf.diffusers.processor._displacing", set())


@pytest.fixture(scope="session")
def compilable_dispatch() -> None:
    """Skips where diffusers' dispatch cannot be compiled with its own native backend either."""

    def native(states: torch.Tensor) -> torch.Tensor:
        return dispatch_attention_fn(states, states, states, backend=AttentionBackendName.NATIVE)

    try:
        torch.compile(native, fullgraph=True, backend="eager")(torch.zeros(1, 4, 1, 16))
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"this diffusers' dispatch does not compile with torch {torch.__version__}: {type(error).__name__}")


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
