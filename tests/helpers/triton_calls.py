"""Triton's kernels, run for a GPU that need not be there.

Kernels take the GPU's capability from their tensors where they are called through the registry; here it is given, so
that they run in Triton's interpreter, and so that what they launch can be recorded with tensors on the meta device.
"""

import torch

from sage_kernels.dispatch.kernels import Quantizer
from sage_kernels.spec.call import BackwardCall, Call
from sage_kernels.spec.operands import Int8Operands, KeyPadding, NVFP4Operands, Saved
from sage_kernels.spec.recipe import Recipe
from sage_kernels.triton import int8_backward, int8_forward, nvfp4_forward
from sage_kernels.triton.registration import TritonInt8Quantizer, TritonNVFP4Quantizer

Capability = tuple[int, int]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantizer_of(recipe: Recipe) -> Quantizer:
    """Return Triton's quantiser of the recipe's format."""
    return TritonNVFP4Quantizer() if recipe.qk == "nvfp4" else TritonInt8Quantizer()


def quantize(call: Call, key_mask: torch.Tensor | None = None) -> Int8Operands | NVFP4Operands:
    """Return the operands of a call; `key_mask`, bool, says which keys count."""
    padding = None if key_mask is None else KeyPadding.of(key_mask, has_spans=False)
    return quantizer_of(call.recipe).quantize(call, padding)


def attend(call: Call, capability: Capability, native: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (output, lse or None); `native`: by FP4 tensor cores, where the recipe is in NVFP4."""
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
