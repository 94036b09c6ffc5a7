"""Tables of the grid: shares, means and the worst calls, as text, as Markdown and as cells of the heat map."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from sage_hf.bench.cases import BenchCase
from sage_hf.bench.measure_grid import SIZES
from sage_hf.bench.results import BenchmarkResult, Row
from sage_hf.bench.tables import not_measured, versions
from sage_hf.text import markdown_table, text_table
from sage_kernels.dispatch.cost_model import FA3_HOST_US

ENOUGH = 0.97
"""Smallest speed relative to the fastest other attention that counts as not slower."""
TOLERABLE = 0.9
"""Speed below which no unseen call should be."""
LONG_MS = FA3_HOST_US / 1000
"""Time from which every exact kernel is chosen by its time on the GPU: shorter calls wait for the host."""
TABLES = {"shipped": "that ships", "tuned": "of `sage-hf tune`", "none": "none"}
LONG_KEYS = 4096
"""Number of keys from which low bits are expected to gain."""
WORST = 3
EXACT_ALLOWANCE_US = 25.0
"""Host time that an exact call may take beyond the best provider's."""
LOW_BIT_ALLOWANCE_US = 45.0
"""Host time that a low-bit call may take beyond the best provider's."""

TOKENS = (1, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Smallest number of tokens in each column of the heat map."""


def key(row: Row) -> tuple[Any, ...]:
    """Return the key of a row: its call, and the table of costs by which an unseen call chose."""
    return (row["kind"], *(row[name] for name in SIZES), row.get("table"))


def ratio(row: Row) -> float:
    """Return our speed relative to the fastest other attention."""
    return row["best_ms"] / row["ours_ms"]


def measured(result: BenchmarkResult) -> list[Row]:
    """Return the rows that have times."""
    return [row for row in result["rows"] if "ours_ms" in row]


def geometric_mean(numbers: Iterable[float]) -> float:
    """Return the geometric mean; NaN of no numbers."""
    logarithms = [math.log(number) for number in numbers]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan


def summary(result: BenchmarkResult) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the table by kind of call, with all calls in the last line."""
    header = ["calls", "number", "low bits ran", f"at least {ENOUGH:g}", "geometric mean", "smallest"]
    header += [f"geometric mean from {LONG_KEYS:,} keys on", "host time within limits"]
    rows = measured(result)
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in rows)}
    return header, [_summary_line(kind, of_kind) for kind, of_kind in {**kinds, "all": rows}.items()]


def _summary_line(name: str, rows: Sequence[Row]) -> list[str]:
    long = [ratio(row) for row in rows if row["kv_len"] >= LONG_KEYS]
    low = sum(row["recipe"] != "exact" for row in rows)
    return [
        name,
        str(len(rows)),
        str(low),
        _share(ratio(row) >= ENOUGH for row in rows),
        f"{geometric_mean(map(ratio, rows)):.2f}",
        f"{min(map(ratio, rows)):.2f}" if rows else "–",
        f"{geometric_mean(long):.2f}" if long else "–",
        _share(map(has_host_time_within_limits, rows)),
    ]


