"""Processes that render together: each has one GPU, and some tokens of every denoising step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sage_hf.diffusers import context_parallel_plan
from sage_hf.targets import find_targets

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class Processes:
    """Processes of one program, as torchrun starts them.

    Attributes:
        ulysses: number of processes that exchange tokens for heads.
        ring: number of such groups, which gather each other's keys.

    Raises:
        ValueError: a degree is less than 1, or torchrun started another number of processes.
    """

    ulysses: int = 1
    ring: int = 1

    def __post_init__(self) -> None:
        for name in ("ulysses", "ring"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        started = _of_torchrun("WORLD_SIZE", 1)
        if self.number != started:
            raise ValueError(
                f"--ulysses {self.ulysses} and --ring {self.ring} need {self.number} processes, and {started} run: "
                f"use `torchrun --nproc-per-node {self.number}`, or give degrees whose product is {started}"
            )

    @property
    def number(self) -> int:
        """Return the number of processes."""
        return self.ulysses * self.ring

    @property
    def is_first(self) -> bool:
        """Check whether this is the process that writes and prints."""
        return self.number == 1 or _of_torchrun("RANK", 0) == 0

    @property
    def remark(self) -> str:
        """Describe the processes for a report, to append to a device's name; "" for one process."""
        return "" if self.number == 1 else f", {self.number} processes (ulysses {self.ulysses}, ring {self.ring})"

    def device_of(self, device: torch.device) -> torch.device:
        """Return this process's device of a kind; among several processes, each has the GPU of its local rank.

        Raises:
            ValueError: the host has fewer GPUs, or `device` is one GPU for all processes.
        """
        if self.number == 1 or device.type != "cuda":
            return device
        rank, present = _of_torchrun("LOCAL_RANK", 0), torch.cuda.device_count()
        if device.index is not None:
            raise ValueError(f"--device {device} is one GPU for {self.number} processes: leave --device out")
        if rank >= present:
            raise ValueError(f"--ulysses and --ring need a GPU for each process, and this host has {present}")
        return torch.device(device.type, rank)

    @contextmanager
    def joined(self, device: torch.device) -> Iterator[None]:
        """Join the process group, by NCCL on GPUs and gloo on CPUs, and leave it at the end.

        A process that raises an error does not leave the group: it ends, and torchrun ends the waiting processes.
        """
        if self.number == 1:
            yield
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        yield
        dist.destroy_process_group()

    def split(self, pipe: DiffusionPipeline) -> None:
        """Split the tokens of a pipeline's denoisers among the processes, which have joined the group.

        Raises:
            UnsupportedAttentionError: a denoiser has no context-parallel plan, or its attention cannot be split.
        """
        if self.number == 1:
            return
        from diffusers import ContextParallelConfig

        for target in find_targets(pipe):
            config = ContextParallelConfig(ulysses_degree=self.ulysses, ring_degree=self.ring)
            model: Any = target.model
            model.enable_parallelism(config=config, cp_plan=context_parallel_plan(model))


def _of_torchrun(name: str, default: int) -> int:
    return int(os.environ.get(name, default))
