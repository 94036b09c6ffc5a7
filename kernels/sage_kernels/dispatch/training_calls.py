"""Calls with low-bit gradients outside of operators, replayed or not: autograd sees both by the same function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from ..replay import cache
from ..replay.cache import Replay
from ..spec.arguments import OperatorArguments
from ..spec.call import BackwardCall, Call, Mask, softmax_scale
from ..spec.layout import with_tokens_first
from ..spec.masks import as_key_mask
from ..spec.operands import Saved
from ..spec.options import Options
from ..spec.recipe import get_recipe
from ..spec.saved import empty_saved
from . import execution
from .kernels import TrainingForwardKernel
from .plan import Plan
from .registry import get_backward, get_forward, get_quantizer
from .replays import calls_like


@dataclass(frozen=True, eq=False)
class _Training:
    """Both passes of calls with gradients that differ only in addresses and values.

    Attributes:
        forward: (query, key, value, mask) -> the output and the parts of `Saved`.
        head_dim: head_dim of Q and K.
        kernel: name of the backward kernel.
        options: the caller's options.
        is_replayed: whether the forward pass is replayed, so that a replay of the backward pass is worthwhile too.
    """

    forward: Callable[..., Sequence[torch.Tensor]]
    head_dim: int
    kernel: str
    options: Options
    is_replayed: bool

    def backward(self, *tensors: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """Return dQ, dK and dV.

        Args:
            tensors: the output's gradient, V, the output, the parts of `Saved`, and which keys exist.
        """
        facts = self.head_dim, self.kernel, *self.options
        entry = cache.find("backward", tensors, facts) if self.is_replayed and not torch.is_grad_enabled() else None
        if entry is not None and entry.replay is not None:
            return cast(Sequence[torch.Tensor], entry.replay(*tensors))
        *inputs, key_mask = tensors
        gradients: Sequence[torch.Tensor] = torch.ops.sage_kernels.training_attention_backward(
            *inputs,
            self.head_dim,
            self.kernel,
            key_mask,
            *OperatorArguments.of(None, None, self.options).for_training(),
        )
        if entry is not None:
            # A kernel may sum dQ in any order.
            replayed = partial(cache.replay_of_launches, None, self.gradients, tensors, gradients, rounds=True)
            entry.prepare_when_repeated(replayed, at_once=True)
        return gradients

    def gradients(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Launch the kernels of the backward pass; arguments and results as in `backward`."""
        gradient, value, output, *saved, key_mask = tensors
        call = BackwardCall(
            gradient,
            value,
            output,
            Saved(*saved),
            self.head_dim,
            get_recipe(self.options.recipe),
            Mask.of_keys(key_mask),
            is_causal=bool(self.options.is_causal),
            causal_offset=self.options.causal_offset,
            scale=softmax_scale(self.options.scale, self.head_dim),
        )
        return [with_tokens_first(x) for x in get_backward(self.kernel).backward(call)]


def attend_with_gradients(call: Call, plan: Plan, options: Options) -> torch.Tensor:
    """Run a call with gradients by its plan, and return the output; `replay_of_training` says for which calls."""
    make_call = calls_like(call, plan)

    def forward(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return _with_own_memory(*execution.run_and_save(make_call(*tensors), plan))

    training = _Training(forward, call.query.shape[3], plan.backward, options, is_replayed=False)
    output: torch.Tensor = _LowBitGradients.apply(call.query, call.key, call.value, call.mask.tensor, training)
    return output


def _with_own_memory(output: torch.Tensor, saved: Saved) -> list[torch.Tensor]:
    """Return the output and the parts of `saved`, none sharing memory."""
    return [with_tokens_first(output), *(part.contiguous() for part in saved)]


def replay_of_training(call: Call, plan: Plan, options: Options) -> Replay | None:
    """Make the replay of a call with gradients: (query, key, value, mask) -> (output, None), the output with gradients.

    The backward pass is replayed too, from its second run on.

    Args:
        call: the call, without a block list or packed sequences; its mask, if any, is a key-padding mask.
        plan: the kernels of both passes.
        options: the caller's options.

    Returns:
        The replay; None off the GPU, and for results too large to compare.
    """
    if not call.query.is_cuda or call.is_empty:
        return None
    sizes = call.without_memory()
    output, lse = sizes.new_outputs(saves_lse=True)
    assert lse is not None
    if not cache.is_small([output, *empty_saved(sizes, lse)]):
        return None
    make_call = calls_like(call, plan)
    kernel, quantizer = cast(TrainingForwardKernel, get_forward(plan.kernel)), get_quantizer(plan.quantizer)

    def launched(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return _with_own_memory(*kernel.attend_and_save(make_call(*tensors), quantizer))

    with torch.no_grad():
        output, saved = execution.run_and_save(call, plan)
    tensors = call.query, call.key, call.value, call.mask.tensor
    forward = cache.replay_of_launches(plan, launched, tensors, [output, *saved])
    if forward is None:
        return None
    training = _Training(forward, call.query.shape[3], plan.backward, options, is_replayed=True)
    return Replay(plan, lambda *tensors: (_LowBitGradients.apply(*tensors, training), None))


class _LowBitGradients(torch.autograd.Function):
    """A call as autograd sees it; it saves the same tensors as `training` does for the operator, in the same order."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        training: _Training,
    ) -> torch.Tensor:
        key_mask = None if mask is None else as_key_mask(mask, key.shape[2])
        output, *saved = training.forward(query, key, value, mask)
        ctx.save_for_backward(value, output, *saved, key_mask)
        ctx.set_materialize_grads(False)
        ctx.training = training
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        gradients = ctx.training.backward(gradient, *ctx.saved_tensors)
        wanted = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(gradient if needed else None for gradient, needed in wanted), None, None
