"""What random calls are drawn from, and what those share that one compiled kernel serves."""

from dataclasses import dataclass

import torch

LENGTHS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 191, 255, 256, 257, 300, 383, 513)
HEADS = ((1, 1, 1), (2, 2, 2), (1, 4, 2), (3, 4, 1), (2, 3, 3))  # batch, q_heads, kv_heads


@dataclass(frozen=True)
class Group:
    recipe: str
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
