"""Host time of attention calls: what a call costs before the GPU works, on one GPU, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from sage_hf.attention import sage_attention
from sage_hf.bench.measure import facts, reason
from sage_hf.text import text_table
from sage_kernels.exact import sdpa

Route = Literal["plain", "key_mask", "exact", "forward_backward", "exact_forward_backward", "compiled"]
ROUTES: tuple[Route, ...] = ("plain", "key_mask", "exact", "forward_backward", "exact_forward_backward", "compiled")
PROVIDERS = ("sage", "sdpa", "sageattention")
RECIPES: dict[Route, str] = {"forward_backward": "sage_bwd", "exact_forward_backward": "exact"}
"""Our recipes on the routes with gradients."""

BATCH, HEADS, TOKENS, HEAD_DIM = 1, 2, 128, 64
"""The tensors' shape: so small that the GPU always waits for the host."""
EXACT_TOKENS = 32
"""Tokens where exact attention takes over."""
COMPILED_CALLS = 16
"""Calls in the compiled graph, whose own cost they share."""
CALLS, ROUNDS = 50, 21
WARM_UP = 5


@dataclass(frozen=True)
class HostCall:
    """Work that is timed.

    Attributes:
        run: does the work of `calls` calls.
        calls: how many.
    """

    run: Callable[[], object]
    calls: int = 1


def run(
    device: torch.device,
    routes: Sequence[Route] = ROUTES,
    providers: Sequence[str] = PROVIDERS,
    commit: str = "",
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure all routes with all providers.

    Args:
        device: a CUDA device.
        routes: "plain": recipe sage2, even if exact attention is faster; "key_mask": beside a mask of keys; "exact":
            recipe sage2 where exact attention takes over; "forward_backward": recipe sage_bwd;
            "exact_forward_backward": exact attention in its place, as where it trains faster; "compiled": plain, inside
            a graph of torch.compile.
        providers: "sage"; "sdpa", which does the same exactly; "sageattention", if it is installed and has the route.
        commit: commit of the measured source, for the record.
        progress: called with a text for each route before it is measured.

    Returns:
        Plain data: facts about the machine, and "rows" {route, provider, us}: the median over rounds of a call's host
        time in µs; or, in place of us, "unavailable": the reason.
    """
    with torch.cuda.device(device):
        rows = []
        for route in routes:
            progress(route)
            rows += measure_route(route, providers, device)
        return {**facts(device, commit), "rows": rows}


def measure_route(route: Route, providers: Sequence[str], device: torch.device) -> list[dict[str, Any]]:
    """Return the rows of one route."""
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, HostCall] = {}
    for provider in providers:
        rows[provider] = {"route": route, "provider": provider}
        try:
            calls[provider] = prepare(route, provider, device)
            for _ in range(WARM_UP):
                calls[provider].run()
            synchronize(device)
        except Exception as error:  # A provider may fail in any way: its row says how.
            calls.pop(provider, None)
            rows[provider]["unavailable"] = reason(error)
    for provider, us in median_us(calls, device).items():
        rows[provider]["us"] = round(us, 2)
    return list(rows.values())


def median_us(calls: dict[str, HostCall], device: torch.device) -> dict[str, float]:
    """Return the median over rounds of each call's host time in µs; rounds alternate, so that drift affects all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            count = max(1, CALLS // call.calls)
            synchronize(device)
            start = time.perf_counter()
            for _ in range(count):
                call.run()
            times[name].append((time.perf_counter() - start) / (count * call.calls))
    return {name: 1e6 * statistics.median(rounds) for name, rounds in times.items()}


def prepare(route: Route, provider: str, device: torch.device) -> HostCall:
    """Return a provider's call of a route.

    Raises:
        ImportError: the provider is not installed.
        ValueError: it has no such route.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokens = EXACT_TOKENS if route == "exact" else TOKENS
    query, key, value, gradient = (
        torch.randn(BATCH, HEADS, tokens, HEAD_DIM, dtype=dtype, device=device) for _ in range(4)
    )
    mask = torch.arange(tokens, device=device) < tokens - 8
    options: dict[str, Any] = {"attn_mask": mask[None, None, None]} if route == "key_mask" else {}
    attend: Callable[..., Tensor]
    if provider == "sdpa":
        attend = sdpa.pytorch_sdpa
    elif provider == "sage":
        attend = sage_attention
        options["recipe"] = RECIPES.get(route, "sage2")
        if route != "exact" and device.type == "cuda":
            options["fallback"] = "error"
    elif route == "plain":
        attend = import_module("sageattention").sageattn
    else:
        raise ValueError(f"{provider} has no such call")
    if route in RECIPES:
        inputs = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()

        def train() -> None:
            torch.autograd.grad(attend(*inputs, **options), inputs, gradient)

        return HostCall(train)

    if route == "compiled":

        def many(x: Tensor) -> Tensor:
            for _ in range(COMPILED_CALLS):
                x = attend(x, key, value, **options)
            return x

        compiled = torch.compile(many, fullgraph=True)
        from torch._inductor import config as inductor

        # Processes that start to compile, or wait to, would take time from the host.
        with inductor.patch(compile_threads=1), torch.no_grad():
            compiled(query)

        def replay() -> None:
            with torch.no_grad():
                compiled(query)

        return HostCall(replay, COMPILED_CALLS)

    def call() -> None:
        attend(query, key, value, **options)

    return HostCall(call)


def text(result: dict[str, Any]) -> str:
    """Return a table for a terminal: µs of a call, by route and provider."""
    return f"µs of a call on the host of {result['gpu']}\n\n{text_table(['', *PROVIDERS], _cells(result))}"


def markdown(result: dict[str, Any]) -> str:
    """Return the same table for a page."""
    header = ["µs of a call", *(f"`{provider}`" for provider in PROVIDERS)]
    lines = [header, ["---"] * len(header), *_cells(result)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(result: dict[str, Any]) -> list[list[str]]:
    cells: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        cells.setdefault(row["route"], {})[row["provider"]] = f"{row['us']:.0f}" if "us" in row else "–"
    return [[route.replace("_", " "), *(by.get(one, "–") for one in PROVIDERS)] for route, by in cells.items()]


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
