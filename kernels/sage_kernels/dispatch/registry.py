"""Registry of the kernels: what each can do, and the choice of those that serve a request."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from ..replay import cache
from ..spec.call import BackwardCall, Call
from ..spec.operands import KeyPadding, Saved
from ..spec.options import Fallback, check_fallback
from ..spec.recipe import Recipe, get_recipe
from . import cost_model, verdicts
from .request import Request

# Recipes tried, in this order, if the one asked for has no native kernel: those for the next older hardware.
SUBSTITUTES: dict[str, tuple[str, ...]] = {
    "sage3": ("sage2", "sage1"),
    "sage3_paper": ("sage2", "sage1"),
    "sage2": ("sage1",),
}

# Below these lengths launching costs more than arithmetic: fewer query rows than one matrix instruction takes
# (decoding), fewer keys than one tile. A call with gradients is low-bit at any length, because training must not change
# its numerics from one batch to the next.
MIN_QUERY_LEN = 16
MIN_KV_LEN = 64

# With fewer keys, a GPU gains nothing from low bits beside a mask of scores: exact attention reads such a mask once, a
# low-bit kernel twice, and its first call waits for a compiler.
MIN_MASKED_KV_LEN = 1024

# Recipes are defined and tested for these head dimensions; for others attention is exact.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


class KernelUnavailableError(RuntimeError):
    """Error for a request that no kernel may serve: none is native, and the caller asked for `fallback="error"`."""


class Kernel(Protocol):
    """Implementation of one phase of attention, for some formats and transforms, on some machines."""

    @property
    def name(self) -> str:
        """Return the name that `explain` shows."""

    @property
    def native(self) -> bool:
        """Return whether it runs on the hardware its recipes were made for; otherwise it reproduces their numerics."""

    def serves(self, recipe: Recipe) -> bool:
        """Return whether it computes every format and transform that the recipe asks for."""

    def unsupported(self, request: Request) -> str:
        """Return why it cannot serve a request of a recipe that it serves; "" if it can.

        A reason names the kernel's limits, not the request's sizes, so that reasons of the same kind compare equal.
        """


class Quantizer(Kernel, Protocol):
    """Kernel that makes operands of Q, K and V."""

    @property
    def makes(self) -> type:
        """Return the class of the operands it makes, one in `operands`."""

    def quantize(self, call: Call, valid: torch.Tensor | None = None, spans: torch.Tensor | None = None) -> Any:
        """Transform and quantise Q, K and V as `reference.quantize_operands` does.

        Args:
            call: a call that is not empty.
            valid: int32 or uint8 (batch or 1, kv_len), 0 for keys that means and scales must ignore; None: none.
            spans: those of `read_padding`, which may have left it to this to write them; None: no padding.
        """

    def read_padding(self, valid: torch.Tensor) -> KeyPadding:
        """Return which keys exist, `valid` being bool (batch or 1, kv_len), False where one does not.

        The spans may be written by `quantize` only, when it gets both.
        """


class Forward(Kernel, Protocol):
    """Kernel that computes attention."""

    @property
    def takes(self) -> type | None:
        """Return the class of operands that it reads; None if it quantises by itself."""

    @property
    def packs(self) -> bool:
        """Return whether it takes packed sequences; otherwise it is called once for each sequence."""

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, lse) as documented for `ops.attention`; lse may be None if it is not wanted."""


@runtime_checkable
class TrainingForward(Forward, Protocol):
    """Kernel that computes attention and keeps what its gradients need."""

    def attend_and_save(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, Saved]:
        """Return the output, and what `Backward.backward` needs from the forward pass."""


