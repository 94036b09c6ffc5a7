"""One memory layout for the output's gradient: the layout of the output.

PyTorch 2.11 keeps cuDNN's backward plan of a call by the layouts of Q, K and V, and runs it for output gradients of
every layout: the second layout of a process gets wrong dQ, dK and dV.
"""

from __future__ import annotations

from typing import Any

import torch


class _GradientLikeOutput(torch.autograd.Function):
    """Identity whose gradient is laid out as its output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        strides = output.stride()
        ctx.order = sorted(range(output.dim()), key=lambda dim: -strides[dim])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        inverse = sorted(range(gradient.dim()), key=lambda dim: ctx.order[dim])
        return gradient.permute(ctx.order).contiguous().permute(inverse)


def with_gradient_like_output(output: torch.Tensor) -> torch.Tensor:
    """Return the output of a differentiable call, whose gradient will reach the call in the output's own layout."""
    laid_out: torch.Tensor = _GradientLikeOutput.apply(output)
    return laid_out
