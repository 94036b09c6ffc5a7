"""Doors of the low-bit KV cache: store tokens, decode, and give back whole K and V.

`reference.kv_cache` specifies the format, `spec.kv_cache` the tensors.
"""

from __future__ import annotations

from importlib import import_module

import torch

from . import backends  # noqa: F401 - `backends` registers the kernels
from .dispatch.kv_kernels import kv_kernel
from .spec.kv_cache import KVCache


def store(
    cache: KVCache,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> None:
    """Append tokens; the first ones decide the cache's transforms.

    Args:
        cache: of any length.
        query: (batch, q_heads, tokens, head_dim) of the same tokens; None: unknown.
        key, value: (batch, kv_heads, tokens, head_dim).
        valid: bool (batch, tokens), False for padding; None: none. It says where sequences start.
    """
    if not cache.is_frozen:
        import_module(".reference.kv_cache", __package__).freeze(cache, query, key, value, valid)
    kernel, _ = kv_kernel(cache, None)
    kernel.append(cache, key, value)


def decode(
    cache: KVCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, str, str]:
    """Append at most MAX_QUERIES tokens and attend with them to the cache, causally.

    Args:
        cache: with earlier tokens.
        query: (batch, q_heads, q_len, head_dim).
        key, value: (batch, kv_heads, q_len, head_dim).
        valid: bool (batch or 1, length + q_len), which columns exist; None: all.
        scale: factor of the scores, above 0.

    Returns:
        The output, (batch, q_heads, q_len, head_dim) in query's dtype; the kernel that ran; why no better one did.
    """
    kernel, reason = kv_kernel(cache, query)
    output = kernel.decode(cache, query, key, value, valid, scale)
    return output, kernel.name if kernel.native else f"{kernel.name} (emulated)", reason


def whole(cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V, dequantised, (batch, kv_heads, length, head_dim) in the dtype of the caller's K."""
    key, value = import_module(".reference.kv_cache", __package__).whole(cache)
    return key, value
