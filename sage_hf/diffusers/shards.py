"""Attention across processes: each has a part of a stream's tokens, and attends to the tokens of all processes.

Ulysses (arXiv 2309.14509) exchanges tokens for heads, so that a process has all tokens of some heads. A ring (arXiv
2310.01889) has each process attend with its own queries to all keys, which are gathered first: one attention over all
keys, in the order of one process. Both may be combined, with rings of processes that exchange tokens for heads.

Tokens of other streams, such as a prompt's, may be on every process. Then they stay where they are in the sequence,
whatever their number, and every process computes the same for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from sage_hf.attributes import SPLIT

from .bridge import Shards, scores_are_skipped
from .heads import end_trial


@dataclass(frozen=True)
class SplitTokens:
    """Tokens of an attention module's calls: one stream is split among processes, all others are on each of them.

    Attributes:
        shards: the processes.
        last: whether the stream that is split lies behind the others in the sequence.
        number: number of its tokens on this process, in one call.
    """

    shards: Shards
    last: bool
    number: int = 0

    def in_call(self, hidden_states: torch.Tensor) -> SplitTokens:
        """Return the tokens of a call whose stream (batch, tokens of this process, dim) is split."""
        return SplitTokens(self.shards, self.last, hidden_states.shape[1])

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
            query, key, value: (batch, heads, tokens, head_dim), of the tokens on this process.
            attn_mask: (batch or 1, 1, 1, keys of all processes) or None, the same on every process.

        Returns:
            The output for the queries of this process, (batch, heads, tokens, head_dim).

        Raises:
            ValueError: a mask of another shape, or more processes in Ulysses than heads.
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
        cut = [self._cut(x.transpose(1, 2), self.number) for x in (query, key, value)]
        shared, split = [x for x, _ in cut], [x for _, x in cut]
        lengths = [self.number]
        if shards.ulysses > 1:
            lengths = _lengths(self.number, shards.group, shards.ulysses, shards.uneven, query.device)
            own = _parts(heads, shards.ulysses)[shards.rank]
            split = _tokens_to_heads(split, lengths, shards)
            shared = [x[:, :, own] for x in shared]
        if shards.ring > 1:
            split = [split[0], *_gather_tokens(split[1:], shards)]
        query, key, value = (self._join(*both).transpose(1, 2) for both in zip(shared, split, strict=True))
        _check_mask(attn_mask, key)
        output = attend(query, key, value, attn_mask=attn_mask, **options)
        if shards.ulysses > 1:
            return self._heads_to_tokens(output.transpose(1, 2), heads, lengths).transpose(1, 2)
        return output

    def _cut(self, x: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens on every process and those `number` that are split, of (batch, tokens, ...)."""
        at = x.shape[1] - number if self.last else number
        return (x[:, :at], x[:, at:]) if self.last else (x[:, at:], x[:, :at])

    def _join(self, shared: torch.Tensor, split: torch.Tensor) -> torch.Tensor:
        """Return (batch, tokens, ...) tensors one behind another, in the order of the sequence."""
        if not shared.shape[1]:
            return split
        return torch.cat([shared, split] if self.last else [split, shared], dim=1)

    def _heads_to_tokens(self, x: torch.Tensor, heads: int, lengths: list[int]) -> torch.Tensor:
        """Return (batch, tokens, own heads, head_dim) as (batch, tokens of this process, all heads, head_dim)."""
        batch, _, own, head_dim = x.shape
        shared, split = self._cut(x, sum(lengths))
        rest = shared.shape[1]
        sizes = [(length + rest) * batch * own * head_dim for length in lengths]
        sent = x.new_empty(sum(sizes))
        for buffer, part in zip(sent.split(sizes), split.split(lengths, dim=1), strict=True):
            tokens_first = buffer.view(rest + part.shape[1], batch, own, head_dim).transpose(0, 1)
            for place, states in zip(self._cut(tokens_first, part.shape[1]), (shared, part), strict=True):
                place.copy_(states)
        shape = self.number + rest, batch, -1, head_dim
        parts = _parts(heads, self.shards.ulysses)
        each = shape[0] * batch * head_dim
        received = _all_to_all(sent, sizes, [(part.stop - part.start) * each for part in parts], self.shards.group)
        return torch.cat([one.view(shape) for one in received], dim=2).transpose(0, 1)


