"""Choices between a recipe and exact attention for training, made once for each kind of call and kept.

Numerics that changed from one batch to the next would change a run silently. So the first call of a kind decides for
all later ones, whatever their lengths: in a run, batches of one model. The choice is a reason in the plan, so it is
logged and shown by `explain`. Where that call is checkpointed, its forward pass counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from threading import Lock
from types import MappingProxyType

import torch

from . import costs, registry
from .registry import Plan, Request

KEPT = "which the first such call decided for all"

_SIZES = ("batch", "q_len", "kv_len")
_FACTS = tuple(field.name for field in fields(Request) if field.name not in _SIZES)
_decided: dict[tuple[object, ...], str] = {}
_lock = Lock()


def why_exact(plan: Plan) -> str:
    """Return why calls of the plan's kind train with exact attention; "" if they run the plan.

    Args:
        plan: of a call with gradients. Calls are of one kind that differ only in batch and lengths, if they are both
            self-attention or both cross-attention.
    """
    request = plan.request
    if not registry.routing() or plan.numerics != "native" or not request.grad:
        return ""
    kind = (*(getattr(request, name) for name in _FACTS), request.q_len == request.kv_len)
    with _lock:
        if kind not in _decided:
            kernels = plan.recipe, plan.kernel, plan.quantizer, plan.backward
            reason = costs.why_slower_training(request, *kernels, checkpointed=is_checkpointed())
            _decided[kind] = f"{reason}, {KEPT}" if reason else ""
        return _decided[kind]


def is_checkpointed() -> bool:
    """Return whether calls made now belong to `torch.utils.checkpoint`, which runs their forward pass again."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    saving = None if hooks is None else hooks(True)
    if saving is not None:
        return bool(saving[0].__module__ == "torch.utils.checkpoint")
    return torch._C._current_graph_task_id() != -1  # run again inside the backward pass: a reentrant checkpoint


def decisions() -> Mapping[tuple[object, ...], str]:
    """Return the reason by kind of call, "" where the recipe runs."""
    return MappingProxyType(_decided)


def forget() -> None:
    """Let the next call of each kind decide anew: for another run in this process."""
    registry.select.cache_clear()  # prepared calls hold the choice too


registry.forgetters.append(_decided.clear)
