"""What quantisers make and kernels read, in few bits and padded; what the forward pass keeps for gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .layout import stride_of

VALUE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "fp16": torch.float16}
"""The dtype of V in `Int8Operands` for each format of P·V."""
PV_OF_DTYPE = {dtype: pv for pv, dtype in VALUE_DTYPES.items()}


@dataclass(frozen=True)
class KeyPadding:
    """Keys that do not exist, in a batch whose sequences are padded left or right; or anywhere, which costs more.

    Attributes:
        valid: uint8 (batch or 1, kv_len), 0 where a key does not exist.
        spans: int32 (batch or 1, 3): the first key that exists, the next one that does not, and the end of those that
            exist. All that lie between the first two exist, so tiles there need no mask; (kv_len, kv_len, 0) where no
            key exists.
    """

    valid: torch.Tensor
    spans: torch.Tensor

    @property
    def strides(self) -> tuple[int, int]:
        """Return the batch strides of `valid` and `spans`, 0 where all batch elements share them."""
        return stride_of(self.valid), stride_of(self.spans)


@dataclass(frozen=True)
class Statistics:
    """Statistics over valid tokens; float32, channels padded to a power of two.

    Attributes:
        key_mean: (batch, kv_heads, head_dim); zeros without smoothing of K.
        value_mean: (batch, kv_heads, v_head_dim), of `transforms.smooth_value`; zeros without smoothing of V.
        value_amax: (batch, kv_heads, v_head_dim): largest |V - mean| of each channel, NaN where it holds a non-finite
            element.
        value_tensor_amax: (batch, kv_heads): largest finite |V - mean|.
    """

    key_mean: torch.Tensor
    value_mean: torch.Tensor
    value_amax: torch.Tensor
    value_tensor_amax: torch.Tensor


@dataclass(frozen=True)
class Int8Operands:
    """Q, K and V of the INT8 recipes.

    Operand batch is 1 for packed sequences, else the caller's; channels are head_dim rounded up to a power of two, rows
    those of `layout.Sequences`; what lies beyond a sequence is 0.

    Attributes:
        query: int8 (operand batch, q_heads, rows, channels).
        query_scale: float32 (operand batch, q_heads, rows).
        key: int8 (operand batch, kv_heads, rows, channels), K without its mean.
        key_scale: bfloat16 (operand batch, kv_heads, rows / 64, 4), of the 16 tokens that `layout.thread_order` puts
            together. A 16-bit scale is loaded into a register; Triton would stage a 32-bit one through shared memory.
        value: V without its mean. In 8 bit (operand batch, kv_heads, channels, rows), the tokens of each 16 in the
            order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: as a thread's scores come out of the one matrix product, its
            weights go into the other. In float16 (operand batch, kv_heads, rows, channels).
        value_scale: float32 (batch, kv_heads, channels).
        value_mean: float32 (batch, kv_heads, channels), added to the output.
        mean_score: float32 (operand batch, q_heads, rows), Q's products with K's mean, which the LSE gets; or None.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    value: torch.Tensor
    value_scale: torch.Tensor
    value_mean: torch.Tensor
    mean_score: torch.Tensor | None


@dataclass(frozen=True)
class NVFP4Operands:
    """Q, K and V in NVFP4: two e2m1 codes a byte (the first in the low nibble), e4m3 scales of 16 as bits.

    Operand batch is 1 for packed sequences; channels are a power of two, rows a multiple of 128; what lies beyond a
    sequence is 0.

    Attributes:
        query, query_scale: uint8 (operand batch, q_heads, rows, channels / 2), (…, rows, channels / 16).
        query_tensor_scale: float32 (operand batch, q_heads, rows / 128).
        query_mean: float32 (operand batch, q_heads, rows / 128, channels), subtracted from each block; None without.
        key, key_scale, key_tensor_scale: as those of Q. Of every 32 tokens, row p holds number
            p//8·2 + p%8//2·8 + p%2: a thread's scores are then consecutive keys, as P·V takes them.
        value, value_scale: uint8 (operand batch, kv_heads, v_channels, rows / 2), (…, v_channels, rows / 16), groups
            along tokens.
        value_tensor_scale: float32 (batch, kv_heads).
        value_mean: float32 (batch, kv_heads, v_channels or fewer, a power of two).
        mean_score: float32 (operand batch, q_heads, rows), each query's product with K's mean; None without the LSE.
        statistics: of K and V.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    query_tensor_scale: torch.Tensor
    query_mean: torch.Tensor | None
    key: torch.Tensor
    key_scale: torch.Tensor
    key_tensor_scale: torch.Tensor
    value: torch.Tensor
    value_scale: torch.Tensor
    value_tensor_scale: torch.Tensor
    value_mean: torch.Tensor
    mean_score: torch.Tensor | None
    statistics: Statistics


class Saved(NamedTuple):
    """What the forward pass of a recipe with gradients keeps for its backward pass, whichever kernel runs either.

    INT8 Q and K as the scores were made of them, padded: rows to blocks of 128 tokens, channels to a power of two.

    A sequence of an ordinary batch has `rows` = tokens rounded up to 128, and batch is the caller's. Packed sequences
    lie in one batch element of (total tokens // 128 + sequences) · 128 rows; sequence i begins at row
    (cu_seqlens[i] // 128 + i) · 128. What lies beyond a sequence is 0, or, between sequences, undefined.

    Attributes:
        query: int8 (batch, q_heads, rows, channels).
        query_scale: float32 (batch, q_heads, rows).
        key: int8 (batch, kv_heads, rows, channels), K without its mean.
        key_scale: bfloat16 (batch, kv_heads, rows / 64, 4), of the 16 tokens that `layout.thread_order` puts together.
        lse: float32 (batch, q_heads, q_len): natural log-sum-exp of each row's scores against K without its mean,
            -inf where a row may attend to nothing; (1, q_heads, total queries) when packed.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    lse: torch.Tensor
