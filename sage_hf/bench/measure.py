"""Timing, memory and errors of every provider's forward pass at every shape, on one GPU, in one process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from sage_hf.bench.peers import PROVIDERS, Provider, quantizers
from sage_hf.bench.shapes import SHAPES, Shape
from sage_hf.metrics import tensor_errors
from sage_kernels.exact import sdpa

PACKAGES = ("sage-hf", "triton", "fa3-fwd", "nvidia-cudnn-frontend", "sageattention", "sageattention2")

# At each shape, a provider is timed for half a second, in turns with the others.
SECONDS = 0.5
MIN_CALLS, MAX_CALLS = 5, 100
TURNS = 4

QUANTIZER_BATCHES = ((2, 16384), (4, 4096))  # batch, tokens

# Errors are measured in this many rows of the first and the last head, against all their keys.
ERROR_ROWS = 256


Kind = Literal["normal", "biased"]
KINDS: tuple[Kind, ...] = ("normal", "biased")

Item = TypeVar("Item")
Steps = tuple[Sequence[Callable[[], object]], int]
"""(the consecutive steps of a call, the number of calls)."""


def run(
    device: torch.device,
    shapes: Sequence[Shape] = SHAPES,
    providers: Sequence[Provider] = PROVIDERS,
    commit: str = "",
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure all shapes with all providers.

    Args:
        device: a CUDA device.
        shapes, providers: what to measure.
        commit: commit of the measured source, for the record.
        progress: called with a text for each shape before it is measured.

    Returns:
        Plain data: facts about the machine, "copy_bandwidth" (bytes read and written per second by a copy),
        "quantizers" and "rows". A row has the shape, "provider", "scope" and
        - "ms" (median time of a call), "tflops", "kernel";
        - "compile_s": by how many seconds the first call took longer than the second;
        - "rel_l1", "cosine": errors on the timed tensors, which are standard normal; "rel_l1_biased",
          "cosine_biased": errors if K and V have means (`draw`);
        - "peak_extra_bytes": most memory allocated during a call, beyond inputs and output; end to end only;
        or, if the provider is missing or refuses the call, "unavailable": the reason.
    """
    with torch.cuda.device(device), torch.no_grad():
        machine = facts(device, commit)
        bandwidth = copy_bandwidth(device)
        rows = []
        for shape in shapes:
            progress(f"{shape.name}: {shape}")
            for scope in ("end_to_end", "kernel"):
                rows += measure_shape(shape, [one for one in providers if one.scope == scope], device)
        progress("quantizers")
        return {
            **machine,
            "copy_bandwidth": bandwidth,
            "quantizers": _measure_quantizers(device, bandwidth),
            "rows": rows,
        }


