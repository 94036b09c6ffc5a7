"""Zeros in the rows and batch elements that have no key: of the others, only the mask is read."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..exact import unexpanded
from ..language.launch import MASK_AXES, UNSPECIALIZED, launch, strides
from ..layout import ceil_div, power_of_two, stride_of

PROGRAMS = 8  # of a batch element
WIDTH = 1024  # keys whose mask is read at once
ROWS = 32  # that are written at once
FIRST_KEYS, MORE_KEYS = 64, 256
"""Keys of each of ROWS rows that are read at first, where most rows have one, and then at once."""
SHARED_KEYS = 2048
"""Keys that are read at once of a row that all queries share."""


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


def clear_rows(mask: torch.Tensor, output: torch.Tensor) -> None:
    """Write zeros to the rows without a key. Of a mask only so much is read as shows a key in each row.

    Args:
        mask: bool or additive, broadcastable to (batch, heads, tokens, keys).
        output: (batch, heads, tokens, channels), the channels adjacent in memory.
    """
    if 0 in output.shape:
        return
    batch, heads, tokens, channels = output.shape
    mask = unexpanded(mask[(None,) * (4 - mask.dim())])
    additive, shared = mask.dtype != torch.bool, mask.shape[2] == 1
    mask_strides = (stride_of(mask), *(mask.stride(dim) if mask.shape[dim] > 1 else 0 for dim in (1, 2, 3)))
    launch(
        clear_unattended,
        (ceil_div(tokens, ROWS), mask.shape[1], mask.shape[0]),
        output=output,
        mask=mask if additive else mask.view(torch.uint8),
        tokens=tokens,
        keys=mask.shape[3],
        channels=channels,
        batches=batch // mask.shape[0],
        heads=heads // mask.shape[1],
        **strides("output", output.stride()[:3]),
        **strides("mask", mask_strides, MASK_AXES),
        ROWS=ROWS,
        MASK_ROWS=1 if shared else ROWS,
        FIRST=SHARED_KEYS if shared else FIRST_KEYS,
        WIDTH=SHARED_KEYS if shared else MORE_KEYS,
        CHANNELS=power_of_two(channels),
        ADDITIVE=additive,
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


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "keys", "channels", "batches"])
def clear_unattended(
    output,
    mask,
    tokens,
    keys,
    channels,
    batches,
    heads,
    output_stride_batch,
    output_stride_head,
    output_stride_token,
    mask_stride_batch,
    mask_stride_head,
    mask_stride_row,
    mask_stride_column,
    ROWS: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ADDITIVE: tl.constexpr,
):
    """Write zeros to those of ROWS rows that have no key, in the batch elements and heads that share this mask.

    Of the mask, MASK_ROWS rows are theirs: as many, or one for all. Its first FIRST keys are read, then WIDTH at once.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(0) * ROWS
    mask_row = first_row + tl.arange(0, MASK_ROWS)
    base = mask + batch * mask_stride_batch + head * mask_stride_head + mask_row.to(tl.int64) * mask_stride_row
    found = tl.where(mask_row < tokens, 0, 1)
    found = find_keys(found, base, 0, keys, mask_stride_column, FIRST, ADDITIVE)
    start = FIRST
    while (start < keys) & (tl.min(found, 0) == 0):
        found = find_keys(found, base, start, keys, mask_stride_column, WIDTH, ADDITIVE)
        start += WIDTH
    if tl.min(found, 0) != 0:
        return
    row, channel = first_row + tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    cleared = ((found == 0) & (row < tokens))[:, None] & (channel < channels)[None, :]
    for index in range(0, batches * heads):
        at = output + (batch * batches + index // heads) * output_stride_batch
        at += (head * heads + index % heads) * output_stride_head
        at = at + (row.to(tl.int64) * output_stride_token)[:, None] + channel[None, :]
        tl.store(at, tl.zeros((ROWS, CHANNELS), output.dtype.element_ty), mask=cleared)


@triton.jit
def find_keys(found, base, start, keys, stride, WIDTH: tl.constexpr, ADDITIVE: tl.constexpr):
    """Return `found` with 1 also for the rows of a mask that have a key among WIDTH ones from `start` on."""
    column = start + tl.arange(0, WIDTH)
    at = base[:, None] + column.to(tl.int64)[None, :] * stride
    wanted = (found == 0)[:, None] & (column < keys)[None, :]
    if ADDITIVE:
        allowed = tl.load(at, mask=wanted, other=float("-inf")) != float("-inf")
    else:
        allowed = tl.load(at, mask=wanted, other=0) != 0
    return tl.maximum(found, tl.max(allowed.to(tl.int32), 1))
