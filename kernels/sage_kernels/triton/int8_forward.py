"""Forward kernel of the INT8 recipes: Q·Kᵀ in INT8; P·V in float16, e4m3 or INT8.

A tile of scores leaves the tensor cores as integers. A thread needs one scale of K per 64 keys (`layout.thread_order`),
so it takes maxima of integers. Scaling costs one multiplication of the maximum, and is part of the exponent's fused
multiply-add. In 8 bits, P stays in the registers of the scores: V's tokens are ordered accordingly
(`operands.Int8Operands`). An 8-bit P·V starts from zero in each tile and is added in float32: Hopper's e4m3 matrix
instructions accumulate with fewer bits, and INT8 has a scale per row and tile.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dispatch.kernels import Quantizer
from ..spec.call import Call
from ..spec.layout import batch_strides, ceil_div, padded_channels
from ..spec.operands import PV_OF_DTYPE, Int8Operands, Saved
from ..spec.saved import saving
from .common.heavy import attend_heavy_keys
from .common.int8_softmax import masked_softmax_tile, p_scale_log2, scale_scores, softmax_tile, weigh_values
from .common.launch import UNSPECIALIZED, launch, strides
from .common.padding import key_tiles
from .common.scores import LN2, LOG2E, mask_scores, store_clamped
from .common.sequences import operand_row, sequence_range
from .common.tiles import load_key, load_key_scale, load_value, optimization_barrier
from .configs import TileConfig, int8_forward_config, limit_to_list
from .forward_mask import ForwardMask, forward_mask


def attend(call: Call, quantizer: Quantizer, capability: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (output, lse or None) of a call with Q and K in INT8; the GPU's capability determines the tile."""
    output, lse = call.new_outputs()
    if not call.is_empty:
        _quantize_and_attend(call.for_kernel(), quantizer, output, lse, capability)
    return output, lse


def attend_and_save(call: Call, quantizer: Quantizer, capability: tuple[int, int]) -> tuple[torch.Tensor, Saved]:
    """Return the output, 0 in rows without a key, and the tensors that its gradients need."""
    return saving(call, partial(_quantize_and_attend, quantizer=quantizer, capability=capability))


def _quantize_and_attend(
    call: Call,
    quantizer: Quantizer,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    capability: tuple[int, int],
) -> Int8Operands:
    channels = padded_channels(max(call.query.shape[3], call.value.shape[3]))
    mask = forward_mask(call, choose_config(call, channels, call.recipe.pv, capability), reads_spans=True)
    operands = quantizer.quantize(call, mask.padding)
    forward(operands, output, lse, call, capability, mask)
    return operands


