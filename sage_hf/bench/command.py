"""The command line of the benchmark: measure, write, print."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

from sage_hf.bench import measure, plots, tables
from sage_hf.bench.peers import PROVIDERS
from sage_hf.bench.shapes import SHAPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `execute`."""
    shapes, providers = [shape.name for shape in SHAPES], list(dict.fromkeys(one.name for one in PROVIDERS))
    parser.add_argument(
        "--shapes", nargs="+", choices=shapes, default=shapes, metavar="SHAPE", help=f"of {', '.join(shapes)}"
    )
    parser.add_argument(
        "--providers",
        nargs="+",
        choices=providers,
        default=providers,
        metavar="NAME",
        help=f"of {', '.join(providers)}",
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 (default: cuda)")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="default: output")


def execute(args: argparse.Namespace, commit: str = "") -> None:
    """Measure, write <gpu>-forward.json and .png into the output folder, print the tables.

    Args:
        args: of `add_arguments`.
        commit: of the source measured, for the record.

    Raises:
        ValueError: no CUDA device, or no matplotlib.
    """
    device = torch.device(args.device)
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {args.device}: the benchmark times GPU kernels and needs a CUDA device, of which there are "
            f"{torch.cuda.device_count()} here; `sage-hf env` shows what runs without one"
        )
    plots.require_matplotlib()
    result = measure.run(
        device,
        [shape for shape in SHAPES if shape.name in args.shapes],
        [one for one in PROVIDERS if one.name in args.providers],
        commit,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"{re.sub('[^a-z0-9]+', '-', result['gpu'].lower())}-forward.json"
    path.write_text(tables.to_json(result), encoding="utf-8")
    print(tables.text(result))
    plots.plot(result, path.with_suffix(".png"))
    print(f"\nwrote {path} and {path.with_suffix('.png').name}")
