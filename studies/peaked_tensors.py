"""Random Q, K and V with peaked attention: sinks, which hold most of every row's weight, and loud channels of K.

Language models have both; the tables' other random tensors have neither. Tests check that the sinks hold the weight in
their names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from tensors import Inputs
from torch import Tensor

from sage_kernels.exact import sdpa

QUERIES = 256
"""Number of queries of a random call with more keys: enough for a judgement at any number of keys."""
TEXT_TOKENS = 200
"""Number of tokens after the video tokens: sinks "behind" are the first of these tokens."""
QUERY_MEAN = 2.0
"""Length of the mean query, to which sinks point, relative to the queries' deviations from it."""
VALUE_MEAN = 0.3
"""Standard deviation over channels of V's mean, relative to V's deviations from it."""
SINK_VALUE = 0.05
"""Standard deviation of a sink's V; it is small in language models."""
LOG_LOUDNESS = 0.6
"""Standard deviation of the logarithm of a channel's loudness, for log-normal loudness."""

Place = Literal["front", "middle", "behind"]
Loudness = Literal["Gaussian", "×10", "×40", "log-normal", "RoPE'd bias"]


@dataclass(frozen=True)
class Sinks:
    """Calls whose sinks hold a share of every row's weight.

    Attributes:
        mass: weight of all sinks together, averaged over the rows that may attend to all of them.
        kv_len: number of keys.
        count: number of sinks.
        place: "front": the first tokens; "middle": at equal distances; "behind": the first of the last TEXT_TOKENS.
        q_len: number of queries.
        causal: no query attends to later keys; the last query is at the last key.
        q_heads, kv_heads, head_dim: sizes.
        loud: factor by which four channels of K are louder than the others, and quieter in Q.
    """

    mass: float
    kv_len: int
    count: int = 1
    place: Place = "front"
    q_len: int = QUERIES
    causal: bool = False
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 128
    loud: float = 1.0

    @property
    def name(self) -> str:
        """Return the name in tables."""
        where = {"front": "", "middle": ", in the middle", "behind": ", behind the video"}[self.place]
        holds = "a sink holds" if self.count == 1 else f"{self.count} sinks hold"
        text = f"{holds} {self.mass:g} of {self.kv_len:,}{where}"
        if self.causal:
            text += ", causal" if self.q_len == self.kv_len else ", causal, last queries"
        if self.loud != 1.0:
            text += f", K ×{self.loud:g} in 4 channels"
        return text + _sizes(self.q_heads, self.kv_heads, self.head_dim)

    @property
    def causal_offset(self) -> int:
        """Return the position of the first query if attention is causal."""
        return self.kv_len - self.q_len if self.causal else 0

    @property
    def positions(self) -> list[int]:
        """Return the positions of the sinks."""
        match self.place:
            case "front":
                return list(range(self.count))
            case "middle":
                return [self.kv_len * (i + 1) // (self.count + 1) for i in range(self.count)]
            case "behind":
                return [self.kv_len - TEXT_TOKENS + i for i in range(self.count)]

    def draw(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Draw the call in float32; the same device and seed give the same call.

        Q has a mean, and all keys but the sinks are orthogonal to it. Sinks point along Q's mean; their length gives
        them the mass, separately in each head of K.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def normal(heads: int, tokens: int) -> Tensor:
            return torch.randn(1, heads, tokens, self.head_dim, generator=generator, device=device)

        mean = torch.nn.functional.normalize(normal(self.kv_heads, 1), dim=-1)
        group = self.q_heads // self.kv_heads
        query = normal(self.q_heads, self.q_len)
        query += QUERY_MEAN * self.head_dim**0.5 * mean.repeat_interleave(group, 1)
        key = normal(self.kv_heads, self.kv_len)
        key -= (key @ mean.mT) * mean
        value = normal(self.kv_heads, self.kv_len) + VALUE_MEAN * normal(self.kv_heads, 1)
        value[:, :, self.positions] = SINK_VALUE * normal(self.kv_heads, self.count)
        key[:, :, self.positions] = self._strength(query, key, mean)[..., None, None] * mean
        if self.loud != 1.0:
            channels = _loud_channels(self.head_dim)
            query[..., channels] /= self.loud
            key[..., channels] *= self.loud
        return Inputs(query, key, value, self.causal, self.causal_offset)

    def _strength(self, query: Tensor, key: Tensor, mean: Tensor) -> Tensor:
        """Return the length of the sinks' keys in each head of K, (1, kv_heads), by bisection."""
        is_no_sink = torch.ones(1, 1, 1, self.kv_len, dtype=torch.bool, device=key.device)
        is_no_sink[..., self.positions] = False
        others_lse = sdpa.log_sum_exp(
            query, key, mask=is_no_sink, is_causal=self.causal, causal_offset=self.causal_offset
        )
        rows = torch.arange(self.q_len, device=key.device) + self.causal_offset
        seen = rows >= max(self.positions) if self.causal else rows >= 0
        along = (query.unflatten(1, (self.kv_heads, -1)) @ mean.mT.unsqueeze(2)).squeeze(-1).double()
        along, others_lse = (
            along[..., seen] * self.head_dim**-0.5,
            others_lse.unflatten(1, (self.kv_heads, -1))[..., seen].double(),
        )
        low, high = (torch.full((1, self.kv_heads), bound, device=key.device).double() for bound in (0.0, 1000.0))
        for _ in range(60):
            middle = (low + high) / 2
            share = torch.sigmoid(middle[..., None, None] * along + math.log(self.count) - others_lse).mean((-1, -2))
            low, high = torch.where(share < self.mass, middle, low), torch.where(share < self.mass, high, middle)
        return low.float()


@dataclass(frozen=True)
class Loud:
    """Calls with Gaussian scores in which some channels of K are loud, and the same channels of Q as much quieter.

    Attributes:
        kind: "×10", "×40": four channels are 10 or 40 times as loud; "log-normal": each channel's loudness is random,
            and its logarithm has the standard deviation LOG_LOUDNESS; "RoPE'd bias": K has a bias of length 20 in four
            pairs of channels, which RoPE rotates from token to token, so that the mean over tokens does not contain it.
        kv_len, q_len, q_heads, kv_heads, head_dim: sizes.
    """

    kind: Loudness
    kv_len: int
    q_len: int = QUERIES
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 128

    @property
    def name(self) -> str:
        """Return the name in tables."""
        kind = f"K {self.kind} in 4 channels" if self.kind.startswith("×") else self.kind
        return f"{kind}, {self.kv_len:,} keys" + _sizes(self.q_heads, self.kv_heads, self.head_dim)

    def draw(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Draw the call in float32; the same device and seed give the same call."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(heads: int, tokens: int) -> Tensor:
            return torch.randn(1, heads, tokens, self.head_dim, generator=generator, device=device)

        query = normal(self.q_heads, self.q_len)
        key, value = normal(self.kv_heads, self.kv_len), normal(self.kv_heads, self.kv_len)
        group = self.q_heads // self.kv_heads
        loudness = torch.ones_like(normal(self.kv_heads, 1))
        channels = _loud_channels(self.head_dim)
        match self.kind:
            case "×10" | "×40":
                loudness[..., channels] = float(self.kind[1:])
            case "log-normal":
                loudness = normal(self.kv_heads, 1).mul(LOG_LOUDNESS).exp()
            case "RoPE'd bias":
                length, half = 20.0, self.head_dim // 2
                angles = torch.arange(self.kv_len, device=device)[:, None] * 1e4 ** (
                    -torch.tensor(channels, device=device) / half
                )
                key[..., channels] += length * angles.cos()
                key[..., [half + channel for channel in channels]] += length * angles.sin()
                query[..., [*channels, *(half + channel for channel in channels)]] /= length
        return Inputs(query / loudness.repeat_interleave(group, 1), key * loudness, value)


def _loud_channels(head_dim: int) -> list[int]:
    """Return four channels of the first half of a head, in which RoPE rotates fast."""
    return [head_dim // 32 * i for i in range(4)]


def _sizes(q_heads: int, kv_heads: int, head_dim: int) -> str:
    heads = "" if q_heads == kv_heads else f", {q_heads} heads share {kv_heads}"
    return heads + ("" if head_dim == 128 else f", d={head_dim}")


Case = Sinks | Loud

_LENGTHS = (8192, 32768, 119056)
_MASSES = (0.5, 0.8, 0.95)

# Every mass, length, number and place; then causal attention, grouped queries, and other sizes of a head.
CASES: tuple[Case, ...] = (
    *(
        Sinks(mass, kv_len, count, place)
        for place in ("front", "middle", "behind")
        for count in (1, 4)
        for kv_len in _LENGTHS
        for mass in _MASSES
    ),
    *(Sinks(mass, kv_len, causal=True) for kv_len in _LENGTHS for mass in _MASSES),
    *(Sinks(0.8, 4096, count, q_len=4096, causal=True) for count in (1, 4)),
    *(
        Sinks(mass, kv_len, place=place, causal=True)
        for place in ("middle", "behind")
        for kv_len in _LENGTHS
        for mass in _MASSES
    ),
    *(Sinks(0.8, 32768, 4, place, causal=True) for place in ("middle", "behind")),
    Sinks(0.8, 4096, place="middle", q_len=4096, causal=True),
    Sinks(0.8, 4096, place="middle", q_len=4096, causal=True, q_heads=8),
    Sinks(0.8, 8192, q_heads=8),
    Sinks(0.8, 4096, q_len=4096, causal=True, q_heads=8),
    Sinks(0.8, 8192, head_dim=64),
    Sinks(0.95, 32768, head_dim=64),
    Sinks(0.8, 8192, loud=10.0),
    *(
        Loud(kind, 8192, head_dim=head_dim)
        for head_dim in (128, 64)
        for kind in ("Gaussian", "×10", "×40", "log-normal", "RoPE'd bias")
    ),
    Loud("×10", 8192, q_heads=8),
)
