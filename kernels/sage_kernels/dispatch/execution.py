"""The way from a call that is not replayed to its kernels: `select_checked` a plan, `announce` it, `compute`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from ..exact import sdpa
from ..exact.attend import attend_exactly
from ..runtime import dynamo, torch_private
from ..spec.block_list import BlockList
from ..spec.call import AttentionOutput, BackwardCall, Call, Mask
from ..spec.checks import check_memory
from ..spec.derivatives import wants_gradient
from ..spec.layout import at_aligned_address, is_aligned, sequence_slices
from ..spec.masks import with_leading_dims
from ..spec.operands import Saved
from ..spec.options import Fallback, Options
from ..spec.recipe import get_recipe
from . import precompile, self_check
from .kernels import TrainingForwardKernel
from .plan import KernelUnavailableError, Plan, exact_plan
from .registry import get_backward, get_exact, get_forward, get_quantizer
from .request import Request
from .select import select

plan_listeners: list[Callable[[Plan], None]] = []
"""Functions called with the plan of every forward call; for calls in a compiled graph, whenever the graph runs."""
fallback_listeners: list[Callable[[str, str], None]] = []
"""Functions called with (recipe, reason) while a graph is traced, if exact attention takes a recipe's place in it."""


def request_of(call: Call, grad: bool = False) -> Request:
    """Gather the facts of a call that decide which kernels are chosen."""
    query, key, value = call.query, call.key, call.value
    request = Request.of(query, key, value, None, call.is_causal, call.recipe.name, call.return_lse, grad)
    on_gpu, lower_right_offset = query.device.type == "cuda", call.kv_len - call.q_len
    return replace(
        request,
        mask=call.mask.kind,
        batch=call.batch,
        q_len=call.q_len,
        kv_len=call.kv_len,
        packed=call.lengths is not None,
        aligned=on_gpu and is_aligned(query) and is_aligned(key) and is_aligned(value),
        lower_right=call.is_causal and call.causal_offset == lower_right_offset != 0,
        shifted=call.is_causal and call.causal_offset not in (0, lower_right_offset),
        list_sizes=call.mask.list_sizes,
    )


def select_checked(request: Request, fallback: Fallback) -> Plan:
    """Return the plan of `select.select`; kernels untested on such a GPU are checked first (`self_check`)."""
    plan = select(request, fallback)
    while self_check.is_due(plan) and not self_check.passes(plan):
        plan = select(request, fallback)
    return plan


def compute(call: Call, plan: Plan) -> AttentionOutput:
    """Run a call without gradients by the kernels of its plan.

    Returns:
        (output, lse): output (batch, q_heads, q_len, v_head_dim) in query's dtype; lse (batch, q_heads, q_len) float32,
        possibly None if it is not wanted.
    """
    if call.recipe.name != plan.recipe:
        call = replace(call, recipe=get_recipe(plan.recipe))
    with _without_autocast(call.query.device):
        if call.is_empty:
            return call.new_outputs()
        if plan.numerics == "exact":
            if (exact_kernel := get_exact(plan.kernel)) is not None:
                if exact_kernel.traceable:
                    precompile.compile_forward(call, plan, exact_kernel.attend)
                return exact_kernel.attend(call), None
            by_pytorch = partial(_attend_by_pytorch, kernel=plan.kernel)
            return by_pytorch(call) if call.lengths is None else attend_one_by_one(by_pytorch, call)
        kernel, quantizer = get_forward(plan.kernel), get_quantizer(plan.quantizer)
        if call.lengths is None or kernel.packs:
            precompile.compile_forward(call, plan, partial(kernel.attend, quantizer=quantizer))
            return kernel.attend(call, quantizer)
        return attend_one_by_one(lambda one: kernel.attend(one, quantizer), call)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast: autocast would round the float32 products of scales and means."""
    return torch.autocast(device.type, enabled=False) if torch_private.autocast_is_active() else nullcontext()


def attend_by_plan(call: Call, plan: Plan) -> torch.Tensor:
    """Return the output of a call's recipe by the kernels of a plan for the same tensors; announce nothing.

    It serves to compare variants of a recipe, which have no name to plan by.

    Args:
        call: a call that is neither empty nor packed; its recipe may be any low-bit one.
        plan: the plan whose kernels run; the reference runs if they do not serve the recipe.
    """
    kernel, quantizer = get_forward(plan.kernel), get_quantizer(plan.quantizer)
    if not all(phase.serves(call.recipe) for phase in (kernel, quantizer) if phase is not None):
        kernel, quantizer = get_forward("reference"), None
    with torch.autocast(call.query.device.type, enabled=False):
        return kernel.attend(call, quantizer)[0]


def attend_and_save(call: Call, fallback: Fallback) -> tuple[torch.Tensor, Saved]:
    """Run the forward pass of a call with gradients by the kernel of its plan (`select_training`).

    Returns:
        The output, (batch, q_heads, q_len, v_head_dim) in query's dtype, and the tensors that the backward pass needs.

    Raises:
        KernelUnavailableError: no kernel with gradients serves the call.
    """
    plan = select_training(request_of(call, grad=True), fallback)
    announce(plan)
    return run_and_save(call, plan)


def run_and_save(call: Call, plan: Plan) -> tuple[torch.Tensor, Saved]:
    """Run the forward pass of a call with gradients by the kernels of its plan; see `attend_and_save`."""
    precompile.compile_backward(call, plan)
    # `select` checked the type already; an isinstance check against a protocol takes longer than a launch.
    attend = partial(
        cast(TrainingForwardKernel, get_forward(plan.kernel)).attend_and_save, quantizer=get_quantizer(plan.quantizer)
    )
    call = replace(call, recipe=get_recipe(plan.recipe))
    # Autocast would round the float32 products of scales and means.
    with torch.autocast(call.query.device.type, enabled=False):
        precompile.compile_forward(call, plan, attend)
        return attend(call)


def select_training(request: Request, fallback: Fallback) -> Plan:
    """Select the kernels of a forward and a backward pass.

    Raises:
        KernelUnavailableError: no kernel with gradients serves the request. Exact attention, whose gradients PyTorch
            computes, does not count.
    """
    plan = select_checked(request, fallback)
    if plan.numerics == "exact":
        raise KernelUnavailableError(
            f"no kernel computes gradients of recipe {request.recipe!r} here ({plan.reason}): use exact attention, or "
            'fallback="emulate" for the recipe\'s numerics'
        )
    return plan


def backward(call: BackwardCall, kernel: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute dQ, dK and dV by the backward kernel that the plan of the forward pass names."""
    check_memory(call.output_gradient, call.value, call.output, *call.saved)
    precompile.finish()
    gradient, value = at_aligned_address(call.output_gradient), at_aligned_address(call.value)
    with torch.autocast(call.value.device.type, enabled=False):
        return get_backward(kernel).backward(replace(call, output_gradient=gradient, value=value))


