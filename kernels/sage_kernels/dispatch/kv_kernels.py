"""Registry of the kernels of a low-bit KV cache (`spec.kv_cache`), and the choice of a step's kernel."""

from __future__ import annotations

from typing import Protocol

import torch

from ..runtime.hardware import capability_of
from ..spec.kv_cache import KVCache
from . import registry, verdicts
from .kernels import NamedKernel


class KVKernel(NamedKernel, Protocol):
    """Implementation of a cache's two operations.

    Kernels that serve the same cache store the same bits in it; `unsupported` refuses caches of another layout.
    """

    @property
    def native(self) -> bool:
        """Return whether it attends to the codes directly, and writes no dequantised tensor to memory."""

    def unsupported(self, cache: KVCache, query: torch.Tensor | None) -> str:
        """Return why it cannot append (query None), or append and attend; "" if it can."""

    def append(self, cache: KVCache, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store tokens (batch, kv_heads, tokens, head_dim) and count them."""

    def decode(
        self,
        cache: KVCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Append tokens and attend with them, causally; see `reference.kv_cache.attend_to_cache`.

        With a cache that `counts_on_device`, a native kernel does not wait for the device. If the cache is full, it
        stores nothing and returns NaN. `key_mask` then has `capacity` columns.
        """


_kernels: dict[str, KVKernel] = {}


def register_kv_kernel(kernel: KVKernel) -> None:
    """Make a kernel available; kernels registered first are preferred. Raise ValueError if its name is taken."""
    registry.add(_kernels, kernel)


def select_kv_kernel(cache: KVCache, query: torch.Tensor | None) -> tuple[KVKernel, str]:
    """Return the kernel that serves a call, and why preferred kernels do not; the reference serves all calls."""
    reasons: list[str] = []
    name, capability = verdicts.KV + cache.format.name, capability_of(cache.device)
    for kernel in _kernels.values():
        reason = kernel.unsupported(cache, query)
        reason = reason or verdicts.failure(kernel.name, name, cache.head_dim, capability)
        if not reason:
            return kernel, "; ".join(reasons)
        reasons.append(f"{kernel.name}: {reason}")
    raise LookupError("no kernel of the KV cache is registered")


def reference_kv_kernel() -> KVKernel:
    """Return the reference, which runs PyTorch's operators alone."""
    return _kernels["reference"]