class Backward(Kernel, Protocol):
    """Kernel that computes gradients."""

    def backward(self, call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dQ, dK and dV, laid out as by `BackwardCall.new_gradients`.

        A row that attends to nothing has dQ 0 and contributes nothing to dK and dV; a key that does not exist has dK
        and dV 0.
        """


class Exact(Protocol):
    """Kernel of exact attention beside PyTorch's own."""

    @property
    def name(self) -> str:
        """Return the name that `explain` and tables of costs show."""

    @property
    def repeats(self) -> bool:
        """Return whether its host code only allocates, takes views and launches, so that calls can be traced."""

    def unsupported(self, request: Request) -> str:
        """Return why it cannot serve a request; "" if it can."""

    def attend(self, call: Call) -> torch.Tensor:
        """Return the output as documented for `ops.attention`; no LSE is wanted."""


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(query, key, value, mask) -> output, for the tensors of calls that agree in all else."""


AttendToFirst = Callable[[Call, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor], None]
"""(call, q_lengths, kv_lengths, plan, output) -> None: write the output of some batch elements over their first keys.

`kv_lengths`, int32 (batch,), has the number of keys of those elements, and 0 for the others, whose output must not be
written. Which they are is also said by `q_lengths`, int32 (batch,), q_len or 0, or by `plan`; the other one is None. A
plan is int32, three parts of as many numbers as there are elements, rounded up to a multiple of 4, and a counter: into
how many the keys of each are divided (1); how many blocks of rows it has, or 0; its number; and 0."""


class Outcome(NamedTuple):
    """Plan without its call's sizes, with fields as in `Plan`. Few differ, so they can be counted in little memory."""

    asked: str
    recipe: str
    kernel: str
    numerics: str
    reason: str
    quantizer: str = ""
    backward: str = ""


@dataclass(frozen=True)
class Plan:
    """Plan of a call: the kernels chosen for its request, and why others were not.

    Attributes:
        request: the request that the plan serves.
        kernel: name of the forward kernel, or of an `Exact` one; "sdpa" is PyTorch's exact attention, and
            "sdpa_without_cudnn" the same but for its cuDNN backend.
        recipe: the recipe that runs.
        numerics: "native", "emulated" or "exact".
        passed_over: (recipe or "recipe by kernel", reason) for each that could not serve, in the order tried.
        quantizer: name of the quantiser that makes the operands; "" if the forward kernel makes them itself.
        backward: name of the backward kernel; "" if no gradients are wanted.
        other_phases: (kernel, reason) for each quantiser and backward kernel that was passed over.
    """

    request: Request
    kernel: str
    recipe: str
    numerics: Literal["native", "emulated", "exact"]
    passed_over: tuple[tuple[str, str], ...] = ()
    quantizer: str = ""
    backward: str = ""
    other_phases: tuple[tuple[str, str], ...] = ()

    @cached_property
    def is_fallback(self) -> bool:
        """Return whether the recipe that runs is not the one asked for."""
        return self.recipe != self.request.recipe

    @cached_property
    def reason(self) -> str:
        """Return why the recipe asked for does not run, in one line; if it does, which kernels failed here, or ""."""
        others = self.passed_over
        if not self.is_fallback:
            others = tuple(one for one in (*others, *self.other_phases) if one[1].startswith(verdicts.FAILED))
        names: dict[str, list[str]] = {}
        for name, reason in others:
            names.setdefault(reason, []).append(name)
        parts = ((", ".join(dict.fromkeys(who)), reason) for reason, who in names.items())
        return "; ".join(f"{who}: {reason}" if who else reason for who, reason in parts)

    @cached_property
    def brief_reason(self) -> str:
        """Return the part of `reason` that decided, short enough for a log; "" if the recipe asked for runs."""
        if not self.is_fallback:
            return ""
        if self.recipe != "exact":
            return f"{self.request.recipe} is not native on this device"
        return self.passed_over[-1][1] if self.passed_over else ""

    @cached_property
    def outcome(self) -> Outcome:
        """Return the plan without the call's sizes."""
        phases = (self.quantizer, self.backward)
        return Outcome(self.request.recipe, self.recipe, self.kernel, self.numerics, self.reason, *phases)


_quantizers: dict[str, Quantizer] = {}
_forwards: dict[str, Forward] = {}
_backwards: dict[str, Backward] = {}
_exacts: dict[str, Exact] = {}

forgetters: list[Callable[[], None]] = [cache.forget]
"""Functions that `select.cache_clear` calls, because `select` may choose other kernels from then on."""

AnyKernel = TypeVar("AnyKernel", bound=Kernel | Exact)


def register_quantizer(kernel: Quantizer) -> None:
    """Make a quantiser available; those registered first are preferred. Raise ValueError if its name is taken."""
    _add(_quantizers, kernel)


def register_forward(kernel: Forward) -> None:
    """Make a forward kernel available; those registered first are preferred. Raise ValueError if its name is taken."""
    _add(_forwards, kernel)


def register_backward(kernel: Backward) -> None:
    """Make a backward kernel available; those registered first are preferred. Raise ValueError if its name is taken."""
    _add(_backwards, kernel)


def register_exact(kernel: Exact) -> None:
    """Make a kernel of exact attention available. Raise ValueError if its name is taken."""
    _add(_exacts, kernel)


def _add(kernels: dict[str, AnyKernel], kernel: AnyKernel) -> None:
    if kernel.name in kernels:
        raise ValueError(f"kernel {kernel.name!r} is registered already")
    kernels[kernel.name] = kernel
    select.cache_clear()


def get_quantizer(name: str) -> Quantizer | None:
    """Return the quantiser registered by that name, or None for ""; raise KeyError if there is none."""
    return _quantizers[name] if name else None


def get_forward(name: str) -> Forward:
    """Return the forward kernel registered by that name; raise KeyError if there is none."""
    return _forwards[name]


def get_backward(name: str) -> Backward:
    """Return the backward kernel registered by that name; raise KeyError if there is none."""
    return _backwards[name]


def get_exact(name: str) -> Exact | None:
    """Return the kernel of exact attention registered by that name; None for PyTorch's."""
    return _exacts.get(name)


def registered_forwards() -> list[str]:
    """Return the names of the registered forward kernels of low-bit recipes."""
    return list(_forwards)


def registered_exact() -> list[str]:
    """Return the names of the registered kernels of exact attention."""
    return list(_exacts)


def exact_kernels(request: Request) -> list[str]:
    """Return the names of the registered kernels of exact attention that serve a request."""
    return [name for name, kernel in _exacts.items() if not _unsupported(kernel, request)]


def fitting_quantizers(forward: str, request: Request) -> list[str]:
    """Return the names of the quantisers that make the operands of a forward kernel for a request."""
    takes, recipe = _forwards[forward].takes, get_recipe(request.recipe)
    fitting = [one for one in _quantizers.values() if takes is not None and issubclass(one.makes, takes)]
    return [one.name for one in fitting if one.serves(recipe) and not _unsupported(one, request)]


def exact_plan(request: Request, *passed_over: tuple[str, str], kernel: str = "sdpa") -> Plan:
    """Return a plan of PyTorch's exact attention, with what was passed over for it."""
    return Plan(request, kernel, "exact", "exact", passed_over)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Leave out the forward and exact kernels of these names while the block runs: to measure what they gain."""
    registered: tuple[dict[str, Any], ...] = (_forwards, _exacts)
    before = [dict(kernels) for kernels in registered]
    for kernels, name in itertools.product(registered, names):
        kernels.pop(name, None)
    select.cache_clear()
    try:
        yield
    finally:
        for kernels, every in zip(registered, before, strict=True):
            kernels.clear()
            kernels.update(every)
        select.cache_clear()


def set_routing(enabled: bool) -> None:
    """Set whether `select` takes exact attention where low bits would be slower; SAGE_KERNELS_ROUTING=0 starts without.

    Without routing a kernel runs whatever it supports, at any cost: to judge a recipe's quality, or to measure kernels.
    """
    global _routing
    _routing = enabled
    select.cache_clear()


def routing() -> bool:
    """Return whether `select` takes exact attention where low bits would be slower."""
    return _routing


_routing = os.environ.get("SAGE_KERNELS_ROUTING") != "0"


def _why_too_short(request: Request) -> str:
    """Return why a call is too short to gain from low bits; "" if it is not, or if gradients are wanted."""
    if request.grad:
        return ""
    if request.q_len < MIN_QUERY_LEN or request.kv_len < MIN_KV_LEN:
        return f"fewer than {MIN_QUERY_LEN} queries or {MIN_KV_LEN} keys: too short to gain from low-bit attention"
    # On a CPU the recipe is emulated to show its effect, at any length.
    if request.device_type == "cuda" and request.mask in ("bool", "additive") and request.kv_len < MIN_MASKED_KV_LEN:
        return f"fewer than {MIN_MASKED_KV_LEN} keys beside a mask of scores: too short to gain from low-bit attention"
    return ""


def _why_slower(plan: Plan) -> str:
    """Return why exact attention is faster than the plan; "" if it is not, or if gradients are wanted."""
    if not _routing or plan.numerics != "native" or plan.request.grad or plan.request.mask in ("blocks", "block_keys"):
        return ""
    runner = cost_model.low_bit_runner(plan.recipe, plan.kernel, plan.quantizer)
    return cost_model.why_slower(plan.request, runner, exact_kernels(plan.request))


def _exact_kernel(request: Request) -> str:
    """Return the name of the exact kernel for a call that falls back to it."""
    sizes = request.batch, request.q_heads, request.kv_heads, request.q_len, request.kv_len
    if not _routing or request.grad or request.device_type != "cuda" or 0 in sizes:
        return "sdpa"
    return cost_model.fastest_exact(request, exact_kernels(request))


@lru_cache(maxsize=4096)
def select(request: Request, fallback: Fallback = "native") -> Plan:
    """Choose the kernels for a request.

    Args:
        request: the facts of the call.
        fallback: "native": the recipe natively, else the best recipe that this device runs natively, else exact
            attention; on a CPU the recipe's emulation; calls without gradients run exact attention where they are very
            short, or where `costs` expects low bits to be slower. "emulate": the recipe's own numerics, natively or
            emulated, else exact attention. "error": the recipe natively, or an error. A head_dim outside
            MIN_HEAD_DIM…MAX_HEAD_DIM has exact attention only.

    Raises:
        ValueError: recipe or fallback is unknown.
        KernelUnavailableError: fallback is "error", and no native kernel serves the request.
    """
    get_recipe(request.recipe)
    check_fallback(fallback)
    if request.recipe == "exact":
        return exact_plan(request)
    too_short = _why_too_short(request) if fallback == "native" else ""
    if too_short:
        return exact_plan(request, ("", too_short), kernel=_exact_kernel(request))
    emulation = fallback == "emulate" or (fallback == "native" and request.device_type == "cpu")
    recipes = (request.recipe, *(SUBSTITUTES.get(request.recipe, ()) if fallback == "native" else ()))
    passed_over: list[tuple[str, str]] = []
    if request.grad and get_recipe(request.recipe).backward is None:
        recipes = ()
        passed_over.append(("", f"{request.recipe} is forward only and gradients are wanted"))
    if not all(MIN_HEAD_DIM <= size <= MAX_HEAD_DIM for size in (request.head_dim, request.v_head_dim)):
        recipes = ()
        passed_over.append(("", f"head_dim outside {MIN_HEAD_DIM}…{MAX_HEAD_DIM}"))
    for recipe in recipes:
        candidate = replace(request, recipe=recipe)
        for kernel in sorted(_forwards.values(), key=lambda kernel: not kernel.native):
            if not kernel.serves(get_recipe(recipe)):
                continue
            phases = _choose_phases(kernel, candidate)
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
    plan = exact_plan(request, *passed_over, kernel=_exact_kernel(request))
    if fallback == "error":
        raise KernelUnavailableError(
            f"no native kernel for recipe {request.recipe!r} on this {request.device_type} device ({plan.reason}); "
            'use fallback="native" for the best this device has, or fallback="emulate" for the recipe\'s numerics'
        )
    return plan


_clear_choices = select.cache_clear


def _forget_choices() -> None:
    _clear_choices()
    for forget in forgetters:
        forget()


select.cache_clear = _forget_choices  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Phases:
    """Kernels of the other phases that a forward kernel needs, or the reason why it cannot run."""

    quantizer: str = ""
    backward: str = ""
    passed_over: tuple[tuple[str, str], ...] = ()
    reason: str = ""


def _choose_phases(kernel: Forward, request: Request) -> _Phases:
    if reason := _unsupported(kernel, request):
        return _Phases(reason=reason)
    quantizer = backward = ""
    passed_over: list[tuple[str, str]] = []
    if kernel.takes is not None:
        fitting = [one for one in _quantizers.values() if issubclass(one.makes, kernel.takes)]
        quantizer, others = _choose_first(fitting, request)
        if not quantizer:
            return _Phases(reason=_join_reasons("nothing makes its operands", others))
        passed_over += others
    if request.grad:
        if not isinstance(kernel, TrainingForward):
            return _Phases(reason="forward only")
        alike = [one for one in _backwards.values() if one.native == kernel.native]
        backward, others = _choose_first(alike, request)
        if not backward:
            return _Phases(reason=_join_reasons("no kernel computes its gradients", others))
        passed_over += others
    return _Phases(quantizer, backward, tuple(passed_over))


def _choose_first(kernels: Iterable[Kernel], request: Request) -> tuple[str, list[tuple[str, str]]]:
    """Return the name of the first kernel that serves the request, or "", and those passed over before it."""
    passed_over: list[tuple[str, str]] = []
    recipe = get_recipe(request.recipe)
    for kernel in kernels:
        reason = _unsupported(kernel, request) if kernel.serves(recipe) else "other formats or transforms"
        if not reason:
            return kernel.name, passed_over
        passed_over.append((kernel.name, reason))
    return "", passed_over


def _unsupported(kernel: Kernel | Exact, request: Request) -> str:
    """Return why a kernel does not serve a request: for its limits, or since it is wrong on this machine; or ""."""
    recipe = "exact" if kernel.name in _exacts else request.recipe
    failure = verdicts.failure(kernel.name, recipe, request.head_dim, request.capability)
    return failure or kernel.unsupported(request)


def _join_reasons(summary: str, passed_over: list[tuple[str, str]]) -> str:
    reasons = [f"{name}: {reason}" for name, reason in passed_over]
    return f"{summary} ({', '.join(reasons)})" if reasons else summary
