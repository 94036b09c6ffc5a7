"""The attention processors that users set; one class serves every supported family, for one layer or for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from huggingface_hub.utils import logging

from sage_hf.attention import sage_attention
from sage_hf.attributes import LAYER
from sage_hf.diffusers.adapters import ServedAdapter, serve
from sage_hf.diffusers.backends import backend_member
from sage_hf.diffusers.bridge import BackendProcessor, parallel_config_of, scores_are_skipped
from sage_hf.diffusers.errors import FixedBackendError, UnsupportedAttentionError
from sage_hf.diffusers.fused_norms import end_trial
from sage_hf.diffusers.layers import Layer, recognize, show_parameters_of_families
from sage_hf.record import run_in_layer
from sage_hf.sparse.layer import SparseLayer
from sage_kernels.spec.options import check_fallback
from sage_kernels.spec.recipe import get_recipe

logger = logging.get_logger(__name__)


_SETTINGS = frozenset({"_recipe", "fallback", "training", "sparse", "_before", "_by_backend"})


class SageAttnProcessor(BackendProcessor):
    """Attention processor for diffusers models.

    One instance may serve all layers of a model, `model.set_attn_processor(SageAttnProcessor("sage3"))`: each attention
    module then remembers its former processor's computation. `bind` makes a processor for one layer.

    Args:
        recipe: name of a recipe; may be assigned later, `processor.recipe = "sage2"`.
        fallback: "native", "emulate", "error", or None for the default of the process (sage_hf.set_default_fallback).
        training: name of the recipe for attention modules in training mode; None: the same as `recipe`.

    Raises:
        ValueError: recipe, training or fallback is unknown.
    """

    def __init__(self, recipe: str = "sage3", fallback: str | None = None, training: str | None = None) -> None:
        self.recipe = recipe
        self.fallback = None if fallback is None else check_fallback(fallback)
        self.training = None if training is None else get_recipe(training).name
        self.sparse: SparseLayer | None = None  # set by sage_hf.apply; None: compute all tiles
        self._before: Any = None  # the processor that `exchange_processor` took out of a module
        self._by_backend = False  # whether `exchange_processor` ran for `set_attention_backend`

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a setting; refuse a setting of the replaced processor, because it would have no effect here.

        Raises:
            AttributeError: neither this class nor a derived class has such a setting.
        """
        if name not in _SETTINGS and not hasattr(type(self), name):
            raise AttributeError(
                f"{type(self).__name__} has no setting {name!r}: assign it to the original processor, "
                "which is read at each call, or declare it in your own class"
            )
        object.__setattr__(self, name, value)

    @property
    def recipe(self) -> str:
        """Name the recipe in evaluation mode; assigning an unknown recipe raises ValueError."""
        return self._recipe

    @recipe.setter
    def recipe(self, name: str) -> None:
        self._recipe = get_recipe(name).name

    def recipe_of(self, attn: torch.nn.Module) -> str:
        """Return the recipe for an attention module in its current mode, training or evaluation."""
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
        """Run `sage_attention` with this processor's recipe for `attn` and its fallback, on (B, H, N, D) tensors.

        While diffusers skips attention scores, the output is `value`.
        """
        end_trial(query, key)
        if scores_are_skipped(query, value):
            return value
        attend = sage_attention if self.sparse is None else self.sparse.attend
        recipe = self.recipe_of(attn)
        return attend(query, key, value, attn_mask, scale=scale, recipe=recipe, fallback=self.fallback)

    @show_parameters_of_families
    def __call__(self, attn: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute the attention of `attn` with the arguments of its family; unknown arguments raise TypeError.

        Keywords that diffusers' module would drop are dropped: `Layer.expected`.
        """
        layer = self._layer_in(attn)
        return run_in_layer(attn, layer, self, attn, *args, **layer.expected(attn, kwargs))

    def _layer_in(self, attn: torch.nn.Module) -> Layer:
        layer = self._known_layer(attn)
        if layer is None:
            raise UnsupportedAttentionError(
                f"{type(attn).__name__} has {type(self).__name__} as its processor, which does not know what the layer "
                "computed before: "
                "use model.set_attn_processor(...), module.set_processor(...) or sage_hf.apply(...), "
                "not an assignment to module.processor"
            )
        return layer

    def _known_layer(self, attn: torch.nn.Module) -> Layer | None:
        processor, layer = getattr(attn, LAYER, (None, None))
        return layer if processor is self else None

    @property
    def attention_backend(self) -> Any:
        """Return diffusers' backend of the recipe."""
        import diffusers.models.attention_dispatch  # noqa: F401 - which registers the backends

        return backend_member(self.recipe, self.fallback)

    def __repr__(self) -> str:
        training = "" if self.training is None else f", training={self.training!r}"
        return f"{type(self).__name__}(recipe={self.recipe!r}, fallback={self.fallback!r}{training})"


class SageAttn3Processor(SageAttnProcessor):
    """Processor for NVFP4 attention (SageAttention3, arXiv 2505.11594)."""

    def __init__(self, recipe: str = "sage3", fallback: str | None = None, training: str | None = None) -> None:
        super().__init__(recipe, fallback, training)


class SageAttn2Processor(SageAttnProcessor):
    """Processor for attention with INT8 Q·Kᵀ and FP8 P·V (SageAttention2, arXiv 2411.10958)."""

    def __init__(self, recipe: str = "sage2", fallback: str | None = None, training: str | None = None) -> None:
        super().__init__(recipe, fallback, training)


class SageAttn1Processor(SageAttnProcessor):
    """Processor for attention with INT8 Q·Kᵀ and 16-bit P·V (SageAttention, arXiv 2410.02367)."""

    def __init__(self, recipe: str = "sage1", fallback: str | None = None, training: str | None = None) -> None:
        super().__init__(recipe, fallback, training)


class SageBwdProcessor(SageAttnProcessor):
    """Processor for INT8 attention with gradients, for training (SageBwd, arXiv 2505.11594)."""

    def __init__(self, recipe: str = "sage_bwd", fallback: str | None = None, training: str | None = None) -> None:
        super().__init__(recipe, fallback, training)


def sage_of(module: torch.nn.Module) -> SageAttnProcessor | None:
    """Return the SageAttnProcessor that computes the attention of `module`; None if there is none."""
    present = getattr(module, "processor", None)
    if isinstance(present, ServedAdapter):
        return present.sage
    return present if isinstance(present, SageAttnProcessor) else None


def layer_of(module: torch.nn.Module) -> Layer:
    """Return the computation of `module` with its current processor; `module` is not changed.

    Raises:
        UnsupportedAttentionError: the computation is not supported.
    """
    sage = sage_of(module)
    return recognize(module, getattr(module, "processor", None)) if sage is None else sage._layer_in(module)


def layer_for(module: torch.nn.Module, processor: SageAttnProcessor) -> Layer:
    """Return the computation that `processor` will have when it is set in `module`; `module` is not changed.

    If the module has a SageAttnProcessor, the new processor takes over its layer. A processor that was in this module
    before computes the same as then, even if another processor has replaced it for a while.

    Raises:
        UnsupportedAttentionError: the processor is new to the module, whose computation is not supported.
    """
    known_layer = None if sage_of(module) is not None else processor._known_layer(module)
    return layer_of(module) if known_layer is None else known_layer


def bind(
    module: torch.nn.Module, recipe: str = "sage3", fallback: str | None = None, training: str | None = None
) -> SageAttnProcessor:
    """Return a processor that can be set in this attention module; `module` is not changed.

    Raises:
        ValueError: recipe, training or fallback is unknown.
        UnsupportedAttentionError: the module is not recognised; the message names it.
    """
    processor = SageAttnProcessor(recipe, fallback, training)
    layer_of(module)  # raises the same error as setting it
    present: Any = type(sage_of(module) or processor)
    for name in ("__call__", "attend"):
        if getattr(present, name) is not getattr(SageAttnProcessor, name):
            raise UnsupportedAttentionError(
                f"{type(module).__name__} has {present.__name__}, which overrides {name}; that method would no longer "
                "run: assign that processor's .recipe, or call sage_hf.restore(model) first"
            )
    return processor


def log_kept(module: Any, error: FixedBackendError) -> None:
    """Log that layers keep the processor of `module`, once for each class of processors."""
    _log_once(type(module.processor), "stays", f"{error}: those layers keep it, and attend as before")


def _log_once(processor_class: type, event: str, message: str) -> None:
    """Log a message at the first event of its kind with a class of processors."""
    if (processor_class, event) not in _logged:
        _logged.add((processor_class, event))
        logger.warning(message)


_logged: set[tuple[type, str]] = set()
"""Classes of processors with the events, "stays" or "replaces ours", that were logged already."""


def replace_processor(module: torch.nn.Module, processor: Any) -> Any:
    """Prepare `module` for `module.set_processor(processor)`, and return the processor to set.

    With our processor, the module stores its previous computation. The stored computation stays while another processor
    is set, and is removed when the original processor is put back. An IP-Adapter's processor stays, and our processor
    attends for it. Any other processor, such as attention slicing's or xFormers', replaces ours, which is logged. A
    processor that attends only by a backend of its own choice stays, which is logged too.
    """
    if isinstance(processor, SageAttnProcessor):
        try:
            layer = layer_for(module, processor)
        except FixedBackendError as error:
            log_kept(module, error)
            return module.processor
        return _take_over(module, processor, layer)
    if isinstance(processor, ServedAdapter):
        return _take_over(module, processor.sage, recognize(module, processor.adapter))
    sage, known_layer = sage_of(module), None
    if sage is not None:
        known_layer = sage._known_layer(module)
    elif LAYER in vars(module):
        known_layer = vars(module)[LAYER][1]
    if known_layer is not None and processor is known_layer.original:
        vars(module).pop(LAYER, None)
    elif sage is not None:
        processor_class = type(processor)
        _log_once(
            processor_class,
            "replaces ours",
            f"{processor_class.__name__} replaces {sage}: those layers no longer attend in low bits; "
            "set it again if needed",
        )
    return processor


def _take_over(module: torch.nn.Module, processor: SageAttnProcessor, layer: Layer) -> Any:
    """Make `processor` compute `layer` in `module`, and return the processor to set in the module."""
    processor.parallel_config = parallel_config_of(layer.original)
    vars(module)[LAYER] = (processor, layer)
    return serve(layer.original, processor) if layer.holds_weights else processor


def exchange_processor(module: Any, processor: SageAttnProcessor, *, by_backend: bool = False) -> Callable[[], None]:
    """Set a processor that `bind` made, and return a function that puts back the previous processor.

    If one of our backends set both the new and the previous processor, the function puts back the processor before
    both. Fusing projections and loading IP-Adapters are not undone: see `put_back`.
    """
    before = sage_of(module)
    if by_backend and before is not None and before._by_backend:
        processor._before = before._before
    else:
        processor._before = module.processor if before is None else before
    processor._by_backend = by_backend
    module.set_processor(processor)
    return partial(put_back, module, processor)


def put_back(module: Any, processor: SageAttnProcessor) -> None:
    """Put back the processor that `processor` replaced in `exchange_processor`.

    diffusers' processor is put back as diffusers would set it now, because fusing projections, or loading an
    IP-Adapter, may have exchanged the original in the meantime.
    """
    before, sage = processor._before, sage_of(module)
    if not isinstance(before, SageAttnProcessor):
        if sage is not None:
            before = layer_of(module).original
        elif isinstance(module.processor, torch.nn.Module) or isinstance(before, torch.nn.Module):
            before = module.processor
    module.set_processor(before)


@contextmanager
def originals_in_place(model: torch.nn.Module) -> Iterator[None]:
    """Replace our processors in `model` by the originals while diffusers rebuilds the originals; then set ours
    again."""
    served = _set_originals(model)
    try:
        yield
    finally:
        for module, sage in served.items():
            try:
                module.set_processor(sage)
            except UnsupportedAttentionError as error:
                logger.warning(f"{sage} can no longer serve a layer, which now attends as diffusers does: {error}")


@contextmanager
def replaceable(model: torch.nn.Module) -> Iterator[None]:
    """Replace our processors in `model` by the originals while diffusers replaces them; set ours again after an
    error."""
    served = _set_originals(model)
    try:
        yield
    except Exception:  # undo for any error, and raise it again
        for module, sage in served.items():
            module.set_processor(sage)
        raise


def remove_processors(model: torch.nn.Module) -> None:
    """Remove all our processors from `model`, which gets its originals back."""
    _set_originals(model)


def _set_originals(model: torch.nn.Module) -> dict[Any, SageAttnProcessor]:
    """Set the originals in place of our processors, and return our processors by module."""
    layers: list[Any] = list(attention_layers(model).values())
    served = {module: sage for module in layers if (sage := sage_of(module)) is not None}
    originals = {module: layer_of(module).original for module in served}
    for module, original in originals.items():
        module.set_processor(original)
    return served


def attention_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return every attention module inside `model` whose processor can be switched, by dotted name."""
    return {
        name: module
        for name, module in model.named_modules()
        if name and hasattr(module, "set_processor") and hasattr(module, "processor")
    }
