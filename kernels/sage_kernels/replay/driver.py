"""The CUDA driver, by ctypes: load and launch kernels, and describe tensors to them.

Each function acts on the calling thread's context, which `device_context` sets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from functools import cache

import torch

MAP_BYTES = 128  # size of a CUtensorMap
MAP_ALIGNMENT = 64

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""Bytes of a swizzle of a tensor map, and the driver's number for it."""
MAP_DTYPES = {
    **dict.fromkeys((torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2), 0),
    **{torch.float16: 6, torch.float32: 7, torch.bfloat16: 9},
}
"""Dtypes of a tensor map, and the driver's number for each: the accelerator treats one-byte dtypes as bytes."""
L2_PROMOTION_128B, L2_PROMOTION_256B = 2, 3

_INVALID_VALUE = 1
_RELAXED = 2  # thread mode in which captures impose no restrictions
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_SHARED_MEMORY_OF_DEVICE = 97
_STATIC_SHARED_MEMORY, _MAX_DYNAMIC_SHARED_MEMORY, _SHARED_MEMORY_CARVEOUT = 1, 8, 9

_POINTER, _INT, _UINT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_SIGNATURES = {
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuFuncGetAttribute": (_POINTER, _INT, _POINTER),
    "cuFuncGetParamInfo": (_POINTER, _SIZE, _POINTER, _POINTER),
    "cuFuncLoad": (_POINTER,),
    "cuFuncSetAttribute": (_POINTER, _INT, _INT),
    "cuGetErrorName": (_INT, _POINTER),
    "cuLaunchKernelEx": (_POINTER,) * 4,
    "cuModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
    "cuModuleLoadData": (_POINTER, ctypes.c_char_p),
    "cuTensorMapEncodeTiled": (_POINTER, _INT, _UINT, *(_POINTER,) * 5, *(_INT,) * 4),
    "cuThreadExchangeStreamCaptureMode": (_POINTER,),
}


class LaunchAttribute(ctypes.Structure):
    """A CUlaunchAttribute whose value has 32 bits."""

    _fields_ = (("id", _UINT), ("pad", _UINT), ("value", _UINT), ("rest", _UINT * 15))


class LaunchConfig(ctypes.Structure):
    """A CUlaunchConfig."""

    _fields_ = (
        *((name, _UINT) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        *(("stream", _POINTER), ("attributes", _POINTER), ("attribute_count", _UINT)),
    )


WAITS_BY_ITSELF = LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
"""Attribute of launches that may start before the stream's previous kernel has ended (programmatic dependence)."""


@cache
def library() -> ctypes.CDLL:
    """Return the driver's library.

    Raises:
        OSError: there is no driver.
        AttributeError: the driver lacks a function.
    """
    loaded = _open()
    for name, arguments in _SIGNATURES.items():
        getattr(loaded, name).argtypes = arguments
    return loaded


def _open() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def version() -> int:
    """Return the driver's CUDA version, as 1000 · major + 10 · minor; 0 without a driver."""
    number = ctypes.c_int()
    try:
        _open().cuDriverGetVersion(ctypes.byref(number))  # drivers of every version have this function
    except OSError:
        return 0
    return number.value


def check_status(function: str, status: int) -> None:
    """Raise RuntimeError if a status is an error; the message is `function`, then the error's name."""
    if status:
        name = ctypes.c_char_p()
        library().cuGetErrorName(status, ctypes.addressof(name))
        raise RuntimeError(f"{function}: {(name.value or b'an unknown error').decode()} ({status})")


def _call(name: str, *arguments: object) -> None:
    """Call a function of the driver; raise RuntimeError if it refuses."""
    check_status(name, getattr(library(), name)(*arguments))


def _handle(name: str, *arguments: object) -> int:
    """Call a function of the driver that writes a handle to its first argument; return the handle."""
    handle = ctypes.c_void_p()
    _call(name, ctypes.addressof(handle), *arguments)
    return handle.value or 0


def ensure_context(index: int) -> bool:
    """Give a thread without a context the context of GPU `index` that PyTorch uses; return whether it had none."""
    if _handle("cuCtxGetCurrent"):
        return False
    _call("cuCtxSetCurrent", _primary_context(index))
    return True


@cache
def _primary_context(index: int) -> int:
    return _handle("cuDevicePrimaryCtxRetain", index)


@contextlib.contextmanager
def device_context(index: int) -> Iterator[None]:
    """Make GPU `index` PyTorch's current GPU, and its context the thread's context, while the block runs."""
    with torch.cuda.device(index):
        ensure_context(index)
        yield


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread load kernels, allocate and wait while it, or another thread, captures a graph."""
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.addressof(mode))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.addressof(mode))


def load(image: bytes, name: str, index: int) -> int:
    """Load a kernel on GPU `index`, also while a graph is captured; return the driver's handle of the kernel.

    A block may use all the dynamic shared memory that the GPU offers.

    Args:
        image: machine code.
        name: the kernel's name in the machine code.
        index: the GPU's number.

    Raises:
        RuntimeError: the driver reports an error.
    """
    with device_context(index), relaxed_capture():
        function = _handle("cuModuleGetFunction", _handle("cuModuleLoadData", image), name.encode())
        _call("cuFuncLoad", function)
        most, static = ctypes.c_int(), ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.addressof(most), _MAX_SHARED_MEMORY_OF_DEVICE, index)
        _call("cuFuncGetAttribute", ctypes.addressof(static), _STATIC_SHARED_MEMORY, function)
        _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_MEMORY, most.value - static.value)
    return function


@cache
def parameter_sizes(function: int) -> list[int]:
    """Return the size in bytes of each parameter of a loaded kernel, given its handle."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while True:
        places = ctypes.addressof(offset), ctypes.addressof(size)
        status = library().cuFuncGetParamInfo(function, len(sizes), *places)
        if status == _INVALID_VALUE:  # beyond the last parameter
            return sizes
        check_status("cuFuncGetParamInfo", status)
        sizes.append(size.value)


def prefer_shared_memory(function: int, percent: int) -> None:
    """Let a loaded kernel, given its handle, run with a share of a multiprocessor's L1 as shared memory, if it fits."""
    _call("cuFuncSetAttribute", function, _SHARED_MEMORY_CARVEOUT, percent)


def encode_tensor_map(
    address: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    pitches: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    promotion: int = L2_PROMOTION_256B,
) -> bytes:
    """Return a CUtensorMap.

    Args:
        address: a multiple of 16.
        dtype: the accelerator treats one-byte dtypes as bytes.
        shape, box: elements along each axis; the last axis is contiguous.
        pitches: bytes from element to element along each axis except the last; multiples of 16.
        swizzle: bytes of the swizzle.
        promotion: how much the L2 cache fetches at once, L2_PROMOTION_128B or L2_PROMOTION_256B.

    Raises:
        RuntimeError: the driver reports an error.
    """
    rank = len(shape)
    space = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    start = -ctypes.addressof(space) % MAP_ALIGNMENT
    arrays = (
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * rank)(*reversed(pitches)),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
    )
    _call(
        "cuTensorMapEncodeTiled",
        ctypes.addressof(space) + start,
        MAP_DTYPES[dtype],
        rank,
        address,
        *(ctypes.addressof(one) for one in arrays),
        *(0, SWIZZLES[swizzle], promotion, 0),
    )
    return space.raw[start : start + MAP_BYTES]
