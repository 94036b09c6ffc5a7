"""Processes that run cases of context parallelism: `processes.py STORE PROCESSES DEVICE REPORT NAMES`.

DEVICE is "cpu" (gloo, float32) or "cuda" (NCCL, bfloat16, a GPU for each process). REPORT is the JSON file that the
first process writes: by case what is wrong, or "" where the processes agree with one. NAMES are patterns, by commas.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
import torch.multiprocessing
from diffusers import ContextParallelConfig

from tests.helpers.families import FAMILIES, Family

Case = Callable[[], str]
"""Returns what is wrong, or ""."""
ROOT = Path(__file__).parents[2]


def run_processes(
    folder: Path, processes: int, names: Collection[str] = ("*",), device: str = "cpu", seconds: float = 300
) -> dict[str, str]:
    """Return the findings of some processes, by case.

    Args:
        folder: an empty one, for the processes' files.
        processes: how many.
        names: patterns of cases to run, each of which must match.
        device: "cpu" or "cuda".
        seconds: how long they may take.
    """
    report = folder / "report.json"
    store = str(folder / "store")
    command = [sys.executable, "-m", __spec__.name, store, str(processes), device, str(report), ",".join(names)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=seconds)
    found = json.loads(report.read_text())
    assert all(any(fnmatch(case, name) for case in found) for name in names)
    return found


def degrees_of(processes: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of ContextParallelConfig for each mode that this diffusers has."""
    modes: dict[str, dict[str, Any]] = {
        "ulysses": {"ulysses_degree": processes},
        "ring": {"ring_degree": processes},
        "ulysses-anything": {"ulysses_degree": processes, "ulysses_anything": True},
        "ring-anything": {"ring_degree": processes, "ring_anything": True},
    }
    if processes >= 4:
        modes["both"] = {"ulysses_degree": processes // 2, "ring_degree": 2}
    known = {field.name for field in fields(ContextParallelConfig)}
    return {name: degrees for name, degrees in modes.items() if known.issuperset(degrees)}


def with_heads(case: Family, heads: int) -> Family:
    """Return a family with at least so many heads."""
    if case.config.get("num_attention_heads", 2) >= heads:
        return case
    config = case.config | {"num_attention_heads": heads}
    if "caption_projection_dim" in config:
        config["caption_projection_dim"] = heads * config["attention_head_dim"]
    return replace(case, config=config)


def main(rank: int, store: str, processes: str, device_type: str, report: str, names: str) -> None:
    """Run every case, and let the first process write what it found."""
    from tests.helpers import context_parallel, shared_text

    device = torch.device(device_type, rank if device_type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it
        torch.accelerator.current_accelerator = lambda *check: None  # PyTorch for CUDA names one where there is none
    diffusers.logging.set_verbosity_error()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=int(processes))
    cases = context_parallel.cases(int(processes), device)
    if device.type == "cpu":
        cases |= shared_text.cases(int(processes))
    found = {name: case() for name, case in cases.items() if any(fnmatch(name, one) for one in names.split(","))}
    dist.destroy_process_group()
    if rank == 0:
        Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    # Processes are copies of one that has imported everything, models too. One that has found GPUs cannot be copied.
    on_gpus = sys.argv[3] == "cuda"
    for family in () if on_gpus else FAMILIES:
        getattr(diffusers, family.model_class, None)
    start = "spawn" if on_gpus else "fork"
    torch.multiprocessing.start_processes(main, sys.argv[1:], nprocs=int(sys.argv[2]), start_method=start)
