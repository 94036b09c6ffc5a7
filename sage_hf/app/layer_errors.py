"""The error of every attention layer on its inputs in a real run, and how peaked its attention is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from huggingface_hub.utils import logging
from torch import nn

from sage_hf import record
from sage_hf.app.peaks import NO_PEAKS, Peaks, find_peaks
from sage_hf.config import SageConfig
from sage_hf.metrics import ErrorSums, TensorErrors
from sage_hf.schedule import StepSchedule
from sage_hf.targets import find_targets
from sage_hf.text import text_table, to_ascii
from sage_kernels.dispatch import execution
from sage_kernels.dispatch.plan import Plan
from sage_kernels.exact import sdpa
from sage_kernels.spec.call import Call, Mask, softmax_scale
from sage_kernels.spec.masks import with_leading_dims
from sage_kernels.spec.recipe import get_recipe, without_outlier_handling

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class LayerErrors:
    """Errors of a layer's attention against exact attention on the same inputs, over all observed calls.

    Attributes:
        layer: name of the layer.
        calls: number of observed calls.
        errors: errors of the attention that ran.
        peaks: the peaks of exact attention on these inputs.
        errors_without_outlier_handling: errors of the same recipe without its outlier handling; None if the recipe has
            no outlier handling, or if these errors were not asked for.
        recipes: the recipes that ran, in the order of their first calls: ("exact",) if the requested recipe never ran.
        by_step: relative L1 error at each denoising step of a pipeline, in order; a single number for a model.
    """

    layer: str
    calls: int
    errors: TensorErrors
    peaks: Peaks = NO_PEAKS
    errors_without_outlier_handling: TensorErrors | None = None
    recipes: tuple[str, ...] = ()
    by_step: tuple[float, ...] = ()


@dataclass
class _Layer:
    """Sums over the calls of a layer."""

    calls: int = 0
    errors: ErrorSums = field(default_factory=ErrorSums)
    step_errors: dict[int, ErrorSums] = field(default_factory=dict)
    plain_errors: ErrorSums = field(default_factory=ErrorSums)
    has_outlier_handling: bool = False
    peaks: Peaks = NO_PEAKS
    plans: list[Plan] = field(default_factory=list)
    """The first plan of each recipe that ran."""

    @property
    def recipes(self) -> tuple[str, ...]:
        return tuple(plan.recipe for plan in self.plans)


class LayerErrorRecorder:
    """Observer that collects the errors of the layers of one pipeline or model; see `record_layer_errors`."""

    def __init__(self, pipe_or_model: object, *, without_outlier_handling: bool = True) -> None:
        targets = find_targets(pipe_or_model)
        self._names = {layer: target.label(name) for target in targets for name, layer in target.layers.items()}
        self._layers = {name: _Layer() for name in self._names.values()}
        self._without_outlier_handling = without_outlier_handling
        self.step = 0
        """Denoising step of the current calls."""

    @torch.no_grad()
    def __call__(self, call: record.AttentionCall) -> None:
        """Add the errors of one call; calls of other layers are ignored."""
        if call.layer not in self._names or not call.output.numel():
            return
        layer = self._layers[self._names[call.layer]]
        layer.calls += 1
        if call.plan.recipe not in layer.recipes:
            layer.plans.append(call.plan)
        layer.has_outlier_handling |= _has_outlier_handling(call)
        plain_output = _attend_without_outlier_handling(call) if self._without_outlier_handling else call.output
        for i in range(call.query.shape[0]):
            sample = slice(i, i + 1)
            query, key, value = (tensor[sample] for tensor in (call.query, call.key, call.value))
            mask = call.attn_mask
            if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
                mask = mask[sample]
            options: dict[str, Any] = {
                "mask": mask,
                "is_causal": call.is_causal,
                "causal_offset": call.causal_offset,
                "scale": call.scale,
            }
            judge, _ = sdpa.attention(query, key, value, **options, dtype=torch.float32)
            layer.errors.add(judge, call.output[sample])
            layer.step_errors.setdefault(self.step, ErrorSums()).add(judge, call.output[sample])
            layer.plain_errors.add(judge, plain_output[sample])
            peaks = find_peaks(query, key, **options)
            layer.peaks = layer.peaks.joined(peaks)

    def layers(self) -> list[LayerErrors]:
        """Return the errors of the layers that were called, in the model's order."""
        return [
            LayerErrors(
                name,
                layer.calls,
                layer.errors.errors(),
                layer.peaks,
                layer.plain_errors.errors() if layer.has_outlier_handling and self._without_outlier_handling else None,
                layer.recipes,
                tuple(sums.errors().rel_l1 for _, sums in sorted(layer.step_errors.items())),
            )
            for name, layer in self._layers.items()
            if layer.calls
        ]

    def never_ran(self) -> list[str]:
        """Return a sentence for each requested recipe that ran in no call, with the reason."""
        plans = [plan for layer in self._layers.values() for plan in layer.plans]
        ran_recipes = {plan.recipe for plan in plans}
        asked_plans = {plan.request.recipe: plan for plan in plans if plan.request.recipe not in ran_recipes}
        return [
            f"{recipe} never ran: these are the errors of {plan.recipe} attention ({plan.brief_reason})"
            for recipe, plan in asked_plans.items()
        ]

    def __str__(self) -> str:
        """Return an ASCII table of the layers that were called, followed by the sentences of `never_ran`."""
        return to_ascii("\n".join([text_table(*table(self.layers())), *self.never_ran()]))


