"""Exact attention in the caller's 16 bits beside masks: each score's mask is read once, tiles that it hides are not.

PyTorch's kernels turn a bool mask into an additive one as large, compute every tile, and give NaN or 0 in rows without
a key, as the backend has it. Here such rows are 0, and grouped queries share their keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..call import Call
from ..exact import unexpanded
from ..language.launch import MASK_AXES, UNSPECIALIZED, launch, strides
from ..language.padding import key_tiles
from ..language.scores import LOG2E, mask_scores, store_clamped
from ..layout import ceil_div, power_of_two
from .configs import Config, exact_forward_config

LISTED = 256  # keys whose mask is read at once while tiles are listed


def attend(call: Call, config: Config | None = None) -> torch.Tensor:
    """Return the output, 0 in rows without a key.

    Args:
        call: not empty, not packed, without a block list, in float16 or bfloat16; Q, K and V as `layout.is_aligned`.
        config: default `configs.exact_forward_config`.
    """
    output, _ = call.new_outputs()
    call = call.for_kernel()
    query, key, value, mask = call.query, call.key, call.value, call.mask.tensor
    (batch, q_heads, q_len, head_dim), kv_len, v_head_dim = query.shape, call.kv_len, value.shape[3]
    # Below 64 channels the assembler of CUDA 12.8 gives some products a wrong address in shared memory.
    channels, v_channels = max(64, power_of_two(head_dim)), max(64, power_of_two(v_head_dim))
    kind = call.mask.kind
    config = config or exact_forward_config(max(channels, v_channels), kind)
    tiles = None
    entry_strides: tuple[int, ...] = (0, 0, 0)
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        if kind != "additive":
            tiles = list_tiles(mask, call, config)
            sizes = zip(tiles.shape[:3], tiles.stride(), strict=False)
            entry_strides = tuple(0 if size == 1 else stride for size, stride in sizes)
        mask = mask.expand(batch, q_heads, q_len, kv_len)
        mask_strides = mask.stride()
    launch(
        exact_forward,
        (ceil_div(q_len, config.block_m), q_heads, batch),
        query=query,
        key=TensorDescriptor.from_tensor(key, [1, 1, config.block_n, channels]),
        value=TensorDescriptor.from_tensor(value, [1, 1, config.block_n, v_channels]),
        output=output,
        mask=mask,
        tiles=tiles,
        q_len=q_len,
        kv_len=kv_len,
        kv_heads=key.shape[1],
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        causal_offset=call.causal_offset,
        softmax_scale=call.scale,
        **strides("query", query.stride()[:3]),
        **strides("output", output.stride()[:3]),
        **strides("mask", mask_strides, MASK_AXES),
        **strides("tiles", entry_strides, MASK_AXES),
        CHANNELS=channels,
        V_CHANNELS=v_channels,
        CAUSAL=call.is_causal,
        MASK=kind,
        **config.constants,
    )
    return output


def list_tiles(mask: torch.Tensor, call: Call, config: Config) -> torch.Tensor:
    """List the tiles of scores in which some query may attend to some key.

    Args:
        mask: uint8, the call's.

    Returns:
        int32 (mask batch, mask heads, row blocks, 2 + tiles): their number, then 2 · tile + (1 if some of its scores
        are masked) for each, in order; one place more may be read. Sizes are 1 where the mask is broadcast.
    """
    q_len, kv_len = call.q_len, call.kv_len
    stored = unexpanded(mask)
    batches, heads, rows = stored.shape[:3]
    block_m, row_blocks = (config.block_m, ceil_div(q_len, config.block_m)) if call.is_causal or rows > 1 else (1, 1)
    expanded = mask.expand(*mask.shape[:2], q_len, kv_len)
    tiles = mask.new_empty((batches, heads, row_blocks, 2 + ceil_div(kv_len, config.block_n)), dtype=torch.int32)
    launch(
        list_allowed,
        (row_blocks, heads, batches),
        mask=expanded,
        tiles=tiles,
        q_len=q_len,
        kv_len=kv_len,
        causal_offset=call.causal_offset,
        **strides("mask", expanded.stride(), MASK_AXES),
        places=tiles.shape[3],
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        WIDTH=LISTED,
        CAUSAL=call.is_causal,
        num_warps=8 if block_m > 1 else 4,
    )
    return tiles


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "places"])
def list_allowed(
    mask,
    tiles,
    q_len,
    kv_len,
    causal_offset,
    mask_stride_batch,
    mask_stride_head,
    mask_stride_row,
    mask_stride_column,
    places,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """List the tiles of one block of rows of one (mask batch, mask head)."""
    block, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    tiles += ((batch * tl.num_programs(1) + head) * tl.num_programs(0) + block) * places
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_row = (row < q_len)[:, None]
    base = mask + batch * mask_stride_batch + head * mask_stride_head + row.to(tl.int64)[:, None] * mask_stride_row
    number = 0
    for start in range(0, kv_len, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = inside_row & (column < kv_len)[None, :]
        at = base + column.to(tl.int64)[None, :] * mask_stride_column
        allowed = tl.load(at, mask=inside, other=0) != 0
        if CAUSAL:
            allowed = allowed & (column[None, :] <= row[:, None] + causal_offset)
        some = tl.max(allowed.to(tl.int32), 0)
        every = tl.min((allowed | ~inside_row).to(tl.int32), 0)
        seen = tl.max(tl.reshape(some, (WIDTH // BLOCK_N, BLOCK_N)), 1)
        whole = tl.min(tl.reshape(every, (WIDTH // BLOCK_N, BLOCK_N)), 1)
        entry = 2 * (start // BLOCK_N + tl.arange(0, WIDTH // BLOCK_N)) + 1 - whole
        tl.store(tiles + number + tl.cumsum(seen, 0), entry, mask=seen != 0)
        number += tl.sum(seen, 0)
    tl.store(tiles, number)


@triton.jit
def attend_tile(
    start,
    needs_mask,
    q,
    key,
    value,
    batch,
    kv_head,
    scale,
    mask,
    row,
    q_len,
    kv_len,
    causal_offset,
    mask_stride_row,
    mask_stride_column,
    row_max,
    row_sum,
    acc,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys from `start` on; return the new (row_max, row_sum, acc).

    Without MASKED every score counts. With it those are masked where `needs_mask` is not 0. Other arguments are those
    of `exact_forward`, `mask` that of its (batch, head).
    """
    k = key.load([batch, kv_head, start, 0]).reshape(BLOCK_N, CHANNELS)
    x = tl.dot(q, k.T) * scale
    if MASKED:
        column = start + tl.arange(0, BLOCK_N)
        if needs_mask != 0:
            x = mask_scores(
                x, mask, row, column, q_len, kv_len, causal_offset, mask_stride_row, mask_stride_column, CAUSAL, MASK
            )
    new_max = tl.maximum(row_max, tl.max(x, 1))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    decay = tl.exp2(row_max - finite_max)
    p = tl.exp2(x - finite_max[:, None])
    row_sum = row_sum * decay + tl.sum(p, 1)
    v = value.load([batch, kv_head, start, 0]).reshape(BLOCK_N, V_CHANNELS)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def exact_forward(
    query,
    key,
    value,
    output,
    mask,
    tiles,
    q_len,
    kv_len,
    kv_heads,
    head_dim,
    v_head_dim,
    causal_offset,
    softmax_scale,
    query_stride_batch,
    query_stride_head,
    query_stride_token,
    output_stride_batch,
    output_stride_head,
    output_stride_token,
    mask_stride_batch,
    mask_stride_head,
    mask_stride_row,
    mask_stride_column,
    tiles_stride_batch,
    tiles_stride_head,
    tiles_stride_row,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Compute BLOCK_M rows of one (batch, q head) of K and V, tensor descriptors, over the tiles of `list_tiles`."""
    # Later rows attend to more keys: start with those, so that short programs fill the gaps at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2)
    kv_head = head // (tl.num_programs(1) // kv_heads)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row.to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    at = query + batch.to(tl.int64) * query_stride_batch + head.to(tl.int64) * query_stride_head
    at += token[:, None] * query_stride_token + channel[None, :]
    q = tl.load(at, mask=(row < q_len)[:, None] & (channel < head_dim)[None, :], other=0.0)
    scale = softmax_scale * LOG2E
    acc = tl.zeros((BLOCK_M, V_CHANNELS), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if MASK != "none":
        mask += batch.to(tl.int64) * mask_stride_batch + head.to(tl.int64) * mask_stride_head
    if MASK == "none" or MASK == "additive":
        _, _, full_end, columns = key_tiles(
            tiles, batch, 0, kv_len, block, causal_offset, BLOCK_M, BLOCK_N, CAUSAL, False
        )
        if MASK == "additive":
            full_end = 0
        for tile in range(0, full_end):
            row_max, row_sum, acc = attend_tile(
                tile * BLOCK_N, 0, q, key, value, batch, kv_head, scale, mask, row, q_len, kv_len, causal_offset,
                mask_stride_row, mask_stride_column, row_max, row_sum, acc,
                CHANNELS, V_CHANNELS, BLOCK_N, CAUSAL, MASK, False,
            )  # fmt: skip
        for tile in range(full_end, tl.cdiv(columns, BLOCK_N)):
            row_max, row_sum, acc = attend_tile(
                tile * BLOCK_N, 1, q, key, value, batch, kv_head, scale, mask, row, q_len, kv_len, causal_offset,
                mask_stride_row, mask_stride_column, row_max, row_sum, acc,
                CHANNELS, V_CHANNELS, BLOCK_N, CAUSAL, MASK, True,
            )  # fmt: skip
    else:
        tiles += batch.to(tl.int64) * tiles_stride_batch + head.to(tl.int64) * tiles_stride_head
        tiles += block * tiles_stride_row
        entry = tl.load(tiles + 1)
        for index in range(0, tl.load(tiles)):
            following = tl.load(tiles + 2 + index)  # loaded a tile ahead: loads of K and V wait for it
            row_max, row_sum, acc = attend_tile(
                entry // 2 * BLOCK_N, entry % 2, q, key, value, batch, kv_head, scale, mask, row, q_len, kv_len,
                causal_offset, mask_stride_row, mask_stride_column, row_max, row_sum, acc,
                CHANNELS, V_CHANNELS, BLOCK_N, CAUSAL, MASK, True,
            )  # fmt: skip
            entry = following
    acc = acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    channel = tl.arange(0, V_CHANNELS)
    into = output + batch.to(tl.int64) * output_stride_batch + head.to(tl.int64) * output_stride_head
    into += token[:, None] * output_stride_token + channel[None, :]
    store_clamped(into, acc, (row < q_len)[:, None] & (channel < v_head_dim)[None, :])
