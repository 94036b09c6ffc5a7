"""Registration of the Gluon kernels: the requests they support. A kernel's first call imports it, and Triton."""

from __future__ import annotations

import os
from importlib import import_module

import torch

from ..dispatch.registry import Request, register_backward
from ..runtime.toolchain import triton_version
from ..spec.call import BackwardCall
from ..spec.layout import MAX_GRID, padded_channels
from ..spec.recipe import Recipe

CAPABILITY = (9, 0)
VERSIONS = ((3, 6), (3, 9))
"""The oldest and the newest Triton tested; Gluon is experimental and changes between versions."""
CHANNELS = (64, 128)


class HopperBackward:
    """The Hopper backward kernels of `gluon.int8_backward`."""

    name = "int8_backward_hopper"
    native = True

    def serves(self, recipe: Recipe) -> bool:
        """Serve Q and K in INT8 with all transforms but the mean of Q, and P and dS in 16 bit."""
        backward, transforms = recipe.backward, ("smooth_k", "smooth_v", "rotate", "equalize")
        if recipe.qk != "int8" or backward is None or not recipe.is_plain_but_for(*transforms, "backward"):
            return False
        products = (backward.p, backward.ds, backward.dp)
        return products == ("16bit",) * 3 and backward.scales == "row" and backward.delta == "output"

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        if request.device_type != "cuda" or request.capability != CAPABILITY or torch.version.hip is not None:
            return "needs an NVIDIA GPU of compute capability 9.0 (Hopper)"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return "gradients need float16 or bfloat16"
        if request.mask.startswith("block"):
            return "no block lists"
        if max(request.batch, request.q_heads) > MAX_GRID:
            return f"more than {MAX_GRID} batch elements or heads"
        if os.environ.get("TRITON_INTERPRET") == "1":
            return "Triton's interpreter does not run Gluon"
        version, (oldest, newest) = triton_version(), VERSIONS
        if version is None or not oldest <= version <= newest:
            return f"needs Triton {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        channels = padded_channels(request.head_dim)
        if channels not in CHANNELS or channels != padded_channels(request.v_head_dim):
            return "needs 64 or 128 channels of Q, K and V"
        return ""

    def backward(self, call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients; see `int8_backward.backward`."""
        import_module("..language.launch", __package__).start_compiler()  # while the kernels are imported
        return import_module(".int8_backward", __package__).backward(call)


def register_kernels() -> None:
    """Register the kernels; they are preferred to those registered later."""
    register_backward(HopperBackward())
