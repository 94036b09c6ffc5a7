"""Arguments of the torch.library operators, which take plain values: block list, lengths and options as fields."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .block_list import BlockList
from .layout import Lengths
from .options import Fallback, Options

SCHEMA = (
    "Tensor? counts, Tensor? tiles, int block_m, int block_n, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? seqused_k, bool is_causal, SymInt causal_offset, float? scale, "
    "str recipe, str fallback"
)
"""Declaration of the fields of `OperatorArguments` except the last field."""


class OperatorArguments(NamedTuple):
    """Arguments after query, key, value and mask: the fields of `BlockList`, `Lengths` and `Options`.

    Without a block list, or without packed sequences, tensors are None and sizes 0.
    """

    counts: torch.Tensor | None
    tiles: torch.Tensor | None
    block_m: int
    block_n: int
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: torch.Tensor | None
    is_causal: bool
    causal_offset: int
    scale: float | None
    recipe: str
    fallback: Fallback
    return_lse: bool = False

    @classmethod
    def of(cls, blocks: BlockList | None, lengths: Lengths | None, options: Options) -> OperatorArguments:
        """Gather the arguments of a call; raise ValueError for lengths without starts of both queries and keys."""
        if lengths is not None and (lengths.cu_seqlens_q is None or lengths.cu_seqlens_k is None):
            raise ValueError("packed sequences need both cu_seqlens_q and cu_seqlens_k")
        listed = (None, None, 0, 0) if blocks is None else blocks
        packed = (None, None, 0, 0, None) if lengths is None else lengths
        causality = bool(options.is_causal), options.causal_offset
        others = options.scale, options.recipe, options.fallback, options.return_lse
        fields: tuple[Any, ...] = (*listed, *packed, *causality, *others)
        return cls(*fields)

    def for_training(self) -> tuple[Any, ...]:
        """Return the arguments of the operators with gradients: all except `return_lse`."""
        return tuple(self[index] for index in range(len(OperatorArguments._fields) - 1))  # Dynamo 2.8 takes no slice

    @property
    def blocks(self) -> BlockList | None:
        """Return the block list, if any."""
        if self.counts is None or self.tiles is None:
            return None
        return BlockList(self.counts, self.tiles, self.block_m, self.block_n)

    @property
    def lengths(self) -> Lengths | None:
        """Return the lengths of packed sequences, if any."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return None
        return Lengths(self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k, self.seqused_k)

    @property
    def options(self) -> Options:
        """Return the options."""
        return Options.of_operator(
            self.is_causal, self.causal_offset, self.scale, self.recipe, self.fallback, self.return_lse
        )

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return all tensors."""
        return self.counts, self.tiles, self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k

    def with_tensors(self, tensors: tuple[torch.Tensor | None, ...]) -> OperatorArguments:
        """Return the arguments with new tensors in place of the tensors that `tensors` returns."""
        counts, tiles, cu_seqlens_q, cu_seqlens_k, seqused_k = tensors
        lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
        return self._replace(counts=counts, tiles=tiles, **lengths)  # type: ignore[arg-type]
