"""Prepared calls: what a call's shapes, strides, dtypes, device and options decide is found out once, then repeated.

The second call that agrees in all of these is prepared, so a length that occurs once costs nothing. A prepared call
makes no checks, for those of the first one hold, and runs no operator of torch.library: it serves plain tensors outside
of tracing, of transforms and of modes that want to see operators.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from . import costs, dispatch, empty_rows, exact, registry
from .call import NO_MASK, Call, Mask
from .dispatch import without_cudnn
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
AT_HAND, FINDS = 8, 64
"""Calls with the same options that are at hand; and after how many finds another one is put there again."""
ALIGNMENT = 16
"""Bytes, of the addresses of prepared calls."""

Made = TypeVar("Made")

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Prepared(Protocol):
    """Call that is ready to be repeated."""

    @property
    def plan(self) -> Plan:
        """Return what runs."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, lse), the latter None if it is not wanted, for arguments that `find` finds alike."""


@dataclass(slots=True, eq=False)
class Slot:
    """Knowledge of calls that agree in all but addresses and values.

    Attributes:
        prepared: the call, if it is prepared.
        calls: how many there were before.
        announce: is told the plan of each.
        address: where the keys of the first step of decoding lay; 0 before one.
        tokens_first: the calls' tensors are (batch, tokens, heads, channels).
        found: how often the prepared call was found by its facts.
    """

    prepared: Prepared | None = None
    calls: int = 0
    announce: Callable[[Plan], None] = dispatch.announce
    address: int = 0
    tokens_first: bool = False
    found: int = 0

    def recurs(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Return whether a step of decoding finds its keys where those of the first one lay."""
        if query.shape[2] >= costs.DECODED_QUERIES:
            return False
        self.address = self.address or key.data_ptr()
        return self.calls > 0 and self.address == key.data_ptr()

    def prepare(
        self,
        make: Callable[[], Prepared | None],
        announce: Callable[[Plan], None] = dispatch.announce,
        at_once: bool = False,
    ) -> None:
        """Count a call that was not prepared; after the second one, or `at_once`, ask `make` for the prepared one."""
        self.calls += 1
        if self.calls == 2 or at_once:
            made = make()
            self.prepared = TokensFirstCall(made) if made is not None and self.tokens_first else made
            self.announce = announce


@lru_cache(maxsize=CALLS)
def _slot(*facts: object) -> Slot:
    return Slot()


_at_hand: dict[tuple[bool, tuple[object, ...]], tuple[tuple[Any, Slot], ...]] = {}
"""By whether there is no mask, and the options: prepared calls found of late, each with what compares tensors to its
own at once, as the compiler of PyTorch does; the facts of `_slot` are a dozen of attributes."""


def forget() -> None:
    """Forget all prepared calls."""
    _slot.cache_clear()
    _at_hand.clear()


registry.forgetters.append(forget)


def find(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *options: object
) -> Slot | None:
    """Return what is known of a call, or None if such a call is never prepared.

    Args:
        query, key, value, mask: the arguments, not checked yet.
        options: all else that decides what runs; the first one names the function that is called.
    """
    if modes_are_active():
        return None
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    kind = mask is None, options
    try:
        for alike, slot in _at_hand.get(kind, ()):
            if alike.check(*tensors):
                addresses = query.data_ptr() | key.data_ptr() | value.data_ptr()
                if mask is not None:
                    addresses |= mask.data_ptr()
                if addresses % ALIGNMENT == 0:
                    return slot
        if not is_plain(*tensors):
            return None
        slot = _slot(*[fact for x in tensors for fact in (x.shape, x.stride(), x.dtype, x.device)], *options)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # no strides, no address, no hash: whoever checks the arguments says what is wrong
        return None
    if slot.prepared is not None:
        slot.found += 1
        if slot.found % FINDS == 1:
            _put_at_hand(slot, tensors, kind)
    return slot


def _put_at_hand(slot: Slot, tensors: tuple[torch.Tensor, ...], kind: tuple[bool, tuple[object, ...]]) -> None:
    """Let `find` compare a call's tensors to these first, and return the slot for them."""
    global TensorGuards
    if TensorGuards is None or (kind not in _at_hand and len(_at_hand) == CALLS):
        return
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    try:
        alike = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        if not alike.check(*tensors):
            return
    except (RuntimeError, SystemError, TypeError) as error:  # another PyTorch's takes other arguments
        logger.info("prepared calls are found by their facts alone: %s: %s", type(error).__name__, error)
        TensorGuards = None
        return
    _at_hand[kind] = ((alike, slot), *_at_hand.get(kind, ())[: AT_HAND - 1])


def modes_are_active() -> bool:
    """Return whether operators are traced, transformed, or seen by a mode."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
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


@dataclass(slots=True, eq=False)
class ExactCall:
    """Call of exact attention without the LSE.

    Attributes:
        plan: as in `Prepared`.
        is_causal, scale, enable_gqa: as in `exact.sdpa`.
        direct: PyTorch's function takes the arguments as they are.
        empties_rows: rows that may attend to no key are set to 0.
        tokens_first: the output is laid out as (batch, tokens, heads, channels).
        cudnn: PyTorch may take its cuDNN backend.
        shared_rows: the single queries that share keys and values are rows of one head (`dispatch.shares_rows`).
    """

    plan: Plan
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    direct: bool
    empties_rows: bool
    tokens_first: bool
    cudnn: bool
    shared_rows: bool

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """Attend."""
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(query.device.type):
            with torch.autocast(query.device.type, enabled=False):
                return self(query, key, value, mask)
        if self.direct and self.cudnn:
            output = F.scaled_dot_product_attention(
                query, key, value, is_causal=self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
            )
        else:
            attend = self._attend_directly if self.direct else self._attend
            output = attend(query, key, value, mask) if self.cudnn else without_cudnn(attend, query, key, value, mask)
        return output.transpose(1, 2).contiguous().transpose(1, 2) if self.tokens_first else output, None

    def _attend_directly(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa
        )

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if mask is not None and mask.dim() < 2:
            mask = mask[(None,) * (2 - mask.dim())]
        batch, q_heads, q_len, _ = query.shape
        gqa = self.enable_gqa and not self.shared_rows
        if self.shared_rows:
            query = query.reshape(batch, key.shape[1], -1, query.shape[3])
        attend = empty_rows.attend if self.empties_rows else exact.sdpa
        output = attend(query, key, value, mask=mask, is_causal=self.is_causal, scale=self.scale, enable_gqa=gqa)
        return output.reshape(batch, q_heads, q_len, -1) if self.shared_rows else output


@dataclass(slots=True, eq=False)
class BoundCall:
    """Call of exact attention by a kernel that cannot be rehearsed (`registry.BoundExact`).

    Attributes:
        plan: as in `Prepared`.
        attend, tokens_first: what the kernel has bound, and the layout of that function's tensors.
    """

    plan: Plan
    attend: Attend
    tokens_first: bool

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """Attend."""
        if not self.tokens_first:
            return self.attend(query, key, value), None
        output = self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return output.transpose(1, 2), None


@dataclass(slots=True, eq=False)
class TapedCall:
    """Call without gradients by kernels whose launches were rehearsed.

    Attributes:
        plan: as in `Prepared`.
        tape: its launches; the arguments are Q, K, V and the mask, if there is one.
        return_lse: the LSE is wanted.
    """

    plan: Plan
    tape: Tape
    return_lse: bool

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend."""
        addresses = [query.data_ptr(), key.data_ptr(), value.data_ptr()]
        if mask is not None:
            addresses.append(mask.data_ptr())
        output, *others = self.tape.run(*addresses, arguments=(query, key, value, mask))
        return output, others[0] if self.return_lse else None


@dataclass(slots=True, eq=False)
class GrowingCall:
    """Step of decoding behind a cache that may grow: once its keys lie where the first ones lay, it is planned anew.

    Attributes:
        prepared: the call as it is prepared so far.
        address: where the first keys lay; 0 once it is planned anew.
        recipe, is_causal, causal_offset, scale: as in `Call`.
        fallback: as in `registry.select`.
    """

    prepared: Prepared
    address: int
    recipe: Recipe
    is_causal: bool
    causal_offset: int
    scale: float
    fallback: Fallback

    @property
    def plan(self) -> Plan:
        """Return what runs."""
        return self.prepared.plan

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend."""
        found = self.prepared(query, key, value, mask)
        if key.data_ptr() == self.address and not torch.cuda.is_current_stream_capturing():
            self.address = 0
            call = Call(query, key, value, self.recipe, NO_MASK, self.is_causal, self.causal_offset, self.scale)
            self.prepared = prepare(call, dispatch.plan_of(call, self.fallback, True), None) or self.prepared
        return found


def prepare_step(call: Call, plan: Plan, mask: torch.Tensor | None, slot: Slot, fallback: Fallback) -> Prepared | None:
    """Do as `prepare` for a call that may be a step behind a cache that grows."""
    found = prepare(call, plan, mask)
    if found is None or plan.request.device_type != "cuda" or not costs.is_growing_step(plan.request):
        return found
    return GrowingCall(*(found, slot.address, call.recipe, call.is_causal, call.causal_offset, call.scale), fallback)


@dataclass(slots=True, eq=False)
class TokensFirstCall:
    """Call whose tensors are (batch, tokens, heads, channels), and its output too.

    Attributes:
        call: the call of their transposes.
    """

    call: Prepared

    @property
    def plan(self) -> Plan:
        """Return what runs."""
        return self.call.plan

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend."""
        call = self.call
        if isinstance(call, BoundCall) and call.tokens_first:
            return call.attend(query, key, value), None
        if not isinstance(call, TapedCall):  # which reads addresses alone
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        output, lse = call(query, key, value, mask)
        return output.transpose(1, 2), lse


def as_planned(call: Prepared) -> Prepared:
    """Return the call of tensors (batch, heads, tokens, channels) that was just prepared, to run as it was planned.

    The keys of the first step of decoding lie where the first ones lay: that tells nothing.
    """
    call = call.call if isinstance(call, TokensFirstCall) else call
    return call.prepared if isinstance(call, GrowingCall) else call


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
    direct = mask is None and exact.takes_as_they_are(query, key, value, scale)
    if direct and scale is None and query.is_cuda:
        scale = query.shape[-1] ** -0.5
    cudnn = plan.kernel == "sdpa"
    return ExactCall(plan, is_causal, scale, gqa, direct, empties_rows, tokens_first, cudnn, shared_rows)


def prepare(call: Call, plan: Plan, mask: torch.Tensor | None, *, tokens_first: bool = False) -> Prepared | None:
    """Prepare a call without gradients, or return None if its launches depend on more than `find` compares.

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
    if own is not None:
        return BoundCall(plan, own.bind(call), own.tokens_first) if isinstance(own, BoundExact) else None
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
