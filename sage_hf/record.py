"""The record of the plan of every attention call, by layer.

The operators of sage_kernels announce each call's plan. This module files it under the layer that made the call, logs
each reason for a fallback once, warns once that emulation is slow, and lets observers, such as metrics, watch the
calls. Calls inside a compiled graph have no layer, so they are counted together.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from huggingface_hub.utils import logging
from torch import nn

from sage_kernels.dispatch import execution
from sage_kernels.dispatch.plan import Outcome, Plan
from sage_kernels.spec.autocast import in_autocast_dtype
from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.options import Options

logger = logging.get_logger(__name__)

PLANS_PER_LAYER = 256
"""Largest number of plans that are kept of a layer."""
UNCOUNTED = 256
"""Number of plans of calls outside layers from which they are counted."""
KNOWN = 4096
"""Number of known plans from which all of them are forgotten."""
SLOW_SCORES = 2**26
"""Number of scores (batch · heads · q_len · kv_len) from which an emulated call counts as slow: each takes a CPU core
10 to 40 ns."""

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class AttentionCall:
    """An eager call of `sage_attention`, as observers see it.

    Attributes:
        layer: the module that made the call, or None.
        query, key, value: (batch, heads, tokens, channels), in autocast's dtype.
        attn_mask, blocks, is_causal, causal_offset, scale, enable_gqa: the arguments of `attention.attend_observed`.
        output: (batch, q_heads, q_len, v_head_dim).
        plan: the kernels that ran.
    """

    layer: nn.Module | None
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    blocks: BlockList | None
    is_causal: bool
    causal_offset: int
    scale: float | None
    enable_gqa: bool
    output: torch.Tensor
    plan: Plan


class _RecordState(threading.local):
    """The layers that this thread is running, innermost last, and the plan of its latest call."""

    def __init__(self) -> None:
        self.layers: list[nn.Module] = []
        self.latest: Plan | None = None


_thread = _RecordState()
_plans: WeakKeyDictionary[nn.Module, deque[Plan]] = WeakKeyDictionary()
with_qk_norm_rope: WeakSet[nn.Module] = WeakSet()
"""Layers whose QK-norm or RoPE `sage_kernels.qk_norm_rope` has computed."""
bypassed: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Layers with a recipe in which other attention has run, with the reason of the latest such run."""
_uncounted: deque[Plan] = deque()
_outside_layers: Counter[Outcome] = Counter()
observers: list[Callable[[AttentionCall], None]] = []
"""Functions that run after every eager call of `sage_attention`, while their `observe` is open."""
_logged: set[tuple[str, ...]] = set()
_known: dict[int, Plan] = {}
"""Plans that were filed before, by identity, at most KNOWN; they have nothing left to log."""
_lock = threading.Lock()


def run_in_layer(module: nn.Module, function: Callable[..., Returned], *args: object, **kwargs: object) -> Returned:
    """Return `function(*args, **kwargs)`, with its attention calls filed under `module` unless it is being compiled."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    layers = _thread.layers
    layers.append(module)
    try:
        return function(*args, **kwargs)
    finally:
        layers.pop()


def last_plans(module: nn.Module) -> tuple[Plan, ...]:
    """Return the plans of the module's latest calls (at most 256), the most recent last."""
    return tuple(_plans.get(module, ()))


def forget(module: nn.Module) -> None:
    """Forget the plans of the module's calls."""
    _plans.pop(module, None)
    with_qk_norm_rope.discard(module)
    bypassed.pop(module, None)


def note_bypassed(reason: str) -> None:
    """Record why the current layer did not run our attention, and log the reason once."""
    if _thread.layers:
        bypassed[_thread.layers[-1]] = reason
    _log_once((reason,), reason)


def outcomes_outside_layers() -> Counter[Outcome]:
    """Return the outcomes, with their numbers, of calls outside any layer: inside compiled graphs or called by hand.

    Exact attention inside a compiled graph is PyTorch's own and is not counted, whether it was asked for or took over
    because gradients were wanted.
    """
    _count_outside()
    return _outside_layers.copy()


def clear() -> None:
    """Forget all plans, and which messages were logged."""
    _plans.clear()
    _uncounted.clear()
    _outside_layers.clear()
    _logged.clear()
    _known.clear()


@contextmanager
def observe(callback: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Call `callback` after every eager `sage_attention` call of any thread while the block runs."""
    observers.append(callback)
    try:
        yield
    finally:
        observers.remove(callback)


def file_plan(plan: Plan) -> None:
    """File a plan under the current layer, and log a fallback or a slow emulation once."""
    if observers:
        _thread.latest = plan
    layers = _thread.layers
    if layers:
        plans = _plans.get(layers[-1])
        if plans is None:
            plans = _plans.setdefault(layers[-1], deque(maxlen=PLANS_PER_LAYER))
        plans.append(plan)
    else:
        _uncounted.append(plan)
        if len(_uncounted) >= UNCOUNTED:
            _count_outside()
    if id(plan) not in _known:
        if plan.is_fallback:
            hint = "" if plan.brief_reason == plan.reason else " (all reasons: sage_hf.explain)"
            _log_fallback(plan.request.recipe, plan.recipe, plan.brief_reason + hint)
        if plan.kernel == "reference":
            _log_slow(plan)
        if len(_known) >= KNOWN:
            _known.clear()
        _known[id(plan)] = plan


def _count_outside() -> None:
    """Count the plans that were kept for calls outside any layer; a call only keeps its plan, which is faster."""
    with _lock, contextlib.suppress(IndexError):
        while True:
            _outside_layers[_uncounted.popleft().outcome] += 1


def notify_observers(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
    output: torch.Tensor,
) -> None:
    """Describe the thread's latest call to the observers; arguments as in `attention.attend_observed`."""
    plan, _thread.latest = _thread.latest, None
    if plan is None:
        return
    if options.tokens_first:
        query, key, value, output = (x.transpose(1, 2) for x in (query, key, value, output))
    query, key, value = in_autocast_dtype(query, key, value)
    layer = _thread.layers[-1] if _thread.layers else None
    causality = options.is_causal, options.causal_offset
    call = AttentionCall(
        layer, query, key, value, attn_mask, blocks, *causality, options.scale, options.enable_gqa, output, plan
    )
    for observer in tuple(observers):
        observer(call)


def _log_exact(recipe: str, reason: str) -> None:
    """Log that exact attention runs in place of a recipe in a graph that is being compiled."""
    _log_fallback(recipe, "exact", reason)


def _log_fallback(asked: str, ran: str, reason: str) -> None:
    if (asked, ran, reason) not in _logged:
        _log_once((asked, ran, reason), f"{asked}: {ran} attention runs instead: {reason}")


def _log_slow(plan: Plan) -> None:
    request = plan.request
    if request.batch * request.q_heads * request.q_len * request.kv_len >= SLOW_SCORES:
        _log_once(
            ("emulation",),
            f"{plan.recipe} is emulated in PyTorch, which is slow ({request.q_len} queries, {request.kv_len} keys, "
            f"{request.q_heads} heads): it shows the quality; for speed use a GPU that runs it, or exact attention",
        )


def _log_once(key: tuple[str, ...], message: str) -> None:
    if key not in _logged:
        _logged.add(key)
        logger.warning(message)


execution.plan_listeners.append(file_plan)
execution.fallback_listeners.append(_log_exact)
