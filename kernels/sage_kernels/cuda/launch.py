"""The one place that launches CUDA C++ kernels, and that describes tensors to the tensor memory accelerator (TMA)."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch

from .compiler import CompileError, Cubin, checked, compile, why_not

__all__ = ["CompileError", "Cubin", "Int64", "TensorMap", "compile", "launch", "tensor_map", "why_not"]

DTYPES = {
    torch.int8: "UINT8",
    torch.uint8: "UINT8",
    torch.float8_e4m3fn: "UINT8",
    torch.float8_e5m2: "UINT8",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
}
TENSOR_MAP_ALIGNMENT = 64  # bytes; every other type is aligned to its size
SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


@dataclass(frozen=True)
class Int64:
    """An integer parameter of 64 bits; a plain int has 32."""

    value: int


@dataclass(frozen=True)
class TensorMap:
    """A tensor's layout as the tensor memory accelerator reads it: the 128 bytes of a CUtensorMap."""

    image: bytes = field(repr=False)


Scalar = torch.Tensor | None | int | float | Int64 | TensorMap
Argument = Scalar | tuple[Scalar, ...]


def launch(
    source: str,
    kernel: str,
    macros: Mapping[str, int | str],
    grid: tuple[int, ...],
    block: tuple[int, ...],
    shared_bytes: int,
    args: tuple[Argument, ...],
    device: torch.device,
    *,
    dependent: bool = False,
) -> None:
    """Run a kernel on the current stream of `device`.

    The first launch on a device compiles and loads it; the others neither wait for the GPU nor allocate. Any thread
    may launch, and graphs capture it.

    Args:
        source, macros: as in `compile`; the architecture is the device's.
        kernel: name of an `extern "C"` kernel.
        grid, block: blocks of the grid and threads of a block, along up to three axes; nothing runs when there are no
            blocks.
        shared_bytes: dynamic shared memory.
        args: the kernel's parameters: a tensor of the device (its address), None (a null pointer), int (32 bits),
            Int64, float (32 bits), TensorMap (`const __grid_constant__`); or a tuple of these, a struct by value.
        dependent: it may start before the stream's previous kernel has ended, and waits for it by itself
            (programmatic dependent launch).

    Raises:
        CompileError: as of `compile`.
        TypeError: the arguments are not the kernel's parameters, in number or size.
        ValueError: a tensor of another device, an int beyond 32 bits.
        RuntimeError: the driver refuses.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    function = _function(source, kernel, tuple(macros.items()), index)
    if 0 not in grid:
        function.launch(grid, block, shared_bytes, args, dependent)


def tensor_map(x: torch.Tensor, box: tuple[int, ...], swizzle: int) -> TensorMap:
    """How the tensor memory accelerator finds a tensor's boxes. Elements beyond the tensor's ends read as 0. A box
    begins a multiple of 16 bytes behind the start of the last axis, or the kernel fails.

    Args:
        x: of 2 to 5 axes, the last one contiguous; address and other strides are multiples of 16 bytes. int8, uint8
            and float8 are bytes to the accelerator; bfloat16, float16 and float32 are what they are.
        box: elements along each axis of x.
        swizzle: 0, 32, 64 or 128 bytes; no more than that many bytes along the box's last axis, unless 0.

    Raises:
        ValueError: x, box or swizzle is none of those, or x is not on a GPU.
    """
    return _tensor_map(x.get_device(), x.data_ptr(), x.shape, x.stride(), x.dtype, box, swizzle)


class _Context:
    """The context of a device that PyTorch uses too, current inside a `with`.

    A thread that has not used the device has no current context, or another device's.
    """

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.name = f"cuda:{index}"
        self.handle = checked(f"{self.name}: cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(index))

    def __enter__(self) -> None:
        checked(f"{self.name}: cuCtxPushCurrent", self.driver.cuCtxPushCurrent(self.handle))

    def __exit__(self, *exception: object) -> None:
        self.driver.cuCtxPopCurrent()


@cache
def _context(index: int) -> _Context:
    return _Context(index)


@cache
def _function(source: str, kernel: str, macros: tuple[tuple[str, int | str], ...], index: int) -> _Function:
    return _Function(source, kernel, macros, index)


class _Function:
    """A kernel that is compiled for a device and loaded there."""

    def __init__(self, source: str, kernel: str, macros: tuple[tuple[str, int | str], ...], index: int) -> None:
        image = compile(source, dict(macros), _architecture(index)).image
        from cuda.bindings import driver

        self.driver = driver
        self.name = f"{kernel} of {source}"
        self.index = index
        self.context = _context(index)
        with self.context, self.loading_during_capture():
            module = self.checked("cuModuleLoadData", driver.cuModuleLoadData(image))
            self.handle = self.checked("cuModuleGetFunction", driver.cuModuleGetFunction(module, kernel.encode()))
            self.checked("cuFuncLoad", driver.cuFuncLoad(self.handle))
            self.allow_all_shared_memory()
        self.parameters = Parameters(self.name, index, self.parameter_sizes())
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self.dependent = [attribute]

    def allow_all_shared_memory(self) -> None:
        driver = self.driver
        total = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        static = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        limit = self.checked("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(total, self.index))
        limit -= self.checked("cuFuncGetAttribute", driver.cuFuncGetAttribute(static, self.handle))
        self.checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(self.handle, dynamic, limit))

    def parameter_sizes(self) -> tuple[int, ...]:
        """Bytes of each parameter."""
        sizes: list[int] = []
        while True:
            result, _, size = self.driver.cuFuncGetParamInfo(self.handle, len(sizes))
            if result == self.driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # beyond the last
                return tuple(sizes)
            self.checked("cuFuncGetParamInfo", (result,))
            sizes.append(size)

    def launch(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        args: tuple[Argument, ...],
        dependent: bool,
    ) -> None:
        packed = self.parameters.packed(args)
        config = self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid + (1,) * (3 - len(grid))
        config.blockDimX, config.blockDimY, config.blockDimZ = block + (1,) * (3 - len(block))
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream(self.index).cuda_stream
        if dependent:
            config.attrs = self.dependent
            config.numAttrs = 1
        with self.context:
            answer = self.driver.cuLaunchKernelEx(config, self.handle, ctypes.addressof(packed), 0)
        if answer[0].value:
            self.checked(f"grid {grid}, block {block}, {shared_bytes} bytes of dynamic shared memory", answer)

    @contextlib.contextmanager
    def loading_during_capture(self) -> Iterator[None]:
        """Loading allocates, which a thread that captures a graph may not do otherwise."""
        exchange = self.driver.cuThreadExchangeStreamCaptureMode
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self.checked("cuThreadExchangeStreamCaptureMode", exchange(mode))
        try:
            yield
        finally:
            exchange(mode)

    def checked(self, what: str, answer: tuple[Any, ...]) -> Any:
        return checked(f"{self.name}: {what}", answer)


def _architecture(index: int) -> str:
    """Of a device, with what only its own generation has."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class Parameters:
    """How a kernel that runs on device `index` takes its arguments; `sizes` are its parameters' bytes."""

    def __init__(self, name: str, index: int, sizes: tuple[int, ...]) -> None:
        self.name = name
        self.index = index
        self.sizes = sizes
        self.offsets = tuple(itertools.accumulate(sizes, initial=struct.calcsize("=Q") * len(sizes)))[:-1]
        self.layouts: dict[tuple[str | tuple[str, ...], ...], struct.Struct] = {}

    def packed(self, args: tuple[Argument, ...]) -> ctypes.Array[ctypes.c_char]:
        """The address of each argument, then the arguments.

        Raises:
            TypeError, ValueError: as of `launch`.
        """
        forms: list[str | tuple[str, ...]] = []
        values: list[int | float | bytes] = []
        for number, arg in enumerate(args):
            if isinstance(arg, tuple):
                fields = [self.scalar(number, field) for field in arg]
                forms.append(tuple(form for form, _ in fields))
                values += [value for _, value in fields]
            else:
                form, value = self.scalar(number, arg)
                forms.append(form)
                values.append(value)
        layout = self.layouts.get(key := tuple(forms)) or self.layouts.setdefault(key, self.layout(key))
        packed = ctypes.create_string_buffer(layout.size)
        start = ctypes.addressof(packed)
        try:
            layout.pack_into(packed, 0, *[start + offset for offset in self.offsets], *values)
        except struct.error as error:
            raise ValueError(f"{self.name}: an integer has too many bits ({error}); Int64 has 64") from error
        return packed

    def scalar(self, number: int, arg: Scalar) -> tuple[str, int | float | bytes]:
        """The `struct` module's format for an argument, or a part of it, and what it packs."""
        if isinstance(arg, torch.Tensor):
            if arg.get_device() != self.index:
                raise ValueError(f"{self.name} runs on cuda:{self.index}, but argument {number} is on {arg.device}")
            return "Q", arg.data_ptr()
        if arg is None:
            return "Q", 0
        if isinstance(arg, TensorMap):
            return "128s", arg.image
        if isinstance(arg, Int64):
            return "q", arg.value
        if isinstance(arg, float):
            return "f", arg
        if isinstance(arg, int) and not isinstance(arg, bool):
            return "i", arg
        kinds = "a tensor, None, an int, Int64, a float, a TensorMap, or a tuple of these"
        raise TypeError(f"{self.name}: argument {number} is of {type(arg)}, and not {kinds}")

    def layout(self, forms: tuple[str | tuple[str, ...], ...]) -> struct.Struct:
        """Of what `packed` returns. TypeError: these are not the kernel's parameters, as far as sizes tell."""
        padded = [_structure(form) if isinstance(form, tuple) else form for form in forms]
        sizes = tuple(struct.calcsize("=" + form) for form in padded)
        if sizes != self.sizes:
            raise TypeError(f"{self.name} has parameters of {self.sizes} bytes, was given {sizes}")
        return struct.Struct("=" + "Q" * len(forms) + "".join(padded))


def _structure(forms: tuple[str, ...]) -> str:
    """Members with the padding that C++ puts between and behind them."""
    padded, size, largest = "", 0, 1
    for form in forms:
        width = struct.calcsize("=" + form)
        alignment = min(width, TENSOR_MAP_ALIGNMENT)
        padding = -size % alignment
        padded += f"{padding}x{form}"
        size += padding + width
        largest = max(largest, alignment)
    return padded + f"{-size % largest}x"


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
    lines = [
        16 if size == 1 else stride * dtype.itemsize for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    ]
    if any(line % 16 for line in (address, *lines)):
        raise ValueError(f"{what}: address and strides must be multiples of 16 bytes")
    if index < 0:
        raise ValueError(f"{what}: must be on a GPU")
    from cuda.bindings import driver

    rank = len(shape)
    with _context(index):
        answer = driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{DTYPES[dtype]}"),
            rank,
            address,
            [driver.cuuint64_t(size) for size in reversed(shape)],
            [driver.cuuint64_t(line) for line in reversed(lines)],
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
