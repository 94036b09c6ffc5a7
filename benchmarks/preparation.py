"""Measure what FP4 attention needs before it attends: statistics, Q, K and V in NVFP4, and the scores of Q's means.

python benchmarks/preparation.py --output benchmarks/results

writes <gpu>-sage3.json. Its "rows" have phase, kernels, batch, heads, tokens, head_dim and ms: "statistics", "query",
"key", "value", "delta_scores" of each kernels, and "all" but delta_scores from the first kernel's start to the last
one's end. Kernels "cuda" quantise Q, K and V in one launch; its time without much of K and V counts for Q, that without
much of Q for "key and value". "all" and "delta_scores" are replayed as graphs, so that the host's time does not count.
"copy_ms" is what copying the bytes that "all" moves takes: Q read once, K and V twice, the operands written. No FP4
hardware is needed: these kernels run on any GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from record import git_commit
from torch.profiler import ProfilerActivity, profile

from sage_hf.bench import measure
from sage_kernels.call import Call
from sage_kernels.cuda import quantize_nvfp4
from sage_kernels.operands import NVFP4Operands
from sage_kernels.recipe import get_recipe
from sage_kernels.triton.delta_scores import delta_scores
from sage_kernels.triton.quantize.nvfp4 import quantize_nvfp4_operands

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


def phase_ms(call: Callable[[], object], phases: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """Return the median time in ms of each phase: the sum of its kernels' times."""
    call()
    sums: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            call()
            torch.cuda.synchronize()
        found: dict[str, float] = defaultdict(float)
        launched: dict[str, int] = defaultdict(int)
        for event in sorted(profiled.events(), key=lambda event: event.time_range.start):
            if event.name in phases:
                found[phases[event.name][launched[event.name]]] += event.time_range.elapsed_us() / 1e3
                launched[event.name] += 1
        for phase, ms in found.items():
            sums[phase].append(ms)
    return {phase: statistics.median(values) for phase, values in sums.items()}


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """Return a call's launches as a graph: without it a short call takes as long as its host does."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


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
        "delta_scores": (replayed(lambda: delta_scores(operands, call.tail, None, 0, 0, delta)), 20)
    }
    written = delta.numel() * delta.element_size() + key.numel() * key.element_size()
    add("triton", "delta_scores", measure.median_ms(calls)["delta_scores"], copy_ms=written / bandwidth * 1e3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(), help="folder to write <gpu>-sage3.json into")
    parser.add_argument("--commit", help="of the source, for the record (default: the checkout's)")
    parser.add_argument("--kernels", nargs="+", default=["triton", "cuda"], choices=["triton", "cuda"])
    arguments = parser.parse_args()
    device = torch.device("cuda")
    facts = measure.facts(device, git_commit() if arguments.commit is None else arguments.commit)
    bandwidth = measure.copy_bandwidth(device)
    rows = [row for shape in SHAPES for row in measure_shape(*shape, bandwidth, arguments.kernels)]
    for row in rows:
        sizes = f"{row['batch']}x{row['heads']}x{row['tokens']}x{row['head_dim']}"
        print(f"{sizes:18s} {row['kernels']:6s} {row['phase']:14s} {row['ms']:.3f} ms  {row.get('copy_ms', '')}")
    name = facts["gpu"].lower().replace(" ", "-")
    path = arguments.output / f"{name}-sage3.json"
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({**facts, "copy_bandwidth": bandwidth}, indent=1)[:-2]
    path.write_text(f'{head},\n "rows": [\n{lines}\n]\n}}\n', encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
