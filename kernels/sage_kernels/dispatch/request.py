"""Request: the facts of a call by which kernels are chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..runtime.hardware import capability_of
from ..spec.call import Mask, MaskKind


@dataclass(frozen=True)
class Request:
    """Facts of a call by which kernels are chosen.

    Attributes:
        grad: whether gradients are wanted.
        packed: whether sequences are packed one after another; then batch is their number, and q_len and kv_len are
            the largest lengths.
        aligned: whether 128-bit loads can read Q, K and V in place (`layout.is_aligned`).
        lower_right: whether causality is aligned lower right, as for queries behind a cache, and not also upper left.
        shifted: whether causality is aligned neither lower right nor upper left.
        list_sizes: rows of a block and keys of a tile of the block list; (0, 0) without a list.
    """

    recipe: str
    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    mask: MaskKind
    is_causal: bool
    return_lse: bool
    grad: bool = False
    packed: bool = False
    aligned: bool = False
    lower_right: bool = False
    shifted: bool = False
    list_sizes: tuple[int, int] = (0, 0)

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        is_causal: bool = False,
        recipe: str = "sage3",
        return_lse: bool = False,
        grad: bool = False,
    ) -> Request:
        """Gather the facts of a call with these tensors; shapes as in `ops.attention`."""
        batch, q_heads, q_len, head_dim = query.shape
        device = query.device
        return cls(
            recipe=recipe,
            device_type=device.type,
            capability=capability_of(device),
            dtype=query.dtype,
            batch=batch,
            q_heads=q_heads,
            kv_heads=key.shape[1],
            q_len=q_len,
            kv_len=key.shape[2],
            head_dim=head_dim,
            v_head_dim=value.shape[3],
            mask=Mask.of(mask, key.shape[2]).kind,
            is_causal=is_causal,
            return_lse=return_lse,
            grad=grad,
        )
