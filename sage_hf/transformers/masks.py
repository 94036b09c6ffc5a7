"""The mask functions registered with the attention function; without one, transformers silently drops padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sage_hf.attributes import CAUSALITY
from sage_hf.transformers.bridge import (
    first_query_of,
    implies_causality,
    is_causal_mask,
    is_full_mask,
    queries_of,
    runs_flash_attention,
    runs_sdpa,
)
from sage_hf.transformers.inspection import asks_for_sdpa, computes_with_masks, models_of
from sage_kernels.runtime import dynamo
from sage_kernels.runtime.hardware import is_capturing
from sage_kernels.runtime.torch_private import is_fake


def sage_mask(**kwargs: Any) -> torch.Tensor | None:
    """Return the mask for `sage_attention_forward`: transformers' `sdpa` mask for these arguments.

    Returns:
        bool, (batch, 1, q_len, kv_len), True where a query may attend; or None for plain causal (upper left) or full
        attention, without padding, window or packed sequences. A causal mask, also for queries behind a cache, has an
        attribute that says so, see `causality_of`. Attributes do not survive tracing: if traced, with as many queries
        as keys, only the padding is returned, as in `sage_training_mask`. Models whose attention layers compute with
        their masks, or that ask whether the implementation is `sdpa`, never get None for causal attention. Models of
        the first kind that refuse `sdpa` get transformers' mask for `eager`, which is additive.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask  # imported here: that file registers this function

    reading = _reading_of(type(kwargs.get("config")))
    if reading == "additive":
        return eager_mask(**kwargs)
    mask: torch.Tensor | None
    never_skipped = {"allow_is_causal_skip": False} if reading == "boolean" else {}
    if _is_traced(kwargs.get("attention_mask")):
        mask = _padding_of_causality(kwargs)
        return sdpa_mask(**kwargs | never_skipped) if mask is None else mask
    with torch.inference_mode(False), torch.no_grad():  # otherwise there is no version counter that shows changes
        mask = sdpa_mask(**kwargs | never_skipped)
    if mask is not None and not mask.is_inference():
        causality = _causality(kwargs)
        if causality is not None:
            setattr(mask, CAUSALITY, (causality, mask._version))
    return mask


@dataclass(frozen=True)
class Causality:
    """Causality that a mask states: query q attends to no key after q + offset.

    Attributes:
        offset: see above.
        hides_more: it also hides keys that differ from query to query (a window, other sequences).
        keys: otherwise, the keys that exist, bool (batch, q_len + offset); None: all.
    """

    offset: int
    hides_more: bool = False
    keys: torch.Tensor | None = None


def causality_of(mask: torch.Tensor | None, q_len: int, kv_len: int) -> Causality | None:
    """Return the causality of a mask that `sage_mask` made for these numbers of queries and keys; None if unknown.

    It is unknown for masks that the model changed or cut, for copies that `copy_causality` did not make, and for masks
    of other lengths.
    """
    if mask is None or _is_traced(mask) or mask.shape[2:] != (q_len, kv_len):
        return None
    causality, version = getattr(mask, CAUSALITY, (None, None))
    return causality if causality is not None and version == mask._version else None


def copy_causality(mask: object, copy: object) -> None:
    """Copy a mask's statement of causality, if it has any, to a copy of the mask on another device."""
    if not isinstance(mask, torch.Tensor) or not isinstance(copy, torch.Tensor) or copy is mask:
        return
    causality, version = getattr(mask, CAUSALITY, (None, None))
    if causality is not None and version == mask._version and not copy.is_inference():
        keys = None if causality.keys is None else causality.keys.to(copy.device)
        setattr(copy, CAUSALITY, (replace(causality, keys=keys), copy._version))


