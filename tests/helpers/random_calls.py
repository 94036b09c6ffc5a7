"""Draw random calls; calls that one compiled kernel serves share layouts and options."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from tests.helpers.layouts import LAYOUTS

T = TypeVar("T")

LENGTHS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 191, 255, 256, 257, 300, 383, 513)
HEADS = ((1, 1, 1), (2, 2, 2), (1, 4, 2), (3, 4, 1), (2, 3, 3))  # batch, q_heads, kv_heads


@dataclass(frozen=True)
class Group:
    recipe: str
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype


def spread(choose: random.Random, values: Sequence[T], count: int) -> list[T]:
    """Draw `count` values, each about as often as the others."""
    return choose.sample(list(values) * math.ceil(count / len(values)), count)


def draw_layouts(choose: random.Random, tensors: int, count: int) -> list[tuple[str, ...]]:
    """Draw the layouts of so many tensors `count` times.

    Kernels are compiled for what strides and addresses are multiples of, which layouts and numbers of heads decide:
    random calls share some of them, because to compile takes longer than to run hundreds of calls.
    """
    return list(zip(*(spread(choose, LAYOUTS, count) for _ in range(tensors)), strict=True))
