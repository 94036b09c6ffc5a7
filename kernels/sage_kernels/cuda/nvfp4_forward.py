"""Attend in NVFP4 on consumer Blackwell: operands of `quantize_nvfp4`, or of Triton, by `nvfp4_forward.cu`.

With emulated products the same kernel runs on GPUs without FP4, and is tested there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch

from ..dispatch.kernels import Quantizer
from ..dispatch.request import Request
from ..dispatch.support import HEAVY_KEYS
from ..formats.nvfp4 import GROUP
from ..formats.weights import P_SCALE
from ..runtime.hardware import multiprocessors
from ..spec.call import Call, chooses_heavy_keys, has_recent_keys, late_keys_of
from ..spec.layout import BLOCK, power_of_two, round_up
from ..spec.operands import KeyPadding, NVFP4Operands
from ..spec.recipe import get_recipe
from . import padding, smooth_q_scores, tokens
from .launch import ConfiguredKernel, KernelSource, architecture, launch
from .parameters import NO_TENSOR_MAP, ConstBytes, ConstFloats, ConstInts, Float, Floats, HalfWords, Int, Int64, Map
from .tensor_map import tensor_map
from .tokens import NO_TOKENS, Tokens

WARPS = 8  # warps that attend, to 16 rows each
THREADS = 32 * (WARPS + 4)  # one warp brings tiles; its warpgroup gives registers to the others
STAGES = 3  # stages of tiles of K and V: as many as fit in 99 KiB of shared memory with the heavy keys
STAGE_ALIGNMENT = 1024  # bytes of the widest swizzle
LINE_CHANNELS = 64  # channels of heavy keys, side by side in shared memory
LINE_BYTES = 2 * LINE_CHANNELS
DELTA_SHARE = 0.25  # largest workspace for the scores of Q's means, as a share of the bytes of 16-bit Q, K and V


@dataclass(frozen=True)
class NVFP4ForwardConfig:
    """Compile-time choices of the call and of its recipe.

    Operands have `channels`, 64 or 128; `padded`: some keys may not exist; `heavy`: some keys are attended to in 16
    bits, the last `late_keys` of them late keys; `recent`: the latest keys of causal rows are too; `native`: products
    in NVFP4 are instructions, otherwise emulated.
    """

    channels: int
    is_causal: bool
    padded: bool
    return_lse: bool
    smooth_q: bool
    quantized_denominator: bool
    heavy: bool
    native: bool
    late_keys: int = 0
    recent: bool = False

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of the stages, and of the heavy keys and their values."""
        scales = (BLOCK + BLOCK) * self.channels // GROUP
        stage = BLOCK * self.channels + scales + 8 * BLOCK + 4
        heavy = 2 * HEAVY_KEYS * self.channels if self.heavy else STAGE_ALIGNMENT
        return STAGES * round_up(stage, STAGE_ALIGNMENT) + 2 * heavy


@dataclass(slots=True)
class NVFP4ForwardArguments:
    """The tensors that the kernel reads by address or writes, and numbers.

    Attributes:
        query to value_mean, mean_score: as in `operands.NVFP4Operands`.
        delta: (sequences, q_heads, delta_blocks, kv_rows) scores of Q's means, or None.
        output: (batch, q_heads, q_len, v_head_dim), channels contiguous.
        lse: (batch, q_heads, q_len), contiguous, or None.
        late: as in `operands.HeavyKeys`, or None.
        key_mask, spans: as in `operands.KeyPadding`, or None. They count all keys.
        key_mask_stride, spans_stride: strides from batch element to batch element.
        first_sequence, sequences: sequences of this launch.
        kv_len, causal_offset, recent_start: counted from the key after the first keys (`Call.recent_start`).
        first_block, blocks: blocks of BLOCK rows of each sequence in this launch.
        head_dim: head_dim of Q.
    """

    query: ConstBytes
    query_scale: ConstBytes
    query_tensor_scale: ConstFloats
    key_scale: ConstBytes
    key_tensor_scale: ConstFloats
    value_scale: ConstBytes
    value_tensor_scale: ConstFloats
    value_mean: ConstFloats
    mean_score: ConstFloats
    delta: ConstFloats
    output: HalfWords
    lse: Floats
    late: ConstInts
    key_mask: ConstBytes
    spans: ConstInts
    output_stride_batch: Int64
    output_stride_head: Int64
    output_stride_token: Int64
    first_sequence: Int
    sequences: Int
    first_block: Int
    blocks: Int
    delta_blocks: Int
    q_heads: Int
    kv_heads: Int
    q_len: Int
    kv_len: Int
    q_rows: Int
    kv_rows: Int
    causal_offset: Int
    recent_start: Int
    head_dim: Int
    v_head_dim: Int
    mean_channels: Int
    key_mask_stride: Int
    spans_stride: Int
    softmax_scale: Float


