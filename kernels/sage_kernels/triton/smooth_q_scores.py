"""Scores of Q's means: each block's mean of Q times K, which smoothing Q removes and `nvfp4_forward` adds back.

With up to 128 channels the tensor cores multiply the unchanged 16-bit K by each mean in two parts of 16 bits. Their sum
is the mean up to a relative error of 2⁻¹⁷ in bfloat16 and 2⁻²² in float16. The product with K's mean is subtracted
afterwards. So the error of a mean multiplies only K's deviation from its mean: K's own rounding to 16 bits is 2⁸ times
as large.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..spec.call import Call
from ..spec.layout import BLOCK, batch_strides, ceil_div, power_of_two, stride_of
from ..spec.operands import NVFP4Operands
from .common.launch import UNSPECIALIZED, launch, strides
from .common.sequences import operand_row, sequence_range
from .common.tokens import load_tokens, tail_source
from .quantize.heavy import replaceable_keys

BLOCK_ROWS = tl.constexpr(BLOCK)


def smooth_q_scores(
    operands: NVFP4Operands,
    call: Call,
    key_mask_u8: torch.Tensor | None,
    first_sequence: int,
    first_block: int,
    delta: torch.Tensor,
    capability: tuple[int, int],
) -> None:
    """Write the scores of Q's means for a range of blocks of rows, of a range of sequences.

    Args:
        operands: the call's operands, with a query_mean.
        call: the call without heavy keys (`Call.tail`).
        key_mask_u8: uint8 (batch or 1, kv_len), 0 for keys that do not count; None: all count.
        first_sequence, first_block: where the ranges begin.
        delta: float32 (sequences, q_heads, blocks, keys), written: (the block's mean) · (K - its mean), divided by the
            tensor scales of Q and K; the accumulators of a tile start from it. Keys are in the order of the operand.
        capability: the GPU's, which determines the tile.
    """
    assert operands.query_mean is not None
    key, (q_sequences, kv_sequences) = call.key, call.token_axes
    key_mean = operands.statistics.key_mean
    sequences, q_heads, blocks, columns = delta.shape
    channels = operands.query_mean.shape[-1]
    split = key.dtype != torch.float32 and channels <= 128
    most_means = 64 if capability[0] == 9 else 32  # except on Hopper, 64 means spill
    means = max(16, min(most_means, power_of_two(blocks))) if split else 16
    keys, tiles = 64 if channels <= 128 else 32, 16 if split else 1
    pairs = min(sequences, key_mean.shape[0] - first_sequence) * q_heads
    launch(
        smooth_q_scores_of_means,
        (ceil_div(columns, tiles * keys), ceil_div(blocks, means), pairs),
        query_mean=operands.query_mean,
        query_tensor_scale=operands.query_tensor_scale,
        key=key,
        key_mean=key_mean,
        key_tensor_scale=operands.key_tensor_scale,
        delta=delta,
        chosen=operands.statistics.chosen,
        key_mask=key_mask_u8,
        q_ranges=q_sequences.ranges,
        kv_ranges=kv_sequences.ranges,
        q_len=q_sequences.tokens,
        kv_len=kv_sequences.tokens,
        q_blocks=q_sequences.rows // BLOCK,
        kv_blocks=kv_sequences.rows // BLOCK,
        columns=columns,
        blocks=blocks,
        first_sequence=first_sequence,
        first_block=first_block,
        q_heads=q_heads,
        group=q_heads // key_mean.shape[1],
        key_mean_channels=key_mean.shape[2],
        channels=key.shape[3],
        **strides("", batch_strides(key, kv_sequences)),
        key_mask_stride=stride_of(key_mask_u8),
        CHANNELS=channels,
        BLOCK_M=means,
        BLOCK_N=keys,
        TILES=tiles,
        SPLIT=split,
        FIRST=operands.statistics.first_keys,
        PLACES=replaceable_keys(operands.statistics),
        HAS_KEY_MASK=key_mask_u8 is not None,
        PACKED=q_sequences.packed,
        RAGGED=q_sequences.ranges is not None or kv_sequences.ranges is not None,
        num_warps=4,
        num_stages=3 if split else 1,
    )


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group"])
def smooth_q_scores_of_means(
    query_mean,
    query_tensor_scale,
    key,
    key_mean,
    key_tensor_scale,
    delta,
    chosen,
    key_mask,
    q_ranges,
    kv_ranges,
    q_len,
    kv_len,
    q_blocks,
    kv_blocks,
    columns,
    blocks,
    first_sequence,
    first_block,
    q_heads,
    group,
    key_mean_channels,
    channels,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    key_mask_stride,
    CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    FIRST: tl.constexpr,
    PLACES: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    PACKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Compute the scores of BLOCK_M blocks' means and up to TILES times BLOCK_N keys of one (batch, q head)."""
    first_column, pair = tl.program_id(0) * (TILES * BLOCK_N), tl.program_id(2)
    batch, head = first_sequence + (pair // q_heads).to(tl.int64), (pair % q_heads).to(tl.int64)
    kv_head, kv_heads = head // group, q_heads // group
    _, q_len, q_operand_start = sequence_range(q_ranges, batch, q_len, RAGGED)
    k_start, kv_len, k_operand_start = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    # Whole blocks of keys are written; missing keys of the last block are zeros.
    tiles = tl.minimum((tl.cdiv(kv_len, BLOCK_ROWS) * BLOCK_ROWS - first_column) // BLOCK_N, TILES)
    if tiles <= 0:
        return
    block = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (block < blocks) & (first_block + block < tl.cdiv(q_len, BLOCK_ROWS))
    row = operand_row(batch, head, q_heads, q_blocks, q_operand_start // BLOCK_ROWS, PACKED) + first_block + block
    channel = tl.arange(0, CHANNELS)
    mean = tl.load(query_mean + row[:, None] * CHANNELS + channel[None, :], mask=inside[:, None], other=0.0)
    k_mean = key_mean + (batch * kv_heads + kv_head) * key_mean_channels + channel
    k_mean = tl.load(k_mean, mask=channel < key_mean_channels, other=0.0)
    if SPLIT:
        high = mean.to(key.dtype.element_ty)
        low = (mean - high.to(tl.float32)).to(key.dtype.element_ty)
        shift = tl.sum((high.to(tl.float32) + low.to(tl.float32)) * k_mean[None, :], 1)
    # Tensor scales are powers of two: their reciprocals, and products with them, are exact.
    factor = 1.0 / tl.load(query_tensor_scale + row, mask=inside, other=1.0)
    key_tensor_scale += operand_row(batch, kv_head, kv_heads, kv_blocks, k_operand_start // BLOCK_ROWS, PACKED)
    if HAS_KEY_MASK:
        key_mask += batch * key_mask_stride
    key += batch * stride_batch + kv_head * stride_head
    # The operand holds this token at this position.
    position = tl.arange(0, BLOCK_N)
    token = position // 32 * 32 + position % 32 // 8 * 2 + position % 8 // 2 * 8 + position % 2
    delta += (pair.to(tl.int64) * blocks + block)[:, None] * columns + position[None, :]
    for tile in tl.range(0, tiles):
        column = first_column + tile * BLOCK_N
        k, counts = load_tokens(
            key, key_mask, k_start, column + token, kv_len, channel, channels, stride_token, stride_channel,
            HAS_KEY_MASK,
            source=tail_source(column + token, chosen, batch * kv_heads + kv_head, FIRST, PLACES),
        )  # fmt: skip
        if SPLIT:
            keys = tl.trans(k.to(key.dtype.element_ty))
            scores = tl.dot(low, keys, acc=tl.dot(high, keys))
            scores = tl.where(counts[None, :], scores - shift[:, None], 0.0)
        else:
            k = tl.where(counts[:, None], k - k_mean[None, :], 0.0)
            scores = tl.dot(mean, tl.trans(k), input_precision="tf32x3")
        scores = scores * factor[:, None] * (1.0 / tl.load(key_tensor_scale + column // BLOCK_ROWS))
        tl.store(delta + column, scores, mask=inside[:, None])
