"""Exact attention in the caller's 16 bits with masks: each mask is read once, and hidden tiles are skipped.

PyTorch's kernels turn a bool mask into an additive mask of the same size, compute every tile, and leave the result of
rows without a key to the backend. Here such rows are 0, and grouped queries share their keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..spec.call import Call
from ..spec.layout import ALIGNMENT, ceil_div, power_of_two, round_up, stride_of
from ..spec.masks import unexpanded
from .common.launch import MASK_AXES, UNSPECIALIZED, launch, strides
from .common.padding import key_tiles
from .common.scores import LOG2E, store_clamped
from .configs import TileConfig, masked_forward_config

LISTED = 256  # keys whose mask is read at once while tiles are listed
LISTED_ALONE = 2048  # the same for a mask of one row
UNLISTED = 1024  # keys up to which each program reads a key-padding mask itself
WORD = tl.constexpr(32)  # keys of a word of bits
COUNTED = tl.constexpr(256)  # entries of a list that are counted at once


def attend(call: Call, config: TileConfig | None = None) -> torch.Tensor:
    """Return the output, 0 in rows without a key.

    Args:
        call: not empty, not packed, without a block list, in float16 or bfloat16; Q, K and V pass `layout.is_aligned`.
        config: default `configs.masked_forward_config`; its block_n is 64.
    """
    output, _ = call.new_outputs()
    call = call.for_kernel()
    query, key, value, mask = call.query, call.key, call.value, call.mask.tensor
    kind: str = call.mask.kind
    (batch, q_heads, q_len, head_dim), kv_len, v_head_dim = query.shape, call.kv_len, value.shape[3]
    # Below 64 channels the assembler of CUDA 12.8 gives some products a wrong address in shared memory.
    channels, v_channels = max(64, power_of_two(head_dim)), max(64, power_of_two(v_head_dim))
    config = config or masked_forward_config(max(channels, v_channels), kind)
    bits = entries = bias = None
    mask_strides: tuple[int, ...] = (0, 0, 0)
    entry_strides: tuple[int, ...] = (0, 0, 0)
    bias_rows = 1
    if kind == "additive":
        assert mask is not None
        stored = read_by_tma(unexpanded(mask), kv_len)
        bias_rows = 1 if stored.shape[2] == 1 else config.block_m
        bias = TensorDescriptor.from_tensor(stored, [1, 1, bias_rows, config.block_n])
        mask_strides = tuple(int(size > 1) for size in stored.shape[:3])
    elif kind == "keys" and call.kv_len <= UNLISTED:
        key_mask = call.mask.key_mask
        assert key_mask is not None
        bits, kind = key_mask.view(torch.uint8), "few keys"
        mask_strides = stride_of(key_mask), 0, key_mask.stride(1)
    elif mask is not None:
        bits, entries = pack_bool_mask(mask, call, config)
        mask_strides, entry_strides = (
            tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride(), strict=False))
            for x in (bits, entries)
        )
    launch(
        masked_forward,
        (ceil_div(q_len, config.block_m), q_heads, batch),
        query=query,
        key=TensorDescriptor.from_tensor(key, [1, 1, config.block_n, channels]),
        value=TensorDescriptor.from_tensor(value, [1, 1, config.block_n, v_channels]),
        output=output,
        bits=bits,
        entries=entries,
        bias=bias,
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
        **strides("entries", entry_strides, MASK_AXES),
        CHANNELS=channels,
        V_CHANNELS=v_channels,
        CAUSAL=call.is_causal,
        MASK=kind,
        WIDTH=UNLISTED if kind == "few keys" else 0,
        BIAS_ROWS=bias_rows,
        **config.constants,
    )
    return output


def read_by_tma(bias: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Return an additive mask as the tensor memory accelerator reads it, copied only if necessary.

    Args:
        bias: (batch or 1, q_heads or 1, q_len or 1, kv_len or 1).
        kv_len: number of keys.

    Returns:
        (batch or 1, q_heads or 1, q_len or 1, kv_len): rows are adjacent numbers and begin at multiples of 16 bytes.
    """
    elements = ALIGNMENT // bias.element_size()
    sizes = (*bias.shape[:3], kv_len)
    placed = [stride for size, stride in zip(sizes[:3], bias.stride(), strict=False) if size > 1]
    in_place = bias.shape[3] == kv_len and bias.stride(3) == 1 and all(stride % elements == 0 for stride in placed)
    if in_place and bias.data_ptr() % ALIGNMENT == 0:
        # Nothing reads the stride of a dimension of size 1, but the accelerator must accept it.
        pitches = [elements if size == 1 else stride for size, stride in zip(sizes[:3], bias.stride(), strict=False)]
        return bias.as_strided(sizes, (*pitches, 1))
    copy = bias.new_empty((*sizes[:3], round_up(kv_len, elements)))[..., :kv_len]
    launch(
        copy_rows,
        (sizes[2], sizes[1], sizes[0]),
        source=bias,
        target=copy,
        kv_len=kv_len,
        **strides("source", (*bias.stride()[:3], bias.stride(3) if bias.shape[3] > 1 else 0), MASK_AXES),
        **strides("target", copy.stride(), MASK_AXES),
        BLOCK=1024,
    )
    return copy