def across_processes(
    attn: torch.nn.Module, attend: Callable[..., torch.Tensor], hidden_states: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """Return `attend`, or attention across processes by it where the tokens of a module's calls are split.

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
    """Return how the tokens of an attention module's calls are split; None if they are not, or as diffusers plans."""
    split: SplitTokens | None = getattr(attn, SPLIT, None)
    return split


class _WithoutGradient(torch.autograd.Function):
    """Run a function of tensors, whose output has a gradient that cannot be computed."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError(
            "attention across processes has no backward pass: train this model without enable_parallelism()"
        )


def _parts(number: int, processes: int) -> list[slice]:
    """Return the share of each process as a slice; the first ones have one more where `number` does not divide."""
    share, more = divmod(number, processes)
    starts = [rank * share + min(rank, more) for rank in range(processes + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def _lengths(own: int, group: Any, processes: int, uneven: bool, device: torch.device) -> list[int]:
    """Return the number of tokens of each process in a group."""
    if not uneven:
        return [own] * processes
    found = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(processes)]
    dist.all_gather(found, torch.full_like(found[0], own), group=group)
    return [int(length) for length in found]


def _all_to_all(sent: torch.Tensor, sizes: list[int], sizes_of_others: list[int], group: Any) -> list[torch.Tensor]:
    """Send the parts of a vector to the processes of a group, and return the parts that they sent to this one."""
    received = sent.new_empty(sum(sizes_of_others))
    dist.all_to_all_single(received, sent, sizes_of_others, sizes, group=group)
    return list(received.split(sizes_of_others))


def _tokens_to_heads(streams: Sequence[torch.Tensor], lengths: list[int], shards: Shards) -> list[torch.Tensor]:
    """Exchange tensors of the same shape at once: some tokens of all heads become all tokens of some heads.

    Args:
        streams: (batch, tokens of this process, all heads, head_dim) each.
        lengths: number of tokens of each process.

    Returns:
        (batch, tokens of all processes, heads of this process, head_dim) each.
    """
    batch, own, heads, head_dim = streams[0].shape
    parts = _parts(heads, shards.ulysses)
    shapes = [(own, len(streams), batch, part.stop - part.start, head_dim) for part in parts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    sent = streams[0].new_empty(sum(sizes))
    for buffer, shape, part in zip(sent.split(sizes), shapes, parts, strict=True):
        for place, stream in zip(buffer.view(shape).unbind(1), streams, strict=True):
            place.copy_(stream[:, :, part].transpose(0, 1))
    each = torch.Size(shapes[shards.rank]).numel() // own
    received = torch.cat(_all_to_all(sent, sizes, [length * each for length in lengths], shards.group))
    return [x.transpose(0, 1) for x in received.view(-1, *shapes[shards.rank][1:]).unbind(1)]


def _gather_tokens(streams: Sequence[torch.Tensor], shards: Shards) -> list[torch.Tensor]:
    """Return (batch, tokens, heads, head_dim) tensors of the same shape with the tokens of all processes of a ring."""
    sent = torch.stack([x.transpose(0, 1) for x in streams], dim=1)
    lengths = _lengths(len(sent), shards.ring_group, shards.ring, shards.uneven, sent.device)
    longest = max(lengths)
    if len(sent) < longest:
        sent = torch.cat([sent, sent.new_zeros(longest - len(sent), *sent.shape[1:])])
    received = sent.new_empty(shards.ring * longest, *sent.shape[1:])
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    all_gather(received, sent, group=shards.ring_group)
    if min(lengths) < longest:
        received = torch.cat([x[:length] for x, length in zip(received.split(longest), lengths, strict=True)])
    return [x.transpose(0, 1) for x in received.unbind(1)]


def _check_mask(attn_mask: torch.Tensor | None, key: torch.Tensor) -> None:
    if attn_mask is not None and tuple(attn_mask.shape[1:]) != (1, 1, key.shape[2]):
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}: attention across processes takes a key-padding mask "
            f"(batch, 1, 1, {key.shape[2]}) for the keys of all processes"
        )
