"""Calibration: the fastest mix of recipes that keeps a model's output within a budget of error."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from sage_hf.app.mix import Mix, StepRange, fastest_mix
from sage_hf.app.subjects import Subject, subject_of
from sage_hf.config import SageConfig, StepRule
from sage_hf.files import replacing
from sage_hf.sparse.config import Sparse
from sage_hf.targets import architecture_of
from sage_hf.text import text_table, to_ascii
from sage_kernels.spec.recipe import get_recipe

ATTEMPTS = 6
"""Largest number of configurations to try, to find one within the limit and then a faster one."""
HEADROOM = 0.9
"""Share of the limit that the next, more exact mix aims at."""
EXTRA_SHARE = 0.5
"""Share of the allowed loss that sparse attention or a low-bit KV cache may take; the recipes may use the rest."""
FEWEST_FOR_BOUND = 4
"""Number of prompts from which on the spread of their losses predicts the losses of other prompts."""
RANGES = 6
"""Ranges of denoising steps: the first step, the last step, and four equal parts of the steps in between."""


@dataclass(frozen=True)
class Calibration:
    """Configuration that keeps a model's output within a budget, and the measurements by which it was chosen.

    Attributes:
        config: the fastest mix found; `config.save(path)` writes it.
        measure: name of the error that the budget limits.
        budget: largest error of the output that was allowed on every prompt.
        errors: error of the configuration's output on each prompt that was used to choose it.
        held_out: error of the configuration's output on each held-out prompt.
        alone: largest error with the fastest recipe in all layers at all steps.
        recipes: the recipes, from the fastest to "exact".
        layers, ranges: names of the layers and of the ranges of steps; a model without steps has one range, "all".
        lengths: number of steps in each range.
        cells: (layers, ranges), index of the recipe in each layer and range.
        cell_errors: (layers, ranges), predicted error of the output if only this cell ran the fastest recipe.
        priced: True if costs are times from this GPU's table; False if they follow the order of the recipes.
        facts: architecture, settings and prompts of the measurement.
    """

    config: SageConfig
    measure: str
    budget: float
    errors: tuple[float, ...]
    held_out: tuple[float, ...]
    alone: float
    recipes: tuple[str, ...]
    layers: tuple[str, ...]
    ranges: tuple[str, ...]
    lengths: tuple[int, ...]
    cells: np.ndarray
    cell_errors: np.ndarray
    priced: bool
    facts: Mapping[str, Any]

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of layers × steps that runs each recipe."""
        steps = np.broadcast_to(self.lengths, self.cells.shape)
        return {recipe: float(steps[self.cells == i].sum() / steps.sum()) for i, recipe in enumerate(self.recipes)}

    def summary(self) -> str:
        """Return the errors and the shares, a line each."""
        shares = ", ".join(f"{share:.0%} {recipe}" for recipe, share in self.shares.items() if share)
        sparse, kv_cache = self.config.sparse, self.config.kv_cache
        extra = f", sparse: {sparse.describe()}" if isinstance(sparse, Sparse) else ""
        extra += f", KV cache in {kv_cache}" if kv_cache else ""
        lines = [
            f"{shares}, of {len(self.layers)} layers x {sum(self.lengths)} steps{extra}",
            f"{self.measure}: at most {max(self.errors):.4g} on {len(self.errors)} prompts (budget {self.budget:g}; "
            f"{self.recipes[0]} alone {self.alone:.4g})",
        ]
        if self.held_out:
            lines.append(f"on {len(self.held_out)} other prompts: at most {max(self.held_out):.4g}")
        return "\n".join(lines)

    def __str__(self) -> str:
        """Return the summary, and a table with each cell's recipe and the error that the cell would make alone."""
        rows = [
            [layer, *(f"{self.recipes[cell]} ({error:.4f})" for cell, error in zip(row, errors, strict=True))]
            for layer, row, errors in zip(self.layers, self.cells, self.cell_errors, strict=True)
        ]
        note = f"In brackets: the output's error if only these layers and steps ran {self.recipes[0]}, predicted."
        return to_ascii("\n".join([text_table(["layer", *self.ranges], rows), note, self.summary()]))


