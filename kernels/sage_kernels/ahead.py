"""Compilation of a backward pass's kernels while the forward pass compiles its own.

The first step of a training needs both, and each takes seconds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace

import torch

from .call import BackwardCall, Call, Mask
from .registry import CompilingBackward, Plan, get_backward
from .saving import empty_saved

logger = logging.getLogger(__name__)

_begun: set[tuple[object, ...]] = set()
_threads: list[threading.Thread] = []


def compile_backward(call: Call, plan: Plan) -> None:
    """Begin, in another thread, to compile what the backward pass of a call launches; calls of one kind do so once.

    Args:
        call: a call with gradients on a GPU. Those of packed sequences and of block lists are left alone.
        plan: what runs, natively.
    """
    if call.is_empty or call.lengths is not None or call.mask.blocks is not None:
        return
    sizes, kernel = (call.query.shape[3], call.value.shape[3]), get_backward(plan.backward)
    kind = plan.backward, plan.recipe, call.query.device, call.query.dtype, *sizes, call.mask.kind, call.is_causal
    if kind not in _begun and isinstance(kernel, CompilingBackward):
        _begun.add(kind)
        thread = threading.Thread(target=_compile, args=(kernel, _backward_of(call), call.query.device))
        thread.start()
        _threads.append(thread)


def wait() -> None:
    """Wait until all that was begun is compiled."""
    while _threads:
        thread = _threads[-1]
        thread.join()
        with contextlib.suppress(ValueError):  # another thread waited too
            _threads.remove(thread)


def _backward_of(call: Call) -> BackwardCall:
    """Return the backward pass of a call, with tensors like those to come on the meta device, without memory."""
    query, key, value = (_without_memory(x) for x in (call.query, call.key, call.value))
    mask = Mask.of_keys(None if call.mask.valid is None else _without_memory(call.mask.valid))
    call = replace(call, query=query, key=key, value=value, mask=mask)
    output, lse = call.new_outputs(saves_lse=True)
    assert lse is not None
    return BackwardCall(
        *(output, value, output, empty_saved(call, lse), query.shape[3], call.recipe),
        *(mask, call.is_causal, call.causal_offset, call.scale),
    )


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _compile(kernel: CompilingBackward, call: BackwardCall, device: torch.device) -> None:
    try:
        kernel.compile(call, device)
    except Exception as error:  # the backward pass compiles what it needs itself, and says what is wrong
        logger.info("kernels of a backward pass are not compiled ahead: %s: %s", type(error).__name__, error)
