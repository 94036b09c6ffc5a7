"""Plans of launches, run by a driver that computes on the CPU: each call gets its own addresses, stream and memory."""

import contextlib
import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest
import torch

from sage_kernels.replay import driver, launch_plan
from sage_kernels.replay.launch_plan import LaunchPlan, launch_now
from sage_kernels.replay.trace import NotRepeatableError, PackedLaunch, tracing
from sage_kernels.runtime import torch_private

SIZE = 64
CPU = torch.device("cpu")


def add(x, y, output):
    """output = x + y, of SIZE numbers in float32 at three addresses."""
    arrays = [(ctypes.c_float * SIZE).from_address(address) for address in (x, y, output)]
    for place in range(SIZE):
        arrays[2][place] = arrays[0][place] + arrays[1][place]


@pytest.fixture
def launched(monkeypatch):
    """The grids and streams of the launches that the driver was given."""
    seen = []

    def launch(config, function, parameters, extra):
        given = driver.LaunchConfig.from_address(config.value)
        seen.append(((given.grid_x, given.grid_y, given.grid_z), given.stream))
        pointers = (ctypes.c_uint64 * 3).from_address(parameters.value)
        add(*(ctypes.c_uint64.from_address(pointer).value for pointer in pointers))
        return 0

    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(torch_private, "current_device", lambda: 0)
    monkeypatch.setattr(torch_private, "current_stream", lambda index: 7)
    return seen


def packed(*tensors, grid=(1, 1, 1)):
    words = struct.pack("<3Q", *(x.data_ptr() for x in tensors))
    return PackedLaunch(1, grid, 128, 0, False, words, (0, 8, 16), (0, 8, 16))


def plan_of_sums():
    """(x, y) -> x + 2 y and x + y, by way of a buffer."""
    with tracing() as trace:
        x, y = (trace.stand_in(torch.empty(SIZE)) for _ in range(2))
        twice, first, second = (x.new_empty(SIZE) for _ in range(3))
        for tensors in ((y, y, twice), (x, twice, first), (x, y, second)):
            trace.launched(packed(*tensors, grid=(3, 2, 1)))
        return LaunchPlan(trace, [x, y], [first, second], CPU)


def test_each_call_gets_its_tensors_its_outputs_and_its_stream(launched, monkeypatch):
    plan, outputs = plan_of_sums(), []
    for stream in (7, 11, 7):
        monkeypatch.setattr(torch_private, "current_stream", lambda index, stream=stream: stream)
        launched.clear()
        x, y = torch.randn(2, SIZE)
        first, second = plan.run(x, y)
        assert torch.equal(first, x + 2 * y) and torch.equal(second, x + y)
        assert launched == [((3, 2, 1), stream)] * 3
        outputs += first, second
    assert len({x.data_ptr() for x in outputs}) == 6 and plan.launches == 3


def test_threads_run_a_plan_at_the_same_time(launched):
    plan, wrong = plan_of_sums(), []

    def work():
        for _ in range(50):
            x, y = torch.randn(2, SIZE)
            first, _ = plan.run(x, y)
            if not torch.equal(first, x + 2 * y):
                wrong.append(first)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_launch_by_itself_gets_its_tensors_and_the_current_stream(launched):
    x, y = torch.randn(2, SIZE)
    output = torch.empty(SIZE)
    launch_now(packed(x, y, output), 0)
    assert torch.equal(output, x + y) and launched == [((1, 1, 1), 7)]


def test_an_operator_among_launches_gets_the_tensors_of_each_call(launched):
    def attend(x, y, lengths):
        lengths.fill_(3)
        y.copy_(x * lengths[4])

    with tracing() as trace:
        x = trace.stand_in(torch.empty(2, 8, 4).transpose(0, 1))
        y, lengths = x.new_empty(8, 2, 4), x.new_empty(5, dtype=torch.int32)
        trace.ran(attend, x, y, lengths)
        plan = LaunchPlan(trace, [x], [y], CPU)
    for _ in range(2):
        given = torch.randn(2, 8, 4).transpose(0, 1)
        assert torch.equal(plan.run(given)[0], 3 * given)


@pytest.mark.parametrize("argument", [lambda x: x[1:], lambda x: x.transpose(0, 1), lambda x: torch.empty(2)])
def test_an_operator_gets_no_part_of_an_argument_and_no_other_tensor(argument):
    with tracing() as trace, pytest.raises(NotRepeatableError):
        x = trace.stand_in(torch.empty(8, 4))
        trace.ran(lambda x: None, argument(x))
        LaunchPlan(trace, [x], [], CPU)


def test_an_output_that_is_an_argument_cannot_be_replayed():
    with tracing() as trace, pytest.raises(NotRepeatableError, match="shares"):
        x = trace.stand_in(torch.empty(4))
        LaunchPlan(trace, [x], [x], CPU)


@pytest.fixture
def streams(monkeypatch):
    """Graphs that capture streams, by the stream; streams that are made have numbers from 101 on."""
    graphs, made = {}, []

    def info(stream, status, number, *others):
        ctypes.c_int.from_address(status).value = stream in graphs
        ctypes.c_uint64.from_address(number).value = graphs.get(stream, 0)
        return 0

    def create(name, *arguments):
        made.append(101 + len(made))
        return made[-1]

    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuStreamGetCaptureInfo_v2=info))
    monkeypatch.setattr(driver, "_handle", lambda name, *_: create(name) if name == "cuStreamCreate" else 5)
    monkeypatch.setattr(driver, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(driver, "_side_streams", {})
    return graphs


def lent(graphs, stream):
    with driver.side_stream(0, stream) as side:
        graphs.update({side.handle: graphs[stream]} if stream in graphs else {})
        return side.handle


def test_streams_of_any_number_share_those_for_work_beside_them(streams):
    assert [lent(streams, stream) for stream in range(1, 40)] == [101] * 39
    with driver.side_stream(0, 1) as one, driver.side_stream(0, 2) as other:
        assert one is not other


def test_a_stream_that_a_graph_captures_is_lent_to_that_graphs_stream_alone(streams):
    streams.update({1: 7, 2: 8})
    assert [lent(streams, stream) for stream in (1, 1, 2, 3, 2, 3)] == [101, 101, 102, 103, 102, 103]
    streams.clear()  # captures have ended
    assert lent(streams, 3) == 101


def test_buffers_needed_at_once_do_not_overlap_and_others_may():
    sizes = [(1000, 0, 2), (300, 0, 3), (5000, 2, None), (700, 2, 3), (1, 3, None), (64, 1, 2)]
    buffers = [launch_plan.Memory(number, size, first, last) for number, (size, first, last) in enumerate(sizes)]
    places, total = launch_plan.place_buffers(buffers, 4)
    spans = {number: (places[number], places[number] + sizes[number][0]) for number in places}
    for one in buffers:
        assert spans[one.number][0] % launch_plan.ALIGNMENT == 0 and spans[one.number][1] <= total
        for other in buffers:
            together = one.first < (other.last or 5) and other.first < (one.last or 5)
            (start, end), (begin, stop) = spans[one.number], spans[other.number]
            assert one is other or not together or end <= begin or stop <= start
    assert total < sum(-(-size // launch_plan.ALIGNMENT) * launch_plan.ALIGNMENT for size, _, _ in sizes)
