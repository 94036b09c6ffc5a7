"""Gradients of INT8 attention on Hopper in one pass, P and dS in 16 bits: `int8_backward.cu`.

dQ is summed in memory, by one addition for each block of keys, in any order. `sums_dtype` chooses the sums' dtype:

- int32 if PyTorch must be deterministic (`torch.use_deterministic_algorithms`): results repeat bit for bit;
- float16 if additions limit the speed: with 128 channels, for gradients in bfloat16 and up to FLOAT16_KEYS keys;
- float32 otherwise.

The sums take 4 bytes for each channel of the operands of Q; in float16, 2 bytes.

In int32 and in float16, each query's dQ is multiplied by a factor before it is summed: half of the type's range,
divided by the bound (Σ|dO|·max|V| + |δ|)·max|K|. No key's |dP - δ|·|K| exceeds this bound, and P sums to 1, so it holds
for |dQ| and for partial sums over any keys; the other half of the range is for roundings. A non-finite bound makes the
query's dQ NaN.

In float16, 2¹⁵ is 2²⁹ times the smallest normal number, and dQ that much below its bound still keeps all 11 bits. A
typical dQ of N keys is about √N · 2⁷ times below its bound. An addition rounds the sum by 2⁻¹² of it or less (root mean
square), independently of other additions: the error of dQ of n blocks of keys is 2⁻¹²·√n or less, 0.4 % if FLOAT16_KEYS
keys are 256 blocks. INT8 costs dQ 1.3 % of its size or more, and the two errors add up as squares: 4 % more error, and
1 % with 8,192 keys. Gradients in float16 are themselves rounded by less than that, so their sums stay in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from ..dispatch.request import Request
from ..runtime.hardware import multiprocessors
from ..spec.call import BackwardCall
from ..spec.layout import BLOCK, Sequences, at_aligned_address, batch_strides, ceil_div, is_aligned, power_of_two
from ..spec.operands import KeyPadding, Saved
from ..spec.recipe import Recipe
from . import item_order, tokens
from .launch import ConfiguredKernel, KernelSource, compile_together, launch
from .padding import key_padding
from .parameters import (
    Bytes,
    ConstBytes,
    ConstFloats,
    ConstHalfWords,
    ConstInts,
    Float,
    Floats,
    HalfWords,
    Int,
    Int64,
    Map,
    UInt32,
)
from .quantize import signs
from .tensor_map import tensor_map
from .tokens import Tokens

TILE = 64  # queries, and the keys of a warpgroup
PART_CHANNELS = 64  # channels of dQ that are summed and rounded together
LINE_BYTES = 128  # bytes side by side in shared memory, of 16-bit operands
THREADS = 384
PREPARING_THREADS, FINISHING_THREADS = 256, 128
THREAD_CHANNELS = 8  # channels of a token per thread of the preparing kernels
STAGES = {64: 4, 128: 2}
"""Tiles of queries in shared memory, by channels."""
BUFFERS = 2  # buffers of dS
PARTS_BYTES = 2**15  # bytes of the parts of dQ on the way to memory
CONTROL_BYTES = 256  # shared memory for barriers
STATISTICS = 4  # per query: scale, LSE, delta, and the factor of its dQ, unless sums are float32
FLOAT16_KEYS = 2**15
"""Keys up to which dQ may be summed in float16."""
SUMS = {torch.float32: "FLOAT32_SUMS", torch.float16: "FLOAT16_SUMS", torch.int32: "INT32_SUMS"}
"""Names in CUDA C++ of the dtypes in which dQ is summed."""


@dataclass(slots=True)
class Axis:
    """The tokens of Q, or of K and V.

    Attributes:
        ranges, tokens, rows: as in `layout.Sequences`.
    """

    ranges: ConstInts
    tokens: Int
    rows: Int

    @classmethod
    def of(cls, sequences: Sequences) -> Axis:
        """Describe a token axis."""
        return cls(sequences.ranges, sequences.tokens, sequences.rows)


@dataclass(slots=True)
class Gradient:
    """A gradient to write, (batch, heads, tokens, channels); fields as in `Tokens`."""

    first: HalfWords
    batch_stride: Int64
    head_stride: Int64
    token_stride: Int64


@dataclass(slots=True)
class Restoring:
    """Inverse of the transforms of codes: the rotation, with a sign bit for each channel, and the equalizer."""

    equalizer: ConstFloats
    rotated: Int
    signs_0: UInt32
    signs_1: UInt32
    signs_2: UInt32
    signs_3: UInt32


@dataclass(slots=True)
class KeyArguments:
    """Arguments of `prepare_keys`.

    Attributes:
        codes, key_scale: K in `operands.Saved`.
        value: V.
        key_mask: as in `operands.KeyPadding`, or None.
        key: K in 16 bits (operand batch, kv_heads, rows, channels), written.
        value_copy: V in the same form, written; None: the caller's V is read.
        bounds: (batch, kv_heads, tiles of keys, 2), the largest magnitude of K and of V among keys that exist, written;
            None if dQ is summed in float32.
    """

    restoring: Restoring
    value: Tokens
    keys: Axis
    codes: ConstBytes
    key_scale: ConstHalfWords
    key_mask: ConstBytes
    key: HalfWords
    value_copy: HalfWords
    bounds: Floats
    kv_heads: Int
    v_head_dim: Int
    key_mask_stride: Int


@dataclass(slots=True)
class QueryArguments:
    """Arguments of `prepare_queries`.

    Attributes:
        codes, query_scale, lse: Q in `operands.Saved`.
        gradient, output: dO and O.
        bounds: as in `prepare_keys`, for `key_tiles` tiles; or None.
        query: Q in 16 bits (operand batch, q_heads, rows, channels), written.
        gradient_copy: dO in the same form, written; None: the caller's dO is read.
        statistics: (operand batch, q_heads, rows / TILE, `statistics` · TILE), written: each query's scale times the
            softmax scale, and its LSE, both for base 2; then each query's delta = rowsum(dO∘O); then, unless dQ is
            summed in float32, the factor of each query's dQ.
        sums: dQ, (operand batch, q_heads, rows, channels) in the order of `int8_backward.cu`, set to 0.
        lse_batch, lse_head: strides of `lse`.
    """

    restoring: Restoring
    gradient: Tokens
    output: Tokens
    queries: Axis
    codes: ConstBytes
    query_scale: ConstFloats
    lse: ConstFloats
    bounds: ConstFloats
    query: HalfWords
    gradient_copy: HalfWords
    statistics: Floats
    sums: Bytes
    lse_batch: Int64
    lse_head: Int64
    q_heads: Int
    group: Int
    key_tiles: Int
    v_head_dim: Int
    softmax_scale: Float


@dataclass(slots=True)
class Order:
    """The order in which blocks of the grid take blocks of keys.

    Attributes:
        pairs, kv_heads: heads of K in all batch elements, and in one.
        heads_at_once: heads of K whose blocks are taken in turn.
        whole_blocks: number of blocks of keys that one block of the grid takes whole; the others come last, and are
            split.
    """

    pairs: Int
    kv_heads: Int
    heads_at_once: Int
    whole_blocks: Int


@dataclass(slots=True)
class FinishingArguments:
    """Arguments of `finish_query_gradient`: dQ, which is written, its sums, and results of `prepare_queries`."""

    gradient: Gradient
    queries: Axis
    sums: ConstBytes
    statistics: ConstFloats
    q_heads: Int
    head_dim: Int
    softmax_scale: Float


@dataclass(slots=True)
class KeyFinishingArguments:
    """Arguments of `finish_key_gradients`: dK and dV, which are written, and the rest as in `BackwardArguments`."""

    key_gradient: Gradient
    value_gradient: Gradient
    keys: Axis
    order: Order
    partials: ConstFloats
    parts: Int
    head_dim: Int
    v_head_dim: Int


@dataclass(slots=True)
class Maps:
    """Operands (operand batch, heads, rows, channels) in boxes (1, 1, TILE, channels); in 16 bits, 64 channels."""

    key_codes: Map
    key: Map
    value: Map
    query_codes: Map
    query: Map
    gradient: Map


@dataclass(slots=True)
class BackwardArguments:
    """The other arguments of `int8_backward`.

    Attributes:
        key_gradient, value_gradient: dK and dV.
        key_scale: K's scale in `operands.Saved`.
        statistics, sums: as in `prepare_queries`; sums are added to.
        key_mask, spans: as in `operands.KeyPadding`, with their batch strides; or None.
        partials: (blocks of keys that are split, parts, 2, BLOCK, channels), partial sums of dK and of dV, written; or
            None.
        parts: number of parts of a split block of keys; each part has some of the block's steps.
        group: number of heads of Q that share a head of K.
    """

    key_gradient: Gradient
    value_gradient: Gradient
    queries: Axis
    keys: Axis
    order: Order
    key_scale: ConstHalfWords
    statistics: ConstFloats
    sums: Bytes
    partials: Floats
    key_mask: ConstBytes
    spans: ConstInts
    key_mask_stride: Int
    spans_stride: Int
    parts: Int
    group: Int
    is_causal: Int
    causal_offset: Int
    head_dim: Int
    v_head_dim: Int
    softmax_scale: Float


@dataclass(slots=True)
class KeyParameters:
    """Parameters of `prepare_keys`."""

    a: KeyArguments


@dataclass(slots=True)
class QueryParameters:
    """Parameters of `prepare_queries`."""

    a: QueryArguments


@dataclass(slots=True)
class FinishingParameters:
    """Parameters of `finish_query_gradient`."""

    a: FinishingArguments


@dataclass(slots=True)
class KeyFinishingParameters:
    """Parameters of `finish_key_gradients`."""

    a: KeyFinishingArguments


@dataclass(slots=True)
class BackwardParameters:
    """Parameters of `int8_backward`."""

    maps: Maps
    arguments: BackwardArguments


@dataclass(frozen=True)
class BackwardKernels:
    """The kernels of a call, in the order of their launches; `finish_keys` runs only if blocks of keys are split."""

    prepare_keys: ConfiguredKernel
    prepare_queries: ConfiguredKernel
    backward: ConfiguredKernel
    finish: ConfiguredKernel
    finish_keys: ConfiguredKernel


@cache
def kernels(channels: int, dtype: torch.dtype, summed_in: torch.dtype) -> BackwardKernels:
    """Return the kernels for operands of so many channels, which sum dQ in a dtype of `SUMS`."""
    common = {**tokens.macros(channels, dtype), "SUMS": SUMS[summed_in], "TILE": TILE, "BLOCK": BLOCK}
    shared_bytes = shared_memory(channels, summed_in)
    operands = KernelSource(
        "backward_operands.cu",
        {
            "prepare_keys": KeyParameters,
            "prepare_queries": QueryParameters,
            "finish_query_gradient": FinishingParameters,
            "finish_key_gradients": KeyFinishingParameters,
        },
        {**common, "THREADS": PREPARING_THREADS},
    )
    macros = {**common, "THREADS": THREADS, "STAGES": STAGES[channels], "SHARED_BYTES": shared_bytes}
    backward = KernelSource("int8_backward.cu", {"int8_backward": BackwardParameters}, macros)
    return BackwardKernels(
        ConfiguredKernel(operands, "prepare_keys", PREPARING_THREADS),
        ConfiguredKernel(operands, "prepare_queries", PREPARING_THREADS),
        ConfiguredKernel(backward, "int8_backward", THREADS, shared_bytes),
        ConfiguredKernel(operands, "finish_query_gradient", FINISHING_THREADS),
        ConfiguredKernel(operands, "finish_key_gradients", PREPARING_THREADS),
    )


def sums_dtype(channels: int, dtype: torch.dtype, kv_len: int) -> torch.dtype:
    """Return the dtype of `SUMS` in which dQ is summed, for operands of so many channels and so many keys."""
    if torch.are_deterministic_algorithms_enabled():
        return torch.int32
    is_short = channels == 128 and dtype == torch.bfloat16 and kv_len <= FLOAT16_KEYS
    return torch.float16 if is_short else torch.float32


def statistics_per_query(summed_in: torch.dtype) -> int:
    """Return the number of statistics of a query."""
    return STATISTICS - (summed_in == torch.float32)


def shared_memory(channels: int, summed_in: torch.dtype) -> int:
    """Return the bytes of a block's keys, tiles of queries with statistics, dS, parts of dQ, and barriers."""
    codes_and_two_operands = (1 + 2 + 2) * channels
    of_keys = BLOCK * codes_and_two_operands
    of_queries = STAGES[channels] * TILE * (codes_and_two_operands + 4 * statistics_per_query(summed_in))
    return of_keys + of_queries + BUFFERS * 2 * BLOCK * TILE + PARTS_BYTES + CONTROL_BYTES


