"""The grid's calls as measured costs, by which a table knows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sage_hf.bench.fit_costs import Measured
from sage_kernels import costs
from sage_kernels.curves import Sizes

RUNNERS = {"cudnn": "cudnn", "sdpa_fa2": "flash", "sdpa_efficient": "efficient", "fa3": "fa3"}
"""A table's names of the grid's providers."""
MASKS = {"none": "none", "causal": "none", "lower_right": "none", "lengths": "keys", "bias": "additive"}
"""A table's kinds of the grid's masks; times beside others depend on which tiles they hide."""
PADDED, LAUNCH_US = "fa3_padded", 1.3
"""FlashAttention 3 beside a mask of keys: what the grid gives lengths, and a launch that finds them."""
BESIDE_LENGTHS = ("cudnn", "efficient", PADDED)
BEHIND_A_CACHE = ("flash", "fa3")
"""Runners whose calls have the time measured: PyTorch's others are given a mask there."""


def measured_on_grid(rows: Iterable[Mapping[str, Any]]) -> Iterator[Measured]:
    """Return what the rows of a grid's result tell of the costs of runners.

    Of training, those where low bits ran: few other calls of low bits are known that the rest could be compared to.

    Args:
        rows: as of `measure_grid.run`.
    """
    for row in rows:
        if "ours_ms" not in row or row["mask"] not in MASKS:
            continue
        if row["direction"] == "forward_backward" and row["recipe"] == "exact":
            continue
        sizes = Sizes(*(row[name] for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")))
        causal, training = row["mask"] in ("causal", "lower_right"), row["direction"] == "forward_backward"
        us = {RUNNERS[name]: 1e3 * ms for name, ms in row["others_ms"].items() if name in RUNNERS}
        if row["mask"] == "lengths" and "fa3" in us and row["q_len"] >= costs.DECODED_QUERIES:  # below it divides keys
            us[PADDED] = us["fa3"] + LAUNCH_US
        allowed = {"lengths": BESIDE_LENGTHS, "lower_right": BEHIND_A_CACHE}.get(row["mask"], tuple(us))
        us = {name + costs.TRAINING * training: time for name, time in us.items() if name in allowed}
        if name := _our_runner(row, training):
            us[name] = 1e3 * row["ours_ms"]
        mask = MASKS[row["mask"]]
        kind = mask if training else costs.kind_of(mask, causal, sizes)
        for name, time in us.items():
            yield Measured(name, kind, causal, sizes, time)


def _our_runner(row: Mapping[str, Any], training: bool) -> str:
    """Return the name of what ran for ours; "" for PyTorch's attention, which may take another backend than others."""
    if row["recipe"] == "exact":
        return "" if row["kernel"].startswith("sdpa") else row["kernel"]
    phases = row["recipe"], row["kernel"], row["quantizer"]
    return costs.training_runner(*phases, row["backward"]) if training else costs.low_bit_runner(*phases)
