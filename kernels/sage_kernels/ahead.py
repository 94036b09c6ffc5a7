"""Compilation of a backward pass's kernels while the forward pass compiles its own.

The first step of a training needs both, and each takes seconds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .call import BackwardCall, Call, Mask
from .registry import Plan, get_backward
from .saving import empty_saved

if TYPE_CHECKING:
    from .language.launch import Launch

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
    sizes = call.query.shape[3], call.value.shape[3]
    kind = plan.backward, plan.recipe, call.query.device, call.query.dtype, *sizes, call.mask.kind, call.is_causal
    if kind not in _begun:
        _begun.add(kind)
        query, key, value = (_without_memory(x) for x in (call.query, call.key, call.value))
        mask = Mask.of_keys(None if call.mask.valid is None else _without_memory(call.mask.valid))
        stand_in = replace(call, query=query, key=key, value=value, mask=mask)
        _start(_compile_launches, stand_in, plan, call.query.device)


def wait() -> None:
    """Wait until all that was begun is compiled."""
    while _threads:
        thread = _threads[-1]
        thread.join()
        with contextlib.suppress(ValueError):  # another thread waited too
            _threads.remove(thread)


def launches_of_backward(call: Call, plan: Plan) -> list[Launch]:
    """Return what the backward pass of a call launches; its tensors have no memory, and are on the meta device."""
    from .language.launch import recording  # loads Triton

    output, lse = call.new_outputs(saves_lse=True)
    assert lse is not None
    backward = BackwardCall(
        *(output, call.value, output, empty_saved(call, lse), call.query.shape[3], call.recipe),
        *(call.mask, call.is_causal, call.causal_offset, call.scale),
    )
    with recording() as launches:
        get_backward(plan.backward).backward(backward)
    return launches


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _start(function: Callable[..., None], *arguments: object) -> None:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    _threads.append(thread)  # before the thread ends that starts it, which is waited for


def _compile_launches(call: Call, plan: Plan, device: torch.device) -> None:
    try:
        with torch.cuda.device(device):
            for launch in launches_of_backward(call, plan):
                _start(_compile, launch, device)
    except Exception as error:  # the backward pass compiles what it needs itself
        logger.info("kernels of a backward pass are not compiled ahead: %s: %s", type(error).__name__, error)


def _compile(launch: Launch, device: torch.device) -> None:
    try:
        with torch.cuda.device(device):
            launch.kernel.run(grid=launch.grid, warmup=True, **launch.arguments, **launch.options)
    except Exception as error:  # the launch fails likewise, and says so
        logger.info("%s is not compiled ahead: %s: %s", launch.kernel.__name__, type(error).__name__, error)
