"""The mask functions registered beside the attention function; without one transformers drops padding silently."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from transformers import masking_utils

from sage_kernels import tracing

_SLICE_QUERIES_AFTER_MASKING = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Models that drop query rows once the mask is made, which a mask left to `is_causal` would not survive. They see to
it themselves for "sdpa", and for no other name."""


def sage_mask(**kwargs: Any) -> torch.Tensor | None:
    """The mask `sage_attention_forward` expects: what transformers makes for `sdpa`, every argument handed on.

    Returns:
        bool, (batch, 1, q_len, kv_len), True where a query may attend; or None when the mask is plain causal (upper
        left) or attends everywhere, with no padding, window or packed sequence in it.
    """
    if getattr(kwargs.get("config"), "model_type", None) in _SLICE_QUERIES_AFTER_MASKING:
        kwargs["allow_is_causal_skip"] = False
    return masking_utils.sdpa_mask(**kwargs)


def sage_training_mask(**kwargs: Any) -> torch.Tensor | None:
    """`sage_mask` for recipes with gradients, which know padding and causality but no other mask.

    Returns:
        Where padding is all that `sage_mask` would add to causality, or to nothing, bool: (batch, kv_len), True where a
        key exists, of causal attention, as transformers' flash attention has it; (batch, 1, 1, kv_len) of attention in
        both directions. Otherwise `sage_mask`'s.
    """
    padding: torch.Tensor | None = kwargs.get("attention_mask")
    if padding is None or not _is_padding(padding, kwargs):
        return sage_mask(**kwargs)
    if kwargs["mask_function"] is masking_utils.causal_mask_function:
        q_len = kwargs["q_length"] if "q_length" in kwargs else kwargs["cache_position"].shape[0]
        # As many as all keys, the queries are all tokens, so that the first query is at the first key.
        plain = kwargs.get("allow_is_causal_skip", True) and q_len == kwargs["kv_length"]
        handed_on = _hands_padding_on(type(kwargs.get("config")).__module__)
        return padding if plain and handed_on else sage_mask(**kwargs)
    bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)  # since transformers 5
    if kwargs["mask_function"] is bidirectional and kwargs.get("allow_is_bidirectional_skip", False):
        return padding[:, None, None]
    return sage_mask(**kwargs)


@tracing.assume_constant_result
def _hands_padding_on(configuration: str) -> bool:
    """Whether models hand a mask (batch, kv_len) on to their attention as it is; told by the module of their config.

    Those do that transformers runs with flash attention. Others may combine it with masks of four dimensions, which
    would take its causality away.
    """
    return _runs_flash_attention(configuration)


@functools.cache
def _runs_flash_attention(configuration: str) -> bool:
    """Whether transformers runs all models of the config's modelling file with flash attention."""
    package, _, file = configuration.rpartition(".")
    modeling = f"{package}.{file.replace('configuration', 'modeling', 1)}"
    found = vars(sys.modules[modeling]).values() if modeling in sys.modules else ()
    models = [
        one for one in found if getattr(one, "__module__", "") == modeling and hasattr(one, "_supports_flash_attn")
    ]
    return bool(models) and all(model._supports_flash_attn for model in models)


def _is_padding(mask: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether the mask says of every key, and some of them not real, whether it exists; judged by its sizes alone
    where its values are not at hand."""
    if mask.dim() != 2 or mask.dtype != torch.bool or kwargs.get("local_size") is not None:
        return False
    if getattr(kwargs.get("config"), "model_type", None) in _SLICE_QUERIES_AFTER_MASKING:
        return False
    if mask.shape != (kwargs["batch_size"], kwargs["kv_length"]) or kwargs.get("kv_offset", 0) != 0:
        return False
    return torch.compiler.is_compiling() or not mask.all()
