"""Normalise the heads of queries or keys and rotate them by their position, in one pass over memory.

PyTorch's operators read and write such a tensor about ten times for that. A call that is repeated is prepared, as
attention's are (`prepared`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch

from . import backends, registry  # noqa: F401 - `backends` registers the kernels
from .heads import HeadKernel, Norm, Rope, check_heads, head_kernel
from .prepared import ALIGNMENT, CALLS, attempt, is_plain, modes_are_active
from .rehearsal import Rehearsal
from .tape import Tape


@dataclass(slots=True, eq=False)
class _Slot:
    """Knowledge of calls that agree in all but addresses and values.

    Attributes:
        kernel: runs them.
        tape: its launches, once they are rehearsed.
        calls: how many there were before.
    """

    kernel: HeadKernel
    tape: Tape | None = None
    calls: int = 0


_slots: dict[tuple[object, ...], _Slot] = {}
registry.forgetters.append(_slots.clear)


def norm_rope(x: torch.Tensor, norm: Norm | None = None, rope: Rope | None = None) -> torch.Tensor:
    """Normalise heads and rotate them by their position; round after each, as models do.

    On an NVIDIA GPU float16 and bfloat16 run in one kernel, forward and backward; all else in PyTorch's operators. The
    tables of `rope` get no gradient from a kernel.

    Args:
        x: (batch, tokens, heads, head_dim), of any strides.
        norm: the norm of each head, or of each token; None: none.
        rope: the rotation; None: none.

    Returns:
        Heads of the same size, contiguous, in the dtype of x.

    Raises:
        ValueError: norm or rotation do not fit x.
    """
    if not torch.is_grad_enabled():
        return _forward(x, norm, rope)
    vectors = (None, None) if norm is None else (norm.weight, norm.bias)
    if not any(one is not None and one.requires_grad for one in (x, *vectors)):
        return _forward(x, norm, rope)
    check_heads(x, norm, rope)
    kernel = head_kernel(x, norm, rope, grad=True)
    if kernel.name == "reference" or modes_are_active():
        return kernel.forward(x, norm, rope)
    output: torch.Tensor = _NormRope.apply(x, *vectors, kernel, norm, rope)
    return output


def is_served(x: torch.Tensor) -> bool:
    """Return whether a kernel takes heads like x, and nothing wants to see PyTorch's operators instead."""
    if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16) or torch.version.hip is not None:
        return False
    return not (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled() or modes_are_active())


def _forward(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
    key = (
        *(x.shape, x.stride(), x.dtype, x.device),
        None if norm is None else norm.facts,
        None if rope is None else rope.facts,
    )
    slot = _slots.get(key)
    if slot is None:
        check_heads(x, norm, rope)
        if len(_slots) == CALLS:
            _slots.clear()
        slot = _slots[key] = _Slot(head_kernel(x, norm, rope, grad=False))
    if slot.kernel.name == "reference" or modes_are_active():
        return slot.kernel.forward(x, norm, rope)
    tensors = _tensors(x, norm, rope)
    if slot.tape is not None:
        addresses = [one.data_ptr() for one in tensors]
        if not reduce(or_, addresses) % ALIGNMENT:
            return slot.tape.run(*addresses)[0]
    output = slot.kernel.forward(x, norm, rope)
    slot.calls += 1
    if slot.calls == 2 and is_plain(*tensors):
        slot.tape = attempt(lambda rehearsal: _rehearse(rehearsal, slot.kernel, x, norm, rope), x.device)
    return output


def _tensors(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> list[torch.Tensor]:
    """Return all tensors of a call in a fixed order."""
    given = [x]
    if norm is not None and norm.weight is not None:
        given.append(norm.weight)
    if norm is not None and norm.bias is not None:
        given.append(norm.bias)
    if rope is not None:
        given.append(rope.cosine)
    if rope is not None and rope.sine is not None:
        given.append(rope.sine)
    return given


def _rehearse(rehearsal: Rehearsal, kernel: HeadKernel, x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> Tape:
    def stand_in(one: torch.Tensor | None) -> Any:
        return None if one is None else rehearsal.stand_in(one, x.device)

    heads = stand_in(x)
    if norm is not None:
        norm = replace(norm, weight=stand_in(norm.weight), bias=stand_in(norm.bias))
    if rope is not None:
        rope = replace(rope, cosine=stand_in(rope.cosine), sine=stand_in(rope.sine))
    output = kernel.forward(heads, norm, rope)
    return Tape(rehearsal, _tensors(heads, norm, rope), [output], x.device)


class _NormRope(torch.autograd.Function):
    """`norm_rope` with gradients; what is kept for them is x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        kernel: HeadKernel,
        norm: Norm | None,
        rope: Rope | None,
    ) -> torch.Tensor:
        tables = (None, None) if rope is None else (rope.cosine, rope.sine)
        ctx.save_for_backward(x, weight, bias, *tables)
        ctx.kernel = kernel
        ctx.norm = None if norm is None else replace(norm, weight=None, bias=None)
        ctx.place = None if rope is None else (rope.offset, rope.halves)
        return _forward(x, norm, rope)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, cosine, sine = ctx.saved_tensors
        norm = None if ctx.norm is None else replace(ctx.norm, weight=weight, bias=bias)
        rope = None if ctx.place is None else Rope(cosine, sine, *ctx.place)
        return (*ctx.kernel.backward(gradient, x, norm, rope), None, None, None)
