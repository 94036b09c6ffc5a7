"""Forward kernel of the NVFP4 recipes (SageAttention3, arXiv 2505.11594), on FP4 matrix units or emulated."""

from __future__ import annotations

import math
from itertools import product

import torch
import triton
import triton.language as tl

from ..call import Call
from ..formats.weights import P_SCALE
from ..language.formats import (
    GROUP,
    decode_e4m3,
    dequantize,
    encode_e4m3,
    max_or_nan,
    native_bytes,
    native_log2,
    native_pack_e2m1,
    native_scale_rows,
    round_to_e2m1,
)
from ..language.heavy import attend_heavy_keys
from ..language.launch import MASK_AXES, UNSPECIALIZED, launch, strides
from ..language.padding import key_tiles
from ..language.scores import LN2, LOG2E, mask_scores, store_clamped
from ..language.sequences import operand_row, sequence_range
from ..language.tiles import opaque
from ..layout import BLOCK, batch_strides, ceil_div, power_of_two
from ..operands import NVFP4Operands
from ..registry import Quantizer
from .configs import nvfp4_forward_config
from .delta_scores import delta_scores
from .mask_tiles import MaskTiles, mask_tiles

P_SCALE_LOG2 = tl.constexpr(math.log2(P_SCALE["nvfp4"]))
E2M1_MAX_LOG2 = tl.constexpr(math.log2(6))
E4M3_MIN_SCALE = tl.constexpr(2.0**-10)  # half of e4m3's least number; what rounds to 0 is not above it
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
        native: use FP4 matrix units, which the GPU must have; otherwise emulate them.
    """
    output, lse = call.new_outputs()
    if call.is_empty:
        return output, lse
    call = call.for_kernel()
    tiles = None
    if call.mask.tensor is not None:
        channels = power_of_two(max(call.query.shape[3], call.value.shape[3]))
        config = nvfp4_forward_config(capability, channels, native)
        tiles = mask_tiles(call, config.block_m, config.block_n)
    operands = quantizer.quantize(call, None if tiles is None else tiles.valid)
    forward(operands, output, lse, call, capability, native, tiles)
    return output, lse


def forward(
    operands: NVFP4Operands,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    call: Call,
    capability: tuple[int, int],
    native: bool,
    tiles: MaskTiles | None = None,
) -> None:
    """Attend to quantised operands, some blocks of rows, or sequences, at a time where Q's means need a workspace.

    Args:
        operands: those of the call.
        output: (batch, q_heads, tokens, v_head_dim), any strides, written; (1, q_heads, total tokens, v_head_dim) when
            packed.
        lse: float32 (batch, q_heads, tokens), written; or None.
        call: a result of `Call.for_kernel`; its unquantised keys are multiplied by the means of Q.
        capability, native: see `attend`.
        tiles: the tiles that the mask leaves, or None without a mask.
    """
    (q_sequences, kv_sequences), heavy = call.token_axes, operands.heavy
    tail_sequences = call.tail.token_axes[1]
    channels, v_channels = 2 * operands.query.shape[-1], operands.value.shape[-2]
    batch, kv_heads = operands.value_tensor_scale.shape
    q_heads, v_head_dim = output.shape[1], output.shape[3]
    config = nvfp4_forward_config(capability, max(channels, v_channels), native)
    sequences, blocks, columns, delta = batch, q_sequences.blocks, tail_sequences.blocks * BLOCK, None
    counts = None if tiles is None else tiles.valid[:, call.heavy_keys :]
    if operands.query_mean is not None:
        bytes_of_inputs = 4 * (operands.query.numel() + operands.key.numel() + operands.value.numel())
        most = max(1, int(DELTA_SHARE * bytes_of_inputs) // (4 * q_heads * columns))
        blocks = min(blocks, max(1, most // batch))
        sequences = min(batch, most // blocks)
        delta = output.new_empty((sequences, q_heads, blocks, columns), dtype=torch.float32)
    for first_sequence, first_block in product(range(0, batch, sequences), range(0, q_sequences.blocks, blocks)):
        if delta is not None:
            delta_scores(operands, call.tail, counts, first_sequence, first_block, delta)
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
            mask=None if tiles is None else tiles.mask,
            tiles=None if tiles is None else tiles.tiles,
            heavy_query=None if heavy is None else call.query,
            heavy_key=None if heavy is None else heavy.key,
            heavy_value=None if heavy is None else heavy.value,
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
            softmax_scale=call.scale,
            **strides("output", batch_strides(output, q_sequences)),
            **strides("lse", (0, 0, 0) if lse is None else batch_strides(lse, q_sequences)),
            **strides("mask", (0, 0, 0, 0) if tiles is None else tiles.mask.stride(), MASK_AXES),
            **strides("tiles", (0, 0, 0) if tiles is None else tiles.tile_strides, MASK_AXES),
            **strides("heavy", (0, 0, 0, 0) if heavy is None else batch_strides(call.query, q_sequences)),
            CHANNELS=channels,
            V_CHANNELS=v_channels,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SMOOTH_Q=delta is not None,
            QUANTIZED_DENOMINATOR=call.recipe.denominator == "quantized_p",
            CAUSAL=call.is_causal,
            MASK="none" if tiles is None else "bool" if tiles.mask.dtype == torch.uint8 else "additive",
            LSE=lse is not None,
            PACKED=q_sequences.packed,
            RAGGED=q_sequences.ranges is not None or kv_sequences.ranges is not None,
            NATIVE=native,
            HEAVY=call.heavy_keys,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


@triton.jit
def dot_nvfp4(a, a_scale, b, b_scale, accumulator, NATIVE: tl.constexpr):
    """Return accumulator + A·Bᵀ; a (m, k/2) and b (n, k/2) are packed e2m1, scales (·, k/16) e4m3 bits."""
    if NATIVE:
        # Triton reads uint8 scales as e8m0.
        return tl.dot_scaled(
            a,
            a_scale.to(tl.float8e4nv, bitcast=True),
            "e2m1",
            tl.trans(b),
            b_scale.to(tl.float8e4nv, bitcast=True),
            "e2m1",
            accumulator,
        )
    else:
        return tl.dot(dequantize(a, a_scale), tl.trans(dequantize(b, b_scale)), accumulator)


@triton.jit
def key_order(x):
    """Reorder the columns of x (m, n) from positions in the operand to key indices; takes no instruction."""
    x = tl.permute(tl.reshape(x, (x.shape[0], x.shape[1] // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2] * x.shape[3] * x.shape[4]))


@triton.jit
def repeat_columns(x, TIMES: tl.constexpr):
    """Repeat every column of x (m, n) TIMES times in succession: (m, TIMES·n)."""
    copies = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], TIMES))
    return tl.reshape(copies, (x.shape[0], x.shape[1] * TIMES))


@triton.jit
def thread_keys(x):
    """View x (m, n) as (m, n/8, 8): the consecutive keys of a row that one thread holds come together."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // 8, 8))


