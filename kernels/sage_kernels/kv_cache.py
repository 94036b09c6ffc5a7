"""Entry points of the low-bit KV cache: store tokens, decode, and return whole K and V.

`reference.kv_cache` specifies the format, and `spec.kv_cache` the tensors.
"""

from __future__ import annotations

from importlib import import_module

import torch

from . import backends  # noqa: F401 - `backends` registers the kernels
from .dispatch import self_check
from .dispatch.kv_kernels import KVKernel, select_kv_kernel
from .spec.checks import SUPPORTED_DTYPES
from .spec.kv_cache import MAX_QUERIES, KVCache


def store(
    cache: KVCache,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None = None,
) -> None:
    """Append tokens; the first tokens appended decide the cache's transforms.

    Args:
        cache: a cache of any length.
        query: (batch, q_heads, tokens, head_dim), the queries of these tokens; None: unknown.
        key, value: (batch, kv_heads, tokens, head_dim).
        key_mask: bool (batch or 1, tokens), False for padding, by which the cache knows where sequences start; None: no
            padding.

    Query, key and value are float16, bfloat16 or float32, on the cache's device.

    Raises:
        ValueError: a size, dtype or device differs from the cache's.
    """
    check_tokens(cache, query, key, value)
    _check_key_mask(cache, key_mask, key.shape[2])
    if not cache.is_frozen:
        self_check.check_kv(cache.format.name, cache.head_dim, cache.device)
        import_module(".reference.kv_cache", __package__).freeze(cache, query, key, value, key_mask)
    kernel, _ = select_kv_kernel(cache, None)
    kernel.append(cache, key, value)


def decode(
    cache: KVCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, str, str]:
    """Append at most MAX_QUERIES tokens to the cache, and attend with these tokens causally to all tokens.

    Args:
        cache: a cache with earlier tokens.
        query: (batch, q_heads, q_len, head_dim).
        key, value: (batch, kv_heads, q_len, head_dim).
        key_mask: bool (batch or 1, length + q_len), True for columns that exist; None: all.
        scale: factor of the scores, above 0.

    Query, key and value are float16, bfloat16 or float32, on the cache's device.

    Returns:
        The output, (batch, q_heads, q_len, head_dim) in query's dtype; the kernel that ran; why no better kernel ran.

    Raises:
        ValueError: a size, dtype or device differs from the cache's, the cache is empty, or scale is not above 0.
    """
    check_tokens(cache, query, key, value)
    _check_key_mask(cache, key_mask, cache.length + key.shape[2])
    if not cache.length or not scale > 0 or key.shape[2] > MAX_QUERIES:
        raise ValueError(
            f"KV cache: decoding takes 1…{MAX_QUERIES} tokens after at least 1 earlier token, and a scale above 0; got "
            f"{key.shape[2]} behind {cache.length}, and {scale}"
        )
    kernel, reason = select_kv_kernel(cache, query)
    output = kernel.decode(cache, query, key, value, key_mask, scale)
    return output, kernel_name(kernel), reason


def kernel_name(kernel: KVKernel) -> str:
    """Return a kernel's name; with " (emulated)" if the kernel is not native."""
    return kernel.name if kernel.native else f"{kernel.name} (emulated)"


def read_all(cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V, dequantised, (batch, kv_heads, length, head_dim) in the dtype of the caller's K."""
    key, value = import_module(".reference.kv_cache", __package__).read_all(cache)
    return key, value


def check_tokens(cache: KVCache, query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ValueError for tensors whose shape, dtype or device a kernel cannot read."""
    size = cache.batch, cache.kv_heads, key.shape[-2], cache.head_dim
    if key.shape != size or value.shape != size or not size[2]:
        raise ValueError(
            f"KV cache: key and value must be ({size[0]}, {size[1]}, tokens, {size[3]}), with 1 token at least; got "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    if query is not None:
        size = size[0], query.shape[1], size[2], size[3]
        if query.shape != size or not size[1] or size[1] % cache.kv_heads:
            raise ValueError(
                f"KV cache: query must be ({size[0]}, a multiple of {cache.kv_heads}, {size[2]}, {size[3]}); got "
                f"{tuple(query.shape)}"
            )
    device = cache.device
    for x in (key, value) if query is None else (query, key, value):
        if x.dtype not in SUPPORTED_DTYPES or x.device != device:
            raise ValueError(
                f"KV cache: tensors must be float16, bfloat16 or float32 on {device}; got {x.dtype} on {x.device}"
            )


def _check_key_mask(cache: KVCache, key_mask: torch.Tensor | None, length: int) -> None:
    """Raise ValueError unless `key_mask` is None or has an element for each column."""
    if key_mask is None:
        return
    if key_mask.shape not in ((cache.batch, length), (1, length)):
        raise ValueError(f"KV cache: key_mask must be ({cache.batch} or 1, {length}); got {tuple(key_mask.shape)}")
    if key_mask.dtype != torch.bool or key_mask.device != cache.device:
        raise ValueError(
            f"KV cache: key_mask must be bool on {cache.device}; got {key_mask.dtype} on {key_mask.device}"
        )
