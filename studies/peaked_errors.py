"""Measure errors where attention is peaked, with and without the recipes' remedies, and of others' kernels.

python studies/peaked_errors.py --output benchmarks/results                  # on this GPU: our kernels and peers
python studies/peaked_errors.py --device cpu --output benchmarks/results     # the reference, on shorter tensors

Errors are relative L1 errors of the output against exact attention in float64, Σ|O - O'| / Σ|O|, on the tensors of
`peaked_tensors`. Short tensors come first, and of each those whose kernels are fast: others' and INT8's. The JSON is
<device>-peaked.json, written whenever a provider is done with tensors of one size; a row has "tensor", "provider" (a
recipe or a peer), "rel_l1" and, for recipes, "remedies" and "kernel".
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peaked_tensors import CASES, SMALL_CASES, Case, Inputs, Sinks
from torch import Tensor

from sage_hf.bench import cases as bench_cases
from sage_hf.bench import results
from sage_hf.bench.prewarm import call_in_processes
from sage_hf.bench.providers import PROVIDERS, Provider
from sage_hf.text import markdown_table
from sage_kernels import ops
from sage_kernels.dispatch import run as dispatch
from sage_kernels.dispatch.plan import Plan
from sage_kernels.exact import sdpa
from sage_kernels.spec.recipe import RECIPES, Recipe, without_outlier_handling

OURS = ("sage1", "sage2", "sage3", "sage3_paper")
PEERS = tuple(
    provider
    for provider in PROVIDERS
    if (provider.name, provider.scope)
    in {
        ("sageattention1", "end_to_end"),
        ("sageattention2", "end_to_end"),
        ("fa3_fp8", "kernel"),
        ("cudnn_fp8", "kernel"),
    }
)
LABELS = {provider.name: provider.label for provider in PEERS}
TENSORS = ("query", "key", "value")
BATCH_ELEMENTS = 2**28
"""Largest number of elements of K in a batch of cases: the emulation takes about 40 bytes for each."""
COMPILE_SECONDS = 30
"""Seconds in which compiling ahead may begin; a call compiles what it lacks, and rows come from then on."""
ALIGNED_BY_LAST_KEY = {"fa3_fp8"}
"""Peers whose causal attention aligns the last query with the last key; others' call has as many queries as keys."""


@contextmanager
def registered(recipe: Recipe) -> Iterator[None]:
    """Let the operators know a recipe by its name while the block runs."""
    RECIPES[recipe.name] = recipe
    try:
        yield
    finally:
        del RECIPES[recipe.name]


def relative_l1(truth: Tensor, output: Tensor) -> float:
    """Return Σ|O - O'| / Σ|O|."""
    return ((output.double() - truth).abs().sum() / truth.abs().sum()).item()


def attend(inputs: Inputs, recipe: str) -> tuple[Tensor, str]:
    """Return the output in a recipe's own numerics, and the name of the kernel that ran.

    Raises:
        RuntimeError: exact attention ran instead.
    """
    plans: list[Plan] = []
    dispatch.plan_listeners.append(plans.append)
    try:
        output, _ = ops.attention(
            *inputs[:3],
            is_causal=inputs.is_causal,
            causal_offset=inputs.causal_offset,
            recipe=recipe,
            fallback="emulate",
        )
    finally:
        dispatch.plan_listeners.pop()
    if plans[0].is_fallback:
        raise RuntimeError(f"{plans[0].recipe} attention ran instead of {recipe}: {plans[0].reason}")
    return output, plans[0].kernel


def measure_recipe(inputs: Inputs, truths: Tensor, name: str) -> list[list[dict[str, Any]]]:
    """Return the recipe's rows for each sample of a batch: without its remedies and, if it has any, with them."""
    recipe = RECIPES[name]
    plain = replace(without_outlier_handling(recipe), name=f"{name} without remedies")
    with registered(plain):
        outputs = {False: attend(inputs, plain.name)}
    if without_outlier_handling(recipe) != recipe:
        outputs[True] = attend(inputs, name)
    return [
        [
            {"provider": name, "remedies": remedies, "kernel": kernel, "rel_l1": relative_l1(truth, output[index])}
            for remedies, (output, kernel) in outputs.items()
        ]
        for index, truth in enumerate(truths)
    ]


def measure_peer(inputs: Inputs, truth: Tensor, peer: Provider) -> dict[str, Any]:
    """Return a peer's row; "unavailable" says why it has no error."""
    row: dict[str, Any] = {"provider": peer.name}
    if inputs.is_causal and inputs.causal_offset and peer.name not in ALIGNED_BY_LAST_KEY:
        return row | {"unavailable": "causal attention of the last queries only"}
    try:
        prepared = peer.prepare(_for_peers(inputs))
        output = prepared.call().double() * prepared.output_scale
    except Exception as error:  # A peer may fail in any way: its row says how.
        return row | {"unavailable": results.reason(error)}
    return row | {"rel_l1": relative_l1(truth, output)}


def _for_peers(inputs: Inputs) -> bench_cases.Inputs:
    (batch, q_heads, q_len, head_dim), (_, kv_heads, kv_len, _) = inputs.query.shape, inputs.key.shape
    mask: bench_cases.MaskName = "causal" if inputs.is_causal else "none"
    case = bench_cases.Case("peaked", batch, q_heads, kv_heads, q_len, kv_len, head_dim, mask)
    return bench_cases.Inputs(case, *inputs[:3])


