"""Inputs of tiny models: tensors drawn by torch's global generator, masks and rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch

BATCH = 2

Inputs = dict[str, Any]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def timestep() -> torch.Tensor:
    return torch.full((BATCH,), 500.0)


def valid(lengths: tuple[int, ...], total: int) -> torch.Tensor:
    """(batch, total) of 1 in the first `lengths[b]` places of row b, else 0; int64."""
    return (torch.arange(total) < torch.tensor(lengths)[:, None]).long()


def rope(tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(tokens).float(), 0.7 ** torch.arange(head_dim // 2)).repeat_interleave(2, dim=1)
    return angles.cos(), angles.sin()


def with_text(*shape: int, tokens: int = 13, **more: Any) -> Inputs:
    """Draw states of that shape behind the batch, and tokens of text; `more` adds arguments, or replaces these."""
    states, text = normal(BATCH, *shape), normal(BATCH, tokens, 16)
    return {"hidden_states": states, "encoder_hidden_states": text, "timestep": timestep(), **more}


def video(**more: Any) -> Inputs:
    return with_text(4, 3, 8, 8, **more)


def image(**more: Any) -> Inputs:
    return with_text(4, 16, 16, **more)


def half() -> torch.Tensor:
    """Return a timestep in units of 1."""
    return torch.full((BATCH,), 0.5)
