"""FlashAttention 3 as a kernel of exact attention, if an installed package provides its operator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch

from ..dispatch.kernels import AttendToPrefix, ExactKernel
from ..dispatch.registry import get_exact, register_exact
from ..dispatch.request import Request
from ..replay import driver, trace
from ..spec.call import Call
from ..spec.layout import ceil_div

logger = logging.getLogger(__name__)

PACKAGES = ("flash_attn_3", "fa3_fwd")
"""Packages whose module `_C` defines the operator `fwd`, under the package's name."""
MAX_HEAD_DIM = 256
ROWS, PROGRAMS = 128, 132
"""Queries times heads that share keys in one program, and programs below which the operator divides keys."""
SCHEDULER = "get_scheduler_metadata"
"""Operator that divides a call's work beforehand, of at most SCHEDULED_AT_ONCE batch elements in one block."""
SCHEDULED_AT_ONCE = 992
MOST_SIZES = 1024  # sizes of calls whose schedules are remembered
WITHOUT_FLOAT16 = "FLASHATTENTION_DISABLE_FP16"
"""Flag of a package's build, in its module of settings, that leaves out kernels for float16."""


class FlashAttention3:
    """FlashAttention 3's forward pass, without masks."""

    name = "fa3"
    traceable = False

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request; "" if it does."""
        if reason := _unsupported(request):
            return reason
        if request.mask != "none":
            return "no masks"
        if request.shifted or (request.is_causal and request.q_len > request.kv_len):
            return "a causal mask must be aligned lower right"
        if request.is_causal and not request.lower_right and request.q_len != request.kv_len:
            return "a causal mask must be aligned lower right"
        return ""

    def attend(self, call: Call) -> torch.Tensor:
        """Return the output."""
        return self.replay_function(call)(call.query, call.key, call.value)

    def replay_function(self, call: Call) -> Callable[..., torch.Tensor]:
        """Return a function of (query, key, value), laid out as in the call, that attends with its options."""
        operator, is_negative = _operator(), call.scale < 0
        assert operator is not None
        options = {"softmax_scale": abs(call.scale), "is_causal": call.is_causal, "num_splits": _splits(call)}

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            _ensure_context(query)
            query = (-query if is_negative else query).transpose(1, 2)
            output: torch.Tensor = operator(query, key.transpose(1, 2), value.transpose(1, 2), **options)[0]
            return output.transpose(1, 2)

        return attend


def _ensure_context(x: torch.Tensor) -> None:
    """Give a thread that has not used the GPU a context, and the GPU: else the operator's tensor maps fail."""
    if x.is_cuda:
        driver.ensure_context(x.get_device())


def _splits(call: Call) -> int:
    """Return into how many parts the operator divides keys: 0 (the operator decides) or 1."""
    blocks = ceil_div(call.q_len * call.query.shape[1], call.key.shape[1] * ROWS)
    return 0 if call.batch * call.key.shape[1] * blocks < PROGRAMS else 1


class NonprefixKernel(ExactKernel, Protocol):
    """Kernel of exact attention that leaves some batch elements to another kernel."""

    def attend_nonprefix(self, call: Call, attend_to_prefix: AttendToPrefix, row_blocks: int) -> torch.Tensor:
        """Attend; see `triton.nonprefix_forward.attend_nonprefix`."""