def alike(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases in groups of equal sizes and causality, of at most BATCH_ELEMENTS elements of K each.

    The recipes run a group as one batch, whose samples do not know each other: the emulation takes most of its time to
    launch what it computes. Groups with few keys and queries come first.
    """
    groups: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for case in cases:
        causal = isinstance(case, Sinks) and case.causal
        groups[case.q_len, case.kv_len, case.q_heads, case.kv_heads, case.head_dim, causal].append(case)
    found = []
    for group in sorted(groups.values(), key=lambda group: group[0].q_len * group[0].kv_len):
        size = max(1, BATCH_ELEMENTS // (group[0].kv_heads * group[0].kv_len * group[0].head_dim))
        found += [group[start : start + size] for start in range(0, len(group), size)]
    return found


def warm(cases: Sequence[Case]) -> None:
    """Compile on a GPU, in several processes, what the INT8 recipes need for the cases."""
    names = [name for name in OURS if RECIPES[name].qk == "int8"]
    # One of each kernel comes before others of it, which would wait for the same compiler.
    each = itertools.product((group[0] for group in alike(cases)), names, (False, True))
    call_in_processes(_compile, each, COMPILE_SECONDS)


@torch.no_grad()
def _compile(what: tuple[Case, str, bool]) -> None:
    case, name, plain = what
    recipe = (
        replace(without_outlier_handling(RECIPES[name]), name=f"{name} without remedies") if plain else RECIPES[name]
    )
    with registered(recipe) if plain else nullcontext():
        attend(case.draw("cuda").to(torch.bfloat16), recipe.name)


@torch.no_grad()
def run(
    device: torch.device,
    cases: Sequence[Case],
    peers: Sequence[Provider],
    write: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Return the rows of all cases, in float32 on a CPU and in bfloat16 on a GPU.

    Args:
        device: where to.
        cases: the tensors.
        peers: others' kernels to measure too.
        write: called with the rows so far whenever a provider has measured a group of `alike` cases.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, float] = defaultdict(float)

    def found() -> list[dict[str, Any]]:
        return [row for case in cases for row in rows.get(case.name, ())]

    @contextmanager
    def timed(provider: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds[provider] += time.perf_counter() - started
        write(found())

    for group in alike(cases):
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        with timed("exact"):
            samples = [case.draw(device).to(dtype) for case in group]
            tensors = {name: torch.cat([getattr(one, name) for one in samples]) for name in TENSORS}
            batch = samples[0]._replace(**tensors)
            truths, _ = sdpa.attention(*batch[:3], is_causal=batch.is_causal, causal_offset=batch.causal_offset)
        rows |= {case.name: [] for case in group}
        for peer in peers:
            with timed(peer.name):
                for case, inputs, truth in zip(group, samples, truths, strict=True):
                    rows[case.name].append({"tensor": case.name, **measure_peer(inputs, truth[None], peer)})
        for name in OURS:
            with timed(name):
                for case, of_sample in zip(group, measure_recipe(batch, truths, name), strict=True):
                    rows[case.name] += [{"tensor": case.name, **row} for row in of_sample]
        for case in group:
            print(f"{case.name}: {_summary(rows[case.name])}", file=sys.stderr, flush=True)
        spent = ", ".join(f"{name} {total:.1f}" for name, total in seconds.items())
        print(f"seconds, after {len(rows)} of {len(cases)} tensors: {spent}", file=sys.stderr, flush=True)
    for peer in peers:
        reasons = {row["unavailable"] for row in found() if row["provider"] == peer.name and "unavailable" in row}
        for why in sorted(reasons):
            print(f"note: {peer.name} is missing where: {why}", file=sys.stderr)
    return found()


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    return ", ".join(
        f"{row['provider']}{'*' if row.get('remedies') else ''} {row['rel_l1']:.4f}" for row in rows if "rel_l1" in row
    )


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the errors as a Markdown table; where a recipe has remedies, its error without them → with them."""
    errors: dict[tuple[str, str], dict[bool | None, float]] = defaultdict(dict)
    for row in rows:
        if "rel_l1" in row:
            errors[row["tensor"], row["provider"]][row.get("remedies")] = row["rel_l1"]
    found = {provider for _, provider in errors}
    columns = [name for name in (*LABELS, *OURS) if name in found]
    lines = [
        [tensor, *(" → ".join(f"{error:.4f}" for error in errors[tensor, name].values()) or "–" for name in columns)]
        for tensor in dict.fromkeys(row["tensor"] for row in rows)
    ]
    return markdown_table(["tensor", *(LABELS.get(name, f"`{name}`") for name in columns)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure only tensors whose name contains it")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="folder for the JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    facts = results.facts(device)
    path = results.path_of(args.output, facts, "peaked")
    cases = [case for case in (CASES if on_gpu else SMALL_CASES) if args.only in case.name]
    if on_gpu:
        warm(cases)
    rows = run(device, cases, PEERS if on_gpu else (), lambda rows: results.write(path, {**facts, "rows": rows}))
    print(markdown(rows))


if __name__ == "__main__":
    main()
