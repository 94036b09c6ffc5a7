"""Time of a provider's calls of any size: a formula with fitted weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..spec.layout import ceil_div

ItemOrder = Literal["waves", "queue", "split"]
Regime = Literal["", "few queries", "behind a cache"]
"""Calls whose times follow curves of their own: steps of decoding, and causal calls behind a cache (`regime_of`)."""
NOMINAL_WIDTH = 128
RAGGED_KEYS = 8
"""Keys whose scores fill 16 bytes of a row: kernels take longer for a number of keys that is no multiple of this."""


@dataclass(frozen=True)
class CallSizes:
    """Sizes of a call; `kv_heads` divides `q_heads`."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int


@dataclass(frozen=True)
class ItemSchedule:
    """Division of a call among the GPU's multiprocessors.

    A call consists of items of `rows` queries of one head; each item reads tiles of `keys` keys; `slots` items run at
    once.

    Attributes:
        order: "waves": items begin when all items before them have ended; "queue": an item begins when any has ended;
            "split": items also share the keys of the same queries.
        packs: queries of all heads that share keys fill an item's rows together.
        widths: head_dims to which the kernel pads, in ascending order.
    """

    rows: int
    keys: int
    slots: int
    order: ItemOrder
    packs: bool
    widths: tuple[int, ...]


class CostWeights(NamedTuple):
    """Microseconds for each unit of work. Weights per width are for a head_dim of NOMINAL_WIDTH once it is padded.

    Attributes:
        launch: the call.
        queries, keys: a thousand tokens over heads and batch, per width.
        item, wide_item: a round of items; the latter per width.
        tile, wide_tile: a round of tiles; the latter per width.
        ragged: a round of tiles with a ragged number of keys, per width.
        score: reading a mask of a million scores.
    """

    launch: float = 0.0
    queries: float = 0.0
    keys: float = 0.0
    item: float = 0.0
    wide_item: float = 0.0
    tile: float = 0.0
    wide_tile: float = 0.0
    ragged: float = 0.0
    score: float = 0.0


@dataclass(frozen=True)
class CostCurve:
    """Time of one provider's calls with one kind of mask, in one regime: the work of a call times the weights.

    Attributes:
        provider: a recipe with its kernels, an exact kernel, or a backend of PyTorch, as `cost_model` names them.
        mask: the kind of mask, as in `call.Mask`.
        causal: whether the calls are causal.
        head_dims: smallest and largest head_dim of the calls.
        error: standard deviation of the logarithm of the measured times from the formula's.
        regime: the regime of the calls.
    """

    provider: str
    mask: str
    causal: bool
    head_dims: tuple[int, int]
    schedule: ItemSchedule
    weights: CostWeights
    error: float = 0.0
    regime: Regime = ""

    def us(self, sizes: CallSizes) -> float:
        """Return the time of a call in microseconds."""
        return sum(w * one for w, one in zip(self.weights, work(sizes, self.causal, self.schedule), strict=True))


def work(sizes: CallSizes, causal: bool, schedule: ItemSchedule) -> CostWeights:
    """Return the work of a call, in the units of the weights."""
    group = sizes.q_heads // sizes.kv_heads if schedule.packs else 1
    items = sizes.batch * (sizes.q_heads // group) * ceil_div(sizes.q_len * group, schedule.rows)
    load, tiles, seen = items / schedule.slots, float(ceil_div(sizes.kv_len, schedule.keys)), 1.0
    rounds = float(math.ceil(load)) if schedule.order == "waves" else max(1.0, load)
    if causal:
        # On average, a row sees half of the last q_len keys and all keys before them; the longest rows run first.
        unseen = (min(sizes.q_len, sizes.kv_len) - min(schedule.rows / group, sizes.q_len)) / 2.0
        seen -= unseen / max(sizes.kv_len, 1)
    if schedule.order == "split":
        worked = max(1.0, load * tiles * seen)
    else:
        worked = max(tiles, load * tiles * seen) if causal else rounds * tiles
    width = next((one for one in schedule.widths if sizes.head_dim <= one), sizes.head_dim) / NOMINAL_WIDTH
    return CostWeights(
        launch=1.0,
        queries=sizes.batch * sizes.q_heads * sizes.q_len * width * 1e-3,
        keys=sizes.batch * sizes.kv_heads * sizes.kv_len * width * 1e-3,
        item=rounds,
        wide_item=rounds * width,
        tile=worked,
        wide_tile=worked * width,
        ragged=worked * width if sizes.kv_len % RAGGED_KEYS else 0.0,
        score=sizes.q_len * sizes.kv_len * 1e-6,
    )
