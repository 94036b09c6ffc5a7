"""Time of each phase of our calls on one GPU (statistics, quantising, attention), compared with the time of a copy.

The profiler's trace gives each kernel's start and end. A kernel may start before the previous kernel ends, and wait for
it, so a phase counts from the end of the previous phase.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from sage_hf.bench.cases import SHAPES, BenchCase, CaseInputs, draw
from sage_hf.bench.prewarm import call_in_processes
from sage_hf.bench.providers import QUANTIZERS, quantizers
from sage_hf.bench.results import BenchmarkResult, Row, facts, reason
from sage_hf.bench.timing import KernelRun, copy_bandwidth, profiled
from sage_kernels import ops

RECIPES = tuple(QUANTIZERS)
WHOLE = "whole"
"""Name of the phase of all kernels together."""
PHASES = {"forward": "attention", "quantize": "quantize", "heavy": "quantize"}
"""Parts of kernels' names -> phases; all other kernels count as statistics."""


def run(
    device: torch.device,
    cases: Sequence[BenchCase] = SHAPES,
    progress: Callable[[str], None] = print,
) -> BenchmarkResult:
    """Measure the phases of whole calls, and of the quantisers alone.

    Args:
        device: a CUDA device.
        cases: forward passes.
        progress: called with a text for each case before it is measured.

    Returns:
        Plain data: facts about the machine, "copy_bandwidth" (bytes read and written per second by a copy) and "rows".
        A row has the case, "what" (a recipe's whole call, or one of `providers.quantizers`), "phase"
        ("statistics", "quantize", "attention" or "whole"), "kernels" and "ms" (median of the calls); for a quantiser
        also "bytes" that it reads and writes, and "copy_share", its share of the copy's bandwidth; or, if it cannot
        run, "unavailable": the reason.
    """
    kinds = {(case.head_dim, case.upper_left): case for case in cases}
    call_in_processes(_call_once, itertools.product(kinds.values(), RECIPES))
    with torch.cuda.device(device), torch.no_grad():
        result: BenchmarkResult = {**facts(device), "copy_bandwidth": copy_bandwidth(device), "rows": []}
        for case in cases:
            progress(f"{case.name}: {case}")
            result["rows"] += measure_case(case, device, result["copy_bandwidth"])
        return result


def measure_case(case: BenchCase, device: torch.device, bandwidth: float) -> list[Row]:
    """Return the rows of one case; the row of a failed measurement holds the reason."""
    sizes: Row = case.to_row()
    try:
        inputs = draw(case, device, biased=True, heads_first=True)
        quantizer_calls = quantizers(inputs, RECIPES)
    except Exception as error:  # It may raise any error: the row holds it.
        return [sizes | {"what": "all", "unavailable": reason(error)}]
    calls: dict[str, tuple[Callable[[], object], int]] = {recipe: (_whole(inputs, recipe), 0) for recipe in RECIPES}
    rows: list[Row] = []
    read = inputs.key.nbytes + inputs.value.nbytes  # by the statistics
    for subject, (call, moved) in (calls | quantizer_calls).items():
        try:
            times = phases(profiled(call))
        except Exception as error:  # A profiler may be refused; a kernel may fail.
            rows.append(sizes | {"what": subject, "unavailable": reason(error)})
            continue
        by_phase = {"statistics": read, "quantize": moved - read, WHOLE: moved} if moved else {}
        for phase, (ms, kernels) in times.items():
            row = sizes | {"what": subject, "phase": phase, "kernels": kernels, "ms": ms}
            if phase in by_phase:
                row |= {"bytes": by_phase[phase], "copy_share": by_phase[phase] / (ms * 1e-3) / bandwidth}
            rows.append(row)
    return rows


@torch.no_grad()
def _call_once(call: tuple[BenchCase, str]) -> None:
    """Call a recipe's quantisers alone, and then the recipe."""
    case, recipe = call
    inputs = draw(case, torch.device("cuda"), heads_first=True)
    quantizers(inputs, [recipe])
    _whole(inputs, recipe)()
    torch.cuda.synchronize()


def _whole(inputs: CaseInputs, recipe: str) -> Callable[[], object]:
    is_causal = inputs.case.upper_left
    return lambda: ops.attention(*inputs.tensors, is_causal=is_causal, recipe=recipe, fallback="error")


def phases(calls: Sequence[Sequence[KernelRun]]) -> dict[str, tuple[float, list[str]]]:
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
