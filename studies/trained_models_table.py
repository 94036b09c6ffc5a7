"""Tables of the effect of low-bit attention in trained language models (`trained_models`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sage_hf.bench.providers import PROVIDERS
from sage_hf.text import markdown_table

LABELS = {provider.name: provider.label for provider in PROVIDERS if not provider.ours} | {
    "exact": "exact",
    "sdpa_fa2": "exact, by FA2",
    "cudnn": "exact, by cuDNN",
}
"""Names of attentions that are not recipes."""
PREDICTIONS = ("change of perplexity", "KL", "same top token")
"""Columns of `language_models.Differences`."""


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a result: perplexity, found facts, and answers."""
    return "\n\n".join((perplexity_markdown(result["rows"]), found_markdown(result["needles"], result["answers"])))


def perplexity_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the changes of predictions, with a line for each measured model, length and attention.

    The number after ± is the standard error over tokens.
    """
    lines = [
        [row["model"], f"{row['tokens']:,}", str(row["samples"]), _label(row["recipe"]), *_predictions(row)]
        for row in rows
        if "unavailable" not in row
    ]
    return markdown_table(["model", "tokens", "texts", "attention", *PREDICTIONS], lines)


def cost_markdown(rows: Sequence[dict[str, Any]], recipes: Sequence[str]) -> str:
    """Return a short table of the changes of perplexity, a line for each model and length, a column for each recipe."""
    changes = {(row["model"], row["tokens"], row["recipe"]): row for row in rows if "unavailable" not in row}
    lines = []
    for model, tokens in dict.fromkeys((model, tokens) for model, tokens, _ in changes):
        changes_of_recipes = [changes.get((model, tokens, recipe)) for recipe in recipes]
        cells = ["–" if row is None else _percent(row["ppl_change"], "+") for row in changes_of_recipes]
        lines.append([f"{model}, {tokens:,} tokens", *cells])
    return markdown_table(["change of perplexity", *map(_label, recipes)], lines)


def found_markdown(needles: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]) -> str:
    """Return a table of the facts found at all depths, and of the answers' kept tokens.

    An answer's kept tokens are the tokens before its first difference from the answer with exact attention.
    """
    lengths = sorted({row["tokens"] for row in needles})
    lines = []
    for model, recipe in dict.fromkeys((row["model"], row["recipe"]) for row in (*needles, *answers)):
        cells = []
        for tokens in lengths:
            needles_of_cell = [
                row for row in needles if (row["model"], row["recipe"], row["tokens"]) == (model, recipe, tokens)
            ]
            counts = [(sum(row["found"].values()), row["of"] * len(row["found"])) for row in needles_of_cell]
            cells += [f"{count} of {total}" for count, total in counts] or ["–"]
        answers_of_recipe = [row for row in answers if (row["model"], row["recipe"]) == (model, recipe)]
        lines.append([model, _label(recipe), *cells, _kept(answers_of_recipe)])
    header = ["model", "attention", *(f"facts found in {tokens:,} tokens" for tokens in lengths), "greedy tokens kept"]
    return markdown_table(header, lines)


def cache_markdown(result: dict[str, Any]) -> str:
    """Return a table of predictions through each KV cache: of a text, and of facts and greedy answers."""
    lines = []
    for row in result["rows"]:
        row_needles, row_answers = (
            [candidate for candidate in result[table] if all(candidate.get(key, row[key]) == row[key] for key in keys)]
            for table, keys in (("needles", ("model", "tokens", "format")), ("answers", ("model", "format")))
        )
        lines.append(
            [
                row["model"],
                f"{row['tokens']:,}",
                row["format"],
                *_predictions(row),
                ", ".join(
                    f"{sum(needle['found'].values())} of {needle['of'] * len(needle['found'])}"
                    for needle in row_needles
                ),
                _kept(row_answers),
            ]
        )
    return markdown_table(["model", "tokens", "cache", *PREDICTIONS, "facts found", "greedy tokens kept"], lines)


def _predictions(row: dict[str, Any]) -> list[str]:
    change = f"{_percent(row['ppl_change'], '+')} ± {_percent(row['standard_error'])}"
    return [change, f"{row['kl']:.4f}", f"{row['same_top']:.3f}"]


def _kept(answers: Sequence[dict[str, Any]]) -> str:
    kept_tokens = f"{sum(row['same_beginning'] for row in answers)} of {sum(row['tokens'] for row in answers)}"
    return kept_tokens if answers else "–"


def _label(name: str) -> str:
    return LABELS.get(name, f"`{name}`")


def _percent(fraction: float, sign: str = "") -> str:
    return f"{100 * fraction:{sign}.2f} %"
