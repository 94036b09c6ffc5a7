"""FlashAttention 3 as a kernel of exact attention, where a package is installed that brings its operator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from .call import Call
from .registry import Attend, Request, register_exact

logger = logging.getLogger(__name__)

PACKAGES = ("flash_attn_3", "fa3_fwd")
"""Packages whose module `_C` defines the operator `fwd`, under the package's name."""
MAX_HEAD_DIM = 256
FEW_QUERIES = 64
"""Queries up to which the operator may divide the keys among programs."""


class FlashAttention3:
    """FlashAttention 3's forward pass, without masks."""

    name = "fa3"
    repeats = False

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        if request.device_type != "cuda" or request.capability != (9, 0):
            return "needs compute capability 9.0 (Hopper)"
        if request.dtype not in (torch.float16, torch.bfloat16) or not request.aligned:
            return "needs float16 or bfloat16, aligned to 16 bytes"
        if request.head_dim != request.v_head_dim or request.head_dim > MAX_HEAD_DIM:
            return f"needs one head_dim of at most {MAX_HEAD_DIM}"
        if request.mask != "none" or request.packed or request.return_lse:
            return "no masks, packed sequences or LSE"
        if request.shifted or (request.is_causal and request.q_len > request.kv_len):
            return "causality must be aligned lower right"
        if request.is_causal and not request.lower_right and request.q_len != request.kv_len:
            return "causality must be aligned lower right"
        return "" if _operator() is not None else "FlashAttention 3 is not installed"

    def attend(self, call: Call) -> torch.Tensor:
        """Return the output."""
        return self.bind(call)(*(x.transpose(1, 2) for x in (call.query, call.key, call.value))).transpose(1, 2)

    def bind(self, call: Call) -> Attend:
        """Return the function of tensors with tokens before heads that computes calls like this one."""
        operator = _operator()
        assert operator is not None
        splits = 0 if call.q_len <= FEW_QUERIES else 1  # 0: as it finds best
        options = {"softmax_scale": abs(call.scale), "is_causal": call.is_causal, "num_splits": splits}
        negative = call.scale < 0

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = operator(-query if negative else query, key, value, **options)[0]
            return output

        return attend


def register_kernels() -> None:
    """Register the kernel."""
    register_exact(FlashAttention3())


@lru_cache(maxsize=1)
def _operator() -> Callable[..., Any] | None:
    """Return the operator of the first package that can be loaded; None without any."""
    for package in PACKAGES:
        if find_spec(package) is None:
            continue
        try:
            import_module(f"{package}._C")
            return getattr(torch.ops, package).fwd
        except (AttributeError, ImportError, OSError) as error:  # built for another PyTorch
            logger.info("FlashAttention 3 of %s cannot be loaded: %s", package, error)
    return None
