"""Launches of Triton kernels that are packed once and run again, with other addresses and numbers, in microseconds."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from ..replay import driver, trace
from ..replay.launch_plan import Launch
from ..runtime import torch_private
from . import triton_abi
from .launch import DEFAULT_OPTIONS, fitting, is_recording

Call = tuple[triton.JITFunction, tuple[int, ...], dict[str, Any]]
"""Kernel, grid, and the arguments and options of `launch.launch`."""


class RepeatedLaunches:
    """Launches that run one behind the other, as often as there are steps that differ only in `changing`."""

    def __init__(self, calls: Sequence[Call], changing: Mapping[str, int]) -> None:
        """Pack the launches, whose kernels have been compiled.

        Args:
            calls: in their order.
            changing: names of parameters whose values change, the same in all kernels. They are addresses, or numbers
                of 32 bits in which no kernel is specialised.

        Raises:
            NotRepeatableError: a kernel needs more of a launch than parameters.
        """
        self._lock = threading.Lock()
        self._launches: list[Launch] = []
        self._patches: list[tuple[memoryview, int, str]] = []
        for kernel, grid, arguments in calls:
            arguments = dict(arguments)
            options = {name: arguments.pop(name, default) for name, default in DEFAULT_OPTIONS.items()}
            dependent = arguments.pop("dependent", False)
            kernel = fitting(kernel, arguments)
            packed = triton_abi.pack(kernel, grid, arguments, options, dependent)
            launch = Launch(packed)
            signature = triton_abi.compile_kernel(kernel, grid, arguments, options).src.signature
            names = [name for name, kind in signature.items() if kind != "constexpr"]
            numbers = launch.words.cast("B").cast("i")
            for name, start in zip(names, packed.starts, strict=False):
                if name in changing:
                    is_address = isinstance(arguments[name], torch.Tensor)
                    view, size = (launch.words, 8) if is_address else (numbers, 4)
                    self._patches.append((view, start // size, name))
            self._launches.append(launch)

    def run(self, index: int, values: Mapping[str, int]) -> None:
        """Launch on the current stream of GPU `index`, which is the current one.

        Raises:
            RuntimeError: the driver refuses.
        """
        stream = torch_private.current_stream(index)
        with self._lock:
            for view, place, name in self._patches:
                view[place] = values[name]
            for launch in self._launches:
                launch.config.stream = stream
                if status := launch.launch():
                    if driver.ensure_context(index):  # the thread had none, and nothing was launched
                        status = launch.launch()
                    driver.check("cuLaunchKernelEx", status)


def can_repeat(device: torch.device) -> bool:
    """Tell whether launches run now, by CUDA's driver, and are neither recorded nor traced."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and not is_recording() and trace.current() is None
