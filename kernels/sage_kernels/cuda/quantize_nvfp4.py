"""Make the NVFP4 recipes' operands by `quantize_nvfp4.cu`, bit for bit as the Triton quantisers do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..dispatch.request import Request
from ..formats.nvfp4 import BIN_SHIFT, BINS, FIRST_BIN, GROUP, MAX_STEPS, SEARCH_LIMIT, search_table
from ..runtime.hardware import multiprocessors
from ..spec.call import Call, chooses_heavy_keys, has_recent_keys, heavy_keys_of, late_keys_of
from ..spec.layout import BLOCK, ceil_div, power_of_two, round_up, stride_of
from ..spec.operands import HeavyKeys, KVStatistics, NVFP4Operands
from ..spec.recipe import Recipe, get_recipe
from ..spec.transforms import (
    EQUALIZER_QUERIES,
    HEAVY_MARGIN,
    HEAVY_QUERIES,
    LOUD,
    LOUD_GROUPS,
    MAX_EQUALIZER,
    MIN_MEAN,
    MIN_VARIANCE,
    rotation_block,
)
from . import tokens
from .launch import ConfiguredKernel, KernelSource, architecture, launch
from .parameters import Bytes, ConstBytes, ConstInts, Float, Floats, HalfWords, Int, Int64, Ints, UInt32
from .quantize import signs
from .tokens import Tokens

REDUCE_THREADS = 256
EARLY_CAPABILITY = (9, 0)  # from which on a kernel may start before the kernel that it waits for has ended
RESIDENT_THREADS = 1024  # least threads of a multiprocessor that run `quantize`
THREAD_ELEMENTS = 32  # elements of Q, K or V per thread of `quantize`
KEY_LINES, VALUE_LINES = 2, 4  # lines of statistics of a block of K or a head's sample of Q, and of a block of V


@dataclass(slots=True)
class Statistics:
    """Buffers that `reduce` and `means` write, and sizes. A pair is a (batch, kv head) of K and V.

    Attributes:
        lines: (operand batch, kv_heads, sum_blocks, 6, CHANNELS).
        query_lines: (batch, q_heads, 2, CHANNELS).
        factors: (batch, kv_heads, 4, CHANNELS): the factors of Q and K, the numbers added to K then, and zeros.
        key_mean, equalizer, value_mean, value_amax, value_tensor_amax: as in `operands.KVStatistics`.
        value_tensor_scale: as in `operands.NVFP4Operands`.
        scores: (operand batch, kv_heads, sum_blocks · BLOCK), products of K with a mean query; None if the heavy keys
            are the first keys.
        q_ranges, kv_ranges, key_ranges: `layout.Sequences.ranges` of Q, of K and V without the places of heavy keys,
            and of all of K and V; None unless packed.
        chosen: as in `operands.KVStatistics`, or None.
        pairs: the number batch · kv_heads.
        blocks: blocks of BLOCK tokens of K and V of the longest sequence, after the first keys.
        sum_blocks: blocks of BLOCK tokens of all of K and V of an (operand batch, kv head).
        sum_run: most blocks of tokens that a block of the grid reduces.
        sum_runs: number of blocks of the grid for K, or V, of a pair.
        q_len: queries of the longest sequence.
        kv_len: keys of the longest sequence after the first keys.
        keys: all keys of the longest sequence.
        key_mask: (batch or 1, keys), 0 for keys that do not count; None: all count.
        key_mask_stride: stride from batch element to batch element.
        softmax_scale: factor of the scores, for the choice of heavy keys.
    """

    lines: Floats
    query_lines: Floats
    factors: Floats
    key_mean: Floats
    equalizer: Floats
    value_mean: Floats
    value_amax: Floats
    value_tensor_amax: Floats
    value_tensor_scale: Floats
    scores: Floats
    chosen: Ints
    q_ranges: ConstInts
    kv_ranges: ConstInts
    key_ranges: ConstInts
    pairs: UInt32
    q_heads: UInt32
    kv_heads: UInt32
    blocks: UInt32
    sum_blocks: UInt32
    sum_run: UInt32
    sum_runs: UInt32
    head_dim: Int
    v_head_dim: Int
    q_len: Int
    kv_len: Int
    keys: Int
    softmax_scale: Float
    key_mask: ConstBytes
    key_mask_stride: Int64


@dataclass(slots=True)
class Operands:
    """Buffers that `quantize` writes: fields of `operands.NVFP4Operands` and of its heavy keys, if there are any.

    Attributes:
        search, key_search: `nvfp4.search_table` for Q and V, and for K.
        q_blocks: blocks of BLOCK tokens of Q of the longest sequence.
        q_rows, kv_rows: rows of an (operand batch, head).
        run: most blocks of tokens that a block of the grid quantises.
        q_runs, kv_runs: numbers of blocks of the grid for a (batch, head) of Q, and for K, or V, of a pair.
    """

    query: Bytes
    query_scale: Bytes
    query_tensor_scale: Floats
    query_mean: Floats
    key: Bytes
    key_scale: Bytes
    key_tensor_scale: Floats
    value: Bytes
    value_scale: Bytes
    mean_score: Floats
    heavy_key: HalfWords
    heavy_value: HalfWords
    search: ConstInts
    key_search: ConstInts
    q_blocks: UInt32
    q_rows: UInt32
    kv_rows: UInt32
    run: UInt32
    q_runs: UInt32
    kv_runs: UInt32


@dataclass(slots=True)
class ReduceParameters:
    """Parameters of the kernel `reduce`."""

    query: Tokens
    key: Tokens
    value: Tokens
    statistics: Statistics


@dataclass(slots=True)
class MeansParameters:
    """Parameters of the kernel `means`."""

    statistics: Statistics


@dataclass(slots=True)
class NVFP4QuantizeParameters:
    """Parameters of the kernel `quantize`."""

    query: Tokens
    key: Tokens
    value: Tokens
    statistics: Statistics
    operands: Operands


@dataclass(frozen=True)
class NVFP4QuantizeConfig:
    """Configuration of the three kernels.

    Attributes:
        channels: channels of the operands, 64 or 128.
        rotation: number of channels that are rotated together; 1: no rotation.
        dtype: the dtype of Q, K and V.
        recipe: it decides the transforms and the search.
        heavy_keys: the call's number of heavy keys.
        replaceable_keys: as in `Call`.
        late: whether chosen keys are late keys.
        padded: whether keys may be left out.
        packed: whether sequences lie one after the other.
        mean_score: whether Q's products with K's mean are written.
    """

    channels: int
    rotation: int
    dtype: torch.dtype
    recipe: Recipe
    heavy_keys: int
    replaceable_keys: int
    late: bool
    padded: bool
    packed: bool
    mean_score: bool


@cache
def kernels(config: NVFP4QuantizeConfig) -> tuple[ConfiguredKernel, ConfiguredKernel, ConfiguredKernel]:
    """Return `reduce`, `means` and `quantize`."""
    channels, recipe = config.channels, config.recipe
    means_threads, quantize_threads = 8 * channels, BLOCK * channels // THREAD_ELEMENTS
    macros = {
        **tokens.macros(channels, config.dtype),
        **signs(config.rotation),
        "BLOCK": BLOCK,
        "REDUCE_THREADS": REDUCE_THREADS,
        "MEANS_THREADS": means_threads,
        "QUANTIZE_THREADS": quantize_threads,
        "RESIDENT_THREADS": RESIDENT_THREADS,
        "ROTATION": config.rotation,
        "HEAVY_KEYS": config.heavy_keys,
        "CHOICE": config.replaceable_keys > 0,
        "LATE": config.late,
        "PLACES": config.replaceable_keys or 1,
        "FIRST_KEYS": config.heavy_keys - config.late * config.replaceable_keys,
        "PADDED": config.padded,
        "PACKED": config.packed,
        "EQUALIZER_QUERIES": EQUALIZER_QUERIES,
        "HEAVY_QUERIES": HEAVY_QUERIES,
        "HEAVY_MARGIN": HEAVY_MARGIN,
        "LOUD_GROUPS": LOUD_GROUPS,
        "LOUD": LOUD,
        "MEAN_SCORE": config.mean_score,
        "SMOOTH_Q": recipe.smooth_q,
        "SMOOTH_K": recipe.smooth_k,
        "SMOOTH_V": recipe.smooth_v,
        "EQUALIZE": recipe.equalize,
        "TENSOR_SCALE": recipe.tensor_scale,
        "SEARCHED": len(recipe.scale_steps),
        "STEPS": ",".join(map(str, recipe.scale_steps or (0,))),
        "KEY_SEARCHED": len(recipe.key_scale_steps),
        "KEY_STEPS": ",".join(map(str, recipe.key_scale_steps or (0,))),
        "MAX_STEPS": MAX_STEPS,
        "FIRST_BIN": FIRST_BIN,
        "SEARCH_BINS": BINS,
        "BIN_SHIFT": BIN_SHIFT,
        "SEARCH_LIMIT": SEARCH_LIMIT,
        "MIN_MEAN": MIN_MEAN,
        "MIN_VARIANCE": MIN_VARIANCE,
        "MAX_EQUALIZER": MAX_EQUALIZER,
    }
    parameters = {"reduce": ReduceParameters, "means": MeansParameters, "quantize": NVFP4QuantizeParameters}
    source = KernelSource("quantize_nvfp4.cu", parameters, macros)
    return (
        ConfiguredKernel(source, "reduce", REDUCE_THREADS),
        ConfiguredKernel(source, "means", means_threads),
        ConfiguredKernel(source, "quantize", quantize_threads),
    )


def _rotation(recipe: Recipe, head_dim: int) -> int:
    return rotation_block(round_up(head_dim, GROUP)) if recipe.rotate else 1


@cache
def _blocks_in_a_row(blocks: int, index: int) -> int:
    """Return how many blocks of tokens, of so many, a block of GPU `index`'s grid takes one after the other.

    If there are few, each block of the grid takes one, so that all multiprocessors have work. If there are many, the
    next block of tokens is loaded in advance, and shared factors are found once. More than four are no faster, as
    measured on an H200.
    """
    return max(1, min(4, blocks // (8 * multiprocessors(index))))


def unsupported(request: Request) -> str:
    """Return why the kernels for a request of `registration.CudaNVFP4Quantizer` are unavailable; "" if available."""
    recipe = get_recipe(request.recipe)
    heavy_keys = heavy_keys_of(recipe, request.kv_len, request.mask)
    late_keys = late_keys_of(recipe, request.kv_len, request.mask, request.is_causal)
    replaceable_keys = late_keys or heavy_keys * chooses_heavy_keys(
        recipe, request.kv_len, request.mask, request.is_causal
    )
    config = NVFP4QuantizeConfig(
        channels=power_of_two(request.head_dim),
        rotation=_rotation(recipe, request.head_dim),
        dtype=request.dtype,
        recipe=recipe,
        heavy_keys=heavy_keys,
        replaceable_keys=replaceable_keys,
        late=late_keys > 0,
        padded=request.mask not in ("none", "blocks"),
        packed=request.packed,
        mean_score=request.return_lse or has_recent_keys(recipe, request.mask, request.is_causal),
    )
    assert request.capability is not None  # a GPU has one
    return kernels(config)[0].source.unavailable(architecture(request.capability))


def quantize_operands(call: Call, key_mask_u8: torch.Tensor | None = None) -> NVFP4Operands:
    """Transform and quantise Q, K, V as `reference.forward.quantize_operands` does.

    Args:
        call: a call that `registration.CudaNVFP4Quantizer` serves: one dtype, float16 or bfloat16, with head_dim and
            v_head_dim multiples of 8, both 33 to 64 or both 65 to 128, their channels contiguous, their addresses and
            other strides multiples of 16 bytes.
        key_mask_u8: uint8 (batch or 1, kv_len), 0 for keys left out of means and scales; None: all count.

    Raises:
        CompileError: see `launch.launch`.
    """
    tail, recipe, query = call.tail, call.recipe, call.query
    batch, (_, q_heads, _, head_dim), (_, kv_heads, _, v_head_dim) = call.batch, query.shape, tail.value.shape
    channels, pairs, device = power_of_two(head_dim), batch * kv_heads, query.device
    (q_sequences, key_sequences), kv_sequences = call.token_axes, tail.token_axes[1]
    q_blocks, blocks, q_rows, rows = q_sequences.blocks, kv_sequences.blocks, q_sequences.rows, kv_sequences.rows
    sum_blocks, operand_batch = key_sequences.rows // BLOCK, 1 if q_sequences.packed else batch

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return query.new_empty(shape, dtype=dtype)

    def codes(*shape: int) -> torch.Tensor:
        return new(*shape, dtype=torch.uint8)

    heavy = chosen = None
    if call.chooses_heavy_keys:
        chosen = new(batch, kv_heads, call.replaceable_keys, dtype=torch.int32)
    if call.heavy_keys:
        shape, late = (batch, kv_heads, call.heavy_keys, channels), chosen if call.late_keys else None
        heavy = HeavyKeys(new(*shape, dtype=query.dtype), new(*shape, dtype=query.dtype), late)
    operand_statistics = KVStatistics(
        new(batch, kv_heads, channels),
        new(batch, kv_heads, channels),
        new(batch, kv_heads, channels),
        new(batch, kv_heads),
        new(batch, kv_heads, channels) if recipe.equalize else None,
        chosen,
        call.first_keys,
    )
    operands = NVFP4Operands(
        codes(operand_batch, q_heads, q_rows, channels // 2),
        codes(operand_batch, q_heads, q_rows, channels // GROUP),
        new(operand_batch, q_heads, q_rows // BLOCK),
        new(operand_batch, q_heads, q_rows // BLOCK, channels) if recipe.smooth_q else None,
        codes(operand_batch, kv_heads, rows, channels // 2),
        codes(operand_batch, kv_heads, rows, channels // GROUP),
        new(operand_batch, kv_heads, rows // BLOCK),
        codes(operand_batch, kv_heads, channels, rows // 2),
        codes(operand_batch, kv_heads, channels, rows // GROUP),
        new(batch, kv_heads),
        operand_statistics.value_mean,
        new(operand_batch, q_heads, q_rows) if call.wants_mean_score else None,
        operand_statistics,
        heavy,
    )
    run = _blocks_in_a_row(2 * pairs * blocks + batch * q_heads * q_blocks, query.get_device())
    sum_run = _blocks_in_a_row(2 * pairs * key_sequences.blocks, query.get_device())
    statistics = Statistics(
        lines=new(operand_batch, kv_heads, sum_blocks, KEY_LINES + VALUE_LINES, channels),
        query_lines=new(batch, q_heads, KEY_LINES, channels) if recipe.equalize else None,
        factors=new(pairs, 4, channels),
        key_mean=operand_statistics.key_mean,
        equalizer=operand_statistics.equalizer,
        value_mean=operand_statistics.value_mean,
        value_amax=operand_statistics.value_amax,
        value_tensor_amax=operand_statistics.value_tensor_amax,
        value_tensor_scale=operands.value_tensor_scale,
        scores=new(operand_batch, kv_heads, sum_blocks * BLOCK) if operand_statistics.chosen is not None else None,
        chosen=operand_statistics.chosen,
        q_ranges=q_sequences.ranges,
        kv_ranges=kv_sequences.ranges,
        key_ranges=key_sequences.ranges,
        pairs=pairs,
        q_heads=q_heads,
        kv_heads=kv_heads,
        blocks=blocks,
        sum_blocks=sum_blocks,
        sum_run=sum_run,
        sum_runs=ceil_div(key_sequences.blocks, sum_run),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_len=q_sequences.tokens,
        kv_len=kv_sequences.tokens,
        keys=key_sequences.tokens,
        softmax_scale=call.scale,
        key_mask=key_mask_u8,
        key_mask_stride=stride_of(key_mask_u8),
    )
    written = Operands(
        query=operands.query,
        query_scale=operands.query_scale,
        query_tensor_scale=operands.query_tensor_scale,
        query_mean=operands.query_mean,
        key=operands.key,
        key_scale=operands.key_scale,
        key_tensor_scale=operands.key_tensor_scale,
        value=operands.value,
        value_scale=operands.value_scale,
        mean_score=operands.mean_score,
        heavy_key=None if heavy is None else heavy.key,
        heavy_value=None if heavy is None else heavy.value,
        search=search_table(recipe.scale_steps, device),
        key_search=search_table(recipe.key_scale_steps, device),
        q_blocks=q_blocks,
        q_rows=q_rows,
        kv_rows=rows,
        run=run,
        q_runs=ceil_div(q_blocks, run),
        kv_runs=ceil_div(blocks, run),
    )
    config = NVFP4QuantizeConfig(
        channels=channels,
        rotation=_rotation(recipe, head_dim),
        dtype=query.dtype,
        recipe=recipe,
        heavy_keys=call.heavy_keys,
        replaceable_keys=call.replaceable_keys,
        late=call.late_keys > 0,
        padded=key_mask_u8 is not None,
        packed=q_sequences.packed,
        mean_score=call.wants_mean_score,
    )
    reduce, means, quantize = kernels(config)
    q, k, v = Tokens.of(query), Tokens.of(tail.key), Tokens.of(tail.value)
    sampled = batch * q_heads if recipe.equalize else 0
    everything = ReduceParameters(query=q, key=Tokens.of(call.key), value=Tokens.of(call.value), statistics=statistics)
    launch(reduce, 2 * pairs * statistics.sum_runs + sampled, everything, device)
    early = torch.cuda.get_device_capability(device) >= EARLY_CAPABILITY
    launch(means, 2 * pairs, MeansParameters(statistics=statistics), device, dependent=early)
    quantized = pairs * (2 * written.kv_runs + (heavy is not None)) + batch * q_heads * written.q_runs
    launch(
        quantize,
        quantized,
        NVFP4QuantizeParameters(query=q, key=k, value=v, statistics=statistics, operands=written),
        device,
        dependent=early,
    )
    return operands
