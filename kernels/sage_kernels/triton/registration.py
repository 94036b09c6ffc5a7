"""What the Triton kernels can do, in the registry. The first call that runs one imports it, and Triton."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch

from ..registry import SUPPORTED_DTYPES, Kernel, Request, register

MAX_GRID = 65535  # programs along the second and third axis of a launch
CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))  # those that CI compiles for
INT8, NVFP4 = frozenset(["sage1", "sage2", "sage_bwd", "sage_bwd_int8"]), frozenset(["sage3", "sage3_paper"])
TRAINING_DTYPES = (torch.float16, torch.bfloat16)
BLACKWELL_TRAINING_TRITON = (3, 6)  # an older one does not compile the backward kernels for compute capability 10.x
# The oldest Triton that compiles native NVFP4 for a GPU, and the oldest whose assembler knows the GPU.
NVFP4_TRITON = {(10, 0): (3, 9), (10, 3): (3, 9), (12, 0): (3, 6), (12, 1): (3, 7)}
ASSEMBLER_TRITON = {(10, 3): (3, 5), (12, 1): (3, 5)}


@lru_cache(maxsize=1)
def triton_version() -> tuple[int, int] | None:
    """(major, minor) of the installed Triton, None without one."""
    if find_spec("triton") is None:
        return None
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:  # distributed under another name
        version = import_module("triton").__version__
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def nvfp4_unsupported(capability: tuple[int, int], triton: tuple[int, int]) -> str:
    """Why that GPU with that Triton runs no native NVFP4; "" when it does."""
    if capability not in NVFP4_TRITON:
        return "NVFP4 needs a Blackwell GPU (compute capability 10.0, 10.3, 12.0 or 12.1)"
    if triton < NVFP4_TRITON[capability]:
        major, minor = NVFP4_TRITON[capability]
        return f"NVFP4 on compute capability {capability[0]}.{capability[1]} needs Triton {major}.{minor}"
    return ""


def register_all() -> None:
    """Register the kernels, those preferred first."""
    for name, module, recipes, native, unsupported, options in (
        ("nvfp4_forward", "nvfp4_forward", NVFP4, True, _unsupported_native_nvfp4, {"native": True}),
        ("int8_forward", "int8_forward", INT8, True, _unsupported_int8, {}),
        ("nvfp4_forward_emulated", "nvfp4_forward", NVFP4, False, _unsupported_nvfp4, {"native": False}),
    ):
        run, run_packed = (partial(_run, module, entry, options) for entry in ("attention", "packed_attention"))
        kernel = Kernel(name, recipes, native, unsupported, run, run_packed)
        if name == "int8_forward":
            run_training = partial(_run, "int8_training", "training_attention", options)
            kernel = replace(kernel, run_training=run_training, run_backward=run_int8_backward)
        register(kernel)


def run_int8_backward(output_gradient: torch.Tensor, *arguments: Any, **call: Any) -> Any:
    """`int8_backward.backward`."""
    return _run("int8_backward", "backward", {}, output_gradient, *arguments, **call)


def _unsupported(request: Request) -> str:
    """Limits that all kernels share."""
    if request.device_type != "cuda" or request.capability is None:
        return "needs an NVIDIA GPU"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU, not an AMD one"
    triton = triton_version()
    if triton is None:
        return "Triton is not installed"
    if request.capability not in CAPABILITIES:
        return f"compute capability is none of {', '.join(f'{major}.{minor}' for major, minor in CAPABILITIES)}"
    if triton < ASSEMBLER_TRITON.get(request.capability, triton):
        major, minor = ASSEMBLER_TRITON[request.capability]
        return f"compute capability {request.capability[0]}.{request.capability[1]} needs Triton {major}.{minor}"
    if request.dtype not in SUPPORTED_DTYPES:
        return f"dtype must be one of {', '.join(str(dtype).removeprefix('torch.') for dtype in SUPPORTED_DTYPES)}"
    if max(request.batch, request.q_heads) > MAX_GRID:
        return f"more than {MAX_GRID} batch elements or heads"
    if request.batch * request.q_heads * max(request.q_len, request.kv_len) >= 2**36:
        return "more than 2³⁶ rows of Q, or of K for each head of Q"
    return ""


def _unsupported_int8(request: Request) -> str:
    reason = _unsupported(request)
    if not reason and request.recipe == "sage2" and request.capability is not None and request.capability < (8, 9):
        return "FP8 needs compute capability 8.9 (Ada) or newer"
    if reason or not request.grad:
        return reason
    if request.dtype not in TRAINING_DTYPES:
        return "gradients need float16 or bfloat16"
    capability, triton = request.capability, triton_version()
    if capability is not None and capability[0] == 10 and triton is not None and triton < BLACKWELL_TRAINING_TRITON:
        major, minor = BLACKWELL_TRAINING_TRITON
        return f"gradients on compute capability {capability[0]}.{capability[1]} need Triton {major}.{minor}"
    return ""


def _unsupported_nvfp4(request: Request) -> str:
    reason = _unsupported(request)
    if not reason and request.batch * request.q_heads > MAX_GRID:
        return f"more than {MAX_GRID} (batch element, head) pairs"
    return reason


def _unsupported_native_nvfp4(request: Request) -> str:
    reason = _unsupported_nvfp4(request)
    triton = triton_version()
    if not reason and request.capability is not None and triton is not None:
        return nvfp4_unsupported(request.capability, triton)
    return reason


def _run(
    module: str,
    entry: str,
    options: dict[str, bool],
    first: torch.Tensor,
    *arguments: Any,
    **call: Any,
) -> Any:
    run = getattr(import_module(f".{module}", __package__), entry)
    return run(first, *arguments, **call, **options, capability=torch.cuda.get_device_capability(first.device))
