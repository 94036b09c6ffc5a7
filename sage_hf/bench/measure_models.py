"""Timing and memory of whole models' steps with every provider's attention, on one GPU, in one process."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_hf.bench.model_providers import (
    DEFAULT,
    MODEL_PROVIDERS,
    TRAINING_MODEL_PROVIDERS,
    ModelProvider,
    ModelStep,
    replaced_sdpa,
)
from sage_hf.bench.models import MODELS, BenchModel, LoadedModel, load
from sage_hf.bench.results import BenchmarkResult, Row, facts, reason
from sage_hf.bench.timing import drawn_orders, synchronize
from sage_hf.explain import explain
from sage_hf.metrics import tensor_errors
from sage_hf.targets import find_targets
from sage_kernels.dispatch.registry import get_exact
from sage_kernels.external.flash_attention3 import is_installed

SECONDS = 1.2
"""Time of all turns of a provider. It times one step of a model in each turn, because the GPU's clock follows its load,
and a shared host's speed changes within seconds."""
MIN_TURNS = 3
"""Smallest number of turns of a provider."""
MAX_TURNS = 20
"""Largest number of turns of a provider."""
LONG_STEP = 0.5
"""Seconds of a step below which an untimed step precedes it: the host is slower in a provider's first step."""


def run(
    device: torch.device,
    models: Sequence[BenchModel] = MODELS,
    providers: Sequence[ModelProvider] = (*MODEL_PROVIDERS, *TRAINING_MODEL_PROVIDERS),
    progress: Callable[[str], None] = print,
    layers: int | None = None,
    compiled: bool = False,
    write: Callable[[BenchmarkResult], None] = lambda result: None,
) -> BenchmarkResult:
    """Measure a step of every model with every provider that suits it.

    Args:
        device: device to run on; times of a CPU mean little.
        models: the models to measure.
        providers: the providers to measure, from `MODEL_PROVIDERS` and `TRAINING_MODEL_PROVIDERS`.
        progress: called with a text before and after each model, and for each result and failure.
        layers: largest number of a model's blocks (default: each model's own number).
        compiled: measure with compiled blocks too, after the eager model.
        write: called with the result so far after each model.

    Returns:
        Plain data: facts about the machine, and "rows". A row has "model" (the label), "name", "mode" ("eager" or
        "compiled"), "provider", "layers" (the blocks that ran), "layers_of_model", "attention" (the largest attention
        call) and
        - "ms": median time of a step, by the wall clock;
        - "attention_share": share of attention in that time, for the provider "default"; None for other providers, and
          where it cannot be seen (training, compiled blocks);
        - "peak_bytes": most memory allocated during a step, including weights;
        - "first_step_ms": time of the first step, including compilation;
        - "kernels": the attention kernels of a step, and how often each ran (empty if compiled);
        - "qk_norm_rope", "fa3_installed": for sage-hf, the number of layers whose norms or rotation one kernel
          computed, and whether FlashAttention 3 was available;
        - "rel_l1": relative L1 distance of the step's output from "default"'s, with these random weights; it shows that
          both computed the same function (sparse attention computes another), and says nothing about quality. None
          without a finite reference;
        or, if the model or provider cannot run, "unavailable": the reason.
    """
    result: BenchmarkResult = {**facts(device), "rows": []}
    for model in models:
        progress(f"{model.name}: {model.label}, {model.call}")
        started = time.perf_counter()
        chosen_providers = [provider for provider in _suited(model) if provider in providers]
        for row in measure_model(
            model, chosen_providers, device, ("eager", "compiled") if compiled else ("eager",), layers
        ):
            outcome = f"failed: {row['unavailable']}" if "unavailable" in row else f"{row['ms']:.1f} ms"
            progress(
                f"  {row['provider']}, {row['mode']}, {row['layers']} of {row['layers_of_model']} layers: {outcome}"
            )
            result["rows"].append(row)
        progress(f"  measured in {time.perf_counter() - started:.0f} s")
        write(result)
    return result


