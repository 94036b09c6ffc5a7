"""Register the CUDA C++ kernels, and declare what they support. The first call that runs a kernel compiles it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..dispatch import cost_model
from ..dispatch.kernels import Quantizer
from ..dispatch.registry import forget_choices, register_backward, register_forward, register_quantizer
from ..dispatch.request import Request
from ..dispatch.support import (
    HEAVY,
    INT8_BACKWARD,
    INT8_TRANSFORMS,
    KEY_MASKS,
    LIST_MASKS,
    NVFP4_FORWARD,
    NVIDIA_CAPABILITIES,
    DeclaredKernel,
    SupportedRecipes,
    SupportedRequests,
)
from ..formats.nvfp4 import MAX_STEPS
from ..spec.call import BackwardCall, Call
from ..spec.layout import BLOCK, power_of_two, round_up
from ..spec.operands import Int8Operands, KeyPadding, NVFP4Operands, Saved
from ..spec.recipe import Recipe, get_recipe
from . import block_lists, int8_backward, int8_forward, nvfp4_forward, quantize, quantize_nvfp4
from .layout import CHANNELS
from .padding import write_spans

HOPPER = (9, 0)
CONSUMER_BLACKWELL = ((12, 0), (12, 1))
NARROW_HEAD_DIM = 64  # up to it, over lists, Triton's P·V in e4m3 is faster: 24×32768, 75 % skipped, 561 to 499 TFLOP/s
MAX_COORDINATE = 2**31  # limit of the tensor memory accelerator
NOT_FASTER = "not measured to be faster than the other kernel here: `sage-hf tune` measures both"

_enforced: list[bool] = []
"""Choices for the CUDA kernel of NVFP4, the last of which counts: wherever it serves, or nowhere. Empty: by costs."""


class CudaKernel(DeclaredKernel):
    """A kernel of this folder, for heads with as many channels in V as in Q and K when padded."""

    native = True

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; or ""."""
        if reason := super().unsupported(request):
            return reason
        channels = power_of_two(request.head_dim)
        if channels not in CHANNELS or channels != power_of_two(request.v_head_dim):
            return "head_dim of Q and V must both be 33 to 64, or both 65 to 128"
        return ""


class CudaInt8Quantizer(CudaKernel):
    """The quantiser of `cuda.quantize`: V in float16 with its mean, or in e4m3 without."""

    name = "int8_quantize_hopper"
    recipes = SupportedRecipes(("int8",), ("fp8", "fp16"), (*INT8_TRANSFORMS, *HEAVY, "backward"))
    requests = SupportedRequests((HOPPER,), masks=(*KEY_MASKS, *LIST_MASKS), aligned=True)
    makes = Int8Operands

    def serves(self, recipe: Recipe) -> bool:
        """Tell whether the kernel computes every format and transform: it always takes K's mean off, V's with e4m3."""
        values = recipe.smooth_v == (recipe.pv == "fp8")
        return super().serves(recipe) and values and recipe.smooth_k and (recipe.rotate or not recipe.equalize)

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; or ""."""
        return super().unsupported(request) or quantize.unsupported(request)

    def quantize(self, call: Call, padding: KeyPadding | None = None) -> Int8Operands:
        """Quantise; see `quantize.quantize_operands`; raise ValueError for a padding without spans."""
        if padding is not None and padding.spans is None:
            raise ValueError(f"{self.name} reads a padding only where it writes its spans")
        return quantize.quantize_operands(call, padding)


class CudaNVFP4Quantizer(CudaKernel):
    """The quantiser of `cuda.quantize_nvfp4`, with up to 7 scales tried in addition to the nearest."""

    name = "nvfp4_quantize_cuda"
    recipes = NVFP4_FORWARD
    requests = SupportedRequests(NVIDIA_CAPABILITIES, packed=True, aligned=True)
    makes = NVFP4Operands

    def serves(self, recipe: Recipe) -> bool:
        """Tell whether the kernel computes every format and transform, and searches so many scales."""
        steps = (recipe.scale_steps, recipe.key_scale_steps)
        searched = all(len(one) <= MAX_STEPS and set(one) <= set(range(-4, 12)) for one in steps)
        return super().serves(recipe) and searched

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; or ""."""
        return super().unsupported(request) or _unreadable_values(request) or quantize_nvfp4.unsupported(request)

    def quantize(self, call: Call, padding: KeyPadding | None = None) -> NVFP4Operands:
        """Quantise; see `quantize_nvfp4.quantize_operands`."""
        if padding is not None and padding.spans is not None:
            write_spans(padding)
        return quantize_nvfp4.quantize_operands(call, None if padding is None else padding.key_mask_u8)


