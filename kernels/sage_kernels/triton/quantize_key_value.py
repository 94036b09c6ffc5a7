"""K and V of `sage2` to INT8 and e4m3 in one launch, bit for bit as `statistics`, `quantize_int8` and `quantize_v` do.

A block of 128 tokens of K and of V is read twice: for the statistics of its (batch, kv head), and when they are known,
to be quantised. Programs take both kinds of work in one order, the statistics some blocks ahead, so that a GPU's L2
cache still holds what is read for the second time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch
from .quantize_int8 import MIN_CHANNELS as MIN_KEY_CHANNELS
from .quantize_int8 import quantize_key_block
from .quantize_v import CHUNK, DTYPES, quantize_value_block
from .quantize_v import MIN_CHANNELS as MIN_VALUE_CHANNELS
from .sequences import BLOCK, Sequences, power_of_two
from .statistics import PARTS, Statistics, mean_and_extrema_of_blocks, mean_of_blocks, store_block_statistics

BLOCK_ROWS = tl.constexpr(BLOCK)
# Blocks of other heads whose statistics are taken while a head's are completed: about as many as an H200 works on at
# a time. In 16 bit with 128 channels they are 16 MiB of its L2 cache's 50.
AHEAD = 256


def quantize_key_value(
    key: torch.Tensor, value: torch.Tensor, sequences: Sequences, ahead: int = AHEAD
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Statistics]:
    """K without its mean in INT8 and V without its own in e4m3.

    Args:
        key: (batch, kv_heads, tokens, head_dim), any strides.
        value: (batch, kv_heads, tokens, v_head_dim), any strides.
        sequences: the token axis, of equal lengths; no length is 0.
        ahead: the operands of a block follow its statistics after those of as many blocks as a head has, and `ahead`
            more. Of no influence on the result.

    Returns:
        ((key, key_scale, value, value_scale), statistics): as from `quantize_int8.quantize_key` and
        `quantize_v.quantize_value`, and as from `statistics.token_statistics`, but for padding of K's mean to as many
        channels as K's operand has.
    """
    batch, kv_heads, _, head_dim = key.shape
    v_head_dim, rows, blocks = value.shape[3], sequences.rows, sequences.blocks
    channels = max(MIN_KEY_CHANNELS, power_of_two(head_dim))
    v_channels = max(MIN_VALUE_CHANNELS, power_of_two(v_head_dim))
    pairs = batch * kv_heads

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return key.new_empty(shape, dtype=dtype)

    operands = (
        new(batch, kv_heads, rows, channels, dtype=torch.int8),
        new(batch, kv_heads, rows // 64, 4, dtype=torch.bfloat16),
        new(batch, kv_heads, v_channels, rows, dtype=DTYPES["fp8"]),
        new(batch, kv_heads, v_channels),
    )
    statistics = Statistics(
        new(batch, kv_heads, channels),
        new(batch, kv_heads, v_channels),
        new(batch, kv_heads, v_channels),
        new(batch, kv_heads),
    )
    launch(
        quantize_key_value_8bit,
        (2 * pairs * blocks,),
        key,
        value,
        *operands,
        statistics.key_mean,
        statistics.value_mean,
        statistics.value_amax,
        statistics.value_tensor_amax,
        new(pairs, blocks, channels),
        new(pairs, blocks, PARTS.value, v_channels),
        key.new_zeros(1 + pairs, dtype=torch.int32),
        min(blocks + ahead, pairs * blocks),
        sequences.tokens,
        blocks,
        kv_heads,
        head_dim,
        v_head_dim,
        *key.stride(),
        *value.stride(),
        CHANNELS=channels,
        V_CHANNELS=v_channels,
        CHUNK=min(v_channels, CHUNK),
        enable_fp_fusion=False,
        maxnreg=128,  # four programs a multiprocessor; what spills is used once a block, or once a head
    )
    return operands, statistics


@triton.jit(do_not_specialize=["ahead", "tokens", "blocks"])
def quantize_key_value_8bit(
    key,
    value,
    codes,
    key_scale,
    values,
    value_scale,
    key_mean,
    value_mean,
    value_amax,
    value_tensor_amax,
    key_parts,
    value_parts,
    counters,
    ahead,
    tokens,
    blocks,
    kv_heads,
    head_dim,
    v_head_dim,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    key_stride_channel,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    value_stride_channel,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One block of 128 tokens of one (batch, kv head): its statistics, or its operands.

    `counters` are zeros: how many programs have begun; for each (batch, kv head), how many blocks have their
    statistics, and 1 more when those of all are together. A program knows its work by how many began before it, so what
    a block waits for is in the hands of programs that run, and do not wait.
    """
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    items, turn = tl.num_programs(0) // 2, ticket - ahead
    if turn < 0:
        quantize, item = False, ticket
    elif turn >= 2 * (items - ahead):
        quantize, item = True, ticket - items
    else:  # one and the other in turn
        quantize = turn % 2 == 1
        item = turn // 2 + tl.where(quantize, 0, ahead)
    block, pair = item % blocks, (item // blocks).to(tl.int64)
    batch, head = pair // kv_heads, pair % kv_heads
    key += batch * key_stride_batch + head * key_stride_head
    value += batch * value_stride_batch + head * value_stride_head
    key_parts += pair * blocks * CHANNELS
    value_parts += pair * blocks * PARTS * V_CHANNELS
    key_mean += pair * CHANNELS
    value_mean += pair * V_CHANNELS
    value_amax += pair * V_CHANNELS
    counter = counters + 1 + pair
    if quantize:
        while tl.atomic_add(counter, 0, sem="acquire") <= blocks:
            pass
        rows = blocks * BLOCK_ROWS
        for part in tl.static_range(2):
            quantize_key_block(
                key,
                codes + pair * rows * CHANNELS,
                key_scale + pair * rows // 16,
                key_mean,
                None,
                0,
                2 * block + part,
                tokens,
                head_dim,
                key_stride_token,
                key_stride_channel,
                CHANNELS,
                False,
            )
        for chunk in tl.static_range(V_CHANNELS // CHUNK):
            quantize_value_block(
                value,
                values + pair * V_CHANNELS * rows,
                value_scale + pair * V_CHANNELS,
                value_mean,
                value_amax,
                None,
                0,
                block,
                tokens,
                chunk * CHUNK,
                v_head_dim,
                rows,
                value_stride_token,
                value_stride_channel,
                CHUNK,
                False,
            )
    else:
        store_block_statistics(
            key,
            None,
            key_parts,
            0,
            block,
            tokens,
            head_dim,
            key_stride_token,
            key_stride_channel,
            CHANNELS,
            False,
            False,
        )
        store_block_statistics(
            value,
            None,
            value_parts,
            0,
            block,
            tokens,
            v_head_dim,
            value_stride_token,
            value_stride_channel,
            V_CHANNELS,
            True,
            False,
        )
        # One thread's release publishes what all threads have written before the barrier, and its acquire shows them
        # what others have published. To this end it also empties the L1 cache, so that plain loads read the L2 cache.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == blocks - 1:
            mean = mean_of_blocks(key_parts, None, blocks, tokens, CHANNELS, CHANNELS, False)
            tl.store(key_mean + tl.arange(0, CHANNELS), mean)
            mean, amax, tensor_amax = mean_and_extrema_of_blocks(
                value_parts, None, blocks, tokens, V_CHANNELS, True, False
            )
            tl.store(value_mean + tl.arange(0, V_CHANNELS), mean)
            tl.store(value_amax + tl.arange(0, V_CHANNELS), amax)
            tl.store(value_tensor_amax + pair, tensor_amax)
            tl.debug_barrier()
            tl.atomic_add(counter, 1, sem="release")