class PaddedFlashAttention3:
    """FlashAttention 3's forward pass with a key-padding mask, for the batch elements whose keys come first.

    It reads the number of keys from the GPU's memory, and takes no mask. The GPU finds these elements, and another
    kernel computes all others: the host never waits for a mask's values, and no mask can make the output wrong.
    """

    name = "fa3_padded"
    traceable = True

    def __init__(self, nonprefix_kernel: NonprefixKernel) -> None:
        """Let `nonprefix_kernel` compute the other batch elements."""
        self._nonprefix_kernel = nonprefix_kernel

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request; "" if it does."""
        if request.mask != "keys" or request.is_causal:
            return "needs a key-padding mask, without causality"
        return _unsupported(request) or self._nonprefix_kernel.unsupported(request)

    def attend(self, call: Call) -> torch.Tensor:
        """Return the output."""
        return self._nonprefix_kernel.attend_nonprefix(call, _attend_to_prefix, _row_blocks(call))


def register_kernels() -> None:
    """Register the kernels."""
    register_exact(FlashAttention3())
    register_exact(PaddedFlashAttention3(cast(NonprefixKernel, get_exact("masked_forward"))))


def _attend_to_prefix(
    call: Call,
    q_lengths: torch.Tensor | None,
    kv_lengths: torch.Tensor,
    schedule: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """Write the output of some batch elements; see `kernels.AttendToPrefix`."""
    of_rows = q_lengths if schedule is None else schedule
    assert of_rows is not None
    run = partial(_write_prefix, scale=call.scale, scheduled=schedule is not None)
    tensors = call.query, call.key, call.value, output, of_rows, kv_lengths
    if (traced := trace.current()) is None:
        run(*tensors)
    else:
        traced.ran(run, *tensors)


def _write_prefix(*tensors: torch.Tensor, scale: float, scheduled: bool) -> None:
    """Let the operator write the output of some batch elements over their first keys.

    Args:
        tensors: query, key, value and output, each (batch, heads, tokens, channels); a schedule or the number of
            queries, and the numbers of keys.
        scale: as in `Call`.
        scheduled: whether a schedule is given.
    """
    query, key, value, output = (x.transpose(1, 2) for x in tensors[:4])
    of_rows, kv_lengths = tensors[4:]
    options = {"seqused_k": kv_lengths, "scheduler_metadata" if scheduled else "seqused_q": of_rows}
    operator = _operator()
    assert operator is not None
    _ensure_context(query)
    operator(query, key, value, out=output, softmax_scale=scale, num_splits=1, **options)


_row_blocks_by_size: dict[tuple[Any, ...], int] = {}


def _row_blocks(call: Call) -> int:
    """Return the operator's blocks of rows in one batch element; 0 if the operator makes its schedule itself.

    The operator's own schedule takes one more launch, which waits for the lengths. If no keys are divided, it differs
    only in the order of the elements. The number of blocks is read from the GPU's memory once for calls of a size, so
    never while a graph is captured.
    """
    if call.batch > SCHEDULED_AT_ONCE:
        return 0
    device = call.query.device
    sizes = call.q_len, call.kv_len, call.query.shape[1], call.key.shape[1], call.query.shape[3]
    if (row_blocks := _row_blocks_by_size.get(key := (*sizes, device))) is None:
        if torch.cuda.is_current_stream_capturing():
            return 0
        with trace.keeping(), driver.relaxed_capture() if device.type == "cuda" else nullcontext():
            takes_schedules = _takes_schedules(device)
            row_blocks = int(_schedule((1, *sizes), call.kv_len, None, device=device)[4]) if takes_schedules else 0
        if len(_row_blocks_by_size) >= MOST_SIZES:
            _row_blocks_by_size.clear()
        _row_blocks_by_size[key] = row_blocks
    return row_blocks


@lru_cache(maxsize=16)
def _takes_schedules(device: torch.device) -> bool:
    """Return whether an operator makes schedules of `kernels.AttendToPrefix`, and an operator follows them."""
    if not hasattr(_operators(), SCHEDULER):
        return False
    try:
        return _follows_schedules(device)
    except (RuntimeError, TypeError) as error:  # another version's operator takes other arguments
        name = type(error).__name__
        logger.info("FlashAttention 3 schedules its own calls, because sage-hf cannot: %s: %s", name, error)
        return False


def _follows_schedules(device: torch.device) -> bool:
    sizes, ones, numbers = (4, 640, 1024, 4, 2, 64), [1] * 4, [0, 1, 2, 3]
    full, short, empty = (_schedule(sizes, *of, device=device).tolist() for of in ((1024, None), (1, None), (1024, 0)))
    blocks = full[4]
    begins_alike = full[:8] == short[:8] == [*ones, *[blocks] * 4]
    is_numbered = sorted(full[8:12]) == sorted(short[8:12]) == numbers
    if not (begins_alike and is_numbered) or full[12:] != [0] or empty[4:8] != [0] * 4 or blocks == 0:
        return False
    # The second element must stay unchanged, with a schedule and with lengths.
    drawn: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    inputs = [torch.randn(*size, 64, **drawn).bfloat16() for size in ((4, 4, 640), (4, 2, 1024), (4, 2, 1024))]
    kv_lengths, q_lengths, schedule = (
        torch.tensor(x, dtype=torch.int32, device=device)
        for x in ([1000, 0, 17, 640], [640, 0, 640, 640], [*ones, blocks, 0, blocks, blocks, *numbers, 0])
    )
    outputs = [torch.full_like(inputs[0], 7.0) for _ in range(2)]
    _write_prefix(*inputs, outputs[0], q_lengths, kv_lengths, scale=0.1, scheduled=False)
    _write_prefix(*inputs, outputs[1], schedule, kv_lengths, scale=0.1, scheduled=True)
    return torch.equal(*outputs) and bool((outputs[0][1] == 7.0).all())


def _schedule(sizes: tuple[int, ...], kv_length: int, q_length: int | None, *, device: torch.device) -> torch.Tensor:
    """Return the operator's schedule of a call whose elements all have these lengths.

    Args:
        sizes: batch, q_len, kv_len, q_heads, kv_heads and head_dim.
        kv_length, q_length: the lengths; None: q_len.
        device: the GPU.
    """

    def all_of(length: int) -> torch.Tensor:
        return torch.full((sizes[0],), length, dtype=torch.int32, device=device)

    used = None if q_length is None else all_of(q_length)
    options = {"seqused_q": used, "num_splits": 1}
    scheduler = getattr(_operators(), SCHEDULER)
    schedule: torch.Tensor = scheduler(*sizes, sizes[-1], torch.bfloat16, all_of(kv_length), **options)
    return schedule


def _unsupported(request: Request) -> str:
    """Return the limit, shared by all calls of the operator, that the request exceeds; "" if there is none."""
    if request.device_type != "cuda" or request.capability != (9, 0):
        return "needs compute capability 9.0 (Hopper)"
    if request.dtype not in (torch.float16, torch.bfloat16) or not request.aligned:
        return "needs float16 or bfloat16, aligned to 16 bytes"
    if request.head_dim != request.v_head_dim or request.head_dim > MAX_HEAD_DIM:
        return f"needs one head_dim of at most {MAX_HEAD_DIM}"
    if request.packed or request.return_lse:
        return "no packed sequences and no LSE"
    if _operator() is None:
        return "FlashAttention 3 is not installed"
    return "built without float16" if request.dtype == torch.float16 and not _takes_float16() else ""


def is_installed() -> bool:
    """Return whether a loadable package provides the operator."""
    return _operator() is not None


@lru_cache(maxsize=1)
def _operators() -> Any:
    """Return the operators of the first loadable package; None without a package."""
    for package in PACKAGES:
        if find_spec(package) is None:
            continue
        try:
            import_module(f"{package}._C")
            operators = getattr(torch.ops, package)
            _ = operators.fwd
            return operators
        except (AttributeError, ImportError, OSError) as error:  # built for another PyTorch
            logger.info("FlashAttention 3 of %s cannot be loaded: %s", package, error)
    return None


def _operator() -> Callable[..., Any] | None:
    """Return the operator that attends; None without a package."""
    operators = _operators()
    return None if operators is None else getattr(operators.fwd, "default", operators.fwd)


@lru_cache(maxsize=1)
def _takes_float16() -> bool:
    """Return whether the installed packages were built with kernels for float16, as far as they tell."""
    for module in ("flash_attn_config", *(f"{package}_config" for package in PACKAGES)):
        if find_spec(module) is not None:
            flags = getattr(import_module(module), "CONFIG", {}).get("build_flags", {})
            if flags.get(WITHOUT_FLOAT16):
                return False
    return True
