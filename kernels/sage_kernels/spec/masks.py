"""Attention masks as tensors: their meaning, and the forms that kernels take."""

from __future__ import annotations

import sys

import torch

from .layout import round_up
from .options import Options

ROW_ELEMENTS = 8  # of an additive mask: PyTorch copies masks whose strides are no multiples of it


def as_key_mask(mask: torch.Tensor | None, kv_len: int) -> torch.Tensor | None:
    """Return which keys exist, bool (batch or 1, kv_len), if that is all the 4-D mask says; otherwise None."""
    if mask is None or mask.dtype != torch.bool:
        return None
    mask = unexpanded(mask)
    if mask.shape[1] != 1 or mask.shape[2] != 1:
        return None
    return mask[:, 0, 0].expand(-1, kv_len)


def with_leading_dims(x: torch.Tensor, dims: int = 4) -> torch.Tensor:
    """Return x with at least `dims` dimensions: dimensions of size 1 are put before its own."""
    return x[(None,) * (dims - x.dim())]


def without_causal_bias(
    mask: torch.Tensor | None, options: Options, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor | None, Options]:
    """Return a call's mask and options; turn PyTorch's CausalBias, a tensor without values, into options.

    Raises:
        ValueError: the CausalBias was made for other numbers of queries and keys.
    """
    bias = sys.modules.get("torch.nn.attention.bias")  # importing it would load PyTorch's compiler
    if bias is None or not isinstance(mask, bias.CausalBias):
        return mask, options
    bias_lengths, lengths = (mask.seq_len_q, mask.seq_len_kv), (*query.shape[-2:-1], *key.shape[-2:-1])
    if bias_lengths != lengths:
        raise ValueError(
            f"a CausalBias of (queries, keys) {bias_lengths} was given for {lengths}: make a CausalBias for {lengths}"
        )
    offset = bias_lengths[1] - bias_lengths[0] if mask.variant is bias.CausalVariant.LOWER_RIGHT else 0
    offset = min(offset, options.causal_offset) if options.is_causal else offset
    return None, options.replace(is_causal=True, causal_offset=offset)


def unexpanded(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask without repetitions: dimensions of stride 0 get size 1, so work on it scales with its storage."""
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def attended_rows(mask: torch.Tensor) -> torch.Tensor:
    """Return which rows may attend to some key: bool, broadcastable to the mask's shape with its last dimension 1."""
    mask = unexpanded(mask)
    if mask.dtype == torch.bool or mask.shape[-1] == 0:
        return mask.bool().any(-1, keepdim=True)
    return mask.detach().amax(-1, keepdim=True) != -torch.inf  # reads the mask once, and writes nothing of its size


def with_causality(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal_offset: int = 0
) -> torch.Tensor:
    """Return a mask that also keeps row i from keys beyond i + causal_offset.

    Args:
        mask: bool or additive, broadcastable to (batch, q_heads, q_len, kv_len), or None.
        query, key: as in `attention`.

    Returns:
        As mask, or bool, at least (1, 1, q_len, kv_len).
    """
    seen = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(causal_offset)
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def mask_in_dtype(mask: torch.Tensor, dtype: torch.dtype, largest: float | None = None) -> torch.Tensor:
    """Return an additive mask in `dtype`, finite numbers clamped to ±`largest`; return a bool mask unchanged.

    A row whose biases are all the lowest number attends uniformly; with -inf it would attend to nothing.

    Args:
        mask: bool or additive.
        dtype: a floating dtype.
        largest: default the largest number of `dtype`. A mask that has this dtype already is returned unchanged.
    """
    if mask.dtype in (torch.bool, dtype):
        return mask
    converted = mask.to(dtype)
    limit = torch.finfo(dtype).max if largest is None else min(largest, torch.finfo(dtype).max)
    if torch.finfo(mask.dtype).max <= limit:
        return converted
    return torch.where(mask.isinf(), converted, converted.clamp(-limit, limit))


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a bool mask as the numbers that are added to scores, 0 and -inf; return an additive mask unchanged.

    Returns:
        For a bool mask: a tensor of its size in `dtype`, with size 1 where the mask is broadcast; rows begin at
        multiples of 16 bytes.
    """
    if mask.dtype != torch.bool:
        return mask
    mask = unexpanded(mask)
    *sizes, columns = mask.shape
    rows = torch.empty((*sizes, round_up(columns, ROW_ELEMENTS)), dtype=dtype, device=mask.device)
    return torch.log(mask, out=rows[..., :columns])  # in one launch
