"""Registration of the reference, which serves every recipe on every device, slowly."""

from __future__ import annotations

import torch

from ..dispatch.kernels import Quantizer
from ..dispatch.kv_kernels import register_kv_kernel
from ..dispatch.qk_norm_rope_kernels import register_qk_norm_rope_kernel
from ..dispatch.registry import register_backward, register_forward
from ..dispatch.request import Request
from ..dispatch.support import INT8_BACKWARD, NVFP4_FIELDS, DeclaredKernel, SupportedRecipes, why_no_dtype
from ..spec.call import BackwardCall, Call
from ..spec.checks import SUPPORTED_DTYPES
from ..spec.kv_cache import KVCache
from ..spec.operands import Saved
from ..spec.qk_norm_rope import Norm, Rope
from . import backward, forward, kv_cache, qk_norm_rope


class ReferenceKernel(DeclaredKernel):
    """A kernel in plain PyTorch, for every device."""

    native = False

    def unsupported(self, request: Request) -> str:
        """Name the dtypes that are supported, if the request's is not; or ""."""
        return "" if request.dtype in SUPPORTED_DTYPES else why_no_dtype()


class ReferenceForward(ReferenceKernel):
    """The forward pass of the reference, of every low-bit recipe, with and without gradients."""

    name = "reference"
    recipes = SupportedRecipes(
        ("nvfp4", "int8"), ("nvfp4", "fp8", "int8", "fp16"), (*NVFP4_FIELDS, "backward"), heavy_keys=None
    )
    takes = None
    packs = False

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
        """Attend and save tensors for gradients; see `backward.forward`."""
        return backward.forward(call)


class ReferenceBackward(ReferenceKernel):
    """The backward pass of the reference."""

    name = "reference_backward"
    recipes = INT8_BACKWARD

    def backward(self, call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients; see `backward.backward`."""
        return backward.backward(call)


class ReferenceQKNormRopeKernel:
    """QK-norm and RoPE by PyTorch's operators, which compute their gradients too."""

    name = "reference"

    def unsupported(self, x: torch.Tensor, norm: Norm | None, rope: Rope | None, grad: bool) -> str:
        """Serve every call."""
        return ""

    def forward(self, x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
        """Apply QK-norm and RoPE; see `qk_norm_rope.qk_norm_rope`."""
        return qk_norm_rope.qk_norm_rope(x, norm, rope)

    def backward(
        self, gradient: torch.Tensor, x: torch.Tensor, norm: Norm | None, rope: Rope | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Raise RuntimeError: PyTorch follows `forward`."""
        raise RuntimeError("gradients of the reference come from PyTorch's operators")


class ReferenceKVKernel:
    """The low-bit KV cache in PyTorch's operators: K and V are dequantised at each step."""

    name = "reference"
    native = False

    def unsupported(self, cache: KVCache, query: torch.Tensor | None) -> str:
        """Serve every call."""
        return ""

    def append(self, cache: KVCache, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store tokens; see `kv_cache.append`."""
        kv_cache.append(cache, key, value)

    def decode(
        self,
        cache: KVCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Append tokens and attend with them; see `kv_cache.attend_to_cache`. Raise ValueError if the cache is full."""
        if cache.counts_on_device:
            cache.read_counts()
            key_mask = None if key_mask is None else key_mask[:, : cache.length + key.shape[2]]
        kv_cache.append(cache, key, value)
        return kv_cache.attend_to_cache(cache, query, key_mask, scale)


def register_kernels() -> None:
    """Register the reference."""
    register_forward(ReferenceForward())
    register_backward(ReferenceBackward())
    register_qk_norm_rope_kernel(ReferenceQKNormRopeKernel())
    register_kv_kernel(ReferenceKVKernel())
