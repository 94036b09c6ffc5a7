"""The command line of the benchmark: measure, write, print."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from sage_hf.bench import (
    grid_tables,
    measure,
    measure_grid,
    measure_host,
    measure_models,
    measure_phases,
    measure_training,
    plots,
    report,
    tables,
)
from sage_hf.bench.grid import POINTS
from sage_hf.bench.model_peers import MODEL_PROVIDERS, TRAINING_MODEL_PROVIDERS, ModelProvider
from sage_hf.bench.models import MODELS, Model
from sage_hf.bench.peers import PROVIDERS, Provider
from sage_hf.bench.shapes import SHAPES, TRAINING_SHAPES, Shape
from sage_hf.bench.training_peers import TRAINING_PROVIDERS
from sage_hf.files import replacing
from sage_hf.tune.tune import table_in_use, unseen_points

Named = TypeVar("Named", Shape, Provider, Model, ModelProvider)
ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `execute` to the parser."""
    parser.add_argument("--training", action="store_true", help="forward and backward (default: forward)")
    names = (
        ("--shapes", "SHAPE", _names(SHAPES), _names(TRAINING_SHAPES)),
        ("--providers", "NAME", _names(PROVIDERS), _names(TRAINING_PROVIDERS)),
    )
    for option, metavar, forward, training in names:
        text = f"of {forward}; with --training of {training} (default: all)"
        if option == "--providers":
            text += f"; with --model of {_names((*MODEL_PROVIDERS, *TRAINING_MODEL_PROVIDERS))}"
        parser.add_argument(option, nargs="+", metavar=metavar, help=text)
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="B,Hq,Hkv,N,D[,causal]",
        help="any other shape: batch, query heads, key heads, tokens, head_dim; repeatable",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        metavar="NAME",
        help=f"time steps of whole models with random weights, instead of attention: {ALL}, or of {_names(MODELS)}",
    )
    parser.add_argument(
        "--grid",
        action="store_true",
        help=f"time {len(POINTS)} calls of every kind beside the fastest other attention, instead of the shapes; with "
        "--training only those of training, with --shapes only some kinds",
    )
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="of the grid, the I-th of N parts (default: the whole)"
    )
    parser.add_argument(
        "--only",
        type=re.compile,
        metavar="REGEX",
        help="of the grid, the calls whose text contains this, such as 'causal, .*×256,'",
    )
    parser.add_argument(
        "--unseen",
        type=int,
        metavar="SEED",
        help="of the grid, calls drawn by this seed instead, which no table of costs was fitted to: how well the table "
        "in use chooses",
    )
    parser.add_argument("--calls", type=int, default=100, metavar="N", help="number of --unseen calls (default: 100)")
    parser.add_argument("--resume", action="store_true", help="of the grid, only what the output folder does not have")
    parser.add_argument(
        "--cached", action="store_true", help="of the grid, compile nothing beforehand: an earlier run has"
    )
    parser.add_argument(
        "--phases", action="store_true", help="time statistics, quantising and attention of our calls apart"
    )
    parser.add_argument(
        "--host", action="store_true", help="time what small calls cost on the host, instead of the GPU"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write one JSON that tells what this GPU does with our recipes (machine, kernels, errors, speeds), to be "
        "sent to us; kernels that nobody has run on such a GPU are tried, last",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="of a model, at most (default: what takes about 1 s)")
    parser.add_argument("--compiled", action="store_true", help="models with compiled blocks, too")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 (default: cuda)")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="default: output")


