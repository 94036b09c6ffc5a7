"""Launches of others' operators: what is noted of them, and which are refused."""

import contextlib
import ctypes
import itertools
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sage_kernels import captured, driver, rehearsal, tape
from sage_kernels.rehearsal import NotRepeatableError, locate, rehearsing
from tests.helpers import fake_gpu

EVENT_PORT = 2  # of an edge from a kernel's blocks that have begun


class Driver(fake_gpu.FakeLibrary):
    """The driver's library, of which an operator that is being captured asks for launches."""

    def __init__(self):
        super().__init__()
        self.memory, self.graphs, self.kept, self.edges, self.kinds = [], 0, [], [], []
        self.node_kind, self.cooperative, self.cluster = None, 0, (0, 0, 0)
        self.block, self.rows, self.allocated = (128, 1, 1), 1, captured._Allocated(0, 0)

    def launch(self, *words, kind=driver.FULL_EDGE):
        """Let the operator launch a kernel of one parameter, which holds 64-bit words."""
        parameter = ctypes.create_string_buffer(struct.pack(f"<{len(words)}Q", *words), 8 * len(words))
        pointers = (ctypes.c_uint64 * 1)(ctypes.addressof(parameter))
        self.kept.append(parameter)
        self._add((pointers, len(words)), kind)

    def fill(self, address, value, element_size, count, kind=driver.FULL_EDGE):
        """Let the operator fill memory."""
        self._add((address, 0, value, element_size, count, self.rows), kind)

    def _add(self, node, kind):
        self.nodes.append(node)
        if len(self.nodes) > 1:
            self.edges.append((len(self.nodes) - 1, len(self.nodes)))
            self.kinds.append(kind)

    def allocate(self, *shape, dtype=torch.float32):
        """Let the operator allocate a tensor."""
        x = torch.zeros(shape, dtype=dtype)
        self.allocated = captured._Allocated(self.allocated.number + 1, self.allocated.size + x.nbytes)
        self.memory.append(range(x.data_ptr(), x.data_ptr() + x.nbytes))
        return x

    def cuStreamBeginCapture_v2(self, stream, mode):
        self.nodes, self.edges, self.kinds = [], [], []
        return 0

    def cuStreamEndCapture(self, stream, graph):
        self.graphs += 1
        ctypes.c_uint64.from_address(graph).value = 1
        return 0

    def cuGraphDestroy(self, graph):
        self.graphs -= 1
        return 0

    def cuGraphGetNodes(self, graph, nodes, count):
        if nodes is None:
            ctypes.c_uint64.from_address(count).value = len(self.nodes)
        else:
            nodes[:] = range(len(self.nodes), 0, -1)
        return 0

    def cuGraphGetEdges_v2(self, graph, sources, targets, kinds, count):
        if sources is None:
            ctypes.c_uint64.from_address(count).value = len(self.edges)
        else:
            sources[:], targets[:], kinds[:] = *zip(*reversed(self.edges), strict=True), list(reversed(self.kinds))
        return 0

    def cuGraphNodeGetType(self, node, kind):
        fills = len(self.nodes[node - 1]) > 2
        ctypes.c_int.from_address(kind).value = self.node_kind or (driver.MEMSET_NODE if fills else driver.KERNEL_NODE)
        return 0

    def cuGraphMemsetNodeGetParams(self, node, raw):
        struct.pack_into(driver.MEMSET_NODE_PARAMS, raw, 0, *self.nodes[node - 1])
        return 0

    def cuMemsetD32Async(self, address, value, count, stream):
        self.launched.append((address, value, count, stream))
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, raw):
        pointers, _ = self.nodes[node - 1]
        sizes = 3, 1, 1, *self.block, 4096
        struct.pack_into(driver.KERNEL_NODE_PARAMS, raw, 0, 10 + node, *sizes, ctypes.addressof(pointers), 0, 0, 0)
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, attribute, value):
        value[:3] = self.cluster if attribute == driver.CLUSTER_DIMENSION else (self.cooperative, 0, 0)
        return 0

    def cuPointerGetAttribute(self, found, attribute, word):
        return 0 if any(word in addresses for addresses in self.memory) else 1


