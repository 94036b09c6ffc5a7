"""Registration of the Triton kernels: the requests they support. A kernel's first call imports it, and Triton."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ..dispatch.kernels import AttendToPrefix, Quantizer
from ..dispatch.kv_kernels import register_kv_kernel
from ..dispatch.qk_norm_rope_kernels import register_qk_norm_rope_kernel
from ..dispatch.registry import register_backward, register_exact, register_forward, register_quantizer
from ..dispatch.request import Request
from ..dispatch.select import MAX_HEAD_DIM
from ..dispatch.support import (
    HALF_DTYPES,
    INT8_BACKWARD,
    INT8_FORWARD,
    KEY_MASKS,
    NVFP4_FORWARD,
    DeclaredKernel,
    SupportedRequests,
    is_nvidia,
)
from ..runtime.toolchain import triton_version
from ..spec.call import BackwardCall, Call
from ..spec.checks import SUPPORTED_DTYPES
from ..spec.kv_cache import KVCache
from ..spec.layout import MAX_GRID
from ..spec.operands import Int8Operands, KeyPadding, NVFP4Operands, Saved
from ..spec.qk_norm_rope import Norm, Rope
from ..spec.recipe import get_recipe

SPLIT_ROWS = 64  # largest product of queries and heads that share keys
MAX_TOKEN_CHANNELS = 16384  # channels of a token in one program
BLACKWELL_TRAINING_TRITON = (3, 6)  # older versions do not compile the backward kernels for compute capability 10.x
# The oldest Triton that compiles native NVFP4 for a GPU, and the oldest Triton whose assembler knows the GPU.
NVFP4_TRITON = {(10, 0): (3, 9), (10, 3): (3, 9), (12, 0): (3, 6), (12, 1): (3, 7)}
ASSEMBLER_TRITON = {(10, 3): (3, 5), (12, 1): (3, 5)}
NVIDIA_REQUESTS = SupportedRequests(dtypes=SUPPORTED_DTYPES, packed=True, grid=True)


def nvfp4_unsupported(capability: tuple[int, int], triton: tuple[int, int]) -> str:
    """Return why this GPU with this Triton runs no native NVFP4; "" if it does."""
    if capability not in NVFP4_TRITON:
        return "NVFP4 needs a Blackwell GPU (compute capability 10.0, 10.3, 12.0 or 12.1)"
    if triton < NVFP4_TRITON[capability]:
        major, minor = NVFP4_TRITON[capability]
        return (
            f"NVFP4 on compute capability {capability[0]}.{capability[1]} needs Triton {major}.{minor}, installed is "
            f'{triton[0]}.{triton[1]}: pip install "triton>={major}.{minor}"'
        )
    return ""


class TritonKernel(DeclaredKernel):
    """A kernel of this folder, in a module that its first call imports."""

    native = True
    requests = NVIDIA_REQUESTS

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel, of Triton or of the launch grid that a request exceeds; or ""."""
        if reason := super().unsupported(request):
            return reason
        triton, capability = triton_version(), request.capability
        if triton is None:
            return "Triton is not installed"
        if capability is not None and triton < (oldest := ASSEMBLER_TRITON.get(capability, triton)):
            return _needs_triton("this GPU", capability, oldest)
        if request.batch * request.q_heads * max(request.q_len, request.kv_len) >= 2**36:
            return "batch × query heads × tokens of Q or K exceeds 2³⁶"
        return ""


class TritonQuantizer(TritonKernel):
    """A quantiser of Triton's."""

    module: str

    def quantize(self, call: Call, padding: KeyPadding | None = None) -> Any:
        """Quantise, and write the spans of the padding; see `quantize_operands` of the module."""
        if padding is not None and padding.spans is not None:
            import_module(".common.padding", __package__).write_spans(padding)
        return _load(self.module).quantize_operands(call, None if padding is None else padding.key_mask_u8)


class TritonInt8Quantizer(TritonQuantizer):
    """The INT8 quantiser."""

    name = "int8_quantize"
    module = "quantize.int8"
    recipes = INT8_FORWARD
    makes = Int8Operands


