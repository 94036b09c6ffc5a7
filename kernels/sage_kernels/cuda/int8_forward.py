"""INT8 attention on Hopper: operands of `quantize`, or of `triton.int8_forward`, attended to by `int8_forward.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ..call import Call
from ..layout import ceil_div
from ..operands import PV_OF_DTYPE, Int8Operands, KeyPadding, Saved
from ..registry import Quantizer
from ..saving import saving
from . import quantize
from .launch import Argument, launch, tensor_map

SOURCE = "int8_forward.cu"
L2_BYTES = 32 * 2**20  # of the cache's 50 MiB, for the keys and values that blocks read at the same time


STAGES = 2  # of Q, K and V
SUMMED_KEYS = 1536  # whose products are summed in the matrix units: as accurate as 128 where V keeps a small mean
LONG_KV_LEN = 8192  # keys
# Keys from which on, up to LONG_KV_LEN, Q's quantisation hides behind them in the kernel of `sage2` (end to end,
# 4×32×4096×64: 508 against 498 TFLOP/s, ×128: 738 against 727; 2×30×17776×64: 608 against 610). With P·V in float16 and
# 64 channels the compiler has too few registers for it, and waits for each matrix product.
MEDIUM_KV_LEN = 2048


@dataclass(frozen=True)
class Config:
    """Of heads with `head_dim` channels, 64 or 128, blocks of two or three warpgroups that attend to 64 rows each, and
    P·V in e4m3 ("fp8") or float16 ("fp16"). `padded`: keys may not exist.

    With 128 channels two are faster up to `LONG_KV_LEN` keys (4×32×4096: 899 against 863 TFLOP/s), then three
    (2×32×16384: 954 against 942; 1×24×119056: 963 against 928), but as fast with causality (906, 908); with 64 channels
    three are (631 against 557; in float16 2×32×8192: 550, 509). 96 keys a tile is as many as a thread's 160 registers
    hold when there are three, beside 128 channels or float16 weights.
    """

    head_dim: int
    warpgroups: int
    pv: str
    padded: bool

    @classmethod
    def of(cls, head_dim: int, pv: str, kv_len: int, is_causal: bool, padded: bool) -> Config:
        """The fastest one."""
        if head_dim == 128:
            return cls(head_dim, 2 if padded or pv == "fp16" or is_causal or kv_len < LONG_KV_LEN else 3, pv, padded)
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


def attend(call: Call, quantizer: Quantizer) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (output, lse or None) of a call that `registration.HopperForward` serves.

    Without the LSE, rows of P in e4m3 are divided by the sums of their rounded weights, else by sums in float32.
    """
    output, lse = call.new_outputs()
    if not call.is_empty:
        _quantize_and_attend(call.for_kernel(), quantizer, output, lse)
    return output, lse


def attend_and_save(call: Call, quantizer: Quantizer) -> tuple[torch.Tensor, Saved]:
    """Return the output, 0 in rows without a key, and what its gradients need."""
    return saving(call, partial(_quantize_and_attend, quantizer=quantizer))


def _quantize_and_attend(
    call: Call, quantizer: Quantizer, output: torch.Tensor, lse: torch.Tensor | None
) -> Int8Operands:
    padding = None if call.mask.valid is None else quantizer.read_padding(call.mask.valid)
    plain = call.recipe.pv == "fp8" and padding is None and lse is None and not call.is_causal
    if plain and quantizer.name == "int8_quantize_hopper" and MEDIUM_KV_LEN <= call.kv_len < LONG_KV_LEN:
        operands = quantize.quantize_operands(call, leaves_query=True)
    else:
        operands = quantizer.quantize(call, None if padding is None else padding.valid)
    forward(operands, output, lse, call, padding)
    return operands


def forward(
    operands: Int8Operands,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    call: Call,
    padding: KeyPadding | None = None,
) -> None:
    """Attend to quantised operands. The kernel starts while the last one of the stream ends, and waits for it.

    Args:
        operands: with 64 or 128 channels in Q, K and V; Q may be as `quantize` leaves it, where there is neither an LSE
            nor padding, and the stream's last kernel has not written it.
        output: float16 or bfloat16 (batch, q_heads, q_len, v_head_dim), channels contiguous, other strides multiples
            of 8, written.
        lse: float32 (batch, q_heads, q_len), contiguous, written; or None.
        call: one of `Call.for_kernel`.
        padding: which keys exist; None: all.

    Raises:
        CompileError: see `launch.launch`.
    """
    kv_len, is_causal = call.kv_len, call.is_causal
    batch, q_heads, q_len, _ = output.shape
    kv_heads, kv_rows, channels = operands.key.shape[1:]
    config = Config.of(channels, PV_OF_DTYPE[operands.value.dtype], kv_len, is_causal, padding is not None)
    if config.pv == "fp16":
        value = tensor_map(operands.value.view(-1, kv_rows, channels), (1, config.block_n, 64), 128)
    else:
        width = 128 if config.block_n % 128 == 0 else 32  # keys of V that lie side by side in shared memory
        value = tensor_map(operands.value.view(-1, kv_rows), (channels, width), width)
    items = batch * q_heads * ceil_div(q_len, config.block_m)
    device, query = output.device, operands.query
    leaves_query = query.dtype != torch.int8
    of_codes = None if leaves_query else tensor_map(query.view(-1, channels), (64, channels), channels)
    queries: Argument = of_codes or quantize.tokens(query)
    launch(
        SOURCE,
        "int8_forward",
        config.macros(is_causal, lse is not None, output.dtype, leaves_query),
        (min(items, torch.cuda.get_device_properties(device).multi_processor_count),),
        (128 * (config.warpgroups + 1),),
        config.shared_bytes,
        (
            queries,
            tensor_map(operands.key.view(-1, channels), (config.block_n, channels), channels),
            value,
            tensor_map(output, (1, 1, 64, 64), 128),
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
                call.causal_offset,
                max(1, L2_BYTES // (2 * kv_rows * channels)) * (q_heads // kv_heads),
                *((0, 0) if padding is None else padding.strides),
                query.shape[3],
                float(call.scale),
            ),
        ),
        device,
        dependent=True,
    )
