"""Timing of sage-hf and of the fastest other attention at every call of the grid, on one GPU.

Two times are taken separately. GPU time: a CUDA graph of several calls is replayed with a full queue, with every pass
that a call needs. Host time: the wall time until a call returns when nothing is queued.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_hf import record
from sage_hf.bench.cases import BenchCase, CaseInputs, draw
from sage_hf.bench.grid import CASES
from sage_hf.bench.prewarm import PROCESSES, call_in_processes
from sage_hf.bench.providers import GRID_PROVIDERS, GRID_TRAINING_PROVIDERS, Provider
from sage_hf.bench.results import BenchmarkResult, Row, facts, reason
from sage_hf.bench.timing import TimedCall, TimingStream

# Another provider is left out if its second call took this many times as long as the fastest, and over LONG_MS.
HOPELESS = 2.0
LONG_MS = 1.0

WRITE_SECONDS = 2.0
SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "mask", "direction")
"""Attributes of a call in a row, after its kind."""
RAN = ("recipe", "kernel", "quantizer", "backward", "reason")


def sizes(case: BenchCase) -> Row:
    """Return the sizes, mask and direction that identify a call in a row of the result."""
    return {"kind": case.name} | {name: getattr(case, name) for name in SIZES}


def run(
    device: torch.device,
    cases: Sequence[BenchCase] = CASES,
    progress: Callable[[str], None] = print,
    write: Callable[[BenchmarkResult], None] = lambda result: None,
) -> BenchmarkResult:
    """Measure calls, forward or forward and backward.

    Args:
        device: a CUDA device.
        cases: calls of the grid to measure; their kernels are compiled in several processes first.
        progress: called with a text for each call after it is measured.
        write: called with the result so far every WRITE_SECONDS.

    Returns:
        Plain data: facts about the machine, and "rows". A row has the call (`sizes`) and
        - "ours_ms", "best_ms", "pytorch_ms": GPU time of a call by sage-hf, by the fastest other provider, and by
          PyTorch's fastest backend; "best" and "pytorch" name them, and "others_ms" has the times of all;
        - "ours_host_us", "best_host_us", "pytorch_host_us": host time of a call by the same three;
        - "recipe", "kernel", "quantizer", "backward", "reason": our plan, and why the requested recipe did not run;
        - "rel_l1": relative L1 distance of our output from the best provider's; it shows that both computed the same
        function; or "unavailable": the reason why sage-hf, or every other provider, could not be timed.

    Raises:
        RuntimeError: a kernel failed in a way that leaves the process without a GPU; the row of its call is written.
    """
    result: BenchmarkResult = {**facts(device), "rows": []}
    started = time.perf_counter()
    warm(cases)
    progress(f"compiled in {time.perf_counter() - started:.0f} s")
    written = time.perf_counter()
    with torch.cuda.device(device), TimingStream(device).entered() as stream:
        for case in cases:
            started = time.perf_counter()
            try:
                row = measure_case(case, stream)
                stream.synchronize()
            except RuntimeError as error:  # No later call would run in this process.
                result["rows"].append(sizes(case) | {"unavailable": reason(error)})
                write(result)
                message = f"the GPU failed at {case.name}, {case}; --resume times the missing calls"
                raise RuntimeError(message) from error
            result["rows"].append(row)
            progress(f"{case.name}, {case}: {summary(row)} ({time.perf_counter() - started:.2f} s)")
            if time.perf_counter() - written > WRITE_SECONDS:
                write(result)
                written = time.perf_counter()
    write(result)
    return result


def summary(row: Row) -> str:
    """Return a row's times for a reader."""
    if "unavailable" in row:
        return f"failed: {row['unavailable']}"
    return (
        f"{row['best_ms'] / row['ours_ms']:.2f} × {row['best']} in {row['ours_ms']:.4f} ms by {row['kernel']}, "
        f"host {row['ours_host_us']:.0f} µs for {row['best_host_us']:.0f}"
    )


