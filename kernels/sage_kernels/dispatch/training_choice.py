"""Choice between a recipe and exact attention for training: by the call alone, never by what ran before.

The choice is a reason in the plan, so it is logged and shown by `explain`.
"""

from __future__ import annotations

from ..runtime import torch_private
from . import cost_model, registry
from .registry import Plan


def why_exact(plan: Plan) -> str:
    """Return why exact attention trains faster than a plan with gradients; "" if it does not.

    In a checkpoint, the forward pass counts twice.
    """
    if not registry.routing() or plan.numerics != "native" or not plan.request.grad:
        return ""
    kernels = plan.recipe, plan.kernel, plan.quantizer, plan.backward
    return cost_model.why_slower_training(plan.request, *kernels, checkpointed=torch_private.is_checkpointed())
