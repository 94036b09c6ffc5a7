"""Q, K and V in 16 bits, as `tokens.cuh` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..formats.int8 import INT8_MAX
from .compiler import Macro
from .parameters import ConstHalfWords, Int64


@dataclass(frozen=True, slots=True)
class Tokens:
    """Q, K or V: (batch, heads, tokens, channels), channels contiguous. Strides count elements."""

    first: ConstHalfWords
    batch_stride: Int64
    head_stride: Int64
    token_stride: Int64

    @classmethod
    def of(cls, x: torch.Tensor) -> Tokens:
        """Describe a tensor; all addresses and strides except the channels' stride are multiples of 16 bytes."""
        batch, head, token, _ = x.stride()
        return cls(x, batch, head, token)


NO_TOKENS = Tokens(None, 0, 0, 0)


def macros(channels: int, dtype: torch.dtype) -> dict[str, Macro]:
    """Return the compile-time constants of tokens.cuh."""
    return {"CHANNELS": channels, "FLOAT16": dtype == torch.float16, "LARGEST_INT8": INT8_MAX}