def execute(args: argparse.Namespace, commit: str = "") -> None:
    """Measure, write <gpu>-forward.json and its pictures to the output folder, and print tables.

    With --training it is <gpu>-forward_backward.json; with --model <gpu>-models.json and a picture; with --grid
    <gpu>-grid.json and a heat map, or with --unseen <gpu>-unseen.json; with --phases <gpu>-phases.json; with --host
    <gpu>-host.json; with --report the file that it names.

    Args:
        args: of `add_arguments`.
        commit: of the source measured, for the record.

    Raises:
        ValueError: no CUDA device, no matplotlib, an unknown name of a shape, model or provider, or arguments that
            exclude each other.
    """
    if sum((args.grid, args.phases, args.host, args.model is not None, args.report is not None)) > 1:
        raise ValueError("--grid, --phases, --host, --model and --report exclude each other")
    if args.report is not None:
        _execute_report(args, commit)
        return
    if args.host:
        _execute_host(args, commit)
        return
    if args.grid:
        _execute_grid(args, commit)
        return
    if args.model is not None:
        _execute_models(args, commit)
        return
    if args.layers is not None or args.compiled:
        raise ValueError("--layers and --compiled need --model")
    if args.part != "1/1" or args.only or args.resume or args.cached or args.unseen is not None:
        raise ValueError("--part, --only, --resume, --cached and --unseen need --grid")
    if args.phases and (args.training or args.providers is not None):
        raise ValueError("--phases times the forward passes of our recipes: it takes no --training or --providers")
    shapes = [Shape.parse(text) for text in args.shape]
    if args.shapes is not None or not shapes:
        shapes = _chosen("--shapes", args.shapes, TRAINING_SHAPES if args.training else SHAPES) + shapes
    if args.phases:
        _execute_phases(args, shapes, commit)
        return
    providers = _chosen("--providers", args.providers, TRAINING_PROVIDERS if args.training else PROVIDERS)
    device = _gpu(args.device)
    plots.require_matplotlib()
    run = measure_training.run if args.training else measure.run
    result = run(device, shapes, providers, commit, _progress)
    args.output.mkdir(parents=True, exist_ok=True)
    benchmark = "forward_backward" if args.training else "forward"
    path = _path(args.output, result, benchmark)
    path.write_text(tables.to_json(result), encoding="utf-8")
    print(tables.text(result))
    pictures = plots.plot(result, path.with_suffix(".png"))
    print(f"\nwrote {path}, {', '.join(picture.name for picture in pictures)}")


def _execute_models(args: argparse.Namespace, commit: str) -> None:
    """Measure models in the order in which they are named, and write <gpu>-models.json after each.

    Rows that this file has of other models and providers stay, if machine, versions and commit are the same.
    """
    if args.training or args.shapes is not None or args.shape:
        raise ValueError("--model times whole models: it takes no --training, --shapes or --shape")
    if args.layers is not None and args.layers < 1:
        raise ValueError(f"--layers {args.layers}: a model has at least 1")
    models = _chosen("--model", None if ALL in args.model else args.model, MODELS)
    models.sort(key=lambda model: args.model.index(model.name) if model.name in args.model else 0)
    providers = _chosen("--providers", args.providers, (*MODEL_PROVIDERS, *TRAINING_MODEL_PROVIDERS))
    device = _gpu(args.device)
    args.output.mkdir(parents=True, exist_ok=True)

    def write(result: dict[str, Any]) -> None:
        path = _path(args.output, result, "models")
        with replacing(path) as part:
            part.write_text(tables.to_json(merged(result, kept.get(path))), encoding="utf-8")

    kept = {path: json.loads(path.read_text(encoding="utf-8")) for path in args.output.glob("*-models.json")}
    result = measure_models.run(
        device,
        models,
        providers,
        commit,
        _progress,
        args.layers,
        args.compiled,
        write,
    )
    print(tables.model_text(result))
    path = _path(args.output, result, "models")
    whole = json.loads(path.read_text(encoding="utf-8"))
    drawn = plots.has_matplotlib() and tables.model_gains(whole)
    picture = f", {plots.plot_models(whole, path.with_suffix('.png')).name}" if drawn else ""
    print(f"\nwrote {path}{picture}")


def _execute_phases(args: argparse.Namespace, shapes: Sequence[Shape], commit: str) -> None:
    """Measure the phases of our calls, and write <gpu>-phases.json."""
    device = _gpu(args.device)
    result = measure_phases.run(device, shapes, commit, _progress)
    args.output.mkdir(parents=True, exist_ok=True)
    path = _path(args.output, result, "phases")
    path.write_text(tables.to_json(result), encoding="utf-8")
    print(tables.phases_text(result))
    print(f"\nwrote {path}")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _execute_grid(args: argparse.Namespace, commit: str) -> None:
    """Measure points of the grid, write <gpu>-grid.json as they come, and draw it if matplotlib is installed.

    Rows that this file has of other points stay, if machine, versions and commit are the same.
    """
    if args.shape or args.providers is not None or args.layers is not None or args.compiled:
        raise ValueError("--grid has its own calls and providers: it takes no --shape, --providers or --layers")
    kinds = list(dict.fromkeys(point.kind for point in POINTS))
    if unknown := set(args.shapes or ()).difference(kinds):
        raise ValueError(f"--shapes: unknown {', '.join(sorted(unknown))}; choose from: {'; '.join(kinds)}")
    unseen = args.unseen is not None
    points = [
        point
        for point in (unseen_points(args.calls, args.unseen) if unseen else POINTS)
        if (args.shapes is None or point.kind in args.shapes) and (point.training or not args.training)
    ]
    if args.only:
        points = [point for point in points if args.only.search(str(point))]
        if not points:
            raise ValueError(f"--only {args.only.pattern}: no call of the grid contains that")
    points = points[_part(args.part, len(points))]
    device = _gpu(args.device)
    args.output.mkdir(parents=True, exist_ok=True)
    path = _path(args.output, measure.facts(device, commit), "unseen" if unseen else "grid")
    drawn = {"seed": args.unseen, "table": table_in_use(device)} if unseen else {}
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if args.resume:
        empty = {**measure.facts(device, commit), "rows": []}
        there = {grid_tables.key(row) for row in grid_tables.merged(empty, kept)["rows"]}
        points = [point for point in points if grid_tables.key(point.sizes | drawn) not in there]

    def write(result: dict[str, Any]) -> None:
        result = {**result, "rows": [row | drawn for row in result["rows"]]}
        with replacing(path) as part:
            part.write_text(tables.to_json(grid_tables.merged(result, kept)), encoding="utf-8")

    measure_grid.run(device, points, commit, _progress, write, warms=not args.cached)
    result = json.loads(path.read_text(encoding="utf-8"))
    print(grid_tables.unseen_text(result) if unseen else grid_tables.text(result))
    drawable = plots.has_matplotlib() and not unseen
    picture = f", {plots.plot_grid(result, path.with_suffix('.png')).name}" if drawable else ""
    print(f"\nwrote {path}{picture}")


