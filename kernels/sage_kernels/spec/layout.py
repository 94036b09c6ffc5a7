"""Layout of tokens, channels and scales in the callers' tensors and in the padded operands that quantisers write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

BLOCK = 128
"""Tokens of a block; the rows of an operand are padded to a multiple of it."""
KEY_BLOCK = 64
"""Keys whose scales one quad of threads holds; each thread holds the scale of `THREAD_TOKENS` keys."""
THREAD_TOKENS = 16
MIN_CHANNELS = 32
"""Least number of channels of an INT8 operand: the depth of an INT8 MMA instruction."""
ALIGNMENT = 16
"""Bytes to which 128-bit loads and the tensor memory accelerator need addresses aligned."""
MAX_GRID = 65535
"""Largest number of programs along the second or third axis of a launch."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up. `triton.cdiv` would cost microseconds per call."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Return the least multiple that is not below n."""
    return ceil_div(n, multiple) * multiple


def power_of_two(n: int) -> int:
    """Return the least power of two that is not below n ≥ 1."""
    return 1 << (n - 1).bit_length()


def padded_rows(tokens: int, sequences: int | None = None) -> int:
    """Return an operand's rows for sequences of `tokens` tokens, or for packed sequences of `tokens` in total."""
    blocks = ceil_div(tokens, BLOCK) if sequences is None else tokens // BLOCK + sequences
    return blocks * BLOCK


def padded_channels(head_dim: int) -> int:
    """Return the channels of an INT8 operand: head_dim rounded up to a power of two, at least 32."""
    return max(MIN_CHANNELS, power_of_two(head_dim))


def is_aligned(x: torch.Tensor) -> bool:
    """Return whether 128-bit loads can read x (batch, heads, tokens, channels), whose channels must be contiguous."""
    elements = ALIGNMENT // x.element_size()
    batch, heads, tokens, channels = x.stride()
    return channels == 1 and (batch | heads | tokens | x.shape[3]) % elements == 0 and x.data_ptr() % ALIGNMENT == 0


