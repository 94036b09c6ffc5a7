"""Forward kernel of the NVFP4 recipes (SageAttention3, arXiv 2505.11594), on FP4 tensor cores or emulated."""

from __future__ import annotations

from itertools import product

import torch
import triton
import triton.language as tl

from ..dispatch.kernels import Quantizer
from ..spec.call import Call
from ..spec.layout import BLOCK, batch_strides, ceil_div, power_of_two, stride_of
from ..spec.operands import NVFP4Operands
from .common.formats import GROUP, join_by_8, max_or_nan
from .common.heavy import attend_heavy_keys
from .common.launch import UNSPECIALIZED, launch, strides
from .common.nvfp4 import (
    P_SCALE_LOG2,
    broadcast_delta,
    dot_nvfp4,
    key_order,
    load_scales,
    mask_biases,
    mask_bits,
    mask_by_bits,
    mask_from,
    softmax_tile,
    weigh_values,
)
from .common.padding import key_tiles
from .common.recent import attend_recent_keys
from .common.scores import LN2, LOG2E, mask_scores, store_clamped
from .common.sequences import operand_row, sequence_range
from .common.tiles import optimization_barrier
from .configs import TileConfig, limit_to_list, nvfp4_forward_config, recent_block_n
from .forward_mask import ForwardMask, forward_mask
from .smooth_q_scores import smooth_q_scores

BLOCK_ROWS = tl.constexpr(BLOCK)
FLOAT32_MIN_NORMAL = tl.constexpr(2.0**-126)
DELTA_SHARE = 0.25  # largest workspace for the scores of Q's means, as a share of the bytes of 16-bit Q, K and V


