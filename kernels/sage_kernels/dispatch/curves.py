"""Time of a runner's calls of any size: a formula with fitted weights, for each head_dim that was measured."""

from __future__ import annotations

from dataclasses import dataclass


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

    A call is `items` of `rows` queries of one head, of which `slots` run at once, each over tiles of `keys` keys:

        launch + token · (queries + keys) + rounds · (item + tile · tiles) + score · scores

    in microseconds, where `rounds` are items / slots, at least 1, rounded up if `whole`; queries and keys are counted
    over heads and batch, in thousands; scores, of one head and batch element, in millions.

    Attributes:
        head_dim: of the calls that were measured.
        error: standard deviation of the logarithm of the measured times from the formula's.
    """

    runner: str
    head_dim: int
    mask: str
    causal: bool
    rows: int
    keys: int
    slots: int
    whole: bool
    launch: float
    token: float
    item: float
    tile: float
    score: float
    error: float = 0.0

    @property
    def kind(self) -> tuple[str, str, bool, int]:
        """Return runner, mask, causality and head_dim."""
        return self.runner, self.mask, self.causal, self.head_dim

    def us(self, sizes: Sizes) -> float:
        """Return the time of a call in microseconds."""
        weights = (self.launch, self.token, self.item, self.tile, self.score)
        found = features(sizes, self.causal, self.rows, self.keys, self.slots, self.whole)
        return sum(w * f for w, f in zip(weights, found, strict=True))


@dataclass(frozen=True)
class Between:
    """Time of one runner's calls of a head_dim that lies `share` of the way between two that were measured.

    Attributes:
        below, above: curves of the head_dims measured.
    """

    below: Curve
    above: Curve
    share: float

    @property
    def runner(self) -> str:
        """Return whose time it is."""
        return self.above.runner

    def us(self, sizes: Sizes) -> float:
        """Return the time of a call in microseconds."""
        return (1.0 - self.share) * self.below.us(sizes) + self.share * self.above.us(sizes)


def features(
    sizes: Sizes, causal: bool, rows: int, keys: int, slots: int, whole: bool
) -> tuple[float, float, float, float, float]:
    """Return what the weights of a `Curve` are multiplied by: (1, tokens, rounds, rounds · tiles, scores)."""
    q_len, kv_len = sizes.q_len, sizes.kv_len
    items = sizes.batch * sizes.q_heads * -(-q_len // rows)
    rounds = float(-(-items // slots)) if whole else max(1.0, items / slots)
    tiles = -(-kv_len // keys)
    worked = rounds * tiles
    if causal:
        # A row sees half of the last q_len keys and all before them; the longest rows are worked through first.
        seen = 1.0 - (min(q_len, kv_len) - min(rows, q_len)) / (2.0 * kv_len)
        worked = max(items / slots * tiles * seen, tiles)
    tokens = sizes.batch * (sizes.q_heads * q_len + 2 * sizes.kv_heads * kv_len) * 1e-3
    return 1.0, tokens, rounds, worked, q_len * kv_len * 1e-6
