"""Checks of a call's arguments, before any kernel is chosen."""

from __future__ import annotations

import itertools
import math

import torch

from ..runtime import torch_private
from .layout import Lengths
from .options import Options

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that recipes are defined for."""
DTYPES = (*SUPPORTED_DTYPES, torch.float64)


def check_kinds(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: Options,
) -> None:
    """Raise TypeError or ValueError for types, layouts and dtypes that no operator takes."""
    is_causal = options.is_causal
    if not isinstance(is_causal, (bool, torch.SymBool)):  # as in PyTorch: reading a tensor waits for the device
        raise TypeError(f"is_causal must be a bool; got {type(is_causal).__name__}: use bool(is_causal)")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"query, key and value must be tensors; got {type(tensor).__name__} as {name}")
        if tensor.is_nested or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} is a {_layout(tensor)} tensor of {tensor.dtype}; expected a dense one of float16, bfloat16 or "
                "float32 (float64 runs exactly): pass the unquantised tensor, quantising is done inside; pad nested "
                "ones, or pack them for sage_kernels.ops.packed_attention"
            )
    if mask is not None:
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"the mask must be a tensor or None; got {type(mask).__name__}")
        if mask.is_nested or mask.layout != torch.strided or mask.dtype not in (torch.bool, *DTYPES):
            raise TypeError(
                f"the mask is a {_layout(mask)} tensor of {mask.dtype}; expected a dense one, bool (True: may "
                "attend) or floating: use mask.bool()"
            )
    if (scale := options.scale) is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number or None; got {type(scale).__name__}: use float(scale)")
    if not torch.compiler.is_compiling() and not math.isfinite(scale):
        raise ValueError(f"scale must be finite; got {scale}")


def _layout(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(tensor.layout)


def check_memory(*tensors: torch.Tensor | None) -> None:
    """Raise RuntimeError, as PyTorch does, for a tensor with elements whose storage was freed."""
    if torch.compiler.is_compiling():
        return
    transformed = torch_private.transforms_are_active()
    for x in tensors:
        if transformed and x is not None:
            x = torch_private.without_transforms(x)
        if x is None or type(x) not in (torch.Tensor, torch.nn.Parameter):
            continue
        # Without memory, the address of a storage's first byte is 0; on the meta device it always is.
        without = x.data_ptr() == x.storage_offset() * x.element_size()
        if without and x.numel() and x.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"a tensor of shape {tuple(x.shape)} has no memory: its storage was resized to 0, as FSDP leaves "
                "parameters outside of their module's forward pass"
            )


def check_tensors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    enable_gqa: bool = True,
) -> None:
    """Raise ValueError if sizes, dtypes or devices differ: kernels read all tensors by the sizes of one.

    Args:
        query, key, value, mask: tensors of kinds that `check_kinds` accepts.
        enable_gqa: whether query may have more heads than key.

    Raises:
        ValueError: see above; the message says what to do.
        RuntimeError: see `check_memory`.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected (batch, heads, tokens, head_dim), or (tokens, "
                "heads, head_dim) of packed sequences, with the same number of dimensions in query, key and value"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device} but query is {query.dtype} on {query.device}: "
                "convert them with .to(query)"
            )
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
        raise ValueError(f"batch sizes differ: {shapes}: expand key and value to query's")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"head_dim of query and key differ: {shapes}")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(f"heads or tokens of key and value differ: {shapes}")
    q_heads, kv_heads = query.shape[1], key.shape[1]
    if q_heads != kv_heads and not enable_gqa:
        raise ValueError(f"{q_heads} query heads but {kv_heads} key heads: pass enable_gqa=True for grouped queries")
    if q_heads != kv_heads and (kv_heads == 0 or q_heads % kv_heads):
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} key heads: {shapes}")
    if mask is not None:
        if mask.device != query.device:
            raise ValueError(
                f"the mask is on {mask.device} but query is on {query.device}: move it with .to(query.device)"
            )
        full = (*query.shape[:3], key.shape[2])
        sizes = (1,) * (4 - mask.dim()) + mask.shape
        # Not `size not in (1, target)`, which torch.compile decides without a guard if the target is a dynamic size.
        if mask.dim() > 4 or any(size != 1 and size != target for size, target in zip(sizes, full, strict=True)):
            raise ValueError(
                f"the mask of shape {tuple(mask.shape)} does not broadcast to (batch, q_heads, q_len, kv_len) = {full}"
            )
    check_memory(query, key, value, mask)


