"""Fake kernels for the registry."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from sage_kernels import backends  # noqa: F401 - `backends` registers the kernels
from sage_kernels.dispatch import registry
from sage_kernels.dispatch.kernels import Kernel, Quantizer
from sage_kernels.dispatch.request import Request
from sage_kernels.reference.registration import ReferenceBackward, ReferenceForward
from sage_kernels.spec.call import BackwardCall, Call
from sage_kernels.spec.operands import KeyPadding, Saved
from sage_kernels.spec.recipe import Recipe


@dataclass(frozen=True)
class FakeKernel:
    """A kernel of one recipe; `reason` is why it does not serve a request, `ran` gets its name when it runs."""

    name: str
    recipe: str
    native: bool = True
    reason: Callable[[Request], str] = lambda request: ""
    ran: Callable[[str], object] = lambda name: None

    def serves(self, recipe: Recipe) -> bool:
        return recipe.name == self.recipe

    def unsupported(self, request: Request) -> str:
        return self.reason(request)


@dataclass(frozen=True)
class FakeQuantizer(FakeKernel):
    """Makes the operands that `FakeForward` takes: none."""

    makes: type = object

    def quantize(self, call: Call, padding: KeyPadding | None = None) -> object:
        self.ran(self.name)
        return object()


@dataclass(frozen=True)
class FakeForward(FakeKernel):
    """Computes what the reference does."""

    takes: type | None = None
    packs: bool = False

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.ran(self.name)
        return ReferenceForward().attend(call, quantizer)


@dataclass(frozen=True)
class FakeTraining(FakeForward):
    """Computes what the reference does, and keeps what gradients need."""

    def attend_and_save(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, Saved]:
        self.ran(self.name)
        return ReferenceForward().attend_and_save(call, quantizer)


@dataclass(frozen=True)
class FakeBackward(FakeKernel):
    """Computes what the reference does."""

    def backward(self, call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.ran(self.name)
        return ReferenceBackward().backward(call)


def refuse_packed(request: Request) -> str:
    """Return the reason of a kernel that takes batches only."""
    return "no packed sequences" if request.packed else ""


def registered_backwards() -> dict[str, Kernel]:
    """Return the backward kernels by name, in the order of preference."""
    return dict(registry.backwards)


def registered_kernels() -> dict[str, Kernel]:
    """Return all kernels by name."""
    return {**registry.quantizers, **registry.forwards, **registry.backwards}


@contextmanager
def preferred(kernel: Kernel, kernels: dict[str, Kernel] = registry.forwards) -> Iterator[None]:
    """Prefer a kernel to all others of a kind, for a while."""
    with mock.patch.dict(kernels, {kernel.name: kernel, **kernels}, clear=True):
        registry.forget_choices()
        yield
    registry.forget_choices()


@contextmanager
def only_the_reference() -> Iterator[None]:
    """Empty the registry but for the reference, for a while."""
    with (
        mock.patch.dict(registry.quantizers, clear=True),
        mock.patch.dict(registry.forwards, {"reference": ReferenceForward()}, clear=True),
        mock.patch.dict(registry.backwards, {"reference_backward": ReferenceBackward()}, clear=True),
    ):
        registry.forget_choices()
        yield
    registry.forget_choices()
