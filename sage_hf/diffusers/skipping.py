"""Detection of attention whose scores diffusers' layer skip leaves out, so that its output is V."""

from __future__ import annotations

import torch

from sage_kernels.runtime import torch_private

# diffusers' function mode, once it is imported. It replaces torch's scaled_dot_product_attention, but not ours.
score_skip_modes: list[type] = []


def function_modes_are_active() -> bool:
    """Return whether any mode replaces PyTorch's functions, as a layer skip does."""
    return bool(torch_private.function_modes())


def scores_are_skipped(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether this attention, of (B, H, N, D) tensors, runs inside diffusers' `AttentionScoreSkipFunctionMode`.

    As in diffusers, attention with different numbers of queries and keys is not skipped.
    """
    modes = torch_private.function_mode_stack()
    return (
        bool(modes)
        and any(isinstance(mode, tuple(score_skip_modes)) for mode in modes)
        and query.shape[2] == value.shape[2]
    )
