"""Tables of a benchmark's JSON at named shapes, and of the phases of calls, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sage_hf.bench.cases import BenchCase
from sage_hf.bench.providers import PROVIDERS, TRAINING_PROVIDERS, Provider
from sage_hf.bench.results import BenchmarkResult, Row
from sage_hf.text import markdown_table, text_table

MISSING = "–"
Columns = dict[Provider, dict[BenchCase, Row]]
"""The rows of each provider, by case."""


def markdown(result: BenchmarkResult) -> str:
    """Return a Markdown table of the speed of every provider at every shape; the fastest end to end is bold.

    For training, a second table has errors and memory at one shape.
    """
    parts = [markdown_table(*_speeds(result)), _caption(result)]
    if is_training(result) and (columns := measured(result)):
        shape = common_shape(columns)
        parts += [markdown_table(*_training_at_shape(columns, shape)), _training_caption(shape)]
    return "\n\n".join(parts)


def text(result: BenchmarkResult) -> str:
    """Return tables for a terminal: speeds, errors and memory at one shape, and providers that could not run."""
    parts = [_caption(result), text_table(*_speeds(result, bold=False))]
    if columns := measured(result):
        shape = common_shape(columns)
        at_shape = _training_at_shape if is_training(result) else _at_shape
        parts += [f"At {shape}:", text_table(*at_shape(columns, shape))]
    return "\n\n".join([*parts, *_unavailable(result)])


def phases_markdown(result: BenchmarkResult) -> str:
    """Return the result of `measure_phases.run` as a Markdown table."""
    caption = (
        f"On {result['gpu']}, from a profiler's trace; a phase counts from the end of the previous phase. Shares "
        f"are of a copy's bandwidth, {result['copy_bandwidth'] * 1e-12:.2f} TB/s, counted in the same way. "
        f"{versions(result)}"
    )
    return f"{markdown_table(*_phases(result))}\n\n{caption}"


def phases_text(result: BenchmarkResult) -> str:
    """Return the result of `measure_phases.run` as a table for a terminal, and calls that could not run."""
    missing: dict[str, list[str]] = {
        f"{row['shape']}, {row['what']}: {row['unavailable']}": [] for row in result["rows"] if "unavailable" in row
    }
    parts = [f"Phases on {result['gpu']}. {versions(result)}", text_table(*_phases(result))]
    return "\n\n".join([*parts, *not_measured(missing)])


def _phases(result: BenchmarkResult) -> tuple[list[str], list[list[str]]]:
    rows_by_phase: dict[tuple[str, str], dict[str, Row]] = {}
    for row in result["rows"]:
        if "ms" in row:
            rows_by_phase.setdefault((str(BenchCase.of_row(row)), row["what"]), {})[row["phase"]] = row
    phases = ("statistics", "quantize", "attention", "whole")
    copied = ("statistics", "quantize", "whole")
    header = ["call", "of", *(f"{phase}, ms" for phase in phases), *(f"{phase}, of a copy" for phase in copied)]
    cells = []
    for names, rows in rows_by_phase.items():
        times = (f"{rows[phase]['ms']:.4f}" if phase in rows else MISSING for phase in phases)
        shares = (rows.get(phase, {}).get("copy_share") for phase in copied)
        cells.append([*names, *times, *(MISSING if share is None else f"{share:.0%}" for share in shares)])
    return header, cells


def rows_of(result: BenchmarkResult, provider: Provider) -> dict[BenchCase, Row]:
    """Return the rows that one provider measured, by shape."""
    return {
        BenchCase.of_row(row): row
        for row in result["rows"]
        if (row["provider"], row["scope"]) == (provider.name, provider.scope) and "tflops" in row
    }


def measured(result: BenchmarkResult) -> Columns:
    """Return the rows of each provider that has any, in the order of PROVIDERS or TRAINING_PROVIDERS."""
    providers = TRAINING_PROVIDERS if is_training(result) else PROVIDERS
    rows_by_provider = {provider: rows_of(result, provider) for provider in providers}
    return {provider: rows for provider, rows in rows_by_provider.items() if rows}


def is_training(result: BenchmarkResult) -> bool:
    """Return whether the result comes from a run of training."""
    return any(row["direction"] == "forward_backward" for row in result["rows"])


def _speeds(result: BenchmarkResult, bold: bool = True) -> tuple[list[str], list[list[str]]]:
    columns = measured(result)
    header = ["shape", *map(heading, columns)]
    cells = []
    for shape in dict.fromkeys(map(BenchCase.of_row, result["rows"])):
        speeds = {provider: rows[shape]["tflops"] for provider, rows in columns.items() if shape in rows}
        fastest = max((speed for provider, speed in speeds.items() if provider.scope == "end_to_end"), default=None)
        line = [f"{shape.name}: {shape}"]
        for provider in columns:
            cell = f"{speeds[provider]:.0f}" if provider in speeds else MISSING
            line.append(
                f"**{cell}**" if bold and provider.scope == "end_to_end" and speeds.get(provider) == fastest else cell
            )
        cells.append(line)
    return header, cells


def common_shape(columns: Columns) -> BenchCase:
    """Return the shape that most providers measured; if several, the shape with most operations."""
    shapes = {shape for rows in columns.values() for shape in rows}
    return max(shapes, key=lambda shape: (sum(shape in rows for rows in columns.values()), shape.operations))


def _at_shape(columns: Columns, shape: BenchCase) -> tuple[list[str], list[list[str]]]:
    header = ["provider", "ms", "rel-L1", "rel-L1, K and V biased", "extra memory / Q, K, V", "first call, s"]
    cells = []
    for provider, rows in columns.items():
        if row := rows.get(shape):
            memory = f"{row['peak_extra_bytes'] / shape.input_bytes:.2f}" if "peak_extra_bytes" in row else MISSING
            errors = [f"{row[name]:.4f}" for name in ("rel_l1", "rel_l1_biased")]
            cells.append([heading(provider), f"{row['ms']:.2f}", *errors, memory, f"{row['compile_s']:.1f}"])
    return header, cells


def _training_at_shape(columns: Columns, shape: BenchCase) -> tuple[list[str], list[list[str]]]:
    header = ["provider", "forward, ms", "backward, ms"]
    header += [f"{name} rel-L1 (biased)" for name in ("O", "dQ", "dK", "dV")]
    header += ["kept for backward, MB", "extra memory / Q, K, V", "first step, s"]
    cells = []
    for provider, rows in columns.items():
        if row := rows.get(shape):
            errors = [
                f"{row[f'{name}_rel_l1']:.4f} ({row[f'{name}_rel_l1_biased']:.4f})"
                for name in ("output", "dq", "dk", "dv")
            ]
            memory = [f"{row['saved_bytes'] / 1e6:.0f}", f"{row['peak_extra_bytes'] / shape.input_bytes:.2f}"]
            times = [f"{row['forward_ms']:.2f}", f"{row['backward_ms']:.2f}"]
            cells.append([heading(provider), *times, *errors, *memory, f"{row['compile_s']:.1f}"])
    return header, cells


def _training_caption(shape: BenchCase) -> str:
    return (
        f"At {shape}. Errors of the output and of the gradients against exact attention in float64, on standard normal "
        "tensors and, in brackets, where K and V have means. Kept for backward: allocated between the passes, with "
        "query, key, value and output where the graph keeps them."
    )


def heading(provider: Provider) -> str:
    """Return the provider's name for readers."""
    return f"{provider.label} (kernel)" if provider.scope == "kernel" else provider.label


