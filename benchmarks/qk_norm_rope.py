"""Measure norm and RoPE of queries as models call them: with PyTorch's operators, compiled, and with our kernel.

The "rows" of <gpu>-qk_norm_rope.json have model, batch, tokens, heads, head_dim, direction ("forward" or
"forward_backward"), "copy_ms", which a copy of the tensor takes, and in ms: "operators_ms" of the model's own code,
"compiled_ms" of torch.compile, "ours_ms". Forward passes are replayed as CUDA graphs, so that the host does not count.
It needs diffusers and transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from sage_hf.bench import command, results, timing
from sage_kernels.qk_norm_rope import qk_norm_rope
from sage_kernels.spec.qk_norm_rope import Norm, Rope

CALLS = 20

Sizes = tuple[int, int, int, int]
"""Batch, tokens, heads, head_dim."""
Made = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], list[Any]]
"""The model's own code, our call, and their common parameters."""


@dataclass(frozen=True)
class Case:
    """A model's call.

    Attributes:
        model: name in the table.
        sizes: sizes of the queries.
        make: returns the functions to measure, for tensors of these sizes.
        trains: measure the backward pass too.
    """

    model: str
    sizes: Sizes
    make: Callable[[Sizes], Made]
    trains: bool = False


def _angles(tokens: int, channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.randn(tokens, channels // 2, device="cuda")
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _flux(norm_class: Any) -> Callable[[Sizes], Made]:
    """Return a maker of an RMSNorm of each head and diffusers' rotation of neighbours, as in Flux and HunyuanVideo."""

    def make(sizes: Sizes) -> Made:
        _, tokens, _, head_dim = sizes
        rotate = import_module("diffusers.models.embeddings").apply_rotary_emb
        cosine, sine = (x.repeat_interleave(2, -1) for x in _angles(tokens, head_dim))
        norm = norm_class()(head_dim, eps=1e-6).to("cuda", torch.bfloat16)
        norm_and_rope = Norm("rms", 1e-6, norm.weight, rounds=not isinstance(norm, nn.RMSNorm)), Rope(cosine, sine)
        return (
            lambda x: rotate(norm(x), (cosine, sine), sequence_dim=1),
            lambda x: qk_norm_rope(x, *norm_and_rope),
            [norm.weight],
        )

    return make


def _cogvideox(sizes: Sizes) -> Made:
    norm = nn.LayerNorm(sizes[3], eps=1e-6, device="cuda", dtype=torch.bfloat16)
    kernel_norm = Norm("layer", 1e-6, norm.weight, norm.bias)
    # The processor normalises a view of (batch, heads, tokens, head_dim).
    return (
        lambda x: norm(x.transpose(1, 2)).transpose(1, 2),
        lambda x: qk_norm_rope(x, kernel_norm),
        [norm.weight, norm.bias],
    )


def _llama(sizes: Sizes) -> Made:
    _, tokens, _, head_dim = sizes
    rotate = import_module("transformers.models.llama.modeling_llama").apply_rotary_pos_emb
    cosine, sine = (torch.cat((x, x), -1)[None] for x in _angles(tokens, head_dim, torch.bfloat16))
    rope = Rope(cosine[:, :, None], sine[:, :, None], halves=True)

    def operators(x: Tensor) -> Tensor:
        query = x.transpose(1, 2)
        rotated: Tensor = rotate(query, query[:, :1], cosine, sine)[0]
        return rotated.transpose(1, 2)

    return operators, lambda x: qk_norm_rope(x, rope=rope), []


def _diffusers_norm() -> Any:
    return import_module("diffusers.models.normalization").RMSNorm


CASES = (
    Case("Flux, 1024²", (1, 4608, 24, 128), _flux(lambda: nn.RMSNorm)),
    Case("HunyuanVideo, 720p", (1, 118800, 24, 128), _flux(_diffusers_norm)),
    Case("CogVideoX-2B", (2, 17776, 30, 64), _cogvideox),
    Case("Llama 3 8B, 32k", (1, 32768, 32, 128), _llama),
    Case("CogVideoX-2B, training", (1, 17776, 30, 64), _cogvideox, trains=True),
    Case("Llama 3 8B, training on 8k", (1, 8192, 32, 128), _llama, trains=True),
)


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of a CUDA graph of the call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure_case(case: Case, bandwidth: float) -> dict[str, Any]:
    """Return the row of a case; raise ArithmeticError if our output differs."""
    x = torch.randn(case.sizes, device="cuda", dtype=torch.bfloat16, requires_grad=case.trains)
    gradient = torch.randn_like(x)
    operators, ours, parameters = case.make(case.sizes)
    with torch.no_grad():
        distance = (operators(x).float() - ours(x).float()).norm() / operators(x).float().norm()
    if not distance < torch.finfo(x.dtype).eps:
        raise ArithmeticError(f"{case.model}: the outputs are {distance:.1e} apart")

    def step(call: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        if not case.trains:
            return replayed(torch.no_grad()(lambda: call(x)))
        return lambda: torch.autograd.grad(call(x), [x, *parameters], gradient)

    steps = {"operators": step(operators), "compiled": step(torch.compile(operators)), "ours": step(ours)}
    times = timing.median_ms({name: (function, CALLS) for name, function in steps.items()})
    batch, tokens, heads, head_dim = case.sizes
    sizes = {"batch": batch, "tokens": tokens, "heads": heads, "head_dim": head_dim}
    moved = 2 * x.numel() * x.element_size()
    facts = {"direction": "forward_backward" if case.trains else "forward", "copy_ms": moved / bandwidth * 1e3}
    return {"model": case.model, **sizes, **facts, **{f"{name}_ms": ms for name, ms in times.items()}}


def execute(args: argparse.Namespace) -> None:
    """Measure, and write <gpu>-qk_norm_rope.json."""
    device = command.gpu("cuda")
    bandwidth = timing.copy_bandwidth(device)
    result = {**results.facts(device), "copy_bandwidth": bandwidth, "rows": []}
    for case in CASES:
        result["rows"].append(measure_case(case, bandwidth))
        print(result["rows"][-1], flush=True)
    results.write(results.path_of(args.output, result, "qk_norm_rope"), result)
