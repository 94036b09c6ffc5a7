"""Registry of the kernels of attention, in the order in which they are preferred."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..replay import cache
from ..spec.recipe import get_recipe
from . import verdicts
from .kernels import BackwardKernel, ExactKernel, ForwardKernel, Kernel, NamedKernel, Quantizer
from .request import Request

quantizers: dict[str, Quantizer] = {}
forwards: dict[str, ForwardKernel] = {}
backwards: dict[str, BackwardKernel] = {}
exacts: dict[str, ExactKernel] = {}
"""Kernels of exact attention other than PyTorch's."""

forgetters: list[Callable[[], None]] = [cache.forget]
"""Functions that forget choices among the kernels, and anything derived from these choices."""

AnyKernel = TypeVar("AnyKernel", bound=NamedKernel)


def register_quantizer(kernel: Quantizer) -> None:
    """Make a quantiser available; quantisers registered first are preferred. Raise ValueError if its name is taken."""
    add(quantizers, kernel)


def register_forward(kernel: ForwardKernel) -> None:
    """Make a forward kernel available; kernels registered first are preferred. Raise ValueError for a taken name."""
    add(forwards, kernel)


def register_backward(kernel: BackwardKernel) -> None:
    """Make a backward kernel available; kernels registered first are preferred. Raise ValueError for a taken name."""
    add(backwards, kernel)


def register_exact(kernel: ExactKernel) -> None:
    """Make a kernel of exact attention available. Raise ValueError if its name is taken."""
    add(exacts, kernel)


def add(kernels: dict[str, AnyKernel], kernel: AnyKernel) -> None:
    """Add a kernel to the kernels of its kind, and forget choices; raise ValueError if its name is taken."""
    if kernel.name in kernels:
        raise ValueError(f"kernel {kernel.name!r} is registered already")
    kernels[kernel.name] = kernel
    forget_choices()


def forget_choices() -> None:
    """Forget all choices of kernels and all replays: from now on, other kernels may be chosen."""
    for forget in forgetters:
        forget()


def get_quantizer(name: str) -> Quantizer | None:
    """Return the quantiser of this name, None for ""; raise KeyError for an unknown name."""
    return quantizers[name] if name else None


def get_forward(name: str) -> ForwardKernel:
    """Return the forward kernel of this name; raise KeyError for an unknown name."""
    return forwards[name]


def get_backward(name: str) -> BackwardKernel:
    """Return the backward kernel of this name; raise KeyError for an unknown name."""
    return backwards[name]


def get_exact(name: str) -> ExactKernel | None:
    """Return the exact kernel of this name; None for PyTorch's kernels."""
    return exacts.get(name)


def exact_kernels(request: Request) -> list[str]:
    """Return the names of the registered kernels of exact attention that serve a request."""
    return [name for name, kernel in exacts.items() if not unsupported(kernel, request)]


def fitting_quantizers(forward: str, request: Request) -> list[str]:
    """Return the names of the quantisers that make the operands of a forward kernel for a request."""
    takes, recipe = forwards[forward].takes, get_recipe(request.recipe)
    fitting = [one for one in quantizers.values() if takes is not None and issubclass(one.makes, takes)]
    return [one.name for one in fitting if one.serves(recipe) and not unsupported(one, request)]


def unsupported(kernel: Kernel | ExactKernel, request: Request) -> str:
    """Return why a kernel does not serve a request: its limits, or a failed self-check on this machine; or ""."""
    recipe = "exact" if kernel.name in exacts else request.recipe
    failure = verdicts.failure(kernel.name, recipe, request.head_dim, request.capability)
    return failure or kernel.unsupported(request)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Leave out the forward, backward and exact kernels of these names while the block runs, to measure their gain."""
    registered: tuple[dict[str, Any], ...] = (forwards, backwards, exacts)
    earlier = [dict(kernels) for kernels in registered]
    for kernels, name in itertools.product(registered, names):
        kernels.pop(name, None)
    forget_choices()
    try:
        yield
    finally:
        for kernels, earlier_kernels in zip(registered, earlier, strict=True):
            kernels.clear()
            kernels.update(earlier_kernels)
        forget_choices()