@contextmanager
def record_layer_errors(
    pipe_or_model: object, *, without_outlier_handling: bool = True
) -> Iterator[LayerErrorRecorder]:
    """Compare each eager attention call made inside the block with exact attention in float32 on the same inputs.

    The block runs without gradients, so that recipes without a backward pass run too. A requested recipe that never ran
    is logged.

    Recording is slow: every attention is computed again in full precision, its weights once more, and with
    `without_outlier_handling` the low-bit attention a second time. Memory stays bounded, because samples are compared
    one at a time, and only sums are kept.

    Args:
        pipe_or_model: the pipeline or model whose layers to observe.
        without_outlier_handling: also measure the same recipes without their outlier handling
            (`sage_kernels.spec.recipe.without_outlier_handling`), where they have any.

    Yields:
        A recorder: `layers()` returns the errors of each layer over the calls so far.

    Raises:
        TypeError: pipe_or_model is neither a pipeline with a denoiser nor a model.
        ValueError: a model has no attention layer that can be switched.
    """
    recorder = LayerErrorRecorder(pipe_or_model, without_outlier_handling=without_outlier_handling)
    with record.observe(recorder), _following_steps(pipe_or_model, recorder), torch.no_grad():
        yield recorder
    for sentence in recorder.never_ran():
        logger.warning(sentence)


@contextmanager
def _following_steps(pipe_or_model: object, recorder: LayerErrorRecorder) -> Iterator[None]:
    """Tell the recorder the denoising step of each call of a pipeline's denoisers; a model alone has no steps."""
    handles = []
    if hasattr(pipe_or_model, "scheduler") and not isinstance(pipe_or_model, nn.Module):
        for target in find_targets(pipe_or_model):
            schedule = StepSchedule(SageConfig("exact"), {}, pipe_or_model, partial(setattr, recorder, "step"))
            handles.append(schedule.attach(target.model))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def table(layers: Sequence[LayerErrors]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of layers; a column without outlier handling if some layer has such errors."""
    compared = any(layer.errors_without_outlier_handling is not None for layer in layers)
    header = ["layer", "ran", "CosSim", "rel-L1", *(["rel-L1 without outlier handling"] if compared else [])]
    header += ["RMSE", "scale", "max abs", "worst head rel-L1", "heaviest key", "loudest channel"]
    rows = []
    for layer in layers:
        errors, plain, peaks = layer.errors, layer.errors_without_outlier_handling, layer.peaks
        without = "–" if plain is None else f"{plain.rel_l1:.4f}"
        rows.append(
            [
                layer.layer,
                ", ".join(layer.recipes),
                f"{errors.cosine:.5f}",
                f"{errors.rel_l1:.4f}",
                *([without] if compared else []),
                f"{errors.rmse:.4g}",
                f"{errors.scale:.4f}",
                f"{errors.max_abs:.3g}",
                f"{errors.worst_head_rel_l1:.4f}",
                "–" if peaks.key is None else f"{peaks.share:.3f} at {peaks.key}",
                f"x {peaks.loudness:.1f}",
            ]
        )
    return header, rows


def _has_outlier_handling(call: record.AttentionCall) -> bool:
    recipe = get_recipe(call.plan.recipe)
    return without_outlier_handling(recipe) != recipe


def _attend_without_outlier_handling(call: record.AttentionCall) -> torch.Tensor:
    """Return the output of the recipe without its outlier handling, over the same tiles, by the kernel that ran."""
    if not _has_outlier_handling(call):
        return call.output
    mask = None if call.attn_mask is None else with_leading_dims(call.attn_mask)
    kv_len = call.key.shape[2]
    return execution.attend_by_plan(
        Call(
            call.query,
            call.key,
            call.value,
            without_outlier_handling(get_recipe(call.plan.recipe)),
            mask=Mask.of(mask, kv_len) if call.blocks is None else Mask.of_blocks(call.blocks, mask, kv_len),
            is_causal=call.is_causal,
            causal_offset=call.causal_offset,
            scale=softmax_scale(call.scale, call.query.shape[-1]),
        ),
        call.plan,
    )
