"""Measure on this GPU the numbers in the tables of README and docs.

    python benchmarks/run.py --output benchmarks/results               # forward attention at named shapes
    python benchmarks/run.py --grid --output benchmarks/results        # and so on, with all options of `sage-hf bench`
    python benchmarks/run.py --unseen 33 --output benchmarks/results   # random calls of the grid's kinds, by a seed
    python benchmarks/run.py qk-norm-rope --output benchmarks/results  # norm and RoPE of queries
    python benchmarks/run.py first-calls --output benchmarks/results   # first calls, with empty and with full caches
    python benchmarks/run.py sparse --output benchmarks/results        # attention over block lists
    python benchmarks/run.py kv-cache --output benchmarks/results      # low-bit KV caches of a layer; or --model
    torchrun --nproc-per-node 2 benchmarks/run.py parallel --output benchmarks/results   # models on several GPUs

A benchmark writes <gpu>-<benchmark>.json; `python docs/pages.py` draws the pictures and fills in the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import first_calls
import kv_cache
import parallel
import qk_norm_rope
import sparse

from sage_hf.bench import command, grid_tables
from sage_hf.tune.tune import table_in_use, unseen_points

BENCHMARKS = {
    "qk-norm-rope": qk_norm_rope,
    "first-calls": first_calls,
    "sparse": sparse,
    "kv-cache": kv_cache,
    "parallel": parallel,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    parser.add_argument(
        "--unseen",
        type=int,
        metavar="SEED",
        help="time calls of the grid's kinds that this seed draws, and that no table of costs was fitted to: how well "
        "the table in use chooses",
    )
    parser.add_argument("--calls", type=int, default=100, metavar="N", help="number of --unseen calls (default: 100)")
    benchmarks = parser.add_subparsers(dest="benchmark", metavar=" | ".join(BENCHMARKS))
    for name, module in BENCHMARKS.items():
        description = module.__doc__ or ""
        benchmark_parser = benchmarks.add_parser(
            name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        benchmark_parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR")
        if hasattr(module, "add_arguments"):
            module.add_arguments(benchmark_parser)
    args = parser.parse_args(argv)
    if args.benchmark:
        BENCHMARKS[args.benchmark].execute(args)
    elif args.unseen is not None:
        measure_unseen(args)
    else:
        command.execute(args)


def measure_unseen(args: argparse.Namespace) -> None:
    """Measure random calls, write <gpu>-unseen.json after each, and print how well routing chose."""
    device = command.gpu(args.device)
    draw_facts = {"seed": args.unseen, "table": table_in_use(device)}
    path, result = command.measure_calls(args, "unseen", unseen_points(args.calls, args.unseen), draw_facts)
    print(f"{grid_tables.unseen_text(result)}\n\nwrote {path}")


if __name__ == "__main__":
    main()
