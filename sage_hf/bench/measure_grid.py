"""Timing of ours and of the fastest other attention at every point of the grid, on one GPU.

Two times are taken apart: that of the GPU with a full queue, as a CUDA graph of several calls replays it, with every
pass that a call needs; and that of the host, which is the wall time until a call returns when nothing is queued.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sage_hf.bench.grid import POINTS, Arguments, Point, draw
from sage_hf.bench.grid_peers import GRID_PROVIDERS, TRAINING_GRID_PROVIDERS, GridProvider, watch
from sage_hf.bench.measure import drawn_orders, facts, reason
from sage_hf.tune.prewarm import PROCESSES, call_in_processes

# A provider is replayed for about WINDOW_MS at a point, in turns with the others: once to warm up, then TURNS times.
WINDOW_MS = 20.0
TURNS = 6
MAX_CALLS = 32
# The GPU is kept busy for so many cycles, some 0.15 and 0.5 ms, while the host launches a replay, or a call.
REPLAY_CYCLES, CALL_CYCLES = 300_000, 1_000_000
# Of the others, one whose second call took so many times as long as the fastest one's, and over LONG_MS, is left out.
HOPELESS = 2.0
LONG_MS = 1.0
# Calls of a provider between its second one and its timed ones: ours is prepared by then, its backward pass too.
SETTLING_CALLS = 2
# Host times at a point are taken in turns, for about HOST_MS of each provider; the fewest and the most turns.
HOST_MS = 8.0
HOST_TURNS = 11, 31

WRITE_SECONDS = 2.0


def run(
    device: torch.device,
    points: Sequence[Point] = POINTS,
    commit: str = "",
    progress: Callable[[str], None] = print,
    write: Callable[[dict[str, Any]], None] = lambda result: None,
    warms: bool = True,
) -> dict[str, Any]:
    """Measure points, forward or forward and backward.

    Args:
        device: a CUDA device.
        points: those of `grid.POINTS` to measure.
        commit: commit of the measured source, for the record.
        progress: called with a text for each point after it is measured.
        write: called with the result so far every WRITE_SECONDS.
        warms: compile what the points need in several processes first; otherwise first calls compile one by one.

    Returns:
        Plain data: facts about the machine, and "rows". A row has the sizes of the point (`Point.sizes`) and
        - "ours_ms", "best_ms", "pytorch_ms": GPU time of a call by ours, by the fastest other one, and by PyTorch's
          fastest backend; "best" and "pytorch" name them, and "others_ms" has the times of all;
        - "ours_host_us", "best_host_us", "pytorch_host_us": host time of a call by the same;
        - "recipe", "kernel", "quantizer", "backward", "reason": what ran for ours, and why not the recipe asked for;
        - "rel_l1": relative L1 distance of our output from the best one's; it shows that both computed the same;
        or "unavailable": the reason why ours or all others could not be timed.

    Raises:
        RuntimeError: a kernel failed in a way that leaves the process without a GPU; the row of its point is written.
    """
    result: dict[str, Any] = {**facts(device, commit), "rows": []}
    if warms:
        started = time.perf_counter()
        warm(points)
        progress(f"compiled in {time.perf_counter() - started:.0f} s")
    written = time.perf_counter()
    with torch.cuda.device(device), Queue(device).entered() as queue:
        for point in points:
            started = time.perf_counter()
            try:
                row = measure_point(point, queue)
                queue.synchronize()
            except RuntimeError as error:  # No later call of this process would run.
                result["rows"].append(point.sizes | {"unavailable": reason(error)})
                write(result)
                raise RuntimeError(f"the GPU failed at {point}; what is missing can be timed by --resume") from error
            result["rows"].append(row)
            progress(f"{point}: {told(row)} ({time.perf_counter() - started:.2f} s)")
            if time.perf_counter() - written > WRITE_SECONDS:
                write(result)
                written = time.perf_counter()
    write(result)
    return result


def told(row: dict[str, Any]) -> str:
    """Return a row's times for a reader."""
    if "unavailable" in row:
        return f"failed: {row['unavailable']}"
    return (
        f"{row['best_ms'] / row['ours_ms']:.2f} × {row['best']} in {row['ours_ms']:.4f} ms by {row['kernel']}, "
        f"host {row['ours_host_us']:.0f} µs for {row['best_host_us']:.0f}"
    )


