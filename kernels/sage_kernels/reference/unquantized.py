"""Keys that the reference attends to in the caller's dtype: heavy keys, including late keys, and recent keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..exact.sdpa import apply_mask
from ..spec import transforms
from ..spec.layout import BLOCK, ceil_div


@dataclass(frozen=True)
class Unquantized:
    """Keys in the caller's dtype, with the queries that attend to them, as float32 values.

    Attributes:
        query: (batch, q_heads, q_len, head_dim).
        key: (batch, kv_heads, keys, head_dim), without the mean of the other keys. In NVFP4 recipes heavy keys are then
            rounded to the caller's dtype; in INT8 recipes not: there the mean's scores are subtracted.
        value: (batch, kv_heads, keys, v_head_dim), with its mean.
        dtype: the caller's dtype, to which P is rounded.
        late: int64 (batch, kv_heads, late keys), the result of `transforms.late_keys`: the last of these keys. Rows
            that see a late key do not attend here to the first key that gave way to it: that key has the late key's
            place among the other keys. None: no late keys.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dtype: torch.dtype
    late: torch.Tensor | None = None

    @property
    def first_keys(self) -> int:
        """Return the number of leading keys of the sequence that the other keys lack."""
        return self.key.shape[-2] - (0 if self.late is None else self.late.shape[-1])


def take_late(x: torch.Tensor, late: torch.Tensor, first_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first tokens and the late tokens; and all tokens, late tokens exchanged for tokens that give way."""
    places = late.shape[-1]
    before, others = x.tensor_split((first_keys - places,), -2)
    stays = torch.arange(places, device=x.device)
    chosen = torch.where(late == transforms.NO_KEY, stays, late - before.shape[-2])
    exchanged = transforms.exchange(others, chosen)
    return torch.cat((x[..., :first_keys, :], exchanged[..., :places, :]), -2), torch.cat((before, exchanged), -2)


def attend_unquantized(
    heavy: Unquantized | None,
    recent: Unquantized | None,
    recent_start: int,
    kv_heads: int,
    chunk: slice,
    kv_len: int,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float,
) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
    """Yield scores of heavy keys, then recent keys, (batch, q_heads, rows, keys), with a function that weighs V by P.

    P is rounded to the caller's dtype. `chunk.start` is a multiple of BLOCK, and `recent_start` the first recent key of
    rows 0…BLOCK - 1: each later block of rows begins BLOCK keys later.
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
        rows, blocks = chunk.stop - chunk.start, ceil_div(chunk.stop - chunk.start, BLOCK)
        row = chunk.start + torch.arange(blocks * BLOCK, device=recent.key.device).view(blocks, BLOCK, 1)
        column = row[:, :1] + recent_start + torch.arange(causal_offset + BLOCK - recent_start, device=row.device)
        exists = (column >= first_keys) & (column < kv_len)
        sees, column = exists & (column <= row + causal_offset), column.clamp(0, kv_len - 1)
        # (batch, kv_heads, 1, blocks, keys, channels) and (batch, kv_heads, group, blocks, BLOCK, channels)
        key, value = (
            torch.where(exists.mT, x[:, :, column.squeeze(1)], 0.0).unsqueeze(2) for x in (recent.key, recent.value)
        )

        def by_block(x: torch.Tensor) -> torch.Tensor:
            return per_group(F.pad(x, (0, 0, 0, blocks * BLOCK - rows)).unflatten(2, (blocks, BLOCK)), kv_heads)

        def by_row(x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1, 2).flatten(2, 3)[:, :, :rows]

        scores = by_row(by_block(recent.query[:, :, chunk]) @ key.transpose(-1, -2)) * scale
        if mask is not None:
            scores = apply_mask(scores, by_row(mask[:, :, None, row.clamp(max=chunk.stop - 1), column]), False, 0, 0)
        scores = scores.masked_fill(~sees.flatten(0, 1)[:rows], -torch.inf)
        yield scores, lambda p: by_row(by_block(p.to(recent.dtype).float()) @ value)


def per_group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """View (batch, q_heads, ...) as (batch, kv_heads, q_heads / kv_heads, ...)."""
    return x.unflatten(1, (kv_heads, -1))
