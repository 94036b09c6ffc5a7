"""Choice of the kernels that serve a request."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ..spec.options import Fallback, check_fallback
from ..spec.recipe import get_recipe
from . import cost_model, registry
from .curves import RAGGED_KEYS
from .kernels import ForwardKernel, Kernel, TrainingForwardKernel
from .plan import KernelUnavailableError, Plan, exact_plan
from .request import Request

# Recipes tried, in this order, if the requested recipe has no native kernel: the recipes for older hardware.
SUBSTITUTES: dict[str, tuple[str, ...]] = {
    "sage3": ("sage2", "sage1"),
    "sage3_paper": ("sage2", "sage1"),
    "sage2": ("sage1",),
}

# Below these lengths launching costs more than arithmetic: fewer query rows than one MMA instruction takes
# (decoding), fewer keys than one tile. `decide.decide` routes calls with gradients.
MIN_QUERY_LEN = 16
MIN_KV_LEN = 64

# With fewer keys and an attention bias, a GPU gains nothing from low bits: exact attention reads the bias once, a
# low-bit kernel twice, and its first call waits for a compiler.
MIN_MASKED_KV_LEN = 1024

# Recipes are defined and tested for these head dimensions; for all others attention is exact.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


def set_routing(enabled: bool) -> None:
    """Switch routing on or off in this process: whether calls run as exact attention where low bits would be slower.

    Off, a recipe's kernel runs even where it is slow, so that it can be measured or judged. Without gradients, calls of
    fewer than 16 queries or 64 keys, and calls with an attention bias of few keys, still run exactly. At import,
    SAGE_KERNELS_ROUTING=0 switches routing off.
    """
    global _routing
    _routing = enabled
    registry.forget_choices()


def routing() -> bool:
    """Return whether costs decide between low bits and exact attention."""
    return _routing


_routing = os.environ.get("SAGE_KERNELS_ROUTING") != "0"


def why_no_gradients(recipe: str) -> str:
    """Return why a recipe serves no call with gradients; "" if it may."""
    return "" if get_recipe(recipe).backward else f"{recipe} is forward only and gradients are wanted"


def _why_no_gain(request: Request) -> str:
    """Return why a call of these sizes gains nothing from low bits; "" if it may gain, or if gradients are wanted."""
    if request.grad:
        return ""
    if request.q_len < MIN_QUERY_LEN or request.kv_len < MIN_KV_LEN:
        return f"fewer than {MIN_QUERY_LEN} queries or {MIN_KV_LEN} keys: too short to gain from low-bit attention"
    # On a CPU the recipe is emulated to show its effect, at any length.
    if request.device_type != "cuda" or request.mask not in ("bool", "additive"):
        return ""
    if request.kv_len < MIN_MASKED_KV_LEN:
        keys = f"fewer than {MIN_MASKED_KV_LEN} keys together with an attention bias"
        return f"{keys}: too short to gain from low-bit attention"
    # Low-bit kernels load elements of ragged rows one by one: 16 × 5 heads × 3,907² take 19 ms on an H200, 3.7 exactly.
    if request.kv_len % RAGGED_KEYS:
        return f"an attention bias for a number of keys that is no multiple of {RAGGED_KEYS}: slow to read"
    return ""


def _why_slower(plan: Plan) -> str:
    """Return why exact attention is faster than the plan; "" if it is not, or if gradients are wanted."""
    if not _routing or plan.numerics != "native" or plan.request.grad or plan.request.mask in ("blocks", "block_keys"):
        return ""
    provider = cost_model.low_bit_provider(plan.recipe, plan.kernel, plan.quantizer)
    return cost_model.why_slower(plan.request, provider, registry.exact_kernels(plan.request))


def _exact_kernel(request: Request) -> str:
    """Return the name of the exact kernel for a call that falls back to it."""
    sizes = request.batch, request.q_heads, request.kv_heads, request.q_len, request.kv_len
    if not _routing or request.grad or request.device_type != "cuda" or 0 in sizes:
        return "sdpa"
    return cost_model.fastest_exact(request, registry.exact_kernels(request))


@lru_cache(maxsize=4096)
def select(request: Request, fallback: Fallback = "native") -> Plan:
    """Select the kernels for a request.

    Args:
        request: the facts of the call.
        fallback: "native": the recipe natively, else the best recipe that this device runs natively, else exact
            attention; on a CPU the recipe's emulation; calls without gradients run exact attention where they are very
            short, or where `cost_model` expects low bits to be slower. "emulate": the recipe's own numerics, natively
            or emulated, else exact attention. "error": the recipe natively, or an error. A head_dim outside
            MIN_HEAD_DIM…MAX_HEAD_DIM has exact attention only.

    Raises:
        ValueError: recipe or fallback is unknown.
        KernelUnavailableError: fallback is "error", and no native kernel serves the request.
    """
    get_recipe(request.recipe)
    check_fallback(fallback)
    if request.recipe == "exact":
        return exact_plan(request)
    no_gain = _why_no_gain(request) if fallback == "native" else ""
    if no_gain:
        return exact_plan(request, ("", no_gain), kernel=_exact_kernel(request))
    emulation = fallback == "emulate" or (fallback == "native" and request.device_type == "cpu")
    recipes = (request.recipe, *(SUBSTITUTES.get(request.recipe, ()) if fallback == "native" else ()))
    passed_over: list[tuple[str, str]] = []
    if request.grad and (reason := why_no_gradients(request.recipe)):
        recipes = ()
        passed_over.append(("", reason))
    if not all(MIN_HEAD_DIM <= size <= MAX_HEAD_DIM for size in (request.head_dim, request.v_head_dim)):
        recipes = ()
        passed_over.append(("", f"head_dim outside {MIN_HEAD_DIM}…{MAX_HEAD_DIM}"))
    for recipe in recipes:
        candidate = replace(request, recipe=recipe)
        for kernel in sorted(registry.forwards.values(), key=lambda kernel: not kernel.native):
            if not kernel.serves(get_recipe(recipe)):
                continue
            phases = _select_phases(kernel, candidate)
            if not phases.reason and (kernel.native or emulation):
                numerics: Literal["native", "emulated"] = "native" if kernel.native else "emulated"
                others = (phases.quantizer, phases.backward, phases.passed_over)
                chosen = Plan(request, kernel.name, recipe, numerics, tuple(passed_over), *others)
                slower = _why_slower(chosen) if fallback == "native" else ""
                if not slower:
                    return chosen
                passed_over.append((f"{recipe} by {kernel.name}", slower))
                return exact_plan(request, *passed_over, kernel=_exact_kernel(request))
            if kernel.native or phases.reason:
                passed_over.append((f"{recipe} by {kernel.name}", phases.reason))
            else:
                passed_over.append((recipe, 'not native here; fallback="emulate" gives its numerics'))
    if not passed_over:
        passed_over.append(("", f"no kernel of {request.recipe} is registered"))
    plan = exact_plan(request, *passed_over, kernel=_exact_kernel(request))
    if fallback == "error":
        raise KernelUnavailableError(
            f"no native kernel for recipe {request.recipe!r} on this {request.device_type} device ({plan.reason}); "
            'use fallback="native" for the best this device has, or fallback="emulate" for the recipe\'s numerics'
        )
    return plan


registry.forgetters.append(select.cache_clear)


@dataclass(frozen=True)
class _Phases:
    """Kernels of the other phases that a forward kernel needs, or why it cannot run."""

    quantizer: str = ""
    backward: str = ""
    passed_over: tuple[tuple[str, str], ...] = ()
    reason: str = ""


def _select_phases(kernel: ForwardKernel, request: Request) -> _Phases:
    if reason := registry.unsupported(kernel, request):
        return _Phases(reason=reason)
    quantizer = backward = ""
    passed_over: list[tuple[str, str]] = []
    if kernel.takes is not None:
        fitting = [one for one in registry.quantizers.values() if issubclass(one.makes, kernel.takes)]
        quantizer, others = _select_first(fitting, request)
        if not quantizer:
            return _Phases(reason=_join_reasons("no quantiser makes the operands that it reads", others))
        passed_over += others
    if request.grad:
        if not isinstance(kernel, TrainingForwardKernel):
            return _Phases(reason="forward only")
        candidates = [one for one in registry.backwards.values() if one.native == kernel.native]
        backward, others = _select_first(candidates, request)
        if not backward:
            return _Phases(reason=_join_reasons("no kernel computes its gradients", others))
        passed_over += others
    return _Phases(quantizer, backward, tuple(passed_over))


def _select_first(kernels: Iterable[Kernel], request: Request) -> tuple[str, list[tuple[str, str]]]:
    """Return the name of the first kernel that serves the request, or "", and the kernels passed over before it."""
    passed_over: list[tuple[str, str]] = []
    recipe = get_recipe(request.recipe)
    for kernel in kernels:
        reason = (
            registry.unsupported(kernel, request)
            if kernel.serves(recipe)
            else "does not compute the recipe's formats and transforms"
        )
        if not reason:
            return kernel.name, passed_over
        passed_over.append((kernel.name, reason))
    return "", passed_over


def _join_reasons(summary: str, passed_over: list[tuple[str, str]]) -> str:
    reasons = [f"{name}: {reason}" for name, reason in passed_over]
    return f"{summary} ({', '.join(reasons)})" if reasons else summary
