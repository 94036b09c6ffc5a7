"""QK-norm and RoPE of the heads of queries or keys, in one pass over memory.

PyTorch's operators read and write such a tensor about ten times. A later call is replayed, like attention calls
(`replay.cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from . import backends  # noqa: F401 - `backends` registers the kernels
from .dispatch import self_check
from .dispatch.qk_norm_rope_kernels import QKNormRopeKernel, reference_qk_norm_rope_kernel, select_qk_norm_rope_kernel
from .replay import cache
from .runtime import torch_private
from .spec.checks import check_memory
from .spec.qk_norm_rope import Norm, Rope, check_norm_and_rope

DTYPES = torch.float16, torch.bfloat16


def qk_norm_rope(x: torch.Tensor, norm: Norm | None = None, rope: Rope | None = None) -> torch.Tensor:
    """Apply QK-norm, then RoPE, to heads; round after each, as models do.

    On an NVIDIA GPU, float16 and bfloat16 run in one kernel, forward and backward. PyTorch's operators run everything
    else, including tables of `rope` that want gradients, and calls inside PyTorch's transforms (`torch.func`,
    forward-mode AD) and modes.

    Args:
        x: (batch, tokens, heads, head_dim), of any strides.
        norm: the norm of each head, or of each token; None: no norm.
        rope: the RoPE; None: no RoPE.

    Returns:
        Heads of the same size, contiguous, in the dtype of x.

    Raises:
        ValueError: norm or RoPE does not fit x.
        RuntimeError: a tensor has elements but no memory.
    """
    if torch_private.modes_are_active():
        check_norm_and_rope(x, norm, rope)
        return reference_qk_norm_rope_kernel().forward(x, norm, rope)
    if not torch.is_grad_enabled():
        return _forward(x, norm, rope)
    vectors = (None, None) if norm is None else (norm.weight, norm.bias)
    if not any(one.requires_grad for one in (x, *_tensors(norm, rope))):
        return _forward(x, norm, rope)
    check_norm_and_rope(x, norm, rope)
    self_check.check_qk_norm_rope(x.shape[3], x.device)
    kernel = select_qk_norm_rope_kernel(x, norm, rope, grad=True)
    if kernel.name == "reference":
        return kernel.forward(x, norm, rope)
    output: torch.Tensor = _NormRope.apply(x, *vectors, norm, rope)
    return output


def set_enabled(enabled: bool) -> None:
    """Set whether models' heads are served at all, so that the gain can be measured."""
    global _enabled
    _enabled = enabled


_enabled = True


def is_served(x: torch.Tensor) -> bool:
    """Return whether a kernel takes heads like x, and no mode or transform wants to see PyTorch's operators."""
    if not _enabled or not x.is_cuda or x.dtype not in DTYPES or torch.version.hip is not None:
        return False
    if torch.compiler.is_compiling() or torch_private.autocast_is_active() or torch_private.modes_are_active():
        return False
    return cache.is_plain(x)


def _forward(x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
    def run(kernel: QKNormRopeKernel, x: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
        return [kernel.forward(x, *_with_tensors(norm, rope, others))]

    return _run("qk_norm_rope", run, [x, *_tensors(norm, rope)], x, norm, rope)[0]


def _run(
    kind: str,
    run: Callable[..., list[torch.Tensor]],
    tensors: list[torch.Tensor],
    x: torch.Tensor,
    norm: Norm | None,
    rope: Rope | None,
) -> list[torch.Tensor]:
    """Return the outputs of a pass by the best kernel, or by the replay if there is one.

    Args:
        kind: "qk_norm_rope", or "qk_norm_rope backward".
        run: (kernel, tensors) -> outputs; the function only allocates, takes views and launches, unless the reference
            runs.
        tensors: the pass's arguments.
        x, norm, rope: as in `qk_norm_rope`.
    """
    facts = None if norm is None else norm.facts, None if rope is None else rope.facts
    entry = cache.find(kind, tensors, facts)
    if entry is not None and entry.replay is not None:
        return cast(list[torch.Tensor], entry.replay(*tensors))
    check_norm_and_rope(x, norm, rope)
    check_memory(*tensors)
    self_check.check_qk_norm_rope(x.shape[3], x.device)
    kernel = select_qk_norm_rope_kernel(x, norm, rope, grad=kind != "qk_norm_rope")
    outputs = run(kernel, *tensors)
    if entry is not None and kernel.name != "reference":
        entry.prepare_when_repeated(
            partial(cache.replay_of_launches, None, partial(run, kernel), tensors, outputs, list)
        )
    return outputs


def _tensors(norm: Norm | None, rope: Rope | None) -> list[torch.Tensor]:
    """Return all tensors of norm and RoPE in a fixed order."""
    tensors = []
    if norm is not None and norm.weight is not None:
        tensors.append(norm.weight)
    if norm is not None and norm.bias is not None:
        tensors.append(norm.bias)
    if rope is not None:
        tensors.append(rope.cosine)
    if rope is not None and rope.sine is not None:
        tensors.append(rope.sine)
    return tensors


def _with_tensors(
    norm: Norm | None, rope: Rope | None, tensors: Sequence[torch.Tensor]
) -> tuple[Norm | None, Rope | None]:
    """Return norm and RoPE with new tensors in place of the tensors that `_tensors` returns."""
    others = iter(tensors)
    if norm is not None:
        weight, bias = (None if one is None else next(others) for one in (norm.weight, norm.bias))
        norm = replace(norm, weight=weight, bias=bias)
    if rope is not None:
        rope = replace(rope, cosine=next(others), sine=None if rope.sine is None else next(others))
    return norm, rope


class _NormRope(torch.autograd.Function):
    """`qk_norm_rope` with gradients; the forward pass keeps x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: Norm | None,
        rope: Rope | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *_tensors(norm, rope))
        ctx.norm, ctx.rope = norm, rope
        return _forward(x, norm, rope)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        norm, rope = _with_tensors(ctx.norm, ctx.rope, others)
        gradient = gradient.resolve_neg()
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()

        def run(
            kernel: QKNormRopeKernel, gradient: torch.Tensor, x: torch.Tensor, *others: torch.Tensor
        ) -> list[torch.Tensor]:
            gradients = kernel.backward(gradient, x, *_with_tensors(norm, rope, others))
            return [one for one in gradients if one is not None]

        x_gradient, *vector_gradients = _run("qk_norm_rope backward", run, [gradient, x, *others], x, norm, rope)
        weight_gradient = vector_gradients.pop(0) if norm is not None and norm.weight is not None else None
        bias_gradient = vector_gradients.pop(0) if norm is not None and norm.bias is not None else None
        return x_gradient, weight_gradient, bias_gradient, None, None