class TritonNVFP4Quantizer(TritonQuantizer):
    """The NVFP4 quantiser."""

    name = "nvfp4_quantize"
    module = "quantize.nvfp4"
    recipes = NVFP4_FORWARD
    makes = NVFP4Operands

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; or ""."""
        return super().unsupported(request) or _too_many_pairs(request)


class TritonInt8Forward(TritonKernel):
    """The INT8 forward kernel."""

    name = "int8_forward"
    recipes = INT8_FORWARD
    takes = Int8Operands
    packs = True

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; or ""."""
        if reason := super().unsupported(request):
            return reason
        too_old = request.capability is not None and request.capability < (8, 9)
        fp8 = get_recipe(request.recipe).pv == "fp8"
        return "FP8 needs compute capability 8.9 (Ada) or newer" if fp8 and too_old else ""

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see `int8_forward.attend`."""
        return _load("int8_forward").attend(call, quantizer, _capability(call.query))

    def attend_and_save(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, Saved]:
        """Attend and save tensors for gradients; see `int8_forward.attend_and_save`."""
        return _load("int8_forward").attend_and_save(call, quantizer, _capability(call.query))


class TritonInt8Backward(TritonKernel):
    """The INT8 backward kernels, with P and dS both in 16 bits or both in INT8."""

    name = "int8_backward"
    recipes = INT8_BACKWARD

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernels that a request exceeds; or ""."""
        if reason := super().unsupported(request):
            return reason
        if request.dtype not in HALF_DTYPES:
            return "gradients need float16 or bfloat16"
        capability, triton = request.capability, triton_version()
        if capability is not None and capability[0] == 10 and triton is not None and triton < BLACKWELL_TRAINING_TRITON:
            return _needs_triton("gradients", capability, BLACKWELL_TRAINING_TRITON)
        return ""

    def backward(self, call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients; see `int8_backward.backward`."""
        return _load("int8_backward").backward(call, _capability(call.value))


class TritonNVFP4Forward(TritonKernel):
    """The NVFP4 forward kernel, on FP4 tensor cores or emulated."""

    recipes = NVFP4_FORWARD
    takes = NVFP4Operands
    packs = True

    def __init__(self, name: str, native: bool) -> None:
        self.name, self.native = name, native

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; or ""."""
        if reason := super().unsupported(request) or _too_many_pairs(request):
            return reason
        triton = triton_version()
        if self.native and request.capability is not None and triton is not None:
            return nvfp4_unsupported(request.capability, triton)
        return ""

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see `nvfp4_forward.attend`."""
        return _load("nvfp4_forward").attend(call, quantizer, _capability(call.query), self.native)


class TritonExact(TritonKernel):
    """A kernel of exact attention, in the module of the same name."""

    name: str
    traceable = True

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; or ""."""
        if reason := super().unsupported(request):
            return reason
        if max(request.head_dim, request.v_head_dim) > MAX_HEAD_DIM:
            return f"head_dim above {MAX_HEAD_DIM}"
        return "no LSE" if request.return_lse else ""

    def attend(self, call: Call) -> torch.Tensor:
        """Attend; see `attend` of the module."""
        output: torch.Tensor = _load(self.name).attend(call)
        return output


class MaskedForward(TritonExact):
    """The kernel that skips tiles that a mask hides; measured on Hopper only."""

    name = "masked_forward"
    requests = SupportedRequests(((9, 0),), masks=("none", "keys", "bool", "additive"), aligned=True, grid=True)

    def attend_nonprefix(self, call: Call, attend_to_prefix: AttendToPrefix, row_blocks: int) -> torch.Tensor:
        """Attend; see `nonprefix_forward.attend_nonprefix`."""
        output: torch.Tensor = _load("nonprefix_forward").attend_nonprefix(call, attend_to_prefix, row_blocks)
        return output


class SplitKVForward(TritonExact):
    """The kernels for few queries over many keys; measured on Hopper only."""

    name = "splitkv_forward"
    requests = SupportedRequests(((9, 0),), masks=KEY_MASKS, aligned=True, grid=True)

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernels that a request exceeds; or ""."""
        rows = request.q_heads // request.kv_heads * request.q_len
        return super().unsupported(request) or (
            f"more than {SPLIT_ROWS} queries for each key head" if rows > SPLIT_ROWS else ""
        )


class TritonQKNormRopeKernel:
    """QK-norm and RoPE by `triton.qk_norm_rope`."""

    name = "qk_norm_rope"

    def unsupported(self, x: torch.Tensor, norm: Norm | None, rope: Rope | None, grad: bool) -> str:
        """Return why it does not serve the call; "" if it does."""
        if not is_nvidia(x.device.type) or triton_version() is None:
            return "needs an NVIDIA GPU and Triton"
        batch, _, heads, head_dim = x.shape
        if x.dtype not in HALF_DTYPES or x.stride(-1) != 1 or head_dim % 2:
            return "needs float16 or bfloat16, and an even number of contiguous channels"
        if max(batch, heads) > MAX_GRID or head_dim > MAX_HEAD_DIM:
            return f"more than {MAX_GRID} batch elements or heads, or head_dim above {MAX_HEAD_DIM}"
        vectors = [] if norm is None else [one for one in (norm.weight, norm.bias) if one is not None]
        if norm is not None and norm.across_heads and (grad or heads * head_dim > MAX_TOKEN_CHANNELS):
            return f"a norm across all heads is served without gradients, and up to {MAX_TOKEN_CHANNELS} channels"
        if any(one.stride(-1) != 1 for one in vectors):
            return "needs contiguous weights and biases"
        tables = [] if rope is None else [one for one in (rope.cosine, rope.sine) if one is not None]
        if len({(one.stride(), one.dtype) for one in tables}) > 1:
            return "needs cosine and sine tables of the same strides and dtype"
        if grad and any(one.requires_grad for one in tables):
            return "cannot give gradients of the cosine and sine tables"
        if any(type(one) not in (torch.Tensor, torch.nn.Parameter) for one in (x, *vectors, *tables)):
            return "needs plain tensors"
        hidden = any(one.is_neg() or one.is_conj() for one in (x, *vectors, *tables))
        return "needs tensors without pending negation or conjugation" if hidden else ""

    def forward(self, x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
        """Apply QK-norm and RoPE; see `qk_norm_rope.forward`."""
        output: torch.Tensor = _load("qk_norm_rope").forward(x, norm, rope)
        return output

    def backward(
        self, gradient: torch.Tensor, x: torch.Tensor, norm: Norm | None, rope: Rope | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Compute gradients; see `qk_norm_rope.backward`."""
        gradients: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = _load("qk_norm_rope").backward(
            gradient, x, norm, rope
        )
        return gradients


class TritonKVKernel:
    """Appending to a low-bit KV cache, and decoding from it."""

    name = "kv_decode"
    native = True

    def unsupported(self, cache: KVCache, query: torch.Tensor | None) -> str:
        """Return why it does not append (query None), or append and attend; "" if it does."""
        if not is_nvidia(cache.device.type) or triton_version() is None:
            return "needs an NVIDIA GPU and Triton"
        if torch.cuda.get_device_capability(cache.device) < (8, 0):
            return "needs compute capability 8.0 (Ampere) or newer"
        if cache.format.group:
            return f"{cache.format.name} is emulated"
        if 3 * cache.batch > MAX_GRID or cache.kv_heads > MAX_GRID:
            return f"more than {MAX_GRID // 3} sequences, or {MAX_GRID} heads"
        if query is not None and (query.shape[1] // cache.kv_heads) * query.shape[2] > SPLIT_ROWS:
            return f"more than {SPLIT_ROWS} queries for each key head"
        return ""

    def append(self, cache: KVCache, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store tokens; see `kv_append.append`."""
        _load("kv_append").append(cache, _packed_channels(key), _packed_channels(value))

    def decode(
        self,
        cache: KVCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Append tokens and attend with them; see `kv_decode.decode`."""
        query, key, value = map(_packed_channels, (query, key, value))
        output: torch.Tensor = _load("kv_decode").decode(cache, query, key, value, key_mask, scale, _capability(query))
        return output


def register_kernels() -> None:
    """Register the kernels in order of preference."""
    register_quantizer(TritonNVFP4Quantizer())
    register_quantizer(TritonInt8Quantizer())
    register_forward(TritonNVFP4Forward("nvfp4_forward", True))
    register_forward(TritonInt8Forward())
    register_forward(TritonNVFP4Forward("nvfp4_forward_emulated", False))
    register_backward(TritonInt8Backward())
    register_exact(SplitKVForward())
    register_exact(MaskedForward())
    register_qk_norm_rope_kernel(TritonQKNormRopeKernel())
    register_kv_kernel(TritonKVKernel())


def router_kernels(query: torch.Tensor, key: torch.Tensor) -> ModuleType | None:
    """Return `triton.routers`, the kernels of routers, or None if they cannot take Q and K (batch, heads, …)."""
    if 0 in (*query.shape, *key.shape) or query.shape[3] > MAX_HEAD_DIM:
        return None
    return None if TritonKernel().unsupported(Request.of(query, key, key)) else _load("routers")


@cache
def _load(module: str) -> ModuleType:
    return import_module(f".{module}", __package__)


def _packed_channels(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _capability(x: torch.Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device)


def _needs_triton(feature: str, capability: tuple[int, int], oldest: tuple[int, int]) -> str:
    return f"{feature}: compute capability {capability[0]}.{capability[1]} needs Triton {oldest[0]}.{oldest[1]}"


def _too_many_pairs(request: Request) -> str:
    too_many = request.batch * request.q_heads > MAX_GRID
    return f"more than {MAX_GRID} (batch element, head) pairs" if too_many else ""