def attend(
    call: Call, quantizer: Quantizer, capability: tuple[int, int], native: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (output, lse or None) of a call whose recipe is in NVFP4.

    Args:
        call: any call of such a recipe.
        quantizer: a quantiser that makes `NVFP4Operands`.
        capability: the GPU's, which determines the tile.
        native: use FP4 tensor cores, which the GPU must have; otherwise emulate them.
    """
    output, lse = call.new_outputs()
    if call.is_empty:
        return output, lse
    call = call.for_kernel()
    config = choose_config(call, power_of_two(max(call.query.shape[3], call.value.shape[3])), capability, native)
    mask = forward_mask(call, config, reads_spans=False)
    operands = quantizer.quantize(call, mask.padding)
    forward(operands, output, lse, call, capability, native, mask)
    return output, lse


def forward(
    operands: NVFP4Operands,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    call: Call,
    capability: tuple[int, int],
    native: bool,
    mask: ForwardMask,
) -> None:
    """Attend to quantised operands, some blocks of rows, or sequences, at a time where Q's means need a workspace.

    Args:
        operands: the call's operands.
        output: (batch, q_heads, tokens, v_head_dim), any strides, written; (1, q_heads, total tokens, v_head_dim) when
            packed.
        lse: float32 (batch, q_heads, tokens), written; or None.
        call: a result of `Call.for_kernel`; its unquantised keys are multiplied by the means of Q.
        capability, native: see `attend`.
        mask: the call's mask, for the tiles of `choose_config`.
    """
    (q_sequences, kv_sequences), heavy, recent = call.token_axes, operands.heavy, call.has_recent_keys
    tail_sequences = call.tail.token_axes[1]
    channels, v_channels = 2 * operands.query.shape[-1], operands.value.shape[-2]
    batch, kv_heads = operands.value_tensor_scale.shape
    q_heads, v_head_dim = output.shape[1], output.shape[3]
    config = choose_config(call, max(channels, v_channels), capability, native)
    sequences, blocks, columns, delta = batch, q_sequences.blocks, tail_sequences.blocks * BLOCK, None
    key_mask_u8 = None if mask.padding is None else mask.padding.key_mask_u8
    tail_key_mask_u8 = None if key_mask_u8 is None else key_mask_u8[:, call.first_keys :]
    if operands.query_mean is not None:
        bytes_of_inputs = 4 * (operands.query.numel() + operands.key.numel() + operands.value.numel())
        most_blocks = max(1, int(DELTA_SHARE * bytes_of_inputs) // (4 * q_heads * columns))
        blocks = min(blocks, max(1, most_blocks // batch))
        sequences = min(batch, most_blocks // blocks)
        delta = output.new_empty((sequences, q_heads, blocks, columns), dtype=torch.float32)
    for first_sequence, first_block in product(range(0, batch, sequences), range(0, q_sequences.blocks, blocks)):
        if delta is not None:
            smooth_q_scores(operands, call.tail, tail_key_mask_u8, first_sequence, first_block, delta, capability)
        rows = min(blocks * BLOCK, q_sequences.tokens - first_block * BLOCK)
        launch(
            nvfp4_forward,
            (ceil_div(rows, config.block_m), q_heads, min(sequences, batch - first_sequence)),
            query=operands.query,
            query_scale=operands.query_scale,
            query_tensor_scale=operands.query_tensor_scale,
            key=operands.key,
            key_scale=operands.key_scale,
            key_tensor_scale=operands.key_tensor_scale,
            value=operands.value,
            value_scale=operands.value_scale,
            value_tensor_scale=operands.value_tensor_scale,
            value_mean=operands.value_mean,
            mean_score=operands.mean_score,
            delta=delta,
            output=output,
            lse=lse,
            key_mask=key_mask_u8,
            source_query=call.query if recent or heavy is not None else None,
            source_key=call.key if recent else None,
            source_value=call.value if recent else None,
            heavy_key=None if heavy is None else heavy.key,
            heavy_value=None if heavy is None else heavy.value,
            late=None if heavy is None else heavy.late,
            q_ranges=q_sequences.ranges,
            kv_ranges=kv_sequences.ranges,
            q_len=q_sequences.tokens,
            kv_len=kv_sequences.tokens,
            q_blocks=q_sequences.rows // BLOCK,
            kv_blocks=tail_sequences.rows // BLOCK,
            delta_columns=columns,
            delta_blocks=blocks,
            first_sequence=first_sequence,
            first_row=first_block * BLOCK,
            kv_heads=kv_heads,
            mean_channels=operands.value_mean.shape[-1],
            head_dim=call.query.shape[3],
            v_head_dim=v_head_dim,
            causal_offset=call.causal_offset,
            recent_start=call.recent_start if recent else 0,
            key_mask_stride=stride_of(key_mask_u8),
            softmax_scale=call.scale,
            **strides("output", batch_strides(output, q_sequences)),
            **strides("lse", (0, 0, 0) if lse is None else batch_strides(lse, q_sequences)),
            **mask.arguments,
            **strides("source_query", batch_strides(call.query, q_sequences)),
            **strides("source_key", batch_strides(call.key, kv_sequences)),
            **strides("source_value", batch_strides(call.value, kv_sequences)),
            CHANNELS=channels,
            V_CHANNELS=v_channels,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SMOOTH_Q=delta is not None,
            FRAGMENTS=native and capability[0] == 12,
            QUANTIZED_DENOMINATOR=call.recipe.denominator == "quantized_p",
            CAUSAL=call.is_causal,
            LSE=lse is not None,
            PACKED=q_sequences.packed,
            RAGGED=q_sequences.ranges is not None or kv_sequences.ranges is not None,
            NATIVE=native,
            FIRST=call.first_keys,
            LATE=call.late_keys,
            RECENT_N=recent_block_n(channels, v_channels, output.element_size(), mask.kind != "none") if recent else 0,
            STAGES=config.num_stages,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def choose_config(call: Call, channels: int, capability: tuple[int, int], native: bool) -> TileConfig:
    """Return the launch configuration of a call; channels is the larger number of Q's and V's operands."""
    config, blocks = nvfp4_forward_config(capability, channels, native), call.mask.blocks
    return config if blocks is None else limit_to_list(config, blocks.block_m, blocks.block_n)


@triton.jit
def attend_tile(
    tile,
    needs_mask,
    q,
    q_scale,
    q_factor,
    operands,
    delta,
    mask,
    bounds,
    row_max,
    row_sum,
    denominator,
    acc,
    CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    HAS_ROW_SUM: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    MASKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Attend to one more tile of keys; return the new (row_max, row_sum, denominator, acc).

    Args:
        tile: the tile's number.
        needs_mask: with MASKED scores are masked if it is not 0; without MASKED every score of the tile counts.
        q, q_scale, q_factor: the rows' codes, their scales, and a factor of all scores.
        operands: (key, key_scale, key_tensor_scale, value, value_scale, kv_rows): pointers to tile 0 of this (batch, kv
            head), and the number of tokens of V.
        delta: pointer to the scores of Q's mean; read with SMOOTH_Q.
        mask, bounds: the mask, and (row, q_len, kv_len, causal_offset, stride_row, stride_column), as in `mask_scores`.
        row_max, row_sum, denominator, acc: as in `softmax_tile` and `weigh_values`.
    """
    key, key_scale, key_tensor_scale, value, value_scale, kv_rows = operands
    row, q_len, kv_len, causal_offset, stride_row, stride_column = bounds
    start = tl.cast(tile, tl.int64) * BLOCK_N
    token, channel = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, acc.shape[1])[:, None]
    k = tl.load(key + start * (CHANNELS // 2) + (token * (CHANNELS // 2) + tl.arange(0, CHANNELS // 2)[None, :]))
    k_scale = load_scales(
        key_scale + start * (CHANNELS // GROUP), token * (CHANNELS // GROUP), CHANNELS // GROUP, NATIVE
    )
    if SMOOTH_Q:
        s = broadcast_delta(delta + start, BLOCK_M, BLOCK_N, FRAGMENTS)
    else:
        s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    s = key_order(dot_nvfp4(q, q_scale, k, k_scale, s, NATIVE))
    factor = q_factor * tl.load(key_tensor_scale + tile * BLOCK_N // BLOCK_ROWS)
    if MASKED:
        if MASK == "additive":
            s = s * factor
            factor = 1.0
        else:
            factor = max_or_nan(factor, FLOAT32_MIN_NORMAL)  # -inf · 0 would be NaN
        limit = tl.minimum(kv_len, row + causal_offset + 1)[:, None] if CAUSAL else kv_len
        if MASK == "none":
            if needs_mask != 0:
                s = mask_from(limit - tile * BLOCK_N, s)
        elif NATIVE:
            # If the branches returned the scores, the scores would leave the layout of the MMA instructions.
            column = tile * BLOCK_N + 8 * tl.arange(0, BLOCK_N // 8)
            if MASK == "bool":
                bits = tl.full((BLOCK_M, BLOCK_N // 8), 0xFF, tl.int32)
                if needs_mask != 0:
                    bits = mask_bits(mask, row, column, q_len, limit, stride_row, stride_column)
                s = mask_by_bits(bits, s)
            else:
                zero = tl.zeros((BLOCK_M, BLOCK_N // 8), tl.float32)
                b0, b1, b2, b3, b4, b5, b6, b7 = zero, zero, zero, zero, zero, zero, zero, zero
                if needs_mask != 0:
                    b0, b1, b2, b3, b4, b5, b6, b7 = mask_biases(
                        mask, row, column, q_len, limit, stride_row, stride_column
                    )
                s += join_by_8(b0, b1, b2, b3, b4, b5, b6, b7)
        elif needs_mask != 0:
            column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            s = mask_scores(s, mask, row, column, q_len, kv_len, causal_offset, stride_row, stride_column, CAUSAL, MASK)
    shift, scale, decay, row_max = softmax_tile(s, factor, row_max, MASKED, NATIVE)
    v = tl.load(value + start // 2 + (channel * (kv_rows // 2) + tl.arange(0, BLOCK_N // 2)[None, :]))
    v_scale = load_scales(value_scale + start // GROUP, channel * (kv_rows // GROUP), BLOCK_N // GROUP, NATIVE)
    acc, denominator, row_sum = weigh_values(
        s, factor, shift, scale, decay, v, v_scale, acc, denominator, row_sum, HAS_ROW_SUM, NATIVE
    )
    return row_max, row_sum, denominator, acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def nvfp4_forward(
    query,
    query_scale,
    query_tensor_scale,
    key,
    key_scale,
    key_tensor_scale,
    value,
    value_scale,
    value_tensor_scale,
    value_mean,
    mean_score,
    delta,
    output,
    lse,
    mask,
    entries,
    key_mask,
    source_query,
    source_key,
    source_value,
    heavy_key,
    heavy_value,
    late,
    q_ranges,
    kv_ranges,
    q_len,
    kv_len,
    q_blocks,
    kv_blocks,
    delta_columns,
    delta_blocks,
    first_sequence,
    first_row,
    kv_heads,
    mean_channels,
    head_dim,
    v_head_dim,
    causal_offset,
    recent_start,
    key_mask_stride,
    softmax_scale,
    output_stride_batch,
    output_stride_head,
    output_stride_token,
    output_stride_channel,
    lse_stride_batch,
    lse_stride_head,
    lse_stride_token,
    mask_stride_batch,
    mask_stride_head,
    mask_stride_row,
    mask_stride_column,
    entries_stride_batch,
    entries_stride_head,
    entries_stride_row,
    source_query_stride_batch,
    source_query_stride_head,
    source_query_stride_token,
    source_query_stride_channel,
    source_key_stride_batch,
    source_key_stride_head,
    source_key_stride_token,
    source_key_stride_channel,
    source_value_stride_batch,
    source_value_stride_head,
    source_value_stride_token,
    source_value_stride_channel,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    QUANTIZED_DENOMINATOR: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    LSE: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    NATIVE: tl.constexpr,
    FIRST: tl.constexpr,
    LATE: tl.constexpr,
    RECENT_N: tl.constexpr,
    LIST_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute BLOCK_M rows, from `first_row` on, of one (batch, q head), batch elements from `first_sequence` on.

    `mask` and `entries`, whose meaning depends on MASK, are those of `ForwardMask`. With MASK "blocks" or "block_keys"
    (some keys are missing), LIST_M rows share a block list, and FIRST and RECENT_N are 0. `kv_len`, `causal_offset`
    and `mask` include the FIRST keys; `key`, `value` and `delta` do not. The place of each LATE key holds the first key
    that gave way to it. `source_query`, `source_key` and `source_value` are the caller's tensors. The program attends
    to RECENT_N recent keys at once, from `call.recent_start` on; 0: no key is recent.
    """
    # Later rows attend to more keys: start with later rows, so that short programs fill the gaps at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), first_sequence + tl.program_id(2).to(tl.int64)
    q_heads = tl.num_programs(1)
    kv_head = head // (q_heads // kv_heads)
    q_start, q_len, q_operand_start = sequence_range(q_ranges, batch, q_len, RAGGED)
    kv_start, kv_len, kv_operand_start = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    q_rows, kv_rows = q_blocks * BLOCK_ROWS, kv_blocks * BLOCK_ROWS
    tail_len, tail_offset = kv_len, causal_offset - FIRST
    if FIRST > 0:
        tail_len = tl.maximum(kv_len - FIRST, 0)
    delta_block = block * BLOCK_M // BLOCK_ROWS
    block += first_row // BLOCK_M
    TAIL_CAUSAL: tl.constexpr = CAUSAL and RECENT_N == 0
    if RECENT_N > 0:
        recent_first = tl.maximum(block * BLOCK_M // BLOCK_ROWS * BLOCK_ROWS + recent_start, 0)
        tail_len = tl.minimum(tail_len, recent_first)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if block * BLOCK_M < q_len:
        q_first = operand_row(batch, head, q_heads, q_rows, q_operand_start, PACKED) + block * BLOCK_M
        q_row = q_first + tl.arange(0, BLOCK_M)
        packed = tl.arange(0, CHANNELS // 2)[None, :]
        q = tl.load(query + q_row[:, None] * (CHANNELS // 2) + packed)
        q_scale = load_scales(query_scale, q_row[:, None] * (CHANNELS // GROUP), CHANNELS // GROUP, NATIVE)
        q_factor = tl.load(query_tensor_scale + q_first // BLOCK_ROWS) * (softmax_scale * LOG2E)
        kv_first = operand_row(batch, kv_head, kv_heads, kv_rows, kv_operand_start, PACKED)
        v_first = operand_row(batch, kv_head, kv_heads, V_CHANNELS, 0, PACKED).to(tl.int64) * kv_rows + kv_operand_start
        key += kv_first * (CHANNELS // 2)
        key_scale += kv_first * (CHANNELS // GROUP)
        key_tensor_scale += kv_first // BLOCK_ROWS
        value += v_first // 2
        value_scale += v_first // GROUP
        channel = tl.arange(0, V_CHANNELS)
        if SMOOTH_Q:
            pair = (batch - first_sequence) * q_heads + head
            delta += (pair * delta_blocks + delta_block) * delta_columns

        operands = (key, key_scale, key_tensor_scale, value, value_scale, kv_rows)
        bounds = (row, q_len, tail_len, tail_offset, mask_stride_row, mask_stride_column)
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M, 4), tl.float32)
        denominator = tl.zeros((BLOCK_M, 4), tl.float32)
        acc = tl.zeros((BLOCK_M, V_CHANNELS), tl.float32)
        HAS_ROW_SUM: tl.constexpr = LSE or not QUANTIZED_DENOMINATOR
        if MASK == "none":
            _begin, _full_begin, full, columns = key_tiles(
                None, 0, 0, tail_len, block, tail_offset, BLOCK_M, BLOCK_N, TAIL_CAUSAL, False
            )
            for tile in tl.range(0, full, num_stages=STAGES):
                row_max, row_sum, denominator, acc = attend_tile(
                    tile, 0, q, q_scale, q_factor, operands, delta, mask, bounds, row_max, row_sum, denominator, acc,
                    CHANNELS, BLOCK_M, BLOCK_N, SMOOTH_Q, FRAGMENTS, HAS_ROW_SUM, TAIL_CAUSAL, MASK, False, NATIVE,
                )  # fmt: skip
            for tile in range(full, tl.cdiv(columns, BLOCK_N)):
                row_max, row_sum, denominator, acc = attend_tile(
                    tile, 1, q, q_scale, q_factor, operands, delta, mask, bounds, row_max, row_sum, denominator, acc,
                    CHANNELS, BLOCK_M, BLOCK_N, SMOOTH_Q, FRAGMENTS, HAS_ROW_SUM, TAIL_CAUSAL, MASK, True, NATIVE,
                )  # fmt: skip
        elif MASK == "blocks" or MASK == "block_keys":
            KEYS: tl.constexpr = (
                "bool" if MASK == "block_keys" else "none"
            )  # keys that exist: a mask, the same for all rows
            entries += batch * entries_stride_batch + head * entries_stride_head
            entries += (block // (LIST_M // BLOCK_M)) * entries_stride_row
            if MASK == "block_keys":
                mask += batch * mask_stride_batch
            unmasked, listed = tl.load(entries), tl.load(entries + 1)
            tile = tl.load(entries + 2)
            for index in tl.range(0, unmasked, num_stages=STAGES):
                following = tl.load(entries + 3 + index)  # loaded a tile ahead: loads of K and V wait for it
                row_max, row_sum, denominator, acc = attend_tile(
                    tile, 0, q, q_scale, q_factor, operands, delta, mask, bounds, row_max, row_sum, denominator, acc,
                    CHANNELS, BLOCK_M, BLOCK_N, SMOOTH_Q, FRAGMENTS, HAS_ROW_SUM, TAIL_CAUSAL, KEYS, False, NATIVE,
                )  # fmt: skip
                tile = following
            for index in range(unmasked, listed):
                row_max, row_sum, denominator, acc = attend_tile(
                    tl.load(entries + 2 + index), 1, q, q_scale, q_factor, operands, delta, mask, bounds,
                    row_max, row_sum, denominator, acc,
                    CHANNELS, BLOCK_M, BLOCK_N, SMOOTH_Q, FRAGMENTS, HAS_ROW_SUM, TAIL_CAUSAL, KEYS, True, NATIVE,
                )  # fmt: skip
        else:
            entries = entries + batch * entries_stride_batch + head * entries_stride_head + block * entries_stride_row
            mask += batch * mask_stride_batch + head * mask_stride_head
            tail_mask = mask + FIRST * mask_stride_column
            # Pipelined, the native kernel adds wrong biases: Triton 3.6 puts their loads, and their conversion to the
            # layout of the scores, before the wait for the copies of the tile.
            MASKED_STAGES: tl.constexpr = 1 if NATIVE and MASK == "additive" else STAGES
            for index in tl.range(0, tl.load(entries), num_stages=MASKED_STAGES):
                entry = tl.load(entries + 1 + index)
                row_max, row_sum, denominator, acc = attend_tile(
                    entry // 2, entry % 2, q, q_scale, q_factor, operands, delta, tail_mask, bounds,
                    row_max, row_sum, denominator, acc,
                    CHANNELS, BLOCK_M, BLOCK_N, SMOOTH_Q, FRAGMENTS, HAS_ROW_SUM, TAIL_CAUSAL, MASK, True, NATIVE,
                )  # fmt: skip

        if HAS_ROW_SUM:
            row_sum = tl.sum(row_sum, 1)
        denominator = tl.sum(denominator, 1) * 0.5 if QUANTIZED_DENOMINATOR else row_sum
        kv_pair = batch * kv_heads + kv_head
        factor = tl.load(value_tensor_scale + kv_pair) / tl.where(denominator == 0.0, 1.0, denominator)
        mean = tl.load(value_mean + kv_pair * mean_channels + channel, mask=channel < mean_channels, other=0.0)
        acc = tl.where((denominator == 0.0)[:, None], 0.0, acc * factor[:, None] + mean[None, :])
        if FIRST + RECENT_N > 0:
            row = optimization_barrier(block * BLOCK_M) + tl.arange(0, BLOCK_M)
            source_query += batch * source_query_stride_batch + head * source_query_stride_head
            if LATE > 0:
                late += kv_pair * LATE
        inside = row < q_len
        token = (q_start + row).to(tl.int64)
        if RECENT_N > 0:
            source_key += batch * source_key_stride_batch + kv_head * source_key_stride_head
            source_value += batch * source_value_stride_batch + kv_head * source_value_stride_head
            if MASK == "bool" or MASK == "additive":
                key_mask += batch * key_mask_stride
            row_max, new_sum, denominator, acc = attend_recent_keys(
                source_query, source_key, source_value, key_mask, late, mask, row, token, FIRST + recent_first,
                tl.minimum(kv_len, (block + 1) * BLOCK_M + causal_offset), kv_start, q_len, kv_len, head_dim,
                v_head_dim, causal_offset, softmax_scale, tl.load(mean_score + q_row),
                source_query_stride_token, source_query_stride_channel, source_key_stride_token,
                source_key_stride_channel, source_value_stride_token, source_value_stride_channel, mask_stride_row,
                mask_stride_column, row_max, row_sum if HAS_ROW_SUM else denominator, denominator, acc, P_SCALE_LOG2,
                CHANNELS, V_CHANNELS, RECENT_N, FIRST, LATE, MASK,
            )  # fmt: skip
            if HAS_ROW_SUM:
                row_sum = new_sum
        if FIRST > 0:
            row_max, new_sum, acc = attend_heavy_keys(
                source_query, heavy_key + kv_pair * ((FIRST + LATE) * CHANNELS),
                heavy_value + kv_pair * ((FIRST + LATE) * V_CHANNELS), late, mask, row, token, q_len, kv_len, head_dim,
                causal_offset, softmax_scale, source_query_stride_token, source_query_stride_channel, mask_stride_row,
                mask_stride_column, None, row_max, row_sum if HAS_ROW_SUM else denominator, denominator, acc,
                P_SCALE_LOG2, CHANNELS, V_CHANNELS, FIRST + LATE, LATE, CAUSAL, MASK, RAGGED,
            )  # fmt: skip
            if HAS_ROW_SUM:
                row_sum = new_sum
        into = output + batch * output_stride_batch + head * output_stride_head + token[:, None] * output_stride_token
        into += channel[None, :] * output_stride_channel
        store_clamped(into, acc, inside[:, None] & (channel < v_head_dim)[None, :])
        if LSE:
            natural = (row_max + tl.log2(row_sum) - P_SCALE_LOG2) * LN2 + softmax_scale * tl.load(mean_score + q_row)
            at = lse + batch * lse_stride_batch + head * lse_stride_head + token * lse_stride_token
            tl.store(at, tl.where(row_sum == 0.0, float("-inf"), natural), mask=inside)
