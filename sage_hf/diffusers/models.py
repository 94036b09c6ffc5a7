"""Methods added to diffusers' models: `set_attn_processor` where it is missing, and our `set_attention_backend`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from huggingface_hub.utils import logging

from sage_hf.diffusers.bridge import cp_plan_of, for_each_subclass, parallel_config_of
from sage_hf.diffusers.cp_plans import (
    SharedTextCPPlan,
    check_layers,
    check_split,
    context_parallel_plan,
    split_attention,
)
from sage_hf.diffusers.errors import FixedBackendError, UnsupportedAttentionError, naming
from sage_hf.diffusers.parallel import check_parallelism, splits_tokens
from sage_hf.diffusers.processor import (
    SageAttnProcessor,
    attention_layers,
    bind,
    exchange_processor,
    layer_for,
    layer_of,
    log_kept,
    originals_in_place,
    put_back,
    replaceable,
    sage_of,
)
from sage_hf.diffusers.vsa import VSAProcessor
from sage_hf.names import NAMES

logger = logging.get_logger(__name__)

_NO_ATTENTION = "{} has no attention layer whose processor can be switched: there is nothing to run in low bits"


def _bind_all(model: Any, recipe: str, fallback: str | None) -> dict[str, SageAttnProcessor]:
    """Return a processor for each attention layer of `model`, by dotted name, without changing the model.

    Layers that attend only by a backend of their own choice are left out, unless the model has no other layers.

    Raises:
        UnsupportedAttentionError: the model has no attention layer, or a layer is not recognised; the message names it.
    """
    layers = attention_layers(model)
    if not layers:
        raise UnsupportedAttentionError(_NO_ATTENTION.format(type(model).__name__))
    bound = {}
    for name, module in layers.items():
        with naming(name):
            try:
                bound[name] = bind(module, recipe, fallback)
                check_parallelism(model, module, layer_of(module))
            except FixedBackendError as error:
                backend_error = error
                log_kept(module, error)
    if not bound:
        raise backend_error
    return bound


def _check_supported(model: Any, processor: Any) -> None:
    """Raise UnsupportedAttentionError if a SageAttnProcessor cannot serve one of its layers."""
    layers = attention_layers(model)
    if not layers and isinstance(processor, SageAttnProcessor):
        raise UnsupportedAttentionError(_NO_ATTENTION.format(type(model).__name__))
    backend_errors: list[FixedBackendError] = []
    for name, module in layers.items():
        layer_processor = processor.get(f"{name}.processor") if isinstance(processor, dict) else processor
        if isinstance(layer_processor, SageAttnProcessor):
            with naming(name):
                try:
                    layer, is_sparse = layer_for(module, layer_processor), layer_processor.sparse is not None
                    check_parallelism(model, module, layer, is_sparse=is_sparse)
                except FixedBackendError as error:
                    backend_errors.append(error)
    if backend_errors and len(backend_errors) == len(layers):
        raise backend_errors[0]


def _remove_backend(model: Any) -> list[tuple[Any, SageAttnProcessor]]:
    """Put back the processors that `set_attention_backend` replaced when it got one of our names.

    If another of our processors was set later, restoring it will skip the backend's processor.

    Returns:
        The modules whose processor was put back, with our processor that was removed.
    """
    removed = []
    for module in attention_layers(model).values():
        sage = sage_of(module)
        if sage is not None and sage._by_backend:
            put_back(module, sage)
            removed.append((module, sage))
        while sage is not None:
            before = sage._before
            if isinstance(before, SageAttnProcessor) and before._by_backend:
                sage._before = before._before
            sage = before if isinstance(before, SageAttnProcessor) else None
    return removed


def _check_first(model_class: Any) -> None:
    """Wrap the class's own `set_attn_processor`, if any, so that it raises errors before it changes any layer."""
    set_attn_processor = vars(model_class).get("set_attn_processor")
    if set_attn_processor is None:
        return

    @functools.wraps(set_attn_processor)
    def wrapper(self: torch.nn.Module, processor: Any, *args: Any, **kwargs: Any) -> None:
        _check_supported(self, processor)
        return set_attn_processor(self, processor, *args, **kwargs)

    model_class.set_attn_processor = wrapper


