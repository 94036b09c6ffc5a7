"""Measure attention over block lists on this GPU: our INT8 kernels and PyTorch's compiled flex_attention.

Lists are drawn at random, or chosen by a router on tensors with similar neighbours ("lists": "drawn", "subblock"), with
the same number of tiles for each block of rows. A row's speed counts only the operations of kept tiles; its time
includes quantising and sorting lists, but not routing. "training" has such rows for forward and backward pass together.
"routing" has the times of the work before attention (choosing tiles, and putting tokens into 4×4×4 order and back), and
of the dense `sage2` call with as many tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sage_hf.bench import cases, command, results
from sage_hf.bench.measure import require_finite
from sage_hf.bench.results import Row, reason
from sage_hf.bench.timing import MIN_CALLS, first_calls, median_ms
from sage_hf.metrics import tensor_errors
from sage_hf.sparse import MeanRouter, ShareRouter, SubBlockRouter
from sage_hf.sparse.layer import order_with_text, permute_tokens
from sage_kernels import ops, training
from sage_kernels.exact import sdpa
from sage_kernels.exact.gradients import Gradients, exact_gradients
from sage_kernels.spec.block_list import BlockList

ERROR_ROWS = 128
HEADS = 24
SKIPPED = (0.75, 0.9)
GRIDS = ((4, 64, 64), (8, 64, 64), (21, 45, 80))
"""Grids of tokens: 16,384, 32,768, and the 75,600 of Wan 2.1 at 720p."""
LISTS = DRAWN, ROUTED = "drawn", "subblock"
"""Origins of lists: drawn at random, or chosen by `SubBlockRouter`."""
SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")


@dataclass(frozen=True)
class Case:
    """A self-attention call with lists.

    Attributes:
        call: sizes of the call, and whether it trains; batch 1, as many heads of K and V as of Q.
        skipped: share of tiles to leave out.
        block_m, block_n: rows and keys of a tile.
        lists: one of LISTS.
    """

    call: cases.BenchCase
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
        """Return the number of kept tiles for a block of rows."""
        return max(1, round(self.call.kv_len // self.block_n * (1 - self.skipped)))

    @property
    def share(self) -> float:
        """Return the share of kept tiles."""
        return self.places * self.block_n / self.call.kv_len

    @cached_property
    def row(self) -> Row:
        """Return a row with the shape, without measurements."""
        sizes = {name: getattr(self.call, name) for name in SIZES}
        sizes |= {name: getattr(self, name) for name in ("block_m", "block_n", "lists", "skipped")}
        return sizes | ({"direction": self.call.direction} if self.call.training else {})


def _case(
    tokens: int, head_dim: int, skipped: float, size: int = 128, lists: str = DRAWN, trains: bool = False
) -> Case:
    call = cases.BenchCase.square("sparse", (1, HEADS, HEADS, tokens, head_dim), training=trains)
    return Case(call, skipped, size, size, lists)


FORWARD = [
    *(
        _case(tokens, head_dim, skipped, size)
        for tokens, head_dim, size in ((32768, 128, 128), (32768, 128, 64), (32768, 64, 128), (109568, 128, 128))
        for skipped in SKIPPED
    ),
    *(_case(tokens, 128, skipped, lists=ROUTED) for tokens in (32768, 109568) for skipped in SKIPPED),
]
TRAINING = [
    _case(32768, head_dim, skipped, size, trains=True)
    for head_dim, size in ((128, 128), (128, 64), (64, 128))
    for skipped in SKIPPED
]


def draw(case: Case, device: torch.device) -> tuple[cases.CaseInputs, BlockList]:
    """Return the tensors of the call, and a list with `case.places` tiles per block of rows.

    Tensors are standard normal. If a router chooses, each block of Q and K has a mean of unit variance, which walks
    from block to block, so that near tiles weigh more than far tiles, as in a video.
    """
    inputs, tokens, head_dim = cases.draw(case.call, device, heads_first=True), case.call.kv_len, case.call.head_dim
    generator = torch.Generator(device).manual_seed(1)
    if case.lists == ROUTED:
        number = tokens // case.block_n
        steps = torch.randn(1, case.call.q_heads, number, head_dim, generator=generator, device=device)
        means = torch.nn.functional.normalize(steps.cumsum(2), dim=-1) * head_dim**0.5
        walk = means.bfloat16().repeat_interleave(case.block_n, 2)
        inputs = replace(inputs, query=inputs.query + walk, key=inputs.key + walk)
        router = SubBlockRouter((case.places - 0.5) / number, case.block_m, case.block_n)  # which rounds up
        return inputs, router.route(inputs.query, inputs.key)
    blocks = (1, case.call.q_heads, tokens // case.block_m, tokens // case.block_n)
    places = torch.rand(blocks, generator=generator, device=device).topk(case.places).indices
    tiles = places.sort().values.int()
    counts = torch.full(blocks[:3], case.places, dtype=torch.int32, device=device)
    return inputs, BlockList(counts, tiles, case.block_m, case.block_n)


def flex_mask(blocks: BlockList, tokens: int) -> BlockMask:
    """Return a block list in flex_attention's form, in which all tiles are computed without a mask."""
    number = tokens // blocks.block_n
    tiles = torch.nn.functional.pad(blocks.tiles, (0, number - blocks.tiles.shape[-1]))
    none = torch.zeros_like(blocks.counts)
    sizes = (blocks.block_m, blocks.block_n)
    return BlockMask.from_kv_blocks(none, torch.zeros_like(tiles), blocks.counts, tiles, BLOCK_SIZE=sizes)


