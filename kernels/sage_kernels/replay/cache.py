"""Cache of replays: find out once what a call's layout, options and settings decide, then replay it.

A replay is prepared at the second call of a kind, so a length that occurs once costs nothing. Its first output is
compared with the ordinary call's, bit by bit, or to rounding where sums are taken in any order; a call that cannot be
replayed runs the ordinary way each time. A replay makes no checks, because the first call's checks hold, and runs no
operator of torch.library: it serves plain tensors outside of tracing, of transforms and of modes that want to see
operators.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from ..runtime import torch_private
from ..runtime.hardware import is_capturing
from . import driver
from .launch_plan import LaunchPlan
from .trace import NotReplayableError, tracing

logger = logging.getLogger(__name__)

MAX_ENTRIES = 512
"""Number of calls that are remembered; beyond it, the least recently used calls are forgotten."""
ADDRESS_ALIGNMENT = 16
"""Alignment of replayed calls' addresses, in bytes."""
MOST_BYTES = 2**28
"""Bytes of a call's results up to which it is replayed: comparing larger results takes much memory, and such a
call takes the GPU longer than any host."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their bytes."""

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Replay of a call, made by `replay_of_launches` or `replay_of_function`.

    Attributes:
        plan: the plan that runs, to be announced.
        run: (the arguments that change between calls) -> the ordinary call's result.
    """

    plan: Any
    run: Callable[..., Any]

    def __call__(self, *changing: Any) -> Any:
        """Run the replay."""
        return self.run(*changing)


@dataclass(slots=True, eq=False)
class ReplayEntry:
    """Knowledge of calls that differ only in addresses and values.

    Attributes:
        replay: replays the calls; None if no replay is prepared.
        calls: how many calls ran the ordinary way.
    """

    replay: Replay | None = None
    calls: int = 0

    def prepare_when_repeated(self, make: Callable[[], Replay | None], at_once: bool = False) -> None:
        """Count a call that has just run the ordinary way; prepare a replay by `make` at the second one, or `at_once`.

        While a graph is captured, nothing is prepared: its launches do not run, so there are no results to compare.
        """
        if is_capturing():
            return
        self.calls += 1
        if self.calls != (1 if at_once else 2):
            return
        try:
            self.replay = make()
        except Exception as error:  # the call has run: no fault of its replay may fail it
            _warn(f"{type(error).__name__}: {error}")


@cache
def _warn(reason: str) -> None:
    """Say once for each reason that a call is not replayed; it has run, and runs the ordinary way from now on."""
    logger.warning("a call is not replayed but run anew each time: %s", reason)


@lru_cache(maxsize=MAX_ENTRIES)
def _entry(*facts: object) -> ReplayEntry:
    return ReplayEntry()


forget = _entry.cache_clear
"""() -> None: forget all calls: from now on, other kernels may serve them."""


def find(kind: str, tensors: Tensors, options: tuple[object, ...], grad: bool = False) -> ReplayEntry | None:
    """Return the entry of a call, or None if such a call is never replayed.

    Entries differ by kind; by sizes, strides, dtypes and devices of the tensors; by options and their types; and by the
    settings of this process and thread that can change results or plans (`torch_private.settings`).

    Args:
        kind: name of the function that is called; each function has its own entries.
        tensors: the tensor arguments, not checked yet; None for an optional tensor that is not given.
        options: all other arguments.
        grad: whether a gradient of an argument is wanted.
    """
    if torch.compiler.is_compiling() or torch_private.modes_are_active():
        return None
    try:
        if not is_plain(*tensors):
            return None
        layout: list[object] = []
        for x in tensors:
            layout += (None,) if x is None else (x.shape, x.stride(), x.dtype, x.device)
        checkpointed = grad and torch_private.is_checkpointed()
        types = tuple(map(type, options))  # 1 == 1.0 == True
        return _entry(kind, grad, checkpointed, torch_private.settings(), options, types, *layout)
    except (AttributeError, RuntimeError, TypeError):  # no strides, no address, no hash: the call's checks will explain
        return None


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Return whether tensors are of no subclass, store their values unmodified, and begin at multiples of 16 bytes.

    Tensors without memory are not plain: zero tensors of PyTorch without storage, and tensors whose storage was freed.
    Their address is their byte offset in the storage.
    """
    for x in tensors:
        if x is None:
            continue
        if type(x) not in _PLAIN or x.is_neg() or x.is_conj():
            return False
        address = x.data_ptr()
        if address % ADDRESS_ALIGNMENT or (address == x.storage_offset() * x.element_size() and x.numel()):
            return False
    return True


