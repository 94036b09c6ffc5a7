"""The self-check: find kernels that are wrong on this machine, remember them (`verdicts`), and pass them over.

`sage-hf check` runs a GPU's kernels of attention, of QK-norm and RoPE, and of the KV cache. On GPUs that nobody has
tested, low-bit kernels and the kernels of norms and of the cache are checked before a process first runs them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from ..runtime import torch_private
from ..runtime.hardware import Capability, capability_of, device_of
from . import verdicts
from .examination import CheckCase, Verdict, examine, examine_kv, examine_qk_norm_rope
from .plan import Plan
from .registry import forget_choices

logger = logging.getLogger(__name__)

TESTED = ((9, 0),)
"""Capabilities of the GPUs that the test suite has run on. Kernels for other GPUs were only compiled,
interpreted and emulated, so their first call on such a GPU is checked."""


def keep(plan: Plan, examined: list[Verdict]) -> bool:
    """Keep verdicts on a plan's kernels; return whether all are right. From now on, wrong kernels are passed over."""
    capability, size = plan.request.capability, plan.request.head_dim
    failed = [one for one in examined if one.reason]
    for one in failed:
        keep_failure(one, plan.recipe, size, capability)
    if not failed:
        verdicts.record(_subject(plan), "", capability)
    return not failed


def keep_one(verdict: Verdict, name: str, head_dim: int, capability: Capability | None) -> bool:
    """Keep the verdict on a kernel of `verdicts.QK_NORM_ROPE` or `verdicts.KV`; return whether it is right."""
    if verdict.reason:
        keep_failure(verdict, name, head_dim, capability)
    else:
        verdicts.record(verdicts.subject(name, name, head_dim), "", capability)
    return not verdict.reason


def keep_failure(verdict: Verdict, recipe: str, head_dim: int, capability: Capability | None) -> None:
    """Remember that a kernel is wrong, and warn."""
    verdicts.record(verdicts.subject(verdict.kernel, recipe, head_dim), verdict.reason, capability)
    logger.warning(
        "%s is wrong on this machine for %s and is passed over: %s (`sage-hf check` tells more)",
        *(verdict.kernel, recipe, verdict.reason),
    )
    forget_choices()


def is_due(plan: Plan) -> bool:
    """Return whether the kernels of a plan must be checked before they run: on a GPU that nobody has tested.

    The check waits for a later call if this call is captured, traced, transformed or seen by a mode.
    """
    native = plan.numerics == "native" and plan.request.device_type == "cuda"
    return native and _is_due(_subject(plan), plan.request.capability)


def check_qk_norm_rope(head_dim: int, device: torch.device) -> None:
    """Check the kernel of QK-norm and RoPE if `is_due` says so; pass it over if it is wrong."""
    _check_one(verdicts.QK_NORM_ROPE, head_dim, device, lambda: examine_qk_norm_rope(head_dim, device))


def check_kv(format: str, head_dim: int, device: torch.device) -> None:
    """Check the kernel of a KV cache of a format in the same way."""
    _check_one(verdicts.KV + format, head_dim, device, lambda: examine_kv(format, head_dim, device))


def _check_one(name: str, head_dim: int, device: torch.device, examine: Callable[[], Verdict]) -> None:
    capability, subject_key = capability_of(device), verdicts.subject(name, name, head_dim)
    if capability is not None and _is_due(subject_key, capability):

        def check() -> bool:
            return verdicts.is_known(subject_key, capability) or keep_one(examine(), name, head_dim, capability)

        _check_once(subject_key, capability, check)


def _is_due(subject_key: str, capability: Capability | None) -> bool:
    if capability in TESTED or (capability, subject_key) in _checked or not verdicts.enabled() or _thread.checking:
        return False
    return not (
        (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        or torch.compiler.is_compiling()
        or torch_private.dispatch_modes()
        or torch_private.transforms_are_active()
    )


def passes(plan: Plan) -> bool:
    """Return whether the kernels of a plan are right, by a stored verdict, or by running them now."""
    subject_key, capability = _subject(plan), plan.request.capability

    def check() -> bool:
        return verdicts.passed(subject_key, capability) or keep(
            plan, examine(plan, CheckCase.like(plan), device_of(capability))
        )

    return _check_once(subject_key, capability, check)


def _check_once(subject_key: str, capability: Capability | None, check: Callable[[], bool]) -> bool:
    """Run a check and return its result; after True, the check is not due again."""
    _thread.checking = True
    try:
        if not check():
            return False
    except torch.OutOfMemoryError:  # a later call that leaves room repeats the check
        return True
    except Exception as error:  # the reference's error: no fact about the kernel, and no reason to end a caller's work
        logger.warning("%s: the self-check did not run: %s: %s", subject_key, type(error).__name__, error)
    finally:
        _thread.checking = False
    _checked.add((capability, subject_key))
    return True


class _CheckState(threading.local):
    """State of a thread.

    Attributes:
        checking: the thread runs the self-check, whose calls are not checked.
    """

    checking = False


_thread = _CheckState()
_checked: set[tuple[object, str]] = set()
"""Capability and subject of kernels that need no further check in this process."""


def forget() -> None:
    """Forget the results of this process; verdicts on disk stay."""
    _checked.clear()
    verdicts.forget()
    forget_choices()


def _subject(plan: Plan) -> str:
    names = " + ".join(name for name in (plan.kernel, plan.quantizer, plan.backward) if name)
    return verdicts.subject(names, plan.recipe, plan.request.head_dim)
