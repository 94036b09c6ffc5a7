"""The error of every attention layer on its inputs in a real run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sage_hf import record
from sage_hf.app.metrics import ErrorSums, TensorErrors
from sage_hf.targets import find_targets
from sage_kernels import exact


@dataclass(frozen=True)
class LayerErrors:
    """Errors of a layer's attention against exact attention on the same inputs, over all observed calls."""

    layer: str
    calls: int
    errors: TensorErrors


class LayerErrorRecorder:
    """Observer that collects the errors of the layers of one pipeline or model; see `record_layer_errors`."""

    def __init__(self, pipe_or_model: object) -> None:
        targets = find_targets(pipe_or_model)
        self._names = {layer: target.label(name) for target in targets for name, layer in target.layers.items()}
        self._sums = {name: ErrorSums() for name in self._names.values()}
        self._calls: Counter[str] = Counter()

    @torch.no_grad()
    def __call__(self, call: record.AttentionCall) -> None:
        """Add the errors of one call; calls of other layers are ignored."""
        if call.layer not in self._names or not call.output.numel():
            return
        name = self._names[call.layer]
        self._calls[name] += 1
        for i in range(call.query.shape[0]):
            sample = slice(i, i + 1)
            mask = call.attn_mask
            if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
                mask = mask[sample]
            judge, _ = exact.attention(
                *(tensor[sample] for tensor in (call.query, call.key, call.value)),
                mask=mask,
                is_causal=call.is_causal,
                scale=call.scale,
                dtype=torch.float32,
            )
            self._sums[name].add(judge, call.output[sample])

    def layers(self) -> list[LayerErrors]:
        """Return the errors of the layers that were called, in the model's order."""
        return [
            LayerErrors(name, self._calls[name], sums.errors())
            for name, sums in self._sums.items()
            if self._calls[name]
        ]


@contextmanager
def record_layer_errors(pipe_or_model: object) -> Iterator[LayerErrorRecorder]:
    """Compare each eager attention call made inside the block with exact attention in float32 on the same inputs.

    This is slow: every attention is computed a second time, in full precision. Memory stays bounded, because samples
    are compared one at a time and only sums are kept.

    Raises:
        TypeError: pipe_or_model is neither a pipeline with a denoiser nor a model.
        ValueError: a model has no attention layer that can be switched.
    """
    recorder = LayerErrorRecorder(pipe_or_model)
    with record.observe(recorder):
        yield recorder
