"""Prepared calls with gradients: both passes repeat their launches (`prepared`).

The first call of a kind is prepared already: checkpointing compares what a forward pass saves to what its repetition
saves, and a prepared one saves the parts of `operands.Saved` in one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from . import ahead, dispatch, exact
from .call import BackwardCall, Call, Mask, softmax_scale
from .operands import Saved
from .prepared import ALIGNMENT, attempt, guards_of, is_plain, modes_are_active, stand_in_of
from .prepared_calls import output_alone
from .recipe import get_recipe
from .registry import (
    Attend,
    Fallback,
    Plan,
    TrainingForward,
    get_backward,
    get_forward,
    get_quantizer,
    transposed,
)
from .rehearsal import Rehearsal
from .tape import Bundle, Tape

BACKWARDS = 8
"""Layouts of the output's gradient, for each call, whose backward pass is prepared."""


@dataclass(slots=True, eq=False)
class TrainingCall:
    """Call of low-bit attention with gradients, without the LSE.

    Attributes:
        plan: as in `prepared_calls.Prepared`.
        call: its options; the tensors are stand-ins.
        tape: launches of the forward pass; the arguments are Q, K, V and the mask, if there is one; returned are the
            output and the memory of `saved`.
        saved: the parts of `operands.Saved`.
        scale, fallback: as the caller gave them.
        backwards: launches of the backward pass by the layout of its tensors; None where they cannot be repeated.
        latest: the latest of them, behind what compares tensors to its own at once.
    """

    plan: Plan
    call: Call
    tape: Tape
    saved: Bundle
    scale: float | None
    fallback: Fallback
    backwards: dict[object, Tape | None] = field(default_factory=dict)
    latest: tuple[Any, Tape] | None = None

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """Attend; the output has gradients."""
        return _apply(query, key, value, mask, self), None

    def shortcut(self, tokens_first: bool) -> Attend:
        """Return what attends; see `prepared_calls.Prepared`."""
        attend = output_alone(self)
        return transposed(attend) if tokens_first else attend

    def backward(self, tensors: list[torch.Tensor], valid: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return dQ, dK and dV.

        Args:
            tensors: the output's gradient, V, the output, and the memory of what the forward pass saved.
            valid: which keys exist, bool (batch or 1, kv_len); None: all.
        """
        given = tensors if valid is None else [*tensors, valid]
        if not (torch.is_grad_enabled() or modes_are_active()):
            addresses, together = [x.data_ptr() for x in given], 0
            for address in addresses:
                together |= address
            if self.latest is not None and self.latest[0].check(*given) and together % ALIGNMENT == 0:
                return tuple(self.latest[1].run(*addresses))
            if is_plain(*given) and (tape := self._backward_tape(tensors, valid, given)) is not None:
                return tuple(tape.run(*addresses))
        call, blocks, packing = self.call, (None, None, 0, 0), (None, None, 0, 0, None)
        *given, memory = tensors
        return torch.ops.sage_kernels.training_attention_backward(
            *(
                *given,
                *self.saved.views(memory),
                valid,
                *blocks,
                *packing,
                call.query.shape[3],
                self.plan.backward,
                call.is_causal,
            ),
            *(call.causal_offset, self.scale, call.recipe.name, self.fallback),
        )

    def _backward_tape(
        self, tensors: list[torch.Tensor], valid: torch.Tensor | None, given: list[torch.Tensor]
    ) -> Tape | None:
        """Return the launches for tensors of a layout, and let those that follow be compared to them first."""
        layout = tuple([(x.stride(), x.dtype, x.device) for x in given])
        if layout not in self.backwards and len(self.backwards) < BACKWARDS:
            self.backwards[layout] = self._prepare_backward(tensors, valid)
        tape = self.backwards.get(layout)
        alike = None if tape is None else guards_of(given)
        self.latest = None if tape is None or alike is None else (alike, tape)
        return tape

    def _prepare_backward(self, tensors: list[torch.Tensor], valid: torch.Tensor | None) -> Tape | None:
        call = self.call

        def rehearse(rehearsal: Rehearsal) -> Tape:
            gradient, value, output = inputs = [rehearsal.stand_in(x) for x in tensors[:-1]]
            saved = Bundle.of([rehearsal.stand_in(x) for x in self.saved.tensors])
            padding = [] if valid is None else [rehearsal.stand_in(valid)]
            backward = BackwardCall(
                gradient,
                value,
                output,
                Saved(*saved.tensors),
                call.query.shape[3],
                call.recipe,
                Mask.of_keys(padding[0] if padding else None),
                call.is_causal,
                call.causal_offset,
                call.scale,
            )
            ahead.finish()
            gradients = get_backward(self.plan.backward).backward(backward)
            outputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients]
            return Tape(rehearsal, [*inputs, saved, *padding], outputs, tensors[0].device)

        return attempt(rehearse, tensors[0].device)


class _Attention(torch.autograd.Function):
    """The prepared call as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        call: TrainingCall,
    ) -> torch.Tensor:
        valid = None
        addresses = [query.data_ptr(), key.data_ptr(), value.data_ptr()]
        if mask is not None:
            addresses.append(mask.data_ptr())
            valid = exact.key_mask(mask[(None,) * (4 - mask.dim())], key.shape[2])
        output, saved = call.tape.run(*addresses)
        ctx.save_for_backward(value, output, saved, valid)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        *saved, valid = ctx.saved_tensors
        gradients = ctx.call.backward([gradient, *saved], valid)
        if ctx.needs_input_grad[:3] != (True, True, True):
            wanted = zip(gradients, ctx.needs_input_grad, strict=False)
            gradients = tuple(gradient if needed else None for gradient, needed in wanted)
        return *gradients, None, None


# `_Attention.apply` without its look for transforms of torch.func, inside which no call is prepared.
_apply = super(torch.autograd.Function, _Attention).apply


def prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
) -> TrainingCall | None:
    """Prepare a call with gradients, or return None if more than launches depends on it.

    Args:
        query, key, value, is_causal, scale, recipe, fallback: as in `training.attention`.
        mask: bool, 4-D: one of keys; or None.
    """
    if not query.is_cuda:
        return None
    options = Mask.of(mask, key.shape[2]), is_causal, 0, softmax_scale(scale, query.shape[3])
    call = Call(query, key, value, get_recipe(recipe), *options)
    if call.is_empty:
        return None
    return _prepare(call, dispatch.plan_training(dispatch.request_of(call, grad=True), fallback), scale, fallback)


def _prepare(call: Call, plan: Plan, scale: float | None, fallback: Fallback) -> TrainingCall | None:
    ahead.compile_backward(call, plan)
    kernel = cast(TrainingForward, get_forward(plan.kernel))
    quantizer = get_quantizer(plan.quantizer)

    def rehearse(rehearsal: Rehearsal) -> TrainingCall:
        inputs, stand_in = stand_in_of(rehearsal, call, get_recipe(plan.recipe))
        output, saved = kernel.attend_and_save(stand_in, quantizer)
        kept = Bundle.of([part.contiguous() for part in saved])
        tape = Tape(rehearsal, inputs, [output.transpose(1, 2).contiguous().transpose(1, 2), kept], call.query.device)
        return TrainingCall(plan, replace(stand_in, mask=Mask()), tape, kept, scale, fallback)

    return attempt(rehearse, call.query.device)
