"""Explanation of which kernel ran in each layer, and why the requested recipe did not run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import nn

from sage_hf import kv_record, record
from sage_hf.attributes import IMPLEMENTATION, RECIPE, TRAINING
from sage_hf.diffusers.bridge import backend_of
from sage_hf.diffusers.errors import UnsupportedAttentionError
from sage_hf.diffusers.layers import fixed_backend
from sage_hf.diffusers.processor import layer_of, sage_of
from sage_hf.diffusers.vsa import VSAProcessor
from sage_hf.names import NAMES
from sage_hf.sparse.layer import sparsity_of
from sage_hf.targets import Target, find_targets
from sage_hf.text import text_table, to_ascii
from sage_hf.transformers.bridge import implementation_of
from sage_kernels.dispatch import cost_model
from sage_kernels.dispatch.plan import Outcome, Plan
from sage_kernels.dispatch.select import routing
from sage_kernels.spec.call import chooses_heavy_keys, has_recent_keys, heavy_keys_of
from sage_kernels.spec.recipe import RECIPES, get_recipe

UNATTRIBUTED = "(compiled, or no layer)"


@dataclass(frozen=True)
class LayerRow:
    """Row of an explanation: a layer's requested recipe, and the recipe and kernels that ran.

    Attributes:
        layer: name of the layer; `str()` of an Explanation joins layers that ran the same, such as "blocks.0-29.attn1".
        asked: the requested recipe; "" if the layer was not switched. Before any call it also names training mode's
            recipe, if there is one: "sage3, training: sage_bwd".
        recipe, kernel: the recipe and kernel that ran; "" before any call.
        numerics: "native", "emulated" or "exact"; "" before any call.
        quantizer: the kernel that made the operands; "" if the attention kernel makes them itself.
        backward: the kernel that computes gradients; "" if no gradients were wanted.
        calls: number of calls with this outcome, among the layer's latest 256.
        heavy, chosen, recent: numbers of calls with heavy keys, with heavy keys chosen among all keys, and with recent
            keys (`sage_kernels.spec.recipe.Recipe`). Only the GPU knows which keys were chosen.
        reason: why the requested recipe did not run, or why nothing is known about this layer.
    """

    layer: str
    asked: str
    recipe: str = ""
    kernel: str = ""
    numerics: str = ""
    calls: int = 0
    reason: str = ""
    quantizer: str = ""
    backward: str = ""
    heavy: int = 0
    chosen: int = 0
    recent: int = 0

    @property
    def kernels(self) -> str:
        """Return the names of all kernels of a call, joined by commas."""
        return ", ".join(name for name in (self.kernel, self.quantizer, self.backward) if name)


@dataclass(frozen=True)
class Explanation:
    """Table of the kernels that ran in each layer, with reasons for fallbacks; `str()` formats it in ASCII.

    Attributes:
        rows: one row for each layer and each outcome of its calls, in the model's order.
        outside_layers: outcomes and their numbers in this process, for calls that belong to no layer: inside compiled
            graphs, through diffusers' attention backends, or by hand.
        predicted: True if the rows predict future calls; False if they report past calls.
        sparse: (layer, the shares that its calls kept, and why calls were dense) for each layer that ran sparse
            attention or VSA.
        costs: the tables of costs by which calls on GPUs were routed, a line for each kind of GPU.
        qk_norm_rope: number of layers whose QK-norm or RoPE one kernel has computed, in place of the
            model's operators.
        kv_caches: the content of each low-bit KV cache that layers used last, and the kernel that decoded.
    """

    rows: tuple[LayerRow, ...]
    outside_layers: tuple[tuple[Outcome, int], ...] = ()
    predicted: bool = False
    sparse: tuple[tuple[str, str], ...] = ()
    costs: tuple[str, ...] = ()
    qk_norm_rope: int = 0
    kv_caches: tuple[str, ...] = ()

    def joined(self, later: Explanation) -> Explanation:
        """Join two runs of a model: equal rows become one, with the calls of both.

        Shares of kept tiles come from the later run, and are marked so.
        """
        sums: dict[LayerRow, Counter[str]] = {}
        for row in (*self.rows, *later.rows):
            counts = {name: getattr(row, name) for name in _COUNTS}
            sums.setdefault(replace(row, calls=0, heavy=0, chosen=0, recent=0), Counter()).update(counts)
        places = {layer: place for place, layer in enumerate(dict.fromkeys(row.layer for row in sums))}
        rows = [replace(row, **dict[str, Any](counts)) for row, counts in sums.items()]
        return replace(
            later,
            rows=tuple(sorted(rows, key=lambda row: places[row.layer])),
            sparse=tuple(
                (f"{layer} (last video)" if self.rows else layer, sparsity) for layer, sparsity in later.sparse
            ),
            costs=tuple(dict.fromkeys((*self.costs, *later.costs))),
            qk_norm_rope=max(self.qk_norm_rope, later.qk_norm_rope),
        )

    def __str__(self) -> str:
        notes: dict[str, int] = {}
        header = ["layer", "asked", "runs" if self.predicted else "ran", "kernels", "numerics", "calls", "why"]
        lines: list[list[str]] = []
        for row in [*_join_rows(self.rows), *(_make_row(UNATTRIBUTED, *ran) for ran in self.outside_layers)]:
            note = f"[{notes.setdefault(row.reason, len(notes) + 1)}]" if row.reason else ""
            calls = (
                f"{row.calls}+" if row.calls >= record.PLANS_PER_LAYER and row.layer != UNATTRIBUTED else str(row.calls)
            )
            idle = "not run, or compiled" if self.outside_layers else "not run yet"
            own_attention = "its own, or a backend's" if self.outside_layers else "its own"
            attention = row.recipe or (idle if row.asked else own_attention)
            lines.append([row.layer, row.asked or "-", attention, row.kernels or "-", row.numerics or "-", calls, note])
        if self.predicted:
            header, *lines = ([*line[:5], line[6]] for line in (header, *lines))
        text = [text_table(header, lines)]
        text += [f"[{number}] {reason}" for reason, number in notes.items()]
        names = [*(row.recipe for row in self.rows), *(outcome.recipe for outcome, _ in self.outside_layers)]
        for name in dict.fromkeys(names):
            if name in RECIPES and RECIPES[name].heavy_keys:
                text.append(f"* {name}: {_in_16_bits(name, self.rows)}")
        if self.qk_norm_rope:
            text.append(f"qk_norm_rope: in {self.qk_norm_rope} layers one kernel computes QK-norm or RoPE")
        if any("attention weight" in sparsity for _, sparsity in self.sparse):
            text.append("sparse calls have no keys in 16 bits; the kept weight is measured on 64 sampled rows a head:")
        text += [
            f"{row.layer}: {row.reason}" for row in _join_rows(tuple(LayerRow(x, "", reason=y) for x, y in self.sparse))
        ]
        return to_ascii("\n".join([*text, *self.kv_caches, *self.costs]))


_COUNTS = ("calls", "heavy", "chosen", "recent")
"""Fields of a row that count calls."""


def explain(pipe_or_model: object) -> Explanation:
    """Return, for each layer, the recipe that was requested, the recipe and kernel that ran, and why they differ.

    It works after `sage_hf.apply`, and on a model whose processors, backend or attn_implementation were set by hand.

    Args:
        pipe_or_model: a diffusers pipeline (its denoisers), a diffusers model or a transformers model.

    Raises:
        TypeError: pipe_or_model is neither a pipeline with a denoiser nor a model.
        ValueError: a model has no attention layer that can be switched.
    """
    targets = find_targets(pipe_or_model)
    rows = [row for target in targets for row in _target_rows(target)]
    sparse = [row for target in targets if target.library == "diffusers" for row in _sparse_rows(target)]
    outside_layers = tuple(record.outcomes_outside_layers().items())
    fused = sum(layer in record.with_qk_norm_rope for target in targets for layer in target.layers.values())
    layers = [layer for target in targets for layer in target.layers.values()]
    caches = {id(found): str(found) for layer in layers if (found := kv_record.records.get(layer)) is not None}
    return Explanation(
        tuple(rows),
        outside_layers,
        sparse=tuple(sparse),
        costs=_costs(targets),
        qk_norm_rope=fused,
        kv_caches=tuple(caches.values()),
    )


def _costs(targets: Sequence[Target]) -> tuple[str, ...]:
    layers = (layer for target in targets for layer in target.layers.values())
    requests = [plan.request for layer in layers for plan in record.last_plans(layer)]
    capabilities = dict.fromkeys(request.capability for request in requests if request.device_type == "cuda")
    return tuple(map(cost_model.describe_costs, capabilities)) if routing() else ()


def _target_rows(target: Target) -> Iterator[LayerRow]:
    asked_of = _asked_of_processor if target.library == "diffusers" else _asked_of_implementation
    for name, layer in target.layers.items():
        recipes, reason = asked_of(layer)
        row = LayerRow(target.label(name), recipes, reason=reason or record.bypassed.get(layer, ""))
        plans: dict[Outcome, list[Plan]] = {}
        for plan in record.last_plans(layer) if recipes else ():
            plans.setdefault(plan.outcome, []).append(plan)
        if not plans or layer in record.bypassed:
            yield row
        for outcome, same_outcome in plans.items():
            heavy, chosen, recent = (sum(counts) for counts in zip(*map(_counts, same_outcome), strict=True))
            ran = _make_row(row.layer, outcome, len(same_outcome))
            yield replace(ran, heavy=heavy, chosen=chosen, recent=recent)


def _counts(plan: Plan) -> tuple[bool, bool, bool]:
    """Return whether a call had heavy keys, whether it chose them, and whether it had recent keys; as in `Call`."""
    request, recipe = plan.request, get_recipe(plan.recipe)
    heavy = heavy_keys_of(recipe, request.kv_len, request.mask) > 0
    chosen = chooses_heavy_keys(recipe, request.kv_len, request.mask, request.is_causal)
    return heavy, chosen, has_recent_keys(recipe, request.mask, request.is_causal)


def _in_16_bits(name: str, rows: tuple[LayerRow, ...]) -> str:
    """Return a note on the keys that the recipe keeps in 16 bits, and on how many of the layers' calls had them."""
    recipe = RECIPES[name]
    choice = "first or heaviest" if recipe.heavy_choice == "heaviest" else "the first"
    text = f"{recipe.heavy_keys} keys per sequence stay in 16 bits ({choice})"
    if recipe.recent_keys:
        text += f", and at least the {recipe.recent_keys} latest of each causal row"
    rows_of_recipe = [row for row in rows if row.recipe == name]
    if calls := sum(row.calls for row in rows_of_recipe):
        heavy, chosen, recent = (
            sum(getattr(row, count) for row in rows_of_recipe) for count in ("heavy", "chosen", "recent")
        )
        text += f": in {heavy} of {calls} calls, the heaviest in {chosen}"
        text += f", the latest in {recent}" if recipe.recent_keys else ""
    return text