def measure_model(
    model: BenchModel,
    providers: Sequence[ModelProvider],
    device: torch.device,
    modes: Sequence[str] = ("eager",),
    layers: int | None = None,
) -> list[Row]:
    """Return the rows of the result for one model, which is built once for all modes."""
    count = model.shortened(layers)[1]
    rows = {mode: {provider.name: _new_row(model, provider, mode, count) for provider in providers} for mode in modes}
    with torch.set_grad_enabled(model.training), torch.cuda.device(device) if _on_gpu(device) else nullcontext():
        try:
            loaded = load(model, device, layers)
        except Exception as error:  # The model is too large, or unknown to the installed library: the rows say so.
            why = reason(error)
            loaded = None
        for mode, of_mode in rows.items():
            if loaded is None:
                rows[mode] = {name: row | {"unavailable": why} for name, row in of_mode.items()}
            else:
                _Measurement(model, loaded, device, mode, of_mode).measure(providers)
        del loaded
    _release(device)
    return [row for of_mode in rows.values() for row in of_mode.values()]


class _Measurement:
    """Measurement of one model in one mode, which fills in the rows of its providers."""

    def __init__(
        self, model: BenchModel, loaded: LoadedModel, device: torch.device, mode: str, rows: dict[str, Row]
    ) -> None:
        self._model, self._loaded, self._device, self._mode, self._rows = model, loaded, device, mode, rows
        self._samples: dict[str, list[float]] = {}
        self._seconds: dict[str, float] = {}
        self._reference: Tensor | None = None

    def measure(self, providers: Sequence[ModelProvider]) -> None:
        """Measure with all providers: first each alone, then in turns, in random orders."""
        for provider in providers:
            self._attempt(provider, self._first_steps)
        if self._mode == "eager":
            for turn, order in enumerate(drawn_orders(providers, MAX_TURNS)):
                for provider in order:
                    if turn < _turns(self._seconds.get(provider.name, SECONDS)):
                        self._attempt(provider, self._turn)
        for name, samples in self._samples.items():
            self._rows[name]["ms"] = 1e3 * statistics.median(samples)

    def _attempt(self, provider: ModelProvider, action: Callable[[ModelProvider], None]) -> None:
        row = self._rows[provider.name]
        if "unavailable" in row:
            return
        try:
            action(provider)
        except Exception as error:  # A provider may raise any error: its row holds it.
            row["unavailable"] = reason(error)
            self._samples.pop(provider.name, None)
            for name in ("attention_share", "peak_bytes", "first_step_ms", "kernels", "rel_l1"):
                row.pop(name, None)
        else:
            return
        self._loaded.reset()
        _release(self._device)

    def _first_steps(self, provider: ModelProvider) -> None:
        row, step = self._rows[provider.name], self._loaded.step
        samples = self._samples[provider.name] = []
        with provider.use(self._model, self._loaded.module) as observe:
            if self._mode == "compiled":
                with compiled_blocks(self._loaded.module):
                    first, output = self._timed(step)
                    self._compare(row, output)
                    row |= {"first_step_ms": 1e3 * first, "kernels": {}, "attention_share": None}
                    turns = _turns(self._second(row, step))
                    for _ in range(turns):  # as hot as in the turns of eager steps
                        self._timed(step)
                    samples += [self._timed(step)[0] for _ in range(turns)]
                return
            first, (output, kernels) = self._timed(lambda: observe(step))
            self._compare(row, output)
            row |= {"first_step_ms": 1e3 * first, "kernels": kernels, "attention_share": None}
            if provider.ours:
                installed = is_installed() and get_exact("fa3") is not None
                row |= {"qk_norm_rope": explain(self._loaded.module).qk_norm_rope, "fa3_installed": installed}
            if provider is DEFAULT and not self._model.training:
                attention = AttentionTime(self._device)
                second = self._second(row, lambda: attention.measure(step))
                row["attention_share"] = attention.seconds() / second
            else:
                second = self._second(row, step)
        self._seconds[provider.name] = second

    def _second(self, row: Row, step: ModelStep) -> float:
        """Return the seconds of a warm step, and write its memory to the row."""
        if _on_gpu(self._device):
            torch.cuda.reset_peak_memory_stats(self._device)
        seconds, _ = self._timed(step)
        row["peak_bytes"] = torch.cuda.max_memory_allocated(self._device) if _on_gpu(self._device) else None
        return seconds

    def _turn(self, provider: ModelProvider) -> None:
        with provider.use(self._model, self._loaded.module):
            if self._seconds[provider.name] < LONG_STEP:
                self._next_step()
            self._samples[provider.name].append(self._next_step())

    def _next_step(self) -> float:
        """Return the seconds of a step that differs from the previous step as a model's steps do."""
        self._loaded.advance()
        return self._timed(self._loaded.step)[0]

    def _timed(self, step: Callable[[], Any]) -> tuple[float, Any]:
        """Return (seconds of a step, its result)."""
        start = synchronize(self._device)
        output = step()
        seconds = synchronize(self._device) - start
        self._loaded.reset()
        return seconds, output

    def _compare(self, row: Row, output: Tensor) -> None:
        """Write the output's distance from the default's to the row.

        Raises:
            ArithmeticError: the output is not finite, and the default's is.
        """
        row["rel_l1"] = None
        finite = bool(output.isfinite().all())
        if row["provider"] == DEFAULT.name:
            self._reference = output.clone() if finite else None
        if self._reference is None:
            return
        if not finite:
            raise ArithmeticError("the step's output holds NaN or infinity, and the unchanged model's does not")
        exact, other = (x.reshape(1, 1, -1, x.shape[-1]) for x in (self._reference, output))
        row["rel_l1"] = tensor_errors(exact, other).rel_l1


