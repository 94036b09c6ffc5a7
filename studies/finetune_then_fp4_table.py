"""Markdown table of a language model that was fine-tuned, and then answers, with several attentions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sage_hf.text import markdown_table

INFERENCE = ("exact", "sage3", "sage3_paper")
TRAINED_WITH = {"exact": "exact, bfloat16", "sage_bwd": "`sage_bwd`", "fp8": "FP8, both passes"}
ANSWERED_WITH = {"exact": "exact", "sage3": "`sage3`", "sage3_paper": "the published FP4 recipe"}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each training: means over its seeds, and their range."""
    lines = []
    for method, training in dict.fromkeys((row["method"], row["training"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["training"]) == (method, training)]
        of_training = [row for row in mine if row["inference"] == INFERENCE[0]]
        rights = ([row["right"] for row in mine if row["inference"] == name] for name in INFERENCE)
        losses = _range([row["loss"] for row in of_training], ".3f")
        how = {"lora": "LoRA", "full": "all weights"}[method]
        seeds = f"{len(of_training)}"
        lines.append([f"{TRAINED_WITH[training]} ({how})", seeds, losses, *(_range(right, ".1%") for right in rights)])
    answers = (f"right, run with {ANSWERED_WITH[name]}" for name in INFERENCE)
    return markdown_table(["trained with", "seeds", "last loss", *answers], lines)


def _range(values: Sequence[float], form: str) -> str:
    """Return the mean, and the range of several values."""
    mean = f"{statistics.mean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"
