"""Registration of the Triton kernels: the requests they support. A kernel's first call imports it, and Triton."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from ..dispatch.registry import (
    MAX_HEAD_DIM,
    SUPPORTED_DTYPES,
    AttendToFirst,
    Quantizer,
    Request,
    register_backward,
    register_exact,
    register_forward,
    register_quantizer,
)
from ..runtime.toolchain import triton_version
from ..spec.call import BackwardCall, Call
from ..spec.heads import Norm, Rope, register_head_kernel
from ..spec.layout import MAX_GRID
from ..spec.operands import Int8Operands, KeyPadding, NVFP4Operands, Saved
from ..spec.recipe import Recipe, get_recipe

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))  # those that CI compiles for
HEAVY_KEYS = 64  # of recipes that have any
SPLIT_ROWS = 64  # queries times heads that share keys, in one program
MAX_TOKEN_CHANNELS = 16384  # of a token in one program
TRAINING_DTYPES = (torch.float16, torch.bfloat16)
BLACKWELL_TRAINING_TRITON = (3, 6)  # an older one does not compile the backward kernels for compute capability 10.x
# The oldest Triton that compiles native NVFP4 for a GPU, and the oldest whose assembler knows the GPU.
NVFP4_TRITON = {(10, 0): (3, 9), (10, 3): (3, 9), (12, 0): (3, 6), (12, 1): (3, 7)}
ASSEMBLER_TRITON = {(10, 3): (3, 5), (12, 1): (3, 5)}


def nvfp4_unsupported(capability: tuple[int, int], triton: tuple[int, int]) -> str:
    """Return why that GPU with that Triton runs no native NVFP4; "" when it does."""
    if capability not in NVFP4_TRITON:
        return "NVFP4 needs a Blackwell GPU (compute capability 10.0, 10.3, 12.0 or 12.1)"
    if triton < NVFP4_TRITON[capability]:
        major, minor = NVFP4_TRITON[capability]
        return (
            f"NVFP4 on compute capability {capability[0]}.{capability[1]} needs Triton {major}.{minor}, installed is "
            f'{triton[0]}.{triton[1]}: pip install "triton>={major}.{minor}"'
        )
    return ""


class Int8Quantizer:
    """The INT8 quantiser of `triton.quantize.int8`."""

    name = "int8_quantize"
    native = True
    makes = Int8Operands

    def serves(self, recipe: Recipe) -> bool:
        """Serve Q and K in INT8 with all transforms but the mean of Q, and heavy keys."""
        return _serves_int8(recipe)

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        return _unsupported(request)

    def quantize(
        self, call: Call, valid: torch.Tensor | None = None, spans: torch.Tensor | None = None
    ) -> Int8Operands:
        """Quantise; see `quantize.int8.quantize_int8_operands`. The spans are written already."""
        return _load("quantize.int8").quantize_int8_operands(call, valid)

    def read_padding(self, valid: torch.Tensor) -> KeyPadding:
        """Find the spans of keys that exist."""
        return import_module("..language.padding", __package__).read_padding(valid)


class NVFP4Quantizer:
    """The NVFP4 quantiser of `triton.quantize.nvfp4`."""

    name = "nvfp4_quantize"
    native = True
    makes = NVFP4Operands

    def serves(self, recipe: Recipe) -> bool:
        """Serve everything in NVFP4."""
        return _serves_nvfp4(recipe)

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        return _unsupported_nvfp4(request)

    def quantize(
        self, call: Call, valid: torch.Tensor | None = None, spans: torch.Tensor | None = None
    ) -> NVFP4Operands:
        """Quantise; see `quantize.nvfp4.quantize_nvfp4_operands`. The spans are written already."""
        return _load("quantize.nvfp4").quantize_nvfp4_operands(call, valid)

    def read_padding(self, valid: torch.Tensor) -> KeyPadding:
        """Find the spans of keys that exist."""
        return import_module("..language.padding", __package__).read_padding(valid)


class Int8Forward:
    """The INT8 forward kernel of `triton.int8_forward`."""

    name = "int8_forward"
    native = True
    takes = Int8Operands
    packs = True

    def serves(self, recipe: Recipe) -> bool:
        """Serve Q and K in INT8 with all transforms but Q's mean, P and V in FP16, e4m3 or INT8, and heavy keys."""
        return _serves_int8(recipe)

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        fp8 = get_recipe(request.recipe).pv == "fp8"
        if not (reason := _unsupported(request)) and fp8 and request.capability is not None:
            return "FP8 needs compute capability 8.9 (Ada) or newer" if request.capability < (8, 9) else ""
        return reason

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see `int8_forward.attend`."""
        return _load("int8_forward").attend(call, quantizer, _capability(call.query))

    def attend_and_save(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, Saved]:
        """Attend and keep what gradients need; see `int8_forward.attend_and_save`."""
        return _load("int8_forward").attend_and_save(call, quantizer, _capability(call.query))


class Int8Backward:
    """The INT8 backward kernels of `triton.int8_backward`."""

    name = "int8_backward"
    native = True

    def serves(self, recipe: Recipe) -> bool:
        """Serve Q and K in INT8 with all transforms but the mean of Q, and P and dS both in 16 bit or in INT8."""
        backward = recipe.backward
        if backward is None or not _serves_int8(recipe):
            return False
        if (backward.p, backward.ds) not in (("16bit", "16bit"), ("int8", "int8")):
            return False
        return (backward.dp, backward.scales, backward.delta) == ("16bit", "row", "output")

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        if reason := _unsupported(request):
            return reason
        if request.dtype not in TRAINING_DTYPES:
            return "gradients need float16 or bfloat16"
        capability, triton = request.capability, triton_version()
        if capability is not None and capability[0] == 10 and triton is not None and triton < BLACKWELL_TRAINING_TRITON:
            major, minor = BLACKWELL_TRAINING_TRITON
            return f"gradients on compute capability {capability[0]}.{capability[1]} need Triton {major}.{minor}"
        return ""

    def backward(self, call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients; see `int8_backward.backward`."""
        return _load("int8_backward").backward(call, _capability(call.value))