@pytest.fixture
def library(monkeypatch):
    """A driver in place of the GPU's; tensors lie in the host's memory."""
    fake_gpu.install(monkeypatch)
    library, empty = Driver(), torch.empty
    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(driver, "parameter_sizes", lambda function: [8 * library.nodes[function - 11][1]])
    monkeypatch.setattr(captured, "_allocated", lambda device: library.allocated)
    monkeypatch.setattr(captured, "_stream", lambda device: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **options: empty(*sizes, **options))
    return library


def note(run, *shapes, dtype=torch.bfloat16):
    """The steps of a call that runs an operator on tensors of such shapes, and these tensors' stand-ins."""
    with rehearsing(captures=True) as rehearsed:
        stand_ins = [rehearsed.stand_in(torch.empty(shape, dtype=dtype)) for shape in shapes]
        captured.note_operator(rehearsed, run, *stand_ins)
        return rehearsed, stand_ins


def words(launch):
    return struct.unpack(f"<{len(launch.parameters) // 8}Q", launch.parameters)


def test_addresses_of_arguments_and_of_places_in_them_become_those_of_stand_ins(library):
    def run(query, output):
        library.launch(7, query.data_ptr(), output.data_ptr() + 16, 0)
        return []

    rehearsed, (query, output) = note(run, (4, 8), (4, 8))
    ((launch, beside),) = rehearsed.steps
    assert words(launch) == (7, query.data_ptr(), output.data_ptr() + 16, 0)
    assert launch.addresses == (8, 16) and launch.starts == (0,) and not beside
    assert (launch.function, launch.grid, launch.threads, launch.shared_bytes) == (11, (3, 1, 1), 128, 4096)
    assert library.graphs == 0


def test_what_an_operator_returns_is_memory_of_the_call_for_as_long_as_it_runs(library):
    def run(query):
        result = library.allocate(1000)
        library.launch(result.data_ptr())
        library.launch(result.data_ptr() + 3999, query.data_ptr())
        return [result]

    rehearsed, (query,) = note(run, (4, 8))
    first, second = (launch for launch, _ in rehearsed.steps)
    number, byte = locate(words(first)[0])
    assert byte == 0 and locate(words(second)[0]) == (number, 3999) and words(second)[1] == query.data_ptr()
    memory = rehearsed.memories[number]
    assert memory.size == 4000 and memory.first == 0 and memory.last in (2, None)


def test_kernels_keep_their_order_their_clusters_and_whether_they_overlap(library):
    library.cluster = 2, 1, 1

    def run(query):
        library.launch(1)
        library.launch(2, kind=driver.PROGRAMMATIC_EDGE)
        library.launch(3)
        return []

    rehearsed, _ = note(run, (4, 8))
    launches = [launch for launch, _ in rehearsed.steps]
    assert [words(x)[0] for x in launches] == [1, 2, 3]
    assert [x.dependent for x in launches] == [False, True, False]
    assert all(x.cluster == (2, 1, 1) for x in launches)


def test_bytes_that_host_code_leaves_unwritten_need_not_agree(library):
    unwritten = itertools.count(2**40)
    rehearsed, _ = note(lambda query: library.launch(next(unwritten)) or [], (4, 8))
    assert len(rehearsed.steps) == 1 and rehearsed.steps[0][0].addresses == ()


def test_an_earlier_runs_addresses_are_the_same_ones(library):
    """A run leaves them in memory that the next one does not write."""
    left = {"address": 0}
    library.memory.append(range(1, 2**60))

    def run(query):
        library.launch(query.data_ptr(), left["address"])
        left["address"] = query.data_ptr()
        return []

    rehearsed, (query,) = note(run, (4, 8))
    assert words(rehearsed.steps[0][0]) == (query.data_ptr(),) * 2


def test_addresses_that_a_capture_was_not_given_are_no_addresses(library):
    """The memory of all tensors, which their own host code knows, and what was given to the capture before."""
    library.memory.append(range(1, 2**60))
    results = []

    def run(query):
        results.append(library.allocate(4))
        left_behind = results[min(1, len(results) - 1)]  # of the first capture, which comes after an uncaptured run
        library.launch(query.data_ptr(), query.untyped_storage().data_ptr(), left_behind.data_ptr())
        return results[-1:]

    rehearsed, _ = note(run, (4, 8))
    assert rehearsed.steps[0][0].addresses == (0,)


