"""Plots of a benchmark's JSON: speed against length, speed against error, speed of training, every call, models."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_hf.bench import grid_tables, model_tables
from sage_hf.bench.providers import Provider
from sage_hf.bench.tables import Columns, common_shape, heading, is_training, measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"fa3": "#3f6fb5", "cudnn": "#2a9d6f", "sageattention2": "#8a6bbf", "sdpa_fa2": "#8c8c8c"}
"""Colours of the providers that are drawn against length; sage-hf is drawn in OUR_COLOR."""
OUR_COLOR = "#d1402f"
PALE_COLOR = "#e58e83"
OTHER_COLOR = "#8c8c8c"
GRID_SPAN = 2.5  # in the heat map, this many times as fast, or as slow, has the full colour
LABEL_GAP = 0.045  # smallest distance between labels, as a fraction of the axes' height


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise ValueError if matplotlib is not installed, and say how to install it."""
    if not has_matplotlib():
        raise ValueError('the plot needs matplotlib: pip install "sage-hf[benchmarks]"')


def plot(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the result of `measure.run`; return the files written.

    Args:
        result: the benchmark's JSON.
        path: file of the plot of speeds. For forward passes a second file, whose name ends in "-errors", shows speed
            against error.

    Raises:
        ValueError: matplotlib is not installed, or nothing was measured.
    """
    require_matplotlib()
    columns = measured(result)
    if not columns:
        raise ValueError("no provider measured anything, so there is nothing to plot")
    if is_training(result):
        figures = {path: _training_figure(columns, result["gpu"])}
    else:
        errors = path.with_stem(f"{path.stem}-errors")
        figures = {path: length_figure(columns, result["gpu"]), errors: _error_figure(columns, result["gpu"])}
    for file, figure in figures.items():
        figure.savefig(file, dpi=120)
    return list(figures)


def plot_grid(result: dict[str, Any], path: Path) -> Path:
    """Draw the grid's heat map, speed by tokens and kind of call, to a file; return the file.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    kinds, columns, speeds = grid_tables.cells(result)
    figure = Figure(figsize=(9.5, 1.6 + 0.36 * len(kinds)), layout="constrained")
    axes = figure.subplots()
    # Red is slower and blue faster; a speed of GRID_SPAN has the full colour.
    norm = TwoSlopeNorm(0.0, -math.log2(GRID_SPAN), math.log2(GRID_SPAN))
    colors = [[math.nan if math.isnan(speed) else math.log2(speed) for speed in line] for line in speeds]
    axes.imshow(colors, cmap="RdBu", norm=norm, aspect="auto")
    for y, line in enumerate(speeds):
        for x, speed in enumerate(line):
            if not math.isnan(speed):
                strong = abs(math.log2(speed)) > 0.7 * math.log2(GRID_SPAN)
                axes.text(x, y, f"{speed:.2f}", ha="center", va="center", fontsize=8, color="w" if strong else "k")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set(xlabel="tokens from … on: queries or keys, whichever are more")
    axes.spines[:].set_visible(False)
    figure.suptitle(f"Speed of attention relative to the fastest exact one on {result['gpu']}: 1 is as fast")
    figure.savefig(path, dpi=120)
    return path


def plot_models(result: dict[str, Any], path: Path) -> Path:
    """Draw the speed of each model's step relative to the baseline, and the step's kernels, to a file; return the file.

    Raises:
        ValueError: matplotlib is not installed, or no model was measured with both the baseline and sage-hf.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    gains = sorted(model_tables.model_gains(result), key=lambda gain: gain.ratio)
    if not gains:
        raise ValueError("no model was measured with both the baseline and sage-hf, so there is nothing to plot")
    figure = Figure(figsize=(11.5, 1.6 + 0.34 * len(gains)), layout="constrained")
    axes = figure.subplots()
    colors = [OUR_COLOR if gain.low_bit else PALE_COLOR for gain in gains]
    bars = axes.barh(range(len(gains)), [gain.ratio for gain in gains], 0.76, color=colors)
    axes.bar_label(bars, [f"{gain.ratio:.2f} ×: {gain.what_ran}" for gain in gains], padding=4, fontsize=8)
    axes.axvline(1.0, color=OTHER_COLOR, lw=1)
    modes = ("" if gain.mode == "eager" else f", {gain.mode}" for gain in gains)
    axes.set_yticks(range(len(gains)), [gain.label + mode for gain, mode in zip(gains, modes, strict=True)])
    axes.set(xlabel="speed of a step relative to the baseline; after it, the attention calls of a step by kernel")
    axes.set_xlim(0, 1.9 * max(gain.ratio for gain in gains))  # room for the longest label
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= max(gain.ratio for gain in gains)])
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.02)
    parts = {"low-bit attention": OUR_COLOR, "exact attention only": PALE_COLOR}
    axes.legend(handles=[Patch(color=color, label=label) for label, color in parts.items()], loc="lower right")
    figure.suptitle(f"Steps of models on {result['gpu']}, with sage-hf")
    figure.savefig(path, dpi=120)
    return path


def length_figure(columns: Columns, gpu: str) -> Figure:
    """Draw speed against length for our fastest recipe and other providers, with labels at the ends of the lines."""
    from matplotlib.figure import Figure

    ours = _our_fastest(columns)
    drawn_columns = {
        provider: rows for provider, rows in columns.items() if provider is ours or _is_drawn_peer(provider)
    }
    head_dims = sorted({shape.head_dim for rows in drawn_columns.values() for shape in rows}, reverse=True)
    figure = Figure(figsize=(5.5 * len(head_dims), 4.2), layout="constrained")
    labels: dict[Axes, dict[Provider, tuple[float, float]]] = {}
    panels = figure.subplots(1, len(head_dims), squeeze=False, sharey=True)
    for axes, head_dim in zip(panels[0], head_dims, strict=True):
        ends: dict[Provider, tuple[float, float]] = {}
        for provider, rows in drawn_columns.items():
            points = sorted(
                (shape.q_len, row["tflops"])
                for shape, row in rows.items()
                if shape.head_dim == head_dim and not shape.upper_left
            )
            if points:
                width = 2.6 if provider is ours else 1.5
                axes.plot(*zip(*points, strict=True), color=_color(provider, ours), marker="o", markersize=4, lw=width)
                ends[provider] = points[-1]
        _frame(axes, f"head_dim {head_dim}")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda tokens, position: f"{tokens / 1024:g}k")
        axes.set(xlabel="tokens")
        labels[axes] = ends
    panels[0][0].set(ylabel="TFLOP/s")
    for axes, ends in labels.items():
        _label_ends(axes, ends, ours)
    figure.suptitle(f"Attention on {gpu}: forward, bfloat16 in and out, quantisation included")
    return figure


def _label_ends(axes: Axes, ends: dict[Provider, tuple[float, float]], ours: Provider | None) -> None:
    """Write each line's name after its end, from the lowest upwards, and move names apart that would overlap."""
    top = axes.get_ylim()[1]
    lowest = 0.0
    for provider, (tokens, speed) in sorted(ends.items(), key=lambda item: item[1][1]):
        height = max(speed, lowest)
        lowest = height + LABEL_GAP * top
        axes.annotate(
            heading(provider),
            (tokens, height),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=_color(provider, ours),
            fontweight="bold" if provider is ours else "normal",
            annotation_clip=False,
        )


def _error_figure(columns: Columns, gpu: str) -> Figure:
    """Draw speed against error for every provider at one shape, sage-hf in colour and labelled on the left."""
    from matplotlib.figure import Figure

    shape = common_shape(columns)
    # Each provider appears once: end to end if that was measured, else the kernel alone.
    by_name: dict[str, Provider] = {}
    for provider in sorted(columns, key=lambda provider: provider.scope == "end_to_end"):
        if shape in columns[provider] and not provider.name.endswith("_triton"):
            by_name[provider.name] = provider
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for provider in by_name.values():
        row = columns[provider][shape]
        is_ours = provider.ours
        color = OUR_COLOR if is_ours else OTHER_COLOR
        place = (row["rel_l1_biased"], row["tflops"])
        axes.plot(*place, "o", color=color, markerfacecolor=color if provider.scope == "end_to_end" else "none")
        axes.annotate(
            heading(provider),
            place,
            xytext=(-8 if is_ours else 8, 0),
            textcoords="offset points",
            ha="right" if is_ours else "left",
            va="center",
            color=color,
            fontweight="bold" if is_ours else "normal",
        )
    axes.set_xscale("log")
    axes.margins(x=0.25)
    axes.set(xlabel="relative L1 error, where K and V have means", ylabel="TFLOP/s")
    _frame(axes, f"{shape}, quantisation included; hollow: without")
    figure.suptitle(f"Speed against error on {gpu}")
    return figure


def _training_figure(columns: Columns, gpu: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots()
    shapes = list(dict.fromkeys(shape for rows in columns.values() for shape in rows))
    width = 0.8 / len(columns)
    for index, (provider, rows) in enumerate(columns.items()):
        places = [
            place + (index - (len(columns) - 1) / 2) * width for place, shape in enumerate(shapes) if shape in rows
        ]
        speeds = [rows[shape]["tflops"] for shape in shapes if shape in rows]
        bars = axes.bar(places, speeds, width * 0.94, color=_bar_color(provider))
        axes.bar_label(bars, [heading(provider)] * len(speeds), rotation=90, label_type="center", color="w", fontsize=8)
    axes.set_xticks(range(len(shapes)), [str(shape).replace(", ", "\n") for shape in shapes])
    axes.set(ylabel="TFLOP/s")
    _frame(axes, "")
    figure.suptitle(f"Attention on {gpu}: forward and backward, bfloat16, every pass included")
    return figure


def _our_fastest(columns: Columns) -> Provider | None:
    """Return our fastest provider end to end, at the shape that most providers measured; None if none was measured."""
    shape = common_shape(columns)
    speeds = {
        provider: rows[shape]["tflops"]
        for provider, rows in columns.items()
        if provider.ours and provider.scope == "end_to_end" and shape in rows
    }
    return max(speeds, key=speeds.__getitem__, default=None)


def _is_drawn_peer(provider: Provider) -> bool:
    """Return whether a provider is drawn next to sage-hf: cuDNN, FA3 and SageAttention2, end to end."""
    return provider.scope == "end_to_end" and provider.name in ("cudnn", "fa3", "sageattention2")


def _color(provider: Provider, ours: Provider | None) -> str:
    return OUR_COLOR if provider is ours else COLORS[provider.name]


def _bar_color(provider: Provider) -> str:
    if provider.ours:
        return OUR_COLOR if provider.name == "sage_hf:sage_bwd" else PALE_COLOR
    return COLORS[provider.name]


def _frame(axes: Axes, title: str) -> None:
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize="medium")
