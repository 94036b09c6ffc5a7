from __future__ import annotations

import pytest
import torch


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
