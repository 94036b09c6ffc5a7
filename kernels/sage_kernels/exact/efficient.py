"""PyTorch's memory-efficient kernel as a kernel of exact attention, which is the fastest one for the smallest calls.

PyTorch itself takes it only where its other kernels cannot serve.
"""

from __future__ import annotations

import torch

from ..dispatch.registry import Attend, Request, register_exact
from ..spec.call import Call
from . import sdpa

_operator = torch.ops.aten._scaled_dot_product_efficient_attention.default


class EfficientAttention:
    """PyTorch's memory-efficient forward pass, without masks."""

    name = "efficient"
    repeats = False
    tokens_first = False

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        if request.device_type != "cuda" or torch.version.hip is not None:
            return "needs an NVIDIA GPU"
        if request.dtype not in (torch.float16, torch.bfloat16) or not request.aligned:
            return "needs float16 or bfloat16, aligned to 16 bytes"
        if request.mask != "none" or request.packed or request.return_lse:
            return "no masks, packed sequences or LSE"
        if request.q_heads != request.kv_heads or request.lower_right or request.shifted:
            return "no grouped queries, and causality aligned upper left only"
        return ""

    def attend(self, call: Call) -> torch.Tensor:
        """Return the output."""
        return self.bind(call)(call.query, call.key, call.value, None)

    def bind(self, call: Call) -> Attend:
        """Return the function of Q, K and V of calls that are like this one in all but values."""
        is_causal, scale = call.is_causal, call.scale

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
        ) -> torch.Tensor:
            # It would multiply masked scores by such a scale, and the caller may not want it now.
            if scale <= 0 or not torch.backends.cuda.mem_efficient_sdp_enabled():
                return sdpa.sdpa(query, key, value, is_causal=is_causal, scale=scale)
            output, *_ = _operator(query, key, value, None, False, 0.0, is_causal, scale=scale)
            return output

        return attend


def register_kernels() -> None:
    """Register the kernel."""
    register_exact(EfficientAttention())
