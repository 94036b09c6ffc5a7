"""Describe tensors to Hopper's tensor memory accelerator (TMA), which brings boxes of them to shared memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from .context import device_context
from .parameters import TensorMap

DTYPES = {
    torch.int8: "UINT8",
    torch.uint8: "UINT8",
    torch.float8_e4m3fn: "UINT8",
    torch.float8_e5m2: "UINT8",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
}
SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


def tensor_map(x: torch.Tensor, box: tuple[int, ...], swizzle: int) -> TensorMap:
    """Return how the tensor memory accelerator finds a tensor's boxes.

    Elements beyond the tensor's ends read as 0. A box begins a multiple of 16 bytes behind the start of the last axis,
    or the kernel fails.

    Args:
        x: of 2 to 5 axes, the last one contiguous; address and other strides are multiples of 16 bytes. int8, uint8
            and float8 are bytes to the accelerator; bfloat16, float16 and float32 are what they are.
        box: elements along each axis of x.
        swizzle: 0, 32, 64 or 128 bytes; no more than that many bytes along the box's last axis, unless 0.

    Raises:
        ValueError: x, box or swizzle is none of those, or x is not on a GPU.
    """
    return _tensor_map(x.get_device(), x.data_ptr(), x.shape, x.stride(), x.dtype, box, swizzle)


@lru_cache(maxsize=1024)
def _tensor_map(
    index: int,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    box: tuple[int, ...],
    swizzle: int,
) -> TensorMap:
    what = (
        f"tensor_map of {dtype} {tuple(shape)}, strides {strides}, address {address:#x}, box {box}, swizzle {swizzle}"
    )
    if dtype not in DTYPES or swizzle not in SWIZZLES:
        supported = f"{', '.join(map(str, DTYPES))}; swizzles {', '.join(map(str, SWIZZLES))}"
        raise ValueError(f"{what}: dtype or swizzle is none of {supported}")
    if not 2 <= len(shape) == len(box) <= 5:
        raise ValueError(f"{what}: needs 2 to 5 axes, and as many of the box")
    if strides[-1] != 1 and shape[-1] != 1:
        raise ValueError(f"{what}: the last axis must be contiguous")
    # The stride of an axis of one element means nothing to PyTorch, but must be valid.
    pitches = [
        16 if size == 1 else stride * dtype.itemsize for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    ]
    if any(pitch % 16 for pitch in (address, *pitches)):
        raise ValueError(f"{what}: address and strides must be multiples of 16 bytes")
    if index < 0:
        raise ValueError(f"{what}: must be on a GPU")
    from cuda.bindings import driver

    rank = len(shape)
    with device_context(index):
        answer = driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{DTYPES[dtype]}"),
            rank,
            address,
            [driver.cuuint64_t(size) for size in reversed(shape)],
            [driver.cuuint64_t(pitch) for pitch in reversed(pitches)],
            [driver.cuuint32_t(size) for size in reversed(box)],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{SWIZZLES[swizzle]}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    if answer[0].value:
        raise ValueError(f"{what}: {answer[0].name}")
    return TensorMap(ctypes.string_at(answer[1].getPtr(), 128))
