"""Timing, memory and errors of every provider at named shapes, forward or forward and backward, on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sage_hf import record
from sage_hf.bench.cases import SHAPES, BenchCase, CaseInputs, draw
from sage_hf.bench.providers import PROVIDERS, Provider, within
from sage_hf.bench.results import BenchmarkResult, Row, facts, reason
from sage_hf.bench.timing import CallSteps, first_calls, median_steps_ms
from sage_hf.metrics import tensor_errors
from sage_kernels.exact import sdpa
from sage_kernels.exact.gradients import Gradients, exact_gradients

# Errors are measured in this many rows of the first and the last head, against all their keys.
ERROR_ROWS = 256
# Names in a row of the errors of `Gradients`.
ERRORS = ("output", "dq", "dk", "dv")


def run(
    device: torch.device,
    cases: Sequence[BenchCase] = SHAPES,
    providers: Sequence[Provider] = PROVIDERS,
    progress: Callable[[str], None] = print,
) -> BenchmarkResult:
    """Measure all cases with all providers.

    Args:
        device: a CUDA device.
        cases: only forward passes, or only training.
        providers: some of `PROVIDERS` or `TRAINING_PROVIDERS`.
        progress: called with a text for each case before it is measured.

    Returns:
        Plain data: facts about the machine, and "rows". A row has the case, "provider", "scope" and
        - "ms" (median time of a call, in training of forward and backward, every pass included), "tflops" (of
          `BenchCase.operations`), "kernel" (which ran), and in training "forward_ms", "backward_ms";
        - "compile_s": seconds by which the first call took longer than the second;
        - "rel_l1", "cosine", in training "output_rel_l1", "dq_rel_l1", "dk_rel_l1", "dv_rel_l1": errors in some heads,
          on the timed tensors, which are standard normal; the same names with "_biased": errors if K and V have means;
        - "peak_extra_bytes": most memory allocated during a call, beyond inputs, output and gradients; end to end only;
        - "saved_bytes": in training, the memory that the graph keeps between forward and backward, with query, key,
          value and output if it keeps them;
        or, if the provider is missing or refuses the call, "unavailable": the reason.
    """
    result: BenchmarkResult = {**facts(device), "rows": []}
    with torch.cuda.device(device):
        for case in cases:
            progress(f"{case.name}: {case}")
            for scope in ("end_to_end", "kernel"):
                result["rows"] += measure_case(
                    case, [provider for provider in providers if provider.scope == scope], device
                )
    return result


def measure_case(case: BenchCase, providers: Sequence[Provider], device: torch.device) -> list[Row]:
    """Return the rows of the result for one case; all providers have the same scope."""
    rows = {provider.name: new_row(case, provider) for provider in providers}
    calls: dict[str, CallSteps] = {}
    with torch.set_grad_enabled(case.training):
        for biased in (False, True):
            try:
                inputs = draw(case, device, biased, heads_first=True)
                errors: Any = SampledGradientErrors(inputs) if case.training else SampledErrors(inputs)
            except torch.OutOfMemoryError as error:
                return [new_row(case, provider) | {"unavailable": reason(error)} for provider in providers]
            for provider in providers:
                row = rows[provider.name]
                if "unavailable" in row:
                    continue
                try:
                    prepared = provider.prepare(inputs)
                    call = within(provider, prepared.call)
                    step = TrainingStep(call, inputs) if case.training else call
                    if not biased:
                        row["compile_s"], peak, count = first_calls(step)
                        if provider.scope == "end_to_end":
                            result_bytes = case.output_bytes + (case.input_bytes if case.training else 0)
                            row["peak_extra_bytes"] = max(0, peak - result_bytes)
                        if case.training:
                            row["saved_bytes"] = saved_bytes(provider, inputs)
                        steps = (step.forward, step.backward) if isinstance(step, TrainingStep) else (step,)
                        calls[provider.name] = steps, count
                    results, announced = _run_observed(step)
                    row["kernel"] = prepared.kernel or announced
                    require_finite(results)
                    measured = errors.of(results, prepared.output_scale)
                except Exception as error:  # A provider may raise any error: its row holds it.
                    rows[provider.name] = new_row(case, provider) | {"unavailable": reason(error)}
                    calls.pop(provider.name, None)
                else:
                    row |= {f"{name}_biased" if biased else name: value for name, value in measured.items()}
            for name, (ms, *of_steps) in median_steps_ms(calls).items():
                rows[name] |= {"ms": ms, "tflops": case.operations / ms * 1e-9}
                rows[name] |= dict(zip(("forward_ms", "backward_ms"), of_steps, strict=True)) if case.training else {}
            calls.clear()
    return list(rows.values())


def _run_observed(step: Callable[[], Tensor | Gradients]) -> tuple[Tensor | Gradients, str]:
    """Run a call; return its results, and the kernel of the plan that sage-hf announced, "" if it announced none."""
    kernels = [""]
    with record.observe(lambda call: kernels.append(call.plan.kernel)):
        results = step()
    return results, kernels[-1]


def new_row(case: BenchCase, provider: Provider) -> Row:
    """Return a row of the result with case and provider, without measurements."""
    return {**case.to_row(), "scope": provider.scope, "provider": provider.name}


def require_finite(results: Tensor | Sequence[Tensor]) -> None:
    """Raise ArithmeticError if a result contains NaN or infinity, because its speed would have no meaning."""
    for x in [results] if isinstance(results, Tensor) else results:
        if not (x.float() if x.dtype.itemsize == 1 else x).isfinite().all():
            raise ArithmeticError("the result holds NaN or infinity")


class SampledErrors:
    """Errors against exact attention in float64, for some rows of the first sample's first and last head."""

    def __init__(self, inputs: CaseInputs) -> None:
        query, key, value = inputs.tensors
        q_heads, tokens = query.shape[1:3]
        self._heads = torch.tensor([0, q_heads - 1], device=query.device)
        self._rows = torch.linspace(0, tokens - 1, min(ERROR_ROWS, tokens), device=query.device).long()
        kv_heads = self._heads // (q_heads // key.shape[1])
        mask = inputs.mask
        if mask is not None:
            mask = mask.expand(query.shape[0], q_heads, tokens, key.shape[2])[:1, self._heads][:, :, self._rows]
        if inputs.case.upper_left:
            causal = torch.arange(key.shape[2], device=query.device) <= self._rows[:, None]
            mask = causal[None, None] if mask is None else causal & mask
        self._truth, _ = sdpa.attention(self._sample(query), key[:1, kv_heads], value[:1, kv_heads], mask=mask)

    def of(self, output: Tensor, scale: float = 1.0) -> dict[str, float]:
        """Return rel_l1 and cosine of output · scale; output (batch, q_heads, tokens, head_dim), any dtype."""
        errors = tensor_errors(self._truth, self._sample(output).double() * scale)
        return {"rel_l1": errors.rel_l1, "cosine": errors.cosine}

    def _sample(self, x: Tensor) -> Tensor:
        return torch.stack([x[0, head, self._rows] for head in self._heads.tolist()])[None]


