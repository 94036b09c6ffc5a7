"""The record of low-bit KV caches: their layers, their contents, and the kernels that decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn


@dataclass
class KVRecord:
    """Facts about a model's cache, which outlive the cache.

    Attributes:
        format: format of the low-bit layers.
        exact_layers: reason why layers stay in 16 bits -> the layers' numbers.
        tokens: number of tokens in the cache; if the device counts them, a tensor whose first element is the number.
        bytes: number of a low-bit layer -> bytes of its tensors.
        kernels: kernel that decoded, or "whole K and V" -> why no better kernel did; "" if it is the best.
    """

    format: str
    exact_layers: dict[str, list[int]] = field(default_factory=dict)
    tokens: int | torch.Tensor = 0
    bytes: dict[int, int] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        # Copies, because another thread may be writing.
        tokens = int(torch.as_tensor(self.tokens).flatten()[0])
        text = f"KV cache: {self.format} in {len(self.bytes)} layers, {tokens:,} tokens, "
        text += f"{sum(self.bytes.copy().values()):,} bytes"
        for kernel, reason in self.kernels.copy().items():
            text += f"; decoded by {kernel}" + (f" ({reason})" if reason else "")
        for reason, layers in self.exact_layers.copy().items():
            text += f"; 16 bits in layers {', '.join(map(str, layers))} ({reason})"
        return text


records: WeakKeyDictionary[nn.Module, KVRecord] = WeakKeyDictionary()
"""The record of the cache that an attention layer used last."""


def forget(layer: nn.Module) -> None:
    """Forget the cache that a layer used last."""
    records.pop(layer, None)
