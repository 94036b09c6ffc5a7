"""Support for diffusers' layer skip (skip-layer and perturbed-attention guidance) in modules with our processors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from .adapters import ServedAdapter
from .processor import SageAttnProcessor, layer_of, sage_of


def complete_processor_registry(helpers: ModuleType) -> None:
    """Make our processors known to diffusers' AttentionProcessorRegistry; `helpers` is diffusers.hooks._helpers."""
    registry = helpers.AttentionProcessorRegistry
    get = registry.get

    def skip_attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the output that diffusers defines for a skipped attention of the module's original processor."""
        original = module.processor if sage_of(module) is None else layer_of(module).original
        return get(type(original)).skip_processor_output_fn(module, *args, **kwargs)

    def get_metadata(cls: type, model_class: type) -> Any:
        if issubclass(model_class, SageAttnProcessor | ServedAdapter):
            return helpers.AttentionProcessorMetadata(skip_processor_output_fn=skip_attention)
        return get(model_class)

    registry.get = classmethod(get_metadata)
