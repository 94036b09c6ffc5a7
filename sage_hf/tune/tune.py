"""Measurement of attention calls on one GPU, for the tables of `sage_kernels.dispatch.cost_model`."""

from __future__ import annotations

import gc
import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import date

import torch

from sage_hf.bench import grid
from sage_hf.bench.cases import BenchCase, MaskName
from sage_hf.bench.timing import TimingStream
from sage_hf.nominal import nominal_request
from sage_hf.tune.cases import BACKENDS, compile_kernels, prepare
from sage_hf.tune.fit import MeasuredTime, fit
from sage_kernels.backends import CONSUMER_BLACKWELL, enforce_nvfp4_forward
from sage_kernels.dispatch import cost_model
from sage_kernels.dispatch.cost_model import DECODED_QUERIES, CostTable
from sage_kernels.dispatch.curves import CostCurve, Regime
from sage_kernels.dispatch.registry import exacts
from sage_kernels.dispatch.select import MIN_KV_LEN, MIN_QUERY_LEN, select
from sage_kernels.runtime.toolchain import triton_version

RECIPES = ("sage3", "sage2", "sage1")
TRAINING_RECIPE = "sage_bwd"
RIVAL_RECIPE = "sage3"
"""Recipe with two kernels on consumer Blackwell."""
DRAWN = 440
"""Number of random calls without gradients."""
SEED = 1
"""Seed of the random calls."""
MOST_OPERATIONS = 2e12
"""Largest number of multiplications and additions of a random call without gradients."""
HEAD_DIMS = (32, 40, 64, 72, 96, 128, 136, 160, 192, 256)
"""Measured head_dims: as few as distinguish the kernels' paddings, because each needs compiled kernels."""
CACHED = ((32, 4, 128), (16, 1, 64))
"""Heads, heads that share keys, and head_dim of calls with a few queries behind a cache."""
TRAINING_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
"""Lengths of systematic calls with gradients."""
TRAINING_MASKS: tuple[MaskName, ...] = ("none", "causal", "lengths")
"""Masks of calls with gradients."""
TRAINING_DRAWN = 64
"""Number of random calls with gradients: few heads with short lengths leave multiprocessors idle, which systematic
calls do not show."""
TRAINING_OPERATIONS = 4e12
"""Largest number of multiplications and additions of a random call with gradients."""

SECONDS = 420.0
"""Longest time of a measurement."""
COMPILING = 0.45
"""Share of the time after which no compilation begins."""
FITTING = 0.15
"""Share of the seconds for fitting the curves, after measuring."""

# A provider (recipe or exact kernel) is timed for about REPLAYS times this long at each point, by replaying one graph
# of several calls.
TIMED_MS = 1.0
TRAINING_MS = 30.0
"""The same for calls with gradients: training holds a GPU at its power limit, where kernels differ by their energy."""
REPLAYS = 3


