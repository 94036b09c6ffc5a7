"""Everything in this folder runs kernels in Triton's interpreter, which TRITON_INTERPRET=1 turns on."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.interpreter import speed_up

FOLDER = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))


@pytest.fixture(scope="session", autouse=True)
def speed_up_interpreter() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        speed_up(patch)
        yield


@pytest.fixture(autouse=True)
def compute_as_gpus_do(monkeypatch):
    """The interpreter's own cast to e4m3 neither carries into the exponent nor saturates, the one to bfloat16 cuts
    off, products take bfloat16 for integers, a fused multiply-add in float16 rounds twice, and Triton 3.4 wants a
    descriptor's strides to be multiples of 16 elements, not bytes.
    """
    if not INTERPRETED:
        return
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    cast, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(x, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(x.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return cast(x, input_dtype, output_dtype, rounding_mode)

    def widened(x):
        if x.dtype != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def multiply(builder, a, b, d, *options):
        return dot(builder, widened(a), widened(b), d, *options)

    def fuse(builder, x, y, z):
        wide = x.data.dtype if x.data.dtype != np.float16 else np.float64  # which holds the exact sum
        exact = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
        return interpreter.TensorHandle(exact.astype(x.data.dtype), x.dtype.scalar)

    def validate(descriptor):
        size = descriptor.base.dtype.element_ty.primitive_bitwidth // 8
        assert descriptor.base.data.item() % 16 == 0
        assert all(stride.data.item() * size % 16 == 0 for stride in descriptor.strides[:-1])
        assert descriptor.strides[-1].data.item() == 1

    monkeypatch.setattr(interpreter.TensorDescHandle, "validate", validate)
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fuse)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply)
