"""Measure errors of peaked attention: our recipes with and without outlier handling, and other libraries' kernels.

    python studies/peaked_errors.py --output benchmarks/results  # on this GPU: our kernels and other libraries'
    python studies/peaked_errors.py --device cpu --output benchmarks/results  # the reference, on the shorter tensors

Errors are relative L1 errors of the output against exact attention in float64, on the tensors of `peaked_tensors`. The
JSON is <device>-peaked.json, written after each tensor; a row has "tensor", "provider" (a recipe or another provider),
"rel_l1" and, for recipes, "outlier_handling" (True: with outlier handling) and "kernel".
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peaked_tensors import CASES, Case
from tensors import Inputs
from torch import Tensor

from sage_hf.bench import cases as bench_cases
from sage_hf.bench import results
from sage_hf.bench.providers import PROVIDERS, Provider
from sage_hf.metrics import tensor_errors
from sage_hf.text import markdown_table
from sage_kernels import ops
from sage_kernels.dispatch import execution
from sage_kernels.dispatch.plan import Plan
from sage_kernels.exact import sdpa
from sage_kernels.spec.recipe import RECIPES, Recipe, without_outlier_handling

OURS = ("sage1", "sage2", "sage3", "sage3_paper")
FP8 = ("fa3_fp8", "cudnn_fp8")
OTHER_PROVIDERS = [
    provider
    for provider in PROVIDERS
    if provider.name in FP8 or (provider.name.startswith("sageattention") and provider.scope != "kernel")
]
LABELS = {provider.name: provider.label for provider in OTHER_PROVIDERS}
LONGEST_ON_CPU = 8192
"""Largest number of keys that the reference computes."""
ALIGNED_BY_LAST_KEY = {"fa3_fp8"}
"""Providers whose causal attention aligns the last query with the last key; others need as many queries as keys."""


@contextmanager
def registered(recipe: Recipe) -> Iterator[None]:
    """Register a recipe's name with the operators while the block runs."""
    before = RECIPES.copy()
    RECIPES[recipe.name] = recipe
    try:
        yield
    finally:
        RECIPES.clear()
        RECIPES.update(before)


def variants(name: str) -> dict[bool, Recipe]:
    """Return the recipe without outlier handling (False), under another name; and with it (True), if it has any."""
    recipe, plain = RECIPES[name], without_outlier_handling(RECIPES[name])
    plain = plain if plain == recipe else replace(plain, name=f"{name} without outlier handling")
    return {False: plain} if plain == recipe else {False: plain, True: recipe}


def attend(inputs: Inputs, recipe: Recipe) -> tuple[Tensor, str]:
    """Return the output in a recipe's own numerics, and the name of the kernel that ran.

    Raises:
        RuntimeError: exact attention ran instead.
    """
    plans: list[Plan] = []
    execution.plan_listeners.append(plans.append)
    try:
        with registered(recipe):
            output, _ = ops.attention(*inputs[:3], **inputs.options, recipe=recipe.name, fallback="emulate")
    finally:
        execution.plan_listeners.pop()
    if plans[0].is_fallback:
        raise RuntimeError(f"{plans[0].recipe} attention ran instead of {recipe.name}: {plans[0].reason}")
    return output, plans[0].kernel


def measure_recipe(inputs: Inputs, truth: Tensor, name: str) -> list[dict[str, Any]]:
    """Return the recipe's rows: without outlier handling and, if it has any, with outlier handling."""
    rows = []
    for handled, recipe in variants(name).items():
        output, kernel = attend(inputs, recipe)
        error = tensor_errors(truth, output).rel_l1
        rows.append({"provider": name, "outlier_handling": handled, "kernel": kernel, "rel_l1": error})
    return rows


def measure_other(inputs: Inputs, truth: Tensor, provider: Provider) -> dict[str, Any]:
    """Return another provider's row; "unavailable" is the reason for a missing error."""
    row: dict[str, Any] = {"provider": provider.name}
    if inputs.is_causal and inputs.causal_offset and provider.name not in ALIGNED_BY_LAST_KEY:
        return row | {"unavailable": "causal attention of the last queries only"}
    (batch, q_heads, q_len, head_dim), (_, kv_heads, kv_len, _) = inputs.query.shape, inputs.key.shape
    mask: bench_cases.MaskName = "causal" if inputs.is_causal else "none"
    case = bench_cases.BenchCase("peaked", batch, q_heads, kv_heads, q_len, kv_len, head_dim, mask)
    try:
        prepared = provider.prepare(bench_cases.CaseInputs(case, *inputs[:3]))
        return row | {"rel_l1": tensor_errors(truth, prepared.call().double() * prepared.output_scale).rel_l1}
    except Exception as error:  # A provider may raise any error: its row holds it.
        return row | {"unavailable": results.reason(error)}


@torch.no_grad()
def run(
    device: torch.device,
    cases: Sequence[Case],
    providers: Sequence[Provider],
    write: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Return the rows of all cases, in float32 on a CPU and in bfloat16 on a GPU.

    Args:
        device: device to run on.
        cases: the tensors.
        providers: other libraries' kernels to measure too.
        write: called with the rows so far after each case.
    """
    rows: list[dict[str, Any]] = []
    for case in cases:
        inputs = case.draw(device).to(torch.float32 if device.type == "cpu" else torch.bfloat16)
        truth, _ = sdpa.attention(*inputs[:3], **inputs.options)
        new_rows = [measure_other(inputs, truth, provider) for provider in providers]
        new_rows += [row for name in OURS for row in measure_recipe(inputs, truth, name)]
        rows += [{"tensor": case.name, **row} for row in new_rows]
        write(rows)
        print(markdown(rows[-len(new_rows) :]).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the errors as a Markdown table; a recipe with outlier handling has its error without → with it."""
    errors: dict[tuple[str, str], dict[bool | None, float]] = defaultdict(dict)
    for row in rows:
        if "rel_l1" in row:
            errors[row["tensor"], row["provider"]][row.get("outlier_handling")] = row["rel_l1"]
    providers = {provider for _, provider in errors}
    columns = [name for name in (*LABELS, *OURS) if name in providers]
    lines = [
        [tensor, *(" → ".join(f"{error:.4f}" for error in errors[tensor, name].values()) or "–" for name in columns)]
        for tensor in dict.fromkeys(row["tensor"] for row in rows)
    ]
    return markdown_table(["tensor", *(LABELS.get(name, f"`{name}`") for name in columns)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="folder for the JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    facts = results.facts(device)
    path = results.path_of(args.output, facts, "peaked")
    cases = [case for case in CASES if on_gpu or case.kv_len <= LONGEST_ON_CPU]
    other_providers = OTHER_PROVIDERS if on_gpu else ()
    print(markdown(run(device, cases, other_providers, lambda rows: results.write(path, {**facts, "rows": rows}))))


if __name__ == "__main__":
    main()
