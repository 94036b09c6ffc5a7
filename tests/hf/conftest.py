from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sage_hf import record
from sage_kernels.spec.recipe import RECIPES


@pytest.fixture(autouse=True)
def fresh_record() -> None:
    """Forget the plans of other tests, and which messages were logged once."""
    record.clear()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CogVideoX pipeline as it is stored; tests change copies of it alone."""
    from tests.helpers import tiny_pipelines as tiny

    path = tmp_path_factory.mktemp("pipeline")
    tiny.cogvideox().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def compilable_dispatch() -> None:
    """Skips where diffusers' dispatch cannot be compiled with its own native backend either."""
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    def native(states: torch.Tensor) -> torch.Tensor:
        return dispatch_attention_fn(states, states, states, backend=AttentionBackendName.NATIVE)

    try:
        torch.compile(native, fullgraph=True, backend="eager")(torch.zeros(1, 4, 1, 16))
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"this diffusers' dispatch does not compile with torch {torch.__version__}: {type(error).__name__}")


@pytest.fixture
def no_recent_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give causality and a mask that says the same the same bits, which it has not where `sage3` has recent keys."""
    monkeypatch.setitem(RECIPES, "sage3", replace(RECIPES["sage3"], recent_keys=0))
