"""Attention whose scores diffusers' layer skip wants left out: its output is V."""

from __future__ import annotations

import torch

# diffusers' function mode, once it is imported. It watches for torch's scaled_dot_product_attention, which ours is not.
score_skip_modes: list[type] = []


def scores_are_skipped(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether this attention, of (B, H, N, D) tensors, runs inside diffusers' `AttentionScoreSkipFunctionMode`.

    As there, attention over another number of tokens than the queries' is not skipped.
    """
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, tuple(score_skip_modes)) for mode in modes) and query.shape[2] == value.shape[2]
