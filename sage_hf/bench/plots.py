"""Speed against length, and speed against error, from a benchmark's JSON."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sage_hf.bench.peers import Provider
from sage_hf.bench.tables import common_shape, heading, measured


def require_matplotlib() -> None:
    """Raise ValueError where matplotlib is not installed, saying how to install it."""
    if find_spec("matplotlib") is None:
        raise ValueError('the plot needs matplotlib: pip install "sage-hf[benchmarks]"')


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the result of `measure.run` into an image file.

    Raises:
        ValueError: matplotlib is not installed, or nothing was measured.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    columns = measured(result)
    if not columns:
        raise ValueError("no provider measured anything, so there is nothing to plot")
    head_dims = sorted({shape.head_dim for rows in columns.values() for shape in rows}, reverse=True)
    figure = Figure(figsize=(6 * (len(head_dims) + 1), 5), layout="constrained")
    *by_length, by_error = figure.subplots(1, len(head_dims) + 1)
    colors = {one: f"C{index % 10}" for index, one in enumerate(dict.fromkeys(one.name for one in columns))}

    def style(one: Provider) -> dict[str, Any]:
        return {
            "color": colors[one.name],
            "marker": "s" if one.name.startswith("sage_hf") else "o",
            "linestyle": "--" if one.scope == "kernel" else "-",
            "markerfacecolor": "none" if one.scope == "kernel" else colors[one.name],
        }

    for axes, head_dim in zip(by_length, head_dims, strict=True):
        for one, rows in columns.items():
            points = sorted(
                (shape.tokens, row["tflops"])
                for shape, row in rows.items()
                if shape.head_dim == head_dim and not shape.causal
            )
            if points:
                axes.plot(*zip(*points, strict=True), label=heading(one), **style(one))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda tokens, position: f"{tokens / 1024:g}k")
        axes.set(xlabel="tokens", ylabel="TFLOP/s", title=f"head_dim {head_dim}, not causal")
    shape = common_shape(columns)
    for one, rows in columns.items():
        if shape in rows:
            by_error.plot(rows[shape]["rel_l1_biased"], rows[shape]["tflops"], label=heading(one), **style(one))
    by_error.set(xscale="log", xlabel="rel-L1 error, K and V biased", ylabel="TFLOP/s", title=str(shape))
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=7, fontsize="small")
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(f"Attention forward, {result['gpu']} (solid: end to end; dashed, hollow: kernel alone)")
    figure.savefig(path, dpi=120)
