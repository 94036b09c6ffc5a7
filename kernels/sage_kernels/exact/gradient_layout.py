"""One memory layout for the output's gradient: the layout of the output.

PyTorch 2.11 caches cuDNN's backward plan of a call by the layouts of Q, K and V, and runs it for output gradients of
every layout: a process's second layout of output gradients gets wrong dQ, dK and dV.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..runtime import torch_private


def with_gradient_like_output(output: torch.Tensor) -> torch.Tensor:
    """Return the output of a differentiable call, whose gradient will reach the call in the output's layout.

    A hook lays the gradient out. Transforms of torch.func differentiate tensors inside their wrappers, where no hook
    can be placed. For them an `autograd.Function` serves, which takes the host several times as long.
    """
    if torch_private.transforms_are_active():
        laid_out: torch.Tensor = _GradientLikeOutput.apply(output)
        return laid_out
    if output.requires_grad:
        output.register_hook(partial(_in_layout, strides=output.stride()))
    return output


def _in_layout(gradient: torch.Tensor | None, strides: tuple[int, ...]) -> torch.Tensor | None:
    """Return a gradient with its dimensions in memory in the order of these strides; None for None."""
    if gradient is None or gradient.stride() == strides:
        return gradient
    order = sorted(range(gradient.dim()), key=lambda dim: -strides[dim])
    inverse = sorted(range(gradient.dim()), key=lambda dim: order[dim])
    return gradient.permute(order).contiguous().permute(inverse)


class _GradientLikeOutput(torch.autograd.Function):
    """Identity whose gradient is laid out like its output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.strides = output.stride()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        return _in_layout(gradient, ctx.strides)