def warm(points: Sequence[Point]) -> None:
    """Run ours once at every point, in several processes, so that the caches on disk hold what is compiled."""
    # Neighbours need the same kernels: far from each other they are compiled at the same time.
    stride = max(1, len(points) // PROCESSES)
    call_in_processes(_call_once, [point for start in range(stride) for point in points[start::stride]])


def _call_once(point: Point) -> None:
    (provider,) = (one for one in _providers(point) if one.ours)
    with torch.set_grad_enabled(point.training):
        Call(provider, draw(point, torch.device("cuda")))()
        torch.cuda.synchronize()


class Call:
    """One provider's call at a point; for training, its forward and backward pass."""

    def __init__(self, provider: GridProvider, arguments: Arguments) -> None:
        self._attend = provider.attend(arguments)
        self._inputs = (arguments.query, arguments.key, arguments.value)
        self._gradient = arguments.gradient

    def __call__(self) -> Tensor:
        """Return the output."""
        output = self._attend()
        if self._gradient is not None:
            torch.autograd.grad(output, self._inputs, self._gradient)
        return output.detach()


@dataclass
class Timed:
    """One provider at one point.

    Attributes:
        provider: who.
        output: of its first call.
        call: makes one call.
        once_ms: the GPU's time of a call (`Queue.once_ms`).
        replay: replays a graph of `calls` calls; it returns at once.
        marks: events around each timed replay.
        host_times: of single calls, in microseconds.
    """

    provider: GridProvider
    output: Tensor
    call: Callable[[], object]
    once_ms: float
    replay: Callable[[], None]
    calls: int
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    host_times: list[float] = field(default_factory=list)

    @property
    def host_us(self) -> float:
        """Return the median host time of a call."""
        return statistics.median(self.host_times)

    @property
    def ms(self) -> float:
        """Return the median time of a call, once the replays have ended."""
        return statistics.median(start.elapsed_time(end) for start, end in self.marks) / self.calls


def measure_point(point: Point, queue: Queue) -> dict[str, Any]:
    """Return the row of a point."""
    row: dict[str, Any] = point.sizes
    failures: dict[str, str] = {}
    timed: list[Timed] = []
    fastest_ms = float("inf")
    with torch.set_grad_enabled(point.training):
        try:
            arguments = draw(point, queue.device)
        except torch.OutOfMemoryError as error:
            return row | {"unavailable": reason(error)}
        for provider in _providers(point):
            if not provider.suits(point):
                continue
            ran: list[dict[str, str]] = []
            try:
                with warnings.catch_warnings(), provider.context():
                    warnings.simplefilter("ignore")  # PyTorch says why a backend refuses.
                    call = Call(provider, arguments)
                    output = call()
                    once_ms = queue.once_ms(call)
                    if not provider.ours:
                        if once_ms > max(LONG_MS, HOPELESS * fastest_ms):
                            continue
                        fastest_ms = min(fastest_ms, once_ms)
                    prepared = queue.prepare(provider, call, output)
                    if provider.ours:
                        with watch(ran):
                            call()  # steps of decoding may run another kernel than the first one
                        row |= ran[0]
                    timed.append(prepared)
            except Exception as error:  # A provider may fail in any way.
                failures[provider.name] = reason(error)
        queue.take_host_times(timed)
        queue.replay(timed)
    return row | _compared(timed, failures)


def _compared(timed: Sequence[Timed], failures: dict[str, str]) -> dict[str, Any]:
    """Return the part of a row that compares ours with others."""
    ours = next((one for one in timed if one.provider.ours), None)
    others = sorted((one for one in timed if not one.provider.ours), key=lambda one: one.ms)
    if ours is None or not others:
        return {"unavailable": "; ".join(f"{name}: {why}" for name, why in failures.items())}
    best = others[0]
    found: dict[str, Any] = {"ours_ms": ours.ms, "ours_host_us": ours.host_us}
    for name, one in (("best", best), ("pytorch", next((one for one in others if one.provider.name != "fa3"), None))):
        if one is not None:
            found |= {name: one.provider.name, f"{name}_ms": one.ms, f"{name}_host_us": one.host_us}
    distance = (ours.output - best.output).abs().sum(dtype=torch.float32) / best.output.abs().sum(dtype=torch.float32)
    others_ms = {one.provider.name: round(one.ms, 6) for one in others}
    return found | {"rel_l1": distance.item(), "others_ms": others_ms}


class Queue:
    """A stream of the GPU on which everything runs, and the memory that all its graphs share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def entered(self) -> Iterator[Queue]:
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

    def once_ms(self, call: Callable[[], object]) -> float:
        """Return the GPU's time of one call, and what the host needs beyond the time that the GPU is kept busy."""
        torch.cuda._sleep(CALL_CYCLES)
        start, end = self._mark(), self._event()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def gpu_us(self, call: Callable[[], object], ms: float, replays: int) -> float:
        """Return the GPU's time for a call in microseconds, the median of some replays of about so long each."""
        call()
        count = max(1, min(MAX_CALLS, int(ms / self.once_ms(call))))
        graph = self._capture(call, count)
        graph.replay()
        marks = [self._mark()]
        for _ in range(replays):
            graph.replay()
            marks.append(self._mark())
        self._stream.synchronize()
        times = (start.elapsed_time(end) for start, end in itertools.pairwise(marks))
        return statistics.median(times) / count * 1e3

    def prepare(self, provider: GridProvider, call: Callable[[], Tensor], output: Tensor) -> Timed:
        """Call until a call does no more than all later ones, and capture as many calls as fit into a replay."""
        for _ in range(SETTLING_CALLS):
            call()
        once_ms = self.once_ms(call)
        calls = max(1, min(MAX_CALLS, int(WINDOW_MS / (TURNS + 1) / max(1e-3, once_ms))))
        return Timed(provider, output, call, once_ms, self._capture(call, calls).replay, calls)

    def take_host_times(self, timed: Sequence[Timed]) -> None:
        """Take the host times of all in turns, in drawn orders; see `_host_us`."""
        fewest, most = HOST_TURNS
        longest = max((one.once_ms for one in timed), default=HOST_MS)
        for order in drawn_orders(timed, max(fewest, min(most, int(HOST_MS / longest)))):
            for one in order:
                with one.provider.context():
                    one.host_times.append(self._host_us(one.call))
        self._stream.synchronize()

    def replay(self, timed: Sequence[Timed]) -> None:
        """Replay all graphs in turns, in drawn orders, and wait until the last has ended.

        Before each timed replay the GPU is kept busy: else the calls of a short one would wait for the host's launch.
        """
        for turn, order in enumerate(drawn_orders(timed, TURNS + 1)):
            for one in order:
                if turn:
                    torch.cuda._sleep(REPLAY_CYCLES)
                start = self._mark()
                one.replay()
                if turn:
                    one.marks.append((start, self._mark()))
        self._stream.synchronize()

    def _host_us(self, call: Callable[[], object]) -> float:
        """Return the time until a call returns when nothing is queued.

        It is that of one call behind others, not of a call in a loop: what other calls brought into the host's caches
        has taken the place of its code and data, as between the layers of a model. All providers take longer so.
        """
        self._stream.synchronize()
        started = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - started)

    def _capture(self, call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
        """Return a graph of some calls. Unlike torch.cuda.graph it frees no memory before, which takes long."""
        graph = torch.cuda.CUDAGraph()
        self._stream.synchronize()
        graph.capture_begin(self._pool)
        try:
            for _ in range(calls):
                call()
        finally:
            graph.capture_end()
        return graph

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _mark(self) -> torch.cuda.Event:
        event = self._event()
        event.record()
        return event


def _providers(point: Point) -> tuple[GridProvider, ...]:
    return TRAINING_GRID_PROVIDERS if point.training else GRID_PROVIDERS