def forward(
    operands: Int8Operands,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    call: Call,
    capability: tuple[int, int],
    mask: ForwardMask,
) -> None:
    """Attend to quantised operands.

    Args:
        operands: the call's operands.
        output: (batch, q_heads, tokens, v_head_dim), any strides, written; (1, q_heads, total tokens, v_head_dim) when
            packed.
        lse: float32 (batch, q_heads, tokens), written; or None. Without a mean_score in the operands, the lse is of the
            scores against K without its mean.
        call: a result of `Call.for_kernel`.
        capability: the GPU's.
        mask: the call's mask, for the tiles of `choose_config`.
    """
    (q_sequences, kv_sequences), heavy = call.token_axes, operands.heavy
    pv = PV_OF_DTYPE[operands.value.dtype]
    channels, v_channels = operands.query.shape[-1], operands.value_scale.shape[-1]
    batch, kv_heads = operands.value_scale.shape[:2]
    q_heads, v_head_dim = output.shape[1], output.shape[3]
    config = choose_config(call, max(channels, v_channels), pv, capability)
    tma = capability[0] >= 9
    key, value = operands.key, operands.value
    if tma:
        key = TensorDescriptor.from_tensor(key.view(-1, channels), [config.block_n, channels])
        block = [v_channels, config.block_n] if pv != "fp16" else [config.block_n, v_channels]
        value = TensorDescriptor.from_tensor(value.view(-1, value.shape[-1]), block)
    launch(
        int8_forward,
        (ceil_div(q_sequences.tokens, config.block_m), q_heads, batch),
        query=operands.query,
        query_scale=operands.query_scale,
        key=key,
        key_scale=operands.key_scale,
        value=value,
        value_scale=operands.value_scale,
        value_mean=operands.value_mean,
        mean_score=operands.mean_score,
        output=output,
        lse=lse,
        source_query=None if heavy is None else call.query,
        heavy_key=None if heavy is None else heavy.key,
        heavy_value=None if heavy is None else heavy.value,
        late=None if heavy is None else heavy.late,
        q_ranges=q_sequences.ranges,
        kv_ranges=kv_sequences.ranges,
        q_len=q_sequences.tokens,
        kv_len=kv_sequences.tokens,
        q_rows=q_sequences.rows,
        kv_rows=call.tail.token_axes[1].rows,
        kv_heads=kv_heads,
        head_dim=call.query.shape[3],
        v_head_dim=v_head_dim,
        causal_offset=call.causal_offset,
        softmax_scale=call.scale,
        **strides("output", batch_strides(output, q_sequences)),
        **strides("lse", (0, 0, 0) if lse is None else batch_strides(lse, q_sequences)),
        **mask.arguments,
        **strides("source_query", (0, 0, 0, 0) if heavy is None else batch_strides(call.query, q_sequences)),
        CHANNELS=channels,
        V_CHANNELS=v_channels,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PV=pv,
        CAUSAL=call.is_causal,
        LSE=lse is not None,
        PACKED=q_sequences.packed,
        RAGGED=q_sequences.ranges is not None or kv_sequences.ranges is not None,
        TMA=tma,
        FIRST=call.first_keys,
        LATE=call.late_keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
    )


def choose_config(call: Call, channels: int, pv: str, capability: tuple[int, int]) -> TileConfig:
    """Return the launch configuration of a call; channels is the larger number of Q's and V's operands."""
    masked = call.mask.kind in ("bool", "additive")
    config = int8_forward_config(capability, channels, pv, masked)
    blocks = call.mask.blocks
    return config if blocks is None else limit_to_list(config, blocks.block_m, blocks.block_n)


