"""Calls as tests write them."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch

from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.call import BackwardCall, Call, Mask, softmax_scale
from sage_kernels.spec.operands import Saved
from sage_kernels.spec.recipe import Recipe, get_recipe


def new_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe | str,
    *,
    mask: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    blocks: BlockList | None = None,
    scale: float | None = None,
    **options: Any,
) -> Call:
    """Return a call with a 4-D mask, or `valid`, bool (batch or 1, kv_len), and a list; `options` are its fields."""
    keys = _keys(valid, blocks, key.shape[2]) if mask is None else Mask.of(mask, key.shape[2])
    return Call(query, key, value, _recipe(recipe), keys, scale=softmax_scale(scale, query.shape[3]), **options)


def new_backward_call(
    output_gradient: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    saved: Saved,
    recipe: Recipe | str,
    head_dim: int,
    *,
    valid: torch.Tensor | None = None,
    blocks: BlockList | None = None,
    scale: float | None = None,
    **options: Any,
) -> BackwardCall:
    """Return the backward pass of a call with these options."""
    keys, scale = _keys(valid, blocks, value.shape[2]), softmax_scale(scale, head_dim)
    return BackwardCall(output_gradient, value, output, saved, head_dim, _recipe(recipe), keys, scale=scale, **options)


def pack(lengths: Iterable[int]) -> torch.Tensor:
    """Return where sequences of these lengths start in packed tokens, and where the last one ends: int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _keys(valid: torch.Tensor | None, blocks: BlockList | None, kv_len: int) -> Mask:
    if blocks is None:
        return Mask.of_keys(valid)
    return Mask.of_blocks(blocks, None if valid is None else valid[:, None, None], kv_len)


def _recipe(recipe: Recipe | str) -> Recipe:
    return get_recipe(recipe) if isinstance(recipe, str) else recipe
