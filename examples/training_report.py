"""Reports of training experiments: resumable parts of a result, comparisons over seeds, and tables."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_hf.files import replacing
from sage_hf.text import markdown_table

BASELINE = "exact"
RECIPES = ("exact", "sage_bwd", "sage_bwd_int8")
STAGES = (("pretrain", "Llama (no QK-norm)"), ("pretrain", "Qwen 3 (QK-norm)"), ("finetune", ""))
TITLES = (
    "Llama of 25 M weights, from nothing, 500 steps: held-out loss (nats a byte)",
    "the same with QK-norm (Qwen 3)",
    "the Llama, fine-tuned on other text, 200 steps",
)


def finite(value: float) -> float | None:
    """Return the number rounded to 6 digits, for JSON; None if it is NaN or infinite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def resume_or_run(path: Path, settings: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the part of a result in the file `path`; if there is no file, make the part by `run` and write it there.

    Args:
        path: a JSON file.
        settings: everything that the part depends on, as plain data; stored with the part.
        run: makes the part.

    Raises:
        SystemExit: the file was made with other settings.
    """
    settings = json.loads(json.dumps(settings))
    if path.exists():
        part = json.loads(path.read_text())
        differing = [name for name in settings if part["settings"].get(name) != settings[name]]
        if differing:
            raise SystemExit(
                f"{path} was made with another {', '.join(differing)}: delete it, or give another --run-dir"
            )
        return part
    part = {"settings": settings, **run()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(part, indent=1, allow_nan=False) + "\n")
    return part


def update_result(path: Path, section: str, value: dict[str, Any]) -> None:
    """Set one section of a result's JSON file, which need not exist yet."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content[section] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def final_losses(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float | None]]:
    """Return recipe → seed → the held-out loss at the end of the run."""
    found: dict[str, dict[int, float | None]] = {}
    for run in runs:
        settings = run["settings"]
        found.setdefault(settings["recipe"], {})[settings["seed"]] = run["curve"][-1]["held_out_loss"]
    return found


def compare(final_losses: Mapping[str, Mapping[int, float | None]]) -> dict[str, dict[str, Any]]:
    """Compare the final losses of every recipe with exact attention's.

    Args:
        final_losses: recipe → seed → loss, None if the run diverged. Runs of one seed saw the same data in the same
            order from the same initial weights, so their difference is due to the recipe.

    Returns:
        recipe → "diverged" (number of such runs), "mean" and "spread" (standard deviation over the seeds); and, if
        exact attention ran the same seeds, "differences" to it by seed, their "mean_difference" and
        "difference_spread", and "within_seed_noise": whether the mean difference is at most the spread of exact
        attention. Values that cannot be computed are None.
    """
    baseline = final_losses.get(BASELINE, {})
    noise = _spread(baseline.values())
    table: dict[str, dict[str, Any]] = {}
    for recipe, by_seed in final_losses.items():
        row: dict[str, Any] = {
            "diverged": sum(loss is None for loss in by_seed.values()),
            "mean": _mean(by_seed.values()),
            "spread": _spread(by_seed.values()),
        }
        if recipe != BASELINE and by_seed.keys() <= baseline.keys():
            differences: dict[str, float | None] = {}
            for seed, loss in by_seed.items():
                exact = baseline[seed]
                differences[str(seed)] = None if loss is None or exact is None else finite(loss - exact)
            mean = _mean(differences.values())
            row |= {
                "differences": differences,
                "mean_difference": mean,
                "difference_spread": _spread(differences.values()),
                "within_seed_noise": None if mean is None or noise is None else abs(mean) <= noise,
            }
        table[recipe] = row
    return table


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean; None if a value is None, or if there are no values."""
    known = _known(values)
    return finite(statistics.fmean(known)) if known else None


def _spread(values: Iterable[float | None]) -> float | None:
    """Return the standard deviation; None if a value is None, or if there are fewer than two values."""
    known = _known(values)
    return finite(statistics.stdev(known)) if len(known) > 1 else None


def _known(values: Iterable[float | None]) -> list[float]:
    """Return the values, or an empty list if one of them is None."""
    values = list(values)
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def number(value: float | bool | None, digits: int = 4) -> str:
    """Return the text of a table's cell; a dash for None."""
    if value is None:
        return "–"
    return str(value) if isinstance(value, bool) else f"{value:.{digits}f}"


def mean_and_spread(values: Iterable[float | None], digits: int = 4) -> str:
    """Return the text of a cell: "mean ± standard deviation", or the mean alone if there is no deviation."""
    values = list(values)
    spread = _spread(values)
    return number(_mean(values), digits) + ("" if spread is None else f" ± {number(spread, digits)}")


def comparison_table(comparison: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the result of `compare` as a Markdown table."""
    header = ["trained with", "final held-out loss", "spread over seeds", "mean difference to exact", "its spread"]
    rows = [
        [
            recipe + (f" ({row['diverged']} diverged)" if row["diverged"] else ""),
            number(row["mean"]),
            number(row["spread"]),
            number(row.get("mean_difference"), 5),
            number(row.get("difference_spread"), 5),
            number(row.get("within_seed_noise")),
        ]
        for recipe, row in comparison.items()
    ]
    return markdown_table([*header, "within seed noise"], rows)


def summary(language_model: Mapping[str, Any], tiny_video: Mapping[str, Any]) -> str:
    """Return a Markdown table of both experiments: training with each recipe, then inference of the trained models."""

    def losses(runs: Sequence[Mapping[str, Any]]) -> list[str]:
        found = final_losses(runs)
        return [mean_and_spread(found[recipe].values()) for recipe in RECIPES]

    rows = []
    for (stage, name), title in zip(STAGES, TITLES, strict=True):
        group = language_model[stage][name] if name else next(iter(language_model[stage].values()))
        rows.append([title, *losses(group["runs"])])
    trained = {row["trained_with"]: row for row in language_model["evaluate"]["rows"]}
    for run_with in ("exact", "sage2", "sage3"):
        perplexities = (mean_and_spread(trained[recipe]["perplexity"][run_with], 3) for recipe in RECIPES)
        rows.append([f"— its perplexity a byte, run with `{run_with}`", *perplexities])
    title = "tiny video model, taught the opposite directions, 400 steps: held-out loss"
    rows.append([title, *losses(tiny_video["finetune"]["runs"])])
    trained = {row["trained_with"]: row for row in tiny_video["evaluate"]["rows"]}
    for run_with in ("exact", "sage3"):
        scores = ([seed[run_with] for seed in trained[recipe]["seeds"]] for recipe in RECIPES)
        counts = (f"{sum(s['all'] for s in seeds)} of {sum(s['prompts'] for s in seeds)}" for seeds in scores)
        rows.append([f"— its clips right in colour, shape and direction, run with `{run_with}`", *counts])
    return markdown_table(["", *(recipe if recipe == "exact" else f"`{recipe}`" for recipe in RECIPES)], rows)
