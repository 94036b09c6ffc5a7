"""The attention processors users set: one class serves every supported family, all layers at once or one each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.utils import logging

from sage_hf.attention import check_fallback, sage_attention
from sage_hf.record import run_in_layer
from sage_kernels.recipe import get_recipe

from .errors import UnsupportedAttentionError
from .layers import EXPLICIT, Layer, recognize

logger = logging.get_logger(__name__)


class SageAttnProcessor:
    """Attention processor for diffusers models.

    One instance may serve all layers of a model, `model.set_attn_processor(SageAttnProcessor("sage3"))`: each attention
    module then keeps what its former processor computed. `bind` makes one for a single layer.

    Args:
        recipe: name of a recipe; may be assigned later, `processor.recipe = "sage2"`.
        fallback: "native", "emulate", "error", or None for the default of the process (sage_hf.set_default_fallback).
        training: name of the recipe of attention modules in training mode; None: `recipe` there too.

    Raises:
        ValueError: unknown recipe or fallback.
    """

    def __init__(self, recipe: str = "sage3", fallback: str | None = None, training: str | None = None) -> None:
        self.recipe = get_recipe(recipe).name
        self.fallback = None if fallback is None else check_fallback(fallback)
        self.training = None if training is None else get_recipe(training).name
        self._layer: Layer | None = None

    def recipe_of(self, attn: torch.nn.Module) -> str:
        """The recipe for an attention module, as its mode is."""
        return self.training if self.training is not None and attn.training else self.recipe

    def attend(
        self,
        attn: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """`sage_attention` with this processor's recipe for `attn`, and its fallback; (B, H, N, D) tensors."""
        recipe = self.recipe_of(attn)
        return sage_attention(query, key, value, attn_mask, scale=scale, recipe=recipe, fallback=self.fallback)

    def __call__(self, attn: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Attention of `attn`. All arguments go to what its family computes, which rejects those it does not know."""
        return run_in_layer(attn, self._layer_in(attn), self, attn, *args, **kwargs)

    def _layer_in(self, attn: torch.nn.Module) -> Layer:
        layer = self._layer if self._layer is not None else getattr(attn, "_sage_layer", None)
        if layer is None:
            raise UnsupportedAttentionError(
                f"{type(attn).__name__} has {type(self).__name__} as its processor, and not what it computed before: "
                "use model.set_attn_processor(...), module.set_processor(...) or sage_hf.apply(...), "
                "not an assignment to module.processor"
            )
        return layer

    @property
    def _attention_backend(self) -> None:
        raise AttributeError("_attention_backend")

    @_attention_backend.setter
    def _attention_backend(self, backend: object) -> None:
        raise UnsupportedAttentionError(
            f"this layer has {type(self).__name__}: assign its .recipe, or set another processor before "
            f"choosing the attention backend {backend}"
        )

    def __repr__(self) -> str:
        training = "" if self.training is None else f", training={self.training!r}"
        return f"{type(self).__name__}(recipe={self.recipe!r}, fallback={self.fallback!r}{training})"


class SageAttn3Processor(SageAttnProcessor):
    """NVFP4 attention (SageAttention3, arXiv 2505.11594)."""

    def __init__(self, recipe: str = "sage3", fallback: str | None = None, training: str | None = None) -> None:
        super().__init__(recipe, fallback, training)


class SageAttn2Processor(SageAttnProcessor):
    """INT8 Q·Kᵀ and FP8 P·V (SageAttention2)."""

    def __init__(self, recipe: str = "sage2", fallback: str | None = None, training: str | None = None) -> None:
        super().__init__(recipe, fallback, training)


class SageAttn1Processor(SageAttnProcessor):
    """INT8 Q·Kᵀ and 16-bit P·V (SageAttention)."""

    def __init__(self, recipe: str = "sage1", fallback: str | None = None, training: str | None = None) -> None:
        super().__init__(recipe, fallback, training)


class SageBwdProcessor(SageAttnProcessor):
    """INT8 attention with gradients, for training (SageBwd, arXiv 2505.11594)."""

    def __init__(self, recipe: str = "sage_bwd", fallback: str | None = None, training: str | None = None) -> None:
        super().__init__(recipe, fallback, training)


def layer_of(module: torch.nn.Module) -> Layer:
    """What `module` computes, from its present processor; `module` is not changed.

    Raises:
        UnsupportedAttentionError: that is nothing we know.
    """
    present = getattr(module, "processor", None)
    return present._layer_in(module) if isinstance(present, SageAttnProcessor) else recognize(module, present)


def bind(
    module: torch.nn.Module, recipe: str = "sage3", fallback: str | None = None, training: str | None = None
) -> SageAttnProcessor:
    """A processor for this one attention module, chosen from its present processor; `module` is not changed.

    Raises:
        ValueError: unknown recipe or fallback.
        UnsupportedAttentionError: the module is not recognised; names it.
    """
    processor = SageAttnProcessor(recipe, fallback, training)
    processor._layer = layer_of(module)
    return processor


_displacing: set[str] = set()  # processors whose taking over from ours was logged


def _is_original(processor: Any, module: torch.nn.Module, present: SageAttnProcessor) -> bool:
    layer = present._layer or getattr(module, "_sage_layer", None)
    return layer is not None and processor is layer.original


def replace_processor(module: torch.nn.Module, processor: Any) -> Any:
    """Prepare `module` for `module.set_processor(processor)`; returns the processor to set.

    A shared SageAttnProcessor leaves in the module what the module computed so far. A new Fused… processor, which is
    what diffusers' `fuse_qkv_projections()` sets, does not displace ours, which computes with the separate projections.
    Another one, as attention slicing or xFormers set, does, and that is logged; putting back the original is not.
    """
    present = getattr(module, "processor", None)
    vars(module).pop("_sage_before_backend", None)
    if isinstance(processor, SageAttnProcessor):
        if processor._layer is None:
            vars(module)["_sage_layer"] = layer_of(module)
        return processor
    if isinstance(present, SageAttnProcessor) and not _is_original(processor, module, present):
        family = type(processor).__name__
        if family.startswith("Fused") and family in EXPLICIT:
            return present
        if family not in _displacing:
            _displacing.add(family)
            logger.warning(
                f"{family} replaces {present}: those layers no longer attend in low bits; set it again if needed"
            )
    vars(module).pop("_sage_layer", None)
    return processor


def exchange_processor(module: Any, processor: Any) -> Callable[[], None]:
    """Set a processor; the returned function puts back all that was there, also what an attention backend remembers."""
    present, before_backend = module.processor, vars(module).get("_sage_before_backend")

    def undo() -> None:
        module.set_processor(present)
        if before_backend is not None:
            module._sage_before_backend = before_backend

    module.set_processor(processor)
    return undo


def attention_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Every attention module inside `model` whose processor can be switched, by dotted name."""
    return {
        name: module
        for name, module in model.named_modules()
        if name and hasattr(module, "set_processor") and hasattr(module, "processor")
    }
