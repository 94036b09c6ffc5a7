"""The one road from a call to its kernels: check, plan, announce, run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from . import exact
from .call import BackwardCall, Call
from .layout import is_aligned, sequence_slices
from .operands import Saved
from .recipe import get_recipe
from .registry import (
    Fallback,
    KernelUnavailableError,
    Plan,
    Request,
    TrainingForward,
    get_backward,
    get_forward,
    get_quantizer,
    select,
)

plan_listeners: list[Callable[[Plan], None]] = []
"""Called with the plan of every forward call, at run time also when the call is inside a compiled graph."""


def check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Refuse what kernels would read out of bounds: they take sizes from one tensor for all."""
    sizes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not (query.dim() == key.dim() == value.dim() == 4):
        raise ValueError(f"query, key and value need 4 dimensions (3 when packed); got {sizes}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"batch, kv_heads, kv_len and head_dim must agree; got {sizes}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] or 0 in (query.shape[3], value.shape[3]):
        raise ValueError(f"q_heads must be a multiple of kv_heads, and no head_dim 0; got {sizes}")
    for name, other in (("key", key), ("value", value), ("mask", mask)):
        if other is not None and other.device != query.device:
            raise ValueError(f"{name} is on {other.device}, query on {query.device}")
        if other is not None and name != "mask" and other.dtype != query.dtype:
            raise ValueError(f"{name} is {other.dtype}, query {query.dtype}")
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"mask must be bool or floating; got {mask.dtype}")
        shape = (*query.shape[:3], key.shape[2])
        if mask.dim() != 4 or any(size not in (1, full) for size, full in zip(mask.shape, shape, strict=True)):
            raise ValueError(f"mask {tuple(mask.shape)} must be 4-D and broadcastable to {tuple(shape)}")


