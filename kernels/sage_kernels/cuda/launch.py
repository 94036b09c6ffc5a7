"""Launch CUDA C++ kernels: no other place does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch

from ..replay import driver, trace
from ..replay.launch_plan import launch_now
from . import compiler
from .compiler import CompileError, Cubin, Macro
from .parameters import HEADER, header, packer


@dataclass(frozen=True, eq=False)
class KernelSource:
    """A source of this folder with its compile-time constants.

    Attributes:
        file: the file's name; it includes "parameters.cuh".
        parameters: the parameters of each kernel by its name: a dataclass as in `parameters`.
        macros: the compile-time constants by name.
    """

    file: str
    parameters: Mapping[str, type]
    macros: Mapping[str, Macro]

    def compile(self, arch: str = "sm_90a") -> Cubin:
        """Return the machine code; see `compiler.compile`."""
        return compiler.compile(self.file, self.macros, arch, self._generated)

    def unavailable(self, arch: str = "sm_90a") -> str:
        """Return why the machine code is neither compilable now nor in the cache; "" if it is available."""
        return compiler.unavailable(self.file, self.macros, arch, self._generated)

    @cached_property
    def _generated(self) -> dict[str, str]:
        return {HEADER: header(self.parameters)}


@dataclass(frozen=True, eq=False)
class ConfiguredKernel:
    """A kernel, and its launch configuration.

    Attributes:
        source: the kernel's source.
        name: name of the `extern "C"` function.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
    """

    source: KernelSource
    name: str
    threads: int
    shared_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.name} of {self.source.file}"


def launch(
    kernel: ConfiguredKernel, blocks: int, parameters: Any, device: torch.device, *, dependent: bool = False
) -> None:
    """Run a kernel on the current stream of `device`.

    The first launch on a device compiles and loads the kernel; later launches neither wait for the GPU nor allocate.
    Any thread may launch, and graphs capture it. A call that is traced only notes the launch (`trace.tracing`).

    Args:
        kernel: the kernel; the same object each time, so that it is known to be loaded.
        blocks: blocks of the grid; nothing runs without blocks.
        parameters: an instance of the dataclass that describes them, with tensors on the device.
        dependent: the kernel may start before the stream's previous kernel has ended, and waits for it itself
            (programmatic dependent launch).

    Raises:
        CompileError: as in `compiler.compile`.
        TypeError: the parameters are of another dataclass, or the kernel's parameters differ from its description.
        ValueError: a tensor is on another device, or a number does not fit its field.
        RuntimeError: the driver reports an error.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    traced = trace.current()
    if traced is not None and traced.compilations is not None:
        arch = architecture(torch.cuda.get_device_capability(device))
        traced.compilations.append(partial(kernel.source.compile, arch))
        return
    function = _load(kernel, index)
    if not blocks:
        return
    packed = _pack(kernel, function, blocks, parameters, index, dependent)
    if traced is not None:
        traced.launched(packed)
        return
    try:
        with driver.device_context(index):
            launch_now(packed, index)
    except RuntimeError as error:
        threads, shared = kernel.threads, kernel.shared_bytes
        sizes = f"{blocks} blocks of {threads} threads, {shared} bytes of dynamic shared memory"
        raise RuntimeError(f"{kernel}: {sizes}: {error}") from error


def compile_together(kernels: tuple[ConfiguredKernel, ...], device: torch.device) -> None:
    """Compile at the same time, one thread for each source, the kernels that a call is about to launch.

    A kernel that does not compile raises its error when it is launched. A traced call compiles nothing.
    """
    if trace.current() is None:
        _compile_together(kernels, device)


@lru_cache(maxsize=1024)
def _compile_together(kernels: tuple[ConfiguredKernel, ...], device: torch.device) -> None:
    arch = architecture(torch.cuda.get_device_capability(device))
    sources = dict.fromkeys(kernel.source for kernel in kernels)
    threads = [threading.Thread(target=_try_to_compile, args=(source, arch)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _try_to_compile(source: KernelSource, arch: str) -> None:
    with contextlib.suppress(CompileError):
        source.compile(arch)


@cache
def _load(kernel: ConfiguredKernel, index: int) -> int:
    """Return the driver's handle of a kernel, compiled for GPU `index` and loaded there."""
    image = kernel.source.compile(architecture(torch.cuda.get_device_capability(index))).image
    try:
        function = driver.load(image, kernel.name, index)
    except RuntimeError as error:
        raise RuntimeError(f"{kernel}: {error}") from error
    packed = packer(kernel.source.parameters[kernel.name]).sizes
    if (sizes := driver.parameter_sizes(function)) != packed:
        raise TypeError(f"{kernel} has parameters of {sizes} bytes, the host packs {packed}")
    return function


def _pack(
    kernel: ConfiguredKernel, function: int, blocks: int, parameters: Any, index: int, dependent: bool
) -> trace.PackedLaunch:
    """Return a launch in the driver's format; see `launch`."""
    packing = packer(kernel.source.parameters[kernel.name])
    return trace.PackedLaunch(
        function=function,
        grid=(blocks, 1, 1),
        threads=kernel.threads,
        shared_bytes=kernel.shared_bytes,
        dependent=dependent,
        parameters=packing.pack(parameters, index),
        starts=tuple(packing.starts),
        addresses=tuple(packing.addresses),
        constants=tuple(_tensors_with_memory(parameters)),
    )


def _tensors_with_memory(parameters: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a kernel's parameters that are not placeholders."""
    for field in fields(parameters):
        value = getattr(parameters, field.name)
        if is_dataclass(value):
            yield from _tensors_with_memory(value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, trace.Placeholder):
            yield value


def architecture(capability: tuple[int, int]) -> str:
    """Return the architecture of GPUs of a capability, with features that only their generation has."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")
