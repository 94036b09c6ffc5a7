"""Replacement for SageAttention3's package: its documented function, computed by sage-hf.

`sage_hf.drop_in()` puts this module where `import sageattn3` finds it.
"""

from __future__ import annotations

import torch

from sage_hf.attention import attend_observed, chosen_fallback
from sage_kernels.spec.derivatives import wants_gradient
from sage_kernels.spec.options import Options


def sageattn3_blackwell(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    per_block_mean: bool = True,
    **kwargs: object,
) -> torch.Tensor:
    """Compute attention by the recipe `sage3`, or the best recipe that this device has; with gradients by `sage_bwd`.

    Args:
        q: (batch, q_heads, q_len, head_dim); dtypes as for `sage_hf.sage_attention`.
        k, v: (batch, kv_heads, kv_len, head_dim); q_heads is a multiple of kv_heads.
        attn_mask, is_causal: as in `sageattention.sageattn`.
        per_block_mean: has no effect; it chooses how the original package smooths Q.
        kwargs: none is known.

    Returns:
        (batch, q_heads, q_len, head_dim) in q's dtype, or under autocast in autocast's. No input is changed.

    Raises:
        TypeError: a keyword is given.
        ValueError: see `sage_hf.sage_attention`.
    """
    if kwargs:
        raise TypeError(f"sage-hf's replacement for sageattn3 does not know the keyword {next(iter(kwargs))!r}")
    recipe = "sage_bwd" if wants_gradient(q, k, v) else "sage3"
    options = Options(is_causal=is_causal, recipe=recipe, fallback=chosen_fallback(None))
    output, _ = attend_observed(q, k, v, attn_mask, None, options)
    return output
