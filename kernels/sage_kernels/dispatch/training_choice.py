"""Choice between a recipe and exact attention for training: by the call alone, never by what ran before.

The choice is a reason in the plan, so it is logged and shown by `explain`.
"""

from __future__ import annotations

import torch

from . import cost_model, registry
from .registry import Plan


def why_exact(plan: Plan) -> str:
    """Return why exact attention trains faster than a plan with gradients; "" if it does not.

    In a checkpoint, the forward pass counts twice.
    """
    if not registry.routing() or plan.numerics != "native" or not plan.request.grad:
        return ""
    kernels = plan.recipe, plan.kernel, plan.quantizer, plan.backward
    return cost_model.why_slower_training(plan.request, *kernels, checkpointed=is_checkpointed())


def is_checkpointed() -> bool:
    """Return whether calls made now belong to `torch.utils.checkpoint`, which runs their forward pass again."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    saving = None if hooks is None else hooks(True)
    if saving is not None:
        return bool(saving[0].__module__ == "torch.utils.checkpoint")
    return torch._C._current_graph_task_id() != -1  # run again inside the backward pass: a reentrant checkpoint
