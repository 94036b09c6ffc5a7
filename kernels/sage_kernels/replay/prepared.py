"""Prepared calls: what a call's layout, options and settings decide is found out once, then repeated.

The second call that agrees in all of these is prepared, so a length that occurs once costs nothing; the first one where
gradients are wanted, and of steps of decoding. Launches are repeated only if they gave the first time what the call
itself gave. A prepared call makes no checks, for those of the first one hold, and runs no operator of torch.library: it
serves plain tensors outside of tracing, of transforms and of modes that want to see operators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import forward_ad

from ..dispatch import cost_model, registry, training_choice
from ..dispatch import run as dispatch
from ..dispatch.registry import Attend, BoundExact, Plan, get_forward, get_quantizer
from ..exact import sdpa
from ..spec.call import Call, Mask
from ..spec.recipe import Recipe, get_recipe
from . import driver
from .launch_plan import Tape
from .prepared_calls import BoundCall, ExactCall, Prepared, TapedCall
from .trace import Rehearsal, StandIn, rehearsing

logger = logging.getLogger(__name__)

CALLS = 512
"""Calls that are remembered; of more, those used least lately are forgotten."""
ALIGNMENT = 16
"""Bytes, of the addresses of prepared calls."""
MOST_BYTES = 2**28
"""Bytes of a call's results up to which it is prepared: to compare larger ones takes much memory, and such a call takes
the GPU longer than any host."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu")


def _private(name: str) -> Callable[[], object]:
    """Return a private function of PyTorch; without it, one whose results never agree, so that no call is found."""
    found: Callable[[], object] = getattr(torch._C, name, object)
    return found


_FLOAT32_PRODUCTS: tuple[Callable[[], object], ...] = (_private("_get_float32_matmul_precision"),)
if hasattr(torch._C, "_get_fp32_precision_getter"):  # from PyTorch 2.9 on, where the older one may raise
    _FLOAT32_PRODUCTS = tuple(partial(torch._C._get_fp32_precision_getter, x, "matmul") for x in ("cuda", "mkldnn"))
_FLAGS: tuple[Callable[[], object], ...] = (
    *_FLOAT32_PRODUCTS,
    torch.is_inference_mode_enabled,
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    _private("_get_cublas_allow_fp16_reduced_precision_reduction"),
    _private("_get_cublas_allow_bf16_reduced_precision_reduction"),
    _private("_get_math_sdp_allow_fp16_bf16_reduction"),
)
_priority_order = _private("_get_sdp_priority_order")


