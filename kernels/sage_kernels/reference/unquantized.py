"""Keys that the reference attends to in the caller's dtype: heavy ones, late ones among them, and recent ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..exact.sdpa import apply_mask
from ..spec import transforms


@dataclass(frozen=True)
class Unquantized:
    """Keys and what attends to them in the caller's dtype, as float32 values.

    Attributes:
        query: (batch, q_heads, q_len, head_dim).
        key: (batch, kv_heads, keys, head_dim), without the mean of the other keys. In NVFP4 recipes heavy keys are
            rounded to the caller's dtype after that; in INT8 ones not: there the mean's scores are subtracted.
        value: (batch, kv_heads, keys, v_head_dim), with its mean.
        dtype: the caller's, to which P is rounded.
        late: int64 (batch, kv_heads, late keys), the result of `transforms.late_keys`: the last ones of these keys.
            Rows that see one do not attend here to the first key that gave way to it: among the other keys that has
            its place. None: there are none.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dtype: torch.dtype
    late: torch.Tensor | None = None

    @property
    def first_keys(self) -> int:
        """Return the number of keys, from the sequence's first on, whose places the other keys are without."""
        return self.key.shape[-2] - (0 if self.late is None else self.late.shape[-1])


def take_late(x: torch.Tensor, late: torch.Tensor, first_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first tokens and the late ones; and all tokens, late ones exchanged for those that give way."""
    places = late.shape[-1]
    before, others = x.tensor_split((first_keys - places,), -2)
    stays = torch.arange(places, device=x.device)
    chosen = torch.where(late == transforms.NO_KEY, stays, late - before.shape[-2])
    exchanged = transforms.exchange(others, chosen)
    return torch.cat((x[..., :first_keys, :], exchanged[..., :places, :]), -2), torch.cat((before, exchanged), -2)


def attend_unquantized(
    heavy: Unquantized | None,
    recent: Unquantized | None,
    recent_keys: int,
    kv_heads: int,
    chunk: slice,
    kv_len: int,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float,
) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
    """Give the scores of heavy keys, then of recent ones, (batch, q_heads, rows, keys), each with what weighs V by P.

    P is rounded to the caller's dtype for heavy keys, which matrix units multiply; recent keys are few enough for
    float32.
    """
    first_keys = 0
    if heavy is not None:
        first_keys = heavy.first_keys
        scores = per_group(heavy.query[:, :, chunk], kv_heads) @ heavy.key.unsqueeze(2).transpose(-1, -2)
        scores, late_scores = (scores.flatten(1, 2) * scale).tensor_split((first_keys,), -1)
        scores = apply_mask(scores, mask, is_causal, chunk.start, 0, causal_offset)
        if heavy.late is not None:
            row = torch.arange(chunk.start, chunk.stop, device=scores.device)[:, None] + causal_offset
            sees_late = (heavy.late[:, :, None] <= row).repeat_interleave(scores.shape[1] // kv_heads, 1)
            others, gave_way = scores.tensor_split((first_keys - heavy.late.shape[-1],), -1)
            gave_way = gave_way.masked_fill(sees_late, -torch.inf)
            scores = torch.cat((others, gave_way, late_scores.masked_fill(~sees_late, -torch.inf)), -1)
        yield (
            scores,
            lambda p: (per_group(p.to(heavy.dtype).float(), kv_heads) @ heavy.value.unsqueeze(2)).flatten(1, 2),
        )
    if recent is not None:
        ages = torch.arange(recent_keys, device=recent.key.device)
        column = torch.arange(chunk.start, chunk.stop, device=ages.device)[:, None] + causal_offset - ages
        exists, column = (column >= first_keys) & (column < kv_len), column.clamp(0, kv_len - 1)
        # (batch, kv_heads, rows, ages, channels)
        key, value = (torch.where(exists[..., None], x[:, :, column], 0.0) for x in (recent.key, recent.value))
        query = per_group(recent.query[:, :, chunk], kv_heads).transpose(2, 3)
        scores = (query @ key.transpose(-1, -2)).transpose(2, 3).flatten(1, 2) * scale
        if mask is not None:
            seen = mask[:, :, chunk].gather(-1, column.expand(*scores.shape))
            scores = apply_mask(scores, seen, False, 0, 0)
        yield (
            scores.masked_fill(~exists, -torch.inf),
            lambda p: (per_group(p, kv_heads).transpose(2, 3) @ value).transpose(2, 3).flatten(1, 2),
        )


def per_group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """View (batch, q_heads, ...) as (batch, kv_heads, q_heads / kv_heads, ...)."""
    return x.unflatten(1, (kv_heads, -1))
