"""The few functions of the CUDA driver that repeated calls need, by ctypes: a call costs a third less than by bindings.

Each acts on the current context, which PyTorch makes that of its current device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from functools import cache

import torch

MAP_BYTES = 128  # of a CUtensorMap
MAP_ALIGNMENT = 64

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""Bytes of a swizzle of a tensor map, and what the driver calls it."""
MAP_DTYPES = {
    **dict.fromkeys((torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2), 0),
    **{torch.float16: 6, torch.float32: 7, torch.bfloat16: 9},
}
"""Dtypes of a tensor map, and what the driver calls them: those of one byte are bytes to the accelerator."""

CONFIG = "<7I4xQQI4x"
"""A CUlaunchConfig, as Python's `struct` packs it: grid, block, dynamic shared memory, stream, attributes, how many."""
CONFIG_STREAM = 32
"""First byte of the stream in a CUlaunchConfig."""
ATTRIBUTE = "<I4xI60x"
"""A CUlaunchAttribute whose value is a number of 32 bits."""
PROGRAMMATIC_STREAM_SERIALIZATION = 6

_RELAXED = 2
"""Mode of a thread in which captures do not restrict it."""

_INVALID_VALUE = 1
_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
_NON_BLOCKING_STREAM = 1
_EVENT_WITHOUT_TIMING = 2
L2_PROMOTION_128B, L2_PROMOTION_256B = 2, 3


@cache
def library() -> ctypes.CDLL:
    """Return the driver's library; OSError: there is none."""
    loaded = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    pointer = ctypes.c_void_p
    loaded.cuLaunchKernelEx.argtypes = [pointer] * 4
    loaded.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
    loaded.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    loaded.cuTensorMapEncodeTiled.argtypes = [
        *(pointer, ctypes.c_int, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer),
        *(ctypes.c_int,) * 4,
    ]
    loaded.cuEventCreate.argtypes = [pointer, ctypes.c_uint]
    loaded.cuEventRecord.argtypes = [pointer, pointer]
    loaded.cuStreamCreate.argtypes = [pointer, ctypes.c_uint]
    loaded.cuStreamGetCaptureInfo_v2.argtypes = [pointer] * 6
    loaded.cuStreamWaitEvent.argtypes = [pointer, pointer, ctypes.c_uint]
    loaded.cuThreadExchangeStreamCaptureMode.argtypes = [pointer]
    loaded.cuCtxGetCurrent.argtypes = [pointer]
    loaded.cuCtxSetCurrent.argtypes = [pointer]
    loaded.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
    loaded.cuGetErrorName.argtypes = [ctypes.c_int, pointer]
    return loaded


def check(what: str, status: int) -> None:
    """Raise RuntimeError if a status is an error, which the message names after `what`."""
    if status:
        name = ctypes.c_char_p()
        library().cuGetErrorName(status, ctypes.addressof(name))
        raise RuntimeError(f"{what}: {(name.value or b'an unknown error').decode()} ({status})")


def ensure_context(index: int) -> bool:
    """Give a thread that has no context that of GPU `index`, which PyTorch uses too; return whether it had none."""
    context = ctypes.c_void_p()
    check("cuCtxGetCurrent", library().cuCtxGetCurrent(ctypes.addressof(context)))
    if context.value:
        return False
    check("cuCtxSetCurrent", library().cuCtxSetCurrent(_primary_context(index)))
    return True


@cache
def _primary_context(index: int) -> int:
    context = ctypes.c_void_p()
    check("cuDevicePrimaryCtxRetain", library().cuDevicePrimaryCtxRetain(ctypes.addressof(context), index))
    return context.value or 0


