"""Context parallelism: diffusers splits a model's tokens among processes, and attention brings them together."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .backends import NO_SHARDS
from .bridge import has_parallel_plan, parallel_config_of
from .errors import UnsupportedAttentionError
from .layers import Layer
from .processor import attention_layers, layer_of, sage_of


def check_parallelism(model: Any, layer: Layer) -> None:
    """Raise UnsupportedAttentionError if `model` runs under context parallelism and its `layer` cannot."""
    if splits_tokens(parallel_config_of(model)):
        layer.check_parallel()


def check_whole(model: Any) -> None:
    """Raise UnsupportedAttentionError if `model` runs under context parallelism, which sparse attention cannot."""
    if splits_tokens(parallel_config_of(model)):
        raise UnsupportedAttentionError(NO_SHARDS)


def complete_parallelism(model_class: Any) -> None:
    """Make `enable_parallelism` configure the layers with a SageAttnProcessor, or raise before anything is changed."""
    if not hasattr(model_class, "enable_parallelism"):
        return
    enable = model_class.enable_parallelism

    @functools.wraps(enable)
    def enable_parallelism(self: Any, *, config: Any, cp_plan: Any = None, **kwargs: Any) -> None:
        layers = _sage_layers(self) if splits_tokens(config) else {}
        if layers and cp_plan is None and not has_parallel_plan(self):
            raise UnsupportedAttentionError(
                f"diffusers has no plan for context parallelism of {type(self).__name__}: pass cp_plan=..., or run "
                "this model without enable_parallelism()"
            )
        for name, layer in layers.items():
            try:
                layer.check_parallel()
            except UnsupportedAttentionError as error:
                raise UnsupportedAttentionError(f"{name}: {error}") from None
        enable(self, config=config, cp_plan=cp_plan, **kwargs)
        for layer in layers.values():
            layer.parallelize(parallel_config_of(self))

    model_class.enable_parallelism = enable_parallelism


def splits_tokens(config: Any) -> bool:
    """Check whether a ParallelConfig or ContextParallelConfig asks for context parallelism; False for None."""
    return hasattr(config, "ulysses_degree") or getattr(config, "context_parallel_config", None) is not None


def _sage_layers(model: torch.nn.Module) -> dict[str, Layer]:
    """Return the computations of the layers with a SageAttnProcessor, by dotted name."""
    modules = attention_layers(model).items()
    return {name: layer_of(module) for name, module in modules if sage_of(module) is not None}