class CudaInt8Forward(CudaKernel):
    """The forward kernel of `cuda.int8_forward`."""

    name = "int8_forward_hopper"
    recipes = SupportedRecipes(("int8",), ("fp8", "fp16"), (*INT8_TRANSFORMS, *HEAVY, "backward"))
    requests = SupportedRequests((HOPPER,), masks=(*KEY_MASKS, *LIST_MASKS))
    takes = Int8Operands
    packs = False

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; or ""."""
        if reason := super().unsupported(request):
            return reason
        lists, recipe = request.mask in LIST_MASKS, get_recipe(request.recipe)
        if lists and request.list_sizes != (block_lists.BLOCK_M, block_lists.BLOCK_N):
            return f"block lists of {block_lists.BLOCK_M} rows and tiles of {block_lists.BLOCK_N} keys only"
        if lists and request.head_dim <= NARROW_HEAD_DIM and recipe.pv == "fp8":
            return (
                f"with a block list, FP8 (e4m3) P·V and head_dim up to {NARROW_HEAD_DIM}, the Triton kernel is faster"
            )
        if recipe.heavy_keys and not lists and not request.aligned:
            return "with heavy keys, addresses and strides of Q must be multiples of 16 bytes"
        if reason := _unreadable_values(request) or _too_many_rows(request):
            return reason
        quantizer = CudaInt8Quantizer()
        return int8_forward.unsupported(
            request, may_leave_query=quantizer.serves(recipe) and not quantizer.unsupported(request)
        )

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see `int8_forward.attend`."""
        assert quantizer is not None  # nothing else makes its operands
        return int8_forward.attend(call, quantizer, isinstance(quantizer, CudaInt8Quantizer))

    def attend_and_save(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, Saved]:
        """Attend and save tensors for gradients; see `int8_forward.attend_and_save`."""
        assert quantizer is not None
        return int8_forward.attend_and_save(call, quantizer, isinstance(quantizer, CudaInt8Quantizer))


class CudaNVFP4Forward(CudaKernel):
    """The forward kernel of `cuda.nvfp4_forward`.

    It has run with emulated products only, so nobody knows when it is faster than Triton's kernel: it serves calls for
    which the GPU's own table of costs, measured by `sage-hf tune`, says that it is.
    """

    name = "nvfp4_forward_cuda"
    rival = "nvfp4_forward"
    recipes = NVFP4_FORWARD
    requests = SupportedRequests(CONSUMER_BLACKWELL, masks=KEY_MASKS, aligned=True)
    takes = NVFP4Operands
    packs = False

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; or ""."""
        if reason := super().unsupported(request) or _unreadable_values(request) or _too_many_rows(request):
            return reason
        if reason := nvfp4_forward.unsupported(request):
            return reason
        providers = (
            cost_model.low_bit_provider(request.recipe, name, CudaNVFP4Quantizer.name)
            for name in (self.name, self.rival)
        )
        chosen = _enforced[-1] if _enforced else cost_model.is_measured_faster(request, *providers)
        return "" if chosen else NOT_FASTER

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see `nvfp4_forward.attend`."""
        assert quantizer is not None
        return nvfp4_forward.attend(call, quantizer, native=True)


class CudaInt8Backward(CudaKernel):
    """The backward kernel of `cuda.int8_backward`, for P and dS in 16 bits, which computes each tile of scores once."""

    name = "int8_backward_fused"
    recipes = replace(INT8_BACKWARD, gradients=("16bit",))
    requests = SupportedRequests((HOPPER,), masks=KEY_MASKS, packed=True)

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; or ""."""
        if reason := super().unsupported(request):
            return reason
        if request.head_dim % 8 or request.v_head_dim % 8:
            return "rows of gradients must be multiples of 16 bytes: head_dim of Q and V multiples of 8"
        return _too_many_rows(request) or int8_backward.unsupported(request)

    def backward(self, call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients; see `int8_backward.backward`."""
        return int8_backward.backward(call)


@contextmanager
def enforce_nvfp4_forward(chosen: bool) -> Iterator[None]:
    """Let calls take the CUDA kernel of NVFP4 wherever it serves them, or nowhere, whatever the costs."""
    _enforced.append(chosen)
    forget_choices()
    try:
        yield
    finally:
        _enforced.pop()
        forget_choices()


def register_kernels() -> None:
    """Register the kernels; they are preferred to kernels registered later."""
    register_quantizer(CudaInt8Quantizer())
    register_quantizer(CudaNVFP4Quantizer())
    register_forward(CudaInt8Forward())
    register_forward(CudaNVFP4Forward())
    register_backward(CudaInt8Backward())


def _unreadable_values(request: Request) -> str:
    return "rows of V must be multiples of 16 bytes: its head_dim a multiple of 8" if request.v_head_dim % 8 else ""


def _too_many_rows(request: Request) -> str:
    rows = round_up(max(request.q_len, request.kv_len), BLOCK)
    too_many = request.batch * request.q_heads * max(rows, power_of_two(request.head_dim)) >= MAX_COORDINATE
    return "batch × query heads × tokens of Q or K exceeds 2³¹" if too_many else ""
