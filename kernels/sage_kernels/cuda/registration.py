"""Register the CUDA C++ kernels, and say what they can do. The first call that runs one compiles it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..dispatch import cost_model
from ..dispatch.registry import Quantizer, Request, register_forward, register_quantizer, select
from ..formats.nvfp4 import MAX_STEPS
from ..spec.call import Call
from ..spec.layout import BLOCK, ceil_div, power_of_two
from ..spec.operands import Int8Operands, KeyPadding, NVFP4Operands, Saved
from ..spec.recipe import Recipe, get_recipe
from . import block_lists, int8_forward, nvfp4_forward, quantize, quantize_nvfp4
from .layout import CHANNELS

CAPABILITY = (9, 0)
NVFP4_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))  # those it is compiled for
CONSUMER_BLACKWELL = ((12, 0), (12, 1))
NARROW_HEAD_DIM = 64  # up to it, over lists, Triton's P·V in e4m3 is faster: 24×32768, 75 % skipped, 561 to 499 TFLOP/s
MAX_COORDINATE = 2**31  # of the tensor memory accelerator
NOT_FASTER = "not measured to be faster than Triton's kernel here: `sage-hf tune` measures both"

_measures_nvfp4_forward = False


class HopperQuantizer:
    """The quantiser of `cuda.quantize`."""

    name = "int8_quantize_hopper"
    native = True
    makes = Int8Operands

    def serves(self, recipe: Recipe) -> bool:
        """Serve Q and K in INT8 without K's mean, V in float16 with its mean or in e4m3 without; 0 or 64 heavy keys.

        Q and K may be rotated, and if so, equalized.
        """
        values = (recipe.pv, recipe.smooth_v) in (("fp8", True), ("fp16", False))
        return _serves(recipe) and values and recipe.smooth_k and (recipe.rotate or not recipe.equalize)

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        if reason := _unsupported(request):
            return reason
        if request.mask not in ("none", "keys", "blocks", "block_keys"):
            return "no masks but those of keys"
        if not request.aligned:
            return "addresses and strides of Q, K and V must be multiples of 16 bytes"
        return quantize.unavailable(request)

    def quantize(
        self, call: Call, valid: torch.Tensor | None = None, spans: torch.Tensor | None = None
    ) -> Int8Operands:
        """Quantise; see `quantize.quantize_operands`. With `valid` come spans, which are written, or it raises."""
        if valid is None:
            return quantize.quantize_operands(call)
        if spans is None:
            raise ValueError(f"{self.name} reads `valid` only with the spans of `read_padding`")
        return quantize.quantize_operands(call, KeyPadding(valid, spans))

    def read_padding(self, valid: torch.Tensor) -> KeyPadding:
        """Return which keys exist, with room for their spans, which `quantize` writes."""
        valid = valid.contiguous().view(torch.uint8)
        return KeyPadding(valid, valid.new_empty((valid.shape[0], 3), dtype=torch.int32))


class NVFP4Quantizer:
    """The quantiser of `cuda.quantize_nvfp4`."""

    name = "nvfp4_quantize_cuda"
    native = True
    makes = NVFP4Operands

    def serves(self, recipe: Recipe) -> bool:
        """Serve everything in NVFP4 with up to 7 scales beside the nearest, and 0 or 64 heavy keys."""
        steps = (recipe.scale_steps, recipe.key_scale_steps)
        searched = all(len(one) <= MAX_STEPS and set(one) <= set(range(-4, 12)) for one in steps)
        return _serves_nvfp4(recipe) and searched

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        if request.device_type != "cuda" or torch.version.hip is not None:
            return "needs an NVIDIA GPU"
        if request.capability not in NVFP4_CAPABILITIES:
            known = ", ".join(f"{major}.{minor}" for major, minor in NVFP4_CAPABILITIES)
            return f"compute capability is none of {known}"
        if reason := _unsupported_tensors(replace(request, packed=False)):
            return reason
        if not request.aligned or request.v_head_dim % 8:
            return "addresses and strides of Q, K and V must be multiples of 16 bytes"
        return quantize_nvfp4.unavailable(request)

    def quantize(
        self, call: Call, valid: torch.Tensor | None = None, spans: torch.Tensor | None = None
    ) -> NVFP4Operands:
        """Quantise; see `quantize_nvfp4.quantize_operands`."""
        return quantize_nvfp4.quantize_operands(call, None if valid is None else valid.int())

    def read_padding(self, valid: torch.Tensor) -> KeyPadding:
        """Refuse: NVFP4's forward kernels read masks by tiles, which say which keys count."""
        raise ValueError(f"{self.name} finds no spans of keys")


