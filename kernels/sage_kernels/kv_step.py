"""A step of decoding from a KV cache of fixed capacity, as an operator of PyTorch that is compiled and replayed.

No shape depends on the cache's length, and nothing waits for the device, which counts the tokens: a graph that is
captured once advances with each replay.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch.kv_kernels import select_kv_kernel
from .kv_cache import check_tokens, kernel_name
from .spec.kv_cache import KVCache
from .spec.kv_format import get_format

WRITTEN = (*KVCache.PER_TOKEN, "exact_key", "exact_value", "counts")
EMULATED = "kv_step_emulated"
"""Name of the operator for steps without a native kernel: it waits for the device, so no CUDA graph contains it."""

library = torch.library.Library("sage_kernels", "FRAGMENT")
_tensors = ", ".join(
    f"Tensor({chr(ord('a') + number)}!) {name}" if name in WRITTEN else f"Tensor {name}"
    for number, name in enumerate(KVCache.FIXED)
)
_schema = f"(Tensor query, Tensor key, Tensor value, Tensor? key_mask, float scale, str format, {_tensors}) -> Tensor"


def step(
    cache: KVCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    scale: float,
    *,
    emulated: bool,
) -> torch.Tensor:
    """Append a token to the cache, and attend with the token to all tokens; the device counts them.

    Args:
        cache: a cache of fixed capacity, with earlier tokens.
        query: (batch, q_heads, 1, head_dim).
        key, value: (batch, kv_heads, 1, head_dim).
        key_mask: bool (batch or 1, capacity), True for columns that exist; None: all.
        scale: factor of the scores, above 0.
        emulated: whether the kernel of `serving_kernel` emulates.

    Query, key and value are float16, bfloat16 or float32, on the cache's device.

    Returns:
        (batch, 1, q_heads, head_dim) in query's dtype. A full cache stays unchanged; a native kernel then returns NaN.

    Raises:
        ValueError: a size, dtype or device differs from the cache's; scale is not above 0; or the cache is full, and
            the kernel emulates.
    """
    check_tokens(cache, query, key, value)
    if key.shape[2] != 1 or not scale > 0:
        raise ValueError(f"KV cache: a step takes 1 token, and a scale above 0; got {key.shape[2]}, and {scale}")
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape not in _key_mask_shapes(cache)):
        raise ValueError(
            f"KV cache: key_mask must be bool {_key_mask_shapes(cache)}; got {key_mask.dtype} {key_mask.shape}"
        )
    run = torch.ops.sage_kernels.kv_step_emulated if emulated else torch.ops.sage_kernels.kv_step
    tensors = [getattr(cache, name) for name in KVCache.FIXED]
    output: torch.Tensor = run(query, key, value, key_mask, scale, cache.format.name, *tensors)
    return output


def length_of(cache: KVCache) -> torch.Tensor:
    """Return a copy of the length that the device counts, int32 without dimensions.

    It is an operator, because compiled code could read a plain expression again after a step has changed the count.
    """
    length: torch.Tensor = torch.ops.sage_kernels.kv_length(cache.counts)
    return length


def serving_kernel(cache: KVCache, query: torch.Tensor) -> tuple[str, str, bool]:
    """Return the kernel that serves a step with this query, why no better kernel serves it, and whether it emulates."""
    kernel, reason = select_kv_kernel(cache, query)
    return kernel_name(kernel), reason, not kernel.native


def _key_mask_shapes(cache: KVCache) -> tuple[tuple[int, int], ...]:
    return (cache.batch, cache.capacity), (1, cache.capacity)


def _step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    scale: float,
    format: str,
    *tensors: torch.Tensor,
) -> torch.Tensor:
    cache = KVCache.of(get_format(format), query.shape[3], key.dtype, tensors)
    kernel, _ = select_kv_kernel(cache, query)
    return kernel.decode(cache, query, key, value, key_mask, scale).transpose(1, 2).contiguous()


def _fake_step(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    batch, q_heads, q_len, head_dim = query.shape
    return query.new_empty(batch, q_len, q_heads, head_dim)


def _length(counts: torch.Tensor) -> torch.Tensor:
    return counts[0].clone()


_unsafe = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
for _name, _arguments, _implementation, _fake, _tags in (
    ("kv_step", _schema, _step, _fake_step, ()),
    (EMULATED, _schema, _step, _fake_step, _unsafe),
    ("kv_length", "(Tensor counts) -> Tensor", _length, lambda counts: counts.new_empty(()), ()),
):
    library.define(_name + _arguments, tags=(torch.Tag.pt2_compliant_tag, *_tags))
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sage_kernels::{_name}", _fake, lib=library)