def _sparse_rows(target: Target) -> Iterator[tuple[str, str]]:
    for name, layer in target.layers.items():
        sage = sage_of(layer)
        original = layer.processor if sage is None else layer_of(layer).original
        sparsity = original.describe() if isinstance(original, VSAProcessor) else ""
        if sage is not None and sage.sparse is not None:
            sparsity = sparsity_of(sage.sparse)
        if sparsity:
            yield target.label(name), sparsity


def asks_for_low_bits(target: Target, layer: nn.Module) -> bool:
    """Check whether `sage_hf.apply` or the user has requested a low-bit recipe for a layer."""
    asked_of = _asked_of_processor if target.library == "diffusers" else _asked_of_implementation
    return asked_of(layer)[0] not in ("", "exact")


def _asked_of_processor(layer: nn.Module) -> tuple[str, str]:
    if (sage := sage_of(layer)) is not None:
        return asked(sage.recipe, sage.training), ""
    processor: Any = layer.processor
    if (backend := backend_of(processor)) in NAMES:
        recipe, _ = NAMES[backend]
        return recipe, f"set by diffusers' attention backend {backend!r}: calls are counted under {UNATTRIBUTED!r}"
    if reason := fixed_backend(processor):
        return "", f"{reason}: the layer is not changed"
    try:
        layer_of(layer)
    except UnsupportedAttentionError:
        return "", f"{type(processor).__name__} is not supported"
    return "", f"{type(processor).__name__} of the model was not replaced: sage_hf.apply does that"


