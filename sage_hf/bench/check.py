"""The table of `sage-hf check`: a device's kernels run on small calls and are compared with the reference."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sage_hf.bench.prewarm import call_in_processes
from sage_hf.text import text_table
from sage_kernels import backends  # noqa: F401 - `backends` registers the kernels
from sage_kernels.backends import CONSUMER_BLACKWELL, enforce_nvfp4_forward
from sage_kernels.dispatch import examination, execution, registry, self_check, verdicts
from sage_kernels.dispatch.examination import KV_LEN, Q_LEN, CheckCase, Verdict
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.dispatch.select import select
from sage_kernels.spec.kv_format import FORMATS
from sage_kernels.spec.recipe import RECIPES, get_recipe

SECONDS = 60.0
COMPILING = 2 / 3
"""Share of the time after which the remaining kernels are compiled one after another."""
HEAD_DIMS = (64, 128)
"""Values of head_dim; a CPU, whose reference has one path for all, is checked with the first."""
MASKS = ("bool", "additive", "blocks")


def run(
    device: torch.device, seconds: float = SECONDS, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Check the kernels of a device, and keep the verdicts: a kernel that fails is skipped from then on.

    On a GPU, these are all native attention kernels, and all kernels for exact attention, norms and the KV cache; on a
    CPU, the reference.

    Args:
        device: a CUDA device or the CPU.
        seconds: time after which no further call begins; a first run compiles.
        progress: called with a text before each call.

    Returns:
        {"machine": see `verdicts.machine_of`, "rows": a list of {"kernel", "calls", "worst", "failed"}, "left_out"}:
        "worst" is the largest distance from the reference in units of the bound, None if the kernel raises an error;
        "failed" lists each fault and its call; "left_out" counts calls for which there was no time.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    verdicts.drop(capability)
    self_check.forget()
    rows: dict[str, dict[str, Any]] = {}

    def note(verdict: Verdict, where: str) -> None:
        row = rows.setdefault(verdict.kernel, {"kernel": verdict.kernel, "calls": 0, "worst": 0.0, "failed": []})
        row["calls"] += 1
        row["worst"] = max(row["worst"], verdict.distance)
        row["failed"] += [f"{where}: {verdict.reason}"] if verdict.reason else []

    end, left_out = time.monotonic() + seconds, 0
    if device.type == "cuda":
        progress("compiling kernels")
        cases = [case for name in RECIPES for _, case in _cases(name, HEAD_DIMS)]
        call_in_processes(partial(_run_once, device), cases, seconds * COMPILING)
    for where, examine in _examinations(device, capability, note):
        if time.monotonic() > end:
            left_out += 1
            continue
        progress(where)
        examine()
    for row in rows.values():
        row["worst"] = row["worst"] if row["worst"] < examination.RAISED else None
    return {"machine": verdicts.machine_of(capability), "rows": list(rows.values()), "left_out": left_out}


def text(result: dict[str, Any]) -> str:
    """Return the table of a result, with the failures below."""
    rows = [
        [
            row["kernel"],
            str(row["calls"]),
            "–" if row["worst"] is None else f"{row['worst']:.2f}",
            f"{len(row['failed'])} failed" if row["failed"] else "ok",
        ]
        for row in result["rows"]
    ]
    lines = [text_table(["kernel", "calls", "worst error / bound", "result"], rows)]
    lines += [f"{row['kernel']}: {failed}" for row in result["rows"] for failed in row["failed"]]
    if result["left_out"]:
        lines.append(f"{result['left_out']} calls were left out for lack of time: run again, or give more --seconds")
    return "\n".join(lines)


def failed(result: dict[str, Any]) -> bool:
    """Return whether a kernel is wrong."""
    return any(row["failed"] for row in result["rows"])


def _examinations(
    device: torch.device, capability: tuple[int, int] | None, note: Callable[[Verdict, str], None]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each check, and the function that runs it and passes each verdict to `note`."""

    def examine_exact(name: str, where: str, case: CheckCase) -> None:
        verdict = examination.examine_exact(name, case, device)
        note(verdict, where)
        if verdict.reason:
            self_check.keep_failure(verdict, "exact", case.head_dim, capability)

    def examine_qk_norm_rope(head_dim: int) -> None:
        verdict = examination.examine_qk_norm_rope(head_dim, device)
        note(verdict, f"QK-norm and RoPE, head_dim {head_dim}")
        self_check.keep_one(verdict, verdicts.QK_NORM_ROPE, head_dim, capability)

    def examine_kv(format: str, head_dim: int) -> None:
        verdict = examination.examine_kv(format, head_dim, device)
        note(verdict, f"{format} KV cache, head_dim {head_dim}")
        self_check.keep_one(verdict, verdicts.KV + format, head_dim, capability)

    head_dims = HEAD_DIMS if device.type == "cuda" else HEAD_DIMS[:1]
    for where, case in _cases("exact", head_dims):
        request = execution.request_of(case.draw(device))
        for name in registry.exact_kernels(request):
            yield f"{name}, {where}", partial(examine_exact, name, where, case)
    for head_dim in head_dims:
        yield f"QK-norm and RoPE, head_dim {head_dim}", partial(examine_qk_norm_rope, head_dim)
    for format, head_dim in itertools.product(FORMATS, head_dims):
        yield f"{format} KV cache, head_dim {head_dim}", partial(examine_kv, format, head_dim)
    low_bit = [name for name, recipe in RECIPES.items() if recipe.qk != "exact"]
    cases = [pair for name in low_bit for pair in _cases(name, head_dims)]

    def examine(where: str, case: CheckCase) -> None:
        request = execution.request_of(case.draw(device), case.grad)
        while True:  # until a kernel is right, or no kernel is left
            try:
                plan = select(request, "error" if device.type == "cuda" else "emulate")
            except KernelUnavailableError:
                return
            if plan.numerics == "exact":
                return
            plan_verdicts = examination.examine(plan, case, device)
            for verdict in plan_verdicts:
                note(verdict, where)
            if self_check.keep(plan, plan_verdicts) or not verdicts.enabled():
                return

    def examine_untried(where: str, case: CheckCase) -> None:
        with enforce_nvfp4_forward(True):
            examine(where, case)

    # The most common calls come first, calls with an attention bias or lists last, because time may run out.
    for where, case in sorted(cases, key=lambda pair: pair[1].mask in MASKS):
        yield where, partial(examine, where, case)
        if capability in CONSUMER_BLACKWELL and get_recipe(case.recipe).qk == "nvfp4":
            yield where, partial(examine_untried, where, case)


