"""`sage2` on Hopper: the operands of `triton.int8_forward`, attended to by `int8_forward.cu`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..recipe import get_recipe
from ..triton import calls
from ..triton.int8_forward import Int8Operands, quantize_operands
from ..triton.mask_tiles import MaskTiles
from ..triton.sequences import Sequences, ceil_div
from . import jit

SOURCE = "int8_forward.cu"
L2_BYTES = 32 * 2**20  # of the cache's 50 MiB, for the keys and values that blocks read at the same time


@dataclass(frozen=True)
class Config:
    """A kernel's compile-time choices; their meaning is in int8_forward.cu."""

    HEAD_DIM: int
    BLOCK_N: int
    WARPGROUPS: int
    PING_PONG: int
    LEAD: int
    WAIT_AT: int
    SUMMED_TILES: int

    @property
    def block_m(self) -> int:
        """Query rows of an item."""
        return 64 * self.WARPGROUPS

    @property
    def shared_bytes(self) -> int:
        """Two tiles of Q, K and V, and the float32 sums."""
        return (6 * self.block_m + 4 * self.BLOCK_N) * self.HEAD_DIM


def int8_forward_config(channels: int) -> Config:
    """Of heads with so many channels, 64 or 128."""
    if channels == 64:
        return Config(64, 128, 3, 0, LEAD=3, WAIT_AT=4, SUMMED_TILES=24)
    return Config(128, 96, 3, 1, LEAD=1, WAIT_AT=1, SUMMED_TILES=32)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ops.attention` of `sage2` without a mask; arguments as of `triton.int8_forward.attention`."""
    return calls.attention(_attend, (0, 0), query, key, value, **call)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    q_sequences: Sequences,
    kv_sequences: Sequences,
    *,
    tiles: MaskTiles | None,
    **call: Any,
) -> None:
    operands = quantize_operands(
        query, key, value, get_recipe("sage2"), q_sequences, kv_sequences, return_lse=lse is not None
    )
    forward(operands, output, lse, kv_sequences.tokens, **call)


def forward(
    operands: Int8Operands,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    kv_len: int,
    *,
    scale: float,
    is_causal: bool,
    causal_offset: int,
    config: Config | None = None,
) -> None:
    """Attention of quantised operands.

    Args:
        operands: of `sage2`, with 64 or 128 channels in Q, K and V.
        output: float16 or bfloat16 (batch, q_heads, q_len, v_head_dim), channels contiguous, written.
        lse: float32 (batch, q_heads, q_len), contiguous, written; or None.
        kv_len: keys that exist.
        scale, is_causal, causal_offset: see `ops.attention`.
        config: default `int8_forward_config`'s.
    """
    batch, q_heads, q_len, _ = output.shape
    kv_heads, kv_rows, channels = operands.key.shape[1:]
    q_rows = operands.query.shape[2]
    config = config or int8_forward_config(channels)
    items = batch * q_heads * ceil_div(q_len, config.block_m)
    device = output.device
    width = next(width for width in (128, 64, 32) if config.BLOCK_N % width == 0)
    jit.launch(
        SOURCE,
        "int8_forward",
        asdict(config)
        | {
            "CAUSAL": int(is_causal),
            "PADDED": 0,
            "LSE": int(lse is not None),
            "OUTPUT_FLOAT16": int(output.dtype == torch.float16),
        },
        (min(items, torch.cuda.get_device_properties(device).multi_processor_count),),
        (128 * (config.WARPGROUPS + 1),),
        config.shared_bytes,
        (
            jit.tensor_map(operands.query.view(-1, channels), (64, channels), channels),
            jit.tensor_map(operands.key.view(-1, channels), (config.BLOCK_N, channels), channels),
            jit.tensor_map(operands.value.view(-1, kv_rows), (channels, width), width),
            jit.tensor_map(output, (1, 1, 64, 64), 128),
            (
                operands.query_scale,
                operands.key_scale,
                operands.value_scale,
                operands.value_mean,
                operands.mean_score,
                None,
                None,
                lse,
                jit.Int64(0),
                jit.Int64(0),
                batch,
                q_heads,
                kv_heads,
                q_len,
                kv_len,
                q_rows,
                kv_rows,
                causal_offset,
                max(1, L2_BYTES // (2 * kv_rows * channels)) * (q_heads // kv_heads),
                float(scale),
            ),
        ),
        device,
    )
