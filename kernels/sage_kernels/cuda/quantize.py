"""The INT8 recipes' operands on Hopper, made by `quantize.cu`: those of the Triton quantisers, bit for bit."""

from __future__ import annotations

import torch

from ..call import Call
from ..layout import BLOCK, ceil_div, power_of_two
from ..operands import VALUE_DTYPES, Int8Operands
from .launch import Int64, Scalar, launch

SOURCE = "quantize.cu"
SHARERS = 8  # blocks of the grid that take statistics of K, or V, of a pair
STATISTIC_ROWS = 2 + 3 * SHARERS  # of a pair's statistics, besides two for each block of tokens
# Blocks of Q that a launch begins with: work for the GPU until the last statistics are there.
LEADING_QUERY_BLOCKS = 512


def macros(channels: int, dtype: torch.dtype, pv: str, return_lse: bool) -> dict[str, int]:
    """The compile-time constants of quantize.cu."""
    return {
        "CHANNELS": channels,
        "FLOAT16": int(dtype == torch.float16),
        "PV_FLOAT16": int(pv == "fp16"),
        "MEAN_SCORE": int(return_lse),
    }


def tokens(x: torch.Tensor) -> tuple[Scalar, ...]:
    """Q, K or V as the kernels read it in 16 bits: tokens.cuh's Tokens."""
    return x, *(Int64(stride) for stride in x.stride()[:3])


def quantize_operands(call: Call, *, leaves_query: bool = False) -> Int8Operands:
    """Transform and quantise Q, K, V as `reference.forward.quantize_operands` does by `sage2`, `sage1` or `sage_bwd`.

    The kernel that writes the operands lets the stream's next one start early.

    Args:
        call: one that `registration.HopperQuantizer` serves: of one dtype, float16 or bfloat16, with head_dim and
            v_head_dim multiples of 8, both 33 to 64 or both 65 to 128, their channels contiguous, their addresses and
            other strides multiples of 16 bytes.
        leaves_query: Q is among the operands as it is, with an empty scale, and `int8_forward` quantises it; not where
            the LSE is wanted.

    Raises:
        CompileError: see `launch.launch`.
    """
    query, key, value, pv, return_lse = call.query, call.key, call.value, call.recipe.pv, call.return_lse
    batch, q_heads, q_len, head_dim = query.shape
    _, kv_heads, kv_len, v_head_dim = value.shape
    channels, pairs = power_of_two(head_dim), batch * kv_heads
    q_blocks, blocks = ceil_div(q_len, BLOCK), ceil_div(kv_len, BLOCK)
    q_shape, kv_shape = (batch, q_heads, q_blocks * BLOCK), (batch, kv_heads, blocks * BLOCK)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return query.new_empty(shape, dtype=dtype)

    lines = new(batch, kv_heads, STATISTIC_ROWS + 2 * blocks, channels)
    value_shape = (blocks * BLOCK, channels) if pv == "fp16" else (channels, blocks * BLOCK)
    operands = Int8Operands(
        query if leaves_query else new(*q_shape, channels, dtype=torch.int8),
        new(0) if leaves_query else new(*q_shape),
        new(*kv_shape, channels, dtype=torch.int8),
        new(batch, kv_heads, blocks * 2, 4, dtype=torch.bfloat16),
        new(batch, kv_heads, *value_shape, dtype=VALUE_DTYPES[pv]),
        new(batch, kv_heads, channels),
        new(batch, kv_heads, channels),
        new(*q_shape) if return_lse else None,
    )
    inputs = [tokens(x) for x in (query, key, value)]
    statistics = (
        *(lines, operands.value_mean, operands.value_scale),
        *(kv_heads, blocks, head_dim, v_head_dim, kv_len),
    )
    constants = macros(channels, query.dtype, pv, return_lse)
    of_query = 0 if leaves_query else q_blocks * 2 * batch * q_heads
    of_key_and_value = pairs * blocks * (2 + (2 if pv == "fp16" else channels // 64))
    early = 0 if return_lse else min(LEADING_QUERY_BLOCKS, of_query)
    launch(
        SOURCE,
        "statistics",
        constants,
        (2 * pairs * SHARERS,),
        (channels,),
        0,
        (*inputs[1:], statistics),
        query.device,
    )
    launch(
        SOURCE,
        "quantize",
        constants,
        (of_query + of_key_and_value,),
        (128,),
        0,
        (
            *inputs,
            statistics,
            (
                *(operands.query, operands.query_scale, operands.key, operands.key_scale, operands.value),
                operands.mean_score,
                *(pairs, q_heads, q_blocks, early, q_len),
            ),
        ),
        query.device,
        dependent=True,
    )
    return operands
