"""The mask functions registered beside the attention function; without one, transformers silently drops padding."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from transformers import masking_utils

from sage_hf.attributes import CAUSALITY
from sage_kernels import tracing

_SLICE_QUERIES_AFTER_MASKING = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Models that drop query rows after the mask is made, so a causal mask must not be replaced by `is_causal`. They ensure
that themselves for "sdpa" only."""


def sage_mask(**kwargs: Any) -> torch.Tensor | None:
    """Return the mask for `sage_attention_forward`: the one that transformers makes for `sdpa` from these arguments.

    Returns:
        bool, (batch, 1, q_len, kv_len), True where a query may attend; or None for plain causal (upper left) or full
        attention, without padding, window or packed sequences. A mask that is nothing but causality, also for queries
        behind a cache, and padding says so by an attribute, see `attributes.CAUSALITY`; if it is being compiled, which
        attributes do not survive, padding of as many queries as keys comes alone, as in `sage_training_mask`.
    """
    if getattr(kwargs.get("config"), "model_type", None) in _SLICE_QUERIES_AFTER_MASKING:
        kwargs["allow_is_causal_skip"] = False
    if torch.compiler.is_compiling() and (padding := _padding_of_causality(kwargs)) is not None:
        return padding
    mask: torch.Tensor | None = masking_utils.sdpa_mask(**kwargs)
    if mask is not None and not torch.compiler.is_compiling() and not mask.is_inference():
        causality = _causality(kwargs)
        if causality is not None:
            setattr(mask, CAUSALITY, (*causality, mask._version))
    return mask


def _causality(kwargs: dict[str, Any]) -> tuple[int, torch.Tensor | None] | None:
    """Return (i, keys) if the mask of these arguments lets query q attend to exactly those keys up to q + i, else None.

    `keys` is bool (batch, q_len + i), or None for all keys.
    """
    if kwargs["mask_function"] is not masking_utils.causal_mask_function or kwargs.get("local_size") is not None:
        return None
    if not kwargs.get("allow_is_causal_skip", True) or not {"q_offset", "cache_position"} & kwargs.keys():
        return None
    start = kwargs.get("kv_offset", 0)
    first, q_len = _queries_of(kwargs)
    offset = first - start
    padding: torch.Tensor | None = kwargs.get("attention_mask")
    if padding is None:
        return offset, None
    if padding.dim() != 2 or padding.shape[1] < kwargs["kv_length"] + start:
        return None
    # Causality hides the keys behind the last query, such as those of a static cache that are not written yet.
    seen = padding[:, start : first + q_len]
    if bool(seen.all()):
        return offset, None
    return (offset, seen) if seen.dtype == torch.bool else None


def _queries_of(kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the position of the first query, and the number of queries, which older versions say by a tensor."""
    if "q_offset" in kwargs:
        return int(kwargs["q_offset"]), kwargs["q_length"]
    return int(kwargs["cache_position"][0]), kwargs["cache_position"].shape[0]


def sage_training_mask(**kwargs: Any) -> torch.Tensor | None:
    """Return the mask for recipes with gradients, which support padding and causality but no other mask.

    Returns:
        If `sage_mask` would add nothing but padding to causal or full attention, bool, True where a key exists:
        (batch, kv_len) for causal attention, as for transformers' flash attention, and (batch, 1, 1, kv_len) for
        attention in both directions. Otherwise what `sage_mask` returns.
    """
    padding: torch.Tensor | None = kwargs.get("attention_mask")
    if padding is None or not _is_padding(padding, kwargs):
        return sage_mask(**kwargs)
    if kwargs["mask_function"] is masking_utils.causal_mask_function:
        alone = _padding_of_causality(kwargs)
        return sage_mask(**kwargs) if alone is None else alone
    bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)  # since transformers 5
    if kwargs["mask_function"] is bidirectional and kwargs.get("allow_is_bidirectional_skip", False):
        return padding[:, None, None]
    return sage_mask(**kwargs)


def _padding_of_causality(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the padding (batch, kv_len) of a causal mask that can be left to `is_causal` beside it, or None."""
    padding: torch.Tensor | None = kwargs.get("attention_mask")
    if padding is None or not _is_padding(padding, kwargs):
        return None
    q_len = kwargs["q_length"] if "q_length" in kwargs else kwargs["cache_position"].shape[0]
    # With as many queries as keys, the first query is at the first key.
    plain = kwargs.get("allow_is_causal_skip", True) and q_len == kwargs["kv_length"]
    is_causal = kwargs["mask_function"] is masking_utils.causal_mask_function
    handed_on = plain and is_causal and _hands_padding_on(type(kwargs.get("config")).__module__)
    return padding if handed_on else None


@tracing.assume_constant_result
def _hands_padding_on(configuration: str) -> bool:
    """Return whether the models of a config's module pass a mask (batch, kv_len) to their attention unchanged.

    Models that transformers runs with flash attention do. Others may combine it with masks of four dimensions, and
    causality would be lost.
    """
    return _runs_flash_attention(configuration)


@functools.cache
def _runs_flash_attention(configuration: str) -> bool:
    """Return whether transformers can run all models of the config's modelling file with flash attention."""
    package, _, file = configuration.rpartition(".")
    modeling = f"{package}.{file.replace('configuration', 'modeling', 1)}"
    found = vars(sys.modules[modeling]).values() if modeling in sys.modules else ()
    models = [
        one for one in found if getattr(one, "__module__", "") == modeling and hasattr(one, "_supports_flash_attn")
    ]
    return bool(models) and all(model._supports_flash_attn for model in models)


def _is_padding(mask: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Return whether the mask only marks padding, and there is some; under compilation, its shape and dtype decide."""
    if mask.dim() != 2 or mask.dtype != torch.bool or kwargs.get("local_size") is not None:
        return False
    if getattr(kwargs.get("config"), "model_type", None) in _SLICE_QUERIES_AFTER_MASKING:
        return False
    if mask.shape != (kwargs["batch_size"], kwargs["kv_length"]) or kwargs.get("kv_offset", 0) != 0:
        return False
    return torch.compiler.is_compiling() or not mask.all()
