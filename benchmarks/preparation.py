"""Measure what FP4 attention needs before it attends: statistics, Q, K and V in NVFP4, and the scores of Q's means.

python benchmarks/preparation.py --output benchmarks/results --sageattention3 CHECKOUT

writes <gpu>-sage3.json. Its "rows" have phase, kernels, batch, heads, tokens, head_dim and ms: "statistics", "query",
"key", "value", "delta_scores" of each kernels, and "all" but delta_scores from the first kernel's start to the last
one's end. Kernels "cuda" quantise Q, K and V in one launch; its time without much of K and V counts for Q, that without
much of Q for "key and value". "all" and "delta_scores" are replayed as graphs, so that the host's time does not count.
"copy_ms" is what copying the bytes that "all" moves takes: Q read once, K and V twice, the operands written. No FP4
hardware is needed: these kernels run on any GPU.

Kernels "sageattention3" are those of a checkout of github.com/thu-ml/SageAttention, as `sageattention3.py` says: its
statistics are "smooth_key" and "smooth_query". Rows of what does not convert to e2m1 here have "without"; where
something does not run at all, "unavailable" says why, and there is no ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sageattention3
import torch
from record import git_commit
from torch.profiler import ProfilerActivity, profile

from sage_hf.bench import measure
from sage_kernels.cuda import quantize_nvfp4
from sage_kernels.spec.call import Call
from sage_kernels.spec.operands import NVFP4Operands
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton.quantize.nvfp4 import quantize_operands as quantize_nvfp4_operands
from sage_kernels.triton.smooth_q_scores import smooth_q_scores

SHAPES = ((4, 32, 4096, 128), (2, 32, 16384, 128), (4, 32, 4096, 64))
REPEATS = 7
FEW = 256  # tokens that cost nearly nothing
BYTES = 0.5 + 1 / 16  # of an element in NVFP4

# Phases of the kernels by name; where a kernel is launched more than once, in order.
TRITON_PHASES = {
    "block_statistics": ("statistics", "statistics"),
    "key_statistics": ("statistics",),
    "value_statistics": ("statistics",),
    "query_squares": ("statistics",),
    "quantize_tokens_nvfp4": ("query", "key"),
    "quantize_value_nvfp4": ("value",),
}
CUDA_PHASES = {"reduce": ("statistics",), "means": ("statistics",), "quantize": ("quantize",)}


def phase_ms(call: Callable[[], object], phases: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Return the median time in ms of each phase of a call: the sum of its kernels' times."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPEATS):
            call()
        torch.cuda.synchronize()
    events = sorted(profiled.events(), key=lambda event: event.time_range.start)
    launches = [(event.name, event.time_range.elapsed_us() / 1e3) for event in events]
    return median_of_phases(launches, phases, REPEATS)


def median_of_phases(
    launches: Sequence[tuple[str, float]], phases: Mapping[str, tuple[str, ...]], calls: int
) -> dict[str, float]:
    """Return the median of each phase's time over equal calls.

    Args:
        launches: (kernel, time) of all calls, in order.
        phases: of each kernel's launches in a call; other kernels do not count.
        calls: how many there were.

    Raises:
        ValueError: a kernel was launched more or less often than `phases` says.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * calls)
    for kernel, names in phases.items():
        times = [ms for name, ms in launches if name == kernel]
        if len(times) not in (0, calls * len(names)):
            raise ValueError(f"{kernel} was launched {len(times)} times in {calls} calls, not {len(names)} in each")
        for number, ms in enumerate(times):
            sums[names[number % len(names)]][number // len(names)] += ms
    return {phase: statistics.median(values) for phase, values in sums.items()}


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """Return a call's launches as a graph: without it a short call takes as long as its host does."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure_peer(checkout: Path, library: Path | str, shape: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """Return the rows of public SageAttention3 at one shape.

    Args:
        checkout: of its source.
        library: its compiled quantisers, or why there are none.
        shape: batch, heads, tokens, head_dim.
    """
    device = torch.device("cuda")
    batch, heads, tokens, head_dim = shape
    query, key, value = measure.draw(
        measure.Shape("preparation", batch, heads, heads, tokens, head_dim), "biased", device
    )
    calls, refused = dict[str, Callable[[], object]](), dict[str, str]()
    try:
        calls |= sageattention3.smoothing(sageattention3.load_api(checkout), query, key)
    except sageattention3.Unavailable as error:
        refused |= dict.fromkeys((*sageattention3.SMOOTHING, "delta_scores"), str(error))
    if isinstance(library, str):
        refused |= dict.fromkeys(sageattention3.QUANTIZERS, library)
    else:
        calls |= sageattention3.quantizers(library, query, key, value)
    prepared = (*sageattention3.SMOOTHING, *sageattention3.QUANTIZERS)
    if not refused:
        steps = [calls[name] for name in prepared]
        calls["all"] = lambda: [step() for step in steps]
    sizes = {"batch": batch, "heads": heads, "tokens": tokens, "head_dim": head_dim}
    facts = {"kernels": sageattention3.NAME, **sizes}
    converts = torch.cuda.get_device_capability(device) >= sageattention3.CONVERTING
    rows: list[dict[str, Any]] = [{"phase": phase, **facts, "unavailable": reason} for phase, reason in refused.items()]
    for phase, ms in measure.median_ms({name: (replayed(call), 20) for name, call in calls.items()}).items():
        left_out = not converts and phase in (*sageattention3.QUANTIZERS, "all")
        rows.append({"phase": phase, **facts, "ms": ms} | ({"without": "conversion to e2m1"} if left_out else {}))
    return rows


def measure_shape(
    batch: int, heads: int, tokens: int, head_dim: int, bandwidth: float, kernels: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the rows of one shape, of those of Triton's and CUDA's kernels that are named."""
    recipe, device = get_recipe("sage3"), torch.device("cuda")
    shape = measure.Shape("preparation", batch, heads, heads, tokens, head_dim)
    query, key, value = measure.draw(shape, "biased", device)
    call = Call(query, key, value, recipe, scale=head_dim**-0.5)
    few_keys = Call(query, key[:, :, :FEW], value[:, :, :FEW], recipe, scale=call.scale)
    few_queries = Call(query[:, :, :FEW], key, value, recipe, scale=call.scale)
    sizes = {"batch": batch, "heads": heads, "tokens": tokens, "head_dim": head_dim}
    moved = query.numel() * (query.element_size() * 5 + 3 * BYTES)
    rows: list[dict[str, Any]] = []

    def add(kernels: str, phase: str, ms: float, **more: float) -> None:
        rows.append({"phase": phase, "kernels": kernels, **sizes, "ms": ms, **more})

    def cuda(one: Call) -> Callable[[], object]:
        return lambda: quantize_nvfp4.quantize_operands(one)

    quantizers: dict[str, Callable[[], NVFP4Operands]] = {
        "triton": lambda: quantize_nvfp4_operands(call),
        "cuda": lambda: quantize_nvfp4.quantize_operands(call),
    }
    quantizers = {name: quantizer for name, quantizer in quantizers.items() if name in kernels}
    if "triton" in quantizers:
        for phase, ms in phase_ms(quantizers["triton"], TRITON_PHASES).items():
            add("triton", phase, ms)
    if "cuda" in quantizers:
        add("cuda", "statistics", phase_ms(cuda(call), CUDA_PHASES)["statistics"])
        add("cuda", "query", phase_ms(cuda(few_keys), CUDA_PHASES)["quantize"])
        add("cuda", "key and value", phase_ms(cuda(few_queries), CUDA_PHASES)["quantize"])
    whole = measure.median_ms({name: (replayed(quantizer), 20) for name, quantizer in quantizers.items()})
    for name, ms in whole.items():
        add(name, "all", ms, copy_ms=moved / bandwidth * 1e3)

    if "triton" not in quantizers:
        return rows
    operands = quantizers["triton"]()
    columns = operands.key.shape[2]
    delta = query.new_empty((batch, heads, operands.query.shape[2] // 128, columns), dtype=torch.float32)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "delta_scores": (replayed(lambda: smooth_q_scores(operands, call.tail, None, 0, 0, delta)), 20)
    }
    written = delta.numel() * delta.element_size() + key.numel() * key.element_size()
    add("triton", "delta_scores", measure.median_ms(calls)["delta_scores"], copy_ms=written / bandwidth * 1e3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(), help="folder to write <gpu>-sage3.json into")
    parser.add_argument("--commit", help="of the source, for the record (default: the checkout's)")
    parser.add_argument("--kernels", nargs="+", default=["triton", "cuda"], choices=["triton", "cuda"])
    parser.add_argument("--sageattention3", type=Path, metavar="CHECKOUT", help="measure the source in this folder too")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    facts = measure.facts(device, git_commit() if arguments.commit is None else arguments.commit)
    bandwidth = measure.copy_bandwidth(device)
    rows = [row for shape in SHAPES for row in measure_shape(*shape, bandwidth, arguments.kernels)]
    if arguments.sageattention3 is not None:
        with tempfile.TemporaryDirectory() as folder:
            library = compiled_peer(arguments.sageattention3, Path(folder), device)
            rows += [row for shape in SHAPES for row in measure_peer(arguments.sageattention3, library, shape)]
    for row in rows:
        sizes = f"{row['batch']}x{row['heads']}x{row['tokens']}x{row['head_dim']}"
        result = f"{row['ms']:.3f} ms  {row.get('copy_ms', '')}" if "ms" in row else row["unavailable"]
        print(f"{sizes:18s} {row['kernels']:14s} {row['phase']:14s} {result}")
    name = facts["gpu"].lower().replace(" ", "-")
    path = arguments.output / f"{name}-sage3.json"
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({**facts, "copy_bandwidth": bandwidth}, indent=1)[:-2]
    path.write_text(f'{head},\n "rows": [\n{lines}\n]\n}}\n', encoding="utf-8")
    print(f"wrote {path}")


def compiled_peer(checkout: Path, folder: Path, device: torch.device) -> Path | str:
    """Return public SageAttention3's quantisers, compiled for the device, or why there are none."""
    try:
        return sageattention3.compile_quantizers(checkout, folder, torch.cuda.get_device_capability(device))
    except sageattention3.Unavailable as error:
        return str(error)


if __name__ == "__main__":
    main()