def test_what_is_an_address_in_one_capture_alone_is_none(library):
    turn, hidden = itertools.count(), library.allocate(4)
    rehearsed, _ = note(lambda query: library.launch(hidden.data_ptr() * (next(turn) % 4 == 3)) or [], (4, 8))
    assert rehearsed.steps[0][0].addresses == ()


def test_memory_that_an_operator_allocates_and_frees_is_memory_of_the_call(library):
    """And what lies where it lay, such as tables of the operator's library, is there for every call."""
    kept, table = [], library.allocate(4)

    def run(query):
        kept.append(library.allocate(10))
        library.fill(kept[-1].data_ptr() + 8, 7, 4, 8)
        library.launch(kept[-1].data_ptr(), query.data_ptr(), table.data_ptr())
        return []

    rehearsed, (query,) = note(run, (4, 8))
    fill, (launch, _) = rehearsed.steps
    number, byte = locate(fill.address)
    assert byte == kept[1].data_ptr() % captured.SPACING + 8  # of the first capture, aligned as there
    assert (fill.value, fill.element_size, fill.count) == (7, 4, 8)
    assert locate(words(launch)[0]) == (number, byte - 8)
    assert words(launch)[1:] == (query.data_ptr(), table.data_ptr())
    assert rehearsed.memories[number].size == byte - 8 + 40 and launch.addresses == (0, 8)


def test_an_operators_own_memory_is_aligned_as_it_was_wherever_its_first_known_address_lies(library):
    kept = []

    def run(query):
        kept.append(library.allocate(100))
        library.launch(kept[-1].data_ptr() + 8, kept[-1].data_ptr() + 16)
        return []

    rehearsed, _ = note(run, (4, 8))
    ((launch, _),) = rehearsed.steps
    (number, first), (other, second) = (locate(word) for word in words(launch))
    assert number == other and second - first == 8
    assert first == (kept[1].data_ptr() + 8) % captured.SPACING


def test_other_memory_is_refused(library):
    kept = []

    def beyond(query):
        kept.append(library.allocate(10))
        library.memory.append(range(kept[-1].data_ptr(), kept[-1].data_ptr() + 48))
        library.launch(kept[-1].data_ptr(), kept[-1].data_ptr() + 40)
        return []

    def two_allocations(query):
        kept.extend([library.allocate(10), library.allocate(10 + len(kept))])
        library.launch(kept[-2].data_ptr(), kept[-1].data_ptr() + 4 * (len(kept) // 8))
        return []

    def found_again(query):
        again = library.allocate(10)
        kept.append(again)
        library.launch(kept[0].data_ptr())
        return []

    def found_again_and_another(query):
        kept.extend([library.allocate(10), library.allocate(10)])
        library.launch(kept[0].data_ptr(), kept[-1].data_ptr())
        return []

    for run in (beyond, two_allocations, found_again, found_again_and_another):
        kept.clear()
        with pytest.raises(NotRepeatableError, match="other memory"):
            note(run, (4, 8))
    assert library.graphs == 0


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"node_kind": 1}, "more than launch"),
        ({"cooperative": 1}, "not known"),
        ({"block": (32, 2, 1)}, "not known"),
    ],
)
def test_launches_that_cannot_be_repeated_are_refused(library, facts, part):
    vars(library).update(facts)
    with pytest.raises(NotRepeatableError, match=part):
        note(lambda query: library.launch(query.data_ptr()) or [], (4, 8))
    assert library.graphs == 0


def test_kernels_that_are_no_row_are_refused(library):
    def fork(query):
        for number in range(3):
            library.launch(number)
        library.edges = [(1, 2), (1, 3)]
        return []

    with pytest.raises(NotRepeatableError, match="one row"):
        note(fork, (4, 8))
    with pytest.raises(NotRepeatableError, match="one row"):
        note(lambda query: [], (4, 8))
    with pytest.raises(NotRepeatableError, match="wait"):
        note(lambda query: library.launch(1) or library.launch(2, kind=EVENT_PORT) or [], (4, 8))