def _run_once(device: torch.device, case: CheckCase) -> None:
    """Run the kernels of a case, so that the caches on disk hold them."""
    request = execution.request_of(case.draw(device), case.grad)
    if case.recipe != "exact":
        examination.examine(select(request, "error"), case, device)
    else:
        for name in registry.exact_kernels(request):
            examination.examine_exact(name, case, device)


def _cases(recipe: str, head_dims: Sequence[int]) -> Iterator[tuple[str, CheckCase]]:
    """Yield the cases of a recipe with their names."""
    for head_dim in head_dims:
        case = CheckCase(recipe, head_dim=head_dim, v_head_dim=head_dim, return_lse=recipe != "exact")
        behind = KV_LEN - Q_LEN
        kinds = {
            "": case,
            "causal": replace(case, is_causal=True),
            "key mask": replace(case, mask="keys"),
            "grouped, causal behind a cache": replace(case, q_heads=4, is_causal=True, causal_offset=behind),
            "float16": replace(case, dtype=torch.float16),
            "bool mask": replace(case, mask="bool"),
            "additive mask": replace(case, mask="additive"),
        }
        if recipe != "exact":
            packed, blocks = replace(case, packed=True, is_causal=True), replace(case, mask="blocks")
            kinds |= {"packed": packed, "block list": blocks}
        if get_recipe(recipe).backward is not None:
            kinds |= {
                "gradients": replace(case, grad=True),
                "gradients, causal, grouped": replace(case, grad=True, is_causal=True, q_heads=4),
                "gradients, key mask": replace(case, grad=True, mask="keys"),
                "gradients, block list": replace(case, grad=True, mask="blocks"),
            }
        for name, kind_case in kinds.items():
            yield ", ".join(part for part in (recipe, f"head_dim {head_dim}", name) if part), kind_case
