"""Time of each phase of our calls on one GPU: statistics, quantising, attention; and how close copying comes to them.

The profiler's trace gives each kernel's start and end. A kernel may start while the one before it ends and wait for it,
so a phase counts from the end of the one before.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from sage_hf.bench.measure import copy_bandwidth, draw, facts, reason
from sage_hf.bench.peers import quantizers
from sage_hf.bench.shapes import SHAPES, Shape
from sage_hf.tune.prewarm import call_in_processes
from sage_kernels import ops

RECIPES = ("sage1", "sage2")
CALLS = 10
WHOLE = "whole"
"""The phase of all kernels together."""
PHASES = {"forward": "attention", "quantize": "quantize", "heavy": "quantize"}
"""Parts of kernels' names -> phases; what has none of them counts as statistics."""


class Span(NamedTuple):
    """One run of a kernel: its name, and its start and end in µs."""

    kernel: str
    start: float
    end: float


def run(
    device: torch.device,
    shapes: Sequence[Shape] = SHAPES,
    commit: str = "",
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure the phases of whole calls and of the quantisers alone.

    Args:
        device: a CUDA device.
        shapes: what to measure.
        commit: commit of the measured source, for the record.
        progress: called with a text for each shape before it is measured.

    Returns:
        Plain data: facts about the machine, "copy_bandwidth" (bytes read and written per second by a copy) and "rows".
        A row has "shape" and its sizes, "what" (a recipe's whole call, or one of `peers.quantizers`), "phase"
        ("statistics", "quantize", "attention" or "whole"), "kernels" and "ms" (median of the calls); of a quantiser
        also "bytes", which it reads and writes, and "copy_share", how much of the copy's bandwidth that is;
        or, if it cannot run, "unavailable": the reason.
    """
    kinds = {(shape.head_dim, shape.causal): shape for shape in shapes}
    call_in_processes(_call_once, itertools.product(kinds.values(), RECIPES, (False, True)))
    with torch.cuda.device(device), torch.no_grad():
        result: dict[str, Any] = {**facts(device, commit), "copy_bandwidth": copy_bandwidth(device), "rows": []}
        for shape in shapes:
            progress(f"{shape.name}: {shape}")
            result["rows"] += measure_shape(shape, device, result["copy_bandwidth"])
        return result


def measure_shape(shape: Shape, device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    sizes = {
        "shape": shape.name,
        "batch": shape.batch,
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "q_len": shape.tokens,
        "kv_len": shape.tokens,
        "head_dim": shape.head_dim,
        "causal": shape.causal,
    }
    try:
        query, key, value = draw(shape, "biased", device)
        known = quantizers(query, key, value, RECIPES, only_preferred=True)
    except Exception as error:  # It may fail in any way: the row says how.
        return [sizes | {"what": "all", "unavailable": reason(error)}]
    calls: dict[str, tuple[Callable[[], object], int]] = {
        recipe: (_whole(query, key, value, shape.causal, recipe), 0) for recipe in RECIPES
    }
    calls |= known
    rows: list[dict[str, Any]] = []
    read = key.nbytes + value.nbytes  # by the statistics
    for what, (call, moved) in calls.items():
        try:
            found = phases(trace(call))
        except Exception as error:  # A profiler may be refused; a kernel may fail.
            rows.append(sizes | {"what": what, "unavailable": reason(error)})
            continue
        by_phase = {"statistics": read, "quantize": moved - read, WHOLE: moved} if moved else {}
        for phase, (ms, kernels) in found.items():
            row = sizes | {"what": what, "phase": phase, "kernels": kernels, "ms": ms}
            if phase in by_phase:
                row |= {"bytes": by_phase[phase], "copy_share": by_phase[phase] / (ms * 1e-3) / bandwidth}
            rows.append(row)
    return rows


@torch.no_grad()
def _call_once(what: tuple[Shape, str, bool]) -> None:
    """Call a recipe, or its quantisers alone."""
    shape, recipe, quantizes = what
    inputs = draw(shape, "normal", torch.device("cuda"))
    if quantizes:
        quantizers(*inputs, [recipe], only_preferred=True)
    else:
        _whole(*inputs, shape.causal, recipe)()
    torch.cuda.synchronize()


def _whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, recipe: str
) -> Callable[[], object]:
    return lambda: ops.attention(query, key, value, is_causal=is_causal, recipe=recipe, fallback="error")


def trace(call: Callable[[], object]) -> list[list[Span]]:
    """Return the kernels of some calls, each call's in the order of their ends."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    found = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.append(Span(event.name, event.time_range.start, event.time_range.end))
    if not found or len(found) % CALLS:
        raise RuntimeError(f"the profiler saw {len(found)} kernels in {CALLS} calls")
    found.sort(key=lambda span: span.end)
    each = len(found) // CALLS
    return [found[start : start + each] for start in range(0, len(found), each)]


def phases(calls: Sequence[Sequence[Span]]) -> dict[str, tuple[float, list[str]]]:
    """Return phase -> (median ms, names of its kernels); WHOLE comes last.

    Args:
        calls: the kernels of each call, in the order of their ends.
    """
    times: dict[str, list[float]] = defaultdict(list)
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for spans in calls:
        of_call: dict[str, float] = defaultdict(float)
        end = spans[0].start
        for span in spans:
            phase = next((phase for part, phase in PHASES.items() if part in span.kernel), "statistics")
            of_call[phase] += span.end - max(span.start, end)
            names[phase][span.kernel] = None
            end = span.end
        for phase, time in of_call.items():
            times[phase].append(time)
        times[WHOLE].append(end - spans[0].start)
    order = [*(phase for phase in times if phase != WHOLE), WHOLE]
    return {phase: (statistics.median(times[phase]) * 1e-3, list(names[phase])) for phase in order}
