"""Declarations of what a kernel supports: the recipes that it computes, and the requests that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from ..runtime.hardware import Capability
from ..spec.call import MaskKind
from ..spec.checks import SUPPORTED_DTYPES
from ..spec.layout import MAX_GRID
from ..spec.recipe import Recipe
from .request import Request

HALF_DTYPES = (torch.float16, torch.bfloat16)
NVIDIA_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
"""Compute capabilities for which CI compiles kernels."""
HEAVY_KEYS = 64
"""Number of heavy keys in recipes with heavy keys."""

KEY_MASKS: tuple[MaskKind, ...] = ("none", "keys")
LIST_MASKS: tuple[MaskKind, ...] = ("blocks", "block_keys")
EVERY_MASK: tuple[MaskKind, ...] = get_args(MaskKind)

INT8_TRANSFORMS = ("smooth_k", "smooth_v", "rotate", "equalize")
HEAVY = ("heavy_keys", "heavy_choice")
NVFP4_FIELDS = (
    *("smooth_q", *INT8_TRANSFORMS, *HEAVY, "recent_keys"),
    *("tensor_scale", "scale_steps", "key_scale_steps", "denominator"),
)


def is_nvidia(device_type: str) -> bool:
    """Tell whether a device is an NVIDIA GPU; PyTorch names AMD's devices "cuda" too."""
    return device_type == "cuda" and torch.version.hip is None


@dataclass(frozen=True)
class SupportedRecipes:
    """Recipes that a kernel computes.

    Attributes:
        qk, pv: formats of Q·Kᵀ and of P·V.
        honours: fields of `Recipe` that may have any value; all other fields must have their defaults.
        heavy_keys: allowed numbers of heavy keys (recipes with gradients have no heavy keys); None: any.
        gradients: formats of the backward pass that a backward kernel computes; None: the kernel computes none.
    """

    qk: tuple[str, ...]
    pv: tuple[str, ...]
    honours: tuple[str, ...]
    heavy_keys: tuple[int, ...] | None = (0, HEAVY_KEYS)
    gradients: tuple[str, ...] | None = None

    def include(self, recipe: Recipe) -> bool:
        """Tell whether the kernel computes every format and transform of a recipe."""
        if recipe.qk not in self.qk or recipe.pv not in self.pv or not recipe.uses_only(*self.honours):
            return False
        if self.gradients is not None and recipe.backward not in self.gradients:
            return False
        if self.heavy_keys is None:
            return True
        return recipe.heavy_keys in self.heavy_keys and not (recipe.heavy_keys and recipe.backward)


INT8_FORWARD = SupportedRecipes(("int8",), ("fp16", "fp8", "int8"), (*INT8_TRANSFORMS, *HEAVY, "backward"))
NVFP4_FORWARD = SupportedRecipes(("nvfp4",), ("nvfp4",), NVFP4_FIELDS)
INT8_BACKWARD = SupportedRecipes(
    ("int8",), ("fp16", "fp8", "int8"), (*INT8_TRANSFORMS, "backward"), (0,), gradients=("16bit", "int8")
)


@dataclass(frozen=True)
class SupportedRequests:
    """Requests that a kernel of NVIDIA GPUs takes.

    Attributes:
        capabilities: compute capabilities.
        dtypes: dtypes of Q, K and V.
        masks: kinds of masks.
        packed: packed sequences, one after another.
        aligned: only tensors that 128-bit loads can read in place.
        grid: batch elements and heads are axes of the launch grid.
    """

    capabilities: tuple[Capability, ...] = NVIDIA_CAPABILITIES
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES
    masks: tuple[MaskKind, ...] = EVERY_MASK
    packed: bool = False
    aligned: bool = False
    grid: bool = False

    def unsupported(self, request: Request) -> str:
        """Name the first limit that a request exceeds; "" if there is none."""
        if not is_nvidia(request.device_type):
            return "needs an NVIDIA GPU"
        if request.capability not in self.capabilities:
            return f"needs compute capability {' or '.join(f'{major}.{minor}' for major, minor in self.capabilities)}"
        if request.dtype not in self.dtypes:
            return why_no_dtype(self.dtypes)
        if request.packed and not self.packed:
            return "no packed sequences"
        if request.mask not in self.masks:
            return why_no_mask(self.masks)
        if self.aligned and not request.aligned:
            return "addresses and strides of Q, K and V must be multiples of 16 bytes"
        if self.grid and max(request.batch, request.q_heads) > MAX_GRID:
            return f"more than {MAX_GRID} batch elements or heads"
        return ""


def why_no_dtype(dtypes: tuple[torch.dtype, ...] = SUPPORTED_DTYPES) -> str:
    """Name the dtypes that are supported."""
    return f"dtype must be one of {', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"


def why_no_mask(masks: tuple[MaskKind, ...]) -> str:
    """Name the masks that are not supported."""
    if "bool" in masks:
        return "no block lists"
    return "no masks" if masks == ("none",) else "no masks other than key-padding masks"


class DeclaredKernel:
    """Base of kernels whose recipes and requests are declared.

    Attributes:
        recipes: the recipes that the kernel computes.
        requests: the requests that the kernel takes; a kernel with further limits extends `unsupported`.
    """

    recipes: SupportedRecipes
    requests: SupportedRequests

    def serves(self, recipe: Recipe) -> bool:
        """Tell whether the kernel computes every format and transform of a recipe."""
        return self.recipes.include(recipe)

    def unsupported(self, request: Request) -> str:
        """Name the first limit of the kernel that a request exceeds; "" if there is none."""
        return self.requests.unsupported(request)
