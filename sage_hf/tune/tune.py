"""Measurement of what attention calls cost on one GPU, for the tables of `sage_kernels.dispatch.cost_model`."""

from __future__ import annotations

import gc
import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date

import torch

from sage_hf.bench import cases, grid
from sage_hf.bench.timing import Queue
from sage_hf.nominal import nominal_request
from sage_hf.tune.cases import BACKENDS, Kind, Point, compile_kernels, prepare, prepare_training
from sage_hf.tune.fit import Measured, fit
from sage_kernels.cuda.registration import CONSUMER_BLACKWELL, nvfp4_forward_measured
from sage_kernels.dispatch import cost_model
from sage_kernels.dispatch.cost_model import Table
from sage_kernels.dispatch.curves import Sizes
from sage_kernels.dispatch.registry import registered_exact, select
from sage_kernels.runtime.toolchain import triton_version

RECIPES = ("sage3", "sage2", "sage1")
TRAINING_RECIPE = "sage_bwd"
DRAWN, SEED, MOST_OPERATIONS = 264, 1, 2e12
HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)
CACHED = ((32, 4, 128), (16, 1, 64))
"""Heads, heads that share keys, and head_dim of calls of a few queries behind a cache."""
RIVAL_RECIPE, RIVAL_SHARE = "sage3", 0.2
"""Recipe that has two kernels on consumer Blackwell, and the share of the time in which the second is measured."""
TRAINED_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
TRAINED: tuple[Kind, ...] = ("none", "causal", "keys")

GRID_KINDS: dict[cases.MaskName, Kind] = {
    "none": "none",
    "causal": "causal",
    "lower_right": "causal",
    "lengths": "keys",
    "keys": "keys",
    "window": "bool",
    "documents": "bool",
    "bias": "additive",
}
"""Kinds of the grid's masks."""

MEDIUM, LONG = 2048, 8192
"""Keys from which on a kernel may be another one."""

SECONDS, COMPILE_SECONDS = 55.0, 45.0

# A runner is timed for about REPLAYS times this long at each point, in replays of one graph of several calls.
TIMED_MS = 1.0
REPLAYS = 3