def errors_of(computed: Any, inputs: cases.CaseInputs, blocks: BlockList) -> dict[str, float]:
    """Return relative L1 errors against exact attention over the list.

    Args:
        computed: the output, which is compared in some rows of the first and the last head; in training `Gradients`,
            which are compared in the first head.
        inputs, blocks: inputs and list of the call.
    """
    query, key, value = (x.detach() for x in inputs.tensors)
    tokens = query.shape[2]
    if inputs.gradient is not None:
        first = blocks._replace(counts=blocks.counts[:, :1], tiles=blocks.tiles[:, :1])
        tensors = (x[:, :1] for x in (inputs.gradient, query, key, value))
        truths = exact_gradients(*tensors, mask=first.mask(tokens, 0, tokens))
        pairs = zip(("dq", "dk", "dv"), truths[1:], computed[1:], strict=True)
        return {f"rel_l1_{name}": tensor_errors(truth, x[:, :1]).rel_l1 for name, truth, x in pairs}
    rows = torch.linspace(0, tokens - 1, ERROR_ROWS, device=query.device).long()
    heads = torch.tensor([0, query.shape[1] - 1], device=query.device)
    mask = blocks.kept(tokens)[:, heads][:, :, rows // blocks.block_m].repeat_interleave(blocks.block_n, -1)
    truth, _ = sdpa.attention(query[:, heads][:, :, rows], key[:, heads], value[:, heads], mask=mask)
    return {"rel_l1": tensor_errors(truth, computed[:, heads][:, :, rows]).rel_l1}


def calls_of(case: Case, inputs: cases.CaseInputs, blocks: BlockList) -> dict[str, Callable[[], Any]]:
    """Return the calls of all providers: each returns the output, or in training `Gradients`.

    Dense calls attend to all tiles through the same entry points, so the best kernels for dense attention run.
    """
    tensors, gradient = inputs.tensors, inputs.gradient
    recipe, attend = ("sage_bwd", training.attention) if case.call.training else ("sage2", ops.attention)
    providers: dict[str, Callable[[], torch.Tensor]] = {
        f"sage_hf:{recipe}": lambda: attend(*tensors, blocks=blocks, recipe=recipe)[0]
    }
    if case.measures_dense:
        providers[f"sage_hf:{recipe} dense"] = lambda: attend(*tensors, recipe=recipe)[0]
    if case.block_m == case.block_n == 128:
        lists, flex = flex_mask(blocks, case.call.kv_len), torch.compile(flex_attention, dynamic=False)
        providers["flex_attention"] = lambda: flex(*tensors, block_mask=lists)
    if gradient is None:
        return providers

    def both(forward: Callable[[], torch.Tensor]) -> Gradients:
        with torch.enable_grad():
            output = forward()
            return Gradients(output.detach(), *torch.autograd.grad(output, tensors, gradient))

    return {name: lambda forward=forward: both(forward) for name, forward in providers.items()}


def measure(case: Case, device: torch.device) -> list[Row]:
    """Return a row for each provider; a failed provider's row holds the error."""
    inputs, blocks = draw(case, device)
    rows: dict[str, Row] = {}
    calls = {}
    for name, call in calls_of(case, inputs, blocks).items():
        dense = name.endswith(" dense")
        rows[name] = {**case.row, "provider": name, "scope": "end_to_end"} | ({"skipped": 0.0} if dense else {})
        try:
            _, peak, count = first_calls(call)
            computed = call()
            require_finite(computed)
            rows[name] |= {"peak_extra_bytes": peak} | ({} if dense else errors_of(computed, inputs, blocks))
            calls[name] = (call, max(MIN_CALLS, count // 2))
        except Exception as failure:  # A provider may raise any error: its row holds it.
            rows[name] |= {"unavailable": reason(failure)}
    for name, ms in median_ms(calls).items():
        operations = case.call.operations * (1.0 if name.endswith(" dense") else case.share)
        rows[name] |= {"ms": ms, "kept_tflops": operations / ms * 1e-9}
    return list(rows.values())


def routing_calls(tokens: int, grid: tuple[int, int, int], device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the calls that `measure_routing` times, for one grid of tokens."""
    query, key, value = cases.draw(cases.BenchCase.square("routing", (1, HEADS, HEADS, tokens, 128)), device).tensors
    states, angles = value.transpose(1, 2).flatten(2), torch.rand(2, tokens, 128, device=device)
    order = order_with_text(grid, tokens, "last", device)
    around = ((states, order.tokens), (angles, order.tokens), (states, order.places))
    return {
        "mean": lambda: MeanRouter(0.25).route(query, key),
        "subblock": lambda: SubBlockRouter(0.25).route(query, key),
        "share": lambda: ShareRouter(0.9).route(query, key),
        "reorder in each call": lambda: [permute_tokens(x, order.tokens) for x in (query, key, value, value)],
        "reorder once a model's call": lambda: [x.index_select(1, index) for x, index in around],
        "dense": lambda: ops.attention(query, key, value, recipe="sage2"),
    }


def measure_routing(device: torch.device) -> list[Row]:
    """Return the times of each router with a quarter of the tiles, and of reordering in calls and around a model.

    In each attention call, Q, K, V and the output are permuted; around a model, its hidden states are permuted at both
    ends, and the cosines and sines of rotary embeddings once. The dense `sage2` call follows; each row has its share of
    that call's time.
    """
    rows = []
    for grid in GRIDS:
        calls = routing_calls(math.prod(grid), grid, device)
        times = median_ms({name: (call, max(MIN_CALLS, first_calls(call)[2] // 2)) for name, call in calls.items()})
        for name, ms in times.items():
            row = {"q_heads": HEADS, "q_len": math.prod(grid), "head_dim": 128, "part": name, "ms": ms}
            rows.append(row | {"share_of_dense": ms / times["dense"]})
    return rows


def execute(args: argparse.Namespace) -> None:
    """Measure, and write <gpu>-sparse.json after every case; a file of the same commit is continued."""
    device = command.gpu("cuda")
    facts = results.facts(device)
    tables = {"rows": FORWARD, "training": TRAINING}
    stored = results.ResumedResult(results.path_of(args.output, facts, "sparse"), facts, ("routing", *tables))
    with torch.no_grad():
        if not stored.has("routing"):
            stored.add("routing", *measure_routing(device))
        for table, cases_of_table in tables.items():
            for case in cases_of_table:
                if not stored.has(table, **case.row):
                    stored.add(table, *measure(case, device))
