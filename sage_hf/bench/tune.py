"""Measurement of what attention calls cost on one GPU, for the tables of `sage_kernels.costs`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FuturesTimeoutError
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from multiprocessing import get_context
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf.app.planning import nominal_request
from sage_hf.bench.fit_costs import Measured, fit
from sage_kernels import costs, dispatch, ops
from sage_kernels.call import Call, Mask
from sage_kernels.costs import Sizes, Table
from sage_kernels.recipe import get_recipe
from sage_kernels.registry import KernelUnavailableError, routing, select, set_routing
from sage_kernels.toolchain import triton_version

Kind = Literal["none", "causal", "keys", "bool", "additive"]
RECIPES = ("sage3", "sage2", "sage1")
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
assert tuple(BACKENDS) == costs.BACKENDS

SECONDS = 55.0
WARMING_SECONDS = 25.0
WARMING_PROCESSES = 8

# A runner is timed for about this long at each point, in replays of one graph of several calls.
TIMED_MS = 1.5
REPLAYS = 3
MAX_CALLS = 20
MAX_OPERATIONS = 4e12


@dataclass(frozen=True)
class Point:
    """Call to measure: bfloat16, laid out as (batch, tokens, heads, head_dim) in memory, as models make it."""

    sizes: Sizes
    kind: Kind = "none"

    @property
    def mask(self) -> str:
        """Return the kind of mask, as `call.Mask` has it."""
        return "none" if self.kind == "causal" else self.kind

    @property
    def causal(self) -> bool:
        """Return whether the call is causal."""
        return self.kind == "causal"

    @property
    def operations(self) -> float:
        """Return the call's operations, those of masked scores included."""
        sizes = self.sizes
        return 4.0 * sizes.batch * sizes.q_heads * sizes.q_len * sizes.kv_len * sizes.head_dim


