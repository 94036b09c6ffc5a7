"""The record of low-bit KV caches: which layers have one, what it holds, and which kernel decodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn


@dataclass
class KVNote:
    """Facts about a model's cache, which outlive it.

    Attributes:
        format: of the layers in few bits.
        kept: reason why layers stay in 16 bits -> their numbers.
        tokens: in the cache; where the device counts them, a tensor of which it is the first element.
        bytes: number of a layer in few bits -> bytes of its tensors.
        kernels: kernel that decoded, or "whole K and V" -> why no better one did; "" if it is the best.
    """

    format: str
    kept: dict[str, list[int]] = field(default_factory=dict)
    tokens: int | torch.Tensor = 0
    bytes: dict[int, int] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        # Copies: another thread may be writing.
        tokens = int(torch.as_tensor(self.tokens).flatten()[0])
        text = f"KV cache: {self.format} in {len(self.bytes)} layers, {tokens:,} tokens, "
        text += f"{sum(self.bytes.copy().values()):,} bytes"
        for kernel, reason in self.kernels.copy().items():
            text += f"; decoded by {kernel}" + (f" ({reason})" if reason else "")
        for reason, layers in self.kept.copy().items():
            text += f"; 16 bits in layers {', '.join(map(str, layers))} ({reason})"
        return text


notes: WeakKeyDictionary[nn.Module, KVNote] = WeakKeyDictionary()
"""The cache with which an attention layer ran last."""


def forget(layer: nn.Module) -> None:
    """Forget the cache with which a layer ran last."""
    notes.pop(layer, None)
