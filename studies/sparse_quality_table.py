"""Markdown tables of sparse attention in a trained model."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sage_hf.text import markdown_table

PROMPTS = 48
ATTRIBUTES = ("colour", "shape", "direction", "all")
TRAININGS = {"dense": "dense, exact", "vsa": "VSA"}


def markdown(result: dict[str, Any]) -> str:
    """Return two tables: the trained models, and the scores of each variant, as means and ranges over seeds."""
    training = [row for row in result["training"] if is_whole(result, row)]
    rows = [row for row in result["rows"] if "score" in row and is_whole(result, row)]
    size, steps, seeds = result["size"], training[0]["steps"], {row["seed"] for row in rows}
    tokens = f"{size['tokens']:,} tokens ({size['frames']} frames of {size['pixels']}×{size['pixels']} pixels)"
    head = (
        f"A Wan transformer of {size['layers']} layers, {size['heads']} heads of {size['head_dim']}, {tokens}, trained "
        f"from the same weights on the same batches: {steps:,} steps of {size['batch']} clips, {len(seeds)} "
        f"{'seed' if len(seeds) == 1 else 'seeds'}, {result['gpu']}:"
    )
    trained = []
    for name in dict.fromkeys(row["trained"] for row in training):
        of_kind = [row for row in training if row["trained"] == name]
        label = TRAININGS[name] + ("" if name == "dense" else f", {result['sparsity']:.0%} of tiles left out")
        trained.append([label, _spread([row["held_out_loss"] for row in of_kind], 4)])
    sampling = result["sampling"]
    prompts = (
        f"Their clips of {PROMPTS} held-out prompts ({sampling['steps']} steps, guidance {sampling['guidance']:g}). "
        "Tiles and weight: the shares of tiles and of attention weight that sparse calls kept (mean, and the lowest "
        "layer's). PSNR and SSIM: against the same weights with exact attention (for VSA, with an exact fine stage), "
        "from the same noise. Flicker: the mean difference of successive frames, relative to exact attention. Colour, "
        "shape, direction, all: the number of clips that match the prompt (by chance 6, 12, 12 and .4)"
        + (". Numbers are means, and the lowest and highest seed:" if len(seeds) > 1 else ":")
    )
    runs = []
    for name, run in dict.fromkeys((row["trained"], row["run"]) for row in rows):
        rows_of_run = [row for row in rows if (row["trained"], row["run"]) == (name, run)]
        weight = "–"
        if "mass" in rows_of_run[0]:
            weight = f"{_percent(rows_of_run, 'mass')} ({_percent(rows_of_run, 'least_layer_mass')})"
        quality = [_number(rows_of_run, key, digits) for key, digits in (("psnr", 1), ("ssim", 3), ("flicker", 2))]
        scores = [_spread([row["score"][attribute] for row in rows_of_run], 1) for attribute in ATTRIBUTES]
        runs.append([TRAININGS[name], f"`{run}`", _percent(rows_of_run, "tiles"), weight, *quality, *scores])
    header = ["trained", "run with", "tiles", "weight", "PSNR", "SSIM", "flicker", *ATTRIBUTES]
    table = markdown_table(["attention in training", "held-out loss"], trained)
    return "\n\n".join((head, table, prompts, markdown_table(header, runs)))


def is_whole(result: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return whether a row's model was judged in as many variants as any model with the same training.

    A run whose time was over has judged its last model only in part.
    """
    judged = Counter(
        (judged_row["trained"], judged_row["seed"]) for judged_row in result["rows"] if "score" in judged_row
    )
    counts = [count for (trained, _), count in judged.items() if trained == row["trained"]]
    return bool(counts) and judged[row["trained"], row["seed"]] == max(counts)


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def _spread(values: Sequence[float], digits: int) -> str:
    """Return the mean, and the range if there are several values; whole numbers have no decimals."""
    low, high = (str(x) if isinstance(x, int) else f"{x:.{digits}f}" for x in (min(values), max(values)))
    return low if len(values) == 1 else f"{_mean(values):.{digits}f} ({low} to {high})"


def _percent(rows: list[dict[str, Any]], key: str) -> str:
    return f"{_mean(row[key] for row in rows):.0%}" if key in rows[0] else "–"


def _number(rows: list[dict[str, Any]], key: str, digits: int) -> str:
    return _spread([row[key] for row in rows], digits) if key in rows[0] else "–"