def draw(shape: Shape, kind: Kind, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, bfloat16 (batch, heads, tokens, head_dim), the same ones at every call.

    "normal": independent, standard normal elements. "biased": K also gets a mean in each channel, drawn with 3 standard
    deviations, and V one with half a standard deviation, as in diffusion transformers.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, tokens: int) -> Tensor:
        size = (shape.batch, heads, tokens, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    query = normal(shape.q_heads, shape.tokens)
    key, value = normal(shape.kv_heads, shape.tokens), normal(shape.kv_heads, shape.tokens)
    if kind == "biased":
        key += 3 * normal(shape.kv_heads, 1)
        value += 0.5 * normal(shape.kv_heads, 1)
    return query, key, value


def drawn_orders(items: Sequence[Item], turns: int) -> Iterator[list[Item]]:
    """Yield the items for each of some turns, in an order drawn anew.

    What runs before decides the GPU's clock, which follows its power, and what its caches and the host's hold: in one
    order, each would always follow the same other one.
    """
    draw = random.Random(0)
    for _ in range(turns):
        yield draw.sample(items, len(items))


def median_ms(calls: dict[Any, tuple[Callable[[], object], int]]) -> dict[Any, float]:
    """Return the median time of each call in ms; `calls` is key -> (call, number of calls).

    Each is called several times in a row, at the clocks and temperature that it causes itself, as in a model that calls
    it again and again. Such turns alternate between the calls, so that drift affects all of them.
    """
    steps: dict[Any, Steps] = {key: ((call,), count) for key, (call, count) in calls.items()}
    return {key: whole for key, (whole, _) in median_steps_ms(steps).items()}


def median_steps_ms(calls: dict[Any, Steps]) -> dict[Any, list[float]]:
    """Return the median times in ms of calls that consist of steps: that of the whole, then that of each step."""
    events: dict[Any, list[list[torch.cuda.Event]]] = {key: [] for key in calls}
    for turn in range(TURNS):
        for key, (steps, count) in calls.items():
            for _ in range(count * turn // TURNS, count * (turn + 1) // TURNS):
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
                marks[0].record()
                for step, mark in zip(steps, marks[1:], strict=True):
                    step()
                    mark.record()
                events[key].append(marks)
    torch.cuda.synchronize()

    def median(turns: list[list[torch.cuda.Event]], first: int, last: int) -> float:
        return statistics.median(marks[first].elapsed_time(marks[last]) for marks in turns)

    return {
        key: [median(events[key], 0, -1), *(median(events[key], step, step + 1) for step in range(len(steps)))]
        for key, (steps, _) in calls.items()
    }


def require_finite(*results: Tensor) -> None:
    """Raise ArithmeticError if a result contains NaN or infinity, because its speed would mean nothing."""
    for x in results:
        if not (x.float() if x.dtype.itemsize == 1 else x).isfinite().all():
            raise ArithmeticError("the result holds NaN or infinity")


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes read and written per second by a copy of 1 GiB."""
    source = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / (median_ms({"copy": (lambda: target.copy_(source), 20)})["copy"] * 1e-3)


class SampledErrors:
    """Errors against exact attention in float64, for some rows of the first sample's first and last head."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> None:
        q_heads, tokens = query.shape[1:3]
        group = q_heads // key.shape[1]
        self._heads = torch.tensor([0, q_heads - 1], device=query.device)
        self._rows = torch.linspace(0, tokens - 1, min(ERROR_ROWS, tokens), device=query.device).long()
        kv_heads = self._heads // group
        mask = None
        if is_causal:
            mask = (torch.arange(tokens, device=query.device) <= self._rows[:, None])[None, None]
        self._truth, _ = sdpa.attention(self._sample(query), key[:1, kv_heads], value[:1, kv_heads], mask=mask)

    def of(self, output: Tensor, scale: float = 1.0) -> dict[str, float]:
        """Return rel_l1 and cosine of output · scale; output (batch, q_heads, tokens, head_dim), any dtype."""
        errors = tensor_errors(self._truth, self._sample(output).double() * scale)
        return {"rel_l1": errors.rel_l1, "cosine": errors.cosine}

    def _sample(self, x: Tensor) -> Tensor:
        return torch.stack([x[0, head, self._rows] for head in self._heads.tolist()])[None]


def measure_shape(shape: Shape, providers: Sequence[Provider], device: torch.device) -> list[dict[str, Any]]:
    """Return the rows of the result for one shape; all providers have the same scope."""
    rows = {provider.name: new_row(shape, provider) for provider in providers}
    calls: dict[str, tuple[Callable[[], object], int]] = {}
    for kind in KINDS:
        try:
            inputs = draw(shape, kind, device)
            errors = SampledErrors(*inputs, shape.causal)
        except torch.OutOfMemoryError as error:
            return [new_row(shape, provider) | {"unavailable": reason(error)} for provider in providers]
        for provider in providers:
            row = rows[provider.name]
            if "unavailable" in row:
                continue
            try:
                prepared = provider.prepare(*inputs, shape.causal)
                if kind == "normal":
                    row["kernel"] = prepared.kernel
                    calls[provider.name] = prepared.call, _first_calls(prepared.call, row, shape)
                output = prepared.call()
                require_finite(output)
                found = errors.of(output, prepared.output_scale)
            except Exception as error:  # A provider may fail in any way: its row says how.
                rows[provider.name] = new_row(shape, provider) | {"unavailable": reason(error)}
                calls.pop(provider.name, None)
            else:
                suffix = "" if kind == "normal" else "_biased"
                row |= {name + suffix: value for name, value in found.items()}
        for name, ms in median_ms(calls).items():
            rows[name] |= {"ms": ms, "tflops": shape.operations / ms * 1e-9}
        calls.clear()
    return list(rows.values())


def new_row(shape: Shape, provider: Provider, direction: str = "forward") -> dict[str, Any]:
    """Return a row of the result with shape and provider, without measurements."""
    return {
        "shape": shape.name,
        "batch": shape.batch,
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "q_len": shape.tokens,
        "kv_len": shape.tokens,
        "head_dim": shape.head_dim,
        "causal": shape.causal,
        "direction": direction,
        "scope": provider.scope,
        "provider": provider.name,
    }


def _first_calls(call: Callable[[], object], row: dict[str, Any], shape: Shape) -> int:
    """Call twice, write compile time and memory to the row, and return the number of calls for the timing."""
    row["compile_s"], peak, count = first_calls(call)
    if row["scope"] == "end_to_end":
        row["peak_extra_bytes"] = max(0, peak - shape.output_bytes)
    return count


def first_calls(call: Callable[[], object]) -> tuple[float, int, int]:
    """Call twice, to compile and to estimate time and memory.

    Returns:
        (seconds that the first call took longer than the second, most bytes allocated during the second, number of
        calls for the timing).
    """
    first = _seconds(call)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    second = _seconds(call)
    peak = torch.cuda.max_memory_allocated() - before
    return max(0.0, first - second), peak, max(MIN_CALLS, min(MAX_CALLS, int(SECONDS / second)))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _measure_quantizers(device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for head_dim, (batch, tokens) in itertools.product((128, 64), QUANTIZER_BATCHES):
        shape = Shape("quantizers", batch, 32, 32, tokens, head_dim)
        sizes = {"batch": shape.batch, "heads": shape.q_heads, "tokens": shape.tokens, "head_dim": head_dim}
        try:
            found = quantizers(*draw(shape, "normal", device))
            times = median_ms({name: (call, MAX_CALLS) for name, (call, _) in found.items()})
        except Exception as error:  # Quantisers may fail in any way, too.
            rows.append(sizes | {"unavailable": reason(error)})
            continue
        for name, (_, moved) in found.items():
            share = moved / (times[name] * 1e-3) / bandwidth
            rows.append({"name": name, **sizes, "bytes": moved, "ms": times[name], "share_of_copy_bandwidth": share})
    return rows


COMMIT = "SAGE_HF_COMMIT"
"""Environment variable that names the commit of the source where there is no checkout to ask."""


def reason(error: Exception) -> str:
    """Return the type and the first line of an error, for a row's "unavailable"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def facts(device: torch.device, commit: str) -> dict[str, Any]:
    """Return facts about the machine and the versions, for the record.

    Args:
        device: what is measured.
        commit: of the source; "": what the environment variable SAGE_HF_COMMIT says.
    """
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if on_gpu else "",
        "torch": torch.__version__,
        "triton": packages.pop("triton", ""),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "packages": packages,
        "commit": commit or os.environ.get(COMMIT, ""),
        "date": date.today().isoformat(),
    }
