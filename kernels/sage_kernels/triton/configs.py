"""Tile, warps and pipeline stages of each kernel on each architecture, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Config:
    """block_m query rows and block_n keys a tile; num_warps warps a program; num_stages tiles of K and V in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    @property
    def constants(self) -> dict[str, Any]:
        """What `launch` gets of it."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.maxnreg,
        }


def int8_forward_config(capability: tuple[int, int], head_dim: int, pv: str, masked: bool) -> Config:
    """Of `int8_forward`; head_dim is the larger one of Q and V, rounded up to a power of two.

    Hopper, measured on an H200 (TFLOP/s of the kernel at 64 heads × 16,384 tokens): several small programs a
    multiprocessor hide each other's softmax, so the registers are capped for three of them (head_dim 128: 853 with 168
    registers, 770 without a cap, 628 with 128×128 tiles) or four (head_dim 64: 613 with 128 registers, 589 with 168).
    float16 P·V needs more registers: 642 without a cap, 575 with one (head_dim 128). Elsewhere the tile is the largest
    whose main loop compiles without spills; masks and head_dim 256 need registers of their own.
    """
    if head_dim > 128:
        return Config(64, 64, 8, 2)
    if masked:
        return Config(64, 64, 4, 2) if capability[0] == 9 or head_dim <= 64 else Config(128, 64, 8, 2)
    if capability[0] == 9:
        if head_dim <= 64:
            return Config(64, 128, 4, 2, 128)
        return Config(64, 128, 4, 2, 168 if pv == "fp8" else None)
    return Config(128, 64, 4 if head_dim <= 64 else 8, 3)


def nvfp4_forward_config(capability: tuple[int, int], head_dim: int, native: bool) -> Config:
    """Of `nvfp4_forward`; head_dim is the larger one of Q and V, rounded up to a power of two.

    No FP4 card was at hand, so the reasons are in the machine code. Native: tiles of 128×128 with 8 warps are the only
    ones whose loop ptxas compiles without spills on sm_120; 3 stages, because with 2 the next tile is asked for when
    this one is done. Emulated: a program holds decoded K and V as well, so tiles have 64 keys, and 64 rows where there
    is no wgmma; 8 warps spill nowhere up to head_dim 128.
    """
    if head_dim > 128:
        return Config(64, 64, 8, 1)
    if native:
        return Config(128, 128, 8, 3)
    return Config(128 if capability[0] == 9 else 64, 64, 8, 2)


def int8_backward_key_config(capability: tuple[int, int], head_dim: int, int8: bool) -> Config:
    return Config(64, 64, 4, 2)


def int8_backward_query_config(capability: tuple[int, int], head_dim: int, int8: bool) -> Config:
    return Config(64, 64, 4, 2)
