"""Launch CUDA C++ kernels: the one place that does."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch

from ..replay import trace
from . import compiler
from .compiler import CompileError, Cubin, Macro, checked
from .context import device_context
from .parameters import HEADER, header, packer


@dataclass(frozen=True, eq=False)
class Source:
    """A source of this folder with its compile-time constants.

    Attributes:
        file: its name; it includes "parameters.cuh".
        parameters: of each kernel by its name: a dataclass as `parameters` describes them.
        macros: the compile-time constants by name.
    """

    file: str
    parameters: Mapping[str, type]
    macros: Mapping[str, Macro]

    def compile(self, arch: str = "sm_90a") -> Cubin:
        """Return the machine code; see `compiler.compile`."""
        return compiler.compile(self.file, self.macros, arch, self._generated)

    def why_not(self, arch: str = "sm_90a") -> str:
        """Return why the machine code cannot be had, compiled now or from the cache; "" when it can."""
        return compiler.why_not(self.file, self.macros, arch, self._generated)

    @cached_property
    def _generated(self) -> dict[str, str]:
        return {HEADER: header(self.parameters)}


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel, and how it is launched.

    Attributes:
        source: where it is.
        name: of the `extern "C"` function.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
    """

    source: Source
    name: str
    threads: int
    shared_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.name} of {self.source.file}"


