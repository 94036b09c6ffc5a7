"""Exact attention whose rows without a key are 0, whatever the backend gives.

cuDNN's kernel gives them the mean of V, and its gradients. Choosing between the output and zeros would be a pass over
the mask, one over the output, and another one over its gradient. A kernel that writes zeros only where there is no key
reads only so much of the mask as shows one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from . import exact
from .toolchain import triton_version


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call `exact.sdpa`; rows that may attend to no key are 0, and contribute to no gradient.

    Args:
        query, key, value, mask, is_causal, scale, enable_gqa: as in `exact.sdpa`.
    """
    options: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if mask is None:
        return exact.sdpa(query, key, value, **options)
    if not torch.is_grad_enabled():
        return cleared(mask, exact.sdpa(query, key, value, **options))
    valid = _keys_of(mask[(None,) * (4 - mask.dim())], query, key, value)
    if valid is None:
        output = exact.sdpa(query, key, value, **options)
        return torch.where(exact.attended_rows(mask), output, 0.0)
    output = exact.sdpa(*_WithoutGradients.apply(valid, query, key, value), **options)
    return _Cleared.apply(valid, output)


def cleared(mask: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return an output, which no gradient is wanted of, with zeros in rows that may attend to no key.

    Args:
        mask: bool or additive, broadcastable to (batch, q_heads, q_len, kv_len).
        output: (batch, q_heads, q_len, v_head_dim), a backend's own: the zeros may be written to it.
    """
    if output.stride(-1) == 1 and _kernel_serves(mask, output):
        import_module(".triton.empty_rows", __package__).clear_rows(mask, output.detach())
        return output
    return torch.where(exact.attended_rows(mask), output, 0.0)


def _kernel_serves(*tensors: torch.Tensor) -> bool:
    """Return whether a kernel may read these tensors, and write to the last one."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if not tensors[-1].is_cuda or torch.version.hip is not None or triton_version() is None:
        return False
    return all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)


def _keys_of(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Return which keys exist, bool (batch or 1, kv_len), if the kernel serves the call; else None."""
    if key.shape[0] != query.shape[0] or not _kernel_serves(key, value, mask, query):
        return None
    return exact.key_mask(mask, key.shape[2])


def _clear(valid: torch.Tensor, *tensors: torch.Tensor) -> None:
    import_module(".triton.empty_rows", __package__).clear(valid, *tensors)


class _Cleared(torch.autograd.Function):
    """The output with zeros written, in place, to batch elements without a key; its gradient is handed on as it is."""

    @staticmethod
    def forward(ctx: Any, valid: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if output.stride(-1) != 1:
            return torch.where(valid.any(1)[:, None, None, None], output, 0.0)
        _clear(valid, output.detach())
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


class _WithoutGradients(torch.autograd.Function):
    """Q, K and V as they are; zeros are written, in place, to their gradients in batch elements without a key."""

    @staticmethod
    def forward(ctx: Any, valid: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(valid)
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (valid,) = ctx.saved_tensors
        there = [x for x in gradients if x is not None]
        if len(there) == len(gradients) and all(x.stride(-1) == 1 for x in there):
            _clear(valid, *there)
            return None, *gradients
        kept = valid.any(1)[:, None, None, None]
        return None, *(None if x is None else torch.where(kept, x, 0.0) for x in gradients)
