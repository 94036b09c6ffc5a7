"""Time of a runner's calls of any size: a formula with fitted weights, corrected by the calls that were measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

KEYS = 64
"""Keys of a tile, in which `Curve` counts."""

# Calls are alike whose sizes differ by less than about REACH octaves.
REACH, FARTHEST = 0.4, 1.6
RAGGED = 0.3  # octaves between calls with whole tiles of keys and others
NO_CORRECTION = 0.05  # weight of the formula beside the calls measured
MOST_CORRECTIONS = 1024  # that a curve remembers


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; `kv_heads` divides `q_heads`."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int


@dataclass(frozen=True)
class Curve:
    """Time of one runner's calls with one kind of mask.

    A call is `items` of `rows` queries of one head, of which `slots` run at once, each over tiles of `KEYS` keys:

        launch + token · (queries + keys) + rounds · (item + tile · tiles) + score · scores

    in microseconds, where `rounds` are items / slots, at least 1, rounded up if `whole`; queries and keys are counted
    over heads and batch, in thousands; scores, of one head and batch element, in millions.

    Attributes:
        head_dim: of the calls that were measured; the curve also serves smaller ones, down to the next curve's.
        error: largest relative error at the points it was fitted to.
        measured: (batch, q_heads, kv_heads, q_len, kv_len) of calls, each with its time relative to the formula's.
    """

    runner: str
    head_dim: int
    mask: str
    causal: bool
    rows: int
    slots: int
    whole: bool
    launch: float
    token: float
    item: float
    tile: float
    score: float
    error: float = 0.0
    measured: tuple[tuple[int, int, int, int, int, float], ...] = ()

    def us(self, sizes: Sizes) -> float:
        """Return the time of a call in microseconds."""
        return self.formula(sizes) * self._correction(sizes)

    def formula(self, sizes: Sizes) -> float:
        """Return the time of a call in microseconds by the formula alone."""
        weights = (self.launch, self.token, self.item, self.tile, self.score)
        return sum(
            w * f for w, f in zip(weights, features(sizes, self.causal, self.rows, self.slots, self.whole), strict=True)
        )

    def _correction(self, sizes: Sizes) -> float:
        """Return the mean of the measured calls' factors, each by how near it is in size; far from all of them 1.

        A call that was itself measured has its own.
        """
        if (found := self._corrections.get(sizes)) is not None:
            return found
        queries, keys, *others = _place(sizes)
        total, weight = 0.0, NO_CORRECTION
        for (other_queries, other_keys, *rest), logarithm in self._places:
            if abs(queries - other_queries) < FARTHEST and abs(keys - other_keys) < FARTHEST:
                distance = (queries - other_queries) ** 2 + (keys - other_keys) ** 2
                distance += sum((one - other) ** 2 for one, other in zip(others, rest, strict=True))
                if distance == 0.0:
                    total, weight = logarithm, 1.0
                    break
                near = math.exp(-distance / (2.0 * REACH**2)) if distance < FARTHEST**2 else 0.0
                total, weight = total + near * logarithm, weight + near
        if len(self._corrections) >= MOST_CORRECTIONS:
            self._corrections.clear()
        self._corrections[sizes] = math.exp(total / weight)
        return self._corrections[sizes]

    @cached_property
    def _corrections(self) -> dict[Sizes, float]:
        return {}

    @cached_property
    def _places(self) -> list[tuple[tuple[float, ...], float]]:
        return [
            (_place(Sizes(batch, q_heads, kv_heads, q_len, kv_len, self.head_dim)), math.log(factor))
            for batch, q_heads, kv_heads, q_len, kv_len, factor in self.measured
        ]


def _place(sizes: Sizes) -> tuple[float, float, float, float, float]:
    """Return where a call lies among others, in octaves of its sizes: queries, keys, and what matters less."""
    # Few kernels mind heads and batch apart, or how many heads share keys; all mind whether tiles of keys are whole.
    rest = 0.0 if sizes.kv_len % KEYS == 0 else 1.0 if sizes.kv_len % 8 == 0 else 2.0
    return (
        math.log2(sizes.q_len),
        math.log2(sizes.kv_len),
        math.log2(sizes.batch * sizes.q_heads),
        0.5 * math.log2(sizes.q_heads / sizes.kv_heads),
        RAGGED * rest,
    )


def features(
    sizes: Sizes, causal: bool, rows: int, slots: int, whole: bool
) -> tuple[float, float, float, float, float]:
    """Return what the weights of a `Curve` are multiplied by: (1, tokens, rounds, rounds · tiles, scores)."""
    q_len, kv_len = sizes.q_len, sizes.kv_len
    items = sizes.batch * sizes.q_heads * -(-q_len // rows)
    rounds = float(-(-items // slots)) if whole else max(1.0, items / slots)
    tiles = -(-kv_len // KEYS)
    worked = rounds * tiles
    if causal:
        # A row sees half of the last q_len keys and all before them; the longest rows are worked through first.
        seen = 1.0 - (min(q_len, kv_len) - min(rows, q_len)) / (2.0 * kv_len)
        worked = max(items / slots * tiles * seen, tiles)
    tokens = sizes.batch * (sizes.q_heads * q_len + 2 * sizes.kv_heads * kv_len) * 1e-3
    return 1.0, tokens, rounds, worked, q_len * kv_len * 1e-6
