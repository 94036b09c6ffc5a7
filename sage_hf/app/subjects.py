"""Models as calibration sees them: how a configuration, or one layer with a recipe, changes the model's output."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from sage_hf import record
from sage_hf.app.language import logits_through_cache
from sage_hf.app.mix import StepRange, step_ranges
from sage_hf.apply import apply
from sage_hf.changes import changes_of, inner
from sage_hf.config import LayerRule, SageConfig
from sage_hf.explain import asks_for_low_bits
from sage_hf.schedule import StepSchedule
from sage_hf.targets import Target, architecture_of, find_targets
from sage_kernels.dispatch import cost_model
from sage_kernels.dispatch.registry import exact_kernels
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.select import select

ROWS = 256
"""Number of rows of logits that are compared at a time."""


class Subject(Protocol):
    """A model, and the prompts that it can be run on.

    Attributes:
        measure: name of the error that the budget limits.
        exponent: the power of the error that adds up over layers and steps. Loss means this power of the error.
        targets: the models whose attention is switched.
    """

    measure: str
    exponent: int
    targets: list[Target]

    def describe(self) -> dict[str, Any]:
        """Return the facts, as plain data, on which measurements depend."""

    def check(self, prompt: Any) -> None:
        """Raise ValueError if `prompt` is not a prompt for this model."""

    def ranges(self, prompt: Any) -> tuple[StepRange | None, ...]:
        """Return the ranges of steps of a run on a prompt; for a model without steps, one None."""

    def loss(self, prompt: Any, config: SageConfig) -> float:
        """Run a configuration on a prompt, and return the loss of its output against exact attention's output."""

    def layer_losses(self, prompt: Any, recipes: Sequence[str], progress: Callable[[], object]) -> dict[str, Any]:
        """Run each layer alone with each recipe except the last, "exact"; return `LayerLosses.to_dict()`.

        `progress` is called after each run of the model.
        """


