"""Measure what heavy keys and rotation cost on this GPU: recipes with and without them, or beside another commit's.

python benchmarks/price.py --output benchmarks/results
git worktree add ../before COMMIT; python benchmarks/price.py --before ../before/kernels --output benchmarks/results

The result is <gpu>-remedies.json. Calls are CUDA graphs, from 16-bit tensors to 16-bit outputs, replayed in turns in
one process. Where tensors lie in memory moves a call by percents, so each is captured several times, elsewhere.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import git_commit
from torch import Tensor

PACKAGE = "sage_kernels"
COPY = "sage_kernels_before"
PLACEMENTS = 5  # of the tensors in memory
PLACEMENT_BYTES = 21_000_000  # by which one is further on than the one before
SAMPLES = 5  # in each placement
SAMPLE_MS = 2.0  # the least time of a sample, of as many calls


@dataclass(frozen=True)
class Case:
    """A recipe at a shape; head_dim is V's too, and there are as many queries as keys."""

    recipe: str
    batch: int
    q_heads: int
    tokens: int
    head_dim: int
    kv_heads: int = 0
    is_causal: bool = False

    @property
    def shape(self) -> str:
        """Return the shape for a table."""
        heads = f"{self.q_heads}/{self.kv_heads}" if self.kv_heads else f"{self.q_heads}"
        return f"{self.batch}×{heads}×{self.tokens}×{self.head_dim}{', causal' * self.is_causal}"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draw Q, K and V."""
        generator = torch.Generator("cuda").manual_seed(0)
        query, key, value = (
            torch.randn(
                (self.batch, heads, self.tokens, self.head_dim),
                generator=generator,
                device="cuda",
                dtype=torch.bfloat16,
            )
            for heads in (self.q_heads, self.kv_heads or self.q_heads, self.kv_heads or self.q_heads)
        )
        return query, key, value


CASES = (
    Case("sage2", 4, 32, 4096, 128),
    Case("sage1", 4, 32, 4096, 128),
    Case("sage2", 1, 24, 4608, 128),
    Case("sage1", 1, 24, 4608, 128),
    Case("sage2", 4, 32, 4096, 64),
    Case("sage1", 4, 32, 4096, 64),
    Case("sage2", 2, 32, 16384, 128),
    Case("sage2", 2, 32, 16384, 128, is_causal=True),
    Case("sage2", 2, 32, 16384, 64),
    Case("sage2", 2, 32, 16384, 64, is_causal=True),
    Case("sage2", 2, 30, 17776, 64),
    Case("sage2", 1, 24, 44776, 128),
    Case("sage2", 1, 32, 32768, 128, 8, is_causal=True),
)


def copied(package: Path, into: Path) -> str:
    """Copy the package from another checkout's folder `kernels`, under a name beside which ours can be imported."""
    for source in (package / PACKAGE).rglob("*"):
        copy = into / COPY / source.relative_to(package / PACKAGE)
        if source.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        elif "__pycache__" not in source.parts:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source.read_text(encoding="utf-8").replace(PACKAGE, COPY), encoding="utf-8")
    return COPY


def caller(package: str, case: Case, remedies: bool = True) -> Callable[[Tensor, Tensor, Tensor], object]:
    """Return what calls a package at a case; without `remedies` its recipe has no heavy keys and no rotation."""
    os.environ["SAGE_KERNELS_ROUTING"] = "0"  # read when the package is imported
    module = importlib.import_module(package)
    recipe = case.recipe
    if not remedies:
        recipes = importlib.import_module(f"{package}.recipe")
        name = f"{recipe}_without_remedies"
        plain = {"heavy_keys": 0, "heavy_choice": "first", "rotate": False, "equalize": False}
        recipes.RECIPES.setdefault(name, replace(recipes.RECIPES[recipe], name=name, **plain))
        recipe = name

    def call(query: Tensor, key: Tensor, value: Tensor) -> object:
        # A call with fewer heads of K takes them as they are.
        return module.attention(query, key, value, is_causal=case.is_causal, recipe=recipe)

    return call


def compile_case(folder: str, package: str, case: Case, remedies: bool) -> None:
    """Compile what a case needs into the caches, by a call with one head."""
    sys.path.insert(0, folder)
    caller(package, case, remedies)(*replace(case, batch=1, q_heads=1, kv_heads=0).tensors())


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a call as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Return the time of one of so many replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def medians(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Return each graph's median time in ms; they are replayed in turns."""
    calls = [math.ceil(SAMPLE_MS / milliseconds(graph, 1)) for graph in graphs]
    times = [[milliseconds(*each) for each in zip(graphs, calls, strict=True)] for _ in range(SAMPLES)]
    return [statistics.median(of_graph) for of_graph in zip(*times, strict=True)]


def placed_medians(
    calls: Sequence[Callable[[Tensor, Tensor, Tensor], object]], tensors: Callable[[], tuple[Tensor, Tensor, Tensor]]
) -> list[list[float]]:
    """Return each call's median time in ms in each placement of its tensors, and of what it allocates.

    The calls are captured in another order each time: graphs keep their memory, so one lies behind the other.
    """
    found = []
    for placement in range(PLACEMENTS):
        before = torch.empty(1 + placement * PLACEMENT_BYTES, dtype=torch.uint8, device="cuda")
        drawn, graphs = tensors(), {}
        for number in range(placement, placement + len(calls)):
            graphs[number % len(calls)] = captured(partial(calls[number % len(calls)], *drawn))
        found.append(medians([graphs[number] for number in range(len(calls))]))
        del before, drawn, graphs
        torch.cuda.empty_cache()
    return [list(of_call) for of_call in zip(*found, strict=True)]


def measure(before: Path | None, commit: str, before_commit: str) -> dict[str, Any]:
    """Return plain data: facts about the machine, and rows {recipe, shape, before_ms, after_ms}."""
    with tempfile.TemporaryDirectory() as folder:
        package = PACKAGE if before is None else copied(before, Path(folder))
        sys.path.insert(0, folder)
        sides = ((package, before is not None), (PACKAGE, True))
        with ProcessPoolExecutor(16, multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(compile_case, folder, name, case, on) for case in CASES for name, on in sides]
            for job in jobs:
                job.result()
        rows = []
        for case in CASES:
            times = placed_medians([caller(name, case, on) for name, on in sides], case.tensors)
            before_ms, after_ms = (round(statistics.median(of_call), 4) for of_call in times)
            spread = ", ".join(f"{min(of_call):.4f}–{max(of_call):.4f}" for of_call in times)
            print(
                f"{case.recipe} {case.shape}: {before_ms} → {after_ms} ms, {after_ms / before_ms - 1:+.1%} ({spread})",
                flush=True,
            )
            rows.append({"recipe": case.recipe, "shape": case.shape, "before_ms": before_ms, "after_ms": after_ms})
    capability = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": f"{capability[0]}.{capability[1]}",
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "cuda": torch.version.cuda,
        "commit": commit,
        "date": date.today().isoformat(),
        "before_commit": before_commit,
        "note": f"medians of {PLACEMENTS} placements in memory, each the median of CUDA graph replays in turns, in one "
        "process, quantisation included",
        "rows": rows,
    }


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    parser.add_argument("--before", type=Path, help="folder `kernels` of another checkout (default: without remedies)")
    parser.add_argument("--before-commit", default="the same without remedies", help="its name, for the record")
    parser.add_argument("--commit", help="of the source, for the record (default: the checkout's)")
    args = parser.parse_args()
    result = measure(args.before, git_commit() if args.commit is None else args.commit, args.before_commit)
    name = "-".join(result["gpu"].lower().split())
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"{name}-remedies.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