def _caption(result: BenchmarkResult) -> str:
    sizes = "batch × heads (query/key) × tokens × head_dim"
    if is_training(result):
        direction = (
            f"forward and backward, 3.5 × forward's operations; {sizes}; bfloat16 in and out, every pass included"
        )
    else:
        direction = (
            f"forward; {sizes}; bfloat16 in and out with quantisation included; (kernel): quantised before, attention "
            "alone"
        )
    return f"TFLOP/s on {result['gpu']}, {direction}. {versions(result)}"


def versions(result: BenchmarkResult) -> str:
    """Return the versions, commit and date of a result; rows that were measured earlier name their own commit."""
    versions = ", ".join(f"{name} {result[name]}" for name in ("torch", "triton", "cuda"))
    source = f"commit {result['commit'][:10]}, " if result["commit"] else ""
    labels = {provider.name: provider.label for provider in TRAINING_PROVIDERS + PROVIDERS}
    earlier_rows = (row for row in result.get("rows", []) if "commit" in row)
    earlier = dict.fromkeys((labels[row["provider"]], row["commit"]) for row in earlier_rows)
    others = "".join(f"; {label}: commit {commit[:10]}" for label, commit in earlier)
    return f"{versions}, {source}{result['date']}{others}."


def _unavailable(result: BenchmarkResult) -> list[str]:
    shapes = dict.fromkeys(row["shape"] for row in result["rows"])
    missing: dict[str, list[str]] = {}
    for row in result["rows"]:
        if "unavailable" in row:
            missing.setdefault(f"{row['provider']}, {row['scope']}: {row['unavailable']}", []).append(row["shape"])
    return not_measured(
        {failure: ["all shapes"] if len(where) == len(shapes) else where for failure, where in missing.items()}
    )


def not_measured(missing: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a paragraph about failures and where they occurred; none if nothing failed."""
    lines = [f"  {failure} ({'; '.join(where)})" if where else f"  {failure}" for failure, where in missing.items()]
    return ["\n".join(["Not measured:", *lines])] if lines else []
