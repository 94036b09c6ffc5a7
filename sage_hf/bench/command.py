"""The command line of `sage-hf bench`: measure, write, print."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch

from sage_hf.bench import (
    grid_tables,
    measure,
    measure_grid,
    measure_host,
    measure_models,
    measure_phases,
    model_tables,
    plots,
    report,
    results,
    tables,
)
from sage_hf.bench.cases import SHAPES, TRAINING_SHAPES, BenchCase
from sage_hf.bench.grid import CASES
from sage_hf.bench.model_providers import MODEL_PROVIDERS, TRAINING_MODEL_PROVIDERS, ModelProvider
from sage_hf.bench.models import MODELS, BenchModel
from sage_hf.bench.providers import PROVIDERS, TRAINING_PROVIDERS, Provider
from sage_hf.bench.results import BenchmarkResult, Row

Subject = TypeVar("Subject", BenchCase, Provider, BenchModel, ModelProvider)
ALL = "all"
EVERY_MODEL_PROVIDER = tuple(dict.fromkeys((*MODEL_PROVIDERS, *TRAINING_MODEL_PROVIDERS)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `execute` to the parser."""
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--model",
        nargs="+",
        metavar="NAME",
        help=f"time steps of whole models with random weights, instead of attention: {ALL}, or of {_names(MODELS)}",
    )
    subject.add_argument(
        "--grid",
        action="store_true",
        help=f"time {len(CASES)} calls of every kind against the fastest other attention, instead of the shapes; with "
        "--training only calls of training, with --shapes only some kinds",
    )
    subject.add_argument(
        "--phases", action="store_true", help="time statistics, quantising and attention of our calls separately"
    )
    subject.add_argument("--host", action="store_true", help="time small calls on the host, instead of the GPU")
    subject.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write one JSON about our recipes on this GPU (machine, kernels, errors, speeds), to send to us; kernels "
        "that nobody has run on such a GPU are tried last",
    )
    parser.add_argument("--training", action="store_true", help="time forward and backward pass (default: forward)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help=f"some of {_names(SHAPES)}; with --training some of {_names(TRAINING_SHAPES)} (default: all)",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="B,Hq,Hkv,N,D[,causal]",
        help="another shape: batch, query heads, key heads, tokens, head_dim; repeatable",
    )
    parser.add_argument(
        "--providers",
        nargs="+",
        metavar="NAME",
        help=f"some of {_names(PROVIDERS)}; with --training some of {_names(TRAINING_PROVIDERS)}; with --model some of "
        f"{_names(EVERY_MODEL_PROVIDER)} (default: all)",
    )
    parser.add_argument(
        "--only",
        type=re.compile,
        metavar="REGEX",
        help="with --grid: only calls whose text contains this, such as 'causal, .*×256,'",
    )
    parser.add_argument("--resume", action="store_true", help="with --grid: only calls that the output folder lacks")
    parser.add_argument("--layers", type=int, metavar="N", help="most layers of a model (default: about 1 s a step)")
    parser.add_argument("--compiled", action="store_true", help="time models with compiled blocks too")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 (default: cuda)")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="default: output")


TAKES = {
    "host": (),
    "report": (),
    "phases": ("shapes", "shape"),
    "grid": ("training", "shapes", "only", "resume"),
    "model": ("providers", "layers", "compiled"),
    "": ("training", "shapes", "shape", "providers"),
}
"""Options that each benchmark takes, except --device and --output; "" measures named shapes."""


def execute(args: argparse.Namespace) -> None:
    """Measure, write <gpu>-forward.json and its pictures to the output folder, and print tables.

    With --training it is <gpu>-forward_backward.json; with --model <gpu>-models.json and a picture; with --grid
    <gpu>-grid.json and a heat map; with --phases <gpu>-phases.json; with --host <gpu>-host.json; with --report the file
    that it names.

    Args:
        args: parsed arguments of `add_arguments`.

    Raises:
        ValueError: no CUDA device, no matplotlib, an unknown name of a shape, model or provider, or an option that the
            benchmark does not take.
    """
    chosen_benchmark = next((name for name in TAKES if name and getattr(args, name)), "")
    given_names = {name for names in TAKES.values() for name in names if getattr(args, name)}
    if refused := sorted(given_names.difference(TAKES[chosen_benchmark])):
        benchmark = f"--{chosen_benchmark}" if chosen_benchmark else "a benchmark of shapes"
        raise ValueError(f"{benchmark} takes no {', '.join(f'--{name}' for name in refused)}")
    benchmarks = {
        "host": _execute_host,
        "report": _execute_report,
        "phases": _execute_phases,
        "grid": _execute_grid,
        "model": _execute_models,
        "": _execute_shapes,
    }
    benchmarks[chosen_benchmark](args)


def _execute_shapes(args: argparse.Namespace) -> None:
    cases, providers = _shapes(args), _chosen("--providers", args.providers, _of(args, PROVIDERS, TRAINING_PROVIDERS))
    device = gpu(args.device)
    plots.require_matplotlib()
    result = measure.run(device, cases, providers, progress)
    path = results.path_of(args.output, result, "forward_backward" if args.training else "forward")
    results.write(path, result)
    print(tables.text(result))
    pictures = plots.plot(result, path.with_suffix(".png"))
    print(f"\nwrote {path}, {', '.join(picture.name for picture in pictures)}")