def pack_bool_mask(mask: torch.Tensor, call: Call, config: TileConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a bool mask once: pack it, and list the tiles of scores in which some query may attend to some key.

    Args:
        mask: the call's mask, bool. If it has more than one row, causality is applied to it.

    Returns:
        (bits, entries): bits int32 (mask batch, mask heads, mask rows, words), bit i of word j for key 32 j + i;
        entries int32 (mask batch, mask heads, row blocks, 2 + tiles): the number of tiles, then 2 · tile + (1 if some
        of its scores are masked) for each, in order, and one place more that may be read. Sizes are 1 where the mask
        is broadcast.
    """
    kv_len = call.kv_len
    mask = mask.view(torch.uint8)
    batches, heads, rows, _ = unexpanded(mask).shape
    block_m, width = (config.block_m, LISTED) if rows > 1 else (1, LISTED_ALONE)
    mask = mask.expand(*mask.shape[:3], kv_len)
    entries = mask.new_empty(
        (batches, heads, ceil_div(rows, block_m), 2 + ceil_div(kv_len, config.block_n)), dtype=torch.int32
    )
    words = ceil_div(kv_len, width) * (width // WORD.value)
    bits = mask.new_empty((batches, heads, rows, words), dtype=torch.int32)
    launch(
        list_allowed,
        (entries.shape[2], heads, batches),
        mask=mask,
        bits=bits,
        entries=entries,
        rows=rows,
        keys=kv_len,
        causal_offset=call.causal_offset,
        **strides("mask", mask.stride(), MASK_AXES),
        words=words,
        places=entries.shape[3],
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        WIDTH=width,
        BITS=WORD.value,
        CAUSAL=call.is_causal and rows > 1,
        num_warps=8 if rows > 1 else 4,
    )
    return bits, entries


@triton.jit(do_not_specialize=UNSPECIALIZED)
def copy_rows(
    source,
    target,
    kv_len,
    source_stride_batch,
    source_stride_head,
    source_stride_row,
    source_stride_column,
    target_stride_batch,
    target_stride_head,
    target_stride_row,
    target_stride_column,
    BLOCK: tl.constexpr,
):
    """Copy one row of an additive mask."""
    row, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    source += batch * source_stride_batch + head * source_stride_head + row * source_stride_row
    target += batch * target_stride_batch + head * target_stride_head + row * target_stride_row
    for start in range(0, kv_len, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(source + column.to(tl.int64) * source_stride_column, mask=column < kv_len)
        tl.store(target + column * target_stride_column, x, mask=column < kv_len)


@triton.jit(do_not_specialize=["rows", "causal_offset", "words", "places"])
def list_allowed(
    mask,
    bits,
    entries,
    rows,
    keys,
    causal_offset,
    mask_stride_batch,
    mask_stride_head,
    mask_stride_row,
    mask_stride_column,
    words,
    places,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Pack BLOCK_M rows of one (mask batch, mask head), and list their tiles."""
    block, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pair = batch * tl.num_programs(1) + head
    entries += (pair * tl.num_programs(0) + block) * places
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    base = mask + batch * mask_stride_batch + head * mask_stride_head + row.to(tl.int64)[:, None] * mask_stride_row
    into = bits + (pair * rows + row)[:, None] * words
    pack_rows(
        base, into, entries, row, rows, keys, causal_offset, mask_stride_column, BLOCK_M, BLOCK_N, WIDTH, BITS, CAUSAL
    )


@triton.jit
def pack_rows(
    base,
    into,
    entries,
    row,
    rows,
    keys,
    causal_offset,
    mask_stride_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Pack rows of a mask from `base` on into bits, and list their tiles; both in the formats of `pack_bool_mask`."""
    inside_row = (row < rows)[:, None]
    listed = 0
    lane = tl.arange(0, WIDTH)
    column = lane
    inside = inside_row & (column < keys)[None, :]
    following = tl.load(base + column.to(tl.int64)[None, :] * mask_stride_column, mask=inside, other=0)
    for start in range(0, keys, WIDTH):
        allowed = following != 0
        if CAUSAL:
            allowed = allowed & (column[None, :] <= row[:, None] + causal_offset)
        allowed = allowed.to(tl.int32)
        # Read the next keys while packing these.
        column = start + WIDTH + lane
        inside = inside_row & (column < keys)[None, :]
        following = tl.load(base + column.to(tl.int64)[None, :] * mask_stride_column, mask=inside, other=0)
        packed = tl.reshape(allowed << (lane % BITS)[None, :], (BLOCK_M, WIDTH // BITS, BITS))
        packed = tl.sum(packed, 2)
        tl.store(into + (start // BITS + tl.arange(0, WIDTH // BITS))[None, :], packed, mask=inside_row)
        filled = tl.where(inside_row, packed, -1)
        some = tl.max((packed != 0).to(tl.int32), 0)
        every = tl.min((filled == -1).to(tl.int32), 0)
        seen = tl.max(tl.reshape(some, (WIDTH // BLOCK_N, BLOCK_N // BITS)), 1)
        whole = tl.min(tl.reshape(every, (WIDTH // BLOCK_N, BLOCK_N // BITS)), 1)
        entry = 2 * (start // BLOCK_N + tl.arange(0, WIDTH // BLOCK_N)) + 1 - whole
        tl.store(entries + listed + tl.cumsum(seen, 0), entry, mask=seen != 0)
        listed += tl.sum(seen, 0)
    tl.store(entries, listed)


@triton.jit
def attend_tile(
    start,
    needs_mask,
    q,
    key,
    value,
    bits,
    bias,
    batch,
    kv_head,
    bias_batch,
    bias_head,
    bias_row,
    scale,
    row,
    q_len,
    kv_len,
    causal_offset,
    mask_stride_row,
    row_max,
    row_sum,
    acc,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Attend to the keys from `start` on; return the new (row_max, row_sum, acc).

    With ENDS, scores are masked if `needs_mask` is not 0: by bits, otherwise beyond the last key and by causality.
    Other arguments are as in `masked_forward`, with `bits` of this (batch, head), and the bias's place.
    """
    k = key.load([batch, kv_head, start, 0]).reshape(BLOCK_N, CHANNELS)
    x = tl.dot(q, k.T) * scale
    if MASK == "additive":
        # Not in base 2: finite numbers stay finite, as rows that hold only the lowest number need.
        x += bias.load([bias_batch, bias_head, bias_row, start]).reshape(BIAS_ROWS, BLOCK_N).to(tl.float32)
    if ENDS:
        place = tl.arange(0, BLOCK_N)
        column = start + place
        if needs_mask != 0:
            if MASK == "keys" or MASK == "bool":
                tl.static_assert(BLOCK_N == 2 * WORD, "a tile has two words of bits")
                at = bits + start // WORD
                if MASK == "bool":
                    at += row.to(tl.int64) * mask_stride_row
                    first = tl.load(at, mask=row < q_len, other=0)[:, None]
                    second = tl.load(at + 1, mask=row < q_len, other=0)[:, None]
                else:
                    first, second = tl.load(at), tl.load(at + 1)
                word = tl.where((place < WORD)[None, :], first, second)
                allowed = ((word >> (place % WORD)[None, :]) & 1) != 0
            elif MASK == "few keys":
                exists = tl.load(bits + column * mask_stride_row, mask=column < kv_len, other=0)
                allowed = (exists != 0)[None, :]
            else:
                allowed = (column < kv_len)[None, :]
            if CAUSAL and MASK != "bool":
                allowed = allowed & (column[None, :] <= row[:, None] + causal_offset)
            x = tl.where(allowed, x, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(x, 1))
    finite_max = new_max
    if MASK != "none" or ENDS:
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    UNIT: tl.constexpr = LOG2E if MASK == "additive" else 1.0
    decay = tl.exp2((row_max - finite_max) * UNIT)
    p = tl.exp2((x - finite_max[:, None]) * UNIT)
    row_sum = row_sum * decay + tl.sum(p, 1)
    v = value.load([batch, kv_head, start, 0]).reshape(BLOCK_N, V_CHANNELS)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "mask_stride_batch", "mask_stride_head"])