@dataclass(slots=True)
class NVFP4ForwardParameters:
    """Parameters of the kernel.

    Attributes:
        key: boxes (BLOCK, CHANNELS / 2).
        value: boxes (CHANNELS, BLOCK / 2).
        heavy_key, heavy_value: boxes (HEAVY_KEYS, LINE_CHANNELS), or NO_TENSOR_MAP.
        query_tokens: Q in 16 bits with heavy or recent keys, or NO_TOKENS.
        key_tokens, value_tokens: K and V in 16 bits with recent keys, or NO_TOKENS.
        arguments: all other arguments.
    """

    key: Map
    value: Map
    heavy_key: Map
    heavy_value: Map
    query_tokens: Tokens
    key_tokens: Tokens
    value_tokens: Tokens
    arguments: NVFP4ForwardArguments


@cache
def kernel(config: NVFP4ForwardConfig, dtype: torch.dtype) -> ConfiguredKernel:
    """Return `nvfp4_forward` with outputs of a dtype, which 16-bit Q has too."""
    macros = {
        **tokens.macros(config.channels, dtype),
        "WARPS": WARPS,
        "THREADS": THREADS,
        "BLOCK": BLOCK,
        "GROUP": GROUP,
        "STAGES": STAGES,
        "SHARED_BYTES": config.shared_bytes,
        "LARGEST_P_LOG2": f"{math.log2(P_SCALE['nvfp4'])}f",
        "HEAVY_KEYS": HEAVY_KEYS if config.heavy else 0,
        "LATE_KEYS": config.late_keys,
        "RECENT": config.recent,
        "CAUSAL": config.is_causal,
        "PADDED": config.padded,
        "LSE": config.return_lse,
        "SMOOTH_Q": config.smooth_q,
        "QUANTIZED_DENOMINATOR": config.quantized_denominator,
        "NATIVE_FP4": config.native,
    }
    source = KernelSource("nvfp4_forward.cu", {"nvfp4_forward": NVFP4ForwardParameters}, macros)
    return ConfiguredKernel(source, "nvfp4_forward", THREADS, config.shared_bytes)


def unsupported(request: Request) -> str:
    """Return why the kernels for a request of `registration.CudaNVFP4Forward` are unavailable; "" if available."""
    recipe, channels = get_recipe(request.recipe), power_of_two(request.head_dim)
    config = NVFP4ForwardConfig(
        channels,
        request.is_causal,
        request.mask == "keys",
        request.return_lse,
        recipe.smooth_q,
        recipe.denominator == "quantized_p",
        0 < recipe.heavy_keys < request.kv_len,
        native=True,
        late_keys=late_keys_of(recipe, request.kv_len, request.mask, request.is_causal),
        recent=has_recent_keys(recipe, request.mask, request.is_causal),
    )
    assert request.capability is not None  # a GPU has one
    kernels = [kernel(config, request.dtype)]
    if recipe.smooth_q:
        choice = chooses_heavy_keys(recipe, request.kv_len, request.mask, request.is_causal)
        kernels.append(smooth_q_scores.kernel(channels, request.dtype, choice))
    if config.padded:
        kernels.append(padding.kernel())
    reasons = (one.source.unavailable(architecture(request.capability)) for one in kernels)
    return next(filter(None, reasons), "")


