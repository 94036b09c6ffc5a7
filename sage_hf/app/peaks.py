"""Peaks of attention: the heaviest key's share of the weight, and the loudest channel of K."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from sage_kernels.exact import sdpa
from sage_kernels.reference.forward import counted_keys
from sage_kernels.spec import transforms
from sage_kernels.spec.masks import with_leading_dims


@dataclass(frozen=True)
class Peaks:
    """Peaks of one or more calls of exact attention.

    Attributes:
        share: the largest share of the weight that one key holds in one head, averaged over the rows that may attend to
            any key. Causal rows before the key count as 0.
        key: the position of this key; None if no row may attend to any key.
        loudness: the largest rms of a channel of K in one head, divided by the median channel's rms; the channels'
            means over existing keys are subtracted first. It is inf if only the median is 0.
    """

    share: float
    key: int | None
    loudness: float

    def to_dict(self) -> dict[str, float | int | None]:
        """Return the peaks by name."""
        return asdict(self)

    def joined(self, other: Peaks) -> Peaks:
        """Return the peaks of both calls; NaN if one of them is NaN."""
        heavier = other if other.share > self.share or math.isnan(other.share) else self
        louder = other if other.loudness > self.loudness or math.isnan(other.loudness) else self
        return Peaks(heavier.share, heavier.key, louder.loudness)


NO_PEAKS = Peaks(0.0, None, 0.0)
"""Peaks before any call was observed."""


def find_peaks(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
) -> Peaks:
    """Return the peaks of one call, in memory linear in length; arguments as in `sage_kernels.exact.sdpa.attention`."""
    if mask is not None:
        mask = with_leading_dims(mask)
    weights = sdpa.mean_weights(query, key, mask=mask, is_causal=is_causal, causal_offset=causal_offset, scale=scale)
    if not weights.numel():
        return NO_PEAKS
    share, position = weights.flatten(0, 1).max(-1)
    head = share.argmax()
    attends = share[head] != 0
    loudest = channel_loudness(key, counted_keys(mask)).amax().item()
    return Peaks(share[head].item(), int(position[head]) if attends else None, loudest)


def channel_loudness(key: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the ratio of the loudest channel's rms to the median channel's in each head: float32 (batch, kv_heads).

    Args:
        key: (batch, kv_heads, tokens, head_dim), at least one token.
        key_mask: bool (batch or 1, 1, tokens or 1, 1), the keys that exist; None: all.
    """
    deviation = key.float() - transforms.mean_of_tokens(key.float(), key_mask)
    if key_mask is not None:
        deviation = torch.where(key_mask, deviation, 0.0)
    rms = deviation.square().sum(-2).sqrt()
    loudest, median = rms.amax(-1), rms.median(-1).values
    return torch.where(loudest == 0, 0.0, loudest / median)