class HopperForward:
    """The forward kernel of `cuda.int8_forward`."""

    name = "int8_forward_hopper"
    native = True
    takes = Int8Operands
    packs = False

    def serves(self, recipe: Recipe) -> bool:
        """Serve Q and K in INT8 with all transforms but Q's mean, P and V in FP16 or e4m3, and heavy keys."""
        return _serves(recipe)

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        if reason := _unsupported(request):
            return reason
        lists = request.mask in ("blocks", "block_keys")
        if request.mask not in ("none", "keys") and not lists:
            return "no masks but those of keys"
        if lists and request.list_sizes != (block_lists.BLOCK_M, block_lists.BLOCK_N):
            return f"block lists of {block_lists.BLOCK_M} rows and tiles of {block_lists.BLOCK_N} keys only"
        if lists and request.head_dim <= NARROW_HEAD_DIM and get_recipe(request.recipe).pv == "fp8":
            return f"over block lists P·V in e4m3 with head_dim up to {NARROW_HEAD_DIM} is faster by the Triton kernel"
        if get_recipe(request.recipe).heavy_keys and not lists and not request.aligned:
            return "beside heavy keys, addresses and strides of Q must be multiples of 16 bytes"
        if request.v_head_dim % 8:
            return "head_dim of V must be a multiple of 8"
        rows = ceil_div(max(request.q_len, request.kv_len), BLOCK) * BLOCK
        channels = power_of_two(request.head_dim)
        if request.batch * request.q_heads * max(rows, channels) >= MAX_COORDINATE:
            return "more than 2³¹ rows of Q, or of K for each head of Q"
        quantizer = HopperQuantizer()
        return int8_forward.unavailable(
            request,
            quantizes_query=quantizer.serves(get_recipe(request.recipe)) and not quantizer.unsupported(request),
        )

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see `int8_forward.attend`."""
        assert quantizer is not None  # there are none of its operands otherwise
        return int8_forward.attend(call, quantizer)

    def attend_and_save(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, Saved]:
        """Attend and keep what gradients need; see `int8_forward.attend_and_save`."""
        assert quantizer is not None
        return int8_forward.attend_and_save(call, quantizer)


class NVFP4Forward:
    """The forward kernel of `cuda.nvfp4_forward`.

    It has run with emulated products only, so that nobody knows when it is faster than Triton's: it serves calls for
    which the GPU's own table of costs, which `sage-hf tune` measures, says so.
    """

    name = "nvfp4_forward_cuda"
    rival = "nvfp4_forward"
    native = True
    takes = NVFP4Operands
    packs = False

    def serves(self, recipe: Recipe) -> bool:
        """Serve everything in NVFP4, with 0 or 64 heavy keys."""
        return _serves_nvfp4(recipe)

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        if request.device_type != "cuda" or request.capability not in CONSUMER_BLACKWELL or torch.version.hip:
            return "needs an NVIDIA GPU of compute capability 12.0 or 12.1"
        if reason := _unsupported_tensors(request):
            return reason
        if request.mask not in ("none", "keys"):
            return "no masks but those of keys"
        if not request.aligned or request.v_head_dim % 8:
            return "addresses and strides of Q, K and V must be multiples of 16 bytes"
        rows = ceil_div(max(request.q_len, request.kv_len), BLOCK) * BLOCK
        if request.batch * request.q_heads * max(rows, power_of_two(request.head_dim)) >= MAX_COORDINATE:
            return "more than 2³¹ rows of Q, or of K for each head of Q"
        if reason := nvfp4_forward.unavailable(request):
            return reason
        runners = (
            cost_model.low_bit_runner(request.recipe, name, NVFP4Quantizer.name) for name in (self.name, self.rival)
        )
        return "" if _measures_nvfp4_forward or cost_model.is_measured_faster(request, *runners) else NOT_FASTER

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see `nvfp4_forward.attend`."""
        assert quantizer is not None
        return nvfp4_forward.attend(call, quantizer, native=True)


@contextmanager
def nvfp4_forward_measured(enabled: bool = True) -> Iterator[None]:
    """Let calls take the kernel of NVFP4 wherever it serves them, to measure it."""
    global _measures_nvfp4_forward
    before, _measures_nvfp4_forward = _measures_nvfp4_forward, enabled
    select.cache_clear()
    try:
        yield
    finally:
        _measures_nvfp4_forward = before
        select.cache_clear()


def register_kernels() -> None:
    """Register the kernels; they are preferred to those registered later."""
    register_quantizer(HopperQuantizer())
    register_quantizer(NVFP4Quantizer())
    register_forward(HopperForward())
    register_forward(NVFP4Forward())


def _serves(recipe: Recipe) -> bool:
    formats = recipe.qk == "int8" and recipe.pv in ("fp16", "fp8")
    heavy = recipe.heavy_keys == 0 or (recipe.heavy_keys == int8_forward.HEAVY_KEYS and recipe.backward is None)
    transforms = ("smooth_k", "smooth_v", "rotate", "equalize")
    return formats and heavy and recipe.is_plain_but_for(*transforms, "heavy_keys", "heavy_choice", "backward")


def _serves_nvfp4(recipe: Recipe) -> bool:
    formats = recipe.qk == recipe.pv == "nvfp4" and recipe.heavy_keys in (0, nvfp4_forward.HEAVY_KEYS)
    transforms = ("smooth_q", "smooth_k", "smooth_v", "rotate", "equalize", "tensor_scale", "denominator")
    return formats and recipe.is_plain_but_for(
        *transforms, "scale_steps", "key_scale_steps", "heavy_keys", "heavy_choice", "recent_keys"
    )


def _unsupported(request: Request) -> str:
    """Return which limit that both kernels share the request exceeds, or ""."""
    if request.device_type != "cuda" or request.capability != CAPABILITY or torch.version.hip is not None:
        return "needs an NVIDIA GPU of compute capability 9.0 (Hopper)"
    return _unsupported_tensors(request)


def _unsupported_tensors(request: Request) -> str:
    """Return which limit that all kernels of this folder share the request's tensors exceed, or ""."""
    if request.dtype not in (torch.float16, torch.bfloat16):
        return "dtype must be one of float16, bfloat16"
    if request.packed:
        return "no packed sequences"
    channels = power_of_two(request.head_dim)
    if channels not in CHANNELS or channels != power_of_two(request.v_head_dim):
        return "head_dim of Q and V must both be 33 to 64, or both 65 to 128"
    return ""
