"""Quantised operands, which quantisers make and kernels read, and the tensors that the forward saves for gradients."""

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
    """Keys that count in a padded batch. Padding may be anywhere; on the left or right it costs least.

    Attributes:
        key_mask_u8: uint8 (batch or 1, kv_len), 0 where a key does not count.
        spans: int32 (batch or 1, 3): the first key that exists, the first key after it that does not exist, and the end
            of the last key that exists; (kv_len, kv_len, 0) if no key exists. All keys between the first two exist, so
            tiles there need no mask. None: no kernel reads them.
    """

    key_mask_u8: torch.Tensor
    spans: torch.Tensor | None = None

    @classmethod
    def of(cls, key_mask: torch.Tensor, has_spans: bool = True) -> KeyPadding:
        """Return the padding of bool `key_mask`, with spans still to be written, or without spans."""
        key_mask_u8 = key_mask.contiguous().view(torch.uint8)
        return cls(key_mask_u8, key_mask.new_empty((key_mask.shape[0], 3), dtype=torch.int32) if has_spans else None)

    @property
    def strides(self) -> tuple[int, int]:
        """Return the batch strides of `key_mask_u8` and `spans`, 0 where all batch elements share them."""
        return stride_of(self.key_mask_u8), stride_of(self.spans)


@dataclass(frozen=True)
class KVStatistics:
    """Statistics of K and V over the tokens that count, in float32; channels are padded to a power of two.

    Attributes:
        key_mean: (batch, kv_heads, head_dim), the mean of K; 0 without smoothing of K.
        value_mean: (batch, kv_heads, v_head_dim), the mean of V (`transforms.smooth_value`); 0 without smoothing of V.
        value_amax: (batch, kv_heads, v_head_dim), each channel's largest |V - mean|; NaN if an element is not finite.
        value_tensor_amax: (batch, kv_heads), the largest finite |V - mean|.
        equalizer: (batch, kv_heads, head_dim), the factors that divide K and multiply Q (`transforms.equalize`), 1 in
            padding channels; None without equalizing.
        chosen: int32 (batch, kv_heads, `Call.replaceable_keys`), the places that `transforms.heavy_places` or
            `transforms.late_keys` chose; None if the heavy keys are the sequence's first keys.
        first_keys: see `Call.first_keys`.
    """

    key_mean: torch.Tensor
    value_mean: torch.Tensor
    value_amax: torch.Tensor
    value_tensor_amax: torch.Tensor
    equalizer: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    first_keys: int = 0


MEAN_PARTS = 8
"""Rows after the heavy keys whose sum is K's mean: three 16-bit parts of the mean, and zeros."""


@dataclass(frozen=True)
class HeavyKeys:
    """Keys of each sequence that are attended to in 16 bits, the caller's dtype: `Call.first_keys`, then late keys.

    Attributes:
        key: (batch, kv_heads, keys, channels). With NVFP4 it is K minus K's mean. With INT8 it is K itself, and kernels
            subtract `Int8Operands.mean_score` from its scores. It has the channels of the low-bit keys, in the order of
            `layout.heavy_order`; channels beyond head_dim, and keys that do not exist, are 0. If queries are in 16
            bits, channels keep their order, and MEAN_PARTS further rows sum to K's mean.
        value: (batch, kv_heads, keys, v_channels), V with its mean; v_channels is v_head_dim rounded up likewise.
        late: int32 (batch, kv_heads, late keys), the results of `transforms.late_keys`; None without late keys.
    """

    key: torch.Tensor
    value: torch.Tensor
    late: torch.Tensor | None = None


