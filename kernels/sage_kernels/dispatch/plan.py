"""Plan: the kernels chosen for a request, and why other kernels were not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from . import verdicts
from .request import Request


class KernelUnavailableError(RuntimeError):
    """Error for a request that no kernel may serve: none is native, and the caller set `fallback="error"`."""


class Outcome(NamedTuple):
    """Plan without its call's sizes, with fields as in `Plan`. Few differ, so counting them takes little memory."""

    asked: str
    recipe: str
    kernel: str
    numerics: str
    reason: str
    quantizer: str = ""
    backward: str = ""


@dataclass(frozen=True)
class Plan:
    """Plan of a call: the kernels chosen for its request, and why other kernels were not.

    Attributes:
        request: the request that the plan serves.
        kernel: name of the forward kernel, or of an `ExactKernel`; "sdpa" is PyTorch's exact attention, and
            "sdpa_without_cudnn" the same without its cuDNN backend.
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
        """Return whether another recipe runs than the caller asked for."""
        return self.recipe != self.request.recipe

    @cached_property
    def reason(self) -> str:
        """Return in one line why the requested recipe does not run; if it runs, which kernels failed here, or ""."""
        passed_over = self.passed_over
        if not self.is_fallback:
            passed_over = tuple(one for one in (*passed_over, *self.other_phases) if one[1].startswith(verdicts.FAILED))
        names: dict[str, list[str]] = {}
        for name, reason in passed_over:
            names.setdefault(reason, []).append(name)
        parts = ((", ".join(dict.fromkeys(who)), reason) for reason, who in names.items())
        return "; ".join(f"{who}: {reason}" if who else reason for who, reason in parts)

    @cached_property
    def brief_reason(self) -> str:
        """Return the decisive part of `reason`, short enough for a log; "" if the requested recipe runs."""
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


def exact_plan(request: Request, *passed_over: tuple[str, str], kernel: str = "sdpa") -> Plan:
    """Return a plan of PyTorch's exact attention, with the kernels that were passed over."""
    return Plan(request, kernel, "exact", "exact", passed_over)
