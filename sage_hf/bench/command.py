"""The command line of the benchmark: measure, write, print."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch

from sage_hf.bench import measure, measure_training, plots, tables
from sage_hf.bench.peers import PROVIDERS, Provider
from sage_hf.bench.shapes import SHAPES, TRAINING_SHAPES, Shape
from sage_hf.bench.training_peers import TRAINING_PROVIDERS

Named = TypeVar("Named", Shape, Provider)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `execute` to the parser."""
    parser.add_argument("--training", action="store_true", help="forward and backward (default: forward)")
    names = (
        ("--shapes", "SHAPE", _names(SHAPES), _names(TRAINING_SHAPES)),
        ("--providers", "NAME", _names(PROVIDERS), _names(TRAINING_PROVIDERS)),
    )
    for option, metavar, forward, training in names:
        text = f"of {forward}; with --training of {training} (default: all)"
        parser.add_argument(option, nargs="+", metavar=metavar, help=text)
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="B,Hq,Hkv,N,D[,causal]",
        help="any other shape: batch, query heads, key heads, tokens, head_dim; repeatable",
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 (default: cuda)")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="default: output")


def execute(args: argparse.Namespace, commit: str = "") -> None:
    """Measure, write <gpu>-forward.json (or -forward_backward) and its pictures to the output folder, print tables.

    Args:
        args: of `add_arguments`.
        commit: of the source measured, for the record.

    Raises:
        ValueError: no CUDA device, no matplotlib, or an unknown name of a shape or provider.
    """
    shapes = [Shape.parse(text) for text in args.shape]
    if args.shapes is not None or not shapes:
        shapes = _chosen("--shapes", args.shapes, TRAINING_SHAPES if args.training else SHAPES) + shapes
    providers = _chosen("--providers", args.providers, TRAINING_PROVIDERS if args.training else PROVIDERS)
    device = torch.device(args.device)
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {args.device}: the benchmark times GPU kernels and needs a CUDA device, of which there are "
            f"{torch.cuda.device_count()} here; `sage-hf env` shows what runs without one"
        )
    plots.require_matplotlib()
    run = measure_training.run if args.training else measure.run
    result = run(device, shapes, providers, commit, lambda line: print(line, file=sys.stderr, flush=True))
    args.output.mkdir(parents=True, exist_ok=True)
    benchmark = "forward_backward" if args.training else "forward"
    path = args.output / f"{re.sub('[^a-z0-9]+', '-', result['gpu'].lower())}-{benchmark}.json"
    path.write_text(tables.to_json(result), encoding="utf-8")
    print(tables.text(result))
    pictures = plots.plot(result, path.with_suffix(".png"))
    print(f"\nwrote {path}, {', '.join(picture.name for picture in pictures)}")


def _names(known: Sequence[Named]) -> str:
    return ", ".join(dict.fromkeys(one.name for one in known))


def _chosen(option: str, names: Sequence[str] | None, known: Sequence[Named]) -> list[Named]:
    """Return those of `known` that have one of the names; all if no names are given. Raise ValueError for others."""
    if unknown := set(names or ()).difference(one.name for one in known):
        raise ValueError(f"{option}: unknown {', '.join(sorted(unknown))}; choose from: {_names(known)}")
    return [one for one in known if names is None or one.name in names]
