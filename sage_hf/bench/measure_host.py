"""Host time of attention calls: the time before the GPU works, on one GPU, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from sage_hf.attention import sage_attention
from sage_hf.bench.results import BenchmarkResult, Row, facts, reason
from sage_hf.bench.timing import looped_us, synchronize
from sage_hf.text import markdown_table, text_table
from sage_kernels.exact import sdpa

HostRoute = Literal["plain", "key_mask", "exact", "forward_backward", "exact_forward_backward", "compiled"]
ROUTES: tuple[HostRoute, ...] = ("plain", "key_mask", "exact", "forward_backward", "exact_forward_backward", "compiled")
PROVIDERS = ("sage", "sdpa", "sageattention")
RECIPES: dict[HostRoute, str] = {"forward_backward": "sage_bwd", "exact_forward_backward": "exact"}
"""Our recipe on each route with gradients."""

BATCH = 1
"""Batch size; with the next three, so small that the GPU always waits for the host."""
HEADS = 2
"""Number of heads of Q, K and V."""
TOKENS = 128
"""Number of queries and keys."""
HEAD_DIM = 64
"""Channels of a head."""
EXACT_TOKENS = 32
"""Number of tokens at which exact attention takes over."""
COMPILED_CALLS = 16
"""Number of calls in the compiled graph, which share its cost."""
WARM_UP = 5


HostCall = tuple[Callable[[], object], int]
"""(function that is timed, the number of calls that it makes)."""


def run(
    device: torch.device,
    routes: Sequence[HostRoute] = ROUTES,
    providers: Sequence[str] = PROVIDERS,
    progress: Callable[[str], None] = print,
) -> BenchmarkResult:
    """Measure all routes with all providers.

    Args:
        device: a CUDA device.
        routes: "plain": recipe sage2, even if exact attention is faster; "key_mask": with a key-padding mask; "exact":
            recipe sage2 where exact attention takes over; "forward_backward": recipe sage_bwd;
            "exact_forward_backward": exact attention in place of sage_bwd, as where it trains faster; "compiled":
            plain, inside a graph of torch.compile.
        providers: "sage"; "sdpa", exact attention by PyTorch; "sageattention", if it is installed and has the route.
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
        return {**facts(device), "rows": rows}


def measure_route(route: HostRoute, providers: Sequence[str], device: torch.device) -> list[Row]:
    """Return the rows of one route."""
    rows: dict[str, Row] = {}
    calls: dict[str, HostCall] = {}
    for provider in providers:
        rows[provider] = {"route": route, "provider": provider}
        try:
            calls[provider] = prepare(route, provider, device)
            for _ in range(WARM_UP):
                calls[provider][0]()
            synchronize(device)
        except Exception as error:  # A provider may raise any error: its row holds it.
            calls.pop(provider, None)
            rows[provider]["unavailable"] = reason(error)
    for provider, us in looped_us(calls, device).items():
        rows[provider]["us"] = round(us, 2)
    return list(rows.values())


def prepare(route: HostRoute, provider: str, device: torch.device) -> HostCall:
    """Return a provider's call for a route.

    Raises:
        ImportError: the provider is not installed.
        ValueError: the provider does not have the route.
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

        return train, 1

    if route == "compiled":

        def many(x: Tensor) -> Tensor:
            for _ in range(COMPILED_CALLS):
                x = attend(x, key, value, **options)
            return x

        compiled = torch.compile(many, fullgraph=True)
        from torch._inductor import config as inductor

        # Processes that compile, or wait to compile, would take time from the host.
        with inductor.patch(compile_threads=1), torch.no_grad():
            compiled(query)

        def replay() -> None:
            with torch.no_grad():
                compiled(query)

        return replay, COMPILED_CALLS

    def call() -> None:
        attend(query, key, value, **options)

    return call, 1


def table(result: BenchmarkResult) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the table: µs of a call, by route and provider."""
    times_by_route: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        times_by_route.setdefault(row["route"], {})[row["provider"]] = f"{row['us']:.0f}" if "us" in row else "–"
    lines = [
        [route.replace("_", " "), *(times.get(provider, "–") for provider in PROVIDERS)]
        for route, times in times_by_route.items()
    ]
    return ["µs of a call", *(f"`{provider}`" for provider in PROVIDERS)], lines


def markdown(result: BenchmarkResult) -> str:
    """Return the table for a page."""
    return markdown_table(*table(result))


def text(result: BenchmarkResult) -> str:
    """Return the table for a terminal."""
    return f"On the host of {result['gpu']}:\n\n{text_table(*table(result))}"