def _execute_models(args: argparse.Namespace) -> None:
    """Measure models in the order in which they are named, and write <gpu>-models.json after each.

    The file's rows of other models and providers stay, if machine, versions and commit are the same.
    """
    if args.layers is not None and args.layers < 1:
        raise ValueError(f"--layers {args.layers}: a model has at least 1")
    models = _chosen("--model", None if ALL in args.model else args.model, MODELS)
    models.sort(key=lambda model: args.model.index(model.name) if model.name in args.model else 0)
    providers = _chosen("--providers", args.providers, EVERY_MODEL_PROVIDER)
    device = gpu(args.device)
    now = results.facts(device)
    path = results.path_of(args.output, now, "models")
    earlier = results.earlier_rows(path, now)
    order = [
        (model.name, mode, provider.name)
        for model in MODELS
        for mode in ("eager", "compiled")
        for provider in EVERY_MODEL_PROVIDER
    ]

    def key(row: Row) -> tuple[str, ...]:
        return row["name"], row["mode"], row["provider"]

    def write(result: BenchmarkResult) -> None:
        results.write(path, {**result, "rows": results.merged(result["rows"], earlier, key, order)})

    result = measure_models.run(device, models, providers, progress, args.layers, args.compiled, write)
    print(model_tables.model_text(result))
    whole = results.read(path) or result
    can_plot = plots.has_matplotlib() and model_tables.model_gains(whole)
    picture = f", {plots.plot_models(whole, path.with_suffix('.png')).name}" if can_plot else ""
    print(f"\nwrote {path}{picture}")


def _execute_phases(args: argparse.Namespace) -> None:
    cases = _shapes(args)
    result = measure_phases.run(gpu(args.device), cases, progress)
    path = results.path_of(args.output, result, "phases")
    results.write(path, result)
    print(f"{tables.phases_text(result)}\n\nwrote {path}")


def _execute_grid(args: argparse.Namespace) -> None:
    kinds = list(dict.fromkeys(case.name for case in CASES))
    if unknown := set(args.shapes or ()).difference(kinds):
        raise ValueError(f"--shapes: unknown {', '.join(sorted(unknown))}; choose from: {'; '.join(kinds)}")
    cases = [case for case in CASES if (args.shapes is None or case.name in args.shapes)]
    cases = [case for case in cases if case.training or not args.training]
    if args.only:
        cases = [case for case in cases if args.only.search(f"{case.name}, {case}")]
        if not cases:
            raise ValueError(f"--only {args.only.pattern}: no call of the grid contains that")
    path, result = measure_calls(args, "grid", cases, {})
    picture = f", {plots.plot_grid(result, path.with_suffix('.png')).name}" if plots.has_matplotlib() else ""
    print(f"{grid_tables.text(result)}\n\nwrote {path}{picture}")


def measure_calls(
    args: argparse.Namespace, benchmark: str, cases: Sequence[BenchCase], extra_columns: Row
) -> tuple[Path, BenchmarkResult]:
    """Measure calls like the grid's, and write <gpu>-<benchmark>.json as rows come; return the file and its result.

    The file's rows of other calls stay, if machine, versions and commit are the same.

    Args:
        args: `device`, `output`, and `resume` (measure only calls that the file lacks).
        benchmark: name of the file.
        cases: the calls.
        extra_columns: entries to add to each row.
    """
    device = gpu(args.device)
    now = results.facts(device)
    path = results.path_of(args.output, now, benchmark)
    earlier = results.earlier_rows(path, now)
    order = [grid_tables.key(measure_grid.sizes(case)) for case in CASES]
    if args.resume:
        measured_keys = set(map(grid_tables.key, earlier))
        cases = [
            case for case in cases if grid_tables.key(measure_grid.sizes(case) | extra_columns) not in measured_keys
        ]

    def write(result: BenchmarkResult) -> None:
        rows = [row | extra_columns for row in result["rows"]]
        results.write(path, {**result, "rows": results.merged(rows, earlier, grid_tables.key, order)})

    result = measure_grid.run(device, cases, progress, write)
    return path, results.read(path) or result


def _execute_host(args: argparse.Namespace) -> None:
    result = measure_host.run(gpu(args.device), progress=progress)
    path = results.path_of(args.output, result, "host")
    results.write(path, result)
    print(f"{measure_host.text(result)}\n\nwrote {path}")


def _execute_report(args: argparse.Namespace) -> None:
    """Report on the GPU, write the file after each part, and print tables."""
    result = report.run(gpu(args.device), lambda result: results.write(args.report, result), progress)
    print(f"{report.text(result)}\n\nwrote {args.report}")


def progress(line: str) -> None:
    """Print a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def gpu(name: str) -> torch.device:
    """Return the device; raise ValueError if it is no CUDA device of this machine."""
    device = torch.device(name)
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {name}: the benchmark times GPU kernels and needs a CUDA device, of which there are "
            f"{torch.cuda.device_count()} here; `sage-hf env` shows what runs without one"
        )
    return device


def _of(args: argparse.Namespace, forward: Sequence[Subject], training: Sequence[Subject]) -> Sequence[Subject]:
    return training if args.training else forward


def _shapes(args: argparse.Namespace) -> list[BenchCase]:
    """Return the requested named and parsed shapes; by default all named shapes."""
    cases = [BenchCase.parse(text, args.training) for text in args.shape]
    if args.shapes is None and cases:
        return cases
    return _chosen("--shapes", args.shapes, _of(args, SHAPES, TRAINING_SHAPES)) + cases


def _names(items: Sequence[Subject]) -> str:
    return ", ".join(dict.fromkeys(item.name for item in items))


def _chosen(option: str, names: Sequence[str] | None, items: Sequence[Subject]) -> list[Subject]:
    """Return the items with these names, or all without names. Raise ValueError for unknown names."""
    if unknown := set(names or ()).difference(item.name for item in items):
        raise ValueError(f"{option}: unknown {', '.join(sorted(unknown))}; choose from: {_names(items)}")
    return [item for item in items if names is None or item.name in names]
