"""`sage2` on Hopper: the operands of `triton.int8_forward`, attended to by `int8_forward.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..recipe import get_recipe
from ..triton import calls
from ..triton.int8_forward import Int8Operands, quantize_operands
from ..triton.mask_tiles import MaskTiles
from ..triton.sequences import Sequences, ceil_div
from . import jit, quantize

SOURCE = "int8_forward.cu"
L2_BYTES = 32 * 2**20  # of the cache's 50 MiB, for the keys and values that blocks read at the same time


BLOCK_M = 64  # query rows of a block of the grid
STAGES = 2  # of K and V


@dataclass(frozen=True)
class Config:
    """Of heads with `head_dim` channels, 64 or 128: `block_n` keys a tile, `resident` blocks a multiprocessor."""

    head_dim: int
    block_n: int
    resident: int

    @property
    def shared_bytes(self) -> int:
        """Q, tiles of K and V, barriers."""
        return (BLOCK_M + 2 * STAGES * self.block_n) * self.head_dim + 1024

    @property
    def v_width(self) -> int:
        """Keys of V that lie side by side in shared memory."""
        return next(width for width in (128, 64, 32) if self.block_n % width == 0)

    def macros(self, is_causal: bool, return_lse: bool, dtype: torch.dtype) -> dict[str, int]:
        """The compile-time constants of int8_forward.cu."""
        return {
            "HEAD_DIM": self.head_dim,
            "BLOCK_N": self.block_n,
            "RESIDENT": self.resident,
            "SUMMED_TILES": SUMMED_KEYS // self.block_n,
            "CAUSAL": int(is_causal),
            "LSE": int(return_lse),
            "OUTPUT_FLOAT16": int(dtype == torch.float16),
        }


CONFIGS = {64: Config(64, 128, 3), 128: Config(128, 96, 3)}
SUMMED_KEYS = 2304  # whose products are summed in the matrix units: a multiple of 2 · block_n


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ops.attention` of `sage2` without a mask; arguments as of `triton.int8_forward.attention`."""
    return calls.attention(_attend, (0, 0), query, key, value, mask=None, **call)


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
    return_lse = lse is not None
    if quantize.serves(query, key, value):
        operands = quantize.quantize_operands(query, key, value, return_lse=return_lse)
    else:
        recipe = get_recipe("sage2")
        operands = quantize_operands(query, key, value, recipe, q_sequences, kv_sequences, return_lse=return_lse)
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
) -> None:
    """Attention of quantised operands. The kernel starts while the last one of the stream ends, and waits for it.

    Args:
        operands: of `sage2`, with 64 or 128 channels in Q, K and V.
        output: float16 or bfloat16 (batch, q_heads, q_len, v_head_dim), channels contiguous, other strides multiples
            of 8, written.
        lse: float32 (batch, q_heads, q_len), contiguous, written; or None.
        kv_len: keys that exist.
        scale, is_causal, causal_offset: see `ops.attention`.

    Raises:
        CompileError: see `jit.launch`.
    """
    batch, q_heads, q_len, _ = output.shape
    kv_heads, kv_rows, channels = operands.key.shape[1:]
    config = CONFIGS[channels]
    width = config.v_width
    values = operands.value.view(-1, kv_rows // width, width).transpose(0, 1)
    device = output.device
    jit.launch(
        SOURCE,
        "int8_forward",
        config.macros(is_causal, lse is not None, output.dtype),
        (batch * q_heads * ceil_div(q_len, BLOCK_M),),
        (128,),
        config.shared_bytes,
        (
            jit.tensor_map(operands.query.view(-1, channels), (BLOCK_M, channels), channels),
            jit.tensor_map(operands.key.view(-1, channels), (config.block_n, channels), channels),
            jit.tensor_map(values, (config.block_n // width, channels, width), width),
            jit.tensor_map(output, (1, 1, BLOCK_M, 64), 128),
            (
                operands.query_scale,
                operands.key_scale,
                operands.value_scale,
                operands.value_mean,
                operands.mean_score,
                lse,
                batch,
                q_heads,
                kv_heads,
                q_len,
                kv_len,
                operands.query.shape[2],
                kv_rows,
                causal_offset,
                max(1, L2_BYTES // (2 * kv_rows * channels)) * (q_heads // kv_heads),
                float(scale),
            ),
        ),
        device,
        dependent=True,
    )