def warm(cases: Sequence[BenchCase]) -> None:
    """Run sage-hf once at every call, in several processes, so that the caches on disk hold the compiled kernels."""
    # Neighbouring calls need the same kernels; calls far from each other need different kernels, compiled in parallel.
    stride = max(1, len(cases) // PROCESSES)
    call_in_processes(_call_once, [case for start in range(stride) for case in cases[start::stride]])


def _call_once(case: BenchCase) -> None:
    (provider,) = (item for item in providers_of(case) if item.ours)
    with torch.set_grad_enabled(case.training):
        grid_call(provider, draw(case, torch.device("cuda")))()
        torch.cuda.synchronize()


def providers_of(case: BenchCase) -> tuple[Provider, ...]:
    """Return the providers to try at a call."""
    return tuple(
        provider for provider in (GRID_TRAINING_PROVIDERS if case.training else GRID_PROVIDERS) if provider.suits(case)
    )


def grid_call(provider: Provider, inputs: CaseInputs) -> Callable[[], Tensor]:
    """Return a provider's call, which returns the output; for training, its forward and backward pass."""
    attend = provider.prepare(inputs).call

    def call() -> Tensor:
        output = attend()
        if inputs.gradient is not None:
            torch.autograd.grad(output, inputs.tensors, inputs.gradient)
        return output.detach()

    return call


@dataclass
class GridCandidate:
    """A provider at a call: its output and its times."""

    provider: Provider
    output: Tensor
    timed: TimedCall


def measure_case(case: BenchCase, stream: TimingStream) -> Row:
    """Return the row of one call.

    Providers are prepared one after the other; a hopelessly slow other provider is left out. Then the host times of all
    are taken in turns, and all graphs are replayed in turns.
    """
    row, failures = sizes(case), {}
    candidates: list[GridCandidate] = []
    fastest_ms = float("inf")
    with torch.set_grad_enabled(case.training):
        try:
            inputs = draw(case, stream.device)
        except torch.OutOfMemoryError as error:
            return row | {"unavailable": reason(error)}
        for provider in providers_of(case):
            announced: list[Row] = []
            try:
                with warnings.catch_warnings(), provider.context():
                    warnings.simplefilter("ignore")  # PyTorch says why a backend refuses.
                    call = grid_call(provider, inputs)
                    output = call()
                    once_ms = stream.once_ms(call)
                    if not provider.ours:
                        if once_ms > max(LONG_MS, HOPELESS * fastest_ms):
                            continue
                        fastest_ms = min(fastest_ms, once_ms)
                    timed = stream.prepare(call, provider.context)
                    if provider.ours:
                        with watch(announced):
                            call()  # later steps of decoding may run another kernel than the first step
                        row |= announced[0]
                    candidates.append(GridCandidate(provider, output, timed))
            except Exception as error:  # A provider may raise any error.
                failures[provider.name] = reason(error)
        stream.take_host_times([candidate.timed for candidate in candidates])
        stream.replay([candidate.timed for candidate in candidates])
    return row | _compared(candidates, failures)


@contextmanager
def watch(rows: list[Row]) -> Iterator[None]:
    """Append a dictionary of RAN's names for each of our calls in the block."""

    def keep(call: record.AttentionCall) -> None:
        rows.append({name: getattr(call.plan.outcome, name) for name in RAN})

    with record.observe(keep):
        yield


def _compared(candidates: Sequence[GridCandidate], failures: dict[str, str]) -> Row:
    """Return the part of a row that compares sage-hf with other providers."""
    ours = next((candidate for candidate in candidates if candidate.provider.ours), None)
    other_providers = sorted(
        (candidate for candidate in candidates if not candidate.provider.ours), key=lambda candidate: candidate.timed.ms
    )
    if ours is None or not other_providers:
        return {"unavailable": "; ".join(f"{name}: {why}" for name, why in failures.items())}
    best = other_providers[0]
    times: Row = {"ours_ms": ours.timed.ms, "ours_host_us": ours.timed.host_us}
    for name, candidate in (
        ("best", best),
        ("pytorch", next((candidate for candidate in other_providers if candidate.provider.name != "fa3"), None)),
    ):
        if candidate is not None:
            times |= {
                name: candidate.provider.name,
                f"{name}_ms": candidate.timed.ms,
                f"{name}_host_us": candidate.timed.host_us,
            }
    distance = (ours.output - best.output).abs().sum(dtype=torch.float32) / best.output.abs().sum(dtype=torch.float32)
    others_ms = {candidate.provider.name: round(candidate.timed.ms, 6) for candidate in other_providers}
    return times | {"rel_l1": distance.item(), "others_ms": others_ms}
