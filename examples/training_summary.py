"""Print the table of the training experiments in docs/training.md, from their results:

python examples/training_summary.py examples/results
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training_report import markdown, mean_and_spread

RECIPES = ("exact", "sage_bwd", "sage_bwd_int8")
STAGES = (("pretrain", "Llama (no QK-norm)"), ("pretrain", "Qwen 3 (QK-norm)"), ("finetune", ""))
TITLES = (
    "Llama of 25 M weights, from nothing, 500 steps: held-out loss (nats a byte)",
    "the same with QK-norm (Qwen 3)",
    "the Llama, fine-tuned on other text, 200 steps",
)


def summary(language_model: Mapping[str, Any], tiny_video: Mapping[str, Any]) -> str:
    """Return the Markdown table: results of training with each recipe, then of running those models with others."""
    rows = []
    for (stage, name), title in zip(STAGES, TITLES, strict=True):
        group = language_model[stage][name] if name else next(iter(language_model[stage].values()))
        rows.append([title, *(mean_and_spread(_final_losses(group["runs"], recipe)) for recipe in RECIPES)])
    trained = {row["trained_with"]: row for row in language_model["evaluate"]["rows"]}
    for run_with in ("exact", "sage2", "sage3"):
        perplexities = (mean_and_spread(trained[recipe]["perplexity"][run_with], 3) for recipe in RECIPES)
        rows.append([f"— its perplexity a byte, run with `{run_with}`", *perplexities])
    losses = (mean_and_spread(_final_losses(tiny_video["finetune"]["runs"], recipe)) for recipe in RECIPES)
    rows.append(["tiny video model, taught the opposite directions, 400 steps: held-out loss", *losses])
    trained = {row["trained_with"]: row for row in tiny_video["evaluate"]["rows"]}
    for run_with in ("exact", "sage3"):
        scores = ([seed[run_with] for seed in trained[recipe]["seeds"]] for recipe in RECIPES)
        counts = (f"{sum(s['all'] for s in seeds)} of {sum(s['prompts'] for s in seeds)}" for seeds in scores)
        rows.append([f"— its clips right in colour, shape and direction, run with `{run_with}`", *counts])
    return markdown(["", *(recipe if recipe == "exact" else f"`{recipe}`" for recipe in RECIPES)], rows)


def _final_losses(runs: list[dict[str, Any]], recipe: str) -> list[float | None]:
    return [run["curve"][-1]["held_out_loss"] for run in runs if run["settings"]["recipe"] == recipe]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent / "results"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="of the results (default: %(default)s)")
    paths = [parser.parse_args().folder / f"{name}.json" for name in ("language_model", "tiny_video")]
    if missing := [path for path in paths if not path.is_file()]:
        parser.error(f"{missing[0]} does not exist: the other two scripts of docs/training.md write it")
    print(summary(*(json.loads(path.read_text(encoding="utf-8")) for path in paths)))
