"""What the CUDA C++ kernels can do, in the registry. The first call that runs one imports it, and compiles it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ..registry import Kernel, Request, register
from ..saved import Saved
from ..triton import registration as triton
from ..triton.sequences import BLOCK, ceil_div, power_of_two
from . import compiler

CAPABILITY = (9, 0)
CHANNELS = (64, 128)  # of Q, K and V in the operands
MAX_COORDINATE = 2**31  # of the tensor memory accelerator


def register_all() -> None:
    """Register the kernels; they are preferred to those registered later."""
    recipes = frozenset(["sage1", "sage2", "sage_bwd"])
    register(
        Kernel(
            "int8_forward_hopper",
            recipes,
            True,
            _unsupported,
            _run,
            run_training=_run_training,
            run_backward=triton.run_int8_backward,
        )
    )


def _unsupported(request: Request) -> str:
    if request.device_type != "cuda" or request.capability != CAPABILITY or torch.version.hip is not None:
        return "needs an NVIDIA GPU of compute capability 9.0 (Hopper)"
    if triton.triton_version() is None:
        return "Triton, whose kernels quantise, is not installed"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return "dtype must be one of float16, bfloat16"
    if request.mask not in ("none", "keys"):
        return "no masks but those of keys"
    if request.packed:
        return "no packed sequences"
    channels = power_of_two(request.head_dim)
    if channels not in CHANNELS or channels != power_of_two(request.v_head_dim):
        return "head_dim of Q and V must both be 33 to 64, or both 65 to 128"
    if request.v_head_dim % 8:
        return "head_dim of V must be a multiple of 8"
    rows = ceil_div(max(request.q_len, request.kv_len), BLOCK) * BLOCK
    if request.batch * request.q_heads * max(rows, channels) >= MAX_COORDINATE:
        return "more than 2³¹ rows of Q, or of K for each head of Q"
    return compiler.why_not()


def _run(query: torch.Tensor, *inputs: torch.Tensor, **call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return import_module(".int8_forward", __package__).attention(query, *inputs, **call)


def _run_training(query: torch.Tensor, *inputs: torch.Tensor, **call: Any) -> tuple[torch.Tensor, Saved]:
    run = import_module(".int8_forward", __package__).training_attention
    return run(query, *inputs, **call, capability=torch.cuda.get_device_capability(query.device))
