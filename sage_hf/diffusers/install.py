"""Additions to diffusers, made when it is imported; `import sage_hf` itself does not import it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils import logging

from sage_hf.diffusers import bridge
from sage_kernels.runtime.import_hook import when_imported

if TYPE_CHECKING:
    import torch

logger = logging.get_logger(__name__)

_warned: set[type] = set()

SHARED = "set_attn_processor with a SageAttnProcessor"
ADAPTERS = "loading IP-Adapters into models with a SageAttnProcessor"
LAYER_SKIP = "layer skip in models with a SageAttnProcessor"


@functools.cache
def install() -> None:
    """Complete each module of diffusers once: now if it is already imported, or else right after its import."""
    for name, complete, purpose in (
        ("models.attention_dispatch", _complete_dispatch, 'set_attention_backend("sage3") and its siblings'),
        ("models.attention_processor", _complete_attention_processor, SHARED),
        ("models.attention", _complete_attention, SHARED),
        ("models.modeling_utils", _complete_modeling_utils, "switching diffusers' models"),
        ("loaders.unet", _complete_loaders, ADAPTERS),
        ("loaders.transformer_flux", _complete_loaders, ADAPTERS),
        ("loaders.transformer_sd3", _complete_loaders, ADAPTERS),
        ("loaders.ip_adapter", _complete_loaders, ADAPTERS),
        ("hooks._helpers", _complete_hook_helpers, LAYER_SKIP),
        ("hooks.layer_skip", _complete_layer_skip, LAYER_SKIP),
    ):
        when_imported(f"diffusers.{name}", complete, purpose)


def _complete_dispatch(dispatch: ModuleType) -> None:
    from sage_hf.diffusers.backends import register_backends

    register_backends(dispatch)


def _complete_attention_processor(module: ModuleType) -> None:
    """Make `Attention` and `MochiAttention` tell a new SageAttnProcessor their previous computation."""
    attention, mochi = module.Attention, module.MochiAttention
    attention.forward, mochi.forward = map(_warn_without_dispatch, (attention.forward, mochi.forward))
    attention.forward = _without_inspection(attention.forward)
    attention.set_processor = mochi.set_processor = _with_replacement(attention.set_processor)
    mochi.get_processor = attention.get_processor


def _complete_attention(module: ModuleType) -> None:
    mixin = module.AttentionModuleMixin
    mixin.set_processor = _with_replacement(mixin.set_processor)
    mixin.set_attention_backend = _refused_by_ours(mixin.set_attention_backend)


def _complete_modeling_utils(module: ModuleType) -> None:
    from sage_hf.diffusers.models import complete_model_class, complete_parallelism

    complete_model_class(module.ModelMixin)
    complete_parallelism(module.ModelMixin)


def _complete_loaders(module: ModuleType) -> None:
    """Keep our processors when IP-Adapters are loaded or unloaded, which creates all processors again by class."""
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            for name in bridge.IP_ADAPTER_METHODS:
                if name in vars(cls):
                    setattr(cls, name, _with_originals_in_place(vars(cls)[name]))


def _with_originals_in_place(change: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (ours := _processors()) is None:
            return change(self, *args, **kwargs)
        import torch

        model = self if isinstance(self, torch.nn.Module) else getattr(self, "unet", None) or self.transformer
        with ours.originals_in_place(model):
            return change(self, *args, **kwargs)

    return wrapper


def _processors() -> Any:
    """Return the module of our processors; None if it was never imported, so that no processor of ours exists."""
    return sys.modules.get("sage_hf.diffusers.processor")


def _complete_hook_helpers(module: ModuleType) -> None:
    from sage_hf.diffusers.adapters import ServedAdapter
    from sage_hf.diffusers.processor import SageAttnProcessor, layer_of, sage_of

    def original_of(attn: torch.nn.Module) -> Any:
        return attn.processor if sage_of(attn) is None else layer_of(attn).original

    bridge.skip_as_original(module, (SageAttnProcessor, ServedAdapter), original_of)


def _complete_layer_skip(module: ModuleType) -> None:
    bridge.score_skip_modes.append(module.AttentionScoreSkipFunctionMode)


def _with_replacement(set_processor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_processor)
    def wrapper(self: torch.nn.Module, processor: Any) -> None:
        ours = _processors()
        set_processor(self, processor if ours is None else ours.replace_processor(self, processor))

    return wrapper


def _refused_by_ours(set_attention_backend: Callable[..., None]) -> Callable[..., None]:
    """Wrap an attention module's method to raise an error if the module has a SageAttnProcessor, whose backend is
    fixed."""

    @functools.wraps(set_attention_backend)
    def wrapper(self: torch.nn.Module, backend: str) -> None:
        from sage_hf.diffusers.errors import UnsupportedAttentionError
        from sage_hf.diffusers.processor import sage_of

        if (sage := sage_of(self)) is not None:
            raise UnsupportedAttentionError(
                f"this layer has {type(sage).__name__}: assign its .recipe, or set another processor before "
                f"choosing the attention backend {backend}"
            )
        set_attention_backend(self, backend)

    return wrapper


def _without_inspection(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Attention.forward` to call our processor directly, as `forward` would, if there are no further keywords.

    `forward` inspects the processor's signature at each call, to find the keywords that the processor takes.
    """
    import torch

    from sage_hf.diffusers.processor import SageAttnProcessor

    @functools.wraps(forward)
    def wrapper(
        self: torch.nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if kwargs or torch.compiler.is_compiling() or not isinstance(self.processor, SageAttnProcessor):
            return forward(self, hidden_states, encoder_hidden_states, attention_mask, **kwargs)
        arguments = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask}
        return self.processor(self, hidden_states, **arguments)

    return wrapper


def _warn_without_dispatch(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` to warn if `with attention_backend("sage3")` has no effect, because the processor ignores it."""
    import torch
    from diffusers.models import attention_dispatch

    from sage_hf.diffusers.layers import calls_dispatch
    from sage_hf.diffusers.processor import SageAttnProcessor
    from sage_hf.names import NAMES

    @functools.wraps(forward)
    def wrapper(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            name = bridge.active_backend(attention_dispatch)
            family = type(self.processor)
            if (
                name in NAMES
                and family not in _warned
                and not issubclass(family, SageAttnProcessor)
                and not calls_dispatch(self.processor)
            ):
                _warned.add(family)
                logger.warning(
                    f'attention_backend("{name}") has no effect on layers with {family.__name__}, which does not use '
                    f'diffusers\' attention dispatch: call model.set_attention_backend("{name}") or sage_hf.apply'
                )
        return forward(self, *args, **kwargs)

    return wrapper