def replay_of_launches(
    plan: Any,
    call: Callable[..., Sequence[torch.Tensor]],
    tensors: Tensors,
    expected: Tensors,
    result: Callable[[list[torch.Tensor]], Any] = tuple,
    *,
    rounds: bool = False,
) -> Replay | None:
    """Return a replay of the launches of a call; None if its results are too large to be compared.

    Args:
        plan: the plan that runs.
        call: (tensors) -> outputs, no two sharing memory; it only allocates, takes views and launches.
        tensors: the arguments of the call that has just run.
        expected: the results of that call.
        result: (outputs) -> the ordinary call's result.
        rounds: equal calls give equal outputs only up to rounding, because sums are taken in any order.

    Raises:
        NotReplayableError: the call does more than these actions, or its replay gives other outputs.
        RuntimeError: the driver reports an error.
    """
    if not is_small(expected):
        return None
    device = next(x.device for x in tensors if x is not None)
    with torch.cuda.device(device), driver.relaxed_capture(), tracing() as trace:
        inputs = [None if x is None else trace.placeholder(x, device) for x in tensors]
        outputs = call(*inputs)
        launches = LaunchPlan(trace, [x for x in inputs if x is not None], outputs, device)

    def run(*tensors: torch.Tensor | None) -> Any:
        return result(launches.run(*[x for x in tensors if x is not None]))

    check_replay(run, tensors, expected, rounds)
    return Replay(plan, run)


def replay_of_function(plan: Any, run: Callable[..., Tensors], tensors: Tensors, expected: Tensors) -> Replay | None:
    """Return a replay by a function that skips checks and planning; arguments and errors as in `replay_of_launches`."""
    if not is_small(expected):
        return None
    check_replay(run, tensors, expected)
    return Replay(plan, run)


def is_small(results: Tensors) -> bool:
    """Tell whether the results of a call are small enough to compare; they may be on the meta device."""
    return sum(x.numel() * x.element_size() for x in results if x is not None) <= MOST_BYTES


def check_replay(run: Callable[..., Tensors], tensors: Tensors, expected: Tensors, rounds: bool = False) -> None:
    """Check that `run(*tensors)` returns the expected tensors: bit for bit, or with `rounds` up to rounding.

    Raises:
        NotReplayableError: the results differ.
    """
    device = next(x.device for x in expected if x is not None)
    with contextlib.ExitStack() as stack:
        # Checkpointing counts the tensors that a forward pass saves; it must not count tensors of the comparison.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_keep, _keep))
        if device.type == "cuda" and torch.version.hip is None:
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(driver.relaxed_capture())
        if not (are_equal_to_rounding if rounds else are_same)(run(*tensors), expected):
            raise NotReplayableError("its replay gives a different output")


def _keep(x: torch.Tensor) -> torch.Tensor:
    """Save a tensor for a backward pass unchanged."""
    return x


def are_same(actual: Tensors, expected: Tensors) -> bool:
    """Return whether tensors have the same bits, NaN included."""
    return len(actual) == len(expected) and all(map(_is_same, actual, expected))


def are_equal_to_rounding(actual: Tensors, expected: Tensors) -> bool:
    """Return whether tensors differ by less than two roundings of each row's largest number, NaN in the same places.

    Sums of float32 in another order differ by far less before they are rounded to 16 bits, unless their terms cancel.
    """
    return len(actual) == len(expected) and all(map(_is_equal_to_rounding, actual, expected))


def _is_equal_to_rounding(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    x, y = x.detach(), y.detach()
    bound = 2 * torch.finfo(y.dtype).eps * y.abs().nan_to_num().amax(-1, keepdim=True)
    return bool((((x - y).abs() <= bound) | (x == y) | (x.isnan() & y.isnan())).all())


def _is_same(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    x, y = x.detach(), y.detach()
    bits = _BITS[x.element_size()], _BITS[y.element_size()]
    return x.dtype == y.dtype and torch.equal(x.view(bits[0]), y.view(bits[1]))