@triton.jit
def attend_tile(
    tile,
    needs_mask,
    q,
    q_scale,
    operands,
    mask,
    bounds,
    row_max,
    row_sum,
    acc,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Attend to one more tile of keys; return the new (row_max, row_sum, acc).

    Args:
        tile: the tile's number; q, q_scale: the rows' codes and scales.
        needs_mask: with MASKED scores are masked if it is not 0; without MASKED every score of the tile counts.
        operands: (key, key_scale, value, kv_first, value_head, kv_operand_start, kv_rows): those of the kernel, the
            first row of K, and the head, the first token and the number of tokens of V.
        mask, bounds: the mask, and (row, q_len, kv_len, causal_offset, stride_row, stride_column), as in `mask_scores`.
        row_max, row_sum, acc: as in `softmax_tile` and `weigh_values`.
    """
    key, key_scale, value, kv_first, value_head, kv_operand_start, kv_rows = operands
    row, q_len, kv_len, causal_offset, stride_row, stride_column = bounds
    start = tile * BLOCK_N
    k_scale = load_key_scale(key_scale, kv_first + start, BLOCK_N)
    k = load_key(key, kv_first + start, BLOCK_N, CHANNELS, TMA)
    s = tl.dot(q, k.T)
    scale = q_scale[:, None, None] * k_scale[None, :, :]
    if MASKED:
        x = scale_scores(s, scale, BLOCK_M, BLOCK_N)
        if needs_mask != 0:
            column = start + tl.arange(0, BLOCK_N)
            x = mask_scores(x, mask, row, column, q_len, kv_len, causal_offset, stride_row, stride_column, CAUSAL, MASK)
        p, gain, decay, row_max, row_sum = masked_softmax_tile(x, row_max, row_sum, BLOCK_M, BLOCK_N, PV)
    else:
        p, gain, decay, row_max, row_sum = softmax_tile(s, scale, row_max, row_sum, BLOCK_M, BLOCK_N, PV)
    v = load_value(value, value_head, kv_operand_start + start, kv_rows, BLOCK_N, V_CHANNELS, PV != "fp16", TMA)
    return row_max, row_sum, weigh_values(p, gain, v, acc, decay, PV)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def int8_forward(
    query,
    query_scale,
    key,
    key_scale,
    value,
    value_scale,
    value_mean,
    mean_score,
    output,
    lse,
    mask,
    entries,
    source_query,
    heavy_key,
    heavy_value,
    late,
    q_ranges,
    kv_ranges,
    q_len,
    kv_len,
    q_rows,
    kv_rows,
    kv_heads,
    head_dim,
    v_head_dim,
    causal_offset,
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
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    LSE: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    TMA: tl.constexpr,
    FIRST: tl.constexpr,
    LATE: tl.constexpr,
    LIST_M: tl.constexpr,
):
    """Compute BLOCK_M rows of one (batch, q head).

    `mask` and `entries`, whose meaning depends on MASK, are those of `ForwardMask`. With MASK "blocks" or "block_keys"
    (some keys are missing), LIST_M rows share a block list, and FIRST is 0.

    `kv_len`, `causal_offset`, `mask` and `entries` include the FIRST heavy keys; `key` and `value` do not. The place of
    each LATE key holds the first key that it displaced. `source_query` is the caller's tensor.
    """
    # Later rows attend to more keys: start with later rows, so that short programs fill the gaps at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q_heads = tl.num_programs(1)
    kv_head = head // (q_heads // kv_heads)
    q_start, q_len, q_operand_start = sequence_range(q_ranges, batch, q_len, RAGGED)
    _, kv_len, kv_operand_start = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    tail_len, tail_offset = kv_len, causal_offset
    if FIRST > 0:
        tail_len, tail_offset = tl.maximum(kv_len - FIRST, 0), causal_offset - FIRST
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if block * BLOCK_M < q_len:
        q_first = operand_row(batch, head, q_heads, q_rows, q_operand_start, PACKED) + block * BLOCK_M
        q_row = q_first + tl.arange(0, BLOCK_M)
        q = tl.load(query + q_row[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :])
        q_scale = tl.load(query_scale + q_row) * (softmax_scale * LOG2E)
        kv_first = operand_row(batch, kv_head, kv_heads, kv_rows, kv_operand_start, PACKED)
        value_head = operand_row(batch, kv_head, kv_heads, 1, 0, PACKED)
        operands = (key, key_scale, value, kv_first, value_head, kv_operand_start, kv_rows)
        bounds = (row, q_len, tail_len, tail_offset, mask_stride_row, mask_stride_column)

        acc = tl.zeros((BLOCK_M, V_CHANNELS), tl.float32)
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M, 4), tl.float32)
        if MASK == "none" or MASK == "keys":
            if MASK == "keys":
                mask += batch * mask_stride_batch
            tail_mask = mask
            if MASK == "keys":
                tail_mask += FIRST
            begin, full_begin, full_end, columns = key_tiles(
                entries, batch, entries_stride_batch, tail_len, block, tail_offset,
                BLOCK_M, BLOCK_N, CAUSAL, MASK == "keys", FIRST,
            )  # fmt: skip
            for tile in range(full_begin, full_end):
                row_max, row_sum, acc = attend_tile(
                    tile, 0, q, q_scale, operands, tail_mask, bounds, row_max, row_sum, acc,
                    CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, PV, CAUSAL, MASK, False, TMA,
                )  # fmt: skip
            before = full_begin - begin
            for index in range(0, before + tl.cdiv(columns, BLOCK_N) - full_end):
                tile = index + tl.where(index < before, begin, full_end - before)
                row_max, row_sum, acc = attend_tile(
                    tile, 1, q, q_scale, operands, tail_mask, bounds, row_max, row_sum, acc,
                    CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, PV, CAUSAL, MASK, True, TMA,
                )  # fmt: skip
        elif MASK == "blocks" or MASK == "block_keys":
            KEYS: tl.constexpr = "keys" if MASK == "block_keys" else "none"
            entries += batch * entries_stride_batch + head * entries_stride_head
            entries += (block // (LIST_M // BLOCK_M)) * entries_stride_row
            if MASK == "block_keys":
                mask += batch * mask_stride_batch
            unmasked, listed = tl.load(entries), tl.load(entries + 1)
            tile = tl.load(entries + 2)
            for index in range(0, unmasked):
                following = tl.load(entries + 3 + index)  # loaded a tile ahead: loads of K and V wait for it
                row_max, row_sum, acc = attend_tile(
                    tile, 0, q, q_scale, operands, mask, bounds, row_max, row_sum, acc,
                    CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, PV, CAUSAL, KEYS, False, TMA,
                )  # fmt: skip
                tile = following
            for index in range(unmasked, listed):
                row_max, row_sum, acc = attend_tile(
                    tl.load(entries + 2 + index), 1, q, q_scale, operands, mask, bounds, row_max, row_sum, acc,
                    CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, PV, CAUSAL, KEYS, True, TMA,
                )  # fmt: skip
        else:
            entries += batch * entries_stride_batch + head * entries_stride_head + block * entries_stride_row
            mask += batch * mask_stride_batch + head * mask_stride_head
            tail_mask = mask + FIRST * mask_stride_column
            for index in range(0, tl.load(entries)):
                entry = tl.load(entries + 1 + index)
                row_max, row_sum, acc = attend_tile(
                    entry // 2, entry % 2, q, q_scale, operands, tail_mask, bounds, row_max, row_sum, acc,
                    CHANNELS, V_CHANNELS, BLOCK_M, BLOCK_N, PV, CAUSAL, MASK, True, TMA,
                )  # fmt: skip

        row_sum = tl.sum(row_sum, 1)
        channel = tl.arange(0, V_CHANNELS)
        v_channel = (batch * kv_heads + kv_head) * V_CHANNELS + channel
        acc = acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None] * tl.load(value_scale + v_channel)[None, :]
        acc = tl.where((row_sum == 0.0)[:, None], 0.0, acc + tl.load(value_mean + v_channel)[None, :])
        if FIRST > 0:
            row = optimization_barrier(block * BLOCK_M) + tl.arange(0, BLOCK_M)
        inside = row < q_len
        token = (q_start + row).to(tl.int64)
        if FIRST > 0:
            kv_pair = batch * kv_heads + kv_head
            if LATE > 0:
                late += kv_pair * LATE
            source_query += batch * source_query_stride_batch + head * source_query_stride_head
            scores_of_mean = mean_score + operand_row(batch, head, q_heads, q_rows, q_operand_start, PACKED)
            row_max, row_sum, acc = attend_heavy_keys(
                source_query, heavy_key + kv_pair * ((FIRST + LATE) * CHANNELS),
                heavy_value + kv_pair * ((FIRST + LATE) * V_CHANNELS), late, mask, row, token, q_len, kv_len, head_dim,
                causal_offset, softmax_scale, source_query_stride_token, source_query_stride_channel, mask_stride_row,
                mask_stride_column, scores_of_mean, row_max, row_sum, row_sum, acc, p_scale_log2(PV), CHANNELS,
                V_CHANNELS, FIRST + LATE, LATE, CAUSAL, MASK, RAGGED,
            )  # fmt: skip
        into = output + batch * output_stride_batch + head * output_stride_head + token[:, None] * output_stride_token
        into += channel[None, :] * output_stride_channel
        store_clamped(into, acc, inside[:, None] & (channel < v_head_dim)[None, :])
        if LSE:
            natural = (row_max + tl.log2(row_sum) - p_scale_log2(PV)) * LN2
            if mean_score is not None:
                natural += softmax_scale * tl.load(mean_score + q_row)
            at = lse + batch * lse_stride_batch + head * lse_stride_head + token * lse_stride_token
            tl.store(at, tl.where(row_sum == 0.0, float("-inf"), natural), mask=inside)
