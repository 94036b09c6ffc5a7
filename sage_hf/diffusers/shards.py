"""Attention across processes: each process has a part of a stream's tokens, and attends to all processes' tokens.

Ulysses (arXiv 2309.14509) exchanges tokens for heads, so that a process has all tokens of some heads. In a ring (arXiv
2310.01889), each process attends with its own queries to all keys, which are gathered first: one attention over all
keys, in the order of one process. Both may be combined: rings of processes, which also exchange tokens for heads.

Queries, keys and values travel together: one exchange before attention and one after it, and in a ring one gather.

Tokens of other streams, such as a prompt's, may be on every process. Then they keep their place in the sequence,
whatever their number, and every process computes the same result for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from sage_hf.attributes import SPLIT
from sage_hf.diffusers.bridge import Shards, scores_are_skipped
from sage_hf.diffusers.fused_norms import end_trial
from sage_kernels.spec.masks import with_leading_dims


@dataclass(frozen=True)
class SplitTokens:
    """Tokens of an attention module's calls: one stream is split among processes, all other streams are on every
    process.

    Attributes:
        shards: the processes.
        last: whether the split stream comes after the other streams in the sequence.
        number: number of the split stream's tokens on this process, in one call; None: there are no other streams, and
            the numbers of keys and queries may differ.
    """

    shards: Shards
    last: bool = False
    number: int | None = None

    def in_call(self, hidden_states: torch.Tensor) -> SplitTokens:
        """Return the tokens of a call whose stream (batch, tokens of this process, dim) is split."""
        return replace(self, number=hidden_states.shape[1])

    def attend(
        self,
        attend: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend to the tokens of all processes.

        Args:
            attend: attention of (batch, heads, tokens, head_dim) tensors within a process: attend(query, key, value,
                attn_mask=..., **options).
            query, key, value: (batch, heads, tokens, head_dim), for the tokens on this process.
            attn_mask: None, or (batch or 1, all heads or 1, 1, keys), for this process's keys or for all processes'
                keys in order. In Ulysses without a ring, its third dimension may be the queries of all processes.

        Returns:
            The output for the queries of this process, (batch, heads, tokens, head_dim).

        Raises:
            ValueError: a mask has another shape, there are more processes in Ulysses than heads, or fewer key heads
                than heads.
            NotImplementedError: gradients are computed through it.
        """
        end_trial(query, key)
        if scores_are_skipped(query, value):
            return value

        def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return self._attend(attend, query, key, value, attn_mask, options)

        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            return _WithoutGradient.apply(run, query, key, value)
        return run(query, key, value)

    def _attend(
        self,
        attend: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        shards, heads = self.shards, query.shape[1]
        if heads < shards.ulysses:
            raise ValueError(f"ulysses_degree {shards.ulysses} is more than the {heads} heads of this attention")
        if key.shape[1] != heads:
            raise ValueError(
                f"attention across processes has {key.shape[1]} key heads: it needs {heads}, as many as query heads"
            )
        tensors: Sequence[torch.Tensor] = (query, key, value)
        shared: Sequence[torch.Tensor] = ()
        split = tensors
        if self.number is not None:
            shared, split = zip(*(self._cut(x, self.number) for x in tensors), strict=True)
        shared_lengths = [x.shape[2] for x in shared] or [0, 0]
        queries, keys = self._lengths(split[0].shape[2], split[1].shape[2], query.device)
        all_sizes = heads, shared_lengths[0] + sum(queries), shared_lengths[1] + sum(keys)
        attn_mask = None if attn_mask is None else self._mask_of_all(attn_mask, all_sizes, keys)
        if shards.ulysses > 1:
            own_heads = _parts(heads, shards.ulysses)[shards.rank]
            shared = [x[:, own_heads] for x in shared]
            if attn_mask is not None and attn_mask.shape[1] > 1:
                attn_mask = attn_mask[:, own_heads]
            along = shared if shards.ring == 1 else ()
            if queries == keys and shared_lengths[0] == shared_lengths[1]:
                tensors = self._exchange(along, split, queries[shards.near])
            else:
                query_of_all = self._exchange(along[:1], split[:1], queries[shards.near])
                tensors = *query_of_all, *self._exchange(along[1:], split[1:], keys[shards.near])
        if shards.ring > 1:
            query = self._join(shared[0], tensors[0]) if shared and shards.ulysses > 1 else tensors[0]
            split = split if shards.ulysses == 1 else tensors
            tensors = query, *self._gather(shared[1:], split[1:], keys)
        output = attend(*tensors, attn_mask=attn_mask, **options)
        return output if shards.ulysses == 1 else self._give_heads_back(output, heads, queries[shards.near])

    def _cut(self, x: torch.Tensor, number: int, dim: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens on every process, and the `number` tokens that are split."""
        first = x.shape[dim] - number if self.last else number
        before, behind = x.tensor_split((first,), dim)
        return (before, behind) if self.last else (behind, before)

    def _join(self, shared: torch.Tensor, split: torch.Tensor) -> torch.Tensor:
        """Concatenate (batch, heads, tokens, head_dim) tensors along tokens, in the order of the sequence."""
        return torch.cat([shared, split] if self.last else [split, shared], dim=2)

    def _lengths(self, queries: int, keys: int, device: torch.device) -> tuple[list[int], list[int]]:
        """Return the number of queries, and the number of keys, of each process."""
        processes = self.shards.ring * self.shards.ulysses
        if not self.shards.uneven:
            return [queries] * processes, [keys] * processes
        lengths = torch.empty(processes, 2, dtype=torch.int64, device=device)
        _all_gather(lengths, lengths.new_tensor([[queries, keys]]), self.shards.all_group)
        of_queries, of_keys = lengths.t().tolist()
        return of_queries, of_keys

    def _mask_of_all(self, mask: torch.Tensor, sizes: tuple[int, int, int], keys: list[int]) -> torch.Tensor:
        """Return the mask for the keys of all processes, (batch or 1, heads or 1, queries or 1, keys or 1).

        Args:
            mask: the mask for the keys of all processes, or of this process.
            sizes: numbers of heads, queries and keys of all processes.
            keys: number of keys of each process.

        Raises:
            ValueError: the mask has another shape.
        """
        shards, given_shape = self.shards, tuple(mask.shape)
        mask, (heads, queries, every_key) = with_leading_dims(mask), sizes
        if self.number is None and mask.shape[-1] == keys[shards.part] != every_key:
            longest = max(keys)
            sent = torch.nn.functional.pad(mask, (0, longest - mask.shape[-1])).movedim(-1, 0).contiguous()
            received = sent.new_empty(len(keys) * longest, *sent.shape[1:])
            _all_gather(received, sent, shards.all_group)
            mask = torch.cat(_without_padding(received, longest, keys)).movedim(0, -1)
        rows = (1, queries) if shards.ring == 1 else (1,)
        if mask.shape[1] not in (1, heads) or mask.shape[2] not in rows or mask.shape[3] not in (1, every_key):
            raise ValueError(
                f"attn_mask has shape {given_shape}: attention across processes takes a key-padding mask, "
                f"(batch, 1 or {heads}, 1, {every_key}) for all processes, and in Ulysses a mask of queries and keys"
            )
        return mask

    def _room(
        self, shared: Sequence[torch.Tensor], split: Sequence[torch.Tensor], heads: int, tokens: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Allocate tensors for the tokens on every process, which are copied, and for more tokens.

        Args:
            shared: the tokens on every process, (batch, heads, tokens, head_dim) each, or nothing.
            split: tensors of the same batch and head_dim, as many as are returned.
            heads: number of heads.
            tokens: number of tokens for which there is room.

        Returns:
            The tensors, (batch, heads, all tokens, head_dim) each; and their room for more tokens, (tokens, tensors,
            batch, heads, head_dim), which is contiguous.
        """
        shared_length = shared[0].shape[2] if shared else 0
        batch, head_dim = split[0].shape[0], split[0].shape[3]
        whole = room = split[0].new_empty(shared_length + tokens, len(split), batch, heads, head_dim)
        if shared_length:
            front, room = self._cut(whole, tokens, 0)
            torch.stack([x.permute(2, 0, 1, 3) for x in shared], dim=1, out=front)
        return whole.permute(1, 2, 3, 0, 4).unbind(), room

    def _exchange(
        self, shared: Sequence[torch.Tensor], split: Sequence[torch.Tensor], lengths: list[int]
    ) -> tuple[torch.Tensor, ...]:
        """Exchange some tokens of all heads for all tokens of some heads, for all tensors at once.

        Args:
            shared: (batch, heads of this process, tokens on every process, head_dim) each, or nothing.
            split: (batch, all heads, tokens of this process, head_dim) each.
            lengths: number of tokens of each process.

        Returns:
            (batch, heads of this process, all tokens, head_dim) each.
        """
        batch, heads, number, head_dim = split[0].shape
        processes = self.shards.ulysses
        elements_per_head = len(split) * batch * head_dim
        heads_per_process = [part.stop - part.start for part in _parts(heads, processes)]
        own_heads, (share, more) = heads_per_process[self.shards.rank], divmod(heads, processes)
        if not more:
            sent = _messages(split, processes)
        else:  # `more` processes have one head more
            first = more * (share + 1)
            few = _messages([x[:, first:] for x in split], processes - more)
            sent = torch.cat([_messages([x[:, :first] for x in split], more), few])
        whole, room = self._room(shared, split, own_heads, sum(lengths))
        sizes = [length * own_heads * elements_per_head for length in lengths]
        sizes_sent = [number * process_heads * elements_per_head for process_heads in heads_per_process]
        _all_to_all(room.view(-1), sent, sizes, sizes_sent, self.shards.group)
        return whole

    def _gather(
        self, shared: Sequence[torch.Tensor], split: Sequence[torch.Tensor], lengths: list[int]
    ) -> tuple[torch.Tensor, ...]:
        """Return (batch, heads, tokens, head_dim) tensors with the tokens of all processes of a ring, gathered at once.

        Args:
            shared: the tokens on every process, or nothing.
            split: the tokens of this process of the ring.
            lengths: number of tokens of each process, including processes outside this ring.
        """
        near = self.shards.ulysses
        lengths = [sum(lengths[at : at + near]) for at in range(0, len(lengths), near)]
        longest, sent = max(lengths), _joined(torch.stack, [x.permute(2, 0, 1, 3) for x in split], 1)
        whole, room = self._room(shared, split, split[0].shape[1], sum(lengths))
        if min(lengths) == longest:
            _all_gather(room, sent, self.shards.ring_group)
            return whole
        sent = torch.cat([sent, sent.new_zeros(longest - len(sent), *sent.shape[1:])])
        received = sent.new_empty(len(lengths) * longest, *sent.shape[1:])
        _all_gather(received, sent, self.shards.ring_group)
        torch.cat(_without_padding(received, longest, lengths), out=room)
        return whole

    def _give_heads_back(self, output: torch.Tensor, heads: int, lengths: list[int]) -> torch.Tensor:
        """Return (batch, own heads, tokens, head_dim) as (batch, all heads, tokens of this process, head_dim)."""
        batch, own_heads, tokens, head_dim = output.shape
        shared_length = tokens - sum(lengths)
        number = lengths[self.shards.rank] + shared_length
        by_token = output.permute(2, 0, 1, 3)  # as attention leaves one sample in memory
        messages = [by_token]
        if shared_length:
            shared, split = self._cut(by_token, sum(lengths), 0)
            order = 1 if self.last else -1
            messages = [x for part in split.split(lengths) for x in (shared, part)[::order]]
        is_one_message = not shared_length and by_token.is_contiguous()
        sent = (by_token if is_one_message else _joined(torch.cat, messages, 0)).view(-1)
        sizes_sent = [(length + shared_length) * batch * own_heads * head_dim for length in lengths]
        sizes = [number * batch * (part.stop - part.start) * head_dim for part in _parts(heads, self.shards.ulysses)]
        received = sent.new_empty(sum(sizes))
        _all_to_all(received, sent, sizes, sizes_sent, self.shards.group)
        parts = [part.view(number, batch, -1, head_dim).transpose(0, 1) for part in received.split(sizes)]
        return _joined(torch.cat, parts, 2).transpose(1, 2)


def across_processes(
    attn: torch.nn.Module, attend: Callable[..., torch.Tensor], hidden_states: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """Return `attend`, or attention across processes by it if the tokens of a module's calls are split.

    Args:
        attn: the attention module.
        attend: attention of (batch, heads, tokens, head_dim) tensors within a process.
        hidden_states: the stream that may be split, (batch, tokens, ...).
    """
    split = split_of(attn)
    if split is None:
        return attend
    call = split.in_call(hidden_states)

    def attend_to_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        return call.attend(attend, query, key, value, **options)

    return attend_to_all


def split_of(attn: torch.nn.Module) -> SplitTokens | None:
    """Return our split of the tokens of an attention module's calls; None without a split, or with diffusers' split."""
    split: SplitTokens | None = getattr(attn, SPLIT, None)
    return split


class _WithoutGradient(torch.autograd.Function):
    """Run a function of tensors; computing its output's gradient raises an error."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError(
            "attention across processes has no backward pass: train this model without enable_parallelism()"
        )


@functools.cache
def _parts(number: int, processes: int) -> list[slice]:
    """Return each process's share as a slice; if `number` is not divisible, the first processes have one more."""
    share, more = divmod(number, processes)
    starts = [rank * share + min(rank, more) for rank in range(processes + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def _messages(tensors: Sequence[torch.Tensor], processes: int) -> torch.Tensor:
    """Return the messages to all processes, one after another, in a vector; each process gets equally many heads.

    The tensors are (batch, heads, tokens, head_dim); a message is (tokens, tensors, batch, heads of its process,
    head_dim).
    """
    parts = [x.unflatten(1, (processes, -1)).permute(1, 3, 0, 2, 4) for x in tensors]
    return _joined(torch.stack, parts, 2).view(-1)


def _joined(join: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Stack or concatenate tensors of any strides.

    If all tensors can be viewed as elements of 16 bytes, they are, because PyTorch copies such elements faster.
    """
    dtype = tensors[0].dtype
    if not torch.compiler.is_compiling() and all(_has_wide_elements(x) for x in tensors):
        tensors = [x.view(torch.complex128) for x in tensors]
    return join(list(tensors), dim).view(dtype)


def _has_wide_elements(x: torch.Tensor) -> bool:
    """Check that a tensor can be viewed as aligned elements of 16 bytes along its last dimension."""
    number = 16 // x.element_size()
    *strides, last = x.stride()
    sizes = x.shape[-1], x.storage_offset(), *strides
    return last == 1 and x.data_ptr() % 16 == 0 and not any(size % number for size in sizes)


def _without_padding(x: torch.Tensor, longest: int, lengths: list[int]) -> list[torch.Tensor]:
    """Return each process's part of (processes · longest, ...), cut to the process's length."""
    return [part[:length] for part, length in zip(x.split(longest), lengths, strict=True)]


def _all_to_all(
    received: torch.Tensor, sent: torch.Tensor, sizes: list[int], sizes_sent: list[int], group: Any
) -> None:
    """Exchange runs of elements of two vectors among the processes of a group."""
    dist.all_to_all_single(received, sent, sizes, sizes_sent, group=group)


def _all_gather(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
    """Receive the concatenated tensors that the processes of a group sent."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    gather(received, sent, group=group)