def _on_originals(model_class: Any) -> None:
    """Wrap the class's own methods that exchange processors by class: the originals are in place while they run.

    `set_default_attn_processor` replaces our processors, and refuses processors that it does not know. (Un)fusing
    projections exchanges the originals; our processors then attend for the new originals.
    """
    for name, in_place in (
        ("set_default_attn_processor", replaceable),
        ("fuse_qkv_projections", originals_in_place),
        ("unfuse_qkv_projections", originals_in_place),
    ):
        if (method := vars(model_class).get(name)) is not None:
            setattr(model_class, name, _inside(method, in_place))


def _inside(method: Any, in_place: Callable[[Any], AbstractContextManager[None]]) -> Any:
    @functools.wraps(method)
    def wrapper(self: torch.nn.Module) -> None:
        with in_place(self):
            method(self)

    return wrapper


def _complete(cls: type) -> None:
    _check_first(cls)
    _on_originals(cls)


def complete_model_class(model_class: Any) -> None:
    """Complete diffusers' ModelMixin; a method that a model or another of its bases defines takes precedence."""
    for_each_subclass(model_class, _complete)
    set_backend, reset_backend = model_class.set_attention_backend, model_class.reset_attention_backend

    def attn_processors(self: torch.nn.Module) -> dict[str, Any]:
        """Return the processor of every attention layer, by `<layer>.processor`."""
        try:
            return super(model_class, self).attn_processors
        except AttributeError:
            return {f"{name}.processor": module.processor for name, module in attention_layers(self).items()}

    def set_attn_processor(self: torch.nn.Module, processor: Any) -> None:
        """Set one processor in every attention layer, or each layer's processor from a dictionary like
        `attn_processors`.

        Raises:
            UnsupportedAttentionError: a SageAttnProcessor cannot serve one of the layers. Nothing is changed then.
        """
        from diffusers.models.attention import AttentionMixin

        _check_supported(self, processor)
        inherited = getattr(super(model_class, self), "set_attn_processor", None)
        return AttentionMixin.set_attn_processor(self, processor) if inherited is None else inherited(processor)

    @functools.wraps(set_backend)
    def set_attention_backend(self: torch.nn.Module, backend: str) -> None:
        if backend.lower() not in NAMES:
            removed = _remove_backend(self)
            try:
                set_backend(self, backend)
            except Exception:  # undo for any error, and raise it again
                for module, processor in removed:
                    exchange_processor(module, processor, by_backend=True)
                raise
            unreached = sum(sage_of(module) is not None for module in attention_layers(self).values())
            if unreached:
                logger.warning(
                    f'set_attention_backend("{backend}") does not reach the {unreached} layers with a SageAttnProcessor'
                    ": set another processor there first"
                )
            return
        for name, processor in _bind_all(self, *NAMES[backend.lower()]).items():
            exchange_processor(self.get_submodule(name), processor, by_backend=True)

    @functools.wraps(reset_backend)
    def reset_attention_backend(self: torch.nn.Module) -> None:
        _remove_backend(self)
        reset_backend(self)

    model_class.attn_processors = property(attn_processors)
    model_class.set_attn_processor = set_attn_processor
    model_class.set_attention_backend = set_attention_backend
    model_class.reset_attention_backend = reset_attention_backend


def complete_parallelism(model_class: Any) -> None:
    """Make `enable_parallelism` configure layers with a SageAttnProcessor, or raise an error before any change."""
    if not hasattr(model_class, "enable_parallelism"):
        return
    enable = model_class.enable_parallelism

    @functools.wraps(enable)
    def enable_parallelism(self: Any, *, config: Any, cp_plan: Any = None, **kwargs: Any) -> None:
        modules = _modules_of_ours(self) if splits_tokens(config) else {}
        if modules and cp_plan is None and cp_plan_of(self) is None:
            cp_plan = context_parallel_plan(self)
        if isinstance(cp_plan, SharedTextCPPlan) and splits_tokens(config):
            check_split(self, config)
            enable(self, config=config, cp_plan=cp_plan, **kwargs)
            split_attention(self)
            return
        if modules:
            check_layers(modules, config, by_our_cp_plan=False)
        enable(self, config=config, cp_plan=cp_plan, **kwargs)
        for module in modules.values():
            layer_of(module).parallelize(parallel_config_of(self))

    model_class.enable_parallelism = enable_parallelism


def _modules_of_ours(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the attention modules that a SageAttnProcessor or a VSAProcessor serves, by dotted name."""
    return {
        name: module
        for name, module in attention_layers(model).items()
        if sage_of(module) is not None or isinstance(getattr(module, "processor", None), VSAProcessor)
    }
