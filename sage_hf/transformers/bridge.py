"""All uses of names of transformers that are private or depend on its version.

If a version lacks a name, speed is lost, or a model keeps its own attention, but results never change. Importing this
file imports neither transformers nor torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""Name of the global through which every modelling file looks up the attention function."""
EAGER = "eager_attention_forward"
"""Name of a modelling file's own eager attention."""
ROPE_FUNCTION = "apply_rotary_pos_emb"
"""Name of a modelling file's own RoPE: (query, key, cosine, sine) -> both with RoPE.

Query and key are (batch, heads, tokens, head_dim), cosine and sine (batch, tokens, head_dim)."""
CONTINUOUS_BATCHING = "transformers.generation.continuous_batching"
EVERY_MODEL = frozenset({"torch.nn.modules.module", "transformers.modeling_utils", "transformers.generation.utils"})
"""Modules of the methods that every model has."""


# Models and their configs


def is_pretrained_model(module: object) -> bool:
    """Check whether a module is a model of transformers, or of a class that derives from one."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def is_paged_cache(value: object) -> bool:
    """Check whether a value is the cache of continuous batching."""
    modules = [module for name, module in sys.modules.items() if name.startswith(CONTINUOUS_BATCHING)]
    classes = (getattr(module, "PagedAttentionCache", None) for module in modules)
    return any(isinstance(value, cls) for cls in classes if cls is not None)


def implementation_of(layer_or_config: Any) -> str | None:
    """Return the `attn_implementation` of a config, or of a layer's config; None if there is none."""
    return implementation_of_config(getattr(layer_or_config, "config", layer_or_config))


def implementation_of_config(config: Any) -> str | None:
    """Return the `attn_implementation` of a config; None if there is none."""
    implementation: str | None = getattr(config, "_attn_implementation", None)
    return implementation


def keep_implementation(config: Any) -> Callable[[], None]:
    """Return a function that resets a config's `attn_implementation` to its present value, without checking the
    name."""
    return partial(set_implementation, config, implementation_of_config(config))


def set_implementation(config: Any, implementation: str | None) -> None:
    """Set the `attn_implementation` of a config, but not of nested configs, without checking the name."""
    names = "_attn_implementation_internal", "_attn_implementation"
    setattr(config, next(name for name in names if hasattr(config, name)), implementation)


def configs_of(model: torch.nn.Module) -> list[Any]:
    """Return the configs of a model and of the models inside it, including nested configs.

    Layers may read another config: an EncoderDecoderModel gives its encoder a new config, but the layers keep theirs.
    """
    configs: dict[int, Any] = {}
    pending: list[Any] = [module.config for module in model.modules() if hasattr(module, "set_attn_implementation")]
    while pending:
        config = pending.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            pending += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    return list(configs.values())


def asks_for_implementation(names: tuple[str, ...]) -> bool:
    """Check whether the names that a function's code reads include a config's implementation."""
    return "_attn_implementation" in names


def runs_sdpa(model_class: Any) -> bool:
    """Check whether a class of models runs PyTorch's attention, so that its code knows boolean masks."""
    return bool(getattr(model_class, "_supports_sdpa", False))


def runs_flash_attention(model_class: Any) -> bool:
    """Check whether a class of models runs flash attention, so that its code passes a padding mask on."""
    return bool(getattr(model_class, "_supports_flash_attn", False))


def runs_other_attention(model_class: Any) -> bool:
    """Check whether a class of models runs any attention other than its own."""
    return runs_sdpa(model_class) or bool(getattr(model_class, "_supports_attention_backend", False))


# Attention weights


def keeps_weights() -> bool:
    """Check whether the model that runs keeps its layers' attention weights; False where it does not say so.

    A keyword or the config asks for the weights. Hooks of transformers collect them, so the layers are not told.
    """
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    collected = None if collector is None else collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)


# Masks

MASKING_UTILS = "transformers.masking_utils"
"""The file that asks for masks; PyTorch 2.8 compiles no function that imports it from the package."""


def cuts_masks() -> bool:
    """Check whether masks may be longer than the keys, so that attention cuts them: before transformers 5."""
    return metadata.version("transformers").startswith("4.")


def is_causal_mask(mask_function: object) -> bool:
    """Check whether a mask function means causality and nothing else; False if this version's function is unknown."""
    masking_utils = sys.modules[MASKING_UTILS]
    return mask_function is not None and mask_function is getattr(masking_utils, "causal_mask_function", None)


def implies_causality(mask_function: Any) -> bool:
    """Check whether a mask function includes causality; False if unknown.

    transformers makes masks of windows, chunks and packed sequences by `and_masks`, whose functions are in its closure.
    Causality of packed sequences may compare positions: in one sequence, they rise by 1 from token to token.
    """
    if is_causal_mask(mask_function):
        return True
    parts = _closure_of(mask_function, "and_masks").get("mask_functions", ())
    if any(_closure_of(part, "packed_sequence_mask_function") for part in parts):
        by_position = [_closure_of(part, "remap_positions_for_packed_sequence").get("mask_function") for part in parts]
        parts = (*parts, *by_position)
    return any(map(implies_causality, parts))


def _closure_of(mask_function: Any, maker: str) -> Mapping[str, Any]:
    """Return the variables that a mask function has from the function that made it; empty if `maker` did not make
    it."""
    code = getattr(mask_function, "__code__", None)
    made_by = getattr(sys.modules[MASKING_UTILS], maker, None)
    if code is None or made_by is None or code not in made_by.__code__.co_consts:
        return {}
    return inspect.getclosurevars(mask_function).nonlocals


def is_full_mask(mask_function: object) -> bool:
    """Check whether a mask function lets every query attend to every key; False if it is unknown in this version."""
    masking_utils = sys.modules[MASKING_UTILS]
    return mask_function is not None and mask_function is getattr(masking_utils, "bidirectional_mask_function", None)


def queries_of(arguments: dict[str, Any]) -> int | None:
    """Return the number of queries from a mask function's arguments; None if the arguments are of an unknown form.

    Before transformers 5, a tensor on the device holds the queries' positions.
    """
    if "q_length" in arguments:
        q_length: int = arguments["q_length"]
        return q_length
    positions = arguments.get("cache_position")
    return None if positions is None else positions.shape[0]


def first_query_of(arguments: dict[str, Any]) -> int | None:
    """Return the first query's position from a mask function's arguments; None if they are of an unknown form."""
    if "q_offset" in arguments:
        return int(arguments["q_offset"])
    positions = arguments.get("cache_position")
    return None if positions is None else int(positions[0])