def at_aligned_address(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if its address is no multiple of 16 bytes, because such an address makes all loads narrow."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def with_tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Return x (batch, heads, tokens, channels) laid out in memory as (batch, tokens, heads, channels), and contiguous.

    Then merging heads and channels needs no copy.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class Lengths(NamedTuple):
    """Lengths of sequences packed one after the other: (1, heads, total tokens, channels).

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,), the cumulative lengths, from 0 on.
        max_seqlen_q, max_seqlen_k: the longest sequence's length, or more.
        seqused_k: int32 (sequences,), how many keys of each sequence take part, from the first on; None: all.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: torch.Tensor | None = None

    @property
    def sequences(self) -> int:
        """Return the number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1


@dataclass(frozen=True)
class Sequences:
    """The token axis of Q, or of K and V.

    Attributes:
        tokens: the longest sequence's length.
        rows: rows of the padded operands for each (operand batch, head): a multiple of 128.
        packed: whether all sequences lie in one batch element, one after the other (`cu_seqlens`).
        ranges: int32 (batch, 3) of each sequence's start, length and start in the operands; None if every sequence has
            `tokens` tokens, from the first on.
    """

    tokens: int
    rows: int
    packed: bool = False
    ranges: torch.Tensor | None = None

    @classmethod
    def equal(cls, tokens: int) -> Sequences:
        """Describe one sequence of this length per batch element."""
        return cls(tokens, padded_rows(tokens))

    @classmethod
    def of_cu_seqlens(
        cls, cu_seqlens: torch.Tensor, max_tokens: int, total: int, lengths: torch.Tensor | None = None
    ) -> Sequences:
        """Describe sequences packed into one batch element of `total` tokens.

        Args:
            cu_seqlens: int32 (sequences + 1,): sequence i is tokens cu_seqlens[i]…cu_seqlens[i + 1] - 1.
            max_tokens: the longest sequence's length, or more; further tokens of a longer sequence are ignored.
            lengths: int32 (sequences,): how many tokens of each sequence take part; default all.
        """
        start, sequences = cu_seqlens[:-1], cu_seqlens.shape[0] - 1
        stored = (cu_seqlens[1:] - start).clamp(max=max_tokens)
        lengths = stored if lengths is None else torch.minimum(lengths, stored)
        # Each sequence begins a new block, and no other sequence uses the block in which it ends.
        operand_start = (start // BLOCK + torch.arange(sequences, dtype=torch.int32, device=start.device)) * BLOCK
        ranges = torch.stack((start, lengths, operand_start), 1).int()
        return cls(max_tokens, padded_rows(total, sequences), True, ranges)

    @property
    def blocks(self) -> int:
        """Return the blocks of 128 tokens of the longest sequence."""
        return ceil_div(self.tokens, BLOCK)

    @property
    def rows_of_longest(self) -> int:
        """Return the rows of the longest sequence in the operands."""
        return self.blocks * BLOCK


def token_axes(q_tokens: int, kv_tokens: int, lengths: Lengths | None) -> tuple[Sequences, Sequences]:
    """Return the token axes of Q, and of K and V; packed sequences have q_tokens and kv_tokens in total."""
    if lengths is None:
        return Sequences.equal(q_tokens), Sequences.equal(kv_tokens)
    return (
        Sequences.of_cu_seqlens(lengths.cu_seqlens_q, lengths.max_seqlen_q, q_tokens),
        Sequences.of_cu_seqlens(lengths.cu_seqlens_k, lengths.max_seqlen_k, kv_tokens, lengths.seqused_k),
    )


def sequence_slices(lengths: Lengths) -> Iterator[tuple[slice, slice]]:
    """Yield the queries, and the keys that take part, of each packed sequence; copy the lengths to the host."""
    q_starts, k_starts = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
    stored = lengths.cu_seqlens_k.diff()
    k_lengths = (stored if lengths.seqused_k is None else torch.minimum(stored, lengths.seqused_k)).tolist()
    for start, stop, k_start, k_length in zip(q_starts, q_starts[1:], k_starts, k_lengths, strict=False):
        yield slice(start, stop), slice(k_start, k_start + k_length)


def broadcast_strides(x: torch.Tensor, dims: int = 3) -> tuple[int, ...]:
    """Return the strides of the first `dims` dimensions, 0 where the size is 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:dims], x.stride(), strict=False))


def stride_of(x: torch.Tensor | None) -> int:
    """Return the batch stride of a tensor of (batch or 1, …) or None: 0 where all batch elements share it."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def batch_strides(x: torch.Tensor, sequences: Sequences) -> tuple[int, ...]:
    """Return the strides of x, (batch, heads, tokens, ...); the batch stride is 0 for packed sequences."""
    return 0 if sequences.packed else x.stride(0), *x.stride()[1:]


def thread_order(key: torch.Tensor) -> torch.Tensor:
    """Reorder the tokens of each block of 64 as the four threads of a quad hold their scores.

    Thread t of an 8-bit or 16-bit MMA instruction holds columns 8j + 2t and 8j + 2t + 1. These 16 tokens (j = 0…7)
    share a scale, so a thread needs one scale per block.

    Args:
        key: (..., tokens, channels), tokens a multiple of 64.
    """
    return key.unflatten(-2, (-1, 8, 4, 2)).transpose(-4, -3).flatten(-5, -2)


def heavy_order(channels: int) -> torch.Tensor:
    """Return the channel of K that lies at each place of `operands.HeavyKeys.key`: int64 (channels,).

    In each 32 places, places 2t, 2t + 1, 8 + 2t and 9 + 2t of the first 16, and of the second 16, hold channels 8t to
    8t + 7. Thread t of a quad multiplies these in two 16-bit MMA instructions, so it can read its part of Q at once.

    Args:
        channels: a multiple of 32.
    """
    return torch.arange(channels, device="cpu").view(-1, 4, 2, 2, 2).permute(0, 2, 3, 1, 4).flatten()


def natural_order(key: torch.Tensor) -> torch.Tensor:
    """Undo `thread_order`."""
    return key.unflatten(-2, (-1, 4, 8, 2)).transpose(-4, -3).flatten(-5, -2)
