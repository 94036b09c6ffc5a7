"""Compilation in threads: all kernels of a call at the same time, together with the kernels of its backward pass."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ..replay.trace import tracing
from ..spec.call import BackwardCall, Call, Mask
from ..spec.layout import ALIGNMENT, power_of_two
from ..spec.operands import Saved
from ..spec.recipe import get_recipe
from ..spec.saved import empty_saved
from .plan import Plan
from .registry import get_backward

logger = logging.getLogger(__name__)

_begun: set[tuple[object, ...]] = set()
_running: list[threading.Thread] = []


def compile_backward(call: Call, plan: Plan) -> None:
    """Begin to compile the kernels of a call's backward pass, each in a separate thread, and return at once.

    They are compiled for an output's gradient that is laid out like the output. Compilation begins once per kind of
    call. It does not begin while a graph is captured, nor for calls that are empty, off the GPU, or have packed
    sequences or block lists. A kernel that does not compile raises its error at its launch.

    Args:
        call: the call of the forward pass.
        plan: the plan whose backward kernel will run.
    """
    if not _is_served(call):
        return
    sizes = call.query.shape[3], call.value.shape[3]
    kind = (plan.backward, plan.recipe, call.query.dtype, call.query.device, *sizes, call.mask.kind, call.is_causal)
    if not _begins(kind):
        return
    backward, device = get_backward(plan.backward), call.query.device
    meta_call = replace(call.without_memory(), recipe=get_recipe(plan.recipe))

    def compile_all() -> None:  # outlives the forward pass, and keeps none of the call's memory
        with torch.cuda.device(device), tracing(compiles_only=True) as traced:
            placeholder = partial(traced.placeholder, device=device)
            output, lse = meta_call.new_outputs(saves_lse=True)
            assert lse is not None
            backward.backward(
                BackwardCall(
                    placeholder(output),
                    placeholder(meta_call.value),
                    placeholder(output),
                    Saved(*map(placeholder, empty_saved(meta_call, lse))),
                    sizes[0],
                    meta_call.recipe,
                    Mask.of_keys(None if meta_call.mask.key_mask is None else placeholder(meta_call.mask.key_mask)),
                    is_causal=meta_call.is_causal,
                    causal_offset=meta_call.causal_offset,
                    scale=meta_call.scale,
                )
            )
        threads = [_begin(partial(_compile_on, device, one)) for one in traced.compilations or ()]
        for thread in threads:
            thread.join()

    _running.append(_begin(compile_all))


def compile_forward(call: Call, plan: Plan, run: Callable[[Call], object]) -> None:
    """Compile the kernels that `run(call)` will launch, each in a separate thread, and wait for them.

    Kernels are compiled once per kind of call. This function does nothing while a graph is captured, nor for calls that
    are empty, off the GPU, or have packed sequences or block lists: these compile their kernels one by one, at launch.

    Args:
        call: the call that will run.
        plan: the call's plan.
        run: launches the kernels.
    """
    if not _is_served(call):
        return
    request, tensors = plan.request, [call.query, call.key, call.value]
    if call.mask.tensor is not None:
        tensors.append(call.mask.tensor)
    layouts = ((x.stride(-1), *(stride % ALIGNMENT == 0 for stride in x.stride())) for x in tensors)
    sizes = replace(request, batch=1, q_heads=1, kv_heads=1, q_len=1, kv_len=1)
    heavy_keys = call.heavy_keys, call.late_keys, call.chooses_heavy_keys, tensors[-1].dtype
    width = power_of_two(call.kv_len) if plan.numerics == "exact" else 0
    kind = (sizes, call.query.device, plan.recipe, plan.kernel, plan.quantizer, *heavy_keys, width, *layouts)
    if not _begins(kind):
        return
    device = call.query.device
    with torch.cuda.device(device), tracing(compiles_only=True) as traced:
        query, key, value, *masks = map(traced.placeholder, tensors)
        mask = Mask.of(masks[0], call.kv_len) if masks else call.mask
        try:
            run(replace(call, query=query, key=key, value=value, mask=mask))
        except Exception as error:  # the call itself runs next, and shows its failure
            logger.info("kernels of %s are compiled one by one: %s: %s", plan.kernel, type(error).__name__, error)
    # The attention kernel comes last and takes longest.
    threads = [_begin(partial(_compile_on, device, one)) for one in reversed(traced.compilations or ())]
    for thread in threads:
        thread.join()


def finish() -> None:
    """Wait until every compilation that began has ended: launching a kernel earlier would compile it a second time."""
    for thread in tuple(_running):
        thread.join()
        with contextlib.suppress(ValueError):  # another thread has removed it already
            _running.remove(thread)


def _is_served(call: Call) -> bool:
    on_gpu, is_list = call.query.device.type == "cuda", call.mask.blocks is not None
    return on_gpu and not call.is_empty and call.lengths is None and not is_list


def _begins(kind: tuple[object, ...]) -> bool:
    """Return whether kernels for calls of this kind must be compiled now, and note that their compilation begins."""
    if kind in _begun or torch.cuda.is_current_stream_capturing():
        return False
    _begun.add(kind)
    return True


def _compile_on(device: torch.device, compile: Callable[[], object]) -> None:
    with torch.cuda.device(device):
        compile()


def _begin(work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except Exception as error:  # the launch compiles again, and raises the error
            logger.info("a kernel did not compile ahead of its launch: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=run, name="sage-kernels-compile")
    thread.start()
    return thread
