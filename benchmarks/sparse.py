"""Measure attention over block lists on this GPU: our INT8 kernels and PyTorch's compiled flex_attention.

Lists are drawn at random, or chosen by a router on tensors whose neighbours are alike ("lists": "drawn", "subblock"),
with the same number of tiles for each block of rows. A row's speed counts the operations of kept tiles alone; its time
includes quantising and sorting of lists, but not routing. "training" has such rows of forward and backward pass
together, whose operations are 3.5 times those of the forward. "routing" has the times of what comes before:
choosing tiles, and putting tokens into 4×4×4 order and back, and of the dense `sage2` call of as many tokens.
Kernels are compiled first, each shape's in a process of its own.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sage_hf.bench import command, results
from sage_hf.bench.measure import require_finite
from sage_hf.bench.prewarm import call_in_processes
from sage_hf.bench.results import reason
from sage_hf.bench.timing import MIN_CALLS, first_calls, median_ms
from sage_hf.sparse import MeanRouter, ShareRouter, SubBlockRouter
from sage_hf.sparse.layer import order_beside_text, permute_tokens
from sage_kernels import ops, training
from sage_kernels.exact import sdpa
from sage_kernels.spec.block_list import BlockList

ERROR_ROWS = 128
SKIPPED = (0.75, 0.9)
GRIDS = ((4, 64, 64), (8, 64, 64), (21, 45, 80))
"""Grids of tokens: 16,384, 32,768, and the 75,600 of Wan 2.1 at 720p."""
DENSE, DENSE_TRAINING = "sage_hf:sage2 dense", "sage_hf:sage_bwd dense"
"""Names of the providers that attend to all tiles by the same doors, so by the kernels that are best for that."""
LISTS = DRAWN, ROUTED = "drawn", "subblock"
"""Where lists come from: drawn at random, or chosen by `SubBlockRouter`."""
BACKWARD = 3.5
"""Operations of forward and backward pass together, in those of the forward."""


@dataclass(frozen=True)
class Case:
    """A self-attention call with lists: batch 1, as many heads of K and V as of Q; `lists` is one of LISTS."""

    heads: int
    tokens: int
    head_dim: int
    skipped: float
    block_m: int = 128
    block_n: int = 128
    lists: str = DRAWN

    @property
    def measures_dense(self) -> bool:
        """Return whether attention to all tiles is measured too: once for each shape."""
        return self.block_m == 128 and self.skipped == SKIPPED[0] and self.lists == DRAWN

    @property
    def places(self) -> int:
        """Return the number of tiles kept for a block of rows."""
        return max(1, round(self.tokens // self.block_n * (1 - self.skipped)))

    @property
    def operations(self) -> float:
        """Return the number of floating-point operations in kept tiles."""
        return self.dense_operations * self.places * self.block_n / self.tokens

    @property
    def dense_operations(self) -> float:
        """Return the number of floating-point operations in all tiles."""
        return 4.0 * self.heads * self.tokens**2 * self.head_dim


CASES = [
    Case(24, tokens, head_dim, skipped, size, size)
    for tokens, head_dim, size in ((32768, 128, 128), (32768, 128, 64), (32768, 64, 128), (109568, 128, 128))
    for skipped in SKIPPED
] + [Case(24, tokens, 128, skipped, lists=ROUTED) for tokens in (32768, 109568) for skipped in SKIPPED]


TRAINING_CASES = [
    Case(24, 32768, head_dim, skipped, size, size)
    for head_dim, size in ((128, 128), (128, 64), (64, 128))
    for skipped in SKIPPED
]


def draw(case: Case, device: torch.device) -> tuple[list[torch.Tensor], BlockList]:
    """Return query, key and value in bfloat16, and a list with `case.places` tiles per block of rows.

    Tensors are standard normal. Where a router chooses, each block of Q and K has a mean of unit variance, which walks
    from block to block, so that near tiles weigh more than far ones, as they do in a video.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, case.heads, case.tokens, case.head_dim)
    inputs = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3)]
    if case.lists == ROUTED:
        number = case.tokens // case.block_n
        steps = torch.randn(1, case.heads, number, case.head_dim, generator=generator, device=device)
        means = torch.nn.functional.normalize(steps.cumsum(2), dim=-1) * case.head_dim**0.5
        walk = means.bfloat16().repeat_interleave(case.block_n, 2)
        query, key, value = inputs[0] + walk, inputs[1] + walk, inputs[2]
        router = SubBlockRouter((case.places - 0.5) / number, case.block_m, case.block_n)  # which rounds up
        return [query, key, value], router.route(query, key)
    blocks = (1, case.heads, case.tokens // case.block_m, case.tokens // case.block_n)
    places = torch.rand(blocks, generator=generator, device=device).topk(case.places).indices
    tiles = places.sort().values.int()
    counts = torch.full(blocks[:3], case.places, dtype=torch.int32, device=device)
    return inputs, BlockList(counts, tiles, case.block_m, case.block_n)


def flex_mask(blocks: BlockList, tokens: int) -> BlockMask:
    """Return a list as flex_attention takes it: all of its tiles are computed without a mask."""
    number = tokens // blocks.block_n
    tiles = torch.nn.functional.pad(blocks.tiles, (0, number - blocks.tiles.shape[-1]))
    none = torch.zeros_like(blocks.counts)
    sizes = (blocks.block_m, blocks.block_n)
    return BlockMask.from_kv_blocks(none, torch.zeros_like(tiles), blocks.counts, tiles, BLOCK_SIZE=sizes)


def error(output: torch.Tensor, inputs: list[torch.Tensor], blocks: BlockList) -> float:
    """Return the relative L1 error against exact attention over the list, in some rows of the first and last head."""
    query, key, value = inputs
    tokens = query.shape[2]
    rows = torch.linspace(0, tokens - 1, ERROR_ROWS, device=query.device).long()
    heads = torch.tensor([0, query.shape[1] - 1], device=query.device)
    kept = blocks.kept(tokens)[:, heads][:, :, rows // blocks.block_m]
    mask = kept.repeat_interleave(blocks.block_n, -1)
    truth, _ = sdpa.attention(query[:, heads][:, :, rows], key[:, heads], value[:, heads], mask=mask)
    return float((output[:, heads][:, :, rows] - truth).abs().sum() / truth.abs().sum())


def new_row(case: Case, provider: str) -> dict[str, Any]:
    """Return a row with shape and provider, without measurements; the dense ones attend to all tiles."""
    return {
        "batch": 1,
        "q_heads": case.heads,
        "kv_heads": case.heads,
        "q_len": case.tokens,
        "kv_len": case.tokens,
        "head_dim": case.head_dim,
        "block_m": case.block_m,
        "block_n": case.block_n,
        "lists": case.lists,
        "skipped": 0.0 if provider in (DENSE, DENSE_TRAINING) else case.skipped,
        "provider": provider,
        "scope": "end_to_end",
    }


def forward_calls(case: Case, inputs: list[torch.Tensor], blocks: BlockList) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the calls of all providers, which return the output."""
    providers: dict[str, Callable[[], torch.Tensor]] = {
        "sage_hf:sage2": lambda: ops.attention(*inputs, blocks=blocks, recipe="sage2")[0]
    }
    if case.measures_dense:
        providers[DENSE] = lambda: ops.attention(*inputs, recipe="sage2")[0]
    if case.block_m == case.block_n == 128:
        lists, flex = flex_mask(blocks, case.tokens), torch.compile(flex_attention, dynamic=False)
        providers["flex_attention"] = lambda: flex(*inputs, block_mask=lists)
    return providers


def measure(case: Case, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each provider; one that fails has a row that says how."""
    inputs, blocks = draw(case, device)
    providers = forward_calls(case, inputs, blocks)
    rows = {name: new_row(case, name) for name in providers}
    calls = {}
    for name, call in providers.items():
        try:
            _, peak, count = first_calls(call)
            output = call()
            require_finite(output)
            rows[name] |= {"peak_extra_bytes": peak}
            if name != DENSE:
                rows[name] |= {"rel_l1": error(output, inputs, blocks)}
            calls[name] = (call, max(MIN_CALLS, count // 2))
        except Exception as failure:  # A provider may fail in any way: its row says how.
            rows[name] |= {"unavailable": reason(failure)}
    for name, ms in median_ms(calls).items():
        operations = case.dense_operations if name == DENSE else case.operations
        rows[name] |= {"ms": ms, "kept_tflops": operations / ms * 1e-9}
    return list(rows.values())


def exact_gradients(
    inputs: list[torch.Tensor], gradient: torch.Tensor, blocks: BlockList, head: int
) -> list[torch.Tensor]:
    """Return dQ, dK and dV of one head of batch element 0 in float32, some rows at a time."""
    query, key, value, gradient = (x[0, head].float() for x in (*inputs, gradient))
    tokens, head_dim = query.shape
    kept = blocks.kept(tokens)[0, head]
    found = [torch.zeros_like(x) for x in (query, key, value)]
    for start in range(0, tokens, 4096):
        rows = slice(start, start + 4096)
        allowed = kept[rows.start // blocks.block_m : rows.stop // blocks.block_m]
        allowed = allowed.repeat_interleave(blocks.block_m, 0).repeat_interleave(blocks.block_n, 1)
        scores = (query[rows] @ key.T * head_dim**-0.5).masked_fill(~allowed, -torch.inf)
        p = scores.softmax(-1)
        dp = gradient[rows] @ value.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * head_dim**-0.5
        found[0][rows] = ds @ key
        found[1] += ds.T @ query[rows]
        found[2] += p.T @ gradient[rows]
    return found


def output_gradient(query: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the output that backward passes start from, drawn."""
    generator = torch.Generator(query.device).manual_seed(1)
    return torch.randn(query.shape, generator=generator, device=query.device).to(query.dtype)


def training_calls(
    case: Case, inputs: list[torch.Tensor], blocks: BlockList, gradient: torch.Tensor
) -> dict[str, Callable[[], tuple[torch.Tensor, ...]]]:
    """Return the calls of all providers, which return dQ, dK and dV; the inputs will require gradients."""
    for x in inputs:
        x.requires_grad_()
    attend: dict[str, Callable[[], torch.Tensor]] = {
        "sage_hf:sage_bwd": lambda: training.attention(*inputs, blocks=blocks)[0]
    }
    if case.measures_dense:
        attend[DENSE_TRAINING] = lambda: training.attention(*inputs)[0]
    if case.block_m == case.block_n == 128:
        lists, flex = flex_mask(blocks, case.tokens), torch.compile(flex_attention, dynamic=False)
        attend["flex_attention"] = lambda: flex(*inputs, block_mask=lists)

    def forward_backward(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(forward(), inputs, gradient)

    return {name: partial(forward_backward, forward) for name, forward in attend.items()}


def measure_training(case: Case, device: torch.device) -> list[dict[str, Any]]:
    """Return a row of forward and backward pass for each provider; one that fails has a row that says how."""
    inputs, blocks = draw(case, device)
    gradient = output_gradient(inputs[0])
    rows, calls = {}, {}
    for name, call in training_calls(case, inputs, blocks, gradient).items():
        rows[name] = new_row(case, name) | {"direction": "forward_backward"}
        try:
            _, peak, count = first_calls(call)
            found = call()
            rows[name] |= {"peak_extra_bytes": peak}
            if name != DENSE_TRAINING:
                truths = exact_gradients(inputs, gradient, blocks, 0)
                names = ("rel_l1_dq", "rel_l1_dk", "rel_l1_dv")
                for error_name, x, truth in zip(names, found, truths, strict=True):
                    rows[name][error_name] = float((x[0, 0] - truth).abs().sum() / truth.abs().sum())
            calls[name] = (call, max(MIN_CALLS, count // 2))
        except Exception as failure:  # A provider may fail in any way: its row says how.
            rows[name] |= {"unavailable": reason(failure)}
    for name, ms in median_ms(calls).items():
        operations = BACKWARD * (case.dense_operations if name == DENSE_TRAINING else case.operations)
        rows[name] |= {"ms": ms, "kept_tflops": operations / ms * 1e-9}
    return list(rows.values())


def routing_calls(grid: tuple[int, int, int], device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the calls that `measure_routing` times, for one grid of tokens."""
    tokens = math.prod(grid)
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, tokens, 24, 128)  # as projections lay them out
    query, key, value = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
    )
    states, angles = value.transpose(1, 2).flatten(2), torch.rand(2, tokens, 128, device=device)
    order = order_beside_text(grid, tokens, "last", device)
    return {
        "mean": lambda: MeanRouter(0.25).route(query, key),
        "subblock": lambda: SubBlockRouter(0.25).route(query, key),
        "share": lambda: ShareRouter(0.9).route(query, key),
        "reorder in each call": lambda: [permute_tokens(x, order.tokens) for x in (query, key, value, value)],
        "reorder once a model's call": lambda: [
            x.index_select(1, index)
            for x, index in ((states, order.tokens), (angles, order.tokens), (states, order.places))
        ],
        "dense": lambda: ops.attention(query, key, value, recipe="sage2"),
    }


def measure_routing(device: torch.device) -> list[dict[str, Any]]:
    """Return the time of each router, keeping a quarter of the tiles, and of reordering, in calls and around a model.

    In each call of attention Q, K, V and the output are permuted; around a model its hidden states, at both ends, and
    cosines and sines of rotary embeddings. Beside them stands the dense `sage2` call, and their share of it.
    """
    rows = []
    for grid in GRIDS:
        counted = {
            name: (call, max(MIN_CALLS, first_calls(call)[2] // 2))
            for name, call in routing_calls(grid, device).items()
        }
        times = median_ms(counted)
        for name, ms in times.items():
            row = {"q_heads": 24, "q_len": math.prod(grid), "head_dim": 128, "part": name, "ms": ms}
            rows.append(row | {"share_of_dense": ms / times["dense"]})
    return rows


def compile_kernels(kind: tuple[str, Case | None]) -> None:
    """Make each call of a case once, forward or with gradients, or without a case those of routing."""
    direction, case = kind
    device = torch.device("cuda")
    if case is None:
        calls: Iterable[Callable[[], object]] = routing_calls(GRIDS[0], device).values()
    else:
        inputs, blocks = draw(case, device)
        if direction == "forward":
            calls = forward_calls(case, inputs, blocks).values()
        else:
            calls = training_calls(case, inputs, blocks, output_gradient(inputs[0])).values()
    with torch.no_grad():
        for call in calls:
            with suppress(Exception):  # whoever measures it says how it fails
                call()
                torch.cuda.synchronize()


def compile_ahead() -> None:
    """Compile the kernels of all cases in processes, each by itself: workers of theirs would be more than cores."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    kinds: dict[tuple[str, Case | None], None] = {("forward", None): None}
    for direction, cases in (("forward", CASES), ("training", TRAINING_CASES)):
        kinds.update({(direction, replace(case, skipped=SKIPPED[0])): None for case in cases})
    call_in_processes(compile_kernels, kinds)


def describe(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    sizes = f"{row['head_dim']} {row['block_m']}x{row['block_n']} {row['lists']} {row['skipped']:.2f} {row['provider']}"
    if "unavailable" in row:
        return f"{sizes}: {row['unavailable']}"
    errors = " ".join(f"{row[name]:.4f}" for name in row if name.startswith("rel_l1"))
    return f"{sizes}: {row['ms']:.3f} ms, {row['kept_tflops']:.0f} TFLOP/s, errors {errors or '–'}"


def is_measured(case: Case, rows: list[dict[str, Any]]) -> bool:
    """Return whether rows hold a case."""
    wanted = (case.tokens, case.head_dim, case.block_m, case.block_n, case.lists, case.skipped)
    names = ("q_len", "head_dim", "block_m", "block_n", "lists", "skipped")
    return any(tuple(row[name] for name in names) == wanted for row in rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `execute` to the parser."""
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR")


def execute(args: argparse.Namespace) -> None:
    """Measure, and write <gpu>-sparse.json after every case; a file of the same commit is continued."""
    device = command.gpu("cuda")
    compile_ahead()
    result = results.facts(device)
    path = results.path_of(args.output, result, "sparse")
    before = results.read(path) or {}
    same = bool(result["commit"]) and before.get("commit") == result["commit"]
    with torch.no_grad():
        result["routing"] = before["routing"] if same else measure_routing(device)
        print(*result["routing"], sep="\n", flush=True)
        kinds = (("rows", CASES, measure), ("training", TRAINING_CASES, measure_training))
        result |= {kind: before.get(kind, []) if same else [] for kind, _, _ in kinds}
        for kind, cases, measure_case in kinds:
            for case in cases:
                if not is_measured(case, result[kind]):
                    rows = measure_case(case, device)
                    result[kind] += rows
                    print(*map(describe, rows), sep="\n", flush=True)
                    results.write(path, result)
