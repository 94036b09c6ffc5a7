"""Decide whether exact attention runs: because of dropout or derivatives, or because no kernel serves the call faster.

Each function decides by the call alone, never by earlier calls. The plan keeps the reason, which is logged and shown
by `explain`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch

from ..runtime import dynamo, torch_private
from ..runtime.hardware import capability_of
from ..spec.call import Call, Mask, MaskKind
from ..spec.derivatives import has_tangent
from ..spec.layout import Lengths
from ..spec.options import Fallback, Options
from . import cost_model, execution
from .plan import KernelUnavailableError, Plan
from .request import Request
from .select import routing, select, why_no_gradients

ONE_BY_ONE = "no native kernel takes packed sequences: each is a call of its own"


@dataclass(frozen=True)
class Decision:
    """Decision between exact attention and a recipe. There are three outcomes.

    - The call bypasses kernels: exact attention runs. Of packed sequences, each then is a call of its own, which may
      run by kernels.
    - The kernels of `plan` run both passes of a call with gradients.
    - Neither: an operator selects a plan later, whose kernels may be exact. No gradient is wanted, or a graph is
      compiled.

    Attributes:
        bypasses_kernels: whether exact attention runs without a selection of kernels by an operator.
        reason: why it takes the recipe's place; "" if it does not, or if the caller asked for it.
        plan: the kernels of a call with gradients; None for the other outcomes.
    """

    bypasses_kernels: bool = False
    reason: str = ""
    plan: Plan | None = None


def decide(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    options: Options,
    wants_gradient: bool,
    lengths: Lengths | None = None,
) -> Decision:
    """Decide whether exact attention runs in place of the recipe; with gradients, select the kernels of both passes.

    Inside torch.compile only properties that do not change between calls of a graph decide: device, dtype, head
    dimensions, the kind of mask, and whether sequences are packed. If a call's sizes exceed a kernel's limits,
    `training.attention` then raises KernelUnavailableError.

    Args:
        query, key, value: the call's tensors.
        mask: the call's mask, read only with gradients; exact attention then runs for the kinds "bool" and "additive".
        options: the call's options.
        wants_gradient: whether a derivative is wanted of one of the tensors.
        lengths: the lengths of packed sequences; None: an ordinary batch.

    Raises:
        KernelUnavailableError: fallback is "error", and exact attention would run, or no native kernel serves a call
            with gradients.
    """
    if options.recipe == "exact":
        return Decision(bypasses_kernels=True)
    reason = _why_exact(query, key, value, mask, options, wants_gradient)
    if reason and options.fallback == "error":
        advice = "set it to 0" if options.dropout_p else "run under torch.no_grad() if no gradient is needed"
        raise KernelUnavailableError(f'{reason}: {advice}, or use fallback="native" for exact attention with gradients')
    plan = None
    if wants_gradient and not reason:
        reason, plan = _decide_training(query, key, value, mask, options, lengths)
    return Decision(bypasses_kernels=reason != "", reason=reason, plan=plan)


def _why_exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask, options: Options, wants_gradient: bool
) -> str:
    """Return why exact attention runs in place of the recipe, whichever kernels exist; "" if kernels decide."""
    recipe = options.recipe
    if options.dropout_p:
        return f"{recipe} computes no attention dropout"
    if not wants_gradient:
        return ""
    if reason := why_no_gradients(recipe):
        return reason
    if has_tangent(query, key, value, mask.tensor):
        return f"{recipe} has no forward-mode derivative"
    if not torch.compiler.is_compiling() and torch_private.transforms_are_active():
        return f"{recipe} cannot be differentiated inside a transform of torch.func"
    if mask.kind in ("bool", "additive"):
        return f"{recipe} has gradients only without a mask, or with a bool mask, the same for all queries and heads"
    return ""


def runs_one_by_one(request: Request, fallback: Fallback) -> bool:
    """Return whether packed sequences are served better as calls of their own.

    They are if no native kernel takes them packed, and the longest sequence alone has another plan: a native kernel, or
    exact attention for another reason, such as the costs.

    Args:
        request: the facts of the packed call.
        fallback: see `select.select`.
    """
    packed = _select_or_none(request, fallback)
    if packed is not None and packed.numerics == "native":
        return False
    alone = _select_or_none(replace(request, batch=1, packed=False), fallback)
    if packed is None or alone is None:
        return alone is not None
    return (packed.numerics, packed.reason) != (alone.numerics, alone.reason)


def _select_or_none(request: Request, fallback: Fallback) -> Plan | None:
    """Return the plan of `select_checked`; None if no kernel serves the request and the fallback is "error"."""
    try:
        return execution.select_checked(request, fallback)
    except KernelUnavailableError:
        return None


def _decide_training(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask, options: Options, lengths: Lengths | None
) -> tuple[str, Plan | None]:
    """Return why exact attention computes gradients, because no kernel serves the call or it is faster; or the plan."""
    recipe, fallback = options.recipe, options.fallback
    if torch.compiler.is_compiling():  # constants, even if sizes are dynamic
        head_dims = operator.index(query.shape[3]), operator.index(value.shape[3])
        facts = str(query.device), str(query.dtype), mask.kind, lengths is not None, *head_dims
        return _why_exact_at_any_size(recipe, fallback, *facts), None
    request = execution.request_of(Call.of(query, key, value, mask, options, lengths), grad=True)
    if request.packed and runs_one_by_one(request, fallback):
        return ONE_BY_ONE, None
    plan = execution.select_checked(request, fallback)
    reason = plan.reason if plan.numerics == "exact" else ""
    if fallback == "native" and mask.blocks is None:  # exact attention over a list is no rival
        reason = reason or why_training_slower(plan)
    return reason, None if reason else plan


def why_training_slower(plan: Plan) -> str:
    """Return why exact attention trains faster than a plan with gradients; "" if it does not.

    In a checkpoint, the forward pass counts twice.
    """
    if not routing() or plan.numerics != "native" or not plan.request.grad:
        return ""
    kernels = plan.recipe, plan.kernel, plan.quantizer, plan.backward
    return cost_model.why_slower_training(plan.request, *kernels, checkpointed=torch_private.is_checkpointed())


@dynamo.assume_constant_result
def _why_exact_at_any_size(
    recipe: str,
    fallback: Fallback,
    device: str,
    dtype: str,
    mask: MaskKind,
    packed: bool,
    head_dim: int,
    v_head_dim: int,
) -> str:
    """Return why no kernel serves a small call. Arguments are names, as the compiler's constants are plain data."""
    options = {"dtype": getattr(torch, dtype.removeprefix("torch.")), "device": "meta"}
    query, value = torch.empty(1, 1, 1, head_dim, **options), torch.empty(1, 1, 1, v_head_dim, **options)
    request = Request.of(query, query, value, recipe=recipe, grad=True)
    where = torch.device(device)
    capability = capability_of(where)
    request = replace(request, device_type=where.type, capability=capability, mask=mask, packed=packed)
    if packed and runs_one_by_one(request, fallback):
        return ONE_BY_ONE
    if fallback == "error":  # the operator raises and gives the reason
        return ""
    plan = select(request, fallback)
    return plan.reason if plan.numerics == "exact" else ""
