"""Registration of the Gluon kernels: the requests they support. A kernel's first call imports it, and Triton."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module

import torch

from ..dispatch.registry import register_backward
from ..dispatch.request import Request
from ..dispatch.support import INT8_BACKWARD, Declared, Requests
from ..runtime.toolchain import triton_version
from ..spec.call import BackwardCall
from ..spec.layout import padded_channels

VERSIONS = ((3, 6), (3, 9))
"""The oldest and the newest Triton tested; Gluon is experimental and changes between versions."""
CHANNELS = (64, 128)


class HopperBackward(Declared):
    """The Hopper backward kernels of `gluon.int8_backward`, for P and dS in 16 bits."""

    name = "int8_backward_hopper"
    native = True
    recipes = replace(INT8_BACKWARD, gradients=("16bit",))
    requests = Requests(((9, 0),), masks=("none", "keys", "bool", "additive"), packed=True, grid=True)

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernels, or of Triton's Gluon, that a request exceeds; or ""."""
        if reason := super().unsupported(request):
            return reason
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
    """Register the kernels; they are preferred to kernels registered later."""
    register_backward(HopperBackward())
