"""Calls as tests write them."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch

from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.call import BackwardCall, Call, Mask, softmax_scale
from sage_kernels.spec.operands import Saved
from sage_kernels.spec.recipe import Recipe, get_recipe


def draw_tensors(
    *, batch=2, q_heads=4, kv_heads=2, q_len=70, kv_len=90, head_dim=64, v_head_dim=32, dtype=torch.float32, means=False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw Q, K and V, the same each time; with `means`, each of their channels has its own mean."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        x = torch.randn(batch, *size, generator=generator)
        return (x + torch.randn(size[-1], generator=generator) if means else x).to(dtype)

    return draw(q_heads, q_len, head_dim), draw(kv_heads, kv_len, head_dim), draw(kv_heads, kv_len, v_head_dim)


def draw_for_cache(tokens=300, head_dim=64, batch=2, group=2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw Q, K and V of two key heads, K with loud channels and a mean; the same each time."""
    torch.manual_seed(tokens + head_dim)
    loud = torch.where(torch.arange(head_dim) % 16 == 3, 6.0, 1.0)
    query = torch.randn(batch, 2 * group, tokens, head_dim) / loud.sqrt()
    key = torch.randn(batch, 2, tokens, head_dim) * loud + 3 * torch.randn(1, 2, 1, head_dim)
    return query, key, torch.randn(batch, 2, tokens, head_dim) * 40


def new_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe | str,
    *,
    mask: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    blocks: BlockList | None = None,
    scale: float | None = None,
    **options: Any,
) -> Call:
    """Return a call with a 4-D mask, or `key_mask`, bool (batch or 1, kv_len), and a list; `options` are its fields."""
    keys = _keys(key_mask, blocks, key.shape[2]) if mask is None else Mask.of(mask, key.shape[2])
    return Call(query, key, value, _recipe(recipe), keys, scale=softmax_scale(scale, query.shape[3]), **options)


def new_backward_call(
    output_gradient: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    saved: Saved,
    recipe: Recipe | str,
    head_dim: int,
    *,
    key_mask: torch.Tensor | None = None,
    blocks: BlockList | None = None,
    scale: float | None = None,
    **options: Any,
) -> BackwardCall:
    """Return the backward pass of a call with these options."""
    keys, scale = _keys(key_mask, blocks, value.shape[2]), softmax_scale(scale, head_dim)
    return BackwardCall(output_gradient, value, output, saved, head_dim, _recipe(recipe), keys, scale=scale, **options)


def pack(lengths: Iterable[int]) -> torch.Tensor:
    """Return where sequences of these lengths start in packed tokens, and where the last one ends: int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _keys(key_mask: torch.Tensor | None, blocks: BlockList | None, kv_len: int) -> Mask:
    if blocks is None:
        return Mask.of_keys(key_mask)
    return Mask.of_blocks(blocks, None if key_mask is None else key_mask[:, None, None], kv_len)


def _recipe(recipe: Recipe | str) -> Recipe:
    return get_recipe(recipe) if isinstance(recipe, str) else recipe