def unsupported(request: Request) -> str:
    """Return why the kernels for a request of `registration.CudaInt8Backward` are unavailable; "" if available."""
    channels = power_of_two(request.head_dim)
    needed = kernels(channels, request.dtype, sums_dtype(channels, request.dtype, request.kv_len))
    return needed.backward.source.unavailable() or needed.finish.source.unavailable()


def backward(call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of Q, K and V of a call that `registration.CudaInt8Backward` serves.

    Raises:
        CompileError: see `launch.launch`.
    """
    gradients = call.new_gradients()
    if not call.is_empty:
        output_gradient, value, output = (
            x if is_aligned(x) and 0 not in x.stride() else at_aligned_address(x.contiguous())
            for x in (call.output_gradient, call.value, call.output)
        )
        saved = Saved(*(x.contiguous() for x in call.saved))
        _run(replace(call, output_gradient=output_gradient, value=value, output=output, saved=saved), gradients)
    return gradients


def _run(call: BackwardCall, gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    saved, channels, device = call.saved, call.channels, call.value.device
    queries, keys = call.token_axes
    q_heads, kv_heads = call.output.shape[1], call.value.shape[1]
    summed_in = sums_dtype(channels, call.value.dtype, keys.tokens)
    fused = kernels(channels, call.value.dtype, summed_in)
    compile_together((fused.finish, fused.backward), device)
    padding = None if call.mask.key_mask is None else key_padding(call.mask.key_mask)

    key = torch.empty_like(saved.key, dtype=call.value.dtype)
    query = torch.empty_like(saved.query, dtype=call.value.dtype)
    # V of keys that do not exist, and dO of rows without a key, must count as 0.
    copies_value = queries.packed or padding is not None
    copies_gradient = queries.packed or padding is not None or (call.is_causal and call.kernel_offset < 0)
    value_copy = torch.empty_like(key) if copies_value else None
    gradient_copy = torch.empty_like(query) if copies_gradient else None
    key_tiles, bounds = 2 * keys.blocks, None
    if summed_in != torch.float32:
        bounds = saved.lse.new_empty((call.batch, kv_heads, key_tiles, 2))
    of_queries = saved.lse.new_empty((*saved.query_scale.shape, statistics_per_query(summed_in)))
    sums = torch.empty_like(saved.query, dtype=summed_in)
    blocks_at_once = multiprocessors(call.value.get_device())
    steps = ceil_div(queries.tokens, TILE) * (q_heads // kv_heads)
    blocks, partials = keys.blocks * call.batch * kv_heads, None
    parts = item_order.parts_of_key_blocks(call, blocks_at_once, steps)
    split_blocks = blocks % blocks_at_once or blocks if parts > 1 else 0
    if split_blocks:
        partials = saved.lse.new_empty((split_blocks, parts, 2, BLOCK, channels))
    heads_at_once = item_order.key_heads_at_once(call, blocks_at_once, summed_in.itemsize)
    order = Order(call.batch * kv_heads, kv_heads, heads_at_once, blocks - split_blocks)

    restoring = _restoring(call.recipe, saved)
    key_mask_u8, spans, key_mask_stride, spans_stride = _padding(padding)
    launch(
        fused.prepare_keys,
        key_tiles * call.batch * kv_heads,
        KeyParameters(
            KeyArguments(
                restoring=restoring,
                value=Tokens(call.value, *_strides(call.value, keys)),
                keys=Axis.of(keys),
                codes=saved.key,
                key_scale=saved.key_scale,
                key_mask=key_mask_u8,
                key=key,
                value_copy=value_copy,
                bounds=bounds,
                kv_heads=kv_heads,
                v_head_dim=call.value.shape[3],
                key_mask_stride=key_mask_stride,
            )
        ),
        device,
    )
    lse_batch, lse_head, _ = batch_strides(saved.lse, queries)
    tiles = ceil_div(queries.tokens, TILE) * call.batch * q_heads
    launch(
        fused.prepare_queries,
        tiles,
        QueryParameters(
            QueryArguments(
                restoring=restoring,
                gradient=Tokens(call.output_gradient, *_strides(call.output_gradient, queries)),
                output=Tokens(call.output, *_strides(call.output, queries)),
                queries=Axis.of(queries),
                codes=saved.query,
                query_scale=saved.query_scale,
                lse=saved.lse,
                bounds=bounds,
                query=query,
                gradient_copy=gradient_copy,
                statistics=of_queries,
                sums=sums,
                lse_batch=lse_batch,
                lse_head=lse_head,
                q_heads=q_heads,
                group=q_heads // kv_heads,
                key_tiles=key_tiles,
                v_head_dim=call.value.shape[3],
                softmax_scale=call.scale,
            )
        ),
        device,
    )
    codes_box, box = (1, 1, TILE, channels), (1, 1, TILE, LINE_BYTES // 2)
    query_gradient, key_gradient, value_gradient = gradients
    maps = Maps(
        key_codes=tensor_map(saved.key, codes_box, channels),
        key=tensor_map(key, box, LINE_BYTES),
        value=tensor_map(call.value if value_copy is None else value_copy, box, LINE_BYTES),
        query_codes=tensor_map(saved.query, codes_box, channels),
        query=tensor_map(query, box, LINE_BYTES),
        gradient=tensor_map(call.output_gradient if gradient_copy is None else gradient_copy, box, LINE_BYTES),
    )
    of_key = Gradient(key_gradient, *_strides(key_gradient, keys))
    of_value = Gradient(value_gradient, *_strides(value_gradient, keys))
    arguments = BackwardArguments(
        key_gradient=of_key,
        value_gradient=of_value,
        queries=Axis.of(queries),
        keys=Axis.of(keys),
        order=order,
        key_scale=saved.key_scale,
        statistics=of_queries,
        sums=sums,
        partials=partials,
        key_mask=key_mask_u8,
        spans=spans,
        key_mask_stride=key_mask_stride,
        spans_stride=spans_stride,
        parts=parts,
        group=q_heads // kv_heads,
        is_causal=call.is_causal,
        causal_offset=call.kernel_offset,
        head_dim=call.head_dim,
        v_head_dim=call.value.shape[3],
        softmax_scale=call.scale,
    )
    launch(fused.backward, blocks + split_blocks * (parts - 1), BackwardParameters(maps, arguments), device)
    if partials is not None:
        finishing = KeyFinishingArguments(
            key_gradient=of_key,
            value_gradient=of_value,
            keys=Axis.of(keys),
            order=order,
            partials=partials,
            parts=parts,
            head_dim=call.head_dim,
            v_head_dim=call.value.shape[3],
        )
        threads = 2 * BLOCK * channels // THREAD_CHANNELS
        launch(
            fused.finish_keys, split_blocks * threads // PREPARING_THREADS, KeyFinishingParameters(finishing), device
        )
    launch(
        fused.finish,
        tiles * (channels // PART_CHANNELS),
        FinishingParameters(
            FinishingArguments(
                gradient=Gradient(query_gradient, *_strides(query_gradient, queries)),
                queries=Axis.of(queries),
                sums=sums,
                statistics=of_queries,
                q_heads=q_heads,
                head_dim=call.head_dim,
                softmax_scale=call.scale,
            )
        ),
        device,
    )


def _strides(x: torch.Tensor, sequences: Sequences) -> tuple[int, int, int]:
    """Return the strides of a batch element, of a head and of a token of x, whose channels are contiguous."""
    batch, head, token, _ = batch_strides(x, sequences)
    return batch, head, token


def _padding(padding: KeyPadding | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    return (None, None, 0, 0) if padding is None else (padding.key_mask_u8, padding.spans, *padding.strides)


def _restoring(recipe: Recipe, saved: Saved) -> Restoring:
    return Restoring(saved.equalizer if recipe.equalize else None, recipe.rotate, *_signs(saved.query.shape[3]))


@cache
def _signs(channels: int) -> tuple[int, int, int, int]:
    first, second, third, fourth = signs(channels).values()
    return first, second, third, fourth