def _is_traced(mask: torch.Tensor | None) -> bool:
    """Check whether code is traced or captured, to run again with other masks, whose values must not decide now.

    A mask of FakeTensorMode has no values.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_capturing():
        return True
    return mask is not None and is_fake(mask)


@dynamo.assume_constant_result
def _reading_of(config_class: type) -> str:
    """Name the kind of masks that models with a config of the class can read.

    Returns:
        "additive": an attention layer computes with its mask, and may not support boolean masks, because the model
        refuses `sdpa`. "boolean": such a layer supports both, but None does not mean causality to it; or the model asks
        whether the implementation is `sdpa`, and otherwise drops queries if the mask is missing. Otherwise "".
    """
    models = models_of(config_class)
    computing = list(filter(computes_with_masks, models))
    if not all(map(runs_sdpa, computing)):
        return "additive"
    return "boolean" if computing or any(map(asks_for_sdpa, models)) else ""


def _causality(kwargs: dict[str, Any]) -> Causality | None:
    """Return the causality of the mask for these arguments; None if it is not known to be causal."""
    if not implies_causality(kwargs["mask_function"]):
        return None
    first, q_len = first_query_of(kwargs), queries_of(kwargs)
    if first is None or q_len is None:
        return None
    start = kwargs.get("kv_offset", 0)
    offset = first - start
    if not is_causal_mask(kwargs["mask_function"]) or kwargs.get("local_size") is not None:
        return Causality(offset, hides_more=True) if q_len > 1 else None  # a single query's mask is complete
    if not kwargs.get("allow_is_causal_skip", True):
        return None
    padding: torch.Tensor | None = kwargs.get("attention_mask")
    if padding is None:
        return Causality(offset)
    # Causality hides the keys after the last query, such as unwritten places of a static cache, so padding need not
    # hide them. A step of one query keeps the cache's length, so that all steps have the same shapes.
    needed = first + q_len if q_len > 1 else start + kwargs["kv_length"]
    if padding.dim() != 2 or padding.shape[1] < needed:
        return None
    seen = padding[:, start : first + q_len]
    if bool(seen.all()):
        return Causality(offset)
    return Causality(offset, keys=seen) if seen.dtype == torch.bool else None


def sage_training_mask(**kwargs: Any) -> torch.Tensor | None:
    """Return the mask for recipes with gradients, which support padding and causality but no other mask.

    Returns:
        If `sage_mask` would add only padding to causal or full attention: bool, True where a key exists, (batch,
        kv_len) for causal attention, as in transformers' flash attention, and (batch, 1, 1, kv_len) for attention in
        both directions. Otherwise the mask that `sage_mask` returns.
    """
    padding: torch.Tensor | None = kwargs.get("attention_mask")
    if padding is None or not _is_padding(padding, kwargs):
        return sage_mask(**kwargs)
    if is_causal_mask(kwargs["mask_function"]):
        alone = _padding_of_causality(kwargs)
        return sage_mask(**kwargs) if alone is None else alone
    if is_full_mask(kwargs["mask_function"]) and kwargs.get("allow_is_bidirectional_skip", False):
        return padding[:, None, None]
    return sage_mask(**kwargs)


def _padding_of_causality(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the padding (batch, kv_len) of a mask that padding and `is_causal` can replace; None for other masks."""
    padding: torch.Tensor | None = kwargs.get("attention_mask")
    if padding is None or not _is_padding(padding, kwargs):
        return None
    # With as many queries as keys, the first query is at the first key.
    plain = kwargs.get("allow_is_causal_skip", True) and queries_of(kwargs) == kwargs["kv_length"]
    plain = plain and is_causal_mask(kwargs["mask_function"])
    return padding if plain and _hands_padding_on(type(kwargs.get("config"))) else None


@dynamo.assume_constant_result
def _hands_padding_on(config_class: type) -> bool:
    """Check whether models with a config of the class pass a mask (batch, kv_len) to their attention unchanged.

    Models that transformers runs with flash attention do, unless they ask for its name or compute with masks. Other
    models may combine it with masks of four dimensions, which would lose causality.
    """
    models = models_of(config_class)
    return bool(models) and all(map(runs_flash_attention, models)) and not _reading_of(config_class)


def _is_padding(mask: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Check whether the mask marks padding, and nothing else; if it is traced, its shape and dtype decide."""
    if mask.dim() != 2 or mask.dtype != torch.bool or kwargs.get("local_size") is not None:
        return False
    if _reading_of(type(kwargs.get("config"))) == "additive":
        return False
    if mask.shape != (kwargs["batch_size"], kwargs["kv_length"]) or kwargs.get("kv_offset", 0) != 0:
        return False
    return _is_traced(mask) or not mask.all()
