"""Which derivatives are wanted of a call."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ..runtime import torch_private


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return whether reverse-mode differentiation goes through a tensor."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                return True
    return False


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Return whether forward-mode differentiation goes through a tensor; always False inside torch.compile."""
    if torch.compiler.is_compiling() or not torch_private.tangents_are_active():
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def refuse_tangents(*tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError if an operator would drop a forward-mode gradient."""
    if has_tangent(*tensors):
        raise NotImplementedError(
            "the operators of sage_kernels have no forward-mode derivative: use exact attention, as "
            "sage_hf.sage_attention does"
        )