def _asked_of_implementation(layer: nn.Module) -> tuple[str, str]:
    implementation = implementation_of(layer)
    if implementation is None or implementation not in NAMES:
        return "", f"attn_implementation is {implementation!r}: sage_hf.apply changes that"
    recipe, _ = NAMES[implementation]
    training = None
    if getattr(layer, IMPLEMENTATION, implementation) == implementation:
        recipe = getattr(layer, RECIPE, None) or recipe
        training = getattr(layer, TRAINING, None)
    return asked(recipe, training), ""


def asked(recipe: str, training: str | None) -> str:
    """Return a text that names a layer's recipe, and training mode's recipe if there is one."""
    return recipe if training is None else f"{recipe}, training: {training}"


def _join_rows(rows: tuple[LayerRow, ...]) -> list[LayerRow]:
    """Join consecutive layers with equal rows whose names differ only in a number ("blocks.0-29")."""
    layers = [(name, tuple(group)) for name, group in groupby(rows, key=lambda row: row.layer)]
    by_template: dict[str, list[tuple[int, tuple[LayerRow, ...]]]] = {}
    for name, group in layers:
        number = re.search(r"(?<=\.)\d+(?=\.|$)", name)
        template = name if number is None else f"{name[: number.start()]}*{name[number.end() :]}"
        by_template.setdefault(template, []).append((int(number[0]) if number else -1, group))
    joined = []
    for template, members in by_template.items():
        runs: list[list[tuple[int, tuple[LayerRow, ...]]]] = []
        for index, group in members:
            before = runs[-1][-1] if runs else None
            if before is not None and index == before[0] + 1 and _without_names(group) == _without_names(before[1]):
                runs[-1].append((index, group))
            else:
                runs.append([(index, group)])
        for run in runs:
            first, last = run[0][0], run[-1][0]
            name = template.replace("*", str(first) if first == last else f"{first}-{last}", 1)
            joined += [replace(row, layer=name if i == 0 else "") for i, row in enumerate(run[0][1])]
    return joined


def _without_names(group: tuple[LayerRow, ...]) -> tuple[LayerRow, ...]:
    return tuple(replace(row, layer="") for row in group)


def _make_row(layer: str, outcome: Outcome, calls: int) -> LayerRow:
    facts = (outcome.asked, outcome.recipe, outcome.kernel, outcome.numerics, calls, outcome.reason)
    return LayerRow(layer, *facts, outcome.quantizer, outcome.backward)
