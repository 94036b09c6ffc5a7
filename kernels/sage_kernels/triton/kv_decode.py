"""Decoding from a low-bit KV cache: split over the keys, codes straight to the matrix units, merged by a second kernel.

Scores and outputs are computed transposed, K · Q^T and V^T · P^T, so that rows of Q, all heads that share a KV head
times the queries, are padded to 8 and not to 16. Two codes become float16 in one instruction, as 1024 + code, every
second quarter of four as 1024 + 16 · code; what the bias adds is taken off by sums of the rounded Q and P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..language.launch import INTERPRETED, UNSPECIALIZED, launch, strides
from ..language.rotation import sign_bits, unrotate
from ..language.scores import store_clamped
from ..spec.kv_cache import PAGE, RING, SINKS, KVCache
from .kv_append import BIAS, append_and_prepare
from .splitkv_forward import multiprocessors

MAX_ROWS = 64
MAX_TILE_ROWS = 16
"""Rows of Q in one program; more would not fit into registers."""
MAX_PARTS = 252
WINDOW_PARTS = 2
"""Parts of the first tokens, and of the newest ones."""
FEW_PAIRS = 16


@dataclass(frozen=True)
class Config:
    """Tile of tokens, warps and stages of `attend_to_part`, and programs a multiprocessor, for few and many pairs."""

    block_n: int
    num_warps: int
    num_stages: int
    few: float
    many: float


CONFIGS = {4: Config(128, 2, 3, 2, 16), 8: Config(128, 4, 3, 1, 8)}
"""By bits: the fastest on an H100 of head_dim 128, at 4k to 128k tokens and batches of 1 to 16."""
SMALL_SHARED = Config(64, 4, 2, 2, 8)
"""INT8 where a multiprocessor has 100 KiB of shared memory: compute capability 8.6, 8.9 and 12.x."""


def config_for(bits: int, capability: tuple[int, int]) -> Config:
    """Return the configuration for codes of so many bits on a GPU."""
    has_large_shared = capability in ((8, 0), (9, 0), (10, 0), (10, 3))
    return CONFIGS[bits] if bits == 4 or has_large_shared else SMALL_SHARED


def decode(
    cache: KVCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor | None,
    scale: float,
    capability: tuple[int, int] = (9, 0),
) -> torch.Tensor:
    """Append tokens and attend with them to the cache; see `reference.kv_cache.attend`.

    Args:
        cache: INT8 or INT4.
        query: (batch, q_heads, q_len, head_dim), q_heads / kv_heads · q_len at most MAX_ROWS.
        key, value: (batch, kv_heads, q_len, head_dim).
        valid: bool (batch or 1, length + q_len); None: all.
        scale: factor of the scores, above 0.
        capability: of the GPU.
    """
    batch, q_heads, q_len, head_dim = query.shape
    group = q_heads // cache.kv_heads
    rows, pairs = group * q_len, batch * cache.kv_heads
    padded_rows = max(8, triton.next_power_of_2(rows))
    block_m = min(padded_rows, MAX_TILE_ROWS)
    config = config_for(cache.format.bits, capability)
    prepared, constants = append_and_prepare(cache, query, key, value, scale, padded_rows)
    device = cache.device
    processors = multiprocessors(device.index or 0) if device.type == "cuda" else 4
    waves = config.few if pairs <= FEW_PAIRS else config.many
    tiles = -(-max(cache.coded, 1) // config.block_n)
    code_parts = max(1, min(int(waves * processors / pairs), tiles, MAX_PARTS))
    parts = 2 * WINDOW_PARTS + code_parts
    partial = torch.empty(pairs, parts, padded_rows, cache.channels, device=device)
    statistics = torch.empty(pairs, parts, 2, padded_rows, device=device)
    if valid is not None:
        valid = valid.expand(batch, -1).view(torch.uint8)
    launch(
        attend_to_part,
        (parts * (padded_rows // block_m), cache.kv_heads, batch),
        rows=prepared,
        constants=constants,
        recent_key=cache.recent_key,
        recent_value=cache.recent_value,
        key_codes=cache.key_codes,
        value_codes=cache.value_codes,
        key_scales=cache.key_scales.view(torch.int32),
        value_scales=cache.value_scales.view(torch.int32),
        start=cache.start,
        valid=valid,
        output=partial,
        statistics=statistics,
        length=cache.length,
        coded=cache.coded,
        q_len=q_len,
        group_rows=rows,
        code_parts=code_parts,
        capacity=cache.capacity,
        valid_stride=0 if valid is None else valid.stride(0),
        valid_stride_key=1 if valid is None else valid.stride(1),
        CHANNELS=cache.channels,
        BITS=cache.format.bits,
        ROWS=padded_rows,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_R=32,
        STAGES=config.num_stages,
        WINDOW_PARTS=WINDOW_PARTS,
        FIRST=SINKS,
        RING=RING,
        PAGE=PAGE,
        PADDED=valid is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    output = torch.empty(batch, q_len, q_heads, head_dim, dtype=query.dtype, device=device).transpose(1, 2)
    launch(
        merge_kv_parts,
        (rows, cache.kv_heads, batch),
        parts=partial,
        statistics=statistics,
        output=output,
        value_unit=cache.value_unit,
        number=parts,
        q_len=q_len,
        group=group,
        head_dim=head_dim,
        **strides("output", output.stride()[:3]),
        CHANNELS=cache.channels,
        ROWS=padded_rows,
        PARTS=triton.next_power_of_2(parts),
        AT_ONCE=min(64, triton.next_power_of_2(parts)),
        SIGN_BITS=sign_bits(cache.channels),
        num_warps=8,
    )
    return output


@triton.jit
def unpack(words, INDEX: tl.constexpr, BITS: tl.constexpr):
    """Return codes number INDEX of int16 words as float16: 1024 + code, or 1024 + 16 · code (4 bits, odd INDEX)."""
    if INTERPRETED:
        word = words.to(tl.int32)
        SHIFT: tl.constexpr = 8 * INDEX if BITS == 8 else 8 * (INDEX // 2)
        MASK: tl.constexpr = 0xFF if BITS == 8 else (0xF0 if INDEX % 2 else 0x0F)
        return (((word >> SHIFT) & MASK) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    elif BITS == 8:
        if INDEX == 0:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0x64646464, 0x4240;", "=r,r", [words], tl.float16, True, 2
            )
        else:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0x64646464, 0x4341;", "=r,r", [words], tl.float16, True, 2
            )
    elif INDEX == 0:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000f000f, 0x64006400, 0xEA;", "=r,r", [words], tl.float16, True, 2
        )
    elif INDEX == 1:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x00f000f0, 0x64006400, 0xEA;", "=r,r", [words], tl.float16, True, 2
        )
    elif INDEX == 2:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xEA; }",
            "=r,r",
            [words],
            tl.float16,
            True,
            2,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x00f000f0, 0x64006400, 0xEA; }",
            "=r,r",
            [words],
            tl.float16,
            True,
            2,
        )


@triton.jit
def unpack_scale(word):
    """Return the scales and the lowest values of tokens, in float32."""
    word = word.to(tl.uint32, bitcast=True)
    scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    low = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, low


@triton.jit
def load_query(at, row, INDEX: tl.constexpr, WORDS: tl.constexpr, CHANNELS: tl.constexpr):
    """Load the channels of rows of Q that meet codes number INDEX of a word, (words, rows), divided by their factor."""
    q = tl.load(at + row[:, None] * CHANNELS + (INDEX * WORDS + tl.arange(0, WORDS))[None, :])
    if WORDS * 4 == CHANNELS and INDEX % 2 == 1:
        q = (q * 0.0625).to(tl.float16)
    return q.T


@triton.jit
def decayed(acc, decay, off):
    """Return acc · decay + off, of each row of Q, a column of acc."""
    return tl.fma(acc, tl.broadcast_to(decay[None, :], acc.shape), tl.broadcast_to(off[None, :], acc.shape))


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "length", "coded", "group_rows", "code_parts", "capacity",
                               "valid_stride_key"])  # fmt: skip
def attend_to_part(
    rows,
    constants,
    recent_key,
    recent_value,
    key_codes,
    value_codes,
    key_scales,
    value_scales,
    start,
    valid,
    output,
    statistics,
    length,
    coded,
    q_len,
    group_rows,
    code_parts,
    capacity,
    valid_stride,
    valid_stride_key,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW_PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Attend with BLOCK_M of the ROWS rows of one (batch, kv head) to one part of its keys.

    Grid (parts = 2 · WINDOW_PARTS + code_parts, for each block of rows; kv heads, batch): first tokens, newest tokens,
    codes. `output` is float32 (batch · kv heads, parts, ROWS, CHANNELS), not divided by the sums; `statistics` (…,
    parts, 2, ROWS): maxima in base 2, then sums.
    """
    parts = 2 * WINDOW_PARTS + code_parts
    part, head, batch = tl.program_id(0) % parts, tl.program_id(1), tl.program_id(2)
    pair = batch.to(tl.int64) * tl.num_programs(1) + head
    place = pair * parts + part
    row = tl.program_id(0) // parts * BLOCK_M + tl.arange(0, BLOCK_M)
    factor = tl.load(constants + pair * (ROWS * 3) + row)
    at_query = rows + pair * (ROWS * CHANNELS)
    inside = row < group_rows
    into = output + (place * ROWS + row)[None, :] * CHANNELS
    into_statistics = statistics + place * (2 * ROWS) + row
    first_token = tl.load(start + batch)
    if PADDED:
        valid += batch.to(tl.int64) * valid_stride
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if part < 2 * WINDOW_PARTS:
        channel = tl.arange(0, CHANNELS)
        is_newest = part // WINDOW_PARTS == 1
        begin = tl.where(is_newest, coded, first_token)
        end = tl.where(is_newest, length, tl.minimum(first_token + FIRST, length))
        each = tl.cdiv(tl.maximum(end - begin, 0), WINDOW_PARTS)
        begin += part % WINDOW_PARTS * each
        end = tl.minimum(begin + each, end)
        q = tl.load(at_query + row[:, None] * CHANNELS + channel[None, :]).T
        last = length - q_len + row % q_len
        acc = tl.zeros((CHANNELS, BLOCK_M), tl.float32)
        for at in tl.range(begin, end, BLOCK_R, num_stages=2):
            column = at + tl.arange(0, BLOCK_R)
            is_first = (column >= first_token) & (column < first_token + FIRST)
            exists = (column < end) & (is_first != is_newest)
            slot = tl.where(is_newest, FIRST + column % RING, column - first_token)
            slot = tl.where(exists, slot, 0)
            if PADDED:
                exists = exists & (tl.load(valid + column * valid_stride_key, mask=exists, other=0) != 0)
            slot = (pair * (FIRST + RING) + slot)[:, None] * CHANNELS + channel[None, :]
            x = tl.dot(tl.load(recent_key + slot), q) * factor[None, :]
            x = tl.where(exists[:, None] & (column[:, None] <= last[None, :]), x, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(x, 0))
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            decay = tl.exp2(row_max - finite_max)
            p = tl.exp2(x - finite_max[None, :])
            row_sum = row_sum * decay + tl.sum(p, 0)
            acc = tl.dot(tl.load(recent_value + slot).T, p.to(tl.float16), acc * decay[None, :])
            row_max = new_max
        tl.store(into + channel[:, None], acc, mask=inside[None, :])
    else:
        WORDS: tl.constexpr = CHANNELS * BITS // 16
        tiles = tl.cdiv(coded, BLOCK_N)
        each = tl.cdiv(tiles, code_parts)
        begin = (part - 2 * WINDOW_PARTS) * each
        end = tl.minimum(begin + each, tiles)
        query_sum = tl.load(constants + pair * (ROWS * 3) + ROWS + row)
        bias = 0.0 - tl.load(constants + pair * (ROWS * 3) + 2 * ROWS + row)
        bias = tl.broadcast_to(bias[None, :], (BLOCK_N, BLOCK_M))
        q0 = load_query(at_query, row, 0, WORDS, CHANNELS)
        q1 = load_query(at_query, row, 1, WORDS, CHANNELS)
        acc0 = tl.zeros((WORDS, BLOCK_M), tl.float32)
        acc1 = tl.zeros((WORDS, BLOCK_M), tl.float32)
        if BITS == 4:
            q2 = load_query(at_query, row, 2, WORDS, CHANNELS)
            q3 = load_query(at_query, row, 3, WORDS, CHANNELS)
            acc2 = tl.zeros((WORDS, BLOCK_M), tl.float32)
            acc3 = tl.zeros((WORDS, BLOCK_M), tl.float32)
        lows = tl.zeros((BLOCK_M,), tl.float32)
        index = tl.arange(0, BLOCK_N)
        word = tl.arange(0, WORDS)
        for tile in tl.range(begin, end, num_stages=STAGES):
            at = tile * BLOCK_N
            base = pair * capacity + at
            words = tl.load(key_codes + base * WORDS + index[:, None] * WORDS + word[None, :])
            scale, low = unpack_scale(tl.load(key_scales + base + index))
            x = tl.dot(unpack(words, 0, BITS), q0, bias)
            x = tl.dot(unpack(words, 1, BITS), q1, x)
            if BITS == 4:
                x = tl.dot(unpack(words, 2, BITS), q2, x)
                x = tl.dot(unpack(words, 3, BITS), q3, x)
            x = tl.fma(x, tl.broadcast_to(scale[:, None], x.shape), low[:, None] * query_sum[None, :])
            column = at + index
            exists = (column < coded) & ((column < first_token) | (column >= first_token + FIRST))
            if PADDED:
                exists = exists & (tl.load(valid + column * valid_stride_key, mask=exists, other=0) != 0)
            x = tl.where(exists[:, None], x, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(x, 0) * factor)
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            decay = tl.exp2(row_max - finite_max)
            p = tl.exp2(decayed(x, factor, 0.0 - finite_max))
            row_max = new_max
            words = value_codes + base // PAGE * (WORDS * PAGE) + tl.multiple_of(base % PAGE, BLOCK_N)
            words = tl.load(words + word[:, None] * PAGE + index[None, :])
            scale, low = unpack_scale(tl.load(value_scales + base + index))
            row_sum = row_sum * decay + tl.sum(p, 0)
            lows = lows * decay + tl.sum(p * low[:, None], 0)
            p = (p * scale[:, None]).to(tl.float16)
            # The bias of this tile's codes is taken off before they are added: nothing large is ever kept.
            off = tl.sum(p.to(tl.float32), 0) * (0.0 - BIAS)
            acc0 = tl.dot(unpack(words, 0, BITS), p, decayed(acc0, decay, off))
            acc1 = tl.dot(unpack(words, 1, BITS), p, decayed(acc1, decay, off))
            if BITS == 4:
                acc2 = tl.dot(unpack(words, 2, BITS), p, decayed(acc2, decay, off))
                acc3 = tl.dot(unpack(words, 3, BITS), p, decayed(acc3, decay, off))
        into_words = into + word[:, None]
        if BITS == 4:
            tl.store(into_words, acc0 + lows[None, :], mask=inside[None, :])
            tl.store(into_words + WORDS, acc1 * 0.0625 + lows[None, :], mask=inside[None, :])
            tl.store(into_words + 2 * WORDS, acc2 + lows[None, :], mask=inside[None, :])
            tl.store(into_words + 3 * WORDS, acc3 * 0.0625 + lows[None, :], mask=inside[None, :])
        else:
            tl.store(into_words, acc0 + lows[None, :], mask=inside[None, :])
            tl.store(into_words + WORDS, acc1 + lows[None, :], mask=inside[None, :])
    tl.store(into_statistics, row_max, mask=inside)
    tl.store(into_statistics + ROWS, row_sum, mask=inside)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "number", "group"])
