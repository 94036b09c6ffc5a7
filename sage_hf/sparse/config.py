"""Settings of sparse self-attention: the router that chooses tiles, how many are kept, and which calls stay dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from sage_hf.patterns import matches

if TYPE_CHECKING:
    from sage_hf.sparse.routers import Router

BLOCK = 128
"""Rows of a block and keys of a tile: the kernel's fastest sizes."""
ROUTERS = ("mean", "subblock", "share")


@dataclass(frozen=True)
class Sparse:
    """Settings of sparse attention in a denoiser's self-attention.

    Attributes:
        router: "mean", "subblock" (`SubBlockRouter`), or "share" (`ShareRouter`, after SpargeAttention).
        keep: for "mean" and "subblock", the share of tiles that each block of rows keeps, without counting `dense`
            tokens; for "share", the bound of the cumulative share of attention weight.
        dense_steps: number of first denoising steps that attend densely.
        dense_layers: patterns of names of layers that attend densely (shell style, as in `LayerRule`).
        from_tokens: calls with fewer tokens attend densely.
        per_head: for "mean" and "subblock": shares differ between a layer's heads, with `keep` as their mean, so that
            all heads keep about as much of their attention weight. The weight is measured in the layer's first sparse
            call.

    Raises:
        ValueError: a value is not supported.
    """

    router: str = "subblock"
    keep: float = 0.25
    dense_steps: int = 0
    dense_layers: tuple[str, ...] = ()
    from_tokens: int = 4096
    per_head: bool = False

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ValueError(f"sparse.router: {self.router!r} is not one of {', '.join(ROUTERS)}")
        if isinstance(self.keep, bool) or not isinstance(self.keep, (int, float)) or not 0 < self.keep <= 1:
            raise ValueError(f"sparse.keep: expected a share in (0, 1], got {self.keep!r}")
        for name in ("dense_steps", "from_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"sparse.{name}: expected an integer that is not negative, got {value!r}")
        if not isinstance(self.per_head, bool) or (self.per_head and self.router == "share"):
            raise ValueError(f'sparse.per_head: expected a bool, and False for "share"; got {self.per_head!r}')
        layers = self.dense_layers
        if not isinstance(layers, tuple) or any(not isinstance(layer, str) or not layer for layer in layers):
            raise ValueError(f"sparse.dense_layers: expected patterns of layer names, got {layers!r}")

    def is_dense(self, layer: str) -> bool:
        """Check whether a pattern of `dense_layers` matches the layer's name."""
        return any(matches(pattern, layer) for pattern in self.dense_layers)

    def describe(self) -> str:
        """Return the settings as one line of text."""
        if self.router == "share":
            choice = f"the tiles with {self.keep:.0%} of the weight, as estimated from block means"
        else:
            choice = f"the {self.keep:.0%} of tiles with the best scores by {self.router}"
        choice += ", shared out among heads by their weight" if self.per_head else ""
        steps = f", after {self.dense_steps} dense steps" if self.dense_steps else ""
        return f"{choice}, in calls of {self.from_tokens} tokens and more{steps}"

    def make_router(self, shares: tuple[float, ...] | None = None) -> Router:
        """Return the router; `shares` of heads replace `keep`."""
        from sage_hf.sparse.routers import MeanRouter, ShareRouter, SubBlockRouter

        if self.router == "share":
            return ShareRouter(self.keep, block_m=BLOCK, block_n=BLOCK)
        kind = MeanRouter if self.router == "mean" else SubBlockRouter
        return kind(self.keep if shares is None else shares, BLOCK, BLOCK)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data that `from_dict` reads back."""
        return asdict(self) | {"dense_layers": list(self.dense_layers)}

    @classmethod
    def from_dict(cls, data: object) -> Sparse:
        """Build settings from plain data.

        Raises:
            ValueError: a key is unknown, or its value is not supported; the message names the key.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(data, Mapping):
            raise ValueError(f"sparse: expected an object with {', '.join(names)}, got {data!r}")
        if unknown := [key for key in data if key not in names]:
            raise ValueError(f"sparse: unknown key {unknown[0]!r}; keys are {', '.join(names)}")
        values = dict(data)
        if isinstance(values.get("dense_layers"), list):
            values["dense_layers"] = tuple(values["dense_layers"])
        return cls(**values)
