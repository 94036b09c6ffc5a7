"""Kernels of decoding from a low-bit KV cache: attention to a part of the keys, and the merge of all parts.

Scores and outputs are computed transposed, K · Q^T and V^T · P^T, so that rows of Q, all heads that share a KV head
times the queries, are padded to 8 and not to 16. Two codes become float16 in one instruction, as 1024 + code; in every
second of four quarters as 1024 + 16 · code. The bias is subtracted again by sums of the rounded Q and P. Each warp has
separate tokens, maxima and sums, so that warps do not wait for each other until their part ends.
"""

import triton
import triton.language as tl

from .common.launch import INTERPRETED, UNSPECIALIZED
from .common.rotation import unrotate
from .common.scores import store_clamped
from .kv_append import BIAS, counted_step

OTHER_PARTS = tl.constexpr(2)
"""Programs in addition to the programs for codes: one for the first tokens, one for the newest tokens."""


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
def load_query(at, row, INDEX: tl.constexpr, WORDS: tl.constexpr, CHANNELS: tl.constexpr, WARPS: tl.constexpr):
    """Load the channels of rows of Q for codes number INDEX of a word, divided by the factor of these codes.

    (WARPS, words, rows), the same for each warp.
    """
    q = tl.load(at + row[None, :] * CHANNELS + (INDEX * WORDS + tl.arange(0, WORDS))[:, None])
    if WORDS * 4 == CHANNELS and INDEX % 2 == 1:
        q = (q * 0.0625).to(tl.float16)
    return tl.broadcast_to(q[None, :, :], (WARPS, q.shape[0], q.shape[1]))


@triton.jit
def prefetch(at):
    """Prefetch the memory lines at these addresses into the L2."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], tl.int32, False, 1)


@triton.jit
def decayed(acc, decay, off):
    """Return acc · decay + off, (warps, words, rows), of each warp and row of Q."""
    return tl.fma(acc, tl.broadcast_to(decay[:, None, :], acc.shape), tl.broadcast_to(off[:, None, :], acc.shape))


@triton.jit
def finite(x):
    """Return x, but 0 for -inf, the maximum of no scores."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def apply_key_mask(key_mask, column, exists, stride, PADDED: tl.constexpr):
    """Return which existing columns are not padding."""
    if PADDED:
        exists = exists & (tl.load(key_mask + column * stride, mask=exists, other=0) != 0)
    return exists


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "length", "coded_after", "group_rows", "code_parts", "capacity",
                               "key_mask_stride_key"])  # fmt: skip
