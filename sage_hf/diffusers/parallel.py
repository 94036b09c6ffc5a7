"""Context parallelism: diffusers splits a model's tokens among processes, and attention brings them together.

Each process holds part of the keys and attends with part of the heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .bridge import Shards, parallel_config_of
from .errors import UnsupportedAttentionError
from .shards import split_of

NO_SHARDS = (
    "sparse attention chooses tiles among all tokens, and context parallelism gives a process a part of them: apply a "
    "configuration without `sparse`, or run this model without enable_parallelism()"
)


def check_parallelism(model: Any, layer: Any) -> None:
    """Raise UnsupportedAttentionError if `model` runs under context parallelism and its `layers.Layer` cannot.

    By a plan of ours (`plans`), every layer can.
    """
    if splits_tokens(parallel_config_of(model)) and split_of(model) is None:
        layer.check_parallel()


def check_whole(model: Any) -> None:
    """Raise UnsupportedAttentionError if `model` runs under context parallelism, which sparse attention cannot."""
    if splits_tokens(parallel_config_of(model)):
        raise UnsupportedAttentionError(NO_SHARDS)


def splits_tokens(config: Any) -> bool:
    """Check whether a ParallelConfig or ContextParallelConfig asks for context parallelism; False for None."""
    return hasattr(config, "ulysses_degree") or getattr(config, "context_parallel_config", None) is not None


def gather_mask(mask: torch.Tensor | None, kv_len: int, config: Any) -> torch.Tensor | None:
    """Return the mask for the keys of all processes, in the order in which diffusers gathers the keys.

    Args:
        mask: its last dimension is the keys of this process, or of all processes.
        kv_len: number of keys of this process.
        config: diffusers' ContextParallelConfig.

    Raises:
        ValueError: ring attention is configured, which would apply this process's mask to the keys of the others.
    """
    if mask is None:
        return None
    shards = Shards.of(config)
    if shards.ring > 1:
        raise ValueError(
            f"attn_mask is not supported by ring attention (ring_degree={shards.ring}): "
            "use ContextParallelConfig(ulysses_degree=...) for this model, or call it without a mask"
        )
    if mask.shape[-1] != kv_len:
        return mask
    group = shards.group
    lengths = [kv_len] * shards.ulysses
    if shards.uneven:
        shares = [torch.empty(1, dtype=torch.int64, device=mask.device) for _ in lengths]
        dist.all_gather(shares, torch.full_like(shares[0], kv_len), group=group)
        lengths = [int(share) for share in shares]
    padded = torch.nn.functional.pad(mask, (0, max(lengths) - kv_len)).contiguous()
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[..., :length] for part, length in zip(parts, lengths, strict=True)], dim=-1)


def mask_of_own_heads(mask: torch.Tensor | None, heads: int, config: Any) -> torch.Tensor | None:
    """Return the part of a mask (batch, all heads, 1 or q_len, kv_len) for the `heads` that this process attends with.

    Masks shared by all heads, (batch, 1, …) or without a dimension of heads, are returned unchanged.
    """
    if mask is None or mask.dim() < 4 or mask.shape[1] == 1:
        return mask
    shards = Shards.of(config)
    share = -(-mask.shape[1] // shards.ulysses)  # the last processes have fewer if it does not divide
    return mask.narrow(1, shards.rank * share, heads)
