"""Zeros in the batch elements that have no key: of the others, only the mask is read."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..language.launch import UNSPECIALIZED, launch, strides
from ..layout import power_of_two, stride_of

PROGRAMS = 8  # of a batch element
WIDTH = 1024  # keys whose mask is read at once
ROWS = 32  # that are written at once


def clear(valid: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Write zeros to the batch elements without a key.

    Args:
        valid: bool (batch or 1, kv_len), which keys exist.
        tensors: one or three, (batch, heads, tokens, channels), the channels adjacent in memory.
    """
    first, *others = tensors
    if 0 in first.shape:
        return
    sizes: dict[str, Any] = {}
    for name, x in zip(("first", "second", "third"), (first, *others, *[first] * (3 - len(tensors))), strict=True):
        _, heads, tokens, channels = x.shape
        sizes |= {f"{name}_heads": heads, f"{name}_tokens": tokens, f"{name}_channels": channels}
        sizes |= strides(name, x.stride()[:3])
    launch(
        clear_empty,
        (PROGRAMS, first.shape[0]),
        first=first,
        second=others[0] if others else None,
        third=others[1] if others else None,
        valid=valid.view(torch.uint8),
        keys=valid.shape[1],
        valid_stride=stride_of(valid),
        valid_stride_key=valid.stride(1),
        **sizes,
        WIDTH=WIDTH,
        ROWS=ROWS,
        CHANNELS=max(power_of_two(x.shape[3]) for x in tensors),
    )


@triton.jit
def clear_part(
    x,
    heads,
    tokens,
    channels,
    stride_batch,
    stride_head,
    stride_token,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write zeros to this program's rows of one batch element."""
    x += tl.program_id(1).to(tl.int64) * stride_batch
    channel = tl.arange(0, CHANNELS)
    for start in range(tl.program_id(0) * ROWS, heads * tokens, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        at = x + (row // tokens * stride_head + row % tokens * stride_token)[:, None] + channel[None, :]
        inside = (row < heads * tokens)[:, None] & (channel < channels)[None, :]
        tl.store(at, tl.zeros((ROWS, CHANNELS), x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "keys"])
def clear_empty(
    first,
    second,
    third,
    valid,
    keys,
    valid_stride,
    valid_stride_key,
    first_heads,
    first_tokens,
    first_channels,
    first_stride_batch,
    first_stride_head,
    first_stride_token,
    second_heads,
    second_tokens,
    second_channels,
    second_stride_batch,
    second_stride_head,
    second_stride_token,
    third_heads,
    third_tokens,
    third_channels,
    third_stride_batch,
    third_stride_head,
    third_stride_token,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write zeros to one batch element if it has no key."""
    base = valid + tl.program_id(1).to(tl.int64) * valid_stride
    lane = tl.arange(0, WIDTH)
    some = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, keys, WIDTH):
        column = start + lane
        at = base + column.to(tl.int64) * valid_stride_key
        some |= tl.load(at, mask=column < keys, other=0).to(tl.int32)
    if tl.max(some, 0) != 0:
        return
    clear_part(
        first, first_heads, first_tokens, first_channels, first_stride_batch, first_stride_head, first_stride_token,
        ROWS, CHANNELS,
    )  # fmt: skip
    if second is not None:
        clear_part(
            second, second_heads, second_tokens, second_channels, second_stride_batch, second_stride_head,
            second_stride_token, ROWS, CHANNELS,
        )  # fmt: skip
        clear_part(
            third, third_heads, third_tokens, third_channels, third_stride_batch, third_stride_head,
            third_stride_token, ROWS, CHANNELS,
        )  # fmt: skip
