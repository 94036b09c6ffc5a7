"""Exact attention of any call: the one way from a mask, causality or a block list to PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..spec.block_list import BlockList
from ..spec.call import AttentionOutput
from ..spec.masks import with_causality
from ..spec.options import Options
from . import block_lists, masked_rows, sdpa


def attend_exactly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    blocks: BlockList | None,
    options: Options,
    zero_rows: bool = True,
    backend: Callable[..., torch.Tensor] | None = None,
) -> AttentionOutput:
    """Run PyTorch's attention with its gradients.

    Args:
        query, key, value, mask: as in `exact.sdpa`; with a block list, the mask may only say which keys exist.
        blocks: the tiles of keys that each block of rows attends to; None: all tiles.
        options: all other arguments; recipe, fallback and layout are ignored.
        zero_rows: rows that may attend to no key are 0; with a block list they always are. Otherwise PyTorch decides
            their values.
        backend: as in `exact.sdpa`; not with a block list.

    Returns:
        (output, lse): output (batch, q_heads, q_len, v_head_dim) in query's dtype; lse (batch, q_heads, q_len) float32
        of all weights, before dropout, without a gradient; None if it is not wanted.
    """
    is_causal, offset, scale = bool(options.is_causal), options.causal_offset, options.scale
    if blocks is not None:
        return block_lists.attend_to_list(query, key, value, blocks, mask=mask, options=options)
    if is_causal and (mask is not None or offset):  # PyTorch supports one causal alignment, without a mask
        mask, is_causal = with_causality(mask, query, key, offset), False
    attend_to = masked_rows.attend_with_zero_rows if zero_rows else sdpa.sdpa
    gqa, dropout_p = options.enable_gqa, options.dropout_p
    causality: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "scale": scale}
    output = attend_to(query, key, value, **causality, enable_gqa=gqa, dropout_p=dropout_p, backend=backend)
    if not options.return_lse:
        return output, None
    with torch.no_grad():
        lse: torch.Tensor = torch.ops.sage_kernels.log_sum_exp(query, key, mask, is_causal, 0, scale)
    return output, lse