class LayerLosses:
    """Sums over the runs of single layers at one step of each range: arrays (layers, ranges, recipes).

    Attributes:
        losses: losses of the model's output, summed over its calls.
        products: multiplications of Q·Kᵀ.
        us: microseconds on this GPU by its table of costs; NaN where the table does not cover all calls.
    """

    def __init__(self, layers: int, ranges: int, recipes: int) -> None:
        self.losses, self.products, self.us = np.zeros((3, layers, ranges, recipes))

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as plain data."""
        us = None if np.isnan(self.us).any() else self.us.tolist()
        return {"losses": self.losses.tolist(), "products": self.products.tolist(), "us": us}


def call_us(request: Request) -> float | None:
    """Return the time in µs of the kernel that runs a call on its GPU by default, by the table of costs.

    Return None if the table has no such call, or if another low-bit recipe would run in place of the requested recipe:
    its numerics were not measured.
    """
    plan = select(request, "native")
    if plan.recipe == "exact":
        return cost_model.measured_us(request, (*exact_kernels(request), *cost_model.BACKENDS))
    if plan.recipe != request.recipe or plan.numerics != "native":
        return None
    return cost_model.measured_us(request, (cost_model.low_bit_provider(plan.recipe, plan.kernel, plan.quantizer),))


def relative_square(exact: Tensor, other: Tensor) -> float:
    """Return Σ(O − O')² / ΣO² of two outputs of the same shape."""
    exact, other = exact.double(), other.double()
    total = exact.square().sum().item()
    return (exact - other).square().sum().item() / total if total else 0.0


def divergence(exact: Tensor, other: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence in nats of predictions from exact predictions, logits (tokens,
    words).

    Without predictions it is 0.
    """
    total = 0.0
    for start in range(0, len(exact), ROWS):
        p, q = (logits[start : start + ROWS].double().log_softmax(-1) for logits in (exact, other))
        total += (p.exp() * (p - q)).sum().item()
    return total / max(1, len(exact))


def only(layer: str, recipe: str) -> SageConfig:
    """Return the configuration that runs a recipe in one layer, and exact attention in all other layers."""
    return SageConfig("exact", layers=(LayerRule(layer, recipe),))


SAMPLES = 1024
"""Number of values of a parameter, at equal distances, that identify the weights."""


FREEU = "b1", "b2", "s1", "s2"
"""Attributes by which `enable_freeu` scales the inputs of a UNet's blocks."""


def _settings_of(processor: object) -> dict[str, Any]:
    """Return the public attributes of an attention processor that are plain data, but for its mode."""
    attributes = getattr(processor, "__dict__", {}).items()
    return {name: value for name, value in attributes if name[0] != "_" and name != "training" and _is_plain(value)}


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, (int, float, str))


def _text_of_setting(value: Any) -> str:
    """Return a text that tells values of an argument of a pipeline's call apart; tensors and images by their hash."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text_of_setting, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text_of_setting(setting)}' for key, setting in value.items())}}}"
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(data).hexdigest()[:16]}"
    if hasattr(value, "tobytes"):  # images, arrays
        return f"{type(value).__name__} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    return str(value)


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the model's parameter names and shapes, about SAMPLES values of each, and what scales outputs.

    Scales are of PEFT's adapters, FreeU, and attention processors (IP-Adapters).
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta:
            step = max(1, parameter.numel() // SAMPLES)
            digest.update(parameter.detach().flatten()[::step].double().cpu().numpy().tobytes())
    for name, module in model.named_modules():
        if isinstance(scales := vars(module).get("scaling"), dict):  # in PEFT's layers, by adapter
            used = () if getattr(module, "disable_adapters", False) else getattr(module, "active_adapters", scales)
            digest.update(f"{name} {[(adapter, scales.get(adapter)) for adapter in used]}".encode())
        settings = {key: vars(module).get(key) for key in FREEU} | _settings_of(getattr(module, "processor", None))
        if any(value is not None for value in settings.values()):
            digest.update(f"{name} {sorted(settings.items())}".encode())
    return digest.hexdigest()[:16]


def _describe(targets: Sequence[Target]) -> dict[str, Any]:
    return {
        "architecture": architecture_of(targets),
        "layers": [target.label(name) for target in targets for name in target.layers],
        "weights": [fingerprint(inner(target.model)) for target in targets],
    }


def _text_of_scheduler(scheduler: Any) -> str:
    """Return a scheduler's class and settings, without the version of diffusers that wrote them."""
    config = getattr(scheduler, "config", {})
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    return f"{type(scheduler).__name__} {json.dumps(settings, sort_keys=True, default=str)}"


class _Prober:
    """Runs of single layers of a model on given inputs."""

    def __init__(self, targets: Sequence[Target], sums: LayerLosses, recipes: Sequence[str]) -> None:
        layers = [(target, name) for target in targets for name in target.layers]
        self._places = {(id(target), name): place for place, (target, name) in enumerate(layers)}
        self._sums, self._recipes = sums, recipes

    def probe(
        self,
        target: Target,
        run: Callable[[], Tensor],
        exact: Tensor,
        loss: Callable[[Tensor, Tensor], float],
        column: int,
        progress: Callable[[], object],
    ) -> None:
        """Add the loss and the cost of each layer of `target` with each recipe, against its exact output."""
        sums = self._sums
        for name in target.layers:
            row = self._places[id(target), name]
            for place, recipe in enumerate(self._recipes[:-1]):
                requests: list[Request] = []

                def note(call: record.AttentionCall, recipe: str = recipe, noted: list[Request] = requests) -> None:
                    if call.plan.request.recipe == recipe:
                        noted.append(call.plan.request)

                with apply(target.model, only(name, recipe), fallback="emulate"), record.observe(note):
                    sums.losses[row, column, place] += loss(exact, run())
                self._add_costs(requests, row, column, place)
                progress()
            self._add_costs([replace(request, recipe="exact") for request in requests], row, column, -1)

    def _add_costs(self, requests: Sequence[Request], row: int, column: int, place: int) -> None:
        for request in requests:
            products = request.batch * request.q_heads * request.q_len * request.kv_len * request.head_dim
            self._sums.products[row, column, place] += products
            us = call_us(request)
            self._sums.us[row, column, place] += np.nan if us is None else us


class PipelineSubject:
    """A diffusers pipeline; its error is the relative error of its latents, sqrt(Σ(O − O')² / ΣO²).

    Args:
        pipe: the pipeline.
        settings: arguments of the pipeline's call, without the prompt.
        seed: seed of every prompt.
        count: largest number of ranges of steps.
    """

    measure = "relative error of the latents"
    exponent = 2

    def __init__(self, pipe: Any, settings: Mapping[str, Any], seed: int, count: int) -> None:
        self.targets = _unchanged_targets(pipe)
        self._pipe, self._settings, self._seed, self._count = pipe, dict(settings), seed, count
        self._exact: dict[str, Tensor] = {}
        self._num_steps = 0

    def describe(self) -> dict[str, Any]:
        """Return the facts, as plain data, on which measurements depend."""
        settings = {name: _text_of_setting(value) for name, value in self._settings.items()}
        switched = [inner(target.model) for target in self.targets]
        parts = {name: part for name, part in self._pipe.components.items() if isinstance(part, nn.Module)}
        return {
            **_describe(self.targets),
            "pipeline": type(self._pipe).__name__,
            "scheduler": _text_of_scheduler(getattr(self._pipe, "scheduler", None)),
            "weights of other parts": {
                name: fingerprint(part) for name, part in parts.items() if not any(inner(part) is x for x in switched)
            },
            "settings": settings,
            "seed": self._seed,
            "ranges": self._count,
        }

    def check(self, prompt: Any) -> None:
        """Raise ValueError if the prompt is not a text."""
        if not isinstance(prompt, str):
            raise ValueError(f"a pipeline's prompts are texts, got {type(prompt).__name__}")

    def ranges(self, prompt: Any) -> tuple[StepRange, ...]:
        """Return the ranges of steps of a run on a prompt."""
        self.exact(prompt)
        return step_ranges(self._num_steps, self._count)

    def exact(self, prompt: str) -> Tensor:
        """Return the latents under exact attention, on the CPU; they are rendered once."""
        if prompt not in self._exact:
            with self._following() as schedules:
                self._exact[prompt] = self._render(prompt)
            self._num_steps = max(schedule.num_steps or schedule.step + 1 for schedule in schedules)
        return self._exact[prompt]

    def loss(self, prompt: Any, config: SageConfig) -> float:
        """Run a configuration on a prompt, and return the loss of its latents against exact attention's latents."""
        exact = self.exact(prompt)
        with apply(self._pipe, config, fallback="emulate"):
            return relative_square(exact, self._render(prompt))

    def layer_losses(self, prompt: Any, recipes: Sequence[str], progress: Callable[[], object]) -> dict[str, Any]:
        """Run each layer alone with each recipe at the middle step of each range, on exact attention's inputs."""
        middles = {(span.start + span.stop) // 2: place for place, span in enumerate(self.ranges(prompt))}
        sums = LayerLosses(sum(len(target.layers) for target in self.targets), len(middles), len(recipes))
        prober = _Prober(self.targets, sums, recipes)
        probing = False

        def watch(target: Target, schedule: StepSchedule) -> torch.utils.hooks.RemovableHandle:
            def hook(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                nonlocal probing
                if probing or schedule.step not in middles:
                    return
                probing = True
                try:
                    prober.probe(
                        target,
                        lambda: _first_tensor(model(*args, **kwargs)),
                        _first_tensor(output),
                        relative_square,
                        middles[schedule.step],
                        progress,
                    )
                finally:
                    probing = False

            return target.model.register_forward_hook(hook, with_kwargs=True)

        with self._following() as schedules, ExitStack() as stack:
            for target, schedule in zip(self.targets, schedules, strict=True):
                stack.callback(watch(target, schedule).remove)
            self._render(prompt)
        return sums.to_dict()

    @contextmanager
    def _following(self) -> Iterator[list[StepSchedule]]:
        """Yield a schedule for each target; the schedule knows its model's current step."""
        schedules = [StepSchedule(SageConfig("exact"), {}, self._pipe) for _ in self.targets]
        handles = [schedule.attach(target.model) for schedule, target in zip(schedules, self.targets, strict=True)]
        try:
            yield schedules
        finally:
            for handle in handles:
                handle.remove()

    def _render(self, prompt: str) -> Tensor:
        self._pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator("cpu").manual_seed(self._seed)
        output = self._pipe(prompt=prompt, generator=generator, **{**self._settings, "output_type": "latent"})
        return _first_tensor(output).float().cpu()


class LanguageSubject:
    """A language model; its error is the mean divergence of its predictions from exact attention's, in nats.

    A divergence of 0.002 lets the perplexity of text that the model could have written grow by 0.2 %.
    """

    measure = "mean KL divergence of the predictions, nats a token"
    exponent = 1

    def __init__(self, model: nn.Module) -> None:
        self.targets = _unchanged_targets(model)
        self._model = model

    def describe(self) -> dict[str, Any]:
        """Return the facts, as plain data, on which measurements depend."""
        return _describe(self.targets)

    def check(self, prompt: Any) -> None:
        """Raise ValueError if the prompt is not a sequence of at least two tokens."""
        fact = f"a tensor {tuple(prompt.shape)} {prompt.dtype}" if isinstance(prompt, Tensor) else type(prompt).__name__
        integers = isinstance(prompt, Tensor) and not (prompt.is_floating_point() or prompt.dtype == torch.bool)
        if not integers or prompt.ndim != 1 or len(prompt) < 2:
            raise ValueError(
                f"a language model's prompts are int64 tensors (tokens,) of two tokens or more, got {fact}"
            )

    def ranges(self, prompt: Any) -> tuple[None, ...]:
        """Return one None, because a language model has no steps."""
        return (None,)

    def loss(self, prompt: Any, config: SageConfig) -> float:
        """Run a configuration on a prompt, int64 (tokens,), and return its divergence from exact attention.

        With a KV cache, it is the loss of the prompt's second half, which comes MAX_QUERIES tokens at a time.
        """
        exact = self._predict(prompt)
        with apply(self._model, config, fallback="emulate"):
            if config.kv_cache is None:
                return divergence(exact, self._predict(prompt))
            half = len(prompt) // 2
            return divergence(exact[half:], logits_through_cache(inner(self._model), prompt, half, config.kv_cache))

    def layer_losses(self, prompt: Any, recipes: Sequence[str], progress: Callable[[], object]) -> dict[str, Any]:
        """Run each layer alone with each recipe on a prompt, int64 (tokens,)."""
        (target,) = self.targets
        sums = LayerLosses(len(target.layers), 1, len(recipes))
        prober = _Prober(self.targets, sums, recipes)
        prober.probe(target, lambda: self._predict(prompt), self._predict(prompt), divergence, 0, progress)
        return sums.to_dict()

    @torch.no_grad()
    def _predict(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token, (tokens - 1, words)."""
        device = next(self._model.parameters()).device
        return self._model(tokens[None].to(device), use_cache=False).logits[0, :-1]


def subject_of(
    pipe_or_model: Any, settings: Mapping[str, Any], seed: int, count: int
) -> PipelineSubject | LanguageSubject:
    """Return the subject for a text-to-image or text-to-video pipeline, or for a causal language model.

    Raises:
        TypeError: `pipe_or_model` is of another kind, or settings are given for a language model.
        ValueError: its attention is switched already, or no layer of it can be switched.
    """
    if not isinstance(pipe_or_model, nn.Module):
        return PipelineSubject(pipe_or_model, settings, seed, count)
    if not hasattr(inner(pipe_or_model), "get_output_embeddings") or "labels" not in _parameters(pipe_or_model):
        raise TypeError(
            f"expected a diffusers pipeline or a causal language model, got {type(pipe_or_model).__name__}: for a "
            "denoiser, pass its pipeline"
        )
    if settings:
        raise TypeError(f"a language model takes no settings, got {', '.join(settings)}")
    return LanguageSubject(pipe_or_model)


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(inner(model)).forward).parameters


def _unchanged_targets(pipe_or_model: object) -> list[Target]:
    targets = find_targets(pipe_or_model)
    for target in targets:
        if changes_of(inner(target.model)) or any(asks_for_low_bits(target, layer) for layer in target.layers.values()):
            raise ValueError(
                f"the attention of {type(inner(target.model)).__name__} is switched already: restore it first"
            )
    return targets


def _first_tensor(output: Any) -> Tensor:
    """Return the first tensor of a model's or a pipeline's output."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output
