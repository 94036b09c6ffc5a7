"""Describe tensors to Hopper's tensor memory accelerator (TMA), which brings boxes of them to shared memory."""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from ..replay import driver
from ..replay.trace import relocatable
from .parameters import TensorMap


def tensor_map(x: torch.Tensor, box: tuple[int, ...], swizzle: int) -> TensorMap:
    """Return the map by which the tensor memory accelerator finds a tensor's boxes.

    Elements beyond the tensor's ends read as 0. A box must begin at a multiple of 16 bytes after the start of the last
    axis, or the kernel fails.

    Args:
        x: a tensor of 2 to 5 axes, the last axis contiguous; address and other strides are multiples of 16 bytes. The
            accelerator treats int8, uint8 and float8 as bytes; bfloat16, float16 and float32 as such.
        box: elements along each axis of x.
        swizzle: 0, 32, 64 or 128 bytes; unless 0, no fewer bytes than the box's last axis has.

    Raises:
        ValueError: x, box or swizzle is not as described, or x is not on a GPU.
    """
    locate = partial(_tensor_map, x.get_device(), x.shape, x.stride(), x.dtype, box, swizzle)
    return TensorMap(relocatable(locate, x.data_ptr()))


@lru_cache(maxsize=1024)
def _tensor_map(
    index: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    box: tuple[int, ...],
    swizzle: int,
    address: int,
) -> bytes:
    description = (
        f"tensor_map of {dtype} {tuple(shape)}, strides {strides}, address {address:#x}, box {box}, swizzle {swizzle}"
    )
    if dtype not in driver.MAP_DTYPES or swizzle not in driver.SWIZZLES:
        supported = f"{', '.join(map(str, driver.MAP_DTYPES))}; swizzles {', '.join(map(str, driver.SWIZZLES))}"
        raise ValueError(f"{description}: dtype or swizzle is not one of {supported}")
    if not 2 <= len(shape) == len(box) <= 5:
        raise ValueError(f"{description}: needs 2 to 5 axes, and as many of the box")
    if strides[-1] != 1 and shape[-1] != 1:
        raise ValueError(f"{description}: the last axis must be contiguous")
    # The stride of an axis of one element means nothing to PyTorch, but must be valid.
    pitches = [
        16 if size == 1 else stride * dtype.itemsize for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    ]
    if any(pitch % 16 for pitch in (address, *pitches)):
        raise ValueError(f"{description}: address and strides must be multiples of 16 bytes")
    if index < 0:
        raise ValueError(f"{description}: must be on a GPU")
    try:
        with driver.device_context(index):
            return driver.encode_tensor_map(address, dtype, shape, pitches, box, swizzle)
    except RuntimeError as error:
        raise ValueError(f"{description}: {error}") from error
