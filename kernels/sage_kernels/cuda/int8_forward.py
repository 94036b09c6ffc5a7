"""INT8 attention on Hopper: operands of `quantize`, or of `triton.int8_forward`, attended to by `int8_forward.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..exact import key_mask
from ..recipe import Recipe
from ..saved import Saved
from ..triton import calls, int8_forward, int8_training
from ..triton.int8_forward import PV_OF_DTYPE, Int8Operands
from ..triton.key_padding import KeyPadding
from ..triton.mask_tiles import MaskTiles
from ..triton.sequences import Sequences, ceil_div
from . import jit, quantize

SOURCE = "int8_forward.cu"
L2_BYTES = 32 * 2**20  # of the cache's 50 MiB, for the keys and values that blocks read at the same time


STAGES = 2  # of Q, K and V
SUMMED_KEYS = 1536  # whose products are summed in the matrix units: as accurate as 128 where V keeps a small mean
LONG = 8192  # keys
# Keys from which on, up to LONG, Q's quantisation hides behind them in the kernel of `sage2` (end to end, 4×32×4096×64:
# 508 against 498 TFLOP/s, ×128: 738 against 727; 2×30×17776×64: 608 against 610). With P·V in float16 and 64 channels
# the compiler has too few registers for it, and waits for each matrix product.
MEDIUM = 2048


@dataclass(frozen=True)
class Config:
    """Of heads with `head_dim` channels, 64 or 128, blocks of two or three warpgroups that attend to 64 rows each, and
    P·V in e4m3 ("fp8") or float16 ("fp16"). `padded`: keys may not exist.

    With 128 channels two are faster up to `LONG` keys (4×32×4096: 899 against 863 TFLOP/s), then three (2×32×16384: 954
    against 942; 1×24×119056: 963 against 928), but as fast with causality (906, 908); with 64 channels three are (631
    against 557; in float16 2×32×8192: 550, 509). 96 keys a tile is as many as a thread's 160 registers hold when there
    are three, beside 128 channels or float16 weights.
    """

    head_dim: int
    warpgroups: int
    pv: str
    padded: bool

    @classmethod
    def of(cls, head_dim: int, pv: str, kv_len: int, is_causal: bool, padded: bool) -> Config:
        """The fastest one."""
        if head_dim == 128:
            return cls(head_dim, 2 if padded or pv == "fp16" or is_causal or kv_len < LONG else 3, pv, padded)
        return cls(head_dim, 2 if padded and pv == "fp16" else 3, pv, padded)

    @property
    def block_m(self) -> int:
        """Query rows of an item."""
        return 64 * self.warpgroups

    @property
    def block_n(self) -> int:
        """Keys a tile; a multiple of 64 where tiles need not begin with the first key."""
        return 96 if self.warpgroups == 3 and (self.head_dim == 128 or self.pv == "fp16") else 128

    @property
    def shared_bytes(self) -> int:
        """Tiles of Q, K and V, and the float32 sums, or the outputs."""
        value, sums = (2, 2) if self.pv == "fp16" else (1, 4)
        return (STAGES * (self.block_m + (1 + value) * self.block_n) + sums * self.block_m) * self.head_dim

    def macros(
        self, is_causal: bool, return_lse: bool, dtype: torch.dtype, quantizes_query: bool = False
    ) -> dict[str, int]:
        """The compile-time constants of int8_forward.cu."""
        return {
            "CHANNELS": self.head_dim,
            "WARPGROUPS": self.warpgroups,
            "BLOCK_N": self.block_n,
            "PV_FLOAT16": int(self.pv == "fp16"),
            "SUMMED_TILES": SUMMED_KEYS // self.block_n,
            "CAUSAL": int(is_causal),
            "PADDED": int(self.padded),
            "LSE": int(return_lse),
            "FLOAT16": int(dtype == torch.float16),
            "QUANTIZES_QUERY": int(quantizes_query),
        }


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    recipe: Recipe,
    **call: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`ops.attention` of `sage1` or `sage2`; arguments as of `triton.int8_forward.attention`.

    Without the LSE, rows of `sage2` are divided by the sums of their weights in e4m3, else by sums in float32.

    Args:
        mask: None, or one that only says which keys exist.
    """
    attend = partial(_attend, recipe=recipe, valid=key_mask(mask, key.shape[2]))
    return calls.attention(attend, (0, 0), query, key, value, mask=None, **call)


def training_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **call: Any
) -> tuple[torch.Tensor, Saved]:
    """`int8_training.training_attention` of a recipe with P·V in float16, without lengths."""
    return int8_training.training_attention(
        query, key, value, **call, quantize=_quantize_operands, attend=_attend_operands
    )


