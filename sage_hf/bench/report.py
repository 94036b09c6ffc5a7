"""One file that tells what a GPU does with our recipes: for owners of a GPU that we have never run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sage_hf.bench import check, measure
from sage_hf.bench.cases import SHAPES, Case, draw
from sage_hf.bench.providers import PROVIDERS
from sage_hf.bench.results import Result, Row, facts, reason
from sage_hf.bench.timing import copy_bandwidth
from sage_hf.metrics import tensor_errors
from sage_hf.nominal import nominal_request
from sage_hf.text import text_table
from sage_kernels import ops
from sage_kernels.cuda.registration import nvfp4_forward_measured
from sage_kernels.dispatch.registry import select
from sage_kernels.dispatch.run import request_of
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.call import Call
from sage_kernels.spec.recipe import RECIPES, get_recipe

FORWARD_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.qk != "exact" and recipe.backward is None)
SPEED_SHAPES = ("4k-128", "16k-128", "16k-128-causal", "4k-64", "16k-64")
SPEED_PROVIDERS = ("sdpa_fa2", "cudnn", "sage_hf:sage1", "sage_hf:sage2", "sage_hf:sage3")
UNTRIED = "kernels that run where `sage-hf tune` found them faster"
"""Name of the kernels that nobody has tried on such a GPU."""
CHECKED = (1, 4, 2, 1000)
"""Batch, heads and tokens of the calls whose errors are measured, for each head_dim of HEAD_DIMS; they fill no tile."""
HEAD_DIMS = (64, 128)


def plans(device: torch.device) -> list[Row]:
    """Return which kernels run each recipe in a long call, and why another recipe does, if one does."""
    chosen = [select(nominal_request(name, device)) for name in RECIPES]
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
        for plan in chosen
    ]


def errors(
    device: torch.device, recipes: Sequence[str] = FORWARD_RECIPES, head_dims: Sequence[int] = HEAD_DIMS
) -> list[Row]:
    """Compare native kernels, and the recipe's reference in PyTorch, with exact attention in float64.

    Returns:
        Rows {recipe, head_dim, causal} with "kernel", "quantizer", "rel_l1" and "reference_rel_l1", which agree to some
        percent where the kernel is right, and with causality "lse_error", the largest difference of the log-sum-exp
        from float64's; or with "unavailable", the reason, where nothing runs the recipe natively, or the kernel fails.
    """
    rows = []
    for name in recipes:
        for head_dim in head_dims:
            for is_causal in (False, True):
                row = {"recipe": name, "head_dim": head_dim, "causal": is_causal}
                try:
                    row |= _errors_of(device, name, head_dim, is_causal)
                except Exception as error:  # A kernel may fail in any way: its row says how.
                    row["unavailable"] = reason(error)
                rows.append(row)
    return rows


def _errors_of(device: torch.device, recipe: str, head_dim: int, is_causal: bool) -> Row:
    case = Case.square("checked", (*CHECKED, head_dim), is_causal)
    inputs = draw(case, device, biased=True, heads_first=True).tensors
    call = Call(*inputs, get_recipe(recipe), is_causal=is_causal, scale=head_dim**-0.5, return_lse=is_causal)
    plan = select(request_of(call), "error")
    output, lse = ops.attention(*inputs, is_causal=is_causal, recipe=recipe, fallback="error", return_lse=is_causal)
    expected, _ = reference.attention(*inputs, call.recipe, is_causal=is_causal)
    truth, true_lse = sdpa.attention(*(x.double() for x in inputs), is_causal=is_causal)
    found = {
        "kernel": plan.kernel,
        "quantizer": plan.quantizer,
        "rel_l1": tensor_errors(truth, output.double()).rel_l1,
        "reference_rel_l1": tensor_errors(truth, expected.double()).rel_l1,
    }
    return found | ({"lse_error": (lse - true_lse).abs().max().item()} if is_causal else {})


def run(
    device: torch.device,
    write: Callable[[Result], None],
    progress: Callable[[str], None] = print,
) -> Result:
    """Report on a GPU.

    Kernels that nobody has tried come last, after all else has been written: should one hang, the file is there.

    Args:
        device: a CUDA device.
        write: called with the result so far, whenever there is more.
        progress: called with a text for each part before it begins.

    Returns:
        Plain data: facts about the machine, "copy_bandwidth", "check" (see `check.run`), "plans" (see `plans`),
        "errors" (see `errors`), and "rows" as of `measure.run` of SPEED_SHAPES and SPEED_PROVIDERS. Rows of kernels
        that wait to be tried have "untried".
    """
    shapes = [shape for shape in SHAPES if shape.name in SPEED_SHAPES]
    providers = [one for one in PROVIDERS if one.name in SPEED_PROVIDERS and one.scope == "end_to_end"]
    properties = torch.cuda.get_device_properties(device)
    result: Result = {
        **facts(device),
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "copy_bandwidth": copy_bandwidth(device),
        "plans": [],
        "errors": [],
        "rows": [],
    }
    progress("check")
    result["check"] = check.run(device)
    write(result)
    for untried in (False, True):
        with nvfp4_forward_measured(untried), torch.cuda.device(device), torch.no_grad():
            found = plans(device)
            if untried:
                before = {row["recipe"]: row["kernel"] for row in result["plans"]}
                found = [row for row in found if row["kernel"] != before[row["recipe"]]]
            recipes = [row["recipe"] for row in found if row["recipe"] in FORWARD_RECIPES]
            names = {f"sage_hf:{recipe}" for recipe in recipes}
            chosen = [one for one in providers if one.name in names or not untried]
            note = {"untried": True} if untried else {}
            result["plans"] += [row | note for row in found]
            write(result)
            progress("errors" + f", {UNTRIED}" * untried)
            result["errors"] += [row | note for row in errors(device, recipes)]
            write(result)
            for shape in shapes if chosen else ():
                progress(f"{shape.name}: {shape}" + f", {UNTRIED}" * untried)
                result["rows"] += [row | note for row in measure.measure_case(shape, chosen, device)]
                write(result)
    return result


def text(result: Result) -> str:
    """Return the report's tables as text: the self-check, errors, then speeds."""
    kernels = [
        [
            row["recipe"],
            row.get("kernel", "–"),
            str(row["head_dim"]) + (", causal" if row["causal"] else ""),
            *(f"{row[name]:.4f}" if name in row else "–" for name in ("rel_l1", "reference_rel_l1")),
            row.get("unavailable", ""),
        ]
        for row in result["errors"]
    ]
    speeds = [
        [
            row["shape"],
            row["provider"],
            row.get("kernel", "–"),
            f"{row['ms']:.3f}" if "ms" in row else "–",
            f"{row['tflops']:.0f}" if "tflops" in row else row.get("unavailable", ""),
        ]
        for row in result["rows"]
    ]
    return "\n\n".join(
        (
            check.text(result["check"]),
            text_table(["recipe", "kernel", "head_dim", "error", "reference's", "why not"], kernels),
            text_table(["shape", "provider", "kernel", "ms", "TFLOP/s"], speeds),
        )
    )
