"""Launches with packed parameters: one launch that runs at once, or a traced call's launches, with other addresses."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..runtime import torch_private
from . import driver
from .trace import NotReplayableError, PackedLaunch, Trace, TracedMemory, TracedOperator, is_placeholder, locate

BUFFER_ALIGNMENT = 256
"""Alignment of each buffer in a call's allocation, in bytes."""
ADDRESS = struct.Struct("<Q")

TensorForm = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Size, strides and dtype of a tensor."""


class DriverLaunch:
    """Launch in the driver's format, in memory that lives as long as this object.

    Attributes:
        words: the bytes of all parameters, as 64-bit numbers: addresses lie at multiples of 8 bytes.
        config: grid, block, shared memory and stream.
        launch: submits the launch to the driver, and returns the driver's status.
    """

    def __init__(self, packed: PackedLaunch) -> None:
        count, parameters = len(packed.starts), packed.parameters + bytes(-len(packed.parameters) % ADDRESS.size)
        space = ctypes.create_string_buffer(len(parameters) + driver.MAP_ALIGNMENT)
        start = -ctypes.addressof(space) % driver.MAP_ALIGNMENT
        memory = memoryview(space).cast("B")[start : start + len(parameters)]
        memory[:] = parameters
        self.words = memory.cast("Q")
        first = ctypes.addressof(space) + start
        self._pointers = (ctypes.c_void_p * count)(*[first + place for place in packed.starts])
        self.config = driver.LaunchConfig(*packed.grid, packed.threads, 1, 1, packed.shared_bytes)
        if packed.dependent:
            self.config.attributes, self.config.attribute_count = ctypes.addressof(driver.WAITS_BY_ITSELF), 1
        addresses = ctypes.addressof(self.config), packed.function, ctypes.addressof(self._pointers), 0
        self.launch = partial(driver.library().cuLaunchKernelEx, *map(ctypes.c_void_p, addresses))


def launch_now(packed: PackedLaunch, index: int) -> None:
    """Launch on the current stream of GPU `index`, whose context must be the thread's context.

    Raises:
        RuntimeError: the driver reports an error.
    """
    launch = DriverLaunch(packed)
    launch.config.stream = torch_private.current_stream(index)
    driver.check_status("cuLaunchKernelEx", launch.launch())


class LaunchPlan:
    """The launches of a traced call, to be run for every call that differs only in addresses.

    Each output has separate memory from PyTorch's allocator. All other buffers are parts of one further allocation, in
    which buffers that are not needed at the same time may share bytes. Any thread may run the plan, on any stream of
    the device, and graphs capture it.

    Attributes:
        device: the GPU.
        workspace_bytes: bytes of the buffers that the plan allocates, except outputs.
    """

    def __init__(
        self, trace: Trace, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        """Lay out a traced call.

        Args:
            trace: the call's launches and allocations.
            inputs: the placeholders for the call's arguments, in the order in which `run` takes them.
            outputs: the placeholders for the call's results, each in a separate memory.
            device: the GPU.

        Raises:
            NotReplayableError: an output is an argument, a part of a buffer, or another output.
        """
        self.device, self._index = device, device.index or 0
        self._outputs = [_form(x) for x in outputs]
        call_tensors = [*inputs, *outputs]
        bases: dict[int, tuple[int, int]] = {}
        for base, x in enumerate(call_tensors):
            number, start = locate(x.data_ptr())
            if number in bases or start:
                raise NotReplayableError("an output shares memory with another tensor")
            bases[number] = base, 0
        buffers = [memory for memory in trace.memories if memory.number not in bases]
        places, self.workspace_bytes = place_buffers(buffers, len(trace.steps))
        bases |= {number: (len(call_tensors), start) for number, start in places.items()}

        self._constants: list[torch.Tensor] = []
        self._patches: list[list[tuple[memoryview, int, int]]] = [[] for _ in range(len(call_tensors) + 1)]
        self._addresses, self._stream = [0] * len(self._patches), -1  # addresses and stream of the latest run
        self._launches: list[DriverLaunch] = []
        self._steps: list[Callable[[], int] | _LocatedOperator] = []
        for step in trace.steps:
            if isinstance(step, TracedOperator):
                self._steps.append(_LocatedOperator(step, call_tensors, bases))
            else:
                launch = DriverLaunch(step)
                self._constants += step.constants
                for place in step.addresses:
                    address = ADDRESS.unpack_from(step.parameters, place)[0]
                    if is_placeholder(address):
                        number, offset = locate(address)
                        base, start = bases[number]
                        self._patches[base].append((launch.words, place // ADDRESS.size, start + offset))
                self._launches.append(launch)
                self._steps.append(launch.launch)
        self._lock = threading.Lock()

    def run(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        """Launch on the current stream of the device; return the outputs.

        Args:
            arguments: tensors with the sizes, strides, dtypes and alignment of the traced arguments.

        Raises:
            RuntimeError: the driver reports an error.
        """
        if torch_private.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.run(*arguments)
        outputs = [
            torch.empty_strided(size, stride, dtype=dtype, device=self.device) for size, stride, dtype in self._outputs
        ]
        tensors = [*arguments, *outputs]
        if self.workspace_bytes:
            tensors.append(torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device))
        stream = torch_private.current_stream(self._index)
        with self._lock:
            for base, x in enumerate(tensors):
                if (address := x.data_ptr()) != self._addresses[base]:
                    self._addresses[base] = address
                    for words, place, offset in self._patches[base]:
                        words[place] = address + offset
            if stream != self._stream:
                self._stream = stream
                for launch in self._launches:
                    launch.config.stream = stream
            for step in self._steps:
                if isinstance(step, _LocatedOperator):
                    step.run(tensors)
                elif status := step():
                    if driver.ensure_context(self._index):  # the thread had no context, so nothing was launched
                        status = step()
                    driver.check_status("cuLaunchKernelEx", status)
        return outputs


class _LocatedOperator:
    """Operator of PyTorch with the locations of its arguments."""

    def __init__(
        self, step: TracedOperator, call_tensors: Sequence[torch.Tensor], bases: dict[int, tuple[int, int]]
    ) -> None:
        """Locate the arguments among the call's arguments and outputs, `call_tensors`, or in its workspace."""
        self._operator = step.run
        self._places: list[tuple[int, int, TensorForm | None]] = []
        for x in step.arguments:
            number, offset = locate(x.data_ptr())
            base, start = bases[number]
            if base == len(call_tensors):
                self._places.append((base, start + offset, _form(x)))
            elif offset or _form(x) != _form(call_tensors[base]):
                raise NotReplayableError("an operator's argument is a part of a call's argument or output")
            else:
                self._places.append((base, 0, None))

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Run the operator; `tensors` are the call's arguments, outputs and workspace."""
        arguments = []
        for base, start, form in self._places:
            x = tensors[base]
            if form is not None:
                size, stride, dtype = form
                x = x.view(dtype).as_strided(size, stride, start // dtype.itemsize)
            arguments.append(x)
        self._operator(*arguments)


def _form(x: torch.Tensor) -> TensorForm:
    return x.shape, x.stride(), x.dtype


def place_buffers(buffers: Sequence[TracedMemory], steps: int) -> tuple[dict[int, int], int]:
    """Place buffers in one allocation so that buffers allocated at the same step do not overlap.

    Returns:
        The first byte of each buffer by its number, and the size of the allocation.
    """
    placed: list[tuple[int, int, TracedMemory]] = []
    for buffer in sorted(buffers, key=lambda buffer: -buffer.size):
        start = 0
        for first, end, other in sorted(placed, key=lambda one: one[0]):
            together = buffer.first <= _last(other, steps) and other.first <= _last(buffer, steps)
            if together and first < start + buffer.size and start < end:
                start = end
        placed.append((start, start + -(-buffer.size // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT, buffer))
    return {buffer.number: start for start, _, buffer in placed}, max((end for _, end, _ in placed), default=0)


def _last(buffer: TracedMemory, steps: int) -> int:
    """Return the last step at which a buffer is allocated; from the next step on, other buffers may use its bytes."""
    return steps if buffer.last is None else buffer.last - 1