def launch(kernel: Kernel, blocks: int, parameters: Any, device: torch.device, *, dependent: bool = False) -> None:
    """Run a kernel on the current stream of `device`.

    The first launch on a device compiles and loads it; the others neither wait for the GPU nor allocate. Any thread
    may launch, and graphs capture it. A call that is rehearsed only notes the launch (`rehearsal.rehearsing`).

    Args:
        kernel: the same object each time, by which it is known as loaded.
        blocks: of the grid; nothing runs when there are none.
        parameters: an instance of the dataclass that describes them, with tensors of the device.
        dependent: it may start before the stream's previous kernel has ended, and waits for it by itself
            (programmatic dependent launch).

    Raises:
        CompileError: as of `compiler.compile`.
        TypeError: the parameters are another dataclass's, or the kernel's are others than that describes.
        ValueError: a tensor of another device, a number that its field cannot hold.
        RuntimeError: the driver refuses.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    rehearsed = trace.current()
    if rehearsed is not None and rehearsed.compilations is not None:
        arch = architecture(torch.cuda.get_device_capability(device))
        rehearsed.compilations.append(partial(kernel.source.compile, arch))
        return
    function = _function(kernel, index)
    if not blocks:
        return
    if rehearsed is not None:
        rehearsed.launched(function.packed(blocks, parameters, dependent))
        return
    function.launch(blocks, parameters, dependent)


def compile_together(kernels: tuple[Kernel, ...], device: torch.device) -> None:
    """Compile at the same time, one thread for each source, the kernels that a call is about to launch.

    What does not compile says so when it is launched. Nothing is compiled by a call that is rehearsed.
    """
    if trace.current() is None:
        _compile_together(kernels, device)


@lru_cache(maxsize=1024)
def _compile_together(kernels: tuple[Kernel, ...], device: torch.device) -> None:
    arch = architecture(torch.cuda.get_device_capability(device))
    sources = dict.fromkeys(kernel.source for kernel in kernels)
    threads = [threading.Thread(target=_try_to_compile, args=(source, arch)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _try_to_compile(source: Source, arch: str) -> None:
    with contextlib.suppress(CompileError):
        source.compile(arch)


@cache
def _function(kernel: Kernel, index: int) -> _Function:
    return _Function(kernel, index)


class _Function:
    """A kernel that is compiled for a device and loaded there."""

    def __init__(self, kernel: Kernel, index: int) -> None:
        image = kernel.source.compile(architecture(torch.cuda.get_device_capability(index))).image
        from cuda.bindings import driver

        self.driver = driver
        self.kernel = kernel
        self.index = index
        self.context = device_context(index)
        with self.context, self.loading_during_capture():
            module = self.checked("cuModuleLoadData", driver.cuModuleLoadData(image))
            self.handle = self.checked("cuModuleGetFunction", driver.cuModuleGetFunction(module, kernel.name.encode()))
            self.checked("cuFuncLoad", driver.cuFuncLoad(self.handle))
            self.allow_all_shared_memory()
        self.packer = packer(kernel.source.parameters[kernel.name])
        if (sizes := self.parameter_sizes()) != self.packer.sizes:
            raise TypeError(f"{kernel} has parameters of {sizes} bytes, the host packs {self.packer.sizes}")
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self.dependent = [attribute]

    def allow_all_shared_memory(self) -> None:
        """Let a block have all the dynamic shared memory that the device gives."""
        driver = self.driver
        total = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        static = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        limit = self.checked("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(total, self.index))
        limit -= self.checked("cuFuncGetAttribute", driver.cuFuncGetAttribute(static, self.handle))
        self.checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(self.handle, dynamic, limit))

    def parameter_sizes(self) -> list[int]:
        """Return the bytes of each parameter."""
        sizes: list[int] = []
        while True:
            result, _, size = self.driver.cuFuncGetParamInfo(self.handle, len(sizes))
            if result == self.driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # beyond the last
                return sizes
            self.checked("cuFuncGetParamInfo", (result,))
            sizes.append(size)

    def launch(self, blocks: int, parameters: Any, dependent: bool) -> None:
        """Run it; parameters as of the function `launch`."""
        kernel, config = self.kernel, self.driver.CUlaunchConfig()
        packed = self.packer.pack(parameters, self.index)
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = kernel.shared_bytes
        config.hStream = torch.cuda.current_stream(self.index).cuda_stream
        if dependent:
            config.attrs = self.dependent
            config.numAttrs = 1
        with self.context:
            answer = self.driver.cuLaunchKernelEx(config, self.handle, ctypes.addressof(packed), 0)
        if answer[0].value:
            threads, shared = kernel.threads, kernel.shared_bytes
            self.checked(f"{blocks} blocks of {threads} threads, {shared} bytes of dynamic shared memory", answer)

    def packed(self, blocks: int, parameters: Any, dependent: bool) -> trace.PackedLaunch:
        """Return the launch as the driver takes it; parameters as of the function `launch`, with stand-ins."""
        packed = self.packer.pack(parameters, self.index).raw
        return trace.PackedLaunch(
            function=int(self.handle),
            grid=(blocks, 1, 1),
            threads=self.kernel.threads,
            shared_bytes=self.kernel.shared_bytes,
            dependent=dependent,
            parameters=packed[self.packer.starts[0] :],
            starts=tuple(start - self.packer.starts[0] for start in self.packer.starts),
            addresses=tuple(place - self.packer.starts[0] for place in self.packer.addresses),
            constants=tuple(_tensors_with_memory(parameters)),
        )

    @contextlib.contextmanager
    def loading_during_capture(self) -> Iterator[None]:
        """Allow what loading does, allocating, to a thread that captures a graph."""
        exchange = self.driver.cuThreadExchangeStreamCaptureMode
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self.checked("cuThreadExchangeStreamCaptureMode", exchange(mode))
        try:
            yield
        finally:
            exchange(mode)

    def checked(self, what: str, answer: tuple[Any, ...]) -> Any:
        """Return the value that the driver answers; RuntimeError, which names the kernel, for an error."""
        return checked(f"{self.kernel}: {what}", answer)


def _tensors_with_memory(parameters: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a kernel's parameters that are no stand-ins."""
    for field in fields(parameters):
        value = getattr(parameters, field.name)
        if is_dataclass(value):
            yield from _tensors_with_memory(value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, trace.StandIn):
            yield value


def architecture(capability: tuple[int, int]) -> str:
    """Return the architecture of GPUs of a capability, with what only their own generation has."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")
