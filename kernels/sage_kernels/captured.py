"""Launches of an operator that others wrote, noted in a rehearsal as the driver captures them in a graph.

Such an operator's host code cannot run with stand-ins. It is captured twice, with tensors at other addresses: where the
parameters of its kernels differ, they must hold the addresses of these tensors; elsewhere, no address at all.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from . import driver
from .rehearsal import NotRepeatableError, PackedLaunch, Rehearsal, StandIn, keeping, locate

MOST_BYTES = 2**28
"""Of a tensor of an operator that is captured: with larger ones the GPU takes longer than any host."""
SPACING = 256
"""Bytes from one captured tensor to the next: they overlap, for nothing runs."""
WORD = 8

Run = Callable[..., Sequence[torch.Tensor]]
"""(*tensors) -> the tensors that an operator has allocated for its results."""


def note_operator(
    rehearsal: Rehearsal, run: Run, *arguments: torch.Tensor, scratch: Sequence[torch.Tensor] = ()
) -> None:
    """Note the launches of an operator.

    Args:
        rehearsal: of a call on the current device.
        run: runs the operator.
        arguments: stand-ins for its tensors, also for those that it writes to.
        scratch: those of them that nobody reads afterwards: launches at the end that know no others are left out.

    Raises:
        NotRepeatableError: it does more than launch kernels in a row, or these hold addresses of other memory.
        RuntimeError: the driver refuses.
    """
    stand_ins = [x for x in arguments if isinstance(x, StandIn)]
    sizes = [_bytes_of(x) for x in stand_ins]
    if len(stand_ins) < len(arguments) or max(sizes) > MOST_BYTES or torch.cuda.is_current_stream_capturing():
        raise NotRepeatableError("an operator's tensors are no stand-ins or too large, or its caller captures a graph")
    like, count = stand_ins[0], len(stand_ins)
    with keeping():
        space = torch.empty(max(sizes) + (2 * count + 1) * SPACING, dtype=torch.uint8, device=like.device)

        def capture(places: Sequence[int]) -> _Capture:
            tensors = []
            for place, size, x in zip(places, sizes, stand_ins, strict=True):
                start = place * SPACING
                tensors.append(space[start : start + size].view(x.dtype).as_strided(x.shape, x.stride()))
            # Bytes that are left unwritten hold what an earlier run has left there: these addresses after one run.
            _capture(run, tensors)
            return _capture(run, tensors)

        # In the other order, so that each tensor is moved by another distance; none is where their memory begins.
        first, second = capture(range(1, count + 1)), capture(range(2 * count, count, -1))
    results = [like.new_empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in first.tensors[count:]]
    moves = [
        _Move(range(x.data_ptr(), x.data_ptr() + _bytes_of(x)), y.data_ptr() - x.data_ptr(), stand_in.data_ptr())
        for x, y, stand_in in zip(first.tensors, second.tensors, [*stand_ins, *results], strict=True)
    ]
    if len(first.launches) != len(second.launches):
        raise NotRepeatableError("an operator launches otherwise with tensors at other addresses")
    launches = [
        _relocated(*both, moves, space.data_ptr()) for both in zip(first.launches, second.launches, strict=True)
    ]
    spared = {locate(x.data_ptr())[0] for x in scratch}
    while launches and spared and {locate(address)[0] for address in _addresses(launches[-1])} <= spared:
        launches.pop()
    for launch in launches:
        rehearsal.launched(launch)


def _addresses(launch: PackedLaunch) -> list[int]:
    return [struct.unpack_from("<Q", launch.parameters, place)[0] for place in launch.addresses]


def _bytes_of(x: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last one."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


class _Move(NamedTuple):
    """Tensor of both captures: its addresses in the first one, the way to those in the second, and its stand-in's."""

    addresses: range
    distance: int
    stand_in: int


@dataclass(frozen=True)
class _Capture:
    """Graph of an operator.

    Attributes:
        launches: its kernels in order, with the addresses of the tensors of this capture.
        tensors: the operator's arguments, then its results.
    """

    launches: list[PackedLaunch]
    tensors: list[torch.Tensor]


def _capture(run: Run, arguments: Sequence[torch.Tensor]) -> _Capture:
    library, graph, stream = driver.library(), ctypes.c_void_p(), _stream(arguments[0].device)
    driver.check("cuStreamBeginCapture", library.cuStreamBeginCapture_v2(stream.cuda_stream, driver.RELAXED_CAPTURE))
    try:
        try:
            with torch.cuda.stream(stream):
                results = run(*arguments)
        finally:
            status = library.cuStreamEndCapture(stream.cuda_stream, ctypes.addressof(graph))
        driver.check("cuStreamEndCapture", status)
        return _Capture([_launch(*node) for node in _row_of_nodes(graph)], [*arguments, *results])
    finally:
        if graph.value:
            library.cuGraphDestroy(graph)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which operators are captured, and nothing runs."""
    return torch.cuda.Stream(device)


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


def _launch(node: int, dependent: bool) -> PackedLaunch:
    """Return the launch of a node of a graph, without what is known of its addresses."""
    library, kind = driver.library(), ctypes.c_int()
    driver.check("cuGraphNodeGetType", library.cuGraphNodeGetType(node, ctypes.addressof(kind)))
    if kind.value != driver.KERNEL_NODE:
        raise NotRepeatableError(f"an operator does more than launch kernels: node of type {kind.value}")
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


def _relocated(first: PackedLaunch, second: PackedLaunch, moves: Sequence[_Move], space: int) -> PackedLaunch:
    """Return the launch of two captures with the addresses of stand-ins.

    Args:
        first, second: the launch in both captures.
        moves: the tensors of both.
        space: address of the memory in which they lie, which the host code of tensors knows too.
    """
    if replace(first, parameters=b"") != replace(second, parameters=b""):
        raise NotRepeatableError("an operator launches otherwise with tensors at other addresses")
    form, addresses = f"<{len(first.parameters) // WORD}Q", []
    words = list(struct.unpack(form, first.parameters))
    for place, (one, other) in enumerate(zip(words, struct.unpack(form, second.parameters), strict=True)):
        found = [x for x in moves if x.distance == other - one and one in x.addresses]
        if found:
            words[place] = found[0].stand_in + one - found[0].addresses.start
            addresses.append(WORD * place)
        elif any(word != space and driver.is_address(word) for word in (one, other)):
            raise NotRepeatableError("a kernel of an operator holds an address in other memory than its tensors'")
    return replace(first, parameters=struct.pack(form, *words), addresses=tuple(addresses))