def check_lengths(
    query: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> None:
    """Refuse packed sequences whose lengths a kernel would read out of bounds.

    What the lengths are is the GPU's to know, and not checked.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None and seqused_k is None:
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("packed sequences need both cu_seqlens_q and cu_seqlens_k")
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.shape[0] == 0:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must both be (sequences + 1,); "
            f"got {tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
        )
    sequences = cu_seqlens_q.shape[0] - 1
    if seqused_k is not None and seqused_k.shape != (sequences,):
        raise ValueError(f"seqused_k must be ({sequences},), one for each sequence; got {tuple(seqused_k.shape)}")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k)):
        if x is not None and (x.dtype not in (torch.int32, torch.int64) or x.device != query.device):
            raise ValueError(f"{name} must hold integers on {query.device}; got {x.dtype} on {x.device}")


def check_valid(valid: torch.Tensor | None, key: torch.Tensor) -> None:
    """Refuse a `valid` that does not say of each key whether it exists."""
    if valid is None:
        return
    if valid.dtype != torch.bool or valid.dim() != 2 or valid.shape[0] not in (1, key.shape[0]):
        raise ValueError(f"valid must be bool (batch or 1, kv_len); got {valid.dtype} {tuple(valid.shape)}")
    if valid.shape[1] != key.shape[2] or valid.device != key.device:
        raise ValueError(
            f"valid is {tuple(valid.shape)} on {valid.device}, key {tuple(key.shape)} on {key.device}: one for each key"
        )


def request_of(call: Call, grad: bool = False) -> Request:
    """Gather the facts of a call by which kernels are chosen."""
    query, key, value = call.query, call.key, call.value
    request = Request.of(query, key, value, call.mask.tensor, call.is_causal, call.recipe.name, call.return_lse, grad)
    on_gpu = query.device.type == "cuda"
    return replace(
        request,
        batch=call.batch,
        q_len=call.q_len,
        kv_len=call.kv_len,
        packed=call.lengths is not None,
        aligned=on_gpu and is_aligned(query) and is_aligned(key) and is_aligned(value),
    )


def attend(call: Call, fallback: Fallback) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a call without gradients by the best kernel for it.

    Returns:
        (output, lse): (batch, q_heads, q_len, v_head_dim) in query's dtype; (batch, q_heads, q_len) float32, or None
        where it is not wanted.
    """
    plan = select(request_of(call), fallback)
    _announce(plan)
    call = replace(call, recipe=get_recipe(plan.recipe))
    # Autocast would round the float32 products of scales and means.
    with torch.autocast(call.query.device.type, enabled=False):
        if plan.kernel == "sdpa":
            return _attend_exactly(call) if call.lengths is None else _one_by_one(_attend_exactly, call)
        kernel, quantizer = get_forward(plan.kernel), get_quantizer(plan.quantizer)
        if call.lengths is None or kernel.packs:
            return kernel.attend(call, quantizer)
        return _one_by_one(lambda one: kernel.attend(one, quantizer), call)


def attend_and_save(call: Call, fallback: Fallback) -> tuple[torch.Tensor, Saved]:
    """Run a call whose gradients are wanted by the best kernel for it; `plan_training` says by which.

    Raises:
        KernelUnavailableError: no kernel with gradients serves the call.
    """
    plan = plan_training(request_of(call, grad=True), fallback)
    _announce(plan)
    # `select` found that it is one, which takes longer to ask of a protocol than to launch a kernel.
    kernel = cast(TrainingForward, get_forward(plan.kernel))
    # Autocast would round the float32 products of scales and means.
    with torch.autocast(call.query.device.type, enabled=False):
        return kernel.attend_and_save(replace(call, recipe=get_recipe(plan.recipe)), get_quantizer(plan.quantizer))


def plan_training(request: Request, fallback: Fallback) -> Plan:
    """Choose the kernels of a forward and backward pass.

    Raises:
        KernelUnavailableError: none serve; exact attention, whose gradient is PyTorch's affair, is none of them.
    """
    plan = select(request, fallback)
    if plan.kernel == "sdpa":
        raise KernelUnavailableError(
            f"no kernel computes gradients of recipe {request.recipe!r} here ({plan.reason}): use exact attention, or "
            'fallback="emulate" for the recipe\'s numerics'
        )
    return plan


def backward(call: BackwardCall, kernel: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute dQ, dK and dV by the backward kernel of that name, which the forward pass's plan holds."""
    with torch.autocast(call.value.device.type, enabled=False):
        return get_backward(kernel).backward(call)


def _announce(plan: Plan) -> None:
    for listener in plan_listeners:
        listener(plan)


def _attend_exactly(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend by PyTorch's scaled_dot_product_attention; rows without a key are 0."""
    query, key, mask, is_causal = call.query, call.key, call.mask.tensor, call.is_causal
    if is_causal and (call.causal_offset != 0 or mask is not None):
        # PyTorch's kernels know one alignment, and no mask beside it.
        mask, is_causal = exact.with_causality(mask, query, key, call.causal_offset), False
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        mask = mask.to(query.dtype)
    gqa = query.shape[1] != key.shape[1]
    output = exact.sdpa(query, key, call.value, mask=mask, is_causal=is_causal, scale=call.scale, enable_gqa=gqa)
    if mask is not None:
        output = torch.where(exact.attended_rows(mask), output, 0.0)
    if not call.return_lse:
        return output, None
    return output, exact.log_sum_exp(query, key, mask=mask, is_causal=is_causal, scale=call.scale)


def _one_by_one(
    attend: Callable[[Call], tuple[torch.Tensor, torch.Tensor | None]], call: Call
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a kernel that knows no packed sequences once for each of them; reads the lengths back to the host."""
    assert call.lengths is not None
    output, lse = call.new_outputs()
    for queries, keys in sequence_slices(call.lengths):
        if queries.stop == queries.start or keys.stop == keys.start:
            continue
        one = replace(
            call,
            query=call.query[:, :, queries],
            key=call.key[:, :, keys],
            value=call.value[:, :, keys],
            lengths=None,
        )
        output[:, :, queries], part = attend(one)
        if lse is not None and part is not None:
            lse[:, :, queries] = part
    return output, lse
