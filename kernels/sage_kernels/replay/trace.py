"""Trace a call: run its host code with tensors that have addresses but no memory, and note what it would launch.

A kernel's host code decides the same for calls that differ only in addresses. A trace finds out once which buffers a
call allocates, for how long, and where the kernels' parameters hold which address; `launch_plan` then replays the
launches with other addresses.
"""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from ..runtime import torch_private

FIRST_ADDRESS = 2**56
"""Placeholders have addresses from here on; tensors with memory have lower addresses."""
MEMORY_BYTES = 2**44
"""Distance between the addresses of two memories: more bytes than any GPU has."""

SAMPLE_ADDRESSES = 2**40, 2**46 + 2**20 + 16
"""Addresses whose tensor maps are compared to find where the address lies."""


class NotReplayableError(RuntimeError):
    """Error for a call whose host code does more than allocate, take views and launch kernels."""


@dataclass(frozen=True)
class PackedLaunch:
    """Launch with its parameters in the driver's format.

    Attributes:
        function: the driver's handle of the kernel.
        grid: blocks along three axes.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        dependent: whether it may start before the stream's previous kernel has ended.
        parameters: the bytes of all parameters.
        starts: first byte of each parameter.
        addresses: first bytes of the 64-bit addresses in the parameters, including addresses at the heads of tensor
            maps.
        constants: tensors with memory whose addresses are in the parameters.
    """

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    dependent: bool
    parameters: bytes
    starts: tuple[int, ...]
    addresses: tuple[int, ...]
    constants: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class TracedOperator:
    """Operator of PyTorch among a call's launches.

    Attributes:
        run: a function of the real tensors.
        arguments: the placeholders; a placeholder of a call's argument is the argument itself, not a view of it.
    """

    run: Callable[..., object]
    arguments: tuple[Placeholder, ...]


@dataclass(eq=False)
class TracedMemory:
    """Memory that a call reads, or allocates.

    Attributes:
        number: its place in `Trace.memories`.
        size: bytes.
        first, last: numbers of the steps between which it is allocated; `last` is None while it is allocated.
    """

    number: int
    size: int
    first: int
    last: int | None = None

    @property
    def address(self) -> int:
        """Return the address of its placeholders' first byte."""
        return FIRST_ADDRESS + self.number * MEMORY_BYTES


@dataclass
class Trace:
    """Launches and allocations of a traced call.

    Attributes:
        memories: memories that the call reads or allocates, by number.
        steps: its launches and operators in order.
        compilations: if only compilation is wanted, functions that compile the kernels that would be launched; None:
            launches are noted.
    """

    memories: list[TracedMemory] = field(default_factory=list)
    steps: list[PackedLaunch | TracedOperator] = field(default_factory=list)
    compilations: list[Callable[[], object]] | None = None

    def placeholder(self, x: torch.Tensor, device: torch.device | None = None) -> Placeholder:
        """Return a placeholder for an argument, with a separate memory, on a device (default: x's)."""
        meta = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
        return Placeholder(meta, self.new_memory(meta), device or x.device, self)

    def new_memory(self, meta: torch.Tensor) -> TracedMemory:
        """Note an allocation."""
        memory = TracedMemory(len(self.memories), meta.untyped_storage().nbytes(), len(self.steps))
        self.memories.append(memory)
        return memory

    def launched(self, launch: PackedLaunch) -> None:
        """Note a launch."""
        self.steps.append(launch)

    def ran(self, run: Callable[..., object], *arguments: torch.Tensor) -> None:
        """Note an operator of PyTorch, which writes to its arguments and returns nothing.

        Raises:
            NotReplayableError: an argument is not a placeholder.
        """
        if not all(isinstance(x, Placeholder) for x in arguments):
            raise NotReplayableError("an operator's argument is not a placeholder")
        self.steps.append(TracedOperator(run, tuple(arguments)))  # type: ignore[arg-type]


def is_placeholder(address: int) -> bool:
    """Return whether an address belongs to a placeholder."""
    return address >= FIRST_ADDRESS


def locate(address: int) -> tuple[int, int]:
    """Return the number of the memory at a placeholder's address, and the byte offset in it."""
    return divmod(address - FIRST_ADDRESS, MEMORY_BYTES)


def relocatable(tensor_map: Callable[[int], bytes], address: int) -> bytes:
    """Return `tensor_map(address)`; for a placeholder, whose address the driver may refuse, derive it from sample maps.

    Raises:
        NotReplayableError: this driver's maps of two addresses differ in more than the first 64 bits.
    """
    if not is_placeholder(address):
        return tensor_map(address)
    first, second = (tensor_map(sample) for sample in SAMPLE_ADDRESSES)
    heads = tuple(struct.unpack_from("<Q", one)[0] for one in (first, second))
    if heads != SAMPLE_ADDRESSES or first[8:] != second[8:]:
        raise NotReplayableError("a tensor map's address is not its first 64 bits alone")
    return struct.pack("<Q", address) + first[8:]


