"""Launch arguments common to all backward kernels: grids, strides, sequence lengths, padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...spec.call import BackwardCall
from ...spec.layout import batch_strides, ceil_div
from ...spec.operands import KeyPadding
from .backward_operands import multiplies_int8
from .padding import key_padding


@dataclass(frozen=True)
class BackwardLaunch:
    """A backward call that is not empty, with the tensors of its gradients.

    Attributes:
        call: the call.
        gradients: dQ, dK and dV, written by the kernels.
        padding: the keys that exist; None: all.
    """

    call: BackwardCall
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    padding: KeyPadding | None

    @classmethod
    def of(cls, call: BackwardCall, gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> BackwardLaunch:
        """Describe the launches of a call; find the spans of keys that exist."""
        key_mask = call.mask.key_mask
        return cls(call, gradients, None if key_mask is None else key_padding(key_mask))

    @property
    def int8(self) -> bool:
        """Return whether P and dS are multiplied in INT8."""
        return multiplies_int8(self.call.recipe)

    def key_grid(self, keys: int) -> tuple[int, int, int]:
        """Return the grid of programs that hold `keys` keys each."""
        return ceil_div(self.call.token_axes[1].tokens, keys), self.call.value.shape[1], self.call.batch

    def query_grid(self, rows: int) -> tuple[int, int, int]:
        """Return the grid of programs that hold `rows` rows each."""
        return ceil_div(self.call.token_axes[0].tokens, rows), self.call.output.shape[1], self.call.batch

    def key_strides(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return the strides of V, dK or dV."""
        return batch_strides(x, self.call.token_axes[1])

    def query_strides(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return the strides of dO or dQ."""
        return batch_strides(x, self.call.token_axes[0])

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments that every backward kernel takes, compile-time constants included."""
        queries, keys = self.call.token_axes
        key_mask_stride, spans_stride = (0, 0) if self.padding is None else self.padding.strides
        return {
            "key_mask": None if self.padding is None else self.padding.key_mask_u8,
            "spans": None if self.padding is None else self.padding.spans,
            "key_mask_stride": key_mask_stride,
            "spans_stride": spans_stride,
            "q_ranges": queries.ranges,
            "kv_ranges": keys.ranges,
            "q_len": queries.tokens,
            "kv_len": keys.tokens,
            "q_rows": queries.rows,
            "kv_rows": keys.rows,
            "group": self.call.output.shape[1] // self.call.value.shape[1],
            "causal_offset": self.call.kernel_offset,
            "softmax_scale": self.call.scale,
            "head_dim": self.call.head_dim,
            "v_head_dim": self.call.value.shape[3],
            "CHANNELS": self.call.channels,
            "CAUSAL": self.call.is_causal,
            "PADDED": self.padding is not None,
            "PACKED": queries.packed,
            "RAGGED": queries.ranges is not None,
        }