def points() -> list[Point]:
    """Return the calls that are measured: the grid's kinds as a seed draws them, and calls with gradients among them.

    They are in a drawn order, so that the first ones are of all kinds.
    """
    drawn = grid.drawn(DRAWN, SEED, MOST_OPERATIONS)
    found = [Point(replace(one.sizes, head_dim=_measured(one.head_dim)), GRID_KINDS[one.mask]) for one in drawn]
    for (heads, group, head_dim), kv_len, q_len in itertools.product(CACHED, (1024, 8192, 32768), (4, 12)):
        found.append(Point(Sizes(1, heads, heads // group, q_len, kv_len, head_dim), "causal"))
    for head_dim, n, batch in itertools.product((32, 64, 128, 256), (300, 1024, 3000), (1, 8)):
        found.append(Point(Sizes(batch, 16, 16, n, n, head_dim), "causal_keys"))
    for head_dim, n in itertools.product((64, 128), TRAINED_LENGTHS):
        batch = max(1, 8192 // n)
        for kind in TRAINED:
            found.append(Point(Sizes(batch, 16, 16, n, n, head_dim), kind, grad=True))
        found.append(Point(Sizes(max(1, batch // 2), 32, 8, n, n, head_dim), "causal", grad=True))
    for head_dim, heads in ((64, 30), (128, 12)):  # videos and long texts
        found.append(Point(Sizes(1, heads, heads, 17776, 17776, head_dim), grad=True))
        found.append(Point(Sizes(1, 16, 4, 16384, 16384, head_dim), "causal", grad=True))
    for head_dim, n in itertools.product((32, 256), (512, 1024, 2048, 4096)):
        found += [Point(Sizes(2, 16, 16, n, n, head_dim), kind, grad=True) for kind in ("none", "causal")]
    found = list(dict.fromkeys(found))
    random.Random(0).shuffle(found)
    return found


def _measured(head_dim: int) -> int:
    """Return the least head_dim among those measured that is not below this one."""
    return next(one for one in HEAD_DIMS if head_dim <= one)


def tune(device: torch.device, seconds: float = SECONDS, progress: Callable[[str], None] = print) -> Table:
    """Measure a GPU, and return its table; `Table.write` stores it.

    Kinds of calls that there was no time for have the curves of the table that ships for the same GPU, if one does.

    Args:
        device: a CUDA device that does nothing else meanwhile.
        seconds: how long to measure, after COMPILE_SECONDS of compiling; the calls that are left then are left out.
        progress: called with a text for each stage.

    Raises:
        ValueError: device is no CUDA device, or nothing could be measured.
    """
    if device.type != "cuda":
        raise ValueError(f"costs are measured on a GPU, and {device} is none: pass --device cuda")
    todo = points()
    progress("compiling kernels")
    compile_kernels(device, calls_to_compile(todo), COMPILE_SECONDS)
    progress(f"measuring {len(todo)} calls")
    started = time.perf_counter()
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    has_rival = capability in CONSUMER_BLACKWELL
    found = list(measure_points(device, todo, seconds * (1 - RIVAL_SHARE if has_rival else 1)))
    if has_rival:
        forward = [point for point in todo if not point.grad]
        with nvfp4_forward_measured():
            found += measure_points(device, forward, seconds * RIVAL_SHARE, lambda point: [RIVAL_RECIPE])
    if not found:
        raise ValueError("nothing could be measured on this GPU in time")
    calls = len({(one.sizes, one.mask, one.causal) for one in found})
    progress(
        f"measured {calls} of them by {len(found) / calls:.1f} kernels each in {time.perf_counter() - started:.0f} s"
    )
    curves = fit(found, properties.multi_processor_count)
    shipped = cost_model.shipped_path(capability)
    if shipped.exists() and (known := cost_model.read_table(shipped)).gpu == properties.name:
        there = {curve.kind for curve in curves}
        curves += tuple(curve for curve in known.curves if curve.kind not in there)
    return Table(properties.name, capability, versions(), curves)


def unseen_points(count: int, seed: int) -> list[cases.Case]:
    """Return the calls of the grid's kinds that a seed draws, but for those that `tune` measures."""
    seen = {(point.sizes, point.kind) for point in points()}
    return [case for case in grid.drawn(count, seed) if (case.sizes, GRID_KINDS[case.mask]) not in seen]


def table_in_use(device: torch.device) -> str:
    """Return which table of costs calls on a GPU choose by: "shipped", "tuned" or "none"."""
    capability = torch.cuda.get_device_capability(device)
    table = cost_model.table_of(capability)
    return (
        "none" if table is None else "shipped" if table.origin == str(cost_model.shipped_path(capability)) else "tuned"
    )


def calls_to_compile(todo: Sequence[Point]) -> list[tuple[str, Point]]:
    """Return one call for each kernel, as far as kinds of calls tell kernels apart."""
    calls: dict[tuple[str, str, int, bool, bool], tuple[str, Point]] = {}
    pairs = ((recipe, point) for point in todo for recipe in names_for(point) if recipe not in BACKENDS)
    for recipe, point in pairs:
        kv_len = point.sizes.kv_len
        kind = (recipe, point.kind, point.sizes.head_dim, kv_len < MEDIUM, kv_len < LONG)
        calls.setdefault(kind, (recipe, point))
    return list(calls.values())


def names_for(point: Point) -> list[str]:
    """Return the recipes and exact kernels that are timed at a point."""
    if point.grad:
        return [TRAINING_RECIPE, *BACKENDS]
    # Of PyTorch's kernels only flash takes causality that is aligned lower right without a mask as large as the scores.
    behind = point.causal and point.sizes.q_len != point.sizes.kv_len
    own = [name for name in registered_exact() if name not in BACKENDS]
    return [*RECIPES, *(["flash"] if behind else BACKENDS), *own]


def versions() -> dict[str, str]:
    """Return the versions on which a table's figures depend, next to the GPU."""
    triton = triton_version()
    return {
        "torch": torch.__version__,
        "triton": ".".join(map(str, triton)) if triton else "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "date": date.today().isoformat(),
    }


def measure_points(
    device: torch.device,
    todo: Sequence[Point],
    seconds: float,
    names_of: Callable[[Point], list[str]] = names_for,
) -> Iterator[Measured]:
    """Time each point's runners, `names_of` it, until the seconds are over; one that refuses a point is left out."""
    end = time.perf_counter() + seconds
    with quiet(), torch.cuda.device(device), torch.no_grad(), Queue(device).entered() as queue:
        _heat(device)
        for point in todo:
            if time.perf_counter() > end:
                return
            call_of = (prepare_training if point.grad else prepare)(device, point)
            calls = [(name, call_of, point.grad) for name in names_of(point)]
            if point.grad:  # a checkpoint runs the forward pass twice; exact ones are measured for inference
                calls.append((TRAINING_RECIPE, prepare_training(device, point, backward=False), False))
            for name, of, backward in calls:
                try:
                    us = queue.gpu_us(of(name), TIMED_MS, REPLAYS)
                    runner = runner_of(device, point, name, backward)
                except (RuntimeError, ValueError):  # not for such calls, or no memory
                    torch.cuda.synchronize(device)
                    continue
                kind = cost_model.kind_of(point.mask, point.causal, point.sizes)
                yield Measured(runner, kind, point.causal, point.sizes, us)


@contextmanager
def quiet() -> Iterator[None]:
    """Spare captures a search of all of Python's objects for garbage, and the reader PyTorch's reasons for refusals."""
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.unfreeze()


def runner_of(device: torch.device, point: Point, name: str, backward: bool) -> str:
    """Return the runner's name in a table of a recipe's kernels for a point, or of an exact kernel.

    Args:
        device, point, name: of the call.
        backward: whether its backward pass is measured too.

    Raises:
        KernelUnavailableError: the recipe is not native here.
    """
    if name not in RECIPES and name != TRAINING_RECIPE:
        return name + cost_model.TRAINING if backward else name
    facts = {**asdict(point.sizes), "mask": point.mask, "is_causal": point.causal, "grad": point.grad}
    plan = select(nominal_request(name, device, **facts), "error")
    phases = plan.kernel, plan.quantizer
    return (
        cost_model.training_runner(name, *phases, plan.backward)
        if backward
        else cost_model.low_bit_runner(name, *phases)
    )


def gpu_us(call: Callable[[], object]) -> float:
    """Return the GPU's time for a call in microseconds, without the host's: replays of a graph of several calls."""
    with Queue(torch.device("cuda", torch.cuda.current_device())).entered() as queue:
        return queue.gpu_us(call, TIMED_MS, REPLAYS)


def _heat(device: torch.device) -> None:
    """Work until the GPU's clocks are those of a busy one."""
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    for _ in range(200):
        torch.mm(x, x)
    torch.cuda.synchronize(device)
