"""Registry of the kernels of QK-norm and RoPE (`spec.qk_norm_rope`), and the choice of a call's kernel."""

from __future__ import annotations

from typing import Protocol

import torch

from ..runtime.hardware import capability_of
from ..spec.qk_norm_rope import Norm, Rope
from . import registry, verdicts
from .kernels import NamedKernel


class QKNormRopeKernel(NamedKernel, Protocol):
    """Implementation of QK-norm and RoPE.

    All tensors except the parameters are (batch, tokens, heads, head_dim).
    """

    def unsupported(self, x: torch.Tensor, norm: Norm | None, rope: Rope | None, grad: bool) -> str:
        """Return why it cannot serve a call, with gradients if `grad`; "" if it can."""

    def forward(self, x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
        """Return the heads, contiguous, in the dtype of x."""

    def backward(
        self, gradient: torch.Tensor, x: torch.Tensor, norm: Norm | None, rope: Rope | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of x, contiguous, and of the norm's weight and bias; None where the norm has none.

        The channels of the output's gradient are contiguous.
        """


_kernels: dict[str, QKNormRopeKernel] = {}


def register_qk_norm_rope_kernel(kernel: QKNormRopeKernel) -> None:
    """Make a kernel available; kernels registered first are preferred. Raise ValueError if its name is taken."""
    registry.add(_kernels, kernel)


def select_qk_norm_rope_kernel(x: torch.Tensor, norm: Norm | None, rope: Rope | None, grad: bool) -> QKNormRopeKernel:
    """Return the kernel that serves a call; the reference, which is registered last, serves all calls."""
    capability = capability_of(x.device)
    return next(
        kernel
        for kernel in _kernels.values()
        if not kernel.unsupported(x, norm, rope, grad)
        and not verdicts.failure(kernel.name, verdicts.QK_NORM_ROPE, x.shape[3], capability)
    )


def reference_qk_norm_rope_kernel() -> QKNormRopeKernel:
    """Return the reference, which runs PyTorch's operators alone."""
    return _kernels["reference"]
