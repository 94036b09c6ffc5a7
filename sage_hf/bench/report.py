"""One file about our recipes on a GPU, for owners of a GPU that we have never run on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from sage_hf.bench import check, measure
from sage_hf.bench.cases import SHAPES
from sage_hf.bench.providers import PROVIDERS
from sage_hf.bench.results import BenchmarkResult, Row, facts
from sage_hf.bench.timing import copy_bandwidth
from sage_hf.nominal import nominal_request
from sage_hf.text import text_table
from sage_kernels.backends import enforce_nvfp4_forward
from sage_kernels.dispatch.select import select
from sage_kernels.spec.recipe import RECIPES

FORWARD_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.qk != "exact" and recipe.backward is None)
SPEED_SHAPES = ("4k-128", "16k-128", "16k-128-causal", "4k-64", "16k-64")
SPEED_PROVIDERS = ("sdpa_fa2", "cudnn", "sage_hf:sage1", "sage_hf:sage2", "sage_hf:sage3")
UNTRIED = "kernels that run where `sage-hf tune` found them faster"
"""Label of the kernels that nobody has tried on such a GPU."""


def plans(device: torch.device) -> list[Row]:
    """Return the kernels that run each recipe in a long call; if another recipe runs, also the reason."""
    chosen_plans = [select(nominal_request(name, device)) for name in RECIPES]
    return [
        {
            "recipe": plan.request.recipe,
            "runs": plan.recipe,
            "kernel": plan.kernel,
            "quantizer": plan.quantizer,
            "backward": plan.backward,
            "numerics": plan.numerics,
            "reason": plan.reason,
        }
        for plan in chosen_plans
    ]


def run(
    device: torch.device,
    write: Callable[[BenchmarkResult], None],
    progress: Callable[[str], None] = print,
) -> BenchmarkResult:
    """Report on a GPU.

    Kernels that nobody has tried come last, after everything else has been written: if one hangs, the file exists.

    Args:
        device: a CUDA device.
        write: called with the result so far, after each part.
        progress: called with a text for each part before it begins.

    Returns:
        Plain data: facts about the machine, "copy_bandwidth", "check" (see `check.run`), "plans" (see `plans`), and
        "rows", speeds and errors as from `measure.run` with SPEED_SHAPES and SPEED_PROVIDERS. Rows of kernels that are
        yet to be tried have "untried".
    """
    shapes = [shape for shape in SHAPES if shape.name in SPEED_SHAPES]
    providers = [
        provider for provider in PROVIDERS if provider.name in SPEED_PROVIDERS and provider.scope == "end_to_end"
    ]
    properties = torch.cuda.get_device_properties(device)
    result: BenchmarkResult = {
        **facts(device),
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "copy_bandwidth": copy_bandwidth(device),
        "plans": [],
        "rows": [],
    }
    progress("check")
    result["check"] = check.run(device)
    write(result)
    for untried in (False, True):
        context = enforce_nvfp4_forward(True) if untried else nullcontext()
        with context, torch.cuda.device(device), torch.no_grad():
            planned = plans(device)
            if untried:
                before = {row["recipe"]: row["kernel"] for row in result["plans"]}
                planned = [row for row in planned if row["kernel"] != before[row["recipe"]]]
            recipes = [row["recipe"] for row in planned if row["recipe"] in FORWARD_RECIPES]
            names = {f"sage_hf:{recipe}" for recipe in recipes}
            chosen_providers = [provider for provider in providers if provider.name in names or not untried]
            note = {"untried": True} if untried else {}
            result["plans"] += [row | note for row in planned]
            write(result)
            for shape in shapes if chosen_providers else ():
                progress(f"{shape.name}: {shape}" + f", {UNTRIED}" * untried)
                result["rows"] += [row | note for row in measure.measure_case(shape, chosen_providers, device)]
                write(result)
    return result


def text(result: BenchmarkResult) -> str:
    """Return the report's tables as text: the self-check, then speeds and errors."""
    speeds = [
        [
            row["shape"],
            row["provider"],
            row.get("kernel", "–"),
            f"{row['ms']:.3f}" if "ms" in row else "–",
            f"{row['rel_l1']:.4f}" if "rel_l1" in row else "–",
            f"{row['tflops']:.0f}" if "tflops" in row else row.get("unavailable", ""),
        ]
        for row in result["rows"]
    ]
    return "\n\n".join(
        (
            check.text(result["check"]),
            text_table(["shape", "provider", "kernel", "ms", "error", "TFLOP/s"], speeds),
        )
    )