def calibrate(
    pipe_or_model: Any,
    prompts: Sequence[Any],
    budget: float = 0.02,
    *,
    recipes: Sequence[str] = ("sage3", "sage2"),
    held_out: Sequence[Any] = (),
    keep_sensitive: int = 0,
    sparse: Sequence[Sparse] = (),
    kv_caches: Sequence[str] = (),
    seed: int = 0,
    measurements: str | Path | None = None,
    **settings: Any,
) -> Calibration:
    """Find the fastest mix of recipes, by layer and denoising step, whose error on every prompt is within a budget.

    The budget limits the error of the model's output. For a pipeline this is the relative error of the latents with the
    same seed, sqrt(Σ(O − O')² / ΣO²). For a language model it is the mean KL divergence of its predictions in nats,
    which is about the relative growth of perplexity.

    Errors of layers and steps are added as if they were independent: their squares add (for a language model,
    divergences add, which are of second order). A cell is a layer in a range of steps. Three measurements on each
    prompt say how much a cell adds:

    1. the loss of the output with the fastest recipe everywhere;
    2. the share of each range: the losses of the output with the fastest recipe in this range alone;
    3. the share of each layer in its range: the losses of the denoiser's output, on exact attention's inputs at the
       middle step of the range, with one layer at a time in each recipe.

    A mix is chosen by these losses, run on all prompts, and made more exact until the measured error is within the
    budget on each prompt and, with four prompts or more, probably on other prompts too (`bound`). Before that, the
    first entry of `sparse` or `kv_caches` is chosen whose loss, with the most accurate recipe, is at most half of the
    allowed loss. The mix may use the remaining loss; if no entry is good enough, the mix may use all of it.

    Recipes run in their own numerics, emulated where the GPU lacks them (`fallback="emulate"`), so that the result
    holds on every GPU. Times come from this GPU's table of costs if it covers all of these calls; otherwise each recipe
    costs one unit more for each product of Q·Kᵀ than the recipe before it. Only sums and the prompts' latents are kept.

    Args:
        pipe_or_model: a text-to-video or text-to-image pipeline, or a causal language model, as it was loaded.
        prompts: texts; for a language model, one int64 tensor (tokens,) for each prompt.
        budget: the largest error that is allowed on each prompt.
        recipes: low-bit recipes to mix, the fastest first; "exact" is always the last.
        held_out: more prompts, on which the chosen configuration is measured.
        keep_sensitive: number of layers that always run exact attention: the layers that add most loss.
        sparse: settings of sparse attention to choose from, in order of preference; for a pipeline.
        kv_caches: formats of the KV cache to choose from, in order of preference; for a language model. The first half
            of a prompt then fills the cache, and the loss is measured on the other half.
        seed: seed of every prompt.
        measurements: JSON file of finished measurements, written after each measurement; if it exists, calibration
            continues from it.
        settings: arguments of the pipeline's call, such as num_inference_steps; the configuration is for these.

    Returns:
        The configuration and its measurements.

    Raises:
        TypeError: pipe_or_model is neither a pipeline nor a causal language model.
        ValueError: prompts, budget or recipes make no sense; `sparse` is given for a language model, or `kv_caches` for
            a pipeline; attention is switched already; or the file `measurements` belongs to another model, scheduler or
            settings.

    Example:
        >>> calibration = sage_hf.calibrate(pipe, ["a red circle moving left"], budget=0.02, num_inference_steps=20)
        >>> print(calibration)
        >>> calibration.config.save("calibrated.json")
        >>> handle = sage_hf.apply(pipe, "calibrated.json")
    """
    names = (*recipes, "exact")
    if isinstance(prompts, str) or isinstance(held_out, str):
        raise ValueError("expected sequences of prompts, got one text: put it into a list")
    if len(prompts) < 1 or not budget > 0 or keep_sensitive < 0:
        raise ValueError(
            f"expected a prompt or more, a budget above 0 and keep_sensitive of 0 or more, got {len(prompts)} prompts, "
            f"{budget} and {keep_sensitive}"
        )
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"expected different low-bit recipes, the fastest first, got {', '.join(recipes) or 'none'}")
    for name in names:
        get_recipe(name)
    subject = subject_of(pipe_or_model, settings, seed, RANGES)
    for prompt in (*prompts, *held_out):
        subject.check(prompt)
    extras = [SageConfig(recipes[-1], sparse=sparsity) for sparsity in sparse]
    extras += [SageConfig(recipes[-1], kv_cache=kv_cache) for kv_cache in kv_caches]
    stored = Measurements({**subject.describe(), "recipes": list(names)}, measurements)
    power, limit = 1 / subject.exponent, budget**subject.exponent
    extra, spent = _choose_extra(subject, prompts, extras, stored, limit)
    measured = _measure(subject, prompts, names, stored)
    mix, config, losses = _choose_mix(
        *(subject, prompts, names, stored, measured),
        limit=limit,
        keep_sensitive=keep_sensitive,
        extra=extra,
        spent=spent,
    )
    held_out_losses = [_loss(subject, prompt, config, stored) for prompt in held_out]
    result = Calibration(
        config=config,
        measure=subject.measure,
        budget=budget,
        errors=tuple(loss**power for loss in losses),
        held_out=tuple(loss**power for loss in held_out_losses),
        alone=max(measured.alone) ** power,
        recipes=names,
        layers=measured.layers,
        ranges=tuple("all" if span is None else str(span) for span in measured.ranges),
        lengths=measured.lengths,
        cells=mix.cells(),
        cell_errors=measured.losses[..., 0] ** power,
        priced=measured.priced,
        facts=stored.facts,
    )
    note = f"Calibrated by sage-hf: {result.summary().replace(chr(10), '; ')}."
    return replace(result, config=replace(config, architecture=architecture_of(subject.targets), note=note))