def points() -> list[BenchCase]:
    """Return the calls to measure: random calls of the grid's kinds, and calls with gradients.

    Kinds of calls take turns, so that a few calls of every kind come first.
    """
    cases = [
        replace(drawn_case, head_dim=_measured(drawn_case.head_dim))
        for drawn_case in grid.drawn(DRAWN, SEED, MOST_OPERATIONS)
    ]
    for (heads, group, head_dim), kv_len, q_len in itertools.product(CACHED, (1024, 8192, 32768), (4, 12)):
        cases.append(BenchCase("chunked prefill", 1, heads, heads // group, q_len, kv_len, head_dim, "lower_right"))
    for head_dim, n, batch in itertools.product((32, 64, 128, 256), (300, 1024, 3000), (1, 8)):
        cases.append(BenchCase("causal", batch, 16, 16, n, n, head_dim, "causal_lengths"))

    def train(batch: int, q_heads: int, kv_heads: int, tokens: int, head_dim: int, mask: MaskName = "none") -> None:
        cases.append(BenchCase("training", batch, q_heads, kv_heads, tokens, tokens, head_dim, mask, training=True))

    for head_dim, n in itertools.product((64, 128), TRAINING_LENGTHS):
        batch = max(1, 8192 // n)
        for mask in TRAINING_MASKS:
            train(batch, 16, 16, n, head_dim, mask)
        train(max(1, batch // 2), 32, 8, n, head_dim, "causal")
    for head_dim, heads in ((64, 30), (128, 12)):  # videos and long texts
        train(1, heads, heads, 17776, head_dim)
        train(1, 16, 4, 16384, head_dim, "causal")
        for mask in TRAINING_MASKS[:2]:  # so that a curve need not extrapolate far
            train(3, 24, 24, 8192, head_dim, mask)
        train(2, 32, 8, 12288, head_dim, "causal")
    for head_dim, n, mask in itertools.product((32, 256), (512, 1024, 2048, 4096), TRAINING_MASKS[:2]):
        train(2, 16, 16, n, head_dim, mask)
    for head_dim, (batch, n), mask in itertools.product((72, 96), ((24, 308), (4, 1400)), TRAINING_MASKS[:2]):
        train(batch, 20, 20, n, head_dim, mask)
    cases += _drawn_training()
    kinds: dict[tuple[str, Regime, bool, bool], list[BenchCase]] = {}
    for case in dict.fromkeys(cases):
        kinds.setdefault((case.kind, _regime(case), case.is_causal, case.training), []).append(case)
    for index, calls in enumerate(kinds.values()):
        random.Random(index).shuffle(calls)
    turns = itertools.zip_longest(*kinds.values())
    return [case for turn in turns for case in turn if case is not None]


def _drawn_training() -> list[BenchCase]:
    """Draw calls with gradients, of lengths and numbers of heads that are no powers of two."""
    random_ = random.Random(SEED)
    cases = []
    for _ in range(TRAINING_DRAWN):
        mask, head_dim = random_.choice(TRAINING_MASKS), random_.choice((64, 128))
        kv_heads, group = random_.choice((2, 4, 8, 12, 16, 24, 32)), random_.choice((1, 1, 1, 4))
        batch, tokens = random_.choice((1, 1, 2, 4)), round(2 ** random_.uniform(8.5, 14))
        case = BenchCase("training", batch, kv_heads * group, kv_heads, tokens, tokens, head_dim, mask, training=True)
        cases.append(grid.capped(case, TRAINING_OPERATIONS))
    return cases


def _measured(head_dim: int) -> int:
    """Return the smallest measured head_dim that is at least this head_dim."""
    return next(width for width in HEAD_DIMS if head_dim <= width)


def _regime(case: BenchCase) -> Regime:
    """Return the regime of the curves of such calls."""
    return cost_model.regime_of(case.is_causal, case.sizes)


def tune(device: torch.device, seconds: float = SECONDS, progress: Callable[[str], None] = print) -> CostTable:
    """Measure a GPU, and return its table; `CostTable.write` stores it.

    Kinds of calls for which there was no time get the curves of the shipped table for such GPUs, if there is one.

    Args:
        device: a CUDA device that does nothing else.
        seconds: time to compile, measure and fit; remaining calls are left out.
        progress: called with a text for each stage.

    Raises:
        ValueError: device is no CUDA device, or nothing could be measured.
    """
    if device.type != "cuda":
        raise ValueError(f"costs are measured on a GPU, and {device} is not a GPU: pass --device cuda")
    started, todo = time.perf_counter(), points()

    def elapsed() -> float:
        return time.perf_counter() - started

    progress("compiling kernels")
    to_compile = [(name, case) for case in todo for name in names_for(case) if name not in BACKENDS]
    compiled = compile_kernels(device, to_compile, COMPILING * seconds)
    progress(f"compiled for {compiled:,} calls in {elapsed():.0f} s; measuring {len(todo)} calls")
    timed_points = list(measure_points(device, todo, (1 - FITTING) * seconds - elapsed()))
    if not timed_points:
        raise ValueError("nothing could be measured on this GPU in time")
    calls = len({(timed_point.sizes, timed_point.mask, timed_point.causal) for timed_point in timed_points})
    hint = "; --seconds can give the others time" if calls < len(todo) else ""
    progress(f"measured {calls} of them by {len(timed_points) / calls:.1f} kernels each until {elapsed():.0f} s{hint}")
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    curves = fit(timed_points, properties.multi_processor_count)
    shipped = cost_model.shipped_path(capability)
    if shipped.exists():
        measured_kinds = set(map(_kind, curves))
        curves += tuple(curve for curve in cost_model.read_table(shipped).curves if _kind(curve) not in measured_kinds)
    progress(f"fitted {len(curves)} curves until {elapsed():.0f} s")
    return CostTable(properties.name, capability, versions(), curves)


def _kind(curve: CostCurve) -> tuple[str, Regime, bool, bool]:
    """Return the kind of a curve's calls: curves of one kind are compared, so all must be of the same GPU."""
    return curve.mask, curve.regime, curve.causal, curve.provider.endswith(cost_model.TRAINING)


def unseen_points(count: int, seed: int) -> list[BenchCase]:
    """Return random calls of the grid's kinds by a seed, except the calls that `tune` measures."""
    seen = {(case.sizes, case.mask) for case in points()}
    return [case for case in grid.drawn(count, seed) if (case.sizes, case.mask) not in seen]


def table_in_use(device: torch.device) -> str:
    """Return the table of costs by which calls on a GPU choose: "shipped", "tuned" or "none"."""
    capability = torch.cuda.get_device_capability(device)
    table = cost_model.table_of(capability)
    if table is None:
        return "none"
    return "shipped" if table.origin == str(cost_model.shipped_path(capability)) else "tuned"


def names_for(case: BenchCase) -> list[str]:
    """Return the recipes and exact kernels to time for a call."""
    if case.training:
        return [TRAINING_RECIPE, *BACKENDS]
    # Among PyTorch's kernels, only flash takes causality aligned lower right without a mask as large as the scores.
    # cuDNN makes a plan for every length, so steps of decoding do not use it.
    decodes = case.kind == "none" and case.q_len < DECODED_QUERIES
    backends = [name for name in BACKENDS if name != "cudnn" or not decodes]
    if case.causal_offset:
        backends = ["flash"]
    too_short = case.q_len < MIN_QUERY_LEN or case.kv_len < MIN_KV_LEN
    return [*(() if too_short else RECIPES), *backends, *(name for name in exacts if name not in BACKENDS)]


def versions() -> dict[str, str]:
    """Return the versions on which a table's figures depend, in addition to the GPU."""
    triton = triton_version()
    return {
        "torch": torch.__version__,
        "triton": ".".join(map(str, triton)) if triton else "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "date": date.today().isoformat(),
    }


def variants(capability: tuple[int, int], case: BenchCase) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Yield `names_for` a call, each with its context for timing; a recipe comes once for each of its kernels."""
    for name in names_for(case):
        if name == RIVAL_RECIPE and capability in CONSUMER_BLACKWELL:
            yield from ((name, enforce_nvfp4_forward(chosen)) for chosen in (False, True))
        else:
            yield name, nullcontext()


def measure_points(device: torch.device, todo: Sequence[BenchCase], seconds: float) -> Iterator[MeasuredTime]:
    """Time each call's variants until the seconds are over; a variant that refuses a call is left out."""
    end = time.perf_counter() + seconds
    capability = torch.cuda.get_device_capability(device)
    with quiet(), torch.cuda.device(device), torch.no_grad(), TimingStream(device).entered() as stream:
        _heat(device)
        for case in todo:
            if time.perf_counter() > end:
                return
            try:
                call_of = prepare(device, case)
                calls = [(name, context, call_of, case.training) for name, context in variants(capability, case)]
                if case.training:  # a checkpoint runs forward twice; exact forward is measured for inference
                    forward = prepare(device, case, backward=False)
                    calls.append((TRAINING_RECIPE, nullcontext(), forward, False))
            except torch.OutOfMemoryError:
                continue
            for name, context, of, backward in calls:
                try:
                    with context:
                        provider = provider_of(device, case, name, backward)
                        us = stream.gpu_us(of(name), TRAINING_MS if case.training else TIMED_MS, REPLAYS)
                except (RuntimeError, ValueError):  # the call is not supported, or there is no memory
                    torch.cuda.synchronize(device)
                    continue
                yield MeasuredTime(provider, case.kind, case.is_causal, case.sizes, us, _regime(case))


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off Python's garbage collection during captures, and PyTorch's warnings about refused calls."""
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.unfreeze()


def provider_of(device: torch.device, case: BenchCase, name: str, backward: bool) -> str:
    """Return the name, in a table of costs, of a recipe's kernels for a call or of an exact kernel.

    Args:
        device, case, name: the call.
        backward: whether the backward pass is measured too.

    Raises:
        KernelUnavailableError: the recipe is not native here.
    """
    if name not in RECIPES and name != TRAINING_RECIPE:
        return name + cost_model.TRAINING if backward else name
    facts = {**asdict(case.sizes), "mask": case.kind, "is_causal": case.is_causal, "grad": case.training}
    plan = select(nominal_request(name, device, **facts), "error")
    phases = plan.kernel, plan.quantizer
    if backward:
        return cost_model.training_provider(name, *phases, plan.backward)
    return cost_model.low_bit_provider(name, *phases)


def _heat(device: torch.device) -> None:
    """Keep the GPU busy until its clocks are as high as under load."""
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    for _ in range(200):
        torch.mm(x, x)
    torch.cuda.synchronize(device)