def announce(plan: Plan) -> None:
    """Tell the listeners which plan runs."""
    for listener in plan_listeners:
        listener(plan)


def announce_exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
    reason: str,
) -> Plan | None:
    """Announce that exact attention runs, because the caller asked for it, or in place of a recipe.

    Args:
        query, key, value, mask, blocks, options: the call's arguments.
        reason: why the recipe does not run: a limit, without this call's sizes, so that it is logged once; "" if the
            caller asked for exact attention.

    Returns:
        The plan, or None inside torch.compile, where only `fallback_listeners` are called.

    Raises:
        KernelUnavailableError: a recipe does not run, and the fallback is "error".
    """
    if reason and options.recipe != "exact" and options.fallback == "error":
        raise KernelUnavailableError(f'{options.recipe}: {reason}: use fallback="native" for exact attention')
    if torch.compiler.is_compiling():
        if reason:
            _announce_while_compiling(options.recipe, reason)
        return None
    mask = None if mask is None else with_leading_dims(mask)
    grad = bool(reason) and wants_gradient(query, key, value, mask)
    request = Request.of(query, key, value, mask, bool(options.is_causal), options.recipe, options.return_lse, grad)
    if blocks is not None:
        request = replace(request, mask=Mask.of_blocks(blocks, mask, key.shape[2]).kind)
    plan = exact_plan(request, *([("", reason)] if reason else []))
    announce(plan)
    return plan


@dynamo.assume_constant_result
def _announce_while_compiling(recipe: str, reason: str) -> None:
    for listener in fallback_listeners:
        listener(recipe, reason)


def _attend_by_pytorch(call: Call, kernel: str) -> AttentionOutput:
    """Attend by PyTorch's attention, through any of its backends ("sdpa"), or any except cuDNN's."""
    query, key, value = call.query, call.key, call.value
    shape, backend = query.shape, None if kernel == "sdpa" else sdpa.without_cudnn
    groups_are_rows = backend is not None and call.q_len == 1 and call.mask.kind == "keys" and not call.is_causal
    if groups_are_rows:  # with a mask, PyTorch would want keys and values repeated for each query of their group
        query = query.reshape(shape[0], key.shape[1], -1, shape[3])
    lower_right = call.is_causal and call.mask.kind == "none" and 0 < call.causal_offset == key.shape[2] - shape[2]
    if lower_right and not call.return_lse and sdpa.has_lower_right(query, key, value, shape[1] != key.shape[1]):
        return sdpa.sdpa(query, key, value, scale=call.scale, enable_gqa=True, lower_right=True), None
    options = Options(
        is_causal=call.is_causal, causal_offset=call.causal_offset, scale=call.scale, return_lse=call.return_lse
    )
    output, lse = attend_exactly(
        query, key, value, call.mask.tensor, blocks=call.mask.blocks, options=options, backend=backend
    )
    if groups_are_rows:
        return output.reshape(*shape[:3], value.shape[3]), None if lse is None else lse.reshape(shape[:3])
    return output, lse


def attend_one_by_one(attend: Callable[[Call], AttentionOutput], call: Call) -> AttentionOutput:
    """Run packed sequences one by one by a function that takes ordinary batches; the host reads the lengths."""
    assert call.lengths is not None
    output, lse = call.new_outputs()
    for index, (queries, keys) in enumerate(sequence_slices(call.lengths)):
        q_len, kv_len = queries.stop - queries.start, keys.stop - keys.start
        if q_len == 0 or kv_len == 0:
            continue
        mask = call.mask
        if mask.blocks is not None:
            mask = replace(mask, blocks=mask.blocks.of_sequence(index, q_len, kv_len, call.kv_len))
        one = replace(
            call,
            query=call.query[:, :, queries],
            key=call.key[:, :, keys],
            value=call.value[:, :, keys],
            mask=mask,
            lengths=None,
        )
        output[:, :, queries], part = attend(one)
        if lse is not None and part is not None:
            lse[:, :, queries] = part
    return output, lse
