"""Registration of our names with transformers, in either import order and without importing it."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils import logging

from sage_hf.names import NAMES
from sage_kernels.runtime.import_hook import when_imported
from sage_kernels.spec.recipe import get_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.get_logger(__name__)

_warned: set[tuple[str, str]] = set()
"""Modelling files and implementations already warned about: transformers checks each class of a model separately."""


@functools.cache
def register() -> None:
    """Register attention and mask functions with transformers: now if it is imported, or else at its import.

    A model that cannot run our attention (`layers.refusal`), although transformers accepts the name, runs its default
    implementation instead, and a warning names its class.
    """
    purpose = 'attn_implementation="sage3" and its siblings'
    when_imported("transformers.modeling_utils", _register_attention, purpose)
    when_imported("transformers.masking_utils", _register_masks, purpose)
    when_imported("accelerate.hooks", _keep_causality, "masks of layers on several GPUs")


def _register_attention(modeling_utils: ModuleType) -> None:
    from sage_hf.transformers.kv_layer import attention_with_cache

    for name, (recipe, fallback) in NAMES.items():
        function = functools.partial(attention_with_cache, recipe=recipe, fallback=fallback)
        modeling_utils.AttentionInterface.register(name, function)
    _refuse_unsupported_models(modeling_utils.PreTrainedModel)


def _register_masks(masking_utils: ModuleType) -> None:
    from sage_hf.transformers.masks import sage_mask, sage_training_mask

    for name, (recipe, _) in NAMES.items():
        mask = sage_mask if get_recipe(recipe).backward is None else sage_training_mask
        masking_utils.AttentionMaskInterface.register(name, mask)


def _keep_causality(hooks: ModuleType) -> None:
    """Let masks that accelerate copies for layers on another GPU keep the originals' statement of causality."""
    from sage_hf.transformers.masks import copy_causality

    send = hooks.send_to_device

    @functools.wraps(send)
    def send_to_device(tensor: Any, device: Any, *args: Any, **options: Any) -> Any:
        sent = send(tensor, device, *args, **options)
        if isinstance(tensor, dict):  # a layer's keywords
            for name, mask in tensor.items():
                copy_causality(mask, sent[name])
        return sent

    hooks.send_to_device = send_to_device  # type: ignore[attr-defined]


def _refuse_unsupported_models(pretrained_model: type[PreTrainedModel]) -> None:
    """Extend the check of `attn_implementation` in a model's `__init__` and `set_attn_implementation`."""
    from sage_hf.transformers.inspection import models_of
    from sage_hf.transformers.layers import refusal
    from sage_hf.transformers.rotary import forget_model, use_rope_kernel

    check = pretrained_model.get_correct_attn_implementation

    @functools.wraps(check)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: object, **kwargs: object
    ) -> str:
        implementation = check(self, requested_attention, *args, **kwargs)
        if implementation not in NAMES:
            forget_model(self)
            return implementation
        models_of.cache_clear()
        if refusal(type(self)) is None:
            use_rope_kernel(self)
            return implementation
        default = check(self, None, *args, **kwargs)
        if (type(self).__module__, implementation) not in _warned:
            _warned.add((type(self).__module__, implementation))
            logger.warning(
                f'{type(self).__name__} cannot run attn_implementation="{implementation}" and runs "{default}" instead'
                f": {refusal(type(self))}"
            )
        return default

    pretrained_model.get_correct_attn_implementation = get_correct_attn_implementation