def attend(call: Call, quantizer: Quantizer, native: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (output, lse or None) of a call that `registration.CudaNVFP4Forward` serves.

    Args:
        call: the call.
        quantizer: a quantiser that makes `NVFP4Operands`.
        native: use FP4 tensor cores, which the GPU must have; otherwise emulate them.

    Raises:
        CompileError: see `launch.launch`.
    """
    output, lse = call.new_outputs()
    if not call.is_empty:
        call = call.for_kernel()
        key_padding = None if call.mask.key_mask is None else KeyPadding.of(call.mask.key_mask)
        operands = quantizer.quantize(call, key_padding)
        forward(operands, output, lse, call, native, key_padding)
    return output, lse


def forward(
    operands: NVFP4Operands,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    call: Call,
    native: bool,
    key_padding: KeyPadding | None = None,
) -> None:
    """Attend to quantised operands, some blocks of rows, or sequences, at a time where Q's means need a workspace.

    Args:
        operands: the call's operands, with 64 or 128 channels in Q, K and V.
        output: float16 or bfloat16 (batch, q_heads, q_len, v_head_dim), channels contiguous, other strides and
            v_head_dim even, written.
        lse: float32 (batch, q_heads, q_len), contiguous, written; or None.
        call: a result of `Call.for_kernel`.
        native: see `attend`.
        key_padding: which keys exist; None: all.

    Raises:
        CompileError: see `launch.launch`.
    """
    tail, heavy, recent, device = call.tail, operands.heavy, call.has_recent_keys, output.device
    batch, q_heads, q_len, v_head_dim = output.shape
    kv_heads, kv_rows = operands.key.shape[1:3]
    q_rows, channels = operands.query.shape[2], 2 * operands.query.shape[3]
    q_blocks = q_rows // BLOCK
    sequences, blocks, delta = batch, q_blocks, None
    if operands.query_mean is not None:
        bytes_of_inputs = 4 * (operands.query.numel() + operands.key.numel() + operands.value.numel())
        most_blocks = max(1, int(DELTA_SHARE * bytes_of_inputs) // (4 * q_heads * kv_rows))
        blocks = min(blocks, max(1, most_blocks // batch))
        sequences = min(batch, most_blocks // blocks)
        delta = output.new_empty((sequences, q_heads, blocks, kv_rows), dtype=torch.float32)
    config = NVFP4ForwardConfig(
        channels,
        call.is_causal,
        key_padding is not None,
        lse is not None,
        delta is not None,
        call.recipe.denominator == "quantized_p",
        heavy is not None,
        native,
        call.late_keys,
        recent,
    )
    key = tensor_map(operands.key.view(-1, channels // 2), (BLOCK, channels // 2), channels // 2)
    value = tensor_map(operands.value.view(-1, kv_rows // 2), (channels, BLOCK // 2), BLOCK // 2)
    heavy_key = heavy_value = NO_TENSOR_MAP
    if heavy is not None:
        box = (HEAVY_KEYS, LINE_CHANNELS)
        heavy_key, heavy_value = (tensor_map(x.view(-1, channels), box, LINE_BYTES) for x in (heavy.key, heavy.value))
    key_mask_stride, spans_stride = (0, 0) if key_padding is None else key_padding.strides
    blocks_at_once = multiprocessors(output.get_device())
    for first_sequence, first_block in product(range(0, batch, sequences), range(0, q_blocks, blocks)):
        present = min(sequences, batch - first_sequence)
        if delta is not None:
            smooth_q_scores.smooth_q_scores(operands, tail, first_sequence, present, first_block, delta)
        arguments = NVFP4ForwardArguments(
            query=operands.query,
            query_scale=operands.query_scale,
            query_tensor_scale=operands.query_tensor_scale,
            key_scale=operands.key_scale,
            key_tensor_scale=operands.key_tensor_scale,
            value_scale=operands.value_scale,
            value_tensor_scale=operands.value_tensor_scale,
            value_mean=operands.value_mean,
            mean_score=operands.mean_score,
            delta=delta,
            output=output,
            lse=lse,
            late=None if heavy is None else heavy.late,
            key_mask=None if key_padding is None else key_padding.key_mask_u8,
            spans=None if key_padding is None else key_padding.spans,
            output_stride_batch=output.stride(0),
            output_stride_head=output.stride(1),
            output_stride_token=output.stride(2),
            first_sequence=first_sequence,
            sequences=present,
            first_block=first_block,
            blocks=min(blocks, q_blocks - first_block),
            delta_blocks=blocks,
            q_heads=q_heads,
            kv_heads=kv_heads,
            q_len=q_len,
            kv_len=tail.kv_len,
            q_rows=q_rows,
            kv_rows=kv_rows,
            causal_offset=tail.causal_offset,
            recent_start=call.recent_start if recent else 0,
            head_dim=call.query.shape[3],
            v_head_dim=v_head_dim,
            mean_channels=operands.value_mean.shape[-1],
            key_mask_stride=key_mask_stride,
            spans_stride=spans_stride,
            softmax_scale=float(call.scale),
        )
        parameters = NVFP4ForwardParameters(
            key=key,
            value=value,
            heavy_key=heavy_key,
            heavy_value=heavy_value,
            query_tokens=Tokens.of(call.query) if recent or heavy is not None else NO_TOKENS,
            key_tokens=Tokens.of(call.key) if recent else NO_TOKENS,
            value_tokens=Tokens.of(call.value) if recent else NO_TOKENS,
            arguments=arguments,
        )
        items = present * q_heads * arguments.blocks
        launch(kernel(config, output.dtype), min(items, blocks_at_once), parameters, device)