def test_launches_that_depend_on_addresses_are_refused(library):
    turn = itertools.count()

    def run(query):
        for _ in range(1 + next(turn) // 2):
            library.launch(query.data_ptr())
        return []

    with pytest.raises(NotRepeatableError, match="otherwise"):
        note(run, (4, 8))


def test_tensors_have_a_largest_size_and_rehearsals_that_capture_nothing_run_nothing(library, monkeypatch):
    run = lambda query: library.launch(query.data_ptr()) or []  # noqa: E731
    monkeypatch.setattr(captured, "MOST_BYTES", 63)
    with pytest.raises(NotRepeatableError, match="too large"):
        note(run, (4, 8))
    monkeypatch.setattr(captured, "MOST_BYTES", 64)
    assert note(run, (4, 8))
    with rehearsing() as rehearsed, pytest.raises(NotRepeatableError, match="now"):
        captured.note_operator(rehearsed, lambda x: pytest.fail("it ran"), rehearsed.stand_in(torch.empty(4)))


def test_a_part_of_what_an_operator_allocates_is_no_result(library):
    with pytest.raises(NotRepeatableError, match="part"):
        note(lambda query: library.launch(query.data_ptr()) or [library.allocate(2, 9)[:, :8]], (4, 8))


def test_fills_that_cannot_be_repeated_are_refused(library):
    def late(query):
        library.launch(query.data_ptr())
        library.fill(query.data_ptr(), 0, 4, 8, kind=driver.PROGRAMMATIC_EDGE)
        return []

    with pytest.raises(NotRepeatableError, match="fills"):
        note(late, (4, 8))
    library.rows = 2
    with pytest.raises(NotRepeatableError, match="fills"):
        note(lambda query: library.fill(query.data_ptr(), 0, 4, 8) or [], (4, 8))
    library.rows = 1
    with pytest.raises(NotRepeatableError, match="other memory"):
        note(lambda query: library.fill(64, 0, 4, 8) or [], (4, 8))
    turn = itertools.count()
    with pytest.raises(NotRepeatableError, match="otherwise"):
        note(lambda query: library.fill(query.data_ptr(), next(turn), 4, 8) or [], (4, 8))


def test_an_operator_that_fails_leaves_no_graph(library):
    def run(query):
        raise RuntimeError("it takes other arguments")

    with pytest.raises(RuntimeError, match="other arguments"):
        note(run, (4, 8))
    assert library.graphs == 0


def test_the_driver_is_given_each_launchs_attributes():
    plain = rehearsal.PackedLaunch(1, (3, 1, 1), 128, 0, False, bytes(8), (0,), ())
    both = replace(plain, dependent=True, cluster=(2, 1, 1))
    space, starts = tape._pack([plain, both, replace(both, dependent=False)])
    found, size = [], struct.calcsize(driver.ATTRIBUTE)
    for config, *_ in starts:
        *_, address, count = struct.unpack_from(driver.CONFIG, space, config)
        places = range(address, address + count * size, size)
        found.append([struct.unpack(driver.ATTRIBUTE, ctypes.string_at(place, size)) for place in places])
    overlap, cluster = (driver.PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0), (driver.CLUSTER_DIMENSION, 2, 1, 1)
    assert found == [[], [overlap, cluster], [cluster]]


def test_a_tape_fills_memory_wherever_it_lies(library, monkeypatch):
    with rehearsing() as rehearsed:
        query = rehearsed.stand_in(torch.empty(4, 8))
        output = query.new_empty(4, 8)
        rehearsed.filled(rehearsal.Fill(output.data_ptr() + 16, 7, 4, 5))
        made = tape.Tape(rehearsed, [query], [output], fake_gpu.DEVICE)
    empty = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *form, dtype, device: empty(*form, dtype=dtype))
    (result,) = made.run(4096)
    assert library.launched == [(result.data_ptr() + 16, 7, 5, fake_gpu.STREAM)]