def settings() -> tuple[object, ...]:
    """Return the settings of this process and thread that can change what a call's arguments give, or its plan.

    Whatever is remembered of calls is remembered by these, beside the layout of tensors, the options, and whether
    gradients are wanted: whether gradients are recorded, inference mode, autocast and its dtype on each kind of device,
    the default dtype, deterministic algorithms, the precision of float32 products and of reductions in 16 bits, which
    of PyTorch's attention backends are allowed, and their order.

    What is not here has nothing remembered or found (`modes_are_active`: modes of dispatch and of functions, of which
    the default device is one; transforms of torch.func; tracing; forward-mode differentiation), or has everything
    forgotten (`registry.forgetters`: routing, kernels that are registered, tables of costs).
    """
    autocast = None
    if torch._C._is_any_autocast_enabled():
        autocast = tuple((torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in _AUTOCAST_DEVICES)
    order = _priority_order()
    order = tuple(order) if isinstance(order, list) else order
    return torch.is_grad_enabled(), autocast, order, *[flag() for flag in _FLAGS]


@dataclass(slots=True, eq=False)
class Slot:
    """Knowledge of calls that agree in all but addresses and values.

    Attributes:
        prepared: the call of tensors (batch, heads, tokens, channels), if it is prepared.
        calls: how many there were before.
        tokens_first: the callers' tensors are (batch, tokens, heads, channels), and their output too.
        attend: computes the output of the prepared call, laid out as the callers' tensors are, in the fewest steps.
    """

    prepared: Prepared | None = None
    calls: int = 0
    tokens_first: bool = False
    attend: Attend | None = None

    def prepare(self, make: Callable[[], Prepared | None], at_once: bool = False) -> None:
        """Count a call that was not prepared; after the second one, or `at_once`, ask `make` for the prepared one.

        While a graph is captured, nothing is prepared: its launches do not run, so their results tell nothing.
        """
        if is_capturing():
            return
        self.calls += 1
        if self.calls == 2 or at_once:
            self.prepared = made = make()
            # Under autocast the shortcut would be cast.
            if made is not None and not made.plan.request.return_lse and not torch._C._is_any_autocast_enabled():
                self.attend = made.shortcut(self.tokens_first)

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Announce and run the prepared call; return what `Prepared` does, laid out as the caller's tensors are."""
        assert self.prepared is not None
        dispatch.announce(self.prepared.plan)
        if self.attend is not None:
            return self.attend(query, key, value, mask), None
        if not self.tokens_first:
            return self.prepared(query, key, value, mask)
        output, lse = self.prepared(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
        return output.transpose(1, 2), lse


@lru_cache(maxsize=CALLS)
def _slot(*facts: object) -> Slot:
    return Slot()


forget = _slot.cache_clear
registry.forgetters.append(forget)


def look_up(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: tuple[object, ...],
    grad: bool = False,
) -> Slot | None:
    """Return what is known of a call, or None if such a call is never prepared.

    Args:
        query, key, value, mask: the arguments, not checked yet.
        options: all else that was given. Each function that is called has options of another form.
        grad: gradients of one of the arguments are wanted.
    """
    if modes_are_active():
        return None
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    try:
        if not is_plain(*tensors):
            return None
        checkpointed = grad and training_choice.is_checkpointed()
        return _slot(*layout_of(*tensors), grad, checkpointed, settings(), options)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # no strides, no address, no hash: whoever checks the arguments says what is wrong
        return None


def layout_of(*tensors: torch.Tensor) -> list[object]:
    """Return all facts of tensors but addresses and values that their calls depend on."""
    return [fact for x in tensors for fact in (x.shape, x.stride(), x.dtype, x.device)]


def is_capturing() -> bool:
    """Return whether a graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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

    Tensors without memory are not: those without elements, zeros that no memory holds, and those whose storage was
    freed, which begin at the byte that they would have in it.
    """
    for x in tensors:
        if type(x) not in _PLAIN or x.is_neg():
            return False
        address = x.data_ptr()
        if address % ALIGNMENT or address == x.storage_offset() * x.element_size():
            return False
    return True


def is_step(plan: Plan) -> bool:
    """Return whether a plan is that of a step of decoding, whose length recurs in each layer: to prepare at once."""
    return plan.numerics == "exact" and plan.request.q_len < cost_model.DECODED_QUERIES


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
    autocast: bool = True,
    shared_rows: bool = False,
) -> ExactCall | None:
    """Prepare a call of exact attention.

    Args:
        plan: what is announced.
        query, key, value, mask, is_causal, scale: as in `exact.sdpa`; causality may come with a mask, but is then not
            prepared.
        empties_rows, tokens_first, autocast, shared_rows: see `ExactCall`.
    """
    if is_causal and mask is not None:
        return None
    gqa = query.shape[1] != key.shape[1]
    form = None if mask is None or gqa or empties_rows else sdpa.form_for_sdpa(mask, query, key.shape[2])
    direct = (mask is None or form is not None) and sdpa.takes_as_they_are(query, key, value, scale)
    if direct and scale is None and query.is_cuda:
        scale = query.shape[-1] ** -0.5
    cudnn = plan.kernel == "sdpa"
    return ExactCall(
        *(plan, is_causal, scale, gqa, direct, form, empties_rows, tokens_first, cudnn, autocast, shared_rows)
    )


def prepare(
    call: Call,
    plan: Plan,
    mask: torch.Tensor | None,
    result: tuple[torch.Tensor, torch.Tensor | None],
    *,
    tokens_first: bool = False,
) -> Prepared | None:
    """Prepare a call without gradients, or return None if its launches depend on more than `look_up` compares.

    Args:
        call: the call.
        plan: what runs.
        mask: the caller's; a call with another, made of that, is not prepared.
        result: the output and the LSE that `dispatch.run` returned for it.
        tokens_first: see `ExactCall`; low-bit kernels lay out their outputs so.
    """
    if call.is_empty or call.lengths is not None or call.mask.tensor is not mask:
        return None
    own = registry.get_exact(plan.kernel)
    if plan.numerics != "exact" or (own is not None and own.repeats):
        return prepare_launches(call, plan, result) if call.query.is_cuda else None
    if own is not None:
        return BoundCall(plan, own.bind(call), own.tokens_first) if isinstance(own, BoundExact) else None
    if call.return_lse or (call.is_causal and call.causal_offset):
        return None
    return prepare_exact(
        *(plan, call.query, call.key, call.value, mask, call.is_causal, call.scale),
        empties_rows=True,
        tokens_first=tokens_first,
        autocast=False,
        shared_rows=plan.kernel != "sdpa" and dispatch.shares_rows(call),
    )


def prepare_launches(call: Call, plan: Plan, result: tuple[torch.Tensor, torch.Tensor | None]) -> TapedCall | None:
    """Prepare a call that kernels of ours serve; arguments as in `prepare`."""
    own = registry.get_exact(plan.kernel)

    def rehearse(rehearsal: Rehearsal) -> Tape:
        inputs, stand_in = stand_in_of(rehearsal, call, get_recipe(plan.recipe))
        if own is not None:
            output, lse = own.attend(stand_in), None
        else:
            output, lse = get_forward(plan.kernel).attend(stand_in, get_quantizer(plan.quantizer))
        outputs = [output.transpose(1, 2).contiguous().transpose(1, 2)]
        if call.return_lse:
            assert lse is not None
            outputs.append(lse)
        return Tape(rehearsal, inputs, outputs, call.query.device)

    mask, (output, lse) = call.mask.tensor, result
    tensors = [call.query, call.key, call.value, *([] if mask is None else [mask])]
    tape = repeatable(rehearse, tensors, [output, lse] if call.return_lse and lse is not None else [output])
    return None if tape is None else TapedCall(plan, tape, call.return_lse)


def stand_in_of(rehearsal: Rehearsal, call: Call, recipe: Recipe) -> tuple[list[StandIn], Call]:
    """Return the stand-ins for a call's tensors, and the call with them and another recipe."""
    inputs = [rehearsal.stand_in(x) for x in (call.query, call.key, call.value)]
    mask = call.mask
    if mask.tensor is not None:
        inputs.append(rehearsal.stand_in(mask.tensor))
        mask = Mask.of(inputs[3], call.key.shape[2])
    stand_in = replace(call, query=inputs[0], key=inputs[1], value=inputs[2], mask=mask, recipe=recipe)
    return inputs, stand_in


def repeatable(
    rehearse: Callable[[Rehearsal], Tape],
    tensors: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    results: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = list,
) -> Tape | None:
    """Return the launches of a call that has just run; None, with a logged reason, if they cannot be repeated.

    They are run once, and what they give is compared with what the call gave, for which the host waits. Calls with more
    than MOST_BYTES of results are not worth it.

    Args:
        rehearse: runs the call's host code with stand-ins, and returns its launches.
        tensors: the call's arguments, as the tape takes them.
        expected: what the call gave.
        results: (what the tape returns) -> what must be the same as `expected`.
    """
    device = tensors[0].device
    if sum(x.numel() * x.element_size() for x in expected) > MOST_BYTES:
        return None
    try:
        with torch.cuda.device(device), driver.relaxed_capture():
            with rehearsing() as rehearsal:
                tape = rehearse(rehearsal)
            found = results(tape.run(*[x.data_ptr() for x in tensors], arguments=tensors))
            if are_same(found, expected):
                return tape
            reason = "its repetition gives another output"
    except Exception as error:  # the call has run, and runs so again: its next failure shows
        reason = f"{type(error).__name__}: {error}"
    logger.info("a call is not repeated but run anew each time: %s", reason)
    return None


def are_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have the same bits, NaN included."""
    return len(found) == len(expected) and all(
        x.dtype == y.dtype and torch.equal(x.view(_BITS[x.element_size()]), y.view(_BITS[y.element_size()]))
        for x, y in zip(found, expected, strict=True)
    )
