"""Registration of the reference, which serves every recipe on every device, slowly."""

from __future__ import annotations

import torch

from ..dispatch.registry import SUPPORTED_DTYPES, Quantizer, Request, register_backward, register_forward
from ..spec.call import BackwardCall, Call
from ..spec.heads import Norm, Rope, register_head_kernel
from ..spec.operands import Saved
from ..spec.recipe import Recipe
from . import backward, forward, norm_rope

_SERVED_BY_FORWARD = (
    "smooth_q",
    "smooth_k",
    "smooth_v",
    "rotate",
    "tensor_scale",
    "scale_steps",
    "key_scale_steps",
    "denominator",
    "equalize",
    "heavy_keys",
    "heavy_choice",
    "recent_keys",
)


class ReferenceForward:
    """The forward pass of the reference, with and without gradients."""

    name = "reference"
    native = False
    takes = None
    packs = False

    def serves(self, recipe: Recipe) -> bool:
        """Serve every low-bit recipe."""
        return recipe.qk != "exact" and recipe.is_plain_but_for(*_SERVED_BY_FORWARD, "backward")

    def unsupported(self, request: Request) -> str:
        """Return why the request's dtype is not served, or ""."""
        return _unsupported(request)

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; see `forward.attention`."""
        return forward.attention(
            call.query,
            call.key,
            call.value,
            call.recipe,
            mask=call.mask.tensor,
            is_causal=call.is_causal,
            causal_offset=call.causal_offset,
            scale=call.scale,
            blocks=call.mask.blocks,
        )

    def attend_and_save(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, Saved]:
        """Attend and keep what gradients need; see `backward.forward`."""
        return backward.forward(
            call.query,
            call.key,
            call.value,
            call.recipe,
            lengths=call.lengths,
            valid=call.mask.valid,
            blocks=call.mask.blocks,
            is_causal=call.is_causal,
            causal_offset=call.causal_offset,
            scale=call.scale,
        )


class ReferenceBackward:
    """The backward pass of the reference."""

    name = "reference_backward"
    native = False

    def serves(self, recipe: Recipe) -> bool:
        """Serve recipes with gradients whose Q and K are in INT8, Q with its mean."""
        served = recipe.qk == "int8" and recipe.backward is not None
        return served and recipe.is_plain_but_for("smooth_k", "smooth_v", "rotate", "equalize", "backward")

    def unsupported(self, request: Request) -> str:
        """Return why the request's dtype is not served, or ""."""
        return _unsupported(request)

    def backward(self, call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients; see `backward.backward`."""
        return backward.backward(
            call.output_gradient,
            call.value,
            call.output,
            call.saved,
            call.recipe,
            head_dim=call.head_dim,
            lengths=call.lengths,
            valid=call.mask.valid,
            blocks=call.mask.blocks,
            is_causal=call.is_causal,
            causal_offset=call.causal_offset,
            scale=call.scale,
        )


class ReferenceHeadKernel:
    """Norm and rotation of heads by PyTorch's operators, which compute their gradients too."""

    name = "reference"

    def unsupported(self, x: torch.Tensor, norm: Norm | None, rope: Rope | None, grad: bool) -> str:
        """Serve every call."""
        return ""

    def forward(self, x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
        """Normalise and rotate; see `norm_rope.norm_rope`."""
        return norm_rope.norm_rope(x, norm, rope)

    def backward(
        self, gradient: torch.Tensor, x: torch.Tensor, norm: Norm | None, rope: Rope | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Raise RuntimeError: PyTorch follows `forward`."""
        raise RuntimeError("gradients of the reference are those of PyTorch's operators")


def _unsupported(request: Request) -> str:
    if request.dtype not in SUPPORTED_DTYPES:
        return f"dtype must be one of {', '.join(str(dtype).removeprefix('torch.') for dtype in SUPPORTED_DTYPES)}"
    return ""


def register_kernels() -> None:
    """Register the reference."""
    register_forward(ReferenceForward())
    register_backward(ReferenceBackward())
    register_head_kernel(ReferenceHeadKernel())
