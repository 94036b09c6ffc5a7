"""Times of calls: on the GPU in turns or as replayed CUDA graphs, on the host, and of each kernel by the profiler."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

Timeable = Callable[[], object]
Item = TypeVar("Item")
CallSteps = tuple[Sequence[Timeable], int]
"""(consecutive steps of a call, number of calls)."""

SECONDS = 1.0
"""Time for which a call runs in all its turns with other calls."""
MIN_CALLS = 5
"""Smallest number of a call's runs in this time."""
MAX_CALLS = 100
"""Largest number of a call's runs in this time."""
TURNS = 4
"""Number of a call's turns; the second half of each turn is timed."""

WINDOW_MS = 20.0
"""Time of one replay of a call's graph."""
REPLAYS = 6
"""Number of timed replays, after one replay to warm up."""
MAX_CAPTURED = 32
"""Largest number of calls in a graph."""
REPLAY_CYCLES = 300_000
"""Cycles, about 0.15 ms, for which the GPU is kept busy while the host launches a replay."""
CALL_CYCLES = 1_000_000
"""Cycles, about 0.5 ms, for which the GPU is kept busy while the host launches a call."""
SETTLING_CALLS = 2
"""Number of calls before a capture: by then, sage-hf replays the call and its backward pass."""
HOST_MS = 8.0
"""Time of each call in all its turns in which host times are taken."""
HOST_TURNS = 11, 31
"""Smallest and largest number of these turns."""

LOOPED_CALLS = 50
"""Number of calls in a loop."""
ROUNDS = 21
"""Number of a call's loops."""
PROFILED_CALLS = 10
"""Number of calls that the profiler sees."""


def synchronize(device: torch.device) -> float:
    """Wait until the device has nothing to do; return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def drawn_orders(items: Sequence[Item], turns: int) -> Iterator[list[Item]]:
    """Yield the items for each of `turns` turns, each time in a new random order.

    A call's predecessor decides the contents of caches, and the GPU's clock, which follows its power. In a fixed order,
    each call would always have the same predecessor.
    """
    draw = random.Random(0)
    for _ in range(turns):
        yield draw.sample(items, len(items))


def first_calls(call: Timeable) -> tuple[float, int, int]:
    """Call twice, to compile and to estimate time and memory.

    Returns:
        (seconds by which the first call took longer than the second, most bytes allocated during the second, number of
        calls for `median_steps_ms`).
    """
    first = _seconds(call)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    second = _seconds(call)
    peak = torch.cuda.max_memory_allocated() - before
    return max(0.0, first - second), peak, max(MIN_CALLS, min(MAX_CALLS, int(SECONDS / second)))


def _seconds(call: Timeable) -> float:
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def median_ms(calls: Mapping[Any, tuple[Timeable, int]]) -> dict[Any, float]:
    """Return the median time of each call in ms; `calls` is key -> (call, number of calls); see `median_steps_ms`."""
    steps: dict[Any, CallSteps] = {key: ((call,), count) for key, (call, count) in calls.items()}
    return {key: whole for key, (whole, _) in median_steps_ms(steps).items()}


def median_steps_ms(calls: Mapping[Any, CallSteps]) -> dict[Any, list[float]]:
    """Return the median times in ms of calls that consist of steps: first of the whole call, then of each step.

    Each call runs several times in a row, at the clocks and temperature that it causes itself, as in a model that
    repeats it. The first half of these runs is not timed, because the previous call decides their clocks. Calls take
    such turns in random orders, so that drift affects all of them.
    """
    events: dict[Any, list[list[torch.cuda.Event]]] = {key: [] for key in calls}
    for turn, order in enumerate(drawn_orders(list(calls), TURNS)):
        for key in order:
            steps, count = calls[key]
            begin, end = count * turn // TURNS, count * (turn + 1) // TURNS
            for index in range(begin, end):
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
                marks[0].record()
                for step, mark in zip(steps, marks[1:], strict=True):
                    step()
                    mark.record()
                if index >= (begin + end) // 2:
                    events[key].append(marks)
    torch.cuda.synchronize()

    def median(turns: list[list[torch.cuda.Event]], first: int, last: int) -> float:
        return statistics.median(marks[first].elapsed_time(marks[last]) for marks in turns)

    return {
        key: [median(events[key], 0, -1), *(median(events[key], step, step + 1) for step in range(len(steps)))]
        for key, (steps, _) in calls.items()
    }


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes read and written per second by a copy of 1 GiB."""
    source = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / (median_ms({"copy": (lambda: target.copy_(source), 20)})["copy"] * 1e-3)


@dataclass
class TimedCall:
    """A call that a `TimingStream` times.

    Attributes:
        call: the call.
        context: the call runs inside it, and its cost does not count.
        once_ms: the GPU's time of one call.
        replay: runs the captured calls; their number is `calls`.
        marks: start and end of each replay.
        host_times: host times in microseconds.
    """

    call: Timeable
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    once_ms: float = 1.0
    replay: Timeable = lambda: None
    calls: int = 1
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    host_times: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """Return the median of the GPU's times for a call."""
        return statistics.median(start.elapsed_time(end) for start, end in self.marks) / self.calls

    @property
    def host_us(self) -> float:
        """Return the median of the host times."""
        return statistics.median(self.host_times)


