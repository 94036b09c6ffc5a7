"""Everything in this folder runs kernels in Triton's interpreter, which TRITON_INTERPRET=1 turns on."""

import os
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True)
def round_to_e4m3_as_gpus_do(monkeypatch):
    """The interpreter's own cast neither carries into the exponent nor saturates."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter._convert_float

    def convert(x, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) != (tl.float32, tl.float8e4nv):
            return cast(x, input_dtype, output_dtype, rounding_mode)
        return torch.from_numpy(x.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