def unseen(results: Iterable[BenchmarkResult]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the scores of unseen calls: a line for each GPU and table of costs."""
    header = ["GPU", "table of costs", "unseen calls", "low bits ran", f"at least {ENOUGH:g}"]
    header += [f"at least {TOLERABLE:g}", f"of {FA3_HOST_US:g} µs and more, both", "geometric mean", "smallest"]
    lines = []
    for result in results:
        for table in dict.fromkeys(row["table"] for row in result["rows"]):
            rows = [row for row in measured(result) if row["table"] == table]
            ratios, long = list(map(ratio, rows)), [ratio(row) for row in rows if row["best_ms"] >= LONG_MS]
            lines.append(
                [
                    result["gpu"],
                    TABLES[table],
                    str(len(rows)),
                    str(sum(row["recipe"] != "exact" for row in rows)),
                    _share(speedup >= ENOUGH for speedup in ratios),
                    _share(speedup >= TOLERABLE for speedup in ratios),
                    ", ".join(_share(speedup >= least for speedup in long) for least in (ENOUGH, TOLERABLE)),
                    f"{geometric_mean(ratios):.2f}",
                    f"{min(ratios):.2f}" if ratios else "–",
                ]
            )
    return header, lines


def unseen_markdown(results: Sequence[BenchmarkResult]) -> str:
    """Return the scores of unseen calls on several GPUs, and the slowest calls of each, as Markdown tables."""
    parts = [markdown_table(*unseen(results))]
    for result in results:
        seeds = ", ".join(dict.fromkeys(str(row["seed"]) for row in result["rows"]))
        parts += [f"The {WORST} slowest, drawn by seed {seeds}:", markdown_table(*worst(result)), caption(result)]
    return "\n\n".join(parts)


def unseen_text(result: BenchmarkResult) -> str:
    """Return the scores of unseen calls, the slowest calls, and calls that could not be timed, for a terminal."""
    return "\n\n".join([text_table(*unseen([result])), text_table(*worst(result)), caption(result), *_missing(result)])


def _share(held: Iterable[bool]) -> str:
    flags = list(held)
    return f"{sum(flags) / len(flags):.0%}" if flags else "–"


def has_host_time_within_limits(row: Row) -> bool:
    """Return whether our call's host time is within the limit: the best provider's time plus the allowance."""
    limit = EXACT_ALLOWANCE_US if row["recipe"] == "exact" else LOW_BIT_ALLOWANCE_US
    return row["ours_host_us"] <= row["best_host_us"] + limit


def worst(result: BenchmarkResult) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the WORST calls, beginning with the lowest ratio."""
    header = ["call", "ran", "ours, ms", "best, ms", "best", "ours is faster by", "host, µs", "best's host, µs"]
    cells = [
        [
            _call(row),
            f"{row['recipe']} by {row['kernel']}",
            f"{row['ours_ms']:.4f}",
            f"{row['best_ms']:.4f}",
            row["best"],
            f"{ratio(row):.2f}",
            f"{row['ours_host_us']:.0f}",
            f"{row['best_host_us']:.0f}",
        ]
        for row in sorted(measured(result), key=ratio)[:WORST]
    ]
    return header, cells


def _call(row: Row) -> str:
    return f"{row['kind']}, {BenchCase.of_row(row)}"


def markdown(result: BenchmarkResult) -> str:
    """Return the summary and the worst calls as Markdown tables."""
    slowest = f"The {WORST} slowest:"
    return "\n\n".join((markdown_table(*summary(result)), slowest, markdown_table(*worst(result)), caption(result)))


def text(result: BenchmarkResult) -> str:
    """Return the tables for a terminal, and calls that could not be timed."""
    tables = text_table(*summary(result)), text_table(*worst(result))
    return "\n\n".join([caption(result), *tables, *_missing(result)])


def _missing(result: BenchmarkResult) -> list[str]:
    rows = [row for row in result["rows"] if "unavailable" in row]
    return not_measured({f"{_call(row)}: {row['unavailable']}": [] for row in rows})


def caption(result: BenchmarkResult) -> str:
    """Return a sentence that explains the numbers."""
    return (
        f"Our speed relative to the fastest of PyTorch's backends and FlashAttention 3: {len(measured(result))} calls"
        f" on {result['gpu']}; batch × heads (query/key) × tokens (queries·keys) × head_dim; "
        "bfloat16, quantisation included, GPU time of CUDA graph replays. The limit of host time is the best "
        f"provider's and {EXACT_ALLOWANCE_US:.0f} µs more where exact attention runs, or {LOW_BIT_ALLOWANCE_US:.0f} µs "
        f"more where low bits run. {versions(result)}"
    )


def cells(result: BenchmarkResult) -> tuple[list[str], list[str], list[list[float]]]:
    """Return (kinds, labels of the columns, geometric mean of the speed in each cell of the heat map, NaN if empty)."""
    rows = measured(result)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    bounds = (*TOKENS, math.inf)
    means = [
        [
            geometric_mean(
                ratio(row) for row in rows if row["kind"] == kind and low <= max(row["q_len"], row["kv_len"]) < high
            )
            for low, high in itertools.pairwise(bounds)
        ]
        for kind in kinds
    ]
    labels = [str(low) if low < 1024 else f"{low // 1024}k" for low in TOKENS]
    return kinds, [*(f"{low}–" for low in labels[:-1]), f"{labels[-1]}+"], means