class TimingStream:
    """A stream of the GPU on which all calls run, and the memory that all its graphs share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def entered(self) -> Iterator[TimingStream]:
        """Make the stream the current one while the block runs."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            # The pool lives as long as one of its graphs.
            x = torch.ones(1, device=self.device)
            keeper = self._capture(lambda: x + x, 1)
            yield self
            self._stream.synchronize()
            keeper.reset()

    def synchronize(self) -> None:
        """Wait for the GPU; raise RuntimeError if it failed."""
        self._stream.synchronize()

    def once_ms(self, call: Timeable) -> float:
        """Return the GPU's time of one call, plus the host's time beyond the time that the GPU is kept busy."""
        torch.cuda._sleep(CALL_CYCLES)
        start, end = self._mark(), torch.cuda.Event(enable_timing=True)
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def gpu_us(self, call: Timeable, ms: float, replays: int) -> float:
        """Return the GPU's time for a call in microseconds: the median of replays that take about `ms` each.

        Before the replays the GPU is kept busy; otherwise short calls would wait for the host's launches.
        """
        for _ in range(SETTLING_CALLS):
            call()
        count = max(1, min(MAX_CAPTURED, int(ms / self.once_ms(call))))
        graph = self._capture(call, count)
        graph.replay()
        torch.cuda._sleep(REPLAY_CYCLES)
        marks = [self._mark()]
        for _ in range(replays):
            graph.replay()
            marks.append(self._mark())
        self._stream.synchronize()
        times = (start.elapsed_time(end) for start, end in itertools.pairwise(marks))
        return statistics.median(times) / count * 1e3

    def prepare(self, call: Timeable, context: Callable[[], AbstractContextManager[object]] = nullcontext) -> TimedCall:
        """Repeat the call until it has done its one-time work, and capture as many calls as fit into a replay."""
        for _ in range(SETTLING_CALLS):
            call()
        once_ms = self.once_ms(call)
        calls = max(1, min(MAX_CAPTURED, int(WINDOW_MS / (REPLAYS + 1) / max(1e-3, once_ms))))
        return TimedCall(call, context, once_ms, self._capture(call, calls).replay, calls)

    def take_host_times(self, timed: Sequence[TimedCall]) -> None:
        """Take the host times of all calls in turns, in random orders: from an idle GPU until the call returns.

        A host time is the time of one call after other calls, not of a call in a loop: other calls have displaced its
        code and data from the host's caches, as between the layers of a model. All providers take longer in this way.
        """
        fewest, most = HOST_TURNS
        longest = max((call.once_ms for call in timed), default=HOST_MS)
        for order in drawn_orders(timed, max(fewest, min(most, int(HOST_MS / longest)))):
            for call in order:
                with call.context():
                    self._stream.synchronize()
                    started = time.perf_counter()
                    call.call()
                    call.host_times.append(1e6 * (time.perf_counter() - started))
        self._stream.synchronize()

    def replay(self, timed: Sequence[TimedCall]) -> None:
        """Replay all graphs in turns, in random orders, and wait until the last has ended.

        Before each timed replay the GPU is kept busy; otherwise the calls of a short replay would wait for the host's
        launch.
        """
        for turn, order in enumerate(drawn_orders(timed, REPLAYS + 1)):
            for call in order:
                if turn:
                    torch.cuda._sleep(REPLAY_CYCLES)
                start = self._mark()
                call.replay()
                if turn:
                    call.marks.append((start, self._mark()))
        self._stream.synchronize()

    def _capture(self, call: Timeable, calls: int) -> torch.cuda.CUDAGraph:
        """Return a graph of some calls. Unlike torch.cuda.graph, it does not free memory first, which takes long."""
        graph = torch.cuda.CUDAGraph()
        self._stream.synchronize()
        graph.capture_begin(self._pool)
        try:
            for _ in range(calls):
                call()
        finally:
            graph.capture_end()
        return graph

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def looped_us(calls: Mapping[str, tuple[Timeable, int]], device: torch.device) -> dict[str, float]:
    """Return the host time of each call in µs: the median over rounds of calls in a loop, with an idle GPU.

    Args:
        calls: key -> (function, the number of calls that it makes). Rounds go through the calls in random orders.
        device: device of the calls.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for order in drawn_orders(list(calls), ROUNDS):
        for name in order:
            run, num_calls = calls[name]
            count = max(1, LOOPED_CALLS // num_calls)
            start = synchronize(device)
            for _ in range(count):
                run()
            times[name].append((time.perf_counter() - start) / (count * num_calls))
    return {name: 1e6 * statistics.median(rounds) for name, rounds in times.items()}


class KernelRun(NamedTuple):
    """One run of a kernel: its name, and its start and end in µs."""

    kernel: str
    start: float
    end: float


def profiled(call: Timeable) -> list[list[KernelRun]]:
    """Return the kernels of some calls by PyTorch's profiler; each call's kernels are in the order of their ends.

    Raises:
        RuntimeError: the profiler saw no kernels, or not the same number in each call.
    """
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            call()
        torch.cuda.synchronize()
    spans = [
        KernelRun(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not spans or len(spans) % PROFILED_CALLS:
        raise RuntimeError(f"the profiler saw {len(spans)} kernels in {PROFILED_CALLS} calls")
    spans.sort(key=lambda span: span.end)
    spans_per_call = len(spans) // PROFILED_CALLS
    return [spans[start : start + spans_per_call] for start in range(0, len(spans), spans_per_call)]