def attend_to_kv_part(
    rows,
    constants,
    exact_key,
    exact_value,
    key_codes,
    value_codes,
    key_scales,
    value_scales,
    start,
    counts,
    key_mask,
    partial,
    statistics,
    length,
    coded_after,
    q_len,
    group_rows,
    code_parts,
    capacity,
    key_mask_stride,
    key_mask_stride_key,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr,
    WARP_TOKENS: tl.constexpr,
    WARP_WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend with BLOCK_M of the ROWS rows of one (batch, kv head) to one part of its keys.

    Grid (parts for each block of rows, kv heads, batch); the first code_parts parts are of codes, then one of the first
    tokens and one of the newest. `length` is the length before the step; with `counts`, these hold it and
    `coded_after`, and the sums of a step on a full cache are NaN. `partial` is float32 (batch · kv heads, parts, ROWS,
    CHANNELS), not divided by the sums; `statistics` (…, parts, 2, ROWS): maxima in base 2, then sums.
    """
    if counts is not None:
        length, _, coded_after, fits = counted_step(counts, q_len, capacity, WINDOW)
        length = tl.where(fits, length, length - q_len)
    coded_columns, length = coded_after, length + q_len
    parts = code_parts + OTHER_PARTS
    part, head, batch = tl.program_id(0) % parts, tl.program_id(1), tl.program_id(2)
    pair = batch.to(tl.int64) * tl.num_programs(1) + head
    place = pair * parts + part
    row = tl.program_id(0) // parts * BLOCK_M + tl.arange(0, BLOCK_M)
    first_token = tl.load(start + batch)
    if OVERLAP:  # `append_tokens` writes neither `counts` nor `start`, and earlier kernels have ended: `append_launch`
        # While the tokens are appended, prefetch the codes of the first tile.
        if part < code_parts:
            tile = tl.cdiv(coded_columns, WARPS * WARP_TOKENS) * part // code_parts * (WARPS * WARP_TOKENS)
            at = (pair * capacity + tile) * (CHANNELS * BITS // 16) + tl.arange(
                0, WARPS * WARP_TOKENS * CHANNELS * BITS // 1024
            ) * 64
            prefetch(key_codes + at)
            prefetch(value_codes + at)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    factor = tl.load(constants + pair * (ROWS * 3) + row)
    at_query = rows + pair * (ROWS * CHANNELS)
    inside = row < group_rows
    into = partial + (place * ROWS + row)[None, :] * CHANNELS
    into_statistics = statistics + place * (2 * ROWS) + row
    if PADDED:
        key_mask += batch.to(tl.int64) * key_mask_stride
    if part >= code_parts:
        channel = tl.arange(0, CHANNELS)
        is_newest = part > code_parts
        begin = tl.where(is_newest, coded_columns, first_token)
        end = tl.where(is_newest, length, tl.minimum(first_token + FIRST, length))
        column = begin + tl.arange(0, WARPS)[:, None] * WARP_WINDOW + tl.arange(0, WARP_WINDOW)[None, :]
        is_first = (column >= first_token) & (column < first_token + FIRST)
        exists = apply_key_mask(key_mask, column, (column < end) & (is_first != is_newest), key_mask_stride_key, PADDED)
        slot = tl.where(is_newest, FIRST + column % RING, column - first_token)
        slot = pair * (FIRST + RING) + tl.where(exists, slot, 0)
        slot = slot[:, :, None] * CHANNELS + channel[None, None, :]
        x = tl.dot(tl.load(exact_key + slot), load_query(at_query, row, 0, CHANNELS, CHANNELS, WARPS))
        last = length - q_len + row % q_len
        seen = exists[:, :, None] & (column[:, :, None] <= last[None, None, :])
        x = tl.where(seen, x * factor[None, None, :], float("-inf"))
        part_max = tl.max(tl.max(x, 1), 0)
        p = tl.exp2(x - finite(part_max)[None, None, :])
        part_sum = tl.sum(tl.sum(p, 1), 0)
        acc = tl.dot(tl.permute(tl.load(exact_value + slot), (0, 2, 1)), p.to(tl.float16))
        tl.store(into + channel[:, None], tl.sum(acc, 0), mask=inside[None, :])
    else:
        WORDS: tl.constexpr = CHANNELS * BITS // 16
        TILE: tl.constexpr = WARPS * WARP_TOKENS
        tiles = tl.cdiv(coded_columns, TILE)
        query_sum = tl.load(constants + pair * (ROWS * 3) + ROWS + row)
        bias = 0.0 - tl.load(constants + pair * (ROWS * 3) + 2 * ROWS + row)
        bias = tl.broadcast_to(bias[None, None, :], (WARPS, WARP_TOKENS, BLOCK_M))
        q0 = load_query(at_query, row, 0, WORDS, CHANNELS, WARPS)
        q1 = load_query(at_query, row, 1, WORDS, CHANNELS, WARPS)
        acc0 = tl.zeros((WARPS, WORDS, BLOCK_M), tl.float32)
        acc1 = tl.zeros((WARPS, WORDS, BLOCK_M), tl.float32)
        if BITS == 4:
            q2 = load_query(at_query, row, 2, WORDS, CHANNELS, WARPS)
            q3 = load_query(at_query, row, 3, WORDS, CHANNELS, WARPS)
            acc2 = tl.zeros((WARPS, WORDS, BLOCK_M), tl.float32)
            acc3 = tl.zeros((WARPS, WORDS, BLOCK_M), tl.float32)
        row_max = tl.full((WARPS, BLOCK_M), float("-inf"), tl.float32)
        row_sum = tl.zeros((WARPS, BLOCK_M), tl.float32)
        lows = tl.zeros((WARPS, BLOCK_M), tl.float32)
        index = tl.arange(0, WARPS)[:, None] * WARP_TOKENS + tl.arange(0, WARP_TOKENS)[None, :]
        word = tl.arange(0, WORDS)
        for tile in tl.range(tiles * part // code_parts, tiles * (part + 1) // code_parts, num_stages=STAGES):
            at = tile * TILE
            base = pair * capacity + at
            words = tl.load(key_codes + base * WORDS + (index[:, :, None] * WORDS + word[None, None, :]))
            scale, low = unpack_scale(tl.load(key_scales + base + index))
            score = tl.dot(unpack(words, 0, BITS), q0, bias)
            score = tl.dot(unpack(words, 1, BITS), q1, score)
            if BITS == 4:
                score = tl.dot(unpack(words, 2, BITS), q2, score)
                score = tl.dot(unpack(words, 3, BITS), q3, score)
            score = tl.fma(
                score, tl.broadcast_to(scale[:, :, None], score.shape), low[:, :, None] * query_sum[None, None, :]
            )
            token = at + index
            is_seen = (token < coded_columns) & ((token < first_token) | (token >= first_token + FIRST))
            is_seen = apply_key_mask(key_mask, token, is_seen, key_mask_stride_key, PADDED)
            score = tl.where(is_seen[:, :, None], score, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(score, 1) * factor[None, :])
            shift = 0.0 - finite(new_max)
            decay = tl.exp2(row_max + shift)
            weight = tl.fma(
                score,
                tl.broadcast_to(factor[None, None, :], score.shape),
                tl.broadcast_to(shift[:, None, :], score.shape),
            )
            weight = tl.exp2(weight)
            row_max = new_max
            words = value_codes + base // PAGE * (WORDS * PAGE) + tl.multiple_of(base % PAGE, WARP_TOKENS)
            offset = index // PAGE * (WORDS * PAGE) + index % PAGE
            words = tl.load(words + (offset[:, None, :] + (word * PAGE)[None, :, None]))
            scale, low = unpack_scale(tl.load(value_scales + base + index))
            row_sum = row_sum * decay + tl.sum(weight, 1)
            lows = lows * decay + tl.sum(weight * low[:, :, None], 1)
            weight = (weight * scale[:, :, None]).to(tl.float16)
            # Subtract the bias of this tile's codes before adding them, so that no large sum is ever kept.
            off = tl.sum(weight.to(tl.float32), 1) * (0.0 - BIAS)
            acc0 = tl.dot(unpack(words, 0, BITS), weight, decayed(acc0, decay, off))
            acc1 = tl.dot(unpack(words, 1, BITS), weight, decayed(acc1, decay, off))
            if BITS == 4:
                acc2 = tl.dot(unpack(words, 2, BITS), weight, decayed(acc2, decay, off))
                acc3 = tl.dot(unpack(words, 3, BITS), weight, decayed(acc3, decay, off))
        part_max = tl.max(row_max, 0)
        decay = tl.exp2(row_max - finite(part_max)[None, :])
        part_sum = tl.sum(row_sum * decay, 0)
        lows = lows * decay
        into_words = into + word[:, None]
        tl.store(into_words, tl.sum(decayed(acc0, decay, lows), 0), mask=inside[None, :])
        if BITS == 8:
            tl.store(into_words + WORDS, tl.sum(decayed(acc1, decay, lows), 0), mask=inside[None, :])
        else:
            sixteenth = decay * 0.0625
            tl.store(into_words + WORDS, tl.sum(decayed(acc1, sixteenth, lows), 0), mask=inside[None, :])
            tl.store(into_words + 2 * WORDS, tl.sum(decayed(acc2, decay, lows), 0), mask=inside[None, :])
            tl.store(into_words + 3 * WORDS, tl.sum(decayed(acc3, sixteenth, lows), 0), mask=inside[None, :])
    if counts is not None:
        part_sum = tl.where(fits, part_sum, float("nan"))
    tl.store(into_statistics, part_max, mask=inside)
    tl.store(into_statistics + ROWS, part_sum, mask=inside)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "part_count", "group", "capacity"])
def merge_kv_parts(
    partial,
    statistics,
    output,
    value_unit,
    counts,
    part_count,
    q_len,
    group,
    capacity,
    head_dim,
    output_stride_batch,
    output_stride_head,
    output_stride_token,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SIGN_BITS: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the parts of one row and undo V's rotation and unit; count the step. Grid (rows, kv heads, batch)."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if counts is not None:
        length, _, coded_after, fits = counted_step(counts, q_len, capacity, WINDOW)
        if row + head + batch == 0:  # earlier launches have ended
            tl.store(counts, tl.where(fits, length + q_len, length))
            tl.store(counts + 1, coded_after)
    pair = batch.to(tl.int64) * tl.num_programs(1) + head
    part = tl.arange(0, PARTS)
    at = statistics + (pair * part_count + part) * (2 * ROWS) + row
    part_max = tl.load(at, mask=part < part_count, other=float("-inf"))
    row_max = tl.max(part_max, 0)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(tl.load(at + ROWS, mask=part < part_count, other=0.0) * tl.exp2(part_max - row_max), 0)
    channel = tl.arange(0, CHANNELS)
    acc = tl.zeros((AT_ONCE, CHANNELS), tl.float32)
    for begin in range(0, part_count, AT_ONCE):
        chunk = begin + tl.arange(0, AT_ONCE)
        exists = chunk < part_count
        place = pair * part_count + chunk
        chunk_max = tl.load(statistics + place * (2 * ROWS) + row, mask=exists, other=float("-inf"))
        x = tl.load(
            partial + (place * ROWS + row)[:, None] * CHANNELS + channel[None, :], mask=exists[:, None], other=0.0
        )
        acc += x * tl.exp2(chunk_max - row_max)[:, None]
    acc = tl.sum(acc, 0)[None, :] * (tl.load(value_unit + pair) / tl.where(row_sum == 0.0, 1.0, row_sum))
    into = output + batch.to(tl.int64) * output_stride_batch
    into += (head * group + row // q_len).to(tl.int64) * output_stride_head + (row % q_len) * output_stride_token
    store_clamped(into + channel[None, :], unrotate(acc, CHANNELS, SIGN_BITS), (channel < head_dim)[None, :])
