"""Protocols of kernels: each computes one phase of attention, or exact attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from ..spec.call import AttentionOutput, BackwardCall, Call
from ..spec.operands import KeyPadding, Saved
from ..spec.recipe import Recipe
from .request import Request


class NamedKernel(Protocol):
    """Kernel of any kind: registries hold it by its name."""

    @property
    def name(self) -> str:
        """Return the name that `explain` and tables of costs show."""


class Kernel(NamedKernel, Protocol):
    """Implementation of one phase of attention, for some formats and transforms, on some machines."""

    @property
    def native(self) -> bool:
        """Return whether it runs on the hardware its recipes were made for; otherwise it reproduces their numerics."""

    def serves(self, recipe: Recipe) -> bool:
        """Return whether it computes every format and transform that the recipe asks for."""

    def unsupported(self, request: Request) -> str:
        """Return why it cannot serve a request of a recipe that it serves; "" if it can.

        A reason names the kernel's limits, not the request's sizes, so that reasons of one kind compare equal.
        """


class Quantizer(Kernel, Protocol):
    """Kernel that makes operands of Q, K and V."""

    @property
    def makes(self) -> type:
        """Return the class of the operands it makes, a class of `operands`."""

    def quantize(self, call: Call, padding: KeyPadding | None = None) -> Any:
        """Transform and quantise Q, K and V as `reference.forward.quantize_operands` does.

        Args:
            call: a call that is not empty.
            padding: the keys that count in means and scales, with spans to be written, or None if the forward kernel
                does not read them; None: all keys count.
        """


class ForwardKernel(Kernel, Protocol):
    """Kernel that computes attention."""

    @property
    def takes(self) -> type | None:
        """Return the class of operands that it reads; None if it quantises by itself."""

    @property
    def packs(self) -> bool:
        """Return whether it takes packed sequences; otherwise it is called once for each sequence."""

    def attend(self, call: Call, quantizer: Quantizer | None) -> AttentionOutput:
        """Return (output, lse) as documented for `ops.attention`; lse may be None if it is not wanted."""


@runtime_checkable
class TrainingForwardKernel(ForwardKernel, Protocol):
    """Kernel that computes attention and saves tensors for its gradients."""

    def attend_and_save(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, Saved]:
        """Return the output, and the tensors that `BackwardKernel.backward` needs from the forward pass."""


class BackwardKernel(Kernel, Protocol):
    """Kernel that computes gradients."""

    def backward(self, call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dQ, dK and dV, laid out as `BackwardCall.new_gradients` lays them out.

        A row that attends to nothing has dQ 0 and contributes nothing to dK and dV; a key that does not exist has dK
        and dV 0.
        """


class ExactKernel(NamedKernel, Protocol):
    """Kernel of exact attention that is not PyTorch's own."""

    @property
    def traceable(self) -> bool:
        """Return whether its host code only allocates, takes views and launches: a trace of it can be replayed."""

    def unsupported(self, request: Request) -> str:
        """Return why it cannot serve a request; "" if it can."""

    def attend(self, call: Call) -> torch.Tensor:
        """Return the output as documented for `ops.attention`; no LSE is wanted."""


class ExactOperatorKernel(ExactKernel, Protocol):
    """Exact kernel of another package, without masks, whose host code cannot be traced."""

    def replay_function(self, call: Call) -> Callable[..., torch.Tensor]:
        """Return a function of (query, key, value), laid out as in the call, that attends with its options."""


AttendToPrefix = Callable[[Call, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor], None]
"""(call, q_lengths, kv_lengths, schedule, output) -> None: write some batch elements' output over their first keys.

`kv_lengths`, int32 (batch,), has the number of keys of these elements, and 0 for all others, whose output must not be
written. Either `q_lengths`, int32 (batch,), q_len or 0, or `schedule` tells the elements too; the other argument is
None. A schedule is int32: three arrays with a number for each element, rounded up to a multiple of 4 numbers, and a
counter. The arrays hold the parts into which the element's keys are divided (1); its blocks of rows, or 0; and its
index. The counter is 0."""
