"""Tile, warps and pipeline stages of each kernel on each architecture. Measurements: docs/tuning-notes.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # 99 KiB per multiprocessor; other GPUs have 163 and more


@dataclass(frozen=True)
class TileConfig:
    """Launch configuration of a kernel.

    Attributes:
        block_m, block_n: rows and keys per tile.
        num_warps: warps per program.
        num_stages: tiles of K and V in flight.
        maxnreg: cap of registers per thread; None: the compiler's choice.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    @property
    def constants(self) -> dict[str, Any]:
        """Return the arguments and options that `launch` takes."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.maxnreg,
        }


def int8_forward_config(capability: tuple[int, int], head_dim: int, pv: str, masked: bool) -> TileConfig:
    """Return the configuration of `int8_forward`; head_dim is the larger of Q's and V's, rounded up to a power of two.

    On Hopper, several small programs per multiprocessor hide each other's softmax, so registers are capped for three
    programs at head_dim 128 (853 TFLOP/s, 770 without a cap) or four at head_dim 64 (613; 589 with 168 registers).
    float16 P·V needs more registers, and at head_dim 128 half the keys (671; 648 with 128 keys). Elsewhere the tile is
    the largest whose main loop compiles without spills; masks and head_dim 256 need more registers.
    """
    if head_dim > 128:
        return TileConfig(64, 64, 8, 2)
    if masked:
        return TileConfig(64, 64, 4, 2) if capability[0] == 9 or head_dim <= 64 else TileConfig(128, 64, 8, 2)
    if capability[0] == 9:
        if pv == "fp16":
            return TileConfig(64, 128 if head_dim <= 64 else 64, 4, 2)
        if head_dim <= 64:
            return TileConfig(64, 128, 4, 2, 128)
        return TileConfig(64, 128, 4, 2, 168 if pv == "fp8" else None)
    return TileConfig(128, 64, 4 if head_dim <= 64 else 8, 3)


def limit_to_list(config: TileConfig, block_m: int, block_n: int) -> TileConfig:
    """Return a configuration whose tiles lie inside the tiles of a block list, block_m rows by block_n keys."""
    if config.block_m > block_m:
        config = replace(config, block_m=block_m, num_warps=4)
    return replace(config, block_n=min(config.block_n, block_n))


def masked_forward_config(head_dim: int, mask: str) -> TileConfig:
    """Return the configuration of `masked_forward` on Hopper; head_dim is the larger padded head_dim of Q and V.

    128 rows share each tile of a bias (364 µs at 4×16×2048×128, 452 with 64). Without a bias, small programs hide each
    other's softmax. At head_dim 64 more programs with two stages are faster (window at 2,048 keys: 56 µs; 68 with three
    stages); at head_dim 128 two programs have room for three stages (documents at 4,096 keys: 117 µs; 130 with two). At
    larger head_dims, more does not fit.
    """
    if head_dim > 128:
        return TileConfig(64 if mask == "additive" else 128, 64, 8, 2)
    if mask == "additive":
        return TileConfig(128, 64, 8, 3)
    return TileConfig(64, 64, 4, 2 if head_dim <= 64 else 3)


def nonprefix_forward_config(head_dim: int) -> TileConfig:
    """Return the configuration of `nonprefix_forward` on Hopper; head_dim as above: over 128, few rows avoid spills."""
    return TileConfig(64, 64, 8, 2) if head_dim > 128 else masked_forward_config(head_dim, "keys")


def splitkv_forward_config(head_dim: int, rows: int) -> TileConfig:
    """Return the configuration of `splitkv_forward` on Hopper for that many padded rows; head_dim as above.

    Many keys at once hide the latency of memory: one token after 32k keys takes 35 µs, with cuDNN 39. At head_dim 64
    there is room for two programs: 1×64/32 heads over 5,210 keys take 12.8 µs; 15.6 with one program. Without a cap the
    compiler would take 96 registers with a mask, and spill.
    """
    return TileConfig(rows, 128, 4, 3, 255) if head_dim <= 128 else TileConfig(rows, 64, 4, 2)


def nvfp4_forward_config(capability: tuple[int, int], head_dim: int, native: bool) -> TileConfig:
    """Return the configuration of `nvfp4_forward`; head_dim is the larger of Q's and V's, rounded up to a power of two.

    Chosen by machine code, not measured. Native: 128×128 tiles with 8 warps are the only tiles whose loop does not
    spill on sm_120; with 2 stages the next tile would be loaded only after the current tile. Emulated: a program also
    holds decoded K and V, so tiles have 64 keys, and 64 rows on GPUs without wgmma; 8 warps spill nowhere up to
    head_dim 128.
    """
    if head_dim > 128:
        return TileConfig(64, 64, 8, 1)
    if native:
        return TileConfig(128, 128, 8, 3)
    return TileConfig(128 if capability[0] == 9 else 64, 64, 8, 2)


def recent_block_n(channels: int, v_channels: int, element_size: int, masked: bool) -> int:
    """Return how many recent keys `nvfp4_forward` attends to at once.

    They are few whenever heavy keys are few (`common/heavy.py`), and with a mask: on compute capability 10.3 and 12.0
    the loop over recent keys would spill with 32 keys. At head_dim 128 it would spill with 64 keys even without a mask.
    """
    if masked or element_size > 2 or min(channels, v_channels) < 64 or max(channels, v_channels) > 128:
        return 16
    return 64 if max(channels, v_channels) == 64 else 32


def int8_bwd_dkdv_config(capability: tuple[int, int], head_dim: int, int8: bool) -> TileConfig:
    """Return the configuration of `int8_bwd_dkdv`; head_dim as above, `int8`: P and dS are INT8.

    Two float32 gradients of block_n keys stay in registers. On Hopper, block_n is 64 keys for the 128 threads of a
    MMA instruction: smaller programs overlap (5.98 ms with 64 keys, 7.02 with 128; at head_dim 64, 3.68 ms with 128
    queries per tile, 3.95 with 64). Elsewhere the tile is chosen for the fewest instructions in a loop without spills.
    At head_dim 128 in INT8, 3 % of the instructions spill: tiles without spills take 27 % more instructions. Only
    compute capability 8.0 has shared memory for two programs of 4 warps. On 10.x the gradients lie in tensor memory.
    """
    if head_dim > 128:
        small = capability in LITTLE_SHARED_MEMORY or (capability[0] == 10 and not int8)
        return TileConfig(32 if small else 64, 64, 8, 2)
    if capability[0] == 9 or (capability[0] == 10 and int8):
        return TileConfig(128 if capability[0] == 9 and head_dim <= 64 and not int8 else 64, 64, 4, 2)
    if head_dim <= 64 or capability[0] == 10 or int8:
        return TileConfig(64, 128, 8, 2)
    return TileConfig(64, 64, 4 if capability == (8, 0) else 8, 2)


def int8_bwd_dq_config(capability: tuple[int, int], head_dim: int, int8: bool) -> TileConfig:
    """Return the configuration of `int8_bwd_dq`; arguments as above.

    On Hopper, registers are capped for three programs per multiprocessor (4.89 ms, 5.08 without a cap), or four at
    head_dim 64 (2.64 ms, 2.70 without). Elsewhere 128 rows share each tile of K and V; none of these loops spills.
    """
    if head_dim > 128:
        return TileConfig(64, 32 if capability in LITTLE_SHARED_MEMORY else 64, 8, 2)
    if capability[0] == 9:
        return TileConfig(64, 64, 4, 2, 128 if head_dim <= 64 else None if int8 else 168)
    return TileConfig(128, 64, 8, 2)