@triton.jit
def mask_from(column, x):
    """Set x (m, n) to -inf in the columns from `column`, a scalar or (m, 1), on."""
    # One difference per `thread_keys`, which are then compared with constants.
    room = column - 8 * tl.arange(0, x.shape[1] // 8)[None, :]
    allowed = tl.arange(0, 8)[None, None, :] < room[:, :, None]
    return tl.reshape(tl.where(allowed, thread_keys(x), float("-inf")), x.shape)


@triton.jit
def thread_sums(x):
    """Sum x (m, n/8), one number per `thread_keys`, within each thread: (m, 4)."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 4)), 1)


@triton.jit
def load_scales(scale, offset, GROUPS: tl.constexpr, NATIVE: tl.constexpr):
    """Load GROUPS scales of each row from `offset` (n, 1) on, uint8 (n, GROUPS).

    Native kernels load words of four: narrower copies to shared memory are not asynchronous, and are spread by byte.
    """
    if NATIVE:
        words = scale.to(tl.pointer_type(tl.int32), bitcast=True)
        return native_bytes(tl.load(words + offset // 4 + tl.arange(0, GROUPS // 4)[None, :]))
    else:
        return tl.load(scale + offset + tl.arange(0, GROUPS)[None, :])


@triton.jit
def broadcast_delta(delta, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NATIVE: tl.constexpr):
    """Load BLOCK_N scores of Q's mean for each row: float32 (BLOCK_M, BLOCK_N)."""
    if NATIVE:
        # A thread's four accumulators of a matrix instruction are two columns of two rows: loaded twice, next to each
        # other, the columns lie in registers as the instruction takes them.
        pair, copy, column = tl.arange(0, BLOCK_N // 2), tl.arange(0, 2), tl.arange(0, 2)
        offset = (2 * pair[:, None, None] + column[None, None, :]) + 0 * copy[None, :, None]
        both = tl.reshape(tl.permute(tl.load(delta + offset), (1, 0, 2)), (2, BLOCK_N))
        rows = tl.broadcast_to(both[None, :, None, :], (BLOCK_M // 16, 2, 8, BLOCK_N))
        return tl.reshape(rows, (BLOCK_M, BLOCK_N))
    else:
        return tl.broadcast_to(tl.load(delta + tl.arange(0, BLOCK_N))[None, :], (BLOCK_M, BLOCK_N))


@triton.jit
def softmax_tile(s, factor, row_max, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    """Compute the maxima of a tile of the online softmax, and the scales of its P.

    Args:
        s: float32 (m, n) scores in the order of keys, in base 2 times `factor`; with MASKED, -inf where masked.
        row_max: (m,), of the tiles before.

    Returns:
        (shift, scale, decay, row_max): P·448·6 is 2 to the power of s·factor - shift, (m,), and `scale` a sixth of the
        largest in each group of 16, (m, n/16). Sums of the tiles before must be multiplied by `decay`.
    """
    if NATIVE:
        largest = tl.reduce(thread_keys(s), 2, max_or_nan)
        tile_max = tl.reduce(largest, 1, max_or_nan)
        new_max = max_or_nan(row_max, tile_max * factor)
    else:
        largest = tl.max(thread_keys(s), 2)
        new_max = tl.maximum(row_max, tl.max(largest, 1) * factor)
    reference = new_max
    if MASKED:
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    shift = reference - P_SCALE_LOG2
    # The largest exp2 is that of the largest score, so reuse its maxima over 8 keys. Reduce over threads last: the
    # compiler repeats what follows such a reduction for each layout it needs.
    scale = tl.exp2(largest * factor - (shift + E2M1_MAX_LOG2)[:, None])
    scale = tl.max(tl.reshape(scale, (s.shape[0], s.shape[1] // GROUP, 2)), 2)
    return shift, scale, tl.exp2(row_max - reference), new_max


@triton.jit
def weigh_values(
    s, factor, shift, scale, decay, v, v_scale, accumulator, denominator, total, TOTAL: tl.constexpr, NATIVE: tl.constexpr
):
    """Return (accumulator, denominator, total) with one more tile of quantised P.

    Args:
        s, factor: see `softmax_tile`.
        shift, scale, decay: results of `softmax_tile`.
        v, v_scale: uint8 (v_channels, n/2), (v_channels, n/16).
        accumulator: the sum of P·V, (m, v_channels).
        denominator: twice the `thread_sums` of quantised P, (m, 4).
        total: with TOTAL, the `thread_sums` of P before quantisation, (m, 4).
    """
    if NATIVE:
        scale = scale.to(tl.float8e4nv)
        bits = scale.to(tl.uint8, bitcast=True)
        step = scale.to(tl.float32)
    else:
        bits = encode_e4m3(scale)
        step = decode_e4m3(bits).to(tl.float32)
    # Dividing by the scale is a subtraction of its logarithm.
    divisor = step
    if TOTAL or not NATIVE:
        # All of a group whose scale rounds to 0 is below 6 · 2⁻¹⁰, and counts in `total`.
        divisor = max_or_nan(step, E4M3_MIN_SCALE)
    if NATIVE:
        # Elements of a group whose scale is 0 may be anything: e2m1 is finite, so products are 0.
        logarithm = native_log2(divisor)
    else:
        logarithm = tl.log2(divisor)
    p = tl.exp2(s * factor - repeat_columns(shift[:, None] + logarithm, GROUP))
    if TOTAL:
        parts = tl.sum(thread_keys(p), 2) * repeat_columns(divisor, 2)
        total = total * decay[:, None] + thread_sums(parts)
    if NATIVE:
        words, sums = native_pack_e2m1(p)
        sums = sums.to(tl.float32) * repeat_columns(step, 2)
        accumulator = dot_nvfp4(
            native_bytes(words), bits, v, v_scale, native_scale_rows(accumulator, decay), NATIVE
        )
    else:
        rounded = round_to_e2m1(p) * repeat_columns(step, GROUP)
        sums = 2 * tl.sum(thread_keys(rounded), 2)
        accumulator = tl.dot(rounded.to(tl.float16), tl.trans(dequantize(v, v_scale)), accumulator * decay[:, None])
    denominator = denominator * decay[:, None] + thread_sums(sums)
    return accumulator, denominator, total


@triton.jit
def attend_tile(
    tile,
    needs_mask,
    q,
    q_scale,
    q_factor,
    key,
    key_scale,
    key_tensor_scale,
    value,
    value_scale,
    delta,
    kv_rows,
    mask,
    row,
    q_len,
    kv_len,
    causal_offset,
    mask_stride_row,
    mask_stride_column,
    row_max,
    total,
    denominator,
    accumulator,
    CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    TOTAL: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    MASKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Attend to one more tile of keys; return the new (row_max, total, denominator, accumulator).

    Without MASKED every score of the tile counts. With it those are masked where `needs_mask` is not 0. Other arguments
    are those of `nvfp4_forward`, pointers to tile 0 of its (batch, head).
    """
    start = tl.cast(tile, tl.int64) * BLOCK_N
    token, channel = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, accumulator.shape[1])[:, None]
    k = tl.load(key + start * (CHANNELS // 2) + (token * (CHANNELS // 2) + tl.arange(0, CHANNELS // 2)[None, :]))
    k_scale = load_scales(
        key_scale + start * (CHANNELS // GROUP), token * (CHANNELS // GROUP), CHANNELS // GROUP, NATIVE
    )
    if SMOOTH_Q:
        s = broadcast_delta(delta + start, BLOCK_M, BLOCK_N, NATIVE)
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
        if needs_mask != 0:
            if MASK == "none":
                limit = tl.minimum(kv_len, row + causal_offset + 1)[:, None] if CAUSAL else kv_len
                s = mask_from(limit - tile * BLOCK_N, s)
            else:
                column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                s = mask_scores(
                    s, mask, row, column, q_len, kv_len, causal_offset, mask_stride_row, mask_stride_column,
                    CAUSAL, MASK,
                )  # fmt: skip
    shift, scale, decay, row_max = softmax_tile(s, factor, row_max, MASKED, NATIVE)
    v = tl.load(value + start // 2 + (channel * (kv_rows // 2) + tl.arange(0, BLOCK_N // 2)[None, :]))
    v_scale = load_scales(value_scale + start // GROUP, channel * (kv_rows // GROUP), BLOCK_N // GROUP, NATIVE)
    accumulator, denominator, total = weigh_values(
        s, factor, shift, scale, decay, v, v_scale, accumulator, denominator, total, TOTAL, NATIVE
    )
    return row_max, total, denominator, accumulator


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
    tiles,
    heavy_query,
    heavy_key,
    heavy_value,
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
    tiles_stride_batch,
    tiles_stride_head,
    tiles_stride_row,
    heavy_stride_batch,
    heavy_stride_head,
    heavy_stride_token,
    heavy_stride_channel,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    QUANTIZED_DENOMINATOR: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    LSE: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
    NATIVE: tl.constexpr,
    HEAVY: tl.constexpr,
):
    """Compute BLOCK_M rows, from `first_row` on, of one (batch, q head), batch elements from `first_sequence` on.

    `kv_len`, `causal_offset` and `mask` count HEAVY keys, which `key`, `value` and `delta` do not have.
    """
    # Later rows attend to more keys: start with those, so that short programs fill the gaps at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), first_sequence + tl.program_id(2).to(tl.int64)
    q_heads = tl.num_programs(1)
    kv_head = head // (q_heads // kv_heads)
    q_start, q_len, q_operand_start = sequence_range(q_ranges, batch, q_len, RAGGED)
    _, kv_len, kv_operand_start = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    q_rows, kv_rows = q_blocks * BLOCK_ROWS, kv_blocks * BLOCK_ROWS
    tail_len, tail_offset = kv_len, causal_offset
    if HEAVY > 0:
        tail_len, tail_offset = tl.maximum(kv_len - HEAVY, 0), causal_offset - HEAVY
    delta_block = block * BLOCK_M // BLOCK_ROWS
    block += first_row // BLOCK_M
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

        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M, 4), tl.float32)
        denominator = tl.zeros((BLOCK_M, 4), tl.float32)
        accumulator = tl.zeros((BLOCK_M, V_CHANNELS), tl.float32)
        TOTAL: tl.constexpr = LSE or not QUANTIZED_DENOMINATOR
        if MASK == "none":
            _begin, _full_begin, full, columns = key_tiles(
                None, 0, 0, tail_len, block, tail_offset, BLOCK_M, BLOCK_N, CAUSAL, False
            )
            for tile in tl.range(0, full, num_stages=3):
                row_max, total, denominator, accumulator = attend_tile(
                    tile, 0, q, q_scale, q_factor, key, key_scale, key_tensor_scale, value, value_scale, delta, kv_rows,
                    mask, row, q_len, tail_len, tail_offset, mask_stride_row, mask_stride_column,
                    row_max, total, denominator, accumulator,
                    CHANNELS, BLOCK_M, BLOCK_N, SMOOTH_Q, TOTAL, CAUSAL, MASK, False, NATIVE,
                )  # fmt: skip
            for tile in range(full, tl.cdiv(columns, BLOCK_N)):
                row_max, total, denominator, accumulator = attend_tile(
                    tile, 1, q, q_scale, q_factor, key, key_scale, key_tensor_scale, value, value_scale, delta, kv_rows,
                    mask, row, q_len, tail_len, tail_offset, mask_stride_row, mask_stride_column,
                    row_max, total, denominator, accumulator,
                    CHANNELS, BLOCK_M, BLOCK_N, SMOOTH_Q, TOTAL, CAUSAL, MASK, True, NATIVE,
                )  # fmt: skip
        else:
            tiles_of_row = tiles + batch * tiles_stride_batch + head * tiles_stride_head + block * tiles_stride_row
            mask += batch * mask_stride_batch + head * mask_stride_head
            tail_mask = mask + HEAVY * mask_stride_column
            for index in range(0, tl.load(tiles_of_row)):
                entry = tl.load(tiles_of_row + 1 + index)
                row_max, total, denominator, accumulator = attend_tile(
                    entry // 2, entry % 2, q, q_scale, q_factor, key, key_scale, key_tensor_scale, value,
                    value_scale, delta, kv_rows, tail_mask, row, q_len, tail_len, tail_offset, mask_stride_row,
                    mask_stride_column,
                    row_max, total, denominator, accumulator,
                    CHANNELS, BLOCK_M, BLOCK_N, SMOOTH_Q, TOTAL, CAUSAL, MASK, True, NATIVE,
                )  # fmt: skip

        if TOTAL:
            row_sum = tl.sum(total, 1)
        divisor = tl.sum(denominator, 1) * 0.5 if QUANTIZED_DENOMINATOR else row_sum
        kv_pair = batch * kv_heads + kv_head
        factor = tl.load(value_tensor_scale + kv_pair) / tl.where(divisor == 0.0, 1.0, divisor)
        mean = tl.load(value_mean + kv_pair * mean_channels + channel, mask=channel < mean_channels, other=0.0)
        accumulator = tl.where((divisor == 0.0)[:, None], 0.0, accumulator * factor[:, None] + mean[None, :])
        if HEAVY > 0:
            row = opaque(block * BLOCK_M) + tl.arange(0, BLOCK_M)
        inside = row < q_len
        token = (q_start + row).to(tl.int64)
        if HEAVY > 0:
            heavy_query += batch * heavy_stride_batch + head * heavy_stride_head
            row_max, heavy_total, accumulator = attend_heavy_keys(
                heavy_query, heavy_key + kv_pair * (HEAVY * CHANNELS), heavy_value + kv_pair * (HEAVY * V_CHANNELS),
                mask, row, token, q_len, kv_len, head_dim, causal_offset, softmax_scale, heavy_stride_token,
                heavy_stride_channel, mask_stride_row, mask_stride_column,
                row_max, row_sum if TOTAL else divisor, divisor, accumulator, P_SCALE_LOG2,
                CHANNELS, V_CHANNELS, HEAVY, CAUSAL, MASK, RAGGED,
            )  # fmt: skip
            if TOTAL:
                row_sum = heavy_total
        into = output + batch * output_stride_batch + head * output_stride_head + token[:, None] * output_stride_token
        into += channel[None, :] * output_stride_channel
        store_clamped(into, accumulator, inside[:, None] & (channel < v_head_dim)[None, :])
        if LSE:
            natural = (row_max + tl.log2(row_sum) - P_SCALE_LOG2) * LN2 + softmax_scale * tl.load(mean_score + q_row)
            at = lse + batch * lse_stride_batch + head * lse_stride_head + token * lse_stride_token
            tl.store(at, tl.where(row_sum == 0.0, float("-inf"), natural), mask=inside)
