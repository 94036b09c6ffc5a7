"""Measure forward attention: our recipes beside SDPA, cuDNN, FA3 and the authors' SageAttention, on this GPU.

python benchmarks/forward.py --output benchmarks/results
python benchmarks/forward.py --render benchmarks/results/nvidia-h200-forward.json

The first command measures and writes <gpu>-forward.json and .png, as `sage-hf bench` does on a user's GPU. The second
draws the plot of a JSON again and prints its table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from record import git_commit

from sage_hf.bench import command, grid_tables, plots, tables


def main(description: str | None = __doc__, **defaults: object) -> None:
    """Run a benchmark's script: parse arguments, which have these defaults, then measure, or render a JSON."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    parser.set_defaults(**defaults)
    parser.add_argument("--commit", help="of the source, for the record (default: the checkout's)")
    parser.add_argument("--render", type=Path, metavar="JSON", help="measure nothing: plot and table of this file")
    args = parser.parse_args()
    if args.render:
        result = json.loads(args.render.read_text(encoding="utf-8"))
        if args.grid:
            plots.plot_grid(result, args.render.with_suffix(".png"))
            print(grid_tables.markdown(result))
            return
        if args.model:
            if tables.model_gains(result):
                plots.plot_models(result, args.render.with_suffix(".png"))
            print(f"{tables.model_gain(result)}\n\n{tables.model_speed(result)}")
            return
        plots.plot(result, args.render.with_suffix(".png"))
        print(tables.markdown(result))
    else:
        command.execute(args, git_commit() if args.commit is None else args.commit)


if __name__ == "__main__":
    main()
