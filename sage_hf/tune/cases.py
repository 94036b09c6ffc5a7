"""Calls to tune for: a case by a recipe or an exact kernel, and its first run, which compiles the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf.bench.cases import BenchCase, draw
from sage_hf.bench.prewarm import call_in_processes
from sage_kernels import ops, training
from sage_kernels.dispatch import cost_model, execution
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.dispatch.registry import get_exact
from sage_kernels.exact.attend import attend_exactly
from sage_kernels.spec.options import Options
from sage_kernels.spec.recipe import get_recipe

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
assert tuple(BACKENDS) == cost_model.BACKENDS


def prepare(device: torch.device, case: BenchCase, backward: bool = True) -> Callable[[str], Callable[[], object]]:
    """Draw a case's tensors; return a function from the name of a recipe or exact kernel to a call with these tensors.

    Args:
        device: a CUDA device.
        case: for training, each call is a forward and a backward pass.
        backward: if False, a call for training is only the forward pass.
    """
    inputs = draw(case, device)
    query, key, value = inputs.tensors
    call = inputs.call("exact")
    mask = call.mask.tensor
    causality: dict[str, Any] = {"is_causal": case.is_causal, "causal_offset": case.causal_offset}

    def exactly(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            if not case.training:
                return execution.compute(call, execution.select_checked(execution.request_of(call), "native"))[0]
            options = Options(is_causal=case.is_causal, causal_offset=case.causal_offset, enable_gqa=inputs.grouped)
            return attend_exactly(query, key, value, mask, blocks=None, options=options)[0]

    def forward(name: str) -> Callable[[], Tensor]:
        if name in BACKENDS:
            return partial(exactly, BACKENDS[name])
        if (kernel := get_exact(name)) is not None:
            if reason := kernel.unsupported(execution.request_of(call)):
                raise ValueError(f"{name}: {reason}")
            return partial(kernel.attend, call)
        if case.training:
            options = causality | {"key_mask": call.mask.key_mask, "recipe": name, "fallback": "error"}
            return lambda: training.attention(query, key, value, **options)[0]
        options = causality | {"mask": mask, "recipe": name, "fallback": "error"}
        return lambda: ops.attention(query, key, value, **options)[0]

    def both(attend: Callable[[], Tensor]) -> None:
        with torch.enable_grad():
            output = attend()
            if backward:
                torch.autograd.grad(output, inputs.tensors, inputs.gradient)

    return lambda name: partial(both, forward(name)) if case.training else forward(name)


def compile_kernels(device: torch.device, calls: Iterable[tuple[str, BenchCase]], seconds: float | None = None) -> int:
    """Run each (recipe, case) once in one of several processes, so that later processes find its kernels in the caches.

    Args:
        device: a CUDA device.
        calls: a recipe with gradients also runs its backward pass, if it has one for such calls. Batch and heads are
            cut to small numbers.
        seconds: time after which no call begins; default: all calls run.

    Returns:
        The number of calls that ran.
    """
    small = dict.fromkeys((recipe, _cut(case)) for recipe, case in calls)
    return sum(call_in_processes(partial(_run_once, device), small, seconds))


def _cut(case: BenchCase) -> BenchCase:
    """Return a case whose calls need the same kernels, but less work."""
    kv_heads = min(2, case.kv_heads)
    q_heads = kv_heads * (case.q_heads // case.kv_heads)
    return replace(case, batch=min(2, case.batch), q_heads=q_heads, kv_heads=kv_heads)


def _run_once(device: torch.device, call: tuple[str, BenchCase]) -> bool:
    """Run a call, (recipe or exact kernel, case); return whether it is native for the case."""
    name, case = call
    trains = get_exact(name) is None and get_recipe(name).backward is not None and case.kind in ("none", "keys")
    try:
        prepare(device, replace(case, training=trains))(name)()
    except (KernelUnavailableError, ValueError):
        return False
    torch.cuda.synchronize(device)
    return True