class Measurements:
    """Finished measurements by name; with a path they are kept in a file, so that an interrupted calibration continues.

    Args:
        facts: plain data on which the measurements depend.
        path: JSON file, written after each measurement.

    Raises:
        ValueError: the file holds no measurements, or belongs to other facts; the message names the first difference.
    """

    def __init__(self, facts: Mapping[str, Any], path: str | Path | None) -> None:
        self.facts = facts
        self._path = None if path is None else Path(path)
        self._done: dict[str, Any] = {}
        if self._path is None or not self._path.exists():
            return
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            earlier_facts, self._done = dict(data["facts"]), dict(data["measurements"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path} holds no measurements of a calibration: {error!r}") from error
        for name, fact in json.loads(json.dumps(facts)).items():
            if earlier_facts.get(name) != fact:
                raise ValueError(
                    f"{self._path} was measured with other {name} ({earlier_facts.get(name)} instead of {fact}): "
                    "remove it, or name another file"
                )

    def of(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the measurement of that name as plain data; if there is none, call `measure` and keep the result."""
        if name not in self._done:
            self._done[name] = measure()
            if self._path is not None:
                with replacing(self._path) as part:
                    part.write_text(json.dumps({"facts": self.facts, "measurements": self._done}) + "\n")
        return self._done[name]


@dataclass(frozen=True)
class _Measured:
    """Measurements of all prompts.

    Attributes:
        losses, costs: means over prompts, (layers, ranges, recipes).
        priced: see `Calibration.priced`.
        alone: the loss on each prompt with the fastest recipe everywhere.
    """

    layers: tuple[str, ...]
    ranges: tuple[StepRange | None, ...]
    losses: np.ndarray
    costs: np.ndarray
    priced: bool
    alone: tuple[float, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(1 if span is None else len(span) for span in self.ranges)


def _measure(subject: Subject, prompts: Sequence[Any], recipes: Sequence[str], stored: Measurements) -> _Measured:
    """Measure the losses of the fastest recipe everywhere and in each range, and of each layer with each recipe."""
    layers = tuple(target.label(name) for target in subject.targets for name in target.layers)
    ranges = subject.ranges(prompts[0])
    steps = sum(1 if span is None else len(span) for span in ranges)
    spans = [span for span in ranges if span is not None]
    renders = 2 + len(spans)
    forwards = renders * steps + len(layers) * len(ranges) * (len(recipes) - 1)
    losses, products, us, alone = [], [], [], []
    with tqdm(total=forwards * len(prompts), desc="calibrate", unit="pass", disable=None) as bar:
        for prompt in prompts:
            alone.append(_loss(subject, prompt, SageConfig(recipes[0]), stored))
            bar.update(steps)
            parts = []
            for span in spans:
                parts.append(_loss(subject, prompt, _in_range(span, recipes[0]), stored))
                bar.update(steps)
            measure = partial(subject.layer_losses, prompt, recipes, bar.update)
            of_layers = stored.of(f"{text_of(prompt)} | layers", measure)
            bar.update(steps)
            losses.append(_spread(np.array(of_layers["losses"]), parts or [1.0], alone[-1]))
            products.append(of_layers["products"])
            us.append(of_layers["us"])
    priced = all(times is not None for times in us)
    costs = np.mean(us if priced else np.array(products) * np.arange(1, len(recipes) + 1), axis=0)
    lengths = np.array([1 if span is None else len(span) for span in ranges])
    return _Measured(layers, ranges, np.mean(losses, axis=0), costs * lengths[:, None], priced, tuple(alone))


def _spread(layers: np.ndarray, parts: Sequence[float], alone: float) -> np.ndarray:
    """Divide the fastest recipe's loss among ranges by `parts`, and among the layers of a range by their own losses.

    Args:
        layers: (layers, ranges, recipes), losses of single layers; the first recipe is the fastest.
        parts: the losses of the fastest recipe in single ranges.
        alone: the loss of the fastest recipe everywhere.

    Returns:
        An array like `layers`, in which the losses of the fastest recipe add up to `alone`.
    """
    ranges = np.array(parts)
    total, columns = ranges.sum(), layers[..., 0].sum(axis=0)
    with np.errstate(invalid="ignore"):  # an infinite loss cannot be divided
        shares = np.divide(ranges, total, out=np.zeros_like(ranges), where=total > 0)
        gains = np.divide(alone * shares, columns, out=np.zeros_like(columns), where=columns > 0)
        return layers * gains[:, None]


def _choose_extra(
    subject: Subject, prompts: Sequence[Any], extras: Sequence[SageConfig], stored: Measurements, limit: float
) -> tuple[SageConfig, float]:
    """Choose the first configuration that may be combined with a mix; return it and the `bound` of its losses.

    If there is none, return a configuration with neither sparse attention nor a low-bit KV cache, and 0.
    """
    for extra in extras:
        spent = bound([_loss(subject, prompt, extra, stored) for prompt in prompts])
        if spent <= EXTRA_SHARE * limit:
            return extra, spent
    return SageConfig("exact"), 0.0


def _choose_mix(
    subject: Subject,
    prompts: Sequence[Any],
    recipes: Sequence[str],
    stored: Measurements,
    measured: _Measured,
    *,
    limit: float,
    keep_sensitive: int,
    extra: SageConfig,
    spent: float,
) -> tuple[Mix, SageConfig, list[float]]:
    """Return the fastest mix found that keeps the `bound` of measured losses within the limit.

    The search aims lower until a mix keeps the limit. Then it aims between the last mix that kept the limit and the
    last mix that did not.

    Args:
        subject, prompts, recipes, stored, measured: the model to calibrate, and its measurements.
        limit: the largest loss, including `spent`.
        keep_sensitive: see `calibrate`.
        extra, spent: see `_choose_extra`.

    Returns:
        The mix; its configuration, with the extra's sparse attention or KV cache; and its loss on each prompt.
    """
    exact = len(recipes) - 1

    def run(mix: Mix) -> tuple[Mix, SageConfig, list[float]]:
        config = mix.config(recipes, measured.layers, measured.ranges)
        config = replace(config, sparse=extra.sparse, kv_cache=extra.kv_cache)
        return mix, config, [_loss(subject, prompt, config, stored) for prompt in prompts]

    exact_rows = np.argsort(-measured.losses[..., 0].sum(axis=1))[:keep_sensitive]
    fixed = [exact if row in exact_rows else None for row in range(len(measured.layers))]
    highest = bound(measured.alone)
    target = (limit - spent) * (fmean(measured.alone) / highest if 0 < highest < math.inf else 1.0)
    best, failed = None, math.inf
    for _ in range(ATTEMPTS):
        mix, config, losses = run(fastest_mix(measured.losses, measured.costs, target, fixed))
        if (highest := bound(losses)) <= limit:
            best, passed = (mix, config, losses), target
            if failed == math.inf:
                break
        else:
            failed = target
        if best is None:
            target = HEADROOM * (mix.total(measured.losses) + spent) * limit / highest - spent
        else:
            target = (passed + failed) / 2
    return best or run(Mix((None,) * len(measured.layers), (exact,) * len(measured.ranges)))


def _in_range(span: StepRange, recipe: str) -> SageConfig:
    """Return the configuration that runs a recipe in a range of steps, and exact attention at all other steps."""
    return SageConfig("exact", steps=(StepRule(span.start, span.stop, recipe),))


def _loss(subject: Subject, prompt: Any, config: SageConfig, stored: Measurements) -> float:
    """Return a configuration's loss on a prompt; infinity if its output is not finite."""
    name = json.dumps(config.to_dict(), sort_keys=True)
    loss = stored.of(f"{text_of(prompt)} | {name}", lambda: subject.loss(prompt, config))
    return loss if math.isfinite(loss) else math.inf


def bound(losses: Sequence[float]) -> float:
    """Return the largest loss that is expected of a prompt like these.

    It is the largest of the losses. With four prompts or more, it is at least exp(m + 2·s·sqrt(1 + 1/n)): the upper end
    of the prediction interval of a log-normal loss, whose logarithms have the mean m and the standard deviation s.
    """
    highest = max(losses)
    if len(losses) < FEWEST_FOR_BOUND or min(losses) <= 0 or highest == math.inf:
        return highest
    logarithms = [math.log(loss) for loss in losses]
    spread = stdev(logarithms) * math.sqrt(1 + 1 / len(losses))
    return max(highest, math.exp(fmean(logarithms) + 2 * spread))


def text_of(prompt: Any) -> str:
    """Return a prompt's text, or a name for its tokens."""
    if isinstance(prompt, str):
        return prompt
    return f"{len(prompt)} tokens {hashlib.sha256(prompt.cpu().numpy().tobytes()).hexdigest()[:16]}"
