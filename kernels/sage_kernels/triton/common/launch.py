"""Launches of Triton kernels: the only function that runs a kernel, or records its launch."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from ...replay import driver, trace
from ...replay.launch_plan import launch_now
from ...replay.trace import NotReplayableError
from ...runtime.cache_folder import announcing_if_slow
from . import triton_abi

logger = logging.getLogger(__name__)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
ON_AMD = tl.constexpr(torch.version.hip is not None)

# Parameters whose divisibility by 16 does not decide how wide a tile can be loaded: Triton need not compile another
# variant of a kernel if they are 1 or multiples of 16. Some kernels add `group`, which is a loop bound in the backward
# kernels, and `rows`, which is the stride of a tile in others.
UNSPECIALIZED = [
    *("tokens", "q_len", "kv_len", "causal_offset", "recent_start", "q_heads", "kv_heads", "heads"),
    *("blocks", "q_blocks", "kv_blocks", "delta_blocks", "operand_blocks"),
    *("first_sequence", "first_row", "first_block"),
    *("lse_stride_batch", "lse_stride_head", "lse_stride_token", "key_mask_stride", "query_mask_stride"),
    "spans_stride",
    *("tiles_stride_batch", "tiles_stride_head", "tiles_stride_row"),
    *("entries_stride_batch", "entries_stride_head", "entries_stride_row"),
]

ALIGNED_PARAMETERS = re.compile(r"^channels$|head_dim$|^(?!mask_).*stride_(batch|head|token|row)$")
"""Sizes and strides of the caller's tensors: loads are wide only if all of them are multiples of 16."""
DIVISIBILITY = 16  # of sizes, strides and addresses: Triton distinguishes multiples of it

TOKEN_AXES = ("batch", "head", "token", "channel")
MASK_AXES = ("batch", "head", "row", "column")

DEFAULT_OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True, "maxnreg": None}
"""Compiler options of `launch`."""

_recorded: ContextVar[list[RecordedLaunch] | None] = ContextVar("recorded", default=None)
_compiled: set[tuple[Any, ...]] = set()
_lock = threading.Lock()
_starting: list[threading.Thread] = []


@dataclass(frozen=True)
class RecordedLaunch:
    """A kernel launch: kernel[grid](**arguments, **options)."""

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def constants(self) -> dict[str, Any]:
        """Return the arguments that are compile-time constants."""
        return {name: value for name, value in self.arguments.items() if name.isupper()}


@contextlib.contextmanager
def recording() -> Iterator[list[RecordedLaunch]]:
    """Record launches instead of running them, so that a call's kernels can be compiled ahead of time.

    Tensors may be on any device, including the meta device.
    """
    launches: list[RecordedLaunch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def strides(name: str, values: Iterable[int], axes: tuple[str, ...] = TOKEN_AXES) -> dict[str, Any]:
    """Return strides as a kernel's arguments: for "output", output_stride_batch, …; for "", stride_batch, …."""
    prefix = f"{name}_stride" if name else "stride"
    return {f"{prefix}_{axis}": value for axis, value in zip(axes, values, strict=False)}


def launch(
    kernel: triton.JITFunction,
    grid: tuple[int, ...],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    enable_fp_fusion: bool = True,
    maxnreg: int | None = None,
    shared_percent: int | None = None,
    dependent: bool = False,
    **arguments: Any,
) -> None:
    """Run `kernel` on the current stream of the device of its first tensor; only note the launch if a call is traced.

    Args:
        kernel: a function of `triton.jit`, with compile-time parameters in capitals.
        grid: programs along up to three axes; nothing runs if an axis is 0.
        num_warps, num_stages, maxnreg, enable_fp_fusion: compiler options. Without fusion, a product and a sum are
            rounded separately, as in PyTorch.
        shared_percent: share of a multiprocessor's L1 that replayed launches prefer as shared memory (default: the
            driver's choice), which a later kernel may inherit.
        dependent: the kernel may start before the stream's previous kernel has ended, and waits for it itself
            (programmatic dependent launch).
        arguments: every parameter of the kernel, by name; the first is a tensor.
    """
    options = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": enable_fp_fusion,
        "maxnreg": maxnreg,
    }
    triton_abi.digest(kernel)
    kernel = fitting(kernel, arguments)
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(RecordedLaunch(kernel, grid, arguments, options))
        return
    if 0 in grid:
        return
    if (traced := trace.current()) is not None:
        if traced.compilations is None:
            packed = triton_abi.pack(kernel, grid, arguments, options, dependent)
            if shared_percent is not None:
                driver.prefer_shared_memory(packed.function, shared_percent)
            traced.launched(packed)
        else:
            run = partial(triton_abi.compile_kernel, kernel, grid, arguments, options)
            traced.compilations.append(partial(compile_now, run))
        return
    device = next(iter(arguments.values())).device
    with _launching(device):
        constants = (value for name, value in arguments.items() if name.isupper())
        key = (kernel, device, *constants, *options.values())
        with contextlib.nullcontext() if key in _compiled else _first_launch(kernel):
            if device.type != "cuda" or torch.version.hip is not None:
                kernel[grid](**arguments, **options)
            else:
                try:  # a C compiler makes Triton's own launcher for each signature, which takes a second
                    packed = triton_abi.pack(kernel, grid, arguments, options, dependent)
                    launch_now(packed, torch.cuda.current_device())
                except (AttributeError, NotReplayableError, OSError):  # also if the driver lacks a function
                    kernel[grid](**arguments, **options)
        _compiled.add(key)


