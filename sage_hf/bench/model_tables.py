"""Tables of models' steps, from the benchmark's JSON: the gain, its parts, and every provider's time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sage_hf.bench.model_providers import MODEL_PROVIDERS, TRAINING_MODEL_PROVIDERS
from sage_hf.bench.results import BenchmarkResult, Row
from sage_hf.bench.tables import MISSING, not_measured, versions
from sage_hf.text import markdown_table, text_table


@dataclass(frozen=True)
class ModelGain:
    """Gain of a step of a model by our fastest recipe.

    Attributes:
        name, label, mode: name, label and mode of the model; the label says how many layers ran, if not all.
        recipe: our fastest recipe.
        before_ms, after_ms: time of the baseline, and with sage-hf.
        kernels, qk_norm_rope: the kernels that ran, as in a row of the result.
        saved_ms: time that each of PARTS saves; empty if not measured separately.
        without_fa3_ms: time with sage-hf if FlashAttention 3 is not installed; None if not measured separately.
    """

    name: str
    label: str
    mode: str
    recipe: str
    before_ms: float
    after_ms: float
    kernels: Mapping[str, int]
    qk_norm_rope: int
    saved_ms: tuple[float, ...]
    without_fa3_ms: float | None

    @property
    def ratio(self) -> float:
        """Return the speed of a step relative to the baseline."""
        return self.before_ms / self.after_ms

    @property
    def low_bit(self) -> bool:
        """Return whether attention calls ran in low bits."""
        return any(_family(kernel) in LOW_BITS for kernel in self.kernels)

    @property
    def what_ran(self) -> str:
        """Return the kinds of kernels of a step, each with its number of attention calls."""
        families: Counter[str] = Counter()
        for kernel, calls in self.kernels.items():
            families[_family(kernel)] += calls
        calls_by_family = ", ".join(
            f"{family} in {calls} of {families.total()}" for family, calls in families.most_common()
        )
        return f"{calls_by_family or 'not recorded'}{' + fused norms' if self.qk_norm_rope else ''}"


RECIPES_OF_GAIN = ("sage_hf:sage3", "sage_hf:sage2", "sage_hf:sage1", "sage_hf:sage_bwd")
"""Providers that compute a whole recipe; other providers leave out a part of it, or tiles."""
PARTS = ("exact kernel", "norms and RoPE", "low bits")
"""Parts of a gain, in the order in which they are added."""
LOW_BITS = ("INT8", "FP4")
PIPELINES = ("cogvideox-2b", "hunyuanvideo-720p", "mochi")
"""Models that sage-hf is made for."""


def _family(kernels: str) -> str:
    """Return a kernel's kind, as users know it, from a row's names of a call's kernels."""
    kernel = kernels.split(",")[0]
    families = {"int8": "INT8", "nvfp4": "FP4", "fa3": "FA3", "sdpa": "PyTorch", "efficient": "PyTorch"}
    ours = "our exact kernel"
    return next((family for prefix, family in families.items() if kernel.startswith(prefix)), ours)


def model_gain(result: BenchmarkResult) -> str:
    """Return a Markdown table of whole models: a step's time before and after, the kernels, and the parts of the gain.

    Args:
        result: JSON with rows {"model", "mode", "provider", "ms", "kernels"}; the provider is "default" for the
            unchanged model and "sage_hf:<recipe>" for sage-hf, where the fastest recipe counts. A model without both is
            left out. If a row's "layers" is below "layers_of_model", the table says so.
    """
    gains = model_gains(result)
    header = ["model", "mode", "baseline, ms", "with sage-hf, ms", "asked for", "faster by", "what ran"]
    split = any(gain.saved_ms for gain in gains)
    header += [*(f"{part} saves, ms" for part in PARTS), "without FA3, ms"] if split else []
    cells = []
    for gain in gains:
        line = [gain.label, gain.mode, _ms(gain.before_ms), _ms(gain.after_ms), f"`{gain.recipe}`"]
        line += [f"{gain.ratio:.2f}×", gain.what_ran]
        if split:
            line += [f"{saved:.1f}" for saved in gain.saved_ms] or [MISSING] * len(PARTS)
            line.append(MISSING if gain.without_fa3_ms is None else _ms(gain.without_fa3_ms))
        cells.append(line)
    return f"{markdown_table(*_without_single_mode(header, cells))}\n\n{_models_caption(result)}"


def low_bit_gain(result: BenchmarkResult, most: int) -> str:
    """Return short rows of `model_gain` in which calls ran in low bits, and a line about all other rows.

    Args:
        result: as in `model_gain`.
        most: largest number of rows: rows of PIPELINES come first, then the rows with the largest gain.
    """
    gains = model_gains(result)
    low_bit = [gain for gain in gains if gain.low_bit and gain.mode == "eager"]
    low_bit.sort(key=lambda gain: (gain.name not in PIPELINES, -gain.ratio))
    header = ["model, eager", "baseline, ms", "with sage-hf, ms", "without FA3, ms", "faster by"]
    table = [
        [
            *(gain.label, _ms(gain.before_ms), _ms(gain.after_ms)),
            MISSING if gain.without_fa3_ms is None else _ms(gain.without_fa3_ms),
            f"{gain.ratio:.2f}×",
            ", ".join(map(_ms, gain.saved_ms)) or MISSING,
            gain.what_ran,
        ]
        for gain in low_bit[:most]
    ]
    header += [f"saved by {', '.join(PARTS)}, ms", "kernels of its attention calls"]
    other_ratios = [gain.ratio for gain in gains if gain not in low_bit[:most]]
    slower = sum(ratio < NOT_SLOWER for ratio in other_ratios)
    slower_steps = "none" if not slower else "one" if slower == 1 else f"{slower:d}"
    slower_steps += f" of them {'are' if slower > 1 else 'is'} below {NOT_SLOWER:g}×"
    span = f"at {min(other_ratios):.2f}× to {max(other_ratios):.2f}×" if other_ratios else ""
    line = (
        f"{len(other_ratios)} other steps were measured, some without low bits, {span}; {slower_steps}. "
        if other_ratios
        else ""
    )
    return f"{markdown_table(header, table)}\n\n{line}{_models_caption(result)}"