def masked_forward(
    query,
    key,
    value,
    output,
    bits,
    entries,
    bias,
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
    entries_stride_batch,
    entries_stride_head,
    entries_stride_row,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
):
    """Compute BLOCK_M rows of one (batch, q head).

    `key`, `value` and `bias` are tensor descriptors, `bits` and `entries` the results of `pack_bool_mask`. Strides of
    the mask are the strides of `bits`; for a bias 1, or 0 where it is broadcast. With few keys `bits` is the mask
    itself, which WIDTH covers.
    """
    # Later rows attend to more keys: start with later rows, so that short programs fill the gaps at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2)
    kv_head = head // (tl.num_programs(1) // kv_heads)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row.to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    at = query + batch.to(tl.int64) * query_stride_batch + head.to(tl.int64) * query_stride_head
    at += token[:, None] * query_stride_token + channel[None, :]
    q = tl.load(at, mask=(row < q_len)[:, None] & (channel < head_dim)[None, :], other=0.0)
    scale = softmax_scale * (1.0 if MASK == "additive" else LOG2E)
    acc = tl.zeros((BLOCK_M, V_CHANNELS), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if MASK == "none" or MASK == "additive":
        bias_batch, bias_head = batch * mask_stride_batch, head * mask_stride_head
        bias_row = block * BLOCK_M * mask_stride_row
        _, _, full_end, columns = key_tiles(
            entries, batch, 0, kv_len, block, causal_offset, BLOCK_M, BLOCK_N, CAUSAL, False
        )
        for tile in range(0, full_end):
            row_max, row_sum, acc = attend_tile(
                tile * BLOCK_N, 0, q, key, value, bits, bias, batch, kv_head, bias_batch, bias_head, bias_row, scale,
                row, q_len, kv_len, causal_offset, mask_stride_row, row_max, row_sum, acc,
                CHANNELS, V_CHANNELS, BLOCK_N, CAUSAL, MASK, BIAS_ROWS, False,
            )  # fmt: skip
        for tile in range(full_end, tl.cdiv(columns, BLOCK_N)):
            row_max, row_sum, acc = attend_tile(
                tile * BLOCK_N, 1, q, key, value, bits, bias, batch, kv_head, bias_batch, bias_head, bias_row, scale,
                row, q_len, kv_len, causal_offset, mask_stride_row, row_max, row_sum, acc,
                CHANNELS, V_CHANNELS, BLOCK_N, CAUSAL, MASK, BIAS_ROWS, True,
            )  # fmt: skip
    elif MASK == "few keys":
        bits += batch.to(tl.int64) * mask_stride_batch
        lane = tl.arange(0, WIDTH)
        exists = tl.load(bits + lane * mask_stride_row, mask=lane < kv_len, other=0)
        end, whole = tl.max(tl.where(exists != 0, lane + 1, 0), 0), tl.min(tl.where(exists != 0, WIDTH, lane), 0)
        if CAUSAL:
            end = tl.minimum(end, block * BLOCK_M + BLOCK_M + causal_offset)
            whole = tl.minimum(whole, block * BLOCK_M + causal_offset + 1)
        for tile in range(0, tl.cdiv(tl.maximum(end, 0), BLOCK_N)):
            needs_mask = (tile * BLOCK_N + BLOCK_N > whole).to(tl.int32)
            row_max, row_sum, acc = attend_tile(
                tile * BLOCK_N, needs_mask, q, key, value, bits, bias, batch, kv_head, 0, 0, 0, scale,
                row, q_len, kv_len, causal_offset, mask_stride_row, row_max, row_sum, acc,
                CHANNELS, V_CHANNELS, BLOCK_N, CAUSAL, MASK, BIAS_ROWS, True,
            )  # fmt: skip
    else:
        bits += batch.to(tl.int64) * mask_stride_batch + head.to(tl.int64) * mask_stride_head
        entries += batch.to(tl.int64) * entries_stride_batch + head.to(tl.int64) * entries_stride_head
        entries += block * entries_stride_row
        listed = tl.load(entries)
        if CAUSAL and MASK == "keys":
            last = block * BLOCK_M + BLOCK_M - 1 + causal_offset
            all_listed, listed = listed, 0
            for first in range(0, all_listed, COUNTED):
                index = first + tl.arange(0, COUNTED)
                entry = tl.load(entries + 1 + index, mask=index < all_listed, other=0)
                seen = (index < all_listed) & (entry // 2 * BLOCK_N <= last)
                listed += tl.sum(seen.to(tl.int32), 0)
        entry = tl.load(entries + 1)
        for index in range(0, listed):
            following = tl.load(entries + 2 + index)  # loaded a tile ahead: loads of K and V wait for it
            start = entry // 2 * BLOCK_N
            needs_mask = entry % 2
            if CAUSAL and MASK == "keys":
                needs_mask |= (start + BLOCK_N - 1 > block * BLOCK_M + causal_offset).to(tl.int32)
            row_max, row_sum, acc = attend_tile(
                start, needs_mask, q, key, value, bits, bias, batch, kv_head, 0, 0, 0, scale,
                row, q_len, kv_len, causal_offset, mask_stride_row, row_max, row_sum, acc,
                CHANNELS, V_CHANNELS, BLOCK_N, CAUSAL, MASK, BIAS_ROWS, True,
            )  # fmt: skip
            entry = following
    acc = acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    channel = tl.arange(0, V_CHANNELS)
    into = output + batch.to(tl.int64) * output_stride_batch + head.to(tl.int64) * output_stride_head
    into += token[:, None] * output_stride_token + channel[None, :]
    store_clamped(into, acc, (row < q_len)[:, None] & (channel < v_head_dim)[None, :])
