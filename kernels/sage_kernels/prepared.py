"""Prepared calls: what a call's shapes, strides, dtypes, device and options decide is found out once, then repeated.

The second call that agrees in all of these is prepared, so a length that occurs once costs nothing; the first one where
gradients are wanted, and of steps of decoding. A prepared call makes no checks, for those of the first one hold, and
runs no operator of torch.library: it serves plain tensors outside of tracing, of transforms and of modes that want to
see operators.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import forward_ad

from . import costs, dispatch, exact, registry
from .call import NO_MASK, Call, Mask
from .prepared_calls import BoundCall, ExactCall, Prepared, TapedCall
from .recipe import Recipe, get_recipe
from .registry import Attend, BoundExact, Fallback, Plan, get_forward, get_quantizer
from .rehearsal import Rehearsal, StandIn, rehearsing
from .tape import Tape

TensorGuards: Any = None
with contextlib.suppress(ImportError):
    from torch._C._dynamo.guards import TensorGuards

logger = logging.getLogger(__name__)

CALLS = 512
"""Calls that are remembered; of more, those used least lately are forgotten."""
AT_HAND = 8
"""Calls with the same options that are at hand."""
ALIGNMENT = 16
"""Bytes, of the addresses of prepared calls."""

STEP_KEYS = 64
"""Numbers of keys for which a step of decoding by PyTorch's attention is planned once: every step has one more."""

Made = TypeVar("Made")

_PLAIN = (torch.Tensor, torch.nn.Parameter)


PlanAnew = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Prepared | None]
"""(query, key, value) -> a prepared step of decoding, or None if such calls cannot be prepared."""


