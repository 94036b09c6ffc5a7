"""Scores of Q's means by `smooth_q_scores.cu`: see `triton.smooth_q_scores`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..spec.call import Call
from ..spec.layout import BLOCK
from ..spec.operands import NVFP4Operands
from . import tokens
from .launch import ConfiguredKernel, KernelSource, launch
from .parameters import ConstFloats, ConstInts, Floats, Int
from .tokens import Tokens

THREADS = 128


@dataclass(slots=True)
class ScoresArguments:
    """Tensors, except K, that the kernel reads and writes, and sizes.

    Attributes:
        query_mean, query_tensor_scale, key_tensor_scale: as in `operands.NVFP4Operands`.
        key_mean: (batch, kv_heads, key_mean_channels), as in `operands.KVStatistics`.
        chosen: (batch, kv_heads, places), as in `operands.KVStatistics`, like `first_keys`; None if the heavy keys are
            the first keys.
        delta: (sequences, q_heads, delta_blocks, kv_rows), written for `blocks` of its blocks.
        first_sequence, first_block: the sequence and block of `delta`'s first scores.
        q_blocks: blocks of BLOCK tokens of Q in the operands.
    """

    query_mean: ConstFloats
    query_tensor_scale: ConstFloats
    key_mean: ConstFloats
    key_tensor_scale: ConstFloats
    chosen: ConstInts
    places: Int
    first_keys: Int
    delta: Floats
    q_heads: Int
    kv_heads: Int
    kv_len: Int
    kv_rows: Int
    q_blocks: Int
    blocks: Int
    delta_blocks: Int
    first_sequence: Int
    first_block: Int
    head_dim: Int
    key_mean_channels: Int


@dataclass(slots=True)
class ScoresParameters:
    """Parameters of the kernel."""

    key: Tokens
    arguments: ScoresArguments


@cache
def kernel(channels: int, dtype: torch.dtype, choice: bool = False) -> ConfiguredKernel:
    """Return `smooth_q_scores` for operands of so many channels, 64 or 128, and K of a dtype.

    With `choice`, heavy keys are not just the first keys.
    """
    macros = {**tokens.macros(channels, dtype), "BLOCK": BLOCK, "THREADS": THREADS, "CHOICE": choice}
    return ConfiguredKernel(
        KernelSource("smooth_q_scores.cu", {"smooth_q_scores": ScoresParameters}, macros), "smooth_q_scores", THREADS
    )


def smooth_q_scores(
    operands: NVFP4Operands, call: Call, first_sequence: int, sequences: int, first_block: int, delta: torch.Tensor
) -> None:
    """Write the scores of Q's means for a range of blocks of rows, of a range of sequences.

    Args:
        operands: the call's operands, with a query_mean.
        call: a call without heavy keys (`Call.tail`), a mask or packed sequences; K's channels are contiguous, its
            address and other strides multiples of 16 bytes.
        first_sequence, sequences, first_block: where the ranges begin, and how many sequences there are.
        delta: float32 (sequences or more, q_heads, blocks, keys), written: (the block's mean) · (K - its mean), divided
            by the tensor scales of Q and K. Keys are in the order of the operand.

    Raises:
        CompileError: see `launch.launch`.
    """
    assert operands.query_mean is not None
    key_mean, chosen = operands.statistics.key_mean, operands.statistics.chosen
    _, q_heads, q_blocks, channels = operands.query_mean.shape
    kv_heads, blocks = key_mean.shape[1], min(delta.shape[2], q_blocks - first_block)
    arguments = ScoresArguments(
        query_mean=operands.query_mean,
        query_tensor_scale=operands.query_tensor_scale,
        key_mean=key_mean,
        key_tensor_scale=operands.key_tensor_scale,
        chosen=chosen,
        places=1 if chosen is None else chosen.shape[2],
        first_keys=operands.statistics.first_keys,
        delta=delta,
        q_heads=q_heads,
        kv_heads=kv_heads,
        kv_len=call.kv_len,
        kv_rows=delta.shape[3],
        q_blocks=q_blocks,
        blocks=blocks,
        delta_blocks=delta.shape[2],
        first_sequence=first_sequence,
        first_block=first_block,
        head_dim=call.key.shape[3],
        key_mean_channels=key_mean.shape[2],
    )
    grid = sequences * q_heads * (delta.shape[3] // BLOCK)
    one = kernel(channels, call.key.dtype, chosen is not None)
    launch(one, grid, ScoresParameters(Tokens.of(call.key), arguments), delta.device)
