"""Speed against length or by shape, and speed against error, from a benchmark's JSON."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_hf.bench.peers import Provider
from sage_hf.bench.shapes import Shape
from sage_hf.bench.tables import common_shape, heading, is_training, measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Columns = dict[Provider, dict[Shape, dict[str, Any]]]


def require_matplotlib() -> None:
    """Raise ValueError where matplotlib is not installed, saying how to install it."""
    if find_spec("matplotlib") is None:
        raise ValueError('the plot needs matplotlib: pip install "sage-hf[benchmarks]"')


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the result of `measure.run` or `measure_training.run` into an image file.

    Raises:
        ValueError: matplotlib is not installed, or nothing was measured.
    """
    require_matplotlib()
    columns = measured(result)
    if not columns:
        raise ValueError("no provider measured anything, so there is nothing to plot")
    figure = _training_figure(columns) if is_training(result) else _forward_figure(columns)
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=7, fontsize="small")
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    what = "forward and backward" if is_training(result) else "forward"
    note = "" if is_training(result) else " (solid: end to end; dashed, hollow: kernel alone)"
    figure.suptitle(f"Attention {what}, {result['gpu']}{note}")
    figure.savefig(path, dpi=120)


def _forward_figure(columns: Columns) -> Figure:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    head_dims = sorted({shape.head_dim for rows in columns.values() for shape in rows}, reverse=True)
    figure = Figure(figsize=(6 * (len(head_dims) + 1), 5), layout="constrained")
    *by_length, by_error = figure.subplots(1, len(head_dims) + 1)
    names = dict.fromkeys(one.name for one in columns)
    colors = {name: colormaps["tab20"](index % 20) for index, name in enumerate(names)}

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
    return figure


def _training_figure(columns: Columns) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    by_shape, by_error = figure.subplots(1, 2, width_ratios=(2, 1))
    shapes = list(dict.fromkeys(shape for rows in columns.values() for shape in rows))
    common, width = common_shape(columns), 0.8 / len(columns)
    for index, (one, rows) in enumerate(columns.items()):
        places = [
            place + (index - (len(columns) - 1) / 2) * width for place, shape in enumerate(shapes) if shape in rows
        ]
        speeds = [rows[shape]["tflops"] for shape in shapes if shape in rows]
        by_shape.bar(places, speeds, width, color=f"C{index}", label=heading(one))
        if row := rows.get(common):
            by_error.plot(max(row[f"{name}_rel_l1"] for name in ("dq", "dk", "dv")), row["tflops"], f"C{index}o")
    by_shape.set_xticks(range(len(shapes)), [str(shape).replace(", ", "\n") for shape in shapes])
    by_shape.set(ylabel="TFLOP/s")
    by_error.set(xscale="log", xlabel="largest rel-L1 error of dQ, dK, dV", ylabel="TFLOP/s", title=str(common))
    return figure
