"""Two ways to replay attention (`replay.cache`): run a traced call's launches, or skip its checks and selection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from ..exact import sdpa
from ..replay import cache
from ..replay.cache import Replay
from ..runtime import torch_private
from ..spec.block_list import BlockList
from ..spec.call import AttentionOutput, Call, Mask
from ..spec.layout import with_tokens_first
from ..spec.recipe import get_recipe
from . import execution
from .kernels import ExactOperatorKernel
from .plan import Plan
from .registry import get_exact, get_forward, get_quantizer


def replay_of_call(call: Call, plan: Plan, mask: torch.Tensor | None, result: AttentionOutput) -> Replay | None:
    """Make the replay of a call without gradients: (query, key, value, mask, counts, tiles) -> (output, lse).

    Counts and tiles are fields of the block list; calls without a list may leave them out.

    Args:
        call: the call.
        plan: the plan that ran.
        mask: the caller's mask, 4-D; a call whose mask is derived from it is not replayed.
        result: the result of `execution.compute`.

    Returns:
        The replay; None if anything but launches depends on addresses and values, or a replay would gain nothing.
    """
    if call.is_empty or call.lengths is not None or call.mask.tensor is not mask:
        return None
    blocks = call.mask.blocks
    lists = () if blocks is None else (blocks.counts, blocks.tiles)
    tensors, make_call = (call.query, call.key, call.value, mask, *lists), calls_like(call, plan)
    exact_kernel = get_exact(plan.kernel)
    if call.query.is_cuda and (plan.numerics != "exact" or (exact_kernel is not None and exact_kernel.traceable)):
        launched = partial(_outputs, make_call, plan)
        if call.return_lse:
            return cache.replay_of_launches(plan, launched, tensors, result)
        return cache.replay_of_launches(plan, launched, tensors, (result[0], None), _without_lse)
    if plan.numerics != "exact":
        return None
    attend = _exact_function(call, plan)
    if attend is None:
        return cache.replay_of_function(
            plan, lambda *tensors: execution.compute(make_call(*tensors), plan), tensors, result
        )
    return cache.replay_of_function(
        plan, lambda query, key, value, *_: (attend(query, key, value), None), tensors, result
    )


def _exact_function(call: Call, plan: Plan) -> Callable[..., torch.Tensor] | None:
    """Return a function of (query, key, value) that computes a whole call like this; None if there is none."""
    if call.mask.kind != "none" or call.return_lse or torch_private.autocast_is_active():  # `compute` turns it off
        return None
    if (exact_kernel := get_exact(plan.kernel)) is not None:
        return cast(ExactOperatorKernel, exact_kernel).replay_function(call)
    if call.is_causal and call.causal_offset:
        return None
    backend = None if plan.kernel == "sdpa" else sdpa.without_cudnn
    return sdpa.replay_function(
        call.query, call.key, call.value, is_causal=call.is_causal, scale=call.scale, backend=backend
    )


def calls_like(call: Call, plan: Plan) -> Callable[..., Call]:
    """Return a function of (query, key, value, mask, counts, tiles) that returns a `Call` with this call's options.

    It keeps none of the call's tensors. The recipe is the plan's.
    """
    recipe, scale, return_lse = get_recipe(plan.recipe), call.scale, call.return_lse
    is_causal, causal_offset, (block_m, block_n) = call.is_causal, call.causal_offset, call.mask.list_sizes

    def make_call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        tiles: torch.Tensor | None = None,
    ) -> Call:
        kv_len = key.shape[2]
        if counts is None or tiles is None:
            call_mask = Mask.of(mask, kv_len)
        else:
            call_mask = Mask.of_blocks(BlockList(counts, tiles, block_m, block_n), mask, kv_len)
        return Call(query, key, value, recipe, call_mask, is_causal, causal_offset, scale, None, return_lse)

    return make_call


def _outputs(make_call: Callable[..., Call], plan: Plan, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Launch the kernels of a plan; return the output, laid out with tokens before heads, and the LSE if wanted."""
    call = make_call(*tensors)
    if (exact_kernel := get_exact(plan.kernel)) is not None:
        return [with_tokens_first(exact_kernel.attend(call))]
    output, lse = get_forward(plan.kernel).attend(call, get_quantizer(plan.quantizer))
    if not call.return_lse:
        return [with_tokens_first(output)]
    assert lse is not None
    return [with_tokens_first(output), lse]


def _without_lse(outputs: list[torch.Tensor]) -> AttentionOutput:
    return outputs[0], None
