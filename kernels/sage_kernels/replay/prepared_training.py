"""Prepared calls with gradients: both passes repeat their launches (`prepared`).

The first call of a kind is prepared already: checkpointing compares what a forward pass saves to what its repetition
saves, and a prepared one saves the parts of `operands.Saved` in one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from ..dispatch import run
from ..dispatch.registry import (
    Attend,
    Fallback,
    Plan,
    TrainingForward,
    get_backward,
    get_forward,
    get_quantizer,
    transposed,
)
from ..spec.call import BackwardCall, Call, Mask, softmax_scale
from ..spec.masks import key_mask
from ..spec.operands import Saved
from ..spec.recipe import get_recipe
from .launch_plan import Bundle, Tape
from .prepared import is_capturing, is_plain, layout_of, modes_are_active, repeatable, stand_in_of
from .prepared_calls import output_alone
from .trace import Rehearsal

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
    """

    plan: Plan
    call: Call
    tape: Tape
    saved: Bundle
    scale: float | None
    fallback: Fallback
    backwards: dict[object, Tape | None] = field(default_factory=dict)

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
        if torch.is_grad_enabled() or modes_are_active() or not is_plain(*given):
            return self._backward_by_operator(tensors, valid)
        layout = tuple(layout_of(*given))
        if (tape := self.backwards.get(layout)) is not None:
            return tuple(tape.run(*[x.data_ptr() for x in given]))
        gradients = self._backward_by_operator(tensors, valid)
        if layout not in self.backwards and len(self.backwards) < BACKWARDS and not is_capturing():
            self.backwards[layout] = self._prepare_backward(given, gradients)
        return gradients

    def _backward_by_operator(
        self, tensors: list[torch.Tensor], valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
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

    def _prepare_backward(self, given: list[torch.Tensor], gradients: tuple[torch.Tensor, ...]) -> Tape | None:
        """Return the launches for tensors of a layout, as in `backward`, with the mask behind them if there is one."""
        call = self.call

        def rehearse(rehearsal: Rehearsal) -> Tape:
            gradient, value, output = inputs = [rehearsal.stand_in(x) for x in given[:3]]
            saved = Bundle.of([rehearsal.stand_in(x) for x in self.saved.tensors])
            padding = [rehearsal.stand_in(x) for x in given[4:]]
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
            found = get_backward(self.plan.backward).backward(backward)
            outputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in found]
            return Tape(rehearsal, [*inputs, saved, *padding], outputs, given[0].device)

        return repeatable(rehearse, given, gradients)


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
            valid = key_mask(mask[(None,) * (4 - mask.dim())], key.shape[2])
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
    plan = run.plan_training(run.request_of(call, grad=True), fallback)
    with torch.no_grad():
        result = run.run_and_save(call, plan)
    return prepare_launches(call, plan, scale, fallback, result)


def prepare_launches(
    call: Call, plan: Plan, scale: float | None, fallback: Fallback, result: tuple[torch.Tensor, Saved]
) -> TrainingCall | None:
    """Prepare a call that kernels of ours serve; None if their launches cannot be repeated.

    Args:
        call, plan: the call, and the kernels of both passes.
        scale, fallback: as the caller gave them.
        result: what `dispatch.run_and_save` returned for it.
    """
    kernel, quantizer = cast(TrainingForward, get_forward(plan.kernel)), get_quantizer(plan.quantizer)
    mask, (output, saved) = call.mask.tensor, result
    made: list[TrainingCall] = []

    def rehearse(rehearsal: Rehearsal) -> Tape:
        inputs, stand_in = stand_in_of(rehearsal, call, get_recipe(plan.recipe))
        output, saved = kernel.attend_and_save(stand_in, quantizer)
        kept = Bundle.of([part.contiguous() for part in saved])
        tape = Tape(rehearsal, inputs, [output.transpose(1, 2).contiguous().transpose(1, 2), kept], call.query.device)
        made.append(TrainingCall(plan, replace(stand_in, mask=Mask()), tape, kept, scale, fallback))
        return tape

    def results(found: list[torch.Tensor]) -> list[torch.Tensor]:
        return [found[0], *made[0].saved.views(found[1])]

    tensors = [call.query, call.key, call.value, *([] if mask is None else [mask])]
    return None if repeatable(rehearse, tensors, [output, *saved], results) is None else made[0]
