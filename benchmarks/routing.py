"""Measure what calls cost on this GPU, fit the table of costs that routes them, and judge its choices on drawn calls.

python benchmarks/routing.py --output benchmarks/results --table kernels/sage_kernels/cost_tables/9.0.json
python benchmarks/routing.py --grid GRID.json --table kernels/sage_kernels/cost_tables/9.0.json

The first command writes <gpu>-routing.json, whose rows {set, sizes, mask, causal, us by runner, chosen} are the
inference calls that the table was fitted to and those drawn, and prints how many of the choices take longer than the
fastest runner. What was chosen is the recipe or the exact kernel. The second one measures nothing: the table learns the
calls of a grid.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from record import git_commit

from sage_hf.bench import measure, tune
from sage_hf.bench.calls import Kind, Point, compile_kernels
from sage_hf.bench.fit_costs import Measured, extended, fit
from sage_hf.bench.grid_costs import measured_on_grid
from sage_kernels import costs
from sage_kernels.costs import Table
from sage_kernels.curves import Sizes

RECIPE = "sage2"
DRAWN = 76
KINDS: tuple[Kind, ...] = ("none", "none", "none", "causal", "keys", "causal_keys", "bool", "additive")
HEAD_DIMS = (64, 64, 128, 128, 128, 72, 80, 96, 256)
TEXT_LENGTHS = (77, 120, 226, 256, 300, 512, 800)
FAST_ENOUGH = 0.97


def draw_points(count: int, seed: int = 0) -> list[Point]:
    """Return calls of drawn kinds and sizes, some of them cross-attention to few keys."""
    draw, points = random.Random(seed), []
    while len(points) < count:
        kind, head_dim = draw.choice(KINDS), draw.choice(HEAD_DIMS)
        batch, heads = draw.choice((1, 1, 2, 3, 4, 8)), draw.choice((5, 8, 10, 12, 16, 20, 24, 32, 40))
        q_len = kv_len = int(2 ** draw.uniform(8, 14.3))
        if kind == "none" and draw.random() < 0.3:
            kv_len = draw.choice(TEXT_LENGTHS)
        kv_heads = heads // 4 if heads % 4 == 0 and draw.random() < 0.3 else heads
        point = Point(Sizes(batch, heads, kv_heads, q_len, kv_len, head_dim), kind)
        if point.operations <= tune.MAX_OPERATIONS:
            points.append(point)
    return points


def rows_of(name: str, measured: Iterable[Measured], table: Table) -> list[dict[str, Any]]:
    """Return one row for each call, with what the table chooses for it."""
    calls: dict[tuple[Sizes, str, bool], dict[str, float]] = {}
    for one in measured:
        if one.runner.endswith(costs.TRAINING):
            continue
        calls.setdefault((one.sizes, one.mask, one.causal), {})[one.runner] = round(one.us, 1)
    rows = []
    for (sizes, mask, causal), us in calls.items():
        runner = next((runner for runner in us if runner.startswith(f"{RECIPE} ")), "")
        low_bit = table.curve(runner, mask, causal, sizes.head_dim)
        exact = table.exact(mask, causal, sizes.head_dim, [name for name in us if " by " not in name])
        chosen = min(exact, key=lambda curve: curve.us(sizes)).runner if exact else "exact"
        if costs.SHARING in us:
            chosen = costs.SHARING
        elif low_bit and exact and costs.is_faster(low_bit, exact, sizes):
            chosen = RECIPE
        rows.append({"set": name, **asdict(sizes), "mask": mask, "causal": causal, "us": us, "chosen": chosen})
    return rows


def speed(row: dict[str, Any], choice: str) -> float:
    """Return the time of the fastest runner ÷ that of a choice; below the host's time for a call, the GPU's is that."""
    rivals = {name: time for name, time in row["us"].items() if " by " not in name or name.startswith(f"{RECIPE} ")}
    us = {name.split()[0]: max(time, costs.EXACT_HOST_US) for name, time in rivals.items()}
    return min(us.values()) / us.get(choice, min(us.values()))


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a line for each set of calls: how many are slow in low bits throughout, and as they are routed."""
    lines = []
    for name, group in itertools.groupby(rows, key=lambda row: row["set"]):
        measured = list(group)
        always = [speed(row, RECIPE) for row in measured]
        routed = [speed(row, row["chosen"]) for row in measured]
        lines.append(
            f"{name}: {len(measured)} calls; below {FAST_ENOUGH}: {sum(x < FAST_ENOUGH for x in always)} in low bits, "
            f"{sum(x < FAST_ENOUGH for x in routed)} routed; least {min(always):.2f}, {min(routed):.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR")
    parser.add_argument("--table", type=Path, metavar="JSON", help="where to write the table of costs as well")
    parser.add_argument("--seconds", type=float, default=tune.SECONDS, help="of measuring each of the two sets")
    parser.add_argument("--grid", type=Path, metavar="JSON", help="a grid's result, of which the table is to know")
    args = parser.parse_args()
    if args.grid:
        if not args.table:
            parser.error("--grid needs the --table that it extends")
        measured_there = measured_on_grid(json.loads(args.grid.read_text(encoding="utf-8"))["rows"])
        extended(costs.read_table(args.table), measured_there).write(args.table)
        return
    device = torch.device("cuda")
    sets = {"fitted": tune.points(), "drawn": draw_points(DRAWN)}
    compile_kernels(device, tune.calls_to_compile([*sets["fitted"], *sets["drawn"]]))
    measured = {name: list(tune.measure_points(device, points, args.seconds)) for name, points in sets.items()}
    properties = torch.cuda.get_device_properties(device)
    curves = fit(measured["fitted"], properties.multi_processor_count)
    table = Table(properties.name, (properties.major, properties.minor), tune.versions(), curves)
    if args.table:
        table.write(args.table)
    rows = [row for name, found in measured.items() for row in rows_of(name, found, table)]
    facts = json.dumps(measure.facts(device, git_commit()))[:-1]
    lines = ",\n".join(map(json.dumps, rows))
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"{properties.name.lower().replace(' ', '-')}-routing.json"
    path.write_text(f'{facts}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"wrote {path}\n{summary(rows)}")


if __name__ == "__main__":
    main()