NOT_SLOWER = 0.97
"""Ratio of a step's times from which sage-hf counts as not slower: two runs of a model differ by as much."""


def _models_caption(result: BenchmarkResult) -> str:
    installed = any(row.get("fa3_installed") or row["provider"] == "fa3" for row in result["rows"] if "ms" in row)
    fa3 = "; FlashAttention 3 (FA3, `pip install fa3-fwd`) was installed" if installed else ""
    return f"Steps on {result['gpu']}{fa3}. {versions(result)}"


def model_gains(result: BenchmarkResult) -> list[ModelGain]:
    """Return the gain of each model in each mode by our fastest recipe.

    A model without both is left out. Sparse attention computes a different function, so its time does not count.
    """
    gains = []
    for (label, mode), rows in _model_rows(result).items():
        ours = {name: row["ms"] for name, row in rows.items() if name in RECIPES_OF_GAIN}
        if "default" not in rows or not ours:
            continue
        fastest = min(ours, key=ours.__getitem__)
        row, before = rows[fastest], rows["default"]["ms"]
        steps = [
            rows.get(f"{fastest}{left_out}", {}).get("ms") for left_out in (", no low bits, no norms", ", no low bits")
        ]
        if row["provider"] == "sage_hf:sage_bwd":  # in training, PyTorch's own exact kernels run
            steps[0] = before
        times = [before, *steps, row["ms"]]
        saved = tuple(a - b for a, b in itertools.pairwise(times)) if None not in steps else ()
        without_fa3 = rows.get(f"{fastest}, no fa3", {}).get("ms")
        names = str(row.get("name", row["model"])), label, mode, fastest.removeprefix("sage_hf:")
        kernels = row.get("kernels", {}), row.get("qk_norm_rope", 0)
        gains.append(ModelGain(*names, before, row["ms"], *kernels, saved, without_fa3))
    return gains


def model_speed(result: BenchmarkResult) -> str:
    """Return a Markdown table of every provider's time of a step of every model, and of the share of attention."""
    header, cells = _model_speeds(result)
    return markdown_table(header, cells)


def model_text(result: BenchmarkResult) -> str:
    """Return tables for a terminal: the time of a step of every model, and models that could not run."""
    missing: dict[str, list[str]] = {}
    for row in result["rows"]:
        if "unavailable" in row:
            missing.setdefault(f"{row['provider']}: {row['unavailable']}", []).append(f"{row['name']}, {row['mode']}")
    parts = [f"ms of a step on {result['gpu']}. {versions(result)}", text_table(*_model_speeds(result))]
    return "\n\n".join([*parts, *not_measured(missing)])


def _model_rows(result: BenchmarkResult) -> dict[tuple[str, str], dict[str, Row]]:
    """Return (model, with its layers if not all ran; mode) -> provider -> row, for rows that have times."""
    rows: dict[tuple[str, str], dict[str, Row]] = {}
    for row in result["rows"]:
        if "ms" in row:
            rows.setdefault((_model_and_layers(row), row["mode"]), {})[row["provider"]] = row
    return rows


def _model_and_layers(row: Row) -> str:
    layers, whole = row.get("layers"), row.get("layers_of_model")
    return row["model"] if layers == whole else f"{layers} of {whole} layers of {row['model']}"


def _model_speeds(result: BenchmarkResult) -> tuple[list[str], list[list[str]]]:
    rows = _model_rows(result)
    providers = list(dict.fromkeys(row["provider"] for row in result["rows"] if "ms" in row))
    shares = {
        (_model_and_layers(row), row["mode"]): row["attention_share"]
        for row in result["rows"]
        if row.get("attention_share") is not None
    }
    cells = []
    for (model, mode), of_model in rows.items():
        share = shares.get((model, mode))
        cells.append(
            [
                model,
                mode,
                *(_ms(of_model[name]["ms"]) if name in of_model else MISSING for name in providers),
                MISSING if share is None else f"{share:.0%}",
            ]
        )
    labels = {provider.name: provider.label for provider in (*MODEL_PROVIDERS, *TRAINING_MODEL_PROVIDERS)}
    header = ["model", "mode", *(labels.get(name, name) for name in providers), "share of attention"]
    return _without_single_mode(header, cells)


def _without_single_mode(header: list[str], cells: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return header and cells; if all rows have one mode, the second column, "mode", goes, and the header names it."""
    modes = {line[1] for line in cells}
    if len(modes) != 1:
        return header, cells
    return [f"{header[0]}, {modes.pop()}", *header[2:]], [[line[0], *line[2:]] for line in cells]


def _ms(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"