@dataclass(frozen=True)
class Int8Operands:
    """Q, K and V of the INT8 recipes.

    Operand batch is 1 for packed sequences, else the caller's. Channels are head_dim rounded up to a power of two. Rows
    are as in `layout.Sequences`, and 0 beyond a sequence. With heavy keys, K and V are the tensors of `Call.tail`; each
    chosen heavy key has exchanged its place with one of the first keys.

    Attributes:
        query: int8 (operand batch, q_heads, rows, channels).
        query_scale: float32 (operand batch, q_heads, rows).
        key: int8 (operand batch, kv_heads, rows, channels), K without its mean.
        key_scale: bfloat16 (operand batch, kv_heads, rows / 64, 4), one scale for the 16 tokens that
            `layout.thread_order` makes adjacent. Triton would load 32-bit scales through shared memory.
        value: V without its mean. In 8 bits it is (operand batch, kv_heads, channels, rows), and every 16 tokens are in
            the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: then P·V reads the weights from the registers in which Q·Kᵀ
            left the scores. In float16 it is (operand batch, kv_heads, rows, channels).
        value_scale: float32 (batch, kv_heads, channels).
        value_mean: float32 (batch, kv_heads, channels), added to the output.
        mean_score: float32 (operand batch, q_heads, rows), each query's product with K's mean. Kernels subtract it from
            the scores of heavy keys, and add it to the LSE. None if neither is needed, or if queries are in 16 bits.
        heavy: the keys that are attended to in 16 bits; None: no keys.
        equalizer: float32 (batch, kv_heads, channels), the factors of `transforms.equalize`, 1 beyond head_dim; None
            without equalizing.
        query_factors: float32 (batch, kv_heads, channels), the rotation's factors as bits that
            `cuda/include/rotation.cuh` reads, if the forward kernel quantises Q; else None.
        queue: int32 (1,), a counter from which free blocks of a causal forward kernel take the next item. It is 0
            before and after a launch, so launches with the same operands must not overlap. None: items are assigned
            beforehand.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    value: torch.Tensor
    value_scale: torch.Tensor
    value_mean: torch.Tensor
    mean_score: torch.Tensor | None
    heavy: HeavyKeys | None = None
    equalizer: torch.Tensor | None = None
    query_factors: torch.Tensor | None = None
    queue: torch.Tensor | None = None


@dataclass(frozen=True)
class NVFP4Operands:
    """Q, K and V in NVFP4: two e2m1 codes a byte (the first in the low nibble), bits of e4m3 scales of 16 elements.

    Operand batch is 1 for packed sequences; channels are a power of two, rows a multiple of 128; elements beyond a
    sequence are 0.

    Attributes:
        query, query_scale: uint8 (operand batch, q_heads, rows, channels / 2), (…, rows, channels / 16).
        query_tensor_scale: float32 (operand batch, q_heads, rows / 128).
        query_mean: float32 (operand batch, q_heads, rows / 128, channels), subtracted from each block; None without
            smoothing of Q.
        key, key_scale, key_tensor_scale: like Q's. In each 32 tokens, position p holds token p//8·2 + p%8//2·8 + p%2:
            then a thread's scores are of consecutive keys, as P·V needs.
        value, value_scale: uint8 (operand batch, kv_heads, v_channels, rows / 2), (…, v_channels, rows / 16), groups
            along tokens.
        value_tensor_scale: float32 (batch, kv_heads).
        value_mean: float32 (batch, kv_heads, v_channels or fewer, a power of two).
        mean_score: float32 (operand batch, q_heads, rows), each query's product with K's mean; None unless
            `Call.wants_mean_score`.
        statistics: of K and V.
        heavy: as in `Int8Operands`.
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
    statistics: KVStatistics
    heavy: HeavyKeys | None = None


class Saved(NamedTuple):
    """Tensors that the forward pass of a recipe with gradients saves for the backward pass; the same for all kernels.

    Q and K are the INT8 operands of the scores, padded: rows to blocks of 128 tokens, channels to a power of two.

    A sequence of an ordinary batch has `rows` = tokens rounded up to 128, and batch is the caller's. Packed sequences
    lie in one batch element of (total tokens // 128 + sequences) · 128 rows; sequence i begins at row
    (cu_seqlens[i] // 128 + i) · 128. Beyond a sequence, rows of its last block are 0; rows between the blocks of
    sequences are undefined.

    Attributes:
        query: int8 (batch, q_heads, rows, channels).
        query_scale: float32 (batch, q_heads, rows).
        key: int8 (batch, kv_heads, rows, channels), K without its mean.
        key_scale: bfloat16 (batch, kv_heads, rows / 64, 4), one scale for 16 tokens (`layout.thread_order`).
        equalizer: float32 (sequences, kv_heads, channels), by which K was divided and Q multiplied before rotation, 1
            beyond head_dim; (0,) if the recipe has none.
        lse: float32 (batch, q_heads, q_len): natural log-sum-exp of each row's scores against K without its mean,
            -inf if a row may attend to nothing; (1, q_heads, total queries) when packed.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    equalizer: torch.Tensor
    lse: torch.Tensor
