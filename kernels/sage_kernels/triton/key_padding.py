"""Which keys of a padded batch exist, as kernels read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import UNSPECIALIZED, launch
from .sequences import stride_of


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

    @classmethod
    def of(cls, valid: torch.Tensor) -> KeyPadding:
        """Of a bool (batch or 1, kv_len), False where a key does not exist."""
        valid = valid.contiguous().view(torch.uint8)
        spans = valid.new_empty((valid.shape[0], 3), dtype=torch.int32)
        launch(find_spans, (valid.shape[0],), valid, spans, valid.shape[1], BLOCK=1024)
        return cls(valid, spans)

    @property
    def strides(self) -> tuple[int, int]:
        """Batch strides of `valid` and `spans`, 0 where all batch elements share them."""
        return stride_of(self.valid), stride_of(self.spans)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def find_spans(valid, spans, kv_len, BLOCK: tl.constexpr):
    """Of one batch element."""
    batch = tl.program_id(0).to(tl.int64)
    valid += batch * kv_len
    lane = tl.arange(0, BLOCK)
    first = tl.zeros((BLOCK,), tl.int32) + kv_len
    end = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, kv_len, BLOCK):
        exists = tl.load(valid + start + lane, mask=start + lane < kv_len, other=0) != 0
        first = tl.minimum(first, tl.where(exists, start + lane, kv_len))
        end = tl.maximum(end, tl.where(exists, start + lane + 1, 0))
    begin = tl.min(first, 0)
    hole = tl.zeros((BLOCK,), tl.int32) + kv_len
    for start in range(0, kv_len, BLOCK):
        missing = tl.load(valid + start + lane, mask=start + lane < kv_len, other=1) == 0
        hole = tl.minimum(hole, tl.where(missing & (start + lane > begin), start + lane, kv_len))
    tl.store(spans + 3 * batch, begin)
    tl.store(spans + 3 * batch + 1, tl.min(hole, 0))
    tl.store(spans + 3 * batch + 2, tl.max(end, 0))


@triton.jit
def key_exists(column, kv_len, valid, PADDED: tl.constexpr):
    """Which keys exist of those with these indices in their sequence; `valid` is its batch element's."""
    exists = column < kv_len
    if PADDED:
        exists = exists & (tl.load(valid + column, mask=exists, other=0) != 0)
    return exists


@triton.jit
def key_tiles(spans, batch, stride, kv_len, BLOCK_N: tl.constexpr, PADDED: tl.constexpr):
    """Tiles of keys: (first with a key, first and end of those without a gap, end of the keys)."""
    if PADDED:
        spans += batch * stride
        first, hole, end = tl.load(spans), tl.load(spans + 1), tl.load(spans + 2)
        return first // BLOCK_N, tl.cdiv(first, BLOCK_N), hole // BLOCK_N, end
    else:
        return 0, 0, kv_len // BLOCK_N, kv_len