_current: ContextVar[Trace | None] = ContextVar("trace", default=None)
_keeps: ContextVar[bool] = ContextVar("keeps", default=False)
current = _current.get


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Let a traced call allocate, while the block runs, memory that is kept and is the same for all calls."""
    token = _keeps.set(True)
    try:
        yield
    finally:
        _keeps.reset(token)


@contextlib.contextmanager
def tracing(compiles_only: bool = False) -> Iterator[Trace]:
    """Note the launches that this thread makes in the block, instead of launching; or note only their compilations.

    Args:
        compiles_only: note only compilations.
    """
    traced = Trace(compilations=[] if compiles_only else None)
    token = _current.set(traced)
    try:
        with torch.no_grad(), _NoMemory():
            yield traced
    finally:
        _current.reset(token)


class _NoMemory(torch_private.TorchDispatchMode):
    """Let code view placeholders and allocate tensors like them, and refuse any other allocation of GPU memory.

    All replays of a call would share such memory.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave `__torch_dispatch__` undecorated: the decorator would import the compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if any(_holds_placeholder(x) for x in (*args, *options.values())):
            return _follow(function, args, options)
        result = function(*args, **options)
        if isinstance(result, torch.Tensor) and result.device.type == "cuda" and not _keeps.get():
            is_view = any(torch_private.share_memory(result, x) for x in args if isinstance(x, torch.Tensor))
            if not is_view:
                raise NotReplayableError(f"{function} allocates memory outside of placeholders")
        return result


class Placeholder(torch.Tensor):
    """A tensor on a GPU with an address but no memory. Code can view it and allocate others like it.

    It has no dispatch function except the trace mode's: at the first operator of a class with its own dispatch
    function, PyTorch imports modules for seconds.
    """

    _meta: torch.Tensor
    _memory: TracedMemory
    _trace: Trace
    _nominal: torch.device

    __torch_function__ = torch_private.no_torch_function

    def __new__(cls, meta: torch.Tensor, memory: TracedMemory, device: torch.device, traced: Trace) -> Placeholder:
        """Make a placeholder for a tensor in a memory; `meta` has its sizes, on the meta device."""
        x = torch_private.tensor_of_class(cls, meta)
        x._meta, x._memory, x._trace, x._nominal = meta, memory, traced, device
        return x

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device of the real tensor."""
        return self._nominal

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Return whether that device is a GPU."""
        return self._nominal.type == "cuda"

    def get_device(self) -> int:
        """Return the number of the GPU."""
        return self._nominal.index or 0

    def data_ptr(self) -> int:
        """Return the address, which nothing can read."""
        return self._memory.address + int(self._meta.storage_offset()) * self._meta.element_size()


def _holds_placeholder(x: object) -> bool:
    return isinstance(x, Placeholder) or (isinstance(x, (list, tuple)) and any(map(_holds_placeholder, x)))


def _follow(function: Any, args: Sequence[Any], options: dict[str, Any]) -> Placeholder:
    """View a placeholder, or allocate one like it; raise NotReplayableError for other operators before they run.

    If kernels are only compiled, a placeholder may be filled, converted, copied or negated too.
    """
    source = args[0] if args else None
    schema, allocates = function._schema, function.overloadpacket in _ALLOCATING
    traced = current()
    if isinstance(source, Placeholder) and traced is not None and traced.compilations is not None:
        if function.overloadpacket in _FILLING:
            return source
        allocates |= function.overloadpacket is torch.ops.aten.new_zeros
        if function.overloadpacket in _COMPUTING:
            allocates, options = True, {"dtype": options.get("dtype", source.dtype)}
            function, args = torch.ops.aten.new_empty_strided.default, [source, source.shape, source.stride()]
            schema = function._schema
    views = len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    if not isinstance(source, Placeholder) or schema.is_mutable or not (allocates or views):
        raise NotReplayableError(f"{function} is more than a view or an allocation")
    meta_args = [arg._meta if isinstance(arg, Placeholder) else arg for arg in args]
    if "device" in options:
        options = {**options, "device": "meta"}
    if (
        function.overloadpacket is torch.ops.aten.empty_like
        and source.is_contiguous()
        and "memory_format" not in options
    ):
        # PyTorch imports for seconds before it runs `empty_like` on the meta device.
        function, meta_args = torch.ops.aten.new_empty.default, [source._meta, source.shape]
    meta = function(*meta_args, **options)
    shares = isinstance(meta, torch.Tensor) and torch_private.share_memory(meta, source._meta)
    if not isinstance(meta, torch.Tensor) or shares == allocates:  # `Tensor.to` is declared as a view, and may copy
        raise NotReplayableError(f"{function} is more than a view or an allocation")
    if shares:
        return Placeholder(meta, source._memory, source.device, source._trace)
    traced = source._trace
    memory = traced.new_memory(meta)
    weakref.finalize(meta.untyped_storage(), _freed, traced, memory)
    return Placeholder(meta, memory, source.device, traced)


_ALLOCATING = (torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty_strided)
_FILLING = (torch.ops.aten.zero_, torch.ops.aten.fill_, torch.ops.aten.neg_)
_COMPUTING = (torch.ops.aten._to_copy, torch.ops.aten.clone, torch.ops.aten.neg)


def _freed(traced: Trace, memory: TracedMemory) -> None:
    memory.last = len(traced.steps)
