"""Calls as tests write them."""

from collections.abc import Iterable
from itertools import accumulate

import torch

from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.call import BackwardCall, Call, Mask, softmax_scale
from sage_kernels.spec.layout import Lengths
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
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    lengths: Lengths | None = None,
    return_lse: bool = False,
) -> Call:
    """Return a call with a 4-D mask, or with `valid`, bool (batch or 1, kv_len), and a list, or with packed lengths."""
    keys = _keys(valid, blocks, key.shape[2]) if mask is None else Mask.of(mask, key.shape[2])
    scale = softmax_scale(scale, query.shape[3])
    return Call(query, key, value, _recipe(recipe), keys, is_causal, causal_offset, scale, lengths, return_lse)


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
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    lengths: Lengths | None = None,
) -> BackwardCall:
    """Return the backward pass of a call with these options."""
    return BackwardCall(
        output_gradient,
        value,
        output,
        saved,
        head_dim,
        _recipe(recipe),
        _keys(valid, blocks, value.shape[2]),
        is_causal,
        causal_offset,
        softmax_scale(scale, head_dim),
        lengths,
    )


def pack(lengths: Iterable[int]) -> torch.Tensor:
    """Return where sequences of these lengths start in packed tokens, and where the last one ends: int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _keys(valid: torch.Tensor | None, blocks: BlockList | None, kv_len: int) -> Mask:
    if blocks is None:
        return Mask.of_keys(valid)
    return Mask.of_blocks(blocks, None if valid is None else valid[:, None, None], kv_len)


def _recipe(recipe: Recipe | str) -> Recipe:
    return get_recipe(recipe) if isinstance(recipe, str) else recipe
