"""Launches of an operator that others wrote, noted in a rehearsal as the driver captures them in a graph.

Such an operator's host code cannot run with stand-ins. It is captured twice, with tensors at other addresses. Where the
parameters of its kernels hold other addresses then, these must be of its tensors, or of one memory that it allocates
besides. All else is the same for tensors at any address, but for bytes that its host code leaves unwritten. Who repeats
what was captured compares the first output with the operator's.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from . import driver
from .rehearsal import Fill, NotRepeatableError, PackedLaunch, Rehearsal, StandIn, keeping

MOST_BYTES = 2**26
"""Bytes of a tensor up to which its operator is captured. With larger ones the GPU takes longer than any host, and
PyTorch would keep the results' memory for the stream on which operators are captured."""
SPACING = 256
"""Bytes from one captured tensor to the next: they overlap, for nothing runs."""
WORD = 8

Run = Callable[..., Sequence[torch.Tensor]]
"""(*tensors) -> the tensors that an operator has allocated for its results."""

_one_at_a_time = threading.Lock()


def note_operator(rehearsal: Rehearsal, run: Run, *arguments: torch.Tensor) -> list[torch.Tensor]:
    """Note what an operator has the GPU do.

    Args:
        rehearsal: of a call on the current device, one that captures.
        run: runs the operator.
        arguments: stand-ins for its tensors, also for those that it writes to.

    Returns:
        Stand-ins for the results.

    Raises:
        NotRepeatableError: it does more than launch kernels and fill memory, one after the other, or knows addresses
            of more memory.
        RuntimeError: the driver refuses.
    """
    stand_ins = [x for x in arguments if isinstance(x, StandIn)]
    largest = max((_bytes_of(x) for x in stand_ins), default=0)
    if not rehearsal.captures or len(stand_ins) < len(arguments) or largest > MOST_BYTES:
        raise NotRepeatableError("nothing is captured now, or an operator's tensors are no stand-ins, or too large")
    with _one_at_a_time, keeping():
        first, second, impossible = _capture_twice(run, stand_ins)
    made = first.tensors[len(stand_ins) :]
    if any(x.untyped_storage().nbytes() != _bytes_of(x) for x in made):
        raise NotRepeatableError("an operator's result is a part of what it allocates")
    if list(map(_without_words, first.steps)) != list(map(_without_words, second.steps)):
        raise NotRepeatableError("an operator launches otherwise with tensors at other addresses")
    results = [stand_ins[0].new_empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in made]
    moves = [
        _Move(_addresses_of(x), y.data_ptr() - x.data_ptr(), stand_in.data_ptr())
        for x, y, stand_in in zip(first.tensors, second.tensors, [*stand_ins, *results], strict=True)
    ]
    known = _Known(moves, impossible)
    pairs = [pair for both in zip(first.steps, second.steps, strict=True) for pair in _pairs(*both)]
    moved = [(one, other) for one, other in pairs if one != other and known.is_unknown(one, other)]
    if moved:
        start, start_again = (min(addresses) for addresses in zip(*moved, strict=True))
        # The memory may begin before the first address that is known of it: what follows is as aligned as it was.
        before = start % SPACING
        own = stand_ins[0].new_empty(before + max(1, first.own.size), dtype=torch.uint8)
        addresses = range(start - before, start + first.own.size)
        moves.append(_Move(addresses, start_again - start, own.data_ptr()))
    known = _Known(moves, impossible, keeps=first.own.number == (1 if moved else 0))
    for step in [_relocated(*both, known) for both in zip(first.steps, second.steps, strict=True)]:
        if isinstance(step, Fill):
            rehearsal.filled(step)
        else:
            rehearsal.launched(step)
    return list(results)


def _capture_twice(run: Run, stand_ins: Sequence[StandIn]) -> tuple[_Capture, _Capture, list[range]]:
    """Return two captures with all tensors at other addresses, and addresses that the second cannot have been given."""
    sizes, count, device = [_bytes_of(x) for x in stand_ins], len(stand_ins), stand_ins[0].device
    space = torch.empty(max(sizes) + 2 * count * SPACING, dtype=torch.uint8, device=device)

    def capture(places: Sequence[int]) -> _Capture:
        tensors = []
        for place, size, x in zip(places, sizes, stand_ins, strict=True):
            start = place * SPACING
            tensors.append(space[start : start + size].view(x.dtype).as_strided(x.shape, x.stride()))
        # Bytes that are left unwritten hold what an earlier run has left there: after one, mostly these addresses.
        _capture(run, tensors)
        return _capture(run, tensors)

    first = capture(range(count))
    # What it freed is taken, so that the second one does not find it again.
    with torch.cuda.stream(_stream(device)):
        size = max(0, first.own.size)
        _taken = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(first.own.number)]
    # In the other order, so that each tensor is moved by another distance.
    second = capture(range(2 * count - 1, count - 1, -1))
    # It was given none of the first one's tensors, all of which were there still.
    before = range(space.data_ptr(), space.data_ptr() + count * SPACING)
    return first, second, [before, *map(_addresses_of, first.tensors[count:])]