def check_head_dims(query: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ValueError for tensors without channels: no operator makes operands of them."""
    if 0 in (query.shape[3], value.shape[3]):
        raise ValueError(f"no head_dim may be 0; got query {tuple(query.shape)}, value {tuple(value.shape)}")


def check_lengths(query: torch.Tensor, key: torch.Tensor, lengths: Lengths | None) -> None:
    """Raise ValueError for lengths of packed sequences that would make a kernel read out of bounds.

    Values of lengths on a GPU are not checked, because the host would have to wait for them; nor are values inside a
    compiled graph, whose operators check them.
    """
    if lengths is None:
        return
    cu_seqlens_q, cu_seqlens_k, _, _, seqused_k = lengths
    check_memory(cu_seqlens_q, cu_seqlens_k, seqused_k)
    if query.shape[0] != 1:
        raise ValueError(f"packed sequences lie in one batch element; got {query.shape[0]}")
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.shape[0] == 0:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must both be (sequences + 1,); "
            f"got {tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
        )
    sequences = cu_seqlens_q.shape[0] - 1
    if seqused_k is not None and seqused_k.shape != (sequences,):
        raise ValueError(f"seqused_k must be ({sequences},), one for each sequence; got {tuple(seqused_k.shape)}")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k)):
        if x is not None and (x.dtype not in (torch.int32, torch.int64) or x.device != query.device):
            raise ValueError(f"{name} must hold integers on {query.device}; got {x.dtype} on {x.device}")
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        check_values_of_lengths(query, key, lengths)


def check_values_of_lengths(query: torch.Tensor, key: torch.Tensor, lengths: Lengths) -> None:
    """Raise ValueError for lengths that do not fit the tokens of tensors (1, heads, tokens, channels)."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k = lengths
    for name, starts, tokens, longest in (
        ("q", cu_seqlens_q.tolist(), query.shape[2], max_seqlen_q),
        ("k", cu_seqlens_k.tolist(), key.shape[2], max_seqlen_k),
    ):
        steps = [stop - start for start, stop in itertools.pairwise(starts)]
        if starts[0] != 0 or starts[-1] > tokens or any(step < 0 for step in steps):
            raise ValueError(
                f"cu_seqlens_{name} must begin at 0, never decrease, and end at the number of tokens, {tokens}; got "
                f"{starts}"
            )
        if max(steps, default=0) > longest:
            raise ValueError(f"a sequence of cu_seqlens_{name} is longer than max_seqlen_{name}, {longest}")
    if seqused_k is not None and bool((seqused_k < 0).any()):
        raise ValueError(f"seqused_k must not be negative; got {seqused_k.tolist()}")


def check_key_mask(key_mask: torch.Tensor | None, key: torch.Tensor) -> None:
    """Raise ValueError unless `key_mask` is None or has an element for each key."""
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool or key_mask.dim() != 2 or key_mask.shape[0] not in (1, key.shape[0]):
        raise ValueError(f"key_mask must be bool (batch or 1, kv_len); got {key_mask.dtype} {tuple(key_mask.shape)}")
    if key_mask.shape[1] != key.shape[2] or key_mask.device != key.device:
        raise ValueError(
            f"key_mask is {tuple(key_mask.shape)} on {key_mask.device}, key {tuple(key.shape)} on {key.device}: "
            "give one element per key"
        )
