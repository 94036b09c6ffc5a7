"""Block-sparse attention with a pooled tail, in plain PyTorch: each unlisted tile is one key of the softmax."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_hf.attention import sage_attention
from sage_hf.sparse.routers import block_means
from sage_kernels.spec.block_list import BlockList


def pooled_tail(query: Tensor, key: Tensor, value: Tensor, blocks: BlockList, scale: float | None = None) -> Tensor:
    """Return exact attention, computed in float32, over the listed tiles' keys and one key for each unlisted tile.

    An unlisted tile of n keys with the means k̄ and v̄ adds exp(q·k̄·scale + ln n) to the softmax's sum, and v̄ with
    this weight to the output: the tile's exact share if its keys were equal. Sol attention published this form.

    Args:
        query, key, value: (batch, heads, tokens, head_dim), with the same number of heads.
        blocks: a block list for these tensors.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    k_means, v_means = (block_means(x, blocks.block_n) for x in (key, value))
    first = torch.arange(k_means.shape[2], device=key.device) * blocks.block_n
    sizes = (kv_len - first).clamp(max=blocks.block_n)
    lists = blocks._replace(counts=blocks.counts.expand(len(query), -1, -1))
    lists = lists._replace(tiles=blocks.tiles.expand(len(query), -1, -1, -1))
    outputs = []
    for index in range(len(query)):  # the mask of one batch element is as large as its scores
        sample = slice(index, index + 1)
        kept = lists._replace(counts=lists.counts[sample], tiles=lists.tiles[sample]).kept_by_rows(kv_len, 0, q_len)
        of_keys = torch.zeros(kept.shape, device=key.device).masked_fill(~kept, -torch.inf)
        of_keys = of_keys.repeat_interleave(blocks.block_n, -1)[..., :kv_len]
        of_tiles = sizes.log().expand(kept.shape).masked_fill(kept, -torch.inf)
        outputs.append(
            F.scaled_dot_product_attention(
                query[sample].float(),
                torch.cat([key[sample].float(), k_means[sample]], 2),
                torch.cat([value[sample].float(), v_means[sample]], 2),
                torch.cat([of_keys, of_tiles], -1),
                scale=scale,
            )
        )
    return torch.cat(outputs).to(query.dtype)


@contextmanager
def with_pooled_tail() -> Iterator[None]:
    """Give sparse calls of diffusers' models a pooled tail, and exact scores."""

    def attend(*tensors: Tensor | None, blocks: BlockList | None = None, **options: Any) -> Tensor:
        if blocks is None:
            return sage_attention(*tensors, **options)
        query, key, value, _ = tensors
        return pooled_tail(query, key, value, blocks, options.get("scale"))

    with mock.patch("sage_hf.sparse.layer.sage_attention", attend):
        yield
