from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import sage_hf  # noqa: F401


@pytest.fixture(autouse=True)
def fresh_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the models that other tests were warned of."""
    monkeypatch.setattr("sage_hf.transformers.registration._warned", set())


@pytest.fixture
def hf_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """caplog that also hears transformers' logger, which does not propagate."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def float64_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention's softmax, which always rounds to float32, in float64 for float64 models: a judge."""
    softmax = torch.nn.functional.softmax

    def in_own_precision(input, dim=None, _stacklevel=3, dtype=None):
        return softmax(input, dim, dtype=None if input.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", in_own_precision)
