"""Calls as tests write them, and Triton's kernels run for a GPU that need not be there.

Kernels take the GPU's capability from their tensors where they are called through the registry; here it is given, so
that they run in Triton's interpreter, and so that what they launch can be recorded with tensors on the meta device.
"""

import pytest
import torch

from sage_kernels.dispatch.registry import Quantizer
from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.call import BackwardCall, Call, Mask, softmax_scale
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.operands import Int8Operands, NVFP4Operands, Saved
from sage_kernels.spec.recipe import Recipe, get_recipe
from sage_kernels.triton import int8_backward, int8_forward, nvfp4_forward
from sage_kernels.triton.registration import Int8Quantizer, NVFP4Quantizer

Capability = tuple[int, int]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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


def quantizer_of(recipe: Recipe) -> Quantizer:
    """Return Triton's quantiser of the recipe's format."""
    return NVFP4Quantizer() if recipe.qk == "nvfp4" else Int8Quantizer()


def quantize(call: Call, valid: torch.Tensor | None = None) -> Int8Operands | NVFP4Operands:
    """Return the operands of a call; `valid`, of any dtype, is not 0 where a key counts."""
    return quantizer_of(call.recipe).quantize(call, None if valid is None else valid.int())


def attend(call: Call, capability: Capability, native: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (output, lse or None); `native`: by FP4 matrix units, where the recipe is in NVFP4."""
    quantizer = quantizer_of(call.recipe)
    if call.recipe.qk == "nvfp4":
        return nvfp4_forward.attend(call, quantizer, capability, native)
    return int8_forward.attend(call, quantizer, capability)


def attend_and_save(call: Call, capability: Capability) -> tuple[torch.Tensor, Saved]:
    """Return the output and what the gradients need."""
    return int8_forward.attend_and_save(call, quantizer_of(call.recipe), capability)


def backward(call: BackwardCall, capability: Capability) -> Tensors:
    """Return dQ, dK and dV."""
    return int8_backward.backward(call, capability)


def hopper_backward(call: BackwardCall) -> Tensors:
    """Return dQ, dK and dV of Hopper's kernels; skip the test where Triton's Gluon is too old for them."""
    return pytest.importorskip("sage_kernels.gluon.int8_backward", exc_type=ImportError).backward(call)


def _keys(valid: torch.Tensor | None, blocks: BlockList | None, kv_len: int) -> Mask:
    if blocks is None:
        return Mask.of_keys(valid)
    return Mask.of_blocks(blocks, None if valid is None else valid[:, None, None], kv_len)


def _recipe(recipe: Recipe | str) -> Recipe:
    return get_recipe(recipe) if isinstance(recipe, str) else recipe