def _part(text: str, count: int) -> slice:
    """Return the slice of `count` points that I/N says; raise ValueError if it says none."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ValueError(f"--part {text}: expected I/N with 1 ≤ I ≤ N, such as 2/3")
    return slice(count * (int(part) - 1) // int(parts), count * int(part) // int(parts))


def _execute_host(args: argparse.Namespace, commit: str) -> None:
    """Measure host time, write <gpu>-host.json and print a table."""
    if args.training or args.compiled or any(x is not None for x in (args.model, args.shapes, args.providers)):
        raise ValueError("--host times calls of one small shape: it takes --device and --output alone")
    result = measure_host.run(
        _gpu(args.device), commit=commit, progress=lambda line: print(line, file=sys.stderr, flush=True)
    )
    args.output.mkdir(parents=True, exist_ok=True)
    path = _path(args.output, result, "host")
    path.write_text(tables.to_json(result), encoding="utf-8")
    print(f"{measure_host.text(result)}\n\nwrote {path}")


def _execute_report(args: argparse.Namespace, commit: str) -> None:
    """Report on the GPU, write the file as parts of it come, and print tables."""
    if args.training or args.compiled or any(x is not None for x in (args.shapes, args.providers, args.layers)):
        raise ValueError("--report has its own calls and providers: it takes --device alone")
    device = _gpu(args.device)
    args.report.parent.mkdir(parents=True, exist_ok=True)

    def write(result: dict[str, Any]) -> None:
        with replacing(args.report) as part:
            part.write_text(tables.to_json(result), encoding="utf-8")

    result = report.run(device, write, commit, _progress)
    print(f"{report.text(result)}\n\nwrote {args.report}")


def merged(result: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return a result of models with the rows that an earlier one has of other models, modes and providers.

    They stay only if everything but the date is the same: machine, versions and commit. Rows come in the order of
    MODELS.
    """
    ignored = ("rows", "date")
    facts = {name: value for name, value in result.items() if name not in ignored}
    if before is None or facts != {name: value for name, value in before.items() if name not in ignored}:
        return result

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return row["name"], row["mode"], row["provider"]

    rows = {key(row): row for row in (*before["rows"], *result["rows"])}
    order = {model.name: index for index, model in enumerate(MODELS)}
    return {**result, "rows": sorted(rows.values(), key=lambda row: order.get(row["name"], len(order)))}


def _path(folder: Path, result: dict[str, Any], benchmark: str) -> Path:
    return folder / f"{re.sub('[^a-z0-9]+', '-', result['gpu'].lower())}-{benchmark}.json"


def _gpu(name: str) -> torch.device:
    """Return the device; raise ValueError if it is no CUDA device of this machine."""
    device = torch.device(name)
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {name}: the benchmark times GPU kernels and needs a CUDA device, of which there are "
            f"{torch.cuda.device_count()} here; `sage-hf env` shows what runs without one"
        )
    return device


def _names(known: Sequence[Named]) -> str:
    return ", ".join(dict.fromkeys(one.name for one in known))


def _chosen(option: str, names: Sequence[str] | None, known: Sequence[Named]) -> list[Named]:
    """Return those of `known` that have one of the names; all if no names are given. Raise ValueError for others."""
    if unknown := set(names or ()).difference(one.name for one in known):
        raise ValueError(f"{option}: unknown {', '.join(sorted(unknown))}; choose from: {_names(known)}")
    return [one for one in known if names is None or one.name in names]
