"""Repeat the launches of a rehearsed call with other addresses: the least that a call on a GPU can do on its host."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from . import driver
from .trace import Memory, NotRepeatableError, Operator, PackedLaunch, Rehearsal, is_stand_in, locate

ALIGNMENT = 256
"""Bytes, of each buffer in the memory that a call allocates."""
WORD = 8


Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Size, strides and dtype of a tensor."""


@dataclass(frozen=True)
class Bundle:
    """Tensors that lie one behind another in one allocation.

    Attributes:
        tensors: stand-ins for them, each in a memory of its own.
        starts: the first byte of each, multiples of ALIGNMENT.
        size: bytes of all.
    """

    tensors: tuple[torch.Tensor, ...]
    starts: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Bundle:
        """Place tensors, contiguous ones."""
        sizes = (-(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT for x in tensors)
        *starts, size = accumulate(sizes, initial=0)
        return cls(tuple(tensors), tuple(starts), size)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that lie in `memory`, uint8 (size,)."""
        return [
            memory[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
            for x, start in zip(self.tensors, self.starts, strict=True)
        ]


class Tape:
    """The launches of a call, with their parameters packed; run as often as there are calls that differ in addresses.

    What the call returns has memory of its own, from PyTorch's allocator. All buffers besides are parts of one more
    allocation, in which those that are not needed at the same time may share bytes. Any thread may run it, on any
    stream of the device, and graphs capture it.

    Attributes:
        device: the GPU.
        launches: how many kernels it runs.
        has_operators: it also runs operators of PyTorch, which need the call's arguments.
        workspace_bytes: of the buffers that it allocates besides outputs.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        inputs: Sequence[torch.Tensor | Bundle],
        outputs: Sequence[torch.Tensor | Bundle],
        device: torch.device,
    ) -> None:
        """Lay out what was rehearsed.

        Args:
            rehearsal: what the call does.
            inputs: the stand-ins for its arguments, in the order of the addresses that `run` gets; a bundle has one.
            outputs: the stand-ins for what it returns, each in a memory of its own; for a bundle it returns its memory.
            device: the GPU.

        Raises:
            NotRepeatableError: an output is an argument, a part of a buffer, or another output.
        """
        self.device, self._index = device, device.index or 0
        self._outputs = [_form(x) for x in outputs]
        given: dict[int, tuple[int, int]] = {}
        for base, one in enumerate((*inputs, *outputs)):
            parts = zip(one.tensors, one.starts, strict=True) if isinstance(one, Bundle) else [(one, 0)]
            for x, place in parts:
                number, start = locate(x.data_ptr())
                if number in given or start:
                    raise NotRepeatableError("an output shares its memory")
                given[number] = base, place
        steps = rehearsal.steps
        buffers = [memory for memory in rehearsal.memories if memory.number not in given]
        places, self.workspace_bytes = place_buffers(buffers, len(steps))
        self._workspace = len(inputs) + len(outputs)
        bases = given | {number: (self._workspace, start) for number, start in places.items()}

        packed = [step[0] for step in steps if isinstance(step, tuple)]
        self.launches = len(packed)
        self._constants = [x for launch in packed for x in launch.constants]
        self._space, starts = _pack(packed)
        self._words = memoryview(self._space).cast("B").cast("Q")
        self._patches: list[list[tuple[int, int]]] = [[] for _ in range(self._workspace + 1)]
        self._streams: list[int] = []
        self._beside: list[int] = []
        self._calls: list[Callable[[], int] | _Operator | str] = []
        remaining = iter(zip(packed, starts, strict=True))
        for step in steps:
            if isinstance(step, str):
                self._calls.append(step)
                continue
            if isinstance(step, Operator):
                self._calls.append(_Operator(step, [*inputs, *outputs], bases))
                continue
            launch, (config, addresses, parameters) = next(remaining)
            for place in launch.addresses:
                address = struct.unpack_from("<Q", launch.parameters, place)[0]
                if is_stand_in(address):
                    number, offset = locate(address)
                    base, start = bases[number]
                    self._patches[base].append(((parameters + place) // WORD, start + offset))
            (self._beside if step[1] else self._streams).append((config + driver.CONFIG_STREAM) // WORD)
            origin = ctypes.addressof(self._space)
            self._calls.append(_launcher(origin + config, launch.function, origin + addresses))
        self.has_operators = any(isinstance(call, _Operator) for call in self._calls)
        self._latest = [0] * len(self._patches)
        self._latest_stream = -1
        self._lock = threading.Lock()

    def run(self, *addresses: int, arguments: Sequence[torch.Tensor | None] = ()) -> list[torch.Tensor]:
        """Launch on the current stream of the device; return the outputs.

        Args:
            addresses: of the arguments, whose sizes, strides, dtypes and alignment are the rehearsed ones'.
            arguments: these, which operators of PyTorch need.

        Raises:
            RuntimeError: the driver refuses.
        """
        if current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.run(*addresses, arguments=arguments)
        new = [
            torch.empty_strided(size, stride, dtype=dtype, device=self.device) for size, stride, dtype in self._outputs
        ]
        bases = [*addresses, *[x.data_ptr() for x in new]]
        workspace = None
        if self.workspace_bytes:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
            bases.append(workspace.data_ptr())
        stream = current_stream(self._index)
        with self._lock:
            words, latest = self._words, self._latest
            for base, address in enumerate(bases):
                if latest[base] != address:
                    for word, offset in self._patches[base]:
                        words[word] = address + offset
                    latest[base] = address
            if stream != self._latest_stream:
                for word in self._streams:
                    words[word] = stream
                self._latest_stream = stream
            if self._beside:
                with driver.side_stream(self._index, stream) as beside:
                    for word in self._beside:
                        words[word] = beside.handle
                    self._launch(stream, beside, arguments[: len(addresses)], new, workspace)
            else:
                self._launch(stream, None, arguments[: len(addresses)], new, workspace)
        return new

    def _launch(
        self,
        stream: int,
        beside: driver.SideStream | None,
        arguments: Sequence[torch.Tensor | None],
        new: Sequence[torch.Tensor],
        workspace: torch.Tensor | None,
    ) -> None:
        for call in self._calls:
            if isinstance(call, _Operator):
                call.run(arguments, new, workspace)
            elif isinstance(call, str):
                assert beside is not None
                (beside.fork if call == "fork" else beside.join)(stream)
            elif status := call():
                if driver.ensure_context(self._index):  # the thread had none, and nothing was launched
                    status = call()
                driver.check("cuLaunchKernelEx", status)


class _Operator:
    """Operator of PyTorch with the places of its arguments."""

    def __init__(
        self, step: Operator, known: Sequence[torch.Tensor | Bundle], bases: dict[int, tuple[int, int]]
    ) -> None:
        """Find the arguments among the call's arguments and outputs, `known`, or in its workspace."""
        self._operator = step.run
        self._places: list[tuple[int, int, Form]] = []
        for x in step.arguments:
            number, offset = locate(x.data_ptr())
            base, start = bases[number]
            form = _form(x)
            if base < len(known) and (offset or form != _form(known[base])):
                raise NotRepeatableError("an operator's argument is a part of the call's")
            self._places.append((base, start + offset, form))

    def run(
        self, arguments: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor], workspace: torch.Tensor | None
    ) -> None:
        """Run."""
        known = [*arguments, *outputs]
        self._operator(*(self._tensor(known, workspace, *place) for place in self._places))

    def _tensor(
        self,
        known: Sequence[torch.Tensor | None],
        workspace: torch.Tensor | None,
        base: int,
        start: int,
        form: Form,
    ) -> torch.Tensor | None:
        if base < len(known):
            return known[base]
        assert workspace is not None
        size, stride, dtype = form
        return workspace.view(dtype).as_strided(size, stride, start // dtype.itemsize)


def _form(x: torch.Tensor | Bundle) -> Form:
    return (torch.Size([x.size]), (1,), torch.uint8) if isinstance(x, Bundle) else (x.shape, x.stride(), x.dtype)


def place_buffers(buffers: Sequence[Memory], steps: int) -> tuple[dict[int, int], int]:
    """Place buffers in one allocation so that those allocated at the same step do not overlap.

    Returns:
        The first byte of each by its number, and the size of the allocation.
    """
    placed: list[tuple[int, int, Memory]] = []
    for buffer in sorted(buffers, key=lambda buffer: -buffer.size):
        start = 0
        for first, end, other in sorted(placed, key=lambda one: one[0]):
            together = buffer.first <= _last(other, steps) and other.first <= _last(buffer, steps)
            if together and first < start + buffer.size and start < end:
                start = end
        placed.append((start, start + -(-buffer.size // ALIGNMENT) * ALIGNMENT, buffer))
    return {buffer.number: start for start, _, buffer in placed}, max((end for _, end, _ in placed), default=0)


def _last(buffer: Memory, steps: int) -> int:
    """Return the last step at which a buffer is allocated; the next one may use its bytes."""
    return steps if buffer.last is None else buffer.last - 1


def _pack(launches: Sequence[PackedLaunch]) -> tuple[ctypes.Array[ctypes.c_char], list[tuple[int, int, int]]]:
    """Return what the driver reads of all launches, and where that of each begins: config, addresses, parameters."""
    attributes = [_attributes(launch) for launch in launches]
    place = len(launches) * struct.calcsize(driver.CONFIG)
    size = place + sum(map(len, attributes))
    starts = []
    for number, launch in enumerate(launches):
        addresses = size
        parameters = -(-(addresses + WORD * len(launch.starts)) // driver.MAP_ALIGNMENT) * driver.MAP_ALIGNMENT
        starts.append((number * struct.calcsize(driver.CONFIG), addresses, parameters))
        size = parameters + -(-len(launch.parameters) // WORD) * WORD
    space = ctypes.create_string_buffer(size)
    origin = ctypes.addressof(space)
    for launch, (config, addresses, parameters), packed in zip(launches, starts, attributes, strict=True):
        sizes = *launch.grid, launch.threads, 1, 1, launch.shared_bytes
        given = origin + place if packed else 0, len(packed) // struct.calcsize(driver.ATTRIBUTE)
        struct.pack_into(driver.CONFIG, space, config, *sizes, 0, *given)
        struct.pack_into(
            f"<{len(launch.starts)}Q", space, addresses, *(origin + parameters + start for start in launch.starts)
        )
        struct.pack_into(f"{len(launch.parameters)}s", space, parameters, launch.parameters)
        struct.pack_into(f"{len(packed)}s", space, place, packed)
        place += len(packed)
    return space, starts


def _attributes(launch: PackedLaunch) -> bytes:
    """Return a launch's attributes as the driver takes them."""
    if not launch.dependent:
        return b""
    return struct.pack(driver.ATTRIBUTE, driver.PROGRAMMATIC_STREAM_SERIALIZATION, 1)


def _launcher(config: int, function: int, parameters: int) -> Callable[[], int]:
    pointers = (ctypes.c_void_p(address) for address in (config, function, parameters, 0))
    return partial(driver.library().cuLaunchKernelEx, *pointers)


def launch_now(launch: PackedLaunch) -> None:
    """Launch on the current stream of the current device, whose context the thread has.

    Raises:
        RuntimeError: the driver refuses.
    """
    space, [(config, addresses, _)] = _pack([launch])
    struct.pack_into("<Q", space, config + driver.CONFIG_STREAM, current_stream(current_device()))
    origin = ctypes.addressof(space)
    driver.check("cuLaunchKernelEx", _launcher(origin + config, launch.function, origin + addresses)())


def current_device() -> int:
    """Return the number of PyTorch's current GPU."""
    return torch._C._cuda_getDevice()


def current_stream(index: int) -> int:
    """Return the handle of PyTorch's current stream on a GPU."""
    return torch._C._cuda_getCurrentRawStream(index)
