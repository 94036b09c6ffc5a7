"""Common part of all INT8 forward passes with gradients: outputs, empty calls and the sign of the scale."""

from __future__ import annotations

from typing import Protocol

import torch

from .call import Call
from .layout import KEY_BLOCK, padded_channels
from .operands import Int8Operands, Saved


class QuantizeAndAttend(Protocol):
    """Function that quantises, attends, and writes `output` and `lse`; the call comes from `Call.for_kernel`."""

    def __call__(self, call: Call, *, output: torch.Tensor, lse: torch.Tensor | None) -> Int8Operands: ...


def saving(call: Call, quantize_and_attend: QuantizeAndAttend) -> tuple[torch.Tensor, Saved]:
    """Run a forward pass; return the output (0 in rows without a key) and the tensors that its gradients need."""
    output, lse = call.new_outputs(saves_lse=True)
    assert lse is not None
    if call.is_empty:
        return output, empty_saved(call, lse)
    operands = quantize_and_attend(call.for_kernel(), output=output, lse=lse)
    codes = operands.query.neg_() if call.scale < 0 else operands.query
    equalizer = lse.new_empty(0) if operands.equalizer is None else operands.equalizer
    return output, Saved(codes, operands.query_scale, operands.key, operands.key_scale, equalizer, lse)


def empty_saved(call: Call, lse: torch.Tensor) -> Saved:
    """Return the saved tensors of a call whose output is 0, with `lse`; for other calls, their sizes and dtypes."""
    q_sequences, kv_sequences = call.token_axes
    channels, rows, kv_rows = padded_channels(int(call.query.shape[3])), q_sequences.rows, kv_sequences.rows
    query, key = call.query.shape[:2], call.key.shape[:2]
    new = call.query.new_zeros
    return Saved(
        new((*query, rows, channels), dtype=torch.int8),
        new((*query, rows), dtype=torch.float32),
        new((*key, kv_rows, channels), dtype=torch.int8),
        new((*key, kv_rows // KEY_BLOCK, 4), dtype=torch.bfloat16),
        lse.new_ones((call.batch, key[1], channels) if call.recipe.equalize else 0),
        lse,
    )