@cache
def parameter_sizes(function: int) -> list[int]:
    """Return the bytes of each parameter of a loaded kernel, by its handle."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while True:
        places = ctypes.addressof(offset), ctypes.addressof(size)
        status = library().cuFuncGetParamInfo(function, len(sizes), *places)
        if status == _INVALID_VALUE:  # beyond the last
            return sizes
        check("cuFuncGetParamInfo", status)
        sizes.append(size.value)


def prefer_shared_memory(function: int, percent: int) -> None:
    """Let a loaded kernel, by its handle, run with that share of a multiprocessor's L1 as shared memory, if it fits."""
    check("cuFuncSetAttribute", library().cuFuncSetAttribute(function, _PREFERRED_SHARED_MEMORY_CARVEOUT, percent))


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
        dtype: one-byte dtypes are bytes to the accelerator.
        shape, box: elements along each axis, the contiguous one last.
        pitches: bytes from element to element of each axis but the last; multiples of 16.
        swizzle: bytes.
        promotion: how much the L2 cache fetches at once, L2_PROMOTION_128B or L2_PROMOTION_256B.

    Raises:
        RuntimeError: the driver refuses.
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
    status = library().cuTensorMapEncodeTiled(
        ctypes.addressof(space) + start,
        MAP_DTYPES[dtype],
        rank,
        address,
        *(ctypes.addressof(one) for one in arrays),
        *(0, SWIZZLES[swizzle], promotion, 0),
    )
    check("cuTensorMapEncodeTiled", status)
    return space.raw[start : start + MAP_BYTES]


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread load kernels, allocate and wait while it, or another thread, captures a graph."""
    mode = ctypes.c_int(_RELAXED)
    check("cuThreadExchangeStreamCaptureMode", library().cuThreadExchangeStreamCaptureMode(ctypes.addressof(mode)))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.addressof(mode))


class SideStream:
    """Stream whose work may run beside that of another one.

    Attributes:
        handle: the driver's.
    """

    def __init__(self) -> None:
        """Make a stream that waits for no other, and the events by which it waits; also while a graph is captured."""
        with relaxed_capture():
            self.handle = _created("cuStreamCreate", _NON_BLOCKING_STREAM)
            self._fork, self._join = (_created("cuEventCreate", _EVENT_WITHOUT_TIMING) for _ in range(2))

    def fork(self, stream: int) -> None:
        """Wait for what `stream` has been given so far."""
        _wait_for(self.handle, stream, self._fork)

    def join(self, stream: int) -> None:
        """Let `stream` wait for what this one has been given so far."""
        _wait_for(stream, self.handle, self._join)


_side_streams: dict[int, list[SideStream]] = {}
"""By GPU: those that are free; there are as many as were ever in use at the same time."""
_lock = threading.Lock()


@contextlib.contextmanager
def side_stream(index: int, stream: int) -> Iterator[SideStream]:
    """Lend a stream for work beside that of a stream of GPU `index`; no other graph captures it than that one's."""
    ensure_context(index)
    graph = _captured_by(stream)
    with _lock:
        free = _side_streams.setdefault(index, [])
        found = next((one for one in free if _captured_by(one.handle) in (0, graph)), None)
        if found is not None:
            free.remove(found)
    lent = found or SideStream()
    try:
        yield lent
    finally:
        free.append(lent)


def _captured_by(stream: int) -> int:
    """Return the number of the graph that captures a stream; 0: none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    places = ctypes.addressof(status), ctypes.addressof(number)
    check("cuStreamGetCaptureInfo", library().cuStreamGetCaptureInfo_v2(stream, *places, None, None, None))
    return number.value if status.value else 0


def _created(function: str, flags: int) -> int:
    handle = ctypes.c_void_p()
    check(function, getattr(library(), function)(ctypes.addressof(handle), flags))
    return handle.value or 0


def _wait_for(stream: int, other: int, event: int) -> None:
    """Let `stream` wait for what `other` has been given so far; `event` is free again when this returns."""
    loaded = library()
    if status := loaded.cuEventRecord(event, other):
        check("cuEventRecord", status)
    if status := loaded.cuStreamWaitEvent(stream, event, 0):
        check("cuStreamWaitEvent", status)