class AttentionTime:
    """Time between start and end of PyTorch's attention calls in a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, Any]] = []

    def measure(self, step: ModelStep) -> Tensor:
        """Run the step."""
        original: Any = F.scaled_dot_product_attention

        def attend(*args: Any, **kwargs: Any) -> Tensor:
            start = self._mark()
            output = original(*args, **kwargs)
            self._marks.append((start, self._mark()))
            return output

        with replaced_sdpa(attend):
            return step()

    def seconds(self) -> float:
        """Return the sum over all calls after they have ended."""
        if _on_gpu(self._device):
            return sum(start.elapsed_time(end) for start, end in self._marks) * 1e-3
        return sum(end - start for start, end in self._marks)

    def _mark(self) -> Any:
        if not _on_gpu(self._device):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def compiled_blocks(module: nn.Module) -> Iterator[None]:
    """Compile, in place, the blocks of a model that contain attention."""
    (target,) = find_targets(module)
    paths = {match[0] for name in target.layers if (match := re.match(r".*?\.\d+(?=\.)", name))}
    blocks: list[Any] = [module.get_submodule(path) for path in sorted(paths)]
    torch._dynamo.reset()
    for block in blocks:
        block.compile()
    # Otherwise blocks beyond the limit would run without being compiled.
    limit: dict[str, Any] = {"fail_on_recompile_limit_hit": True}
    limit = {name: value for name, value in limit.items() if hasattr(torch._dynamo.config, name)}
    try:
        with torch._dynamo.config.patch(limit):
            yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()


def _suited(model: BenchModel) -> tuple[ModelProvider, ...]:
    return TRAINING_MODEL_PROVIDERS if model.training else MODEL_PROVIDERS


def _new_row(model: BenchModel, provider: ModelProvider, mode: str, layers: int) -> Row:
    return {
        "model": model.label,
        "name": model.name,
        "mode": mode,
        "provider": provider.name,
        "layers": layers,
        "layers_of_model": model.layers_of_model,
        "attention": model.call,
    }


def _turns(seconds: float) -> int:
    return max(MIN_TURNS, min(MAX_TURNS, int(SECONDS / seconds)))


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _release(device: torch.device) -> None:
    gc.collect()
    if _on_gpu(device):
        torch.cuda.empty_cache()