class SampledGradientErrors:
    """Errors against exact gradients in float64, for the first sample's first and last key head with their queries."""

    def __init__(self, inputs: CaseInputs) -> None:
        self._kv_heads = inputs.case.kv_heads
        assert inputs.gradient is not None
        tensors = (self._sample(x.detach()) for x in (inputs.gradient, *inputs.tensors))
        self._truth = exact_gradients(*tensors, is_causal=inputs.case.upper_left)

    def of(self, gradients: Gradients, scale: float = 1.0) -> dict[str, float]:
        """Return the errors <name>_rel_l1 of output, dq, dk and dv, each multiplied by scale."""
        pairs = zip(ERRORS, self._truth, gradients, strict=True)
        return {f"{name}_rel_l1": tensor_errors(truth, self._sample(x) * scale).rel_l1 for name, truth, x in pairs}

    def _sample(self, x: Tensor) -> Tensor:
        groups = x[:1].unflatten(1, (self._kv_heads, -1))
        return groups[:, list(dict.fromkeys((0, self._kv_heads - 1)))].flatten(1, 2)


class TrainingStep:
    """Forward pass with its backward pass, as two steps that can be timed separately.

    Args:
        attend: computes the forward pass of the inputs' query, key and value.
        inputs: inputs with a gradient, which is copied to the output's memory layout, as in a model.
    """

    def __init__(self, attend: Callable[[], Tensor], inputs: CaseInputs) -> None:
        assert inputs.gradient is not None
        self._attend, self._inputs, self._gradient = attend, inputs.tensors, inputs.gradient
        self._output: Tensor | None = None

    def forward(self) -> Tensor:
        """Return the output, and keep it for `backward`."""
        self._output = self._attend()
        if self._output.stride() != self._gradient.stride():
            self._gradient = torch.empty_like(self._output).copy_(self._gradient)
        return self._output

    def backward(self) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value, and release the output that `forward` kept."""
        assert self._output is not None
        output, self._output = self._output, None
        return torch.autograd.grad(output, self._inputs, self._gradient)

    def __call__(self) -> Gradients:
        output = self.forward().detach()
        return Gradients(output, *self.backward())


def saved_bytes(provider: Provider, inputs: CaseInputs) -> int:
    """Return the bytes that stay allocated between forward and backward if the caller keeps nothing but the output.

    Query, key and value are copied, and only the graph keeps the copies.
    """
    before = torch.cuda.memory_allocated()
    copies: Any = replace(inputs, **{name: getattr(inputs, name).clone() for name in ("query", "key", "value")})
    output = within(provider, provider.prepare(copies).call)()
    del copies
    saved = torch.cuda.memory_allocated() - before
    del output
    return saved