def merge_kv_parts(
    parts,
    statistics,
    output,
    value_unit,
    number,
    q_len,
    group,
    head_dim,
    output_stride_batch,
    output_stride_head,
    output_stride_token,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIGN_BITS: tl.constexpr,
):
    """Merge the parts of one row and undo V's rotation and unit. Grid (rows, kv heads, batch)."""
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = batch.to(tl.int64) * tl.num_programs(1) + head
    part = tl.arange(0, PARTS)
    at = statistics + (pair * number + part) * (2 * ROWS) + row
    maxima = tl.load(at, mask=part < number, other=float("-inf"))
    largest = tl.max(maxima, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.load(at + ROWS, mask=part < number, other=0.0) * tl.exp2(maxima - largest), 0)
    channel = tl.arange(0, CHANNELS)
    acc = tl.zeros((AT_ONCE, CHANNELS), tl.float32)
    for begin in range(0, number, AT_ONCE):
        some = begin + tl.arange(0, AT_ONCE)
        there = some < number
        place = pair * number + some
        maximum = tl.load(statistics + place * (2 * ROWS) + row, mask=there, other=float("-inf"))
        x = tl.load(parts + (place * ROWS + row)[:, None] * CHANNELS + channel[None, :], mask=there[:, None], other=0.0)
        acc += x * tl.exp2(maximum - largest)[:, None]
    acc = tl.sum(acc, 0)[None, :] * (tl.load(value_unit + pair) / tl.where(total == 0.0, 1.0, total))
    into = output + batch.to(tl.int64) * output_stride_batch
    into += (head * group + row // q_len).to(tl.int64) * output_stride_head + (row % q_len) * output_stride_token
    store_clamped(into + channel[None, :], unrotate(acc, CHANNELS, SIGN_BITS), (channel < head_dim)[None, :])
