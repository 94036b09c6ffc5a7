"""Normalise the heads of queries or keys and rotate them by their position, in one pass over memory.

PyTorch's operators read and write such a tensor about ten times for that. A call that is repeated is prepared, as
attention's are (`prepared`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import backends  # noqa: F401 - `backends` registers the kernels
from .dispatch import registry, self_check
from .replay.launch_plan import Tape
from .replay.prepared import CALLS, is_capturing, is_plain, modes_are_active, repeatable, settings
from .replay.trace import Rehearsal
from .spec.checks import check_memory
from .spec.heads import HeadKernel, Norm, Rope, check_heads, form_of, head_kernel, plain_kernel

DTYPES = torch.float16, torch.bfloat16

Tensors = list[torch.Tensor]
Run = Callable[[Tensors], Tensors]
"""(arguments) -> outputs; it only allocates, takes views and launches."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Knowledge of calls that agree in all but addresses and values.

    Attributes:
        kernel: runs them.
        tape: its launches; None where they cannot be repeated.
        new: none of them has run yet.
    """

    kernel: HeadKernel
    tape: Tape | None = None
    new: bool = True

    def run(self, run: Run, tensors: Tensors) -> Tensors:
        """Return the outputs of a call; prepare the first one, as layers repeat it at once."""
        if not is_plain(*tensors):
            check_memory(*tensors)
            return run(tensors)
        if self.tape is not None:
            return self.tape.run(*[one.data_ptr() for one in tensors])
        outputs = run(tensors)
        if self.new and not is_capturing():
            self.tape = repeatable(lambda rehearsal: _rehearse(rehearsal, run, tensors), tensors, outputs)
            self.new = False
        return outputs


_slots: dict[tuple[object, ...], _Slot] = {}
registry.forgetters.append(_slots.clear)


def norm_rope(x: torch.Tensor, norm: Norm | None = None, rope: Rope | None = None) -> torch.Tensor:
    """Normalise heads and rotate them by their position; round after each, as models do.

    On an NVIDIA GPU float16 and bfloat16 run in one kernel, forward and backward. All else runs in PyTorch's operators,
    and so do tables of `rope` that want gradients, and calls inside of PyTorch's transforms (`torch.func`, forward-mode
    AD) and modes.

    Args:
        x: (batch, tokens, heads, head_dim), of any strides.
        norm: the norm of each head, or of each token; None: none.
        rope: the rotation; None: none.

    Returns:
        Heads of the same size, contiguous, in the dtype of x.

    Raises:
        ValueError: norm or rotation do not fit x.
        RuntimeError: a tensor has elements but no memory.
    """
    if modes_are_active():
        check_heads(x, norm, rope)
        return plain_kernel().forward(x, norm, rope)
    if not torch.is_grad_enabled():
        return _forward(x, norm, rope)
    vectors = (None, None) if norm is None else (norm.weight, norm.bias)
    if not any(one.requires_grad for one in (x, *_tensors(norm, rope))):
        return _forward(x, norm, rope)
    check_heads(x, norm, rope)
    self_check.check_heads(x.shape[3], x.device)
    kernel = head_kernel(x, norm, rope, grad=True)
    if kernel.name == "reference":
        return kernel.forward(x, norm, rope)
    output: torch.Tensor = _NormRope.apply(x, *vectors, norm, rope)
    return output


def set_enabled(enabled: bool) -> None:
    """Set whether models' heads are served at all: to measure what that gains."""
    global _enabled
    _enabled = enabled


_enabled = True


def is_served(x: torch.Tensor) -> bool:
    """Return whether a kernel takes heads like x, and nothing wants to see PyTorch's operators instead."""
    if not _enabled or not x.is_cuda or x.dtype not in DTYPES or torch.version.hip is not None:
        return False
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled() or modes_are_active():
        return False
    return is_plain(x)


def _forward(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
    slot = _slot(x, norm, rope)
    if slot.kernel.name == "reference":
        return slot.kernel.forward(x, norm, rope)

    def run(tensors: Tensors) -> Tensors:
        return [slot.kernel.forward(tensors[0], *_with_tensors(norm, rope, tensors[1:]))]

    return slot.run(run, [x, *_tensors(norm, rope)])[0]


def _slot(x: torch.Tensor, norm: Norm | None, rope: Rope | None, gradient: torch.Tensor | None = None) -> _Slot:
    """Return what is known of a forward pass, or of a backward pass with this gradient of its output."""
    key = (
        form_of(x),
        None if norm is None else norm.facts,
        None if rope is None else rope.facts,
        form_of(gradient),
        settings(),
    )
    slot = _slots.get(key)
    if slot is None:
        check_heads(x, norm, rope)
        if len(_slots) == CALLS:
            _slots.clear()
        self_check.check_heads(x.shape[3], x.device)
        slot = _slots[key] = _Slot(head_kernel(x, norm, rope, grad=gradient is not None))
    return slot


def _tensors(norm: Norm | None, rope: Rope | None) -> Tensors:
    """Return all tensors of norm and rotation in a fixed order."""
    given = []
    if norm is not None and norm.weight is not None:
        given.append(norm.weight)
    if norm is not None and norm.bias is not None:
        given.append(norm.bias)
    if rope is not None:
        given.append(rope.cosine)
    if rope is not None and rope.sine is not None:
        given.append(rope.sine)
    return given


def _with_tensors(norm: Norm | None, rope: Rope | None, tensors: Tensors) -> tuple[Norm | None, Rope | None]:
    """Return norm and rotation with others in place of the tensors that `_tensors` returns."""
    others = iter(tensors)
    if norm is not None:
        weight, bias = (None if one is None else next(others) for one in (norm.weight, norm.bias))
        norm = replace(norm, weight=weight, bias=bias)
    if rope is not None:
        rope = replace(rope, cosine=next(others), sine=None if rope.sine is None else next(others))
    return norm, rope


def _rehearse(rehearsal: Rehearsal, run: Run, tensors: Tensors) -> Tape:
    stand_ins: Tensors = [rehearsal.stand_in(one, tensors[0].device) for one in tensors]
    return Tape(rehearsal, stand_ins, run(stand_ins), tensors[0].device)


class _NormRope(torch.autograd.Function):
    """`norm_rope` with gradients; what is kept for them is x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: Norm | None,
        rope: Rope | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *_tensors(norm, rope))
        ctx.norm, ctx.rope = norm, rope
        return _forward(x, norm, rope)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        norm, rope = _with_tensors(ctx.norm, ctx.rope, others)
        gradient = gradient.resolve_neg()
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()
        slot = _slot(x, norm, rope, gradient)

        def run(tensors: Tensors) -> Tensors:
            gradient, x, *others = tensors
            found = slot.kernel.backward(gradient, x, *_with_tensors(norm, rope, others))
            return [one for one in found if one is not None]

        x_gradient, *found = slot.run(run, [gradient, x, *others])
        weight_gradient = found.pop(0) if norm is not None and norm.weight is not None else None
        bias_gradient = found.pop(0) if norm is not None and norm.bias is not None else None
        return x_gradient, weight_gradient, bias_gradient, None, None