def _quantize_operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe,
    q_sequences: Sequences,
    kv_sequences: Sequences,
    valid: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Int8Operands:
    """As `triton.int8_forward.quantize_operands`, which takes what `quantize` does not serve."""
    if valid is None and quantize.serves(query, key, value):
        return quantize.quantize_operands(query, key, value, pv=recipe.pv, return_lse=return_lse)
    return int8_forward.quantize_operands(
        query, key, value, recipe, q_sequences, kv_sequences, valid, return_lse=return_lse
    )


def _attend_operands(
    operands: Int8Operands,
    output: torch.Tensor,
    lse: torch.Tensor,
    q_sequences: Sequences,
    kv_sequences: Sequences,
    *,
    tiles: MaskTiles | None,
    padding: KeyPadding | None,
    capability: tuple[int, int],
    **call: Any,
) -> None:
    forward(operands, output, lse, kv_sequences.tokens, padding=padding, **call)


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
    recipe: Recipe,
    valid: torch.Tensor | None,
    is_causal: bool,
    **call: Any,
) -> None:
    padding = None if valid is None else KeyPadding.of(valid)
    plain = recipe.pv == "fp8" and padding is None and lse is None and not is_causal
    if plain and MEDIUM <= key.shape[2] < LONG and quantize.serves(query, key, value):
        operands = quantize.quantize_operands(query, key, value, pv=recipe.pv, leaves_query=True)
    else:
        mask = None if padding is None else padding.valid
        operands = _quantize_operands(query, key, value, recipe, q_sequences, kv_sequences, mask, lse is not None)
    forward(operands, output, lse, kv_sequences.tokens, is_causal=is_causal, padding=padding, **call)


def forward(
    operands: Int8Operands,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    kv_len: int,
    *,
    scale: float,
    is_causal: bool,
    causal_offset: int,
    padding: KeyPadding | None = None,
) -> None:
    """Attention of quantised operands. The kernel starts while the last one of the stream ends, and waits for it.

    Args:
        operands: of `sage1` or `sage2`, with 64 or 128 channels in Q, K and V; Q may be as `quantize` leaves it, where
            there is neither an LSE nor padding, and the stream's last kernel has not written it.
        output: float16 or bfloat16 (batch, q_heads, q_len, v_head_dim), channels contiguous, other strides multiples
            of 8, written.
        lse: float32 (batch, q_heads, q_len), contiguous, written; or None.
        kv_len: keys.
        scale, is_causal, causal_offset: see `ops.attention`.
        padding: which keys exist; None: all.

    Raises:
        CompileError: see `jit.launch`.
    """
    batch, q_heads, q_len, _ = output.shape
    kv_heads, kv_rows, channels = operands.key.shape[1:]
    config = Config.of(channels, PV_OF_DTYPE[operands.value.dtype], kv_len, is_causal, padding is not None)
    if config.pv == "fp16":
        value = jit.tensor_map(operands.value.view(-1, kv_rows, channels), (1, config.block_n, 64), 128)
    else:
        width = 128 if config.block_n % 128 == 0 else 32  # keys of V that lie side by side in shared memory
        value = jit.tensor_map(operands.value.view(-1, kv_rows), (channels, width), width)
    items = batch * q_heads * ceil_div(q_len, config.block_m)
    device, query = output.device, operands.query
    leaves_query = query.dtype != torch.int8
    queries: jit.Argument
    if leaves_query:
        queries = quantize.tokens(query)
    else:
        queries = jit.tensor_map(query.view(-1, channels), (64, channels), channels)
    jit.launch(
        SOURCE,
        "int8_forward",
        config.macros(is_causal, lse is not None, output.dtype, leaves_query),
        (min(items, torch.cuda.get_device_properties(device).multi_processor_count),),
        (128 * (config.warpgroups + 1),),
        config.shared_bytes,
        (
            queries,
            jit.tensor_map(operands.key.view(-1, channels), (config.block_n, channels), channels),
            value,
            jit.tensor_map(output, (1, 1, 64, 64), 128),
            (
                operands.query_scale,
                operands.key_scale,
                operands.value_scale,
                operands.value_mean,
                operands.mean_score,
                lse,
                None if padding is None else padding.valid,
                None if padding is None else padding.spans,
                batch,
                q_heads,
                kv_heads,
                q_len,
                kv_len,
                query.shape[2],
                kv_rows,
                causal_offset,
                max(1, L2_BYTES // (2 * kv_rows * channels)) * (q_heads // kv_heads),
                *((0, 0) if padding is None else padding.strides),
                query.shape[3],
                float(scale),
            ),
        ),
        device,
        dependent=True,
    )
