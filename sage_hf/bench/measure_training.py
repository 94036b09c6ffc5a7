"""Timing, memory and errors of every provider's forward and backward passes, on one GPU, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_hf.bench.measure import (
    KINDS,
    Steps,
    draw,
    facts,
    first_calls,
    median_steps_ms,
    new_row,
    reason,
    require_finite,
)
from sage_hf.bench.peers import Provider
from sage_hf.bench.shapes import TRAINING_SHAPES, Shape
from sage_hf.bench.training_peers import TRAINING_PROVIDERS
from sage_hf.metrics import tensor_errors
from sage_kernels.exact.gradients import Gradients, exact_gradients

# Names in a row of the errors of `Gradients`.
ERRORS = ("output", "dq", "dk", "dv")


def run(
    device: torch.device,
    shapes: Sequence[Shape] = TRAINING_SHAPES,
    providers: Sequence[Provider] = TRAINING_PROVIDERS,
    commit: str = "",
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure forward and backward of all shapes with all providers.

    Args:
        device: a CUDA device.
        shapes, providers: what to measure.
        commit: commit of the measured source, for the record.
        progress: called with a text for each shape before it is measured.

    Returns:
        Plain data: facts about the machine, and "rows". A row has the shape, "provider" and
        - "ms" (median time of a forward with its backward, every pass included), "tflops", "kernel", "forward_ms",
          "backward_ms";
        - "compile_s": by how many seconds the first call took longer than the second;
        - "output_rel_l1", "dq_rel_l1", "dk_rel_l1", "dv_rel_l1": errors in some heads, on the timed tensors and an
          output gradient, all standard normal; the same names with "_biased": errors if K and V have means
          (`measure.draw`);
        - "saved_bytes": memory that the graph keeps between forward and backward, with query, key, value and output if
          it keeps them;
        - "peak_extra_bytes": most memory allocated during both passes, beyond inputs, output and all gradients;
        or, if the provider is missing or refuses the call, "unavailable": the reason.
    """
    with torch.cuda.device(device), torch.enable_grad():
        machine, rows = facts(device, commit), []
        for shape in shapes:
            progress(f"{shape.name}: {shape}")
            rows += measure_shape(shape, providers, device)
        return {**machine, "rows": rows}


class Step:
    """Forward pass with its backward pass, as two steps that can be timed separately.

    Args:
        attend: computes the forward pass of `inputs`.
        inputs: query, key and value, which require gradients.
        output_gradient: gradient of the output; it is copied to the output's memory layout, as in a model.
    """

    def __init__(self, attend: Callable[[], Tensor], inputs: Sequence[Tensor], output_gradient: Tensor) -> None:
        self._attend, self._inputs, self._output_gradient = attend, inputs, output_gradient
        self._output: Tensor | None = None

    def forward(self) -> Tensor:
        """Return the output, and keep it for `backward`."""
        self._output = self._attend()
        if self._output.stride() != self._output_gradient.stride():
            self._output_gradient = torch.empty_like(self._output).copy_(self._output_gradient)
        return self._output

    def backward(self) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value, and release the output that `forward` kept."""
        assert self._output is not None
        output, self._output = self._output, None
        return torch.autograd.grad(output, self._inputs, self._output_gradient)

    def __call__(self) -> Gradients:
        output = self.forward().detach()
        return Gradients(output, *self.backward())


class SampledGradientErrors:
    """Errors against exact gradients in float64, for the first sample's first and last key head with their queries."""

    def __init__(self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> None:
        self._kv_heads = key.shape[1]
        tensors = (self._sample(x.detach()) for x in (output_gradient, query, key, value))
        self._truth = exact_gradients(*tensors, is_causal=is_causal)

    def of(self, found: Gradients) -> dict[str, float]:
        """Return the errors <name>_rel_l1 of output, dq, dk and dv."""
        pairs = zip(ERRORS, self._truth, found, strict=True)
        return {f"{name}_rel_l1": tensor_errors(truth, self._sample(x)).rel_l1 for name, truth, x in pairs}

    def _sample(self, x: Tensor) -> Tensor:
        groups = x[:1].unflatten(1, (self._kv_heads, -1))
        return groups[:, list(dict.fromkeys((0, self._kv_heads - 1)))].flatten(1, 2)


def saved_bytes(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> int:
    """Return the bytes that stay allocated between forward and backward if the caller keeps nothing but the output.

    Args:
        attend: (query, key, value) -> output.
        inputs: query, key and value; they are copied, and only the graph keeps the copies.
    """
    before = torch.cuda.memory_allocated()
    copies = [x.clone() for x in inputs]
    output = attend(*copies)
    copies.clear()
    kept = torch.cuda.memory_allocated() - before
    del output
    return kept


def measure_shape(shape: Shape, providers: Sequence[Provider], device: torch.device) -> list[dict[str, Any]]:
    def row_of(provider: Provider) -> dict[str, Any]:
        return new_row(shape, provider, "forward_backward")

    rows = {provider.name: row_of(provider) for provider in providers}
    calls: dict[str, Steps] = {}
    for kind in KINDS:
        try:
            query, key, value = inputs = draw(shape, kind, device)
            for x in inputs:
                x.requires_grad_()
            generator = torch.Generator(device).manual_seed(1)
            output_gradient = torch.randn(query.shape, generator=generator, device=device, dtype=query.dtype)
            errors = SampledGradientErrors(output_gradient, query, key, value, shape.causal)
        except torch.OutOfMemoryError as error:
            return [row_of(provider) | {"unavailable": reason(error)} for provider in providers]
        for provider in providers:
            row = rows[provider.name]
            if "unavailable" in row:
                continue
            try:
                prepared = provider.prepare(*inputs, shape.causal)
                step = Step(prepared.call, inputs, output_gradient)
                if kind == "normal":
                    row["kernel"] = prepared.kernel
                    row["compile_s"], peak, count = first_calls(step)
                    row["peak_extra_bytes"] = max(0, peak - shape.output_bytes - shape.input_bytes)
                    row["saved_bytes"] = saved_bytes(_prepare_and_call(provider, shape.causal), inputs)
                    calls[provider.name] = (step.forward, step.backward), count
                result = step()
                require_finite(*result)
                found = errors.of(result)
            except Exception as error:  # A provider may fail in any way: its row says how.
                rows[provider.name] = row_of(provider) | {"unavailable": reason(error)}
                calls.pop(provider.name, None)
            else:
                suffix = "" if kind == "normal" else "_biased"
                row |= {name + suffix: value for name, value in found.items()}
        for name, (ms, forward_ms, backward_ms) in median_steps_ms(calls).items():
            rows[name] |= {"ms": ms, "tflops": shape.training_operations / ms * 1e-9}
            rows[name] |= {"forward_ms": forward_ms, "backward_ms": backward_ms}
        calls.clear()
    return list(rows.values())


def _prepare_and_call(provider: Provider, is_causal: bool) -> Callable[..., Tensor]:
    return lambda query, key, value: provider.prepare(query, key, value, is_causal).call()
