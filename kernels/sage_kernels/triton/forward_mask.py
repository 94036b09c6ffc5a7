"""A call's mask as the INT8 and NVFP4 forward kernels read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..spec.call import Call, MaskKind
from ..spec.layout import broadcast_strides, stride_of
from ..spec.operands import KeyPadding
from .block_entries import block_entries
from .common.launch import MASK_AXES, strides
from .configs import TileConfig
from .mask_entries import mask_entries


@dataclass(frozen=True)
class ForwardMask:
    """A call's mask for the tiles of a forward kernel.

    Attributes:
        kind: the kernels' MASK.
        mask: elements that masked tiles read: for kinds "bool" and "additive" the mask of `mask_entries`, for "keys"
            and "block_keys" the padding's `key_mask_u8`; else None.
        mask_strides: strides of `mask` along batch, head, row and column, 0 where it is broadcast.
        entries: int32, which tiles each block of rows computes: for kind "keys" the padding's spans, for "bool" and
            "additive" the result of `mask_entries`, for "blocks" and "block_keys" of `block_entries`; else None.
        entry_strides: strides of `entries` along batch, head and block of rows, 0 where they are broadcast.
        padding: the keys that count in means and scales; None: all.
        list_m: rows that share the entries of a block list; 0 without a list.
    """

    kind: MaskKind = "none"
    mask: torch.Tensor | None = None
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    entries: torch.Tensor | None = None
    entry_strides: tuple[int, ...] = (0, 0, 0)
    padding: KeyPadding | None = None
    list_m: int = 0

    @classmethod
    def of_padding(cls, padding: KeyPadding) -> ForwardMask:
        """Return a key-padding mask, for a kernel that finds its tiles by the spans of existing keys."""
        key_mask_stride, spans_stride = padding.strides
        mask_strides, entry_strides = (key_mask_stride, 0, 0, 1), (spans_stride, 0, 0)
        return cls("keys", padding.key_mask_u8, mask_strides, padding.spans, entry_strides, padding)

    @classmethod
    def of_blocks(cls, call: Call, block_n: int, padding: KeyPadding | None) -> ForwardMask:
        """Return the mask of a call with a block list, and of the keys that exist, for tiles of block_n keys."""
        entries = block_entries(call, block_n)
        key_mask_u8 = None if padding is None else padding.key_mask_u8
        mask_strides, entry_strides = (stride_of(key_mask_u8), 0, 0, 1), broadcast_strides(entries)
        return cls(call.mask.kind, key_mask_u8, mask_strides, entries, entry_strides, padding, call.mask.list_sizes[0])

    @classmethod
    def of_tensor(cls, call: Call, block_m: int, block_n: int) -> ForwardMask:
        """Return the mask of a call with a mask tensor, for tiles of (block_m, block_n) scores."""
        mask, entries, key_mask_u8 = mask_entries(call, block_m, block_n)
        kind: MaskKind = "bool" if mask.dtype == torch.uint8 else "additive"
        return cls(kind, mask, mask.stride(), entries, broadcast_strides(entries), KeyPadding(key_mask_u8))

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a launch that describe the mask, compile-time constants included."""
        return {
            "mask": self.mask,
            "entries": self.entries,
            **strides("mask", self.mask_strides, MASK_AXES),
            **strides("entries", self.entry_strides, MASK_AXES),
            "MASK": self.kind,
            "LIST_M": self.list_m,
        }


def forward_mask(call: Call, config: TileConfig, reads_spans: bool) -> ForwardMask:
    """Read the mask of a call, for a kernel with these tiles; the spans of a padding are still to be written.

    Args:
        call: a result of `Call.for_kernel`.
        config: the kernel's.
        reads_spans: whether the kernel finds its tiles by the spans of a key-padding mask; otherwise such a mask is
            read like any boolean mask.
    """
    mask = call.mask
    padding = None
    if mask.key_mask is not None and (reads_spans or mask.blocks is not None):
        padding = KeyPadding.of(mask.key_mask, has_spans=reads_spans)
    if mask.blocks is not None:
        return ForwardMask.of_blocks(call, config.block_n, padding)
    if padding is not None:
        return ForwardMask.of_padding(padding)
    return ForwardMask() if mask.tensor is None else ForwardMask.of_tensor(call, config.block_m, config.block_n)