def _bytes_of(x: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last one."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _addresses_of(x: torch.Tensor) -> range:
    return range(x.data_ptr(), x.data_ptr() + _bytes_of(x))


class _Allocated(NamedTuple):
    """Number of allocations, and their bytes."""

    number: int
    size: int


class _Move(NamedTuple):
    """Memory of both captures: its addresses in the first one, the way to those in the second, and its stand-in's."""

    addresses: range
    distance: int
    stand_in: int


class _Known(NamedTuple):
    """Knowledge of the addresses in both captures.

    Attributes:
        moves: memory that both were given, or allocated.
        impossible: addresses that the second one cannot have been given.
        keeps: all that the operator allocates is known: memory that lies where it lay is there for every call.
    """

    moves: list[_Move]
    impossible: list[range]
    keeps: bool = False

    def stand_in(self, one: int, other: int) -> int | None:
        """Return the stand-in's address for a word of the first capture and that of the second; None for others."""
        for move in self.moves:
            if other - one == move.distance and one in move.addresses:
                return move.stand_in + one - move.addresses.start
        return None

    def is_unknown(self, one: int, other: int) -> bool:
        """Return whether both are addresses of memory that is not known."""
        if self.stand_in(one, other) is not None or any(other in addresses for addresses in self.impossible):
            return False
        if self.keeps and one == other:
            return False
        return driver.is_address(one) and driver.is_address(other)


@dataclass(frozen=True)
class _Capture:
    """Graph of an operator.

    Attributes:
        steps: what it does in order, with the addresses of this capture.
        tensors: the operator's arguments, then its results.
        own: what it allocated besides, and has freed again.
    """

    steps: list[PackedLaunch | Fill]
    tensors: list[torch.Tensor]
    own: _Allocated


def _capture(run: Run, arguments: Sequence[torch.Tensor]) -> _Capture:
    library, graph, device = driver.library(), ctypes.c_void_p(), arguments[0].device
    stream, before = _stream(device), _allocated(device)
    driver.check("cuStreamBeginCapture", library.cuStreamBeginCapture_v2(stream.cuda_stream, driver.RELAXED_CAPTURE))
    try:
        try:
            with torch.cuda.stream(stream):
                results = run(*arguments)
        finally:
            status = library.cuStreamEndCapture(stream.cuda_stream, ctypes.addressof(graph))
        driver.check("cuStreamEndCapture", status)
        after, kept = _allocated(device), sum(x.untyped_storage().nbytes() for x in results)
        own = _Allocated(after.number - before.number - len(results), after.size - before.size - kept)
        return _Capture([_step(*node) for node in _row_of_nodes(graph)], [*arguments, *results], own)
    finally:
        if graph.value:
            library.cuGraphDestroy(graph)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which operators are captured, and nothing runs."""
    return torch.cuda.Stream(device)


def _allocated(device: torch.device) -> _Allocated:
    """Return what this process has ever asked PyTorch's allocator for on a GPU."""
    counted = torch.cuda.memory_stats_as_nested_dict(device)
    return _Allocated(*(int(counted[name]["all"]["allocated"]) for name in ("allocation", "requested_bytes")))


def _row_of_nodes(graph: ctypes.c_void_p) -> list[tuple[int, bool]]:
    """Return a graph's nodes in their order, and whether each may start before the one before it has ended.

    Raises:
        NotRepeatableError: they are not one row.
    """
    library, number = driver.library(), ctypes.c_size_t()
    count = ctypes.addressof(number)
    driver.check("cuGraphGetNodes", library.cuGraphGetNodes(graph, None, count))
    nodes = (ctypes.c_uint64 * number.value)()
    driver.check("cuGraphGetNodes", library.cuGraphGetNodes(graph, nodes, count))
    driver.check("cuGraphGetEdges", library.cuGraphGetEdges_v2(graph, None, None, None, count))
    sources, targets, kinds = ((ctypes.c_uint64 * number.value)() for _ in range(3))
    if number.value:
        driver.check("cuGraphGetEdges", library.cuGraphGetEdges_v2(graph, sources, targets, kinds, count))
    if not set(kinds) <= {driver.FULL_EDGE, driver.PROGRAMMATIC_EDGE}:
        raise NotRepeatableError("an operator's kernels wait for each other in a way that is not known here")
    following = dict(zip(sources, zip(targets, kinds, strict=True), strict=True))
    row = [(node, driver.FULL_EDGE) for node in set(nodes) - set(targets)]
    while len(row) < len(nodes) and row and row[-1][0] in following:
        row.append(following.pop(row[-1][0]))
    if following or len(row) != len(nodes) or not row or len(sources) != len(row) - 1:
        raise NotRepeatableError("an operator's launches are not one row")
    return [(node, kind == driver.PROGRAMMATIC_EDGE) for node, kind in row]


def _step(node: int, dependent: bool) -> PackedLaunch | Fill:
    """Return what a node of a graph does."""
    library, kind = driver.library(), ctypes.c_int()
    driver.check("cuGraphNodeGetType", library.cuGraphNodeGetType(node, ctypes.addressof(kind)))
    if kind.value == driver.KERNEL_NODE:
        return _launch(node, dependent)
    if kind.value != driver.MEMSET_NODE:
        raise NotRepeatableError(f"an operator does more than launch and fill: node of type {kind.value}")
    raw = ctypes.create_string_buffer(struct.calcsize(driver.MEMSET_NODE_PARAMS))
    driver.check("cuGraphMemsetNodeGetParams", library.cuGraphMemsetNodeGetParams(node, raw))
    address, _, value, element_size, count, rows = struct.unpack(driver.MEMSET_NODE_PARAMS, raw)
    if rows != 1 or dependent:
        raise NotRepeatableError("an operator fills memory in a way that is not known here")
    return Fill(address, value, element_size, count)


def _launch(node: int, dependent: bool) -> PackedLaunch:
    """Return the launch of a node of a graph, without what is known of its addresses."""
    library = driver.library()
    raw = ctypes.create_string_buffer(struct.calcsize(driver.KERNEL_NODE_PARAMS))
    driver.check("cuGraphKernelNodeGetParams", library.cuGraphKernelNodeGetParams_v2(node, raw))
    function, *sizes, shared_bytes, pointers, extra, kernel, _ = struct.unpack(driver.KERNEL_NODE_PARAMS, raw)
    if not function:
        handle = ctypes.c_void_p()
        driver.check("cuKernelGetFunction", library.cuKernelGetFunction(ctypes.addressof(handle), kernel))
        function = handle.value
    cooperative = _attribute(node, driver.COOPERATIVE)
    if extra or sizes[4:] != [1, 1] or cooperative[0]:
        raise NotRepeatableError("a kernel of an operator is launched in a way that is not known here")
    parameters, starts = bytearray(), []
    for number, size in enumerate(driver.parameter_sizes(function)):
        starts.append(len(parameters))
        address = ctypes.c_uint64.from_address(pointers + WORD * number).value
        parameters += ctypes.string_at(address, size) + bytes(-size % WORD)
    return PackedLaunch(
        function=function,
        grid=(sizes[0], sizes[1], sizes[2]),
        threads=sizes[3],
        shared_bytes=shared_bytes,
        dependent=dependent,
        parameters=bytes(parameters),
        starts=tuple(starts),
        addresses=(),
        cluster=_attribute(node, driver.CLUSTER_DIMENSION),
    )


def _attribute(node: int, attribute: int) -> tuple[int, int, int]:
    """Return the first numbers of an attribute of a launch, 0 where it has none."""
    value = (ctypes.c_uint32 * (driver.ATTRIBUTE_VALUE_BYTES // 4))()
    status = driver.library().cuGraphKernelNodeGetAttribute(node, attribute, value)
    driver.check("cuGraphKernelNodeGetAttribute", status)
    return value[0], value[1], value[2]


def _pairs(first: PackedLaunch | Fill, second: PackedLaunch | Fill) -> Iterator[tuple[int, int]]:
    """Yield what a step holds in both captures wherever an address may be."""
    return zip(_words(first), _words(second), strict=True)


def _words(step: PackedLaunch | Fill) -> tuple[int, ...]:
    if isinstance(step, Fill):
        return (step.address,)
    return struct.unpack(f"<{len(step.parameters) // WORD}Q", step.parameters)


def _without_words(step: PackedLaunch | Fill) -> PackedLaunch | Fill:
    return replace(step, address=0) if isinstance(step, Fill) else replace(step, parameters=b"")


def _relocated(first: PackedLaunch | Fill, second: PackedLaunch | Fill, known: _Known) -> PackedLaunch | Fill:
    """Return the step of two captures, which agree but for words, with the addresses of stand-ins."""
    words, places = list(_words(first)), []
    for place, pair in enumerate(_pairs(first, second)):
        if (address := known.stand_in(*pair)) is not None:
            words[place] = address
            places.append(WORD * place)
        elif known.is_unknown(*pair):
            raise NotRepeatableError("an operator holds an address in other memory than its tensors' and its own")
    if not isinstance(first, Fill):
        return replace(first, parameters=struct.pack(f"<{len(words)}Q", *words), addresses=tuple(places))
    if not places:
        raise NotRepeatableError("an operator fills other memory than its tensors and its own")
    return replace(first, address=words[0])