@dataclass(frozen=True)
class NVFP4Forward:
    """The NVFP4 forward kernel of `triton.nvfp4_forward`, on FP4 matrix units or emulated."""

    name: str
    native: bool
    takes = NVFP4Operands
    packs = True

    def serves(self, recipe: Recipe) -> bool:
        """Serve everything in NVFP4."""
        return _serves_nvfp4(recipe)

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        reason = _unsupported_nvfp4(request)
        triton = triton_version()
        if self.native and not reason and request.capability is not None and triton is not None:
            return nvfp4_unsupported(request.capability, triton)
        return reason

    def attend(self, call: Call, quantizer: Quantizer | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; see `nvfp4_forward.attend`."""
        return _load("nvfp4_forward").attend(call, quantizer, _capability(call.query), self.native)


class MaskedForward:
    """The exact kernel of `triton.masked_forward`, which skips what a mask hides."""

    name = "masked_forward"
    repeats = True

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        if reason := _unsupported_exactly(request):
            return reason
        return "no block lists" if request.mask.startswith("block") else ""

    def attend(self, call: Call) -> torch.Tensor:
        """Attend; see `masked_forward.attend`."""
        return _load("masked_forward").attend(call)

    def attend_nonprefix(self, call: Call, attend_to_first: AttendToFirst, row_blocks: int) -> torch.Tensor:
        """Attend; see `nonprefix_forward.attend`."""
        return _load("nonprefix_forward").attend(call, attend_to_first, row_blocks)


class SplitKVForward:
    """The exact kernels of `triton.splitkv_forward`, for few queries over many keys."""

    name = "splitkv_forward"
    repeats = True

    def unsupported(self, request: Request) -> str:
        """Return why it does not serve the request, or ""."""
        if reason := _unsupported_exactly(request):
            return reason
        if request.mask not in ("none", "keys"):
            return "no masks of scores"
        rows = request.q_heads // request.kv_heads * request.q_len
        return f"more than {SPLIT_ROWS} queries share keys" if rows > SPLIT_ROWS else ""

    def attend(self, call: Call) -> torch.Tensor:
        """Attend; see `splitkv_forward.attend`."""
        return _load("splitkv_forward").attend(call)


class HeadKernel:
    """Norm and rotation of heads by `triton.norm_rope`."""

    name = "norm_rope"

    def unsupported(self, x: torch.Tensor, norm: Norm | None, rope: Rope | None, grad: bool) -> str:
        """Return why it does not serve the call, or ""."""
        if not x.is_cuda or torch.version.hip is not None or triton_version() is None:
            return "needs an NVIDIA GPU and Triton"
        batch, _, heads, head_dim = x.shape
        if x.dtype not in TRAINING_DTYPES or x.stride(-1) != 1 or head_dim % 2:
            return "needs float16 or bfloat16, and an even number of channels that lie one behind another"
        if max(batch, heads) > MAX_GRID or head_dim > MAX_HEAD_DIM:
            return f"more than {MAX_GRID} batch elements or heads, or head_dim above {MAX_HEAD_DIM}"
        vectors = [] if norm is None else [one for one in (norm.weight, norm.bias) if one is not None]
        if norm is not None and norm.across_heads and (grad or heads * head_dim > MAX_TOKEN_CHANNELS):
            return f"a norm of all heads has no gradients, and at most {MAX_TOKEN_CHANNELS} channels"
        if any(one.stride(-1) != 1 for one in vectors):
            return "needs weights that lie one behind another"
        tables = [] if rope is None else [one for one in (rope.cosine, rope.sine) if one is not None]
        if len({(one.stride(), one.dtype) for one in tables}) > 1:
            return "needs tables that are laid out alike"
        if grad and any(one.requires_grad for one in tables):
            return "tables have no gradients"
        if any(type(one) not in (torch.Tensor, torch.nn.Parameter) for one in (x, *vectors, *tables)):
            return "needs plain tensors"
        hidden = any(one.is_neg() or one.is_conj() for one in (x, *vectors, *tables))
        return "needs tensors that hold their values as they are" if hidden else ""

    def forward(self, x: torch.Tensor, norm: Norm | None, rope: Rope | None) -> torch.Tensor:
        """Normalise and rotate; see `norm_rope.forward`."""
        output: torch.Tensor = _load("norm_rope").forward(x, norm, rope)
        return output

    def backward(
        self, gradient: torch.Tensor, x: torch.Tensor, norm: Norm | None, rope: Rope | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Compute gradients; see `norm_rope.backward`."""
        gradients: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = _load("norm_rope").backward(
            gradient, x, norm, rope
        )
        return gradients


def register_kernels() -> None:
    """Register the kernels, those preferred first."""
    register_quantizer(NVFP4Quantizer())
    register_quantizer(Int8Quantizer())
    register_forward(NVFP4Forward("nvfp4_forward", True))
    register_forward(Int8Forward())
    register_forward(NVFP4Forward("nvfp4_forward_emulated", False))
    register_backward(Int8Backward())
    register_exact(SplitKVForward())
    register_exact(MaskedForward())
    register_head_kernel(HeadKernel())


def routing_kernels(query: torch.Tensor, key: torch.Tensor) -> ModuleType | None:
    """Return `triton.routing`, the kernels of routers, or None where they cannot take Q and K (batch, heads, …)."""
    if 0 in (*query.shape, *key.shape) or query.shape[3] > MAX_HEAD_DIM:
        return None
    return None if _unsupported(Request.of(query, key, key)) else _load("routing")


def _serves_int8(recipe: Recipe) -> bool:
    formats = recipe.qk == "int8" and recipe.pv in ("fp16", "fp8", "int8")
    heavy = recipe.heavy_keys == 0 or (recipe.heavy_keys == HEAVY_KEYS and recipe.backward is None)
    transforms = ("smooth_k", "smooth_v", "rotate", "equalize")
    return formats and heavy and recipe.is_plain_but_for(*transforms, "heavy_keys", "heavy_choice", "backward")


def _serves_nvfp4(recipe: Recipe) -> bool:
    transforms = ("smooth_q", "smooth_k", "smooth_v", "rotate", "equalize", "tensor_scale", "denominator")
    formats = recipe.qk == recipe.pv == "nvfp4" and recipe.heavy_keys in (0, HEAVY_KEYS)
    return formats and recipe.is_plain_but_for(
        *transforms, "scale_steps", "key_scale_steps", "heavy_keys", "heavy_choice", "recent_keys"
    )


def _load(module: str) -> ModuleType:
    return import_module(f".{module}", __package__)


def _capability(x: torch.Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device)


def _unsupported(request: Request) -> str:
    """Return which limit that all kernels share the request exceeds, or ""."""
    if request.device_type != "cuda" or request.capability is None:
        return "needs an NVIDIA GPU"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU, not an AMD one"
    triton = triton_version()
    if triton is None:
        return "Triton is not installed"
    if request.capability not in CAPABILITIES:
        return f"compute capability is none of {', '.join(f'{major}.{minor}' for major, minor in CAPABILITIES)}"
    if triton < ASSEMBLER_TRITON.get(request.capability, triton):
        major, minor = ASSEMBLER_TRITON[request.capability]
        return f"compute capability {request.capability[0]}.{request.capability[1]} needs Triton {major}.{minor}"
    if request.dtype not in SUPPORTED_DTYPES:
        return f"dtype must be one of {', '.join(str(dtype).removeprefix('torch.') for dtype in SUPPORTED_DTYPES)}"
    if max(request.batch, request.q_heads) > MAX_GRID:
        return f"more than {MAX_GRID} batch elements or heads"
    if request.batch * request.q_heads * max(request.q_len, request.kv_len) >= 2**36:
        return "more than 2³⁶ rows of Q, or of K for each head of Q"
    return ""


def _unsupported_exactly(request: Request) -> str:
    """Return which limit that both kernels of exact attention share the request exceeds, or ""."""
    if reason := _unsupported(request):
        return reason
    if request.capability != (9, 0):
        return "measured on compute capability 9.0 (Hopper) only"
    if request.dtype not in TRAINING_DTYPES or not request.aligned:
        return "needs float16 or bfloat16, aligned to 16 bytes"
    if max(request.head_dim, request.v_head_dim) > MAX_HEAD_DIM:
        return f"head_dim above {MAX_HEAD_DIM}"
    return "no packed sequences and no LSE" if request.packed or request.return_lse else ""


def _unsupported_nvfp4(request: Request) -> str:
    reason = _unsupported(request)
    if not reason and request.batch * request.q_heads > MAX_GRID:
        return f"more than {MAX_GRID} (batch element, head) pairs"
    return reason