def points() -> list[Point]:
    """Return the calls that are measured, the most telling ones first."""
    found: list[Point] = []

    def add(kind: Kind, batch: int, heads: int, q_len: int, kv_len: int, head_dim: int, group: int = 1) -> None:
        point = Point(Sizes(batch, heads, heads // group, q_len, kv_len, head_dim), kind)
        if point.operations <= MAX_OPERATIONS:
            found.append(point)

    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    for head_dim in (128, 64):
        for n, (batch, heads) in itertools.product((256, *lengths, 3072), ((1, 24), (4, 32))):
            add("none", batch, heads, n, n, head_dim)
        for q_len, kv_len in ((1024, 77), (4096, 512), (4096, 1024), (17776, 256), (300, 8192)):
            add("none", 1, 24, q_len, kv_len, head_dim)
        for n in lengths:
            add("causal", 1, 32, n, n, head_dim, group=4)
            add("causal", 4, 16, n, n, head_dim)
        for n, (batch, heads) in itertools.product(lengths, ((1, 24), (8, 12))):
            add("keys", batch, heads, n, n, head_dim)
    for kind, head_dim, n in itertools.product(("bool", "additive"), (64, 128), (1024, 2048, 4096)):
        add(kind, 2, 16, n, n, head_dim)
    for head_dim, n in itertools.product((256, 80, 96, 32), (1024, 4096, 8192)):
        add("none", 2, 16, n, n, head_dim)
    return found


def tune(device: torch.device, progress: Callable[[str], None] = print) -> Table:
    """Measure a GPU in about a minute, and return its table; `Table.write` stores it.

    Args:
        device: a CUDA device that does nothing else meanwhile.
        progress: called with a text for each stage.

    Raises:
        ValueError: device is no CUDA device, or nothing could be measured.
    """
    if device.type != "cuda":
        raise ValueError(f"costs are measured on a GPU, and {device} is none: pass --device cuda")
    start, todo = time.perf_counter(), points()
    progress("compiling kernels")
    compile_kernels(device, todo, WARMING_SECONDS)
    progress(f"measuring {len(todo)} calls")
    found = list(measure_points(device, todo, SECONDS - (time.perf_counter() - start)))
    if not found:
        raise ValueError("nothing could be measured on this GPU in time")
    properties = torch.cuda.get_device_properties(device)
    curves = fit(found, properties.multi_processor_count)
    return Table(properties.name, (properties.major, properties.minor), versions(), curves)


def versions() -> dict[str, str]:
    """Return what a table's figures depend on beside the GPU."""
    triton = triton_version()
    return {
        "torch": torch.__version__,
        "triton": ".".join(map(str, triton)) if triton else "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "date": date.today().isoformat(),
    }


def compile_kernels(device: torch.device, todo: Sequence[Point], seconds: float) -> None:
    """Compile the kernels that the points run, in several processes, so that they are found in caches on disk."""
    jobs = {
        (recipe, point.kind, point.sizes.head_dim, point.sizes.kv_len): point for point in todo for recipe in RECIPES
    }
    with ProcessPoolExecutor(WARMING_PROCESSES, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_run_once, device, point, key[0]) for key, point in jobs.items()]
        with suppress(FuturesTimeoutError):
            for future in as_completed(futures, timeout=seconds):
                future.exception()
        pool.shutdown(wait=True, cancel_futures=True)


def _run_once(device: torch.device, point: Point, recipe: str) -> None:
    with torch.no_grad(), suppress(KernelUnavailableError):
        small = replace(point, sizes=replace(point.sizes, batch=1, q_heads=1, kv_heads=1))
        prepare(device, small)(recipe)()
        torch.cuda.synchronize(device)


def measure_points(device: torch.device, todo: Sequence[Point], seconds: float) -> Iterator[Measured]:
    """Time each point's runners, until the seconds are over; a runner that refuses a point is left out."""
    end = time.perf_counter() + seconds
    routed = routing()
    set_routing(False)
    try:
        with torch.cuda.device(device), torch.no_grad():
            _heat(device)
            for point in todo:
                if time.perf_counter() > end:
                    return
                call_of = prepare(device, point)
                for name in (*RECIPES, *BACKENDS):
                    try:
                        runner = name if name in BACKENDS else runner_of(device, point, name)
                        us = gpu_us(call_of(name))
                    except (RuntimeError, ValueError):  # not for such calls, or no memory
                        torch.cuda.synchronize(device)
                        continue
                    yield Measured(runner, point.mask, point.causal, point.sizes, us)
    finally:
        set_routing(routed)


def prepare(device: torch.device, point: Point) -> Callable[[str], Callable[[], object]]:
    """Draw a point's tensors; return what makes a call of them by a recipe's name or an exact backend's."""
    sizes = point.sizes
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, tokens: int) -> Tensor:
        shape = (sizes.batch, tokens, heads, sizes.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2)

    query = normal(sizes.q_heads, sizes.q_len)
    key, value = normal(sizes.kv_heads, sizes.kv_len), normal(sizes.kv_heads, sizes.kv_len)
    mask = _mask(device, point, generator)
    call = Call(
        query,
        key,
        value,
        get_recipe("exact"),
        Mask.of(mask, sizes.kv_len),
        is_causal=point.causal,
        scale=sizes.head_dim**-0.5,
    )

    def exactly(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            dispatch.attend(call, "native")

    def of(name: str) -> Callable[[], object]:
        if name in BACKENDS:
            return lambda: exactly(BACKENDS[name])
        return lambda: ops.attention(
            query, key, value, mask=mask, is_causal=point.causal, recipe=name, fallback="error"
        )

    return of


def _mask(device: torch.device, point: Point, generator: torch.Generator) -> Tensor | None:
    """Return a mask of the point's kind that lets most scores live, as padding and learnt biases do."""
    sizes = point.sizes
    if point.kind == "keys":
        lengths = torch.arange(sizes.batch, device=device) % 4 * (sizes.kv_len // 8) + sizes.kv_len // 2
        return (torch.arange(sizes.kv_len, device=device) < lengths[:, None])[:, None, None]
    shape = (1, 1, sizes.q_len, sizes.kv_len)
    if point.kind == "bool":
        return torch.rand(shape, generator=generator, device=device) < 0.9
    if point.kind == "additive":
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    return None


def runner_of(device: torch.device, point: Point, recipe: str) -> str:
    """Return the runner's name in a table of a recipe's kernels for a point.

    Raises:
        KernelUnavailableError: the recipe is not native here.
    """
    facts = {**asdict(point.sizes), "mask": point.mask, "is_causal": point.causal, "grad": False}
    plan = select(nominal_request(recipe, device, **facts), "error")
    return costs.low_bit_runner(recipe, plan.kernel, plan.quantizer)


def gpu_us(call: Callable[[], object]) -> float:
    """Return the GPU's time for a call in microseconds, without the host's: replays of a graph of several calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    count = max(1, min(MAX_CALLS, int(TIMED_MS / start.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) / count * 1e3


def _heat(device: torch.device) -> None:
    """Work until the GPU's clocks are those of a busy one."""
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    for _ in range(200):
        torch.mm(x, x)
    torch.cuda.synchronize(device)