@contextlib.contextmanager
def _first_launch(kernel: triton.JITFunction) -> Iterator[None]:
    start = time.perf_counter()
    _await_compiler()
    with announcing_if_slow():
        yield
    logger.info("%s: first launch took %.1f s with its compilation", kernel.__name__, time.perf_counter() - start)


def is_recording() -> bool:
    """Tell whether launches are recorded instead of run."""
    return _recorded.get() is not None


def fitting(kernel: triton.JITFunction, arguments: dict[str, Any]) -> triton.JITFunction:
    """Return the variant of a kernel for arguments: itself if the callers' values are aligned, else a general one.

    Triton would compile a variant for each set of aligned arguments, though one unaligned argument makes all loads
    narrow.
    """
    if not isinstance(kernel, triton.JITFunction):  # interpreted
        return kernel
    for name in _aligned_parameters(kernel):
        if arguments[name] % DIVISIBILITY:
            return _general(kernel)
    for x in arguments.values():
        if isinstance(x, torch.Tensor) and x.data_ptr() % DIVISIBILITY:
            return _general(kernel)
    return kernel


@cache
def _aligned_parameters(kernel: triton.JITFunction) -> tuple[str, ...]:
    specialized = (x.name for x in kernel.params if not (x.is_constexpr or x.do_not_specialize))
    return tuple(filter(ALIGNED_PARAMETERS.search, specialized))


@cache
def _general(kernel: triton.JITFunction) -> triton.JITFunction:
    """Return a kernel that is compiled once for all values of `ALIGNED_PARAMETERS`."""
    return type(kernel)(kernel.fn, do_not_specialize=[*kernel.do_not_specialize, *_aligned_parameters(kernel)])


@contextlib.contextmanager
def _launching(device: torch.device) -> Iterator[None]:
    """Let Triton load kernels and make tensor maps, also in threads new to the GPU, and while graphs are captured."""
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            if torch.version.hip is None:
                driver.ensure_context(torch.cuda.current_device())
                stack.enter_context(driver.relaxed_capture())
        yield


def start_compiler() -> None:
    """Begin in threads the steps that Triton's first compilation of a process takes one by one, and return at once.

    A C compiler builds Triton's driver, and Triton's files are digested for its cache keys. A step that fails here
    fails again in Triton, with its error.
    """
    with _lock:
        if not _starting and not INTERPRETED:
            for work in (triton_abi.build_driver, triton_abi.digest_compiler):
                _starting.append(threading.Thread(target=work, name=f"sage-kernels-{work.__name__}"))
                _starting[-1].start()


def _await_compiler() -> None:
    """Wait until Triton can compile immediately: threads that ask simultaneously would each repeat its first steps."""
    start_compiler()
    for thread in _starting:
        thread.join()


def compile_now(run: Callable[[], object]) -> None:
    """Compile a kernel by `run`, in any thread."""
    _await_compiler()
    with announcing_if_slow():
        try:
            run()
        except SystemError:  # from Python before 3.12.2, if another thread parses at the same time
            run()
