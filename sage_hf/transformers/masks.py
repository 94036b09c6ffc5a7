"""The mask function registered beside the attention function; without one transformers drops padding silently."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

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
    return sdpa_mask(**kwargs)