@dataclass(slots=True, eq=False)
class Slot:
    """Knowledge of calls that agree in all but addresses and values.

    Attributes:
        prepared: the call of tensors (batch, heads, tokens, channels), if it is prepared.
        calls: how many there were before.
        address: where the keys of the first step of decoding lay; 0 before one.
        plan_anew: prepares a step of decoding whose keys lie where the first ones lay, so that their number is fixed;
            None for other calls, and once it has.
        tokens_first: the callers' tensors are (batch, tokens, heads, channels), and their output too.
        step: what steps of decoding have in common that are planned together; None for other calls.
        alike: compares tensors to the calls' own (`guards_of`), once a prepared call was found by its facts.
        attend: computes the output of the prepared call, laid out as the callers' tensors are, in the fewest steps.
    """

    prepared: Prepared | None = None
    calls: int = 0
    address: int = 0
    plan_anew: PlanAnew | None = None
    tokens_first: bool = False
    step: tuple[object, ...] | None = None
    alike: Any = None
    attend: Attend | None = None

    def recurs(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Return whether a step of decoding finds its keys where those of the first one lay."""
        if query.shape[2] >= costs.DECODED_QUERIES:
            return False
        self.address = self.address or key.data_ptr()
        return self.calls > 0 and self.address == key.data_ptr()

    def prepare(self, make: Callable[[], Prepared | None], at_once: bool = False) -> None:
        """Count a call that was not prepared; after the second one, or `at_once`, ask `make` for the prepared one."""
        self.calls += 1
        if self.calls == 2 or at_once:
            made = make()
            self.hold(made)
            # Kernels that serve keys of a fixed number best need not be those of a cache that grows.
            if self.step is not None and isinstance(made, ExactCall) and not made.plan.request.recurs:
                if len(_steps) == CALLS:
                    _steps.clear()
                _steps[self.step] = made, self.plan_anew

    def hold(self, made: Prepared | None) -> None:
        """Keep a prepared call."""
        attend = None
        if made is not None and not made.plan.request.return_lse:
            plain = self.plan_anew is None and not torch._C._is_any_autocast_enabled()
            attend = made.shortcut(self.tokens_first) if plain else self._attend
        self.prepared, self.attend = made, attend

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the prepared call with a caller's tensors; return what `Prepared` does, laid out as they are."""
        assert self.prepared is not None
        if self.tokens_first:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        output, lse = self.prepared(query, key, value, mask)
        if self.plan_anew is not None:
            if self.address == 0:
                self.address = key.data_ptr()
            elif key.data_ptr() == self.address and not torch.cuda.is_current_stream_capturing():
                made, self.plan_anew = self.plan_anew(query, key, value), None
                self.hold(made or self.prepared)
        return output.transpose(1, 2) if self.tokens_first else output, lse

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        return self.run(query, key, value, mask)[0]


@lru_cache(maxsize=CALLS)
def _slot(*facts: object) -> Slot:
    return Slot()


_at_hand: dict[tuple[object, ...], tuple[tuple[Callable[..., bool], Slot], ...]] = {}
"""By facts: prepared calls found of late, each with what compares tensors to its own at once, as PyTorch's compiler
does; the facts of `_slot` are a dozen of attributes."""


_steps: dict[tuple[object, ...], tuple[ExactCall, PlanAnew | None]] = {}
"""By `Slot.step`: a prepared step, and `Slot.plan_anew` of its slot."""


def forget() -> None:
    """Forget all prepared calls."""
    _slot.cache_clear()
    _at_hand.clear()
    _steps.clear()


registry.forgetters.append(forget)


def repeat(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, facts: tuple[object, ...]
) -> torch.Tensor | None:
    """Announce and run the prepared call that is at hand: the least that a call can take.

    What compares the tensors to a call's own sees subclasses, traces, transforms and autocast too, which all change the
    tensors' dispatch keys. Modes need not.

    Args:
        query, key, value, mask: as for `look_up`.
        facts: as for `look_up`, of a call without the LSE.

    Returns:
        The output; None if no such call is at hand.
    """
    try:
        near = _at_hand.get(facts)
        if near is None or _len_torch_dispatch_stack() or _len_torch_function_stack() or forward_ad._current_level >= 0:
            return None
        slot = None
        for check, one in near:
            if check(query, key, value) if mask is None else check(query, key, value, mask):
                addresses = query.data_ptr() | key.data_ptr() | value.data_ptr()
                slot = None if (addresses if mask is None else addresses | mask.data_ptr()) % ALIGNMENT else one
                break
    except (AttributeError, RuntimeError, TypeError):  # `look_up` tells them apart
        return None
    if slot is None or (call := slot.prepared) is None or (attend := slot.attend) is None:
        return None
    for listener in dispatch.plan_listeners:
        listener(call.plan)
    return attend(query, key, value, mask)


def look_up(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    facts: tuple[object, ...],
    grad: bool = False,
) -> Slot | None:
    """Return what is known of a call, or None if such a call is never prepared; put it at hand if it is prepared.

    Args:
        query, key, value, mask: the arguments, not checked yet.
        facts: all else that decides what runs: whether there is a mask, whether gradients are recorded, and the
            options. Each function that is called has facts of another form.
        grad: gradients of one of the arguments are wanted.
    """
    if modes_are_active():
        return None
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    try:
        if not is_plain(*tensors):
            return None
        state = grad, torch._C._is_any_autocast_enabled()
        slot = _slot(*[fact for x in tensors for fact in (x.shape, x.stride(), x.dtype, x.device)], *state, *facts)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # no strides, no address, no hash: whoever checks the arguments says what is wrong
        return None
    if slot.attend is not None and TensorGuards is not None:
        _put_at_hand(slot, tensors, facts)
    return slot


def follow_step(slot: Slot, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: object) -> None:
    """Prepare a step of decoding without a mask as one of about as many keys was, if one was, without planning it.

    Args:
        slot: of a call that `look_up` finds for the first time.
        query, key, value: its tensors, (batch, heads, tokens, channels), not checked yet.
        options: all else that decides what runs.
    """
    if query.dim() != 4 or query.shape[2] >= costs.DECODED_QUERIES or not query.dim() == key.dim() == value.dim():
        return
    (batch, heads, keys, channels), other = key.shape, value.shape
    if other[:3] != (batch, heads, keys):
        return
    facts = query.shape, batch, heads, channels, other[3], *(fact for x in (query, key, value) for fact in _kind(x))
    slot.step = (*facts, keys // STEP_KEYS, *options)
    latest, plan_anew = _steps.get(slot.step, (None, None))
    if latest is None or not latest.direct or not exact.takes_as_they_are(query, key, value, latest.scale):
        return
    plan = replace(latest.plan, request=replace(latest.plan.request, kv_len=keys))
    slot.calls, slot.plan_anew = 1, plan_anew
    slot.hold(replace(latest, plan=plan))


def _kind(x: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return x.dtype, x.device


def _put_at_hand(slot: Slot, tensors: tuple[torch.Tensor, ...], facts: tuple[object, ...]) -> None:
    """Let `repeat` compare a call's tensors to these first, and run the slot's call for them."""
    if facts not in _at_hand and len(_at_hand) == CALLS:
        return
    if slot.alike is None and len(set(map(id, tensors))) == len(tensors):  # guards take no tensor twice
        slot.alike = guards_of(tensors)
    if slot.alike is not None:
        others = [one for one in _at_hand.get(facts, ()) if one[1] is not slot]
        _at_hand[facts] = ((slot.alike.check, slot), *others[: AT_HAND - 1])


def guards_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Return what says by `check(*others)` whether others are like these in all but addresses, None if nothing can."""
    global TensorGuards
    if TensorGuards is None:
        return None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    try:
        alike = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return alike if alike.check(*tensors) else None
    except (RuntimeError, SystemError, TypeError) as error:  # another PyTorch's takes other arguments
        logger.info("prepared calls are found by their facts alone: %s: %s", type(error).__name__, error)
        TensorGuards = None
        return None


def modes_are_active() -> bool:
    """Return whether operators are traced, transformed, or seen by a mode."""
    return bool(
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def is_plain(*tensors: torch.Tensor) -> bool:
    """Return whether tensors are of no subclass, hold their values as they are, and begin at multiples of 16 bytes.

    Tensors without memory are not: those without elements, and zeros that no memory holds.
    """
    for x in tensors:
        if type(x) not in _PLAIN or x.is_neg():
            return False
        address = x.data_ptr()
        if address == 0 or address % ALIGNMENT:
            return False
    return True


def prepare_step(call: Call, plan: Plan, mask: torch.Tensor | None, slot: Slot, fallback: Fallback) -> Prepared | None:
    """Do as `prepare` for a call of a slot that may be a step behind a cache that grows."""
    found = prepare(call, plan, mask)
    if found is not None and plan.request.device_type == "cuda" and costs.is_growing_step(plan.request):
        recipe, options = call.recipe, (call.is_causal, call.causal_offset, call.scale)

        def plan_anew(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Prepared | None:
            again = Call(query, key, value, recipe, NO_MASK, *options)
            return prepare(again, dispatch.plan_of(again, fallback, True), None)

        slot.plan_anew = plan_anew
    return found


def is_step(plan: Plan) -> bool:
    """Return whether a plan is that of a step of decoding, whose length recurs in each layer: to prepare at once."""
    return plan.numerics == "exact" and plan.request.q_len < costs.DECODED_QUERIES


def prepare_exact(
    plan: Plan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    *,
    empties_rows: bool,
    tokens_first: bool = False,
    shared_rows: bool = False,
) -> ExactCall | None:
    """Prepare a call of exact attention.

    Args:
        plan: what is announced.
        query, key, value, mask, is_causal, scale: as in `exact.sdpa`; causality may come with a mask, but is then not
            prepared.
        empties_rows, tokens_first, shared_rows: see `ExactCall`.
    """
    if is_causal and mask is not None:
        return None
    gqa = query.shape[1] != key.shape[1]
    form = None if mask is None or gqa or empties_rows else exact.form_for_sdpa(mask, query, key.shape[2])
    direct = (mask is None or form is not None) and exact.takes_as_they_are(query, key, value, scale)
    if direct and scale is None and query.is_cuda:
        scale = query.shape[-1] ** -0.5
    cudnn = plan.kernel == "sdpa"
    return ExactCall(plan, is_causal, scale, gqa, direct, form, empties_rows, tokens_first, cudnn, shared_rows)


def prepare(call: Call, plan: Plan, mask: torch.Tensor | None, *, tokens_first: bool = False) -> Prepared | None:
    """Prepare a call without gradients, or return None if its launches depend on more than `look_up` compares.

    Args:
        call: the call.
        plan: what runs.
        mask: the caller's; a call with another, made of that, is not prepared.
        tokens_first: see `ExactCall`; low-bit kernels lay out their outputs so.
    """
    if call.is_empty or call.lengths is not None or call.mask.tensor is not mask:
        return None
    own = registry.get_exact(plan.kernel)
    if plan.numerics != "exact" or (own is not None and own.repeats):
        return _prepare_launches(call, plan) if call.query.is_cuda else None
    if isinstance(own, BoundExact):
        return BoundCall(plan, own.bind(call), own.tokens_first)
    if own is not None:
        return None
    if call.return_lse or (call.is_causal and call.causal_offset):
        return None
    return prepare_exact(
        *(plan, call.query, call.key, call.value, mask, call.is_causal, call.scale),
        empties_rows=True,
        tokens_first=tokens_first,
        shared_rows=plan.kernel != "sdpa" and dispatch.shares_rows(call),
    )


def _prepare_launches(call: Call, plan: Plan) -> TapedCall | None:
    own = registry.get_exact(plan.kernel)

    def rehearse(rehearsal: Rehearsal) -> TapedCall:
        inputs, stand_in = stand_in_of(rehearsal, call, get_recipe(plan.recipe))
        if own is not None:
            output, lse = own.attend(stand_in), None
        else:
            output, lse = get_forward(plan.kernel).attend(stand_in, get_quantizer(plan.quantizer))
        outputs = [output.transpose(1, 2).contiguous().transpose(1, 2)]
        if call.return_lse:
            assert lse is not None
            outputs.append(lse)
        tape = Tape(rehearsal, inputs, outputs, call.query.device)
        return TapedCall(plan, tape, call.return_lse)

    return attempt(rehearse, call.query.device)


def stand_in_of(rehearsal: Rehearsal, call: Call, recipe: Recipe) -> tuple[list[StandIn], Call]:
    """Return the stand-ins for a call's tensors, and the call with them and another recipe."""
    inputs = [rehearsal.stand_in(x) for x in (call.query, call.key, call.value)]
    mask = call.mask
    if mask.tensor is not None:
        inputs.append(rehearsal.stand_in(mask.tensor))
        mask = Mask.of(inputs[3], call.key.shape[2])
    stand_in = replace(call, query=inputs[0], key=inputs[1], value=inputs[2], mask=mask, recipe=recipe)
    return inputs, stand_in


def attempt(rehearse: Callable[[Rehearsal], Made], device: torch.device) -> Made | None:
    """Return what a rehearsal makes; None if the call cannot be rehearsed."""
    try:
        with torch.cuda.device(device), rehearsing() as rehearsal:
            return rehearse(rehearsal)
    except Exception as error:  # the call has run, and runs so again: its next failure shows
        logger.info("a call is not repeated but run anew each time: %s: %s", type(error).__name__, error)
        return None
