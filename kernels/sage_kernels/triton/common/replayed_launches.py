"""Launches of Triton kernels that are packed once and run again, with other addresses and numbers, in microseconds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton

from ...replay import cache, driver, trace
from ...replay.launch_plan import DriverLaunch
from ...runtime import torch_private
from . import triton_abi
from .launch import DEFAULT_OPTIONS, fitting, is_recording, launch

KernelLaunch = tuple[triton.JITFunction, tuple[int, ...], dict[str, Any]]
"""Kernel, grid, and the arguments and options of `launch.launch`."""


class ReplayedLaunches:
    """Launches of a step, to be replayed for each step that differs only in `changing`."""

    def __init__(self, launches: Sequence[KernelLaunch], changing: Mapping[str, int]) -> None:
        """Pack the launches; their kernels must be compiled.

        Args:
            launches: the launches, in order.
            changing: names of parameters whose values change, the same in all kernels. They are addresses, or 32-bit
                numbers for which no kernel is specialised.

        Raises:
            NotReplayableError: a kernel needs more than parameters at launch.
            ValueError: no kernel has a parameter of a name in `changing`.
        """
        unknown = changing.keys() - {name for _, _, arguments in launches for name in arguments}
        if unknown:
            raise ValueError(f"no kernel has the parameters {sorted(unknown)}")
        self._lock = threading.Lock()
        self._launches: list[DriverLaunch] = []
        self._patches: list[tuple[memoryview, int, str]] = []
        for kernel, grid, arguments in launches:
            arguments = dict(arguments)
            options = {name: arguments.pop(name, default) for name, default in DEFAULT_OPTIONS.items()}
            dependent = arguments.pop("dependent", False)
            kernel = fitting(kernel, arguments)
            packed = triton_abi.pack(kernel, grid, arguments, options, dependent)
            driver_launch = DriverLaunch(packed)
            signature = triton_abi.compile_kernel(kernel, grid, arguments, options).src.signature
            names = [name for name, kind in signature.items() if kind != "constexpr"]
            numbers = driver_launch.words.cast("B").cast("i")
            for name, start in zip(names, packed.starts, strict=False):
                if name in changing:
                    is_address = isinstance(arguments[name], torch.Tensor)
                    view, size = (driver_launch.words, 8) if is_address else (numbers, 4)
                    self._patches.append((view, start // size, name))
            self._launches.append(driver_launch)

    def run(self, index: int, values: Mapping[str, int]) -> None:
        """Launch on the current stream of GPU `index`, which must be the current GPU.

        Raises:
            RuntimeError: the driver reports an error.
        """
        stream = torch_private.current_stream(index)
        with self._lock:
            for view, place, name in self._patches:
                view[place] = values[name]
            for driver_launch in self._launches:
                driver_launch.config.stream = stream
                if status := driver_launch.launch():
                    if driver.ensure_context(index):  # the thread had no context, so nothing was launched
                        status = driver_launch.launch()
                    driver.check_status("cuLaunchKernelEx", status)


def run_step(
    kind: str,
    make_launches: Callable[[], Sequence[KernelLaunch]],
    output: torch.Tensor,
    counts: torch.Tensor | None,
    changing: Mapping[str, int],
    tensors: Sequence[torch.Tensor],
    facts: tuple[object, ...],
) -> None:
    """Run the launches of a step of decoding, or replay an earlier step's launches, which differ only in `changing`.

    The first replay follows at once, for comparison: it stores the step's tokens once more, at the same places.

    Args:
        kind: name of the function that makes the steps.
        make_launches: a function that makes the launches.
        output: the step's output, written.
        counts: the device's counts, which the launches update; None if the host counts.
        changing: as in `ReplayedLaunches`; it includes the output's address.
        tensors: the step's arguments. Steps are of one kind if these have the same layout, and the facts are equal.
        facts: everything else that the launches depend on, except `changing`.
    """
    entry = cache.find(kind, tensors, facts) if can_replay(output.device) else None
    if entry is not None and entry.replay is not None:
        entry.replay(changing)
        return
    counts_before = None if counts is None or entry is None or entry.calls else counts.clone()
    launches = make_launches()
    for kernel, grid, arguments in launches:
        launch(kernel, grid, **arguments)
    if entry is not None:
        entry.prepare_when_repeated(
            partial(_replay_of_step, launches, output, counts, counts_before, changing), at_once=True
        )


def _replay_of_step(
    launches: Sequence[KernelLaunch],
    output: torch.Tensor,
    counts: torch.Tensor | None,
    counts_before: torch.Tensor | None,
    changing: Mapping[str, int],
) -> cache.Replay:
    """Return the replay of a step that has just run: (changing) -> None; `counts_before` copies them before the step.

    Raises:
        NotReplayableError: the replayed launches give another output.
    """
    replayed, device = ReplayedLaunches(launches, changing), output.device

    def run(changing: Mapping[str, int]) -> None:
        current = torch.cuda.current_device()
        with contextlib.nullcontext() if current == device.index else torch.cuda.device(device):
            replayed.run(device.index, changing)

    def run_again() -> list[torch.Tensor]:
        again = torch.empty_like(output)
        address = {"output": again.data_ptr()}
        if counts is None or counts_before is None:
            run({**changing, **address})
            return [again]
        counts_after = counts.clone()
        counts.copy_(counts_before)
        try:
            run({**changing, **address})
        finally:
            counts.copy_(counts_after)
        return [again]

    cache.check_replay(run_again, (), [output])
    return cache.Replay(None, run)


def can_replay(device: torch.device) -> bool:
    """Tell whether CUDA's driver runs launches now, and they are neither recorded nor traced."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and not is_recording() and trace.current() is None
