"""Make the INT8 recipes' operands on Hopper, by `quantize.cu`, bit for bit as the Triton quantisers do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from ..dispatch.request import Request
from ..formats.fp8 import E4M3_MAX, ERROR_STEP, LARGEST_MOVE
from ..formats.fp16 import FP16_HEADROOM
from ..spec.call import Call, MaskKind, chooses_heavy_keys, heavy_keys_of
from ..spec.layout import BLOCK, KEY_BLOCK, THREAD_TOKENS, ceil_div, power_of_two
from ..spec.operands import MEAN_PARTS, VALUE_DTYPES, HeavyKeys, Int8Operands, KeyPadding
from ..spec.recipe import Recipe, get_recipe
from ..spec.transforms import (
    EQUALIZER_QUERIES,
    HEAVY_MARGIN,
    HEAVY_QUERIES,
    LATE_SHARE,
    LOUD,
    LOUD_GROUPS,
    MAX_EQUALIZER,
    MIN_MEAN,
    MIN_VARIANCE,
    rotation_signs,
)
from . import tokens
from .launch import ConfiguredKernel, KernelSource, launch
from .parameters import Bytes, ConstBytes, Float, Floats, HalfWords, Int, Ints, UInt32
from .tokens import Tokens

HALF_BLOCK = BLOCK // 2  # tokens of Q, K or float16 V that a block of the grid quantises
VALUE_CHANNELS = 64  # channels of BLOCK tokens of e4m3 V that a block of the grid quantises
THREADS = 128
CLUSTER_BLOCKS = 8  # blocks of a cluster: the sharers of the statistics of K, or V, of a pair
# Blocks of Q with which a launch begins: work for the GPU until the last statistics are ready.
LEADING_QUERY_BLOCKS = 512


@dataclass(slots=True)
class Statistics:
    """Buffers that `statistics` writes and `quantize` reads, and their sizes. A pair is a (batch, kv head) of K and V.

    Attributes:
        lines: (batch, kv_heads, STATISTIC_ROWS + 2 · sum_blocks, CHANNELS).
        value_mean, value_scale: (batch, kv_heads, CHANNELS).
        chosen: (batch, kv_heads, PLACES), as in `operands.KVStatistics`; None if the heavy keys are the first keys.
        blocks: blocks of BLOCK tokens of K and V after the first keys.
        sum_blocks: blocks of BLOCK tokens of all of K and V.
        kv_len: number of keys after the first keys.
        key_mask: (batch or 1, keys), including heavy keys, 0 where a key does not exist; None without padding.
        key_mask_stride: stride from batch element to batch element.
    """

    lines: Floats
    value_mean: Floats
    value_scale: Floats
    chosen: Ints
    kv_heads: UInt32
    blocks: UInt32
    sum_blocks: UInt32
    head_dim: Int
    v_head_dim: Int
    kv_len: Int
    key_mask: ConstBytes
    key_mask_stride: Int


@dataclass(slots=True)
class Operands:
    """Further buffers that `quantize` writes, and their sizes.

    Attributes:
        query: (batch, q_heads, q_blocks · BLOCK, CHANNELS).
        query_scale: (batch, q_heads, q_blocks · BLOCK).
        key: (batch, kv_heads, blocks · BLOCK, CHANNELS).
        key_scale: bfloat16 (batch, kv_heads, blocks · BLOCK / KEY_BLOCK, 4).
        value: e4m3 (batch, kv_heads, CHANNELS, blocks · BLOCK); or float16 (batch, kv_heads, blocks · BLOCK, CHANNELS).
        mean_score: shaped as query_scale, for heavy keys and the LSE.
        pairs: the number batch · kv_heads.
        leading_query_blocks: blocks of the grid that quantise Q before other blocks quantise K and V.
        heavy_key, heavy_value: (batch, kv_heads, HEAVY_KEYS, CHANNELS) in 16 bits, if any; the first keys lie before
            the tokens of `Int8QuantizeParameters.key` and `value`.
        heavy_key_with_mean: whether MEAN_PARTS rows follow heavy_key's rows; then its channels are in their original
            order, not in `layout.heavy_order`.
        spans: (paddings, 3), as in `operands.KeyPadding`; None without padding.
        paddings: batch elements of `Statistics.key_mask`.
        queue: the queue of `operands.Int8Operands`, or None.
    """

    query: Bytes
    query_scale: Floats
    key: Bytes
    key_scale: HalfWords
    value: Bytes
    mean_score: Floats
    pairs: UInt32
    q_heads: UInt32
    q_blocks: UInt32
    leading_query_blocks: UInt32
    q_len: Int
    heavy_key: HalfWords
    heavy_value: HalfWords
    heavy_key_with_mean: Int
    spans: Ints
    paddings: UInt32
    queue: Ints


@dataclass(slots=True)
class Equalizer:
    """The factors of the equalizer, which `statistics` writes, and the sample of Q that they depend on.

    Attributes:
        factors: (batch, kv_heads, CHANNELS); None without equalizing.
        samples: rows of a head, at equal distances from the first one on.
        sample_step: distance between two of these rows.
        softmax_scale: factor of the scores, for the choice of heavy keys.
    """

    factors: Floats
    q_heads: UInt32
    samples: UInt32
    sample_step: UInt32
    q_len: Int
    softmax_scale: Float


@dataclass(slots=True)
class StatisticsParameters:
    """Parameters of the kernel `statistics`, which reads all of K and V."""

    key: Tokens
    value: Tokens
    statistics: Statistics
    query: Tokens
    equalizer: Equalizer


@dataclass(slots=True)
class Int8QuantizeParameters:
    """Parameters of the kernel `quantize`; its K and V begin after the first keys."""

    query: Tokens
    key: Tokens
    value: Tokens
    statistics: Statistics
    operands: Operands


@dataclass(frozen=True)
class Features:
    """Transforms and kinds of calls for which the kernels are compiled; the first three fields as in `Recipe`.

    Attributes:
        padded: some keys may not exist.
        choice: heavy keys are not just the first keys (`Call.chooses_heavy_keys`).
        causal: rows attend to keys up to their own position, and to all tiles of these keys: the forward kernel takes
            items from a queue, and chosen keys are late keys.
    """

    rotate: bool = False
    equalize: bool = False
    heavy_keys: int = 0
    padded: bool = False
    choice: bool = False
    causal: bool = False

    @classmethod
    def of(cls, recipe: Recipe, kv_len: int, padded: bool, is_causal: bool) -> Features:
        """Return the features of a recipe's statistics for a number of keys, some of them padding if `padded`."""
        mask: MaskKind = "keys" if padded else "none"
        choice = chooses_heavy_keys(recipe, kv_len, mask, is_causal)
        heavy_keys = heavy_keys_of(recipe, kv_len, mask)
        return cls(recipe.rotate, recipe.equalize, heavy_keys, padded, choice, is_causal)

    @property
    def late(self) -> bool:
        """Return whether some heavy keys are late keys."""
        return self.choice and self.causal

    @property
    def replaceable_keys(self) -> int:
        """Return the number of first keys that chosen keys may replace, if keys are chosen."""
        return HALF_BLOCK // LATE_SHARE if self.late else HALF_BLOCK

    def statistic_rows(self, channels: int) -> int:
        """Return the number of rows of a pair's statistics, without the two rows per block of tokens."""
        candidates = CLUSTER_BLOCKS * 2 * BLOCK // channels + 1 if self.choice else 0
        return self.factors_row + self.rotate + 2 * CLUSTER_BLOCKS * self.equalize + self.padded + candidates

    @property
    def factors_row(self) -> int:
        """Return the row of a pair's statistics that holds the rotation's factors, if there is such a row."""
        return 2 + 3 * CLUSTER_BLOCKS + self.rotate


PLAIN = Features()


@cache
def kernels(
    channels: int, dtype: torch.dtype, pv: str, return_lse: bool, features: Features = PLAIN
) -> tuple[ConfiguredKernel, ConfiguredKernel]:
    """Return `statistics` and `quantize`, for operands with 64 or 128 channels."""
    statistics_threads = channels
    macros = {
        **tokens.macros(channels, dtype),
        "PV_FLOAT16": pv == "fp16",
        "MEAN_SCORE": return_lse or features.heavy_keys > 0,
        "ROTATE": features.rotate,
        "EQUALIZE": features.equalize,
        "HEAVY_KEYS": features.heavy_keys,
        "MEAN_PARTS": MEAN_PARTS,
        "PADDED": features.padded,
        "CHOICE": features.choice,
        "LATE": features.late,
        "QUEUE": features.causal,
        "PLACES": features.replaceable_keys,
        "FIRST_KEYS": features.heavy_keys - features.late * features.replaceable_keys,
        "HEAVY_QUERIES": HEAVY_QUERIES,
        "HEAVY_MARGIN": HEAVY_MARGIN,
        "LOUD_GROUPS": LOUD_GROUPS,
        "LOUD": LOUD,
        "MAX_EQUALIZER": MAX_EQUALIZER,
        "MIN_VARIANCE": MIN_VARIANCE,
        **signs(channels),
        "BLOCK": BLOCK,
        "HALF_BLOCK": HALF_BLOCK,
        "KEY_BLOCK": KEY_BLOCK,
        "KEYS_PER_SCALE": THREAD_TOKENS,
        "VALUE_CHANNELS": VALUE_CHANNELS,
        "CLUSTER_BLOCKS": CLUSTER_BLOCKS,
        "STATISTIC_ROWS": features.statistic_rows(channels),
        "STATISTICS_THREADS": statistics_threads,
        "QUANTIZE_THREADS": THREADS,
        "LARGEST_E4M3": E4M3_MAX,
        "HEADROOM_EXPONENT": int(math.log2(FP16_HEADROOM)),
        "MIN_MEAN": MIN_MEAN,
        "ERROR_STEP": ERROR_STEP,
        "LARGEST_MOVE": LARGEST_MOVE,
    }
    parameters = {"statistics": StatisticsParameters, "quantize": Int8QuantizeParameters}
    source = KernelSource("quantize.cu", parameters, macros)
    return ConfiguredKernel(source, "statistics", statistics_threads), ConfiguredKernel(source, "quantize", THREADS)


def signs(channels: int) -> dict[str, int]:
    """Return the rotation's signs by the names of their constants: 32 bits each, 1 where a channel is negated."""
    negated = (rotation_signs(channels) < 0).tolist()
    words = [sum(bit << place for place, bit in enumerate(negated[start : start + 32])) for start in range(0, 128, 32)]
    return {f"SIGNS_{number}": word for number, word in enumerate(words)}


def unsupported(request: Request) -> str:
    """Return why the kernels for a request of `registration.CudaInt8Quantizer` are unavailable; "" if available."""
    recipe, channels = get_recipe(request.recipe), power_of_two(request.head_dim)
    features = Features.of(recipe, request.kv_len, request.mask in ("keys", "block_keys"), request.is_causal)
    if request.mask in ("blocks", "block_keys"):
        features = replace(features, heavy_keys=0, choice=False, causal=False)
    return kernels(channels, request.dtype, recipe.pv, request.return_lse, features)[0].source.unavailable()


def kernels_of(call: Call, padded: bool) -> tuple[ConfiguredKernel, ConfiguredKernel]:
    """Return the kernels of `quantize_operands` for a call."""
    channels = power_of_two(call.query.shape[3])
    return kernels(channels, call.query.dtype, call.recipe.pv, call.return_lse, _features(call, padded))


def _features(call: Call, padded: bool) -> Features:
    recipe, causal = call.recipe, call.is_causal and call.mask.blocks is None
    return Features(recipe.rotate, recipe.equalize, call.heavy_keys, padded, call.chooses_heavy_keys, causal)


def quantize_operands(call: Call, padding: KeyPadding | None = None, *, leaves_query: bool = False) -> Int8Operands:
    """Transform and quantise Q, K, V as `reference.forward.quantize_operands` does.

    The kernel that writes the operands lets the stream's next kernel start early.

    Args:
        call: a call that `registration.CudaInt8Quantizer` serves: one dtype, float16 or bfloat16, with head_dim and
            v_head_dim multiples of 8, both 33 to 64 or both 65 to 128, their channels contiguous, their addresses and
            other strides multiples of 16 bytes.
        padding: which keys exist, with spans that this function writes; None: all exist.
        leaves_query: the operands hold Q unchanged, with an empty scale and the factors of its rotation, and
            `int8_forward` quantises Q; not if the LSE is wanted.

    Raises:
        CompileError: see `launch.launch`.
    """
    tail = call.tail
    features = _features(call, padding is not None)
    query, key, value, pv, return_lse = call.query, tail.key, tail.value, call.recipe.pv, call.return_lse
    batch, q_heads, q_len, head_dim = query.shape
    _, kv_heads, kv_len, v_head_dim = value.shape
    channels, pairs = power_of_two(head_dim), batch * kv_heads
    q_blocks, blocks, sum_blocks = (ceil_div(tokens, BLOCK) for tokens in (q_len, kv_len, call.kv_len))
    q_shape, kv_shape = (batch, q_heads, q_blocks * BLOCK), (batch, kv_heads, blocks * BLOCK)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return query.new_empty(shape, dtype=dtype)

    lines = new(batch, kv_heads, features.statistic_rows(channels) + 2 * sum_blocks, channels)
    value_shape = (blocks * BLOCK, channels) if pv == "fp16" else (channels, blocks * BLOCK)
    heavy_shape = (batch, kv_heads, features.heavy_keys, channels)
    chosen = new(batch, kv_heads, features.replaceable_keys, dtype=torch.int32) if features.choice else None
    heavy = None
    if features.heavy_keys:
        key_rows = features.heavy_keys + leaves_query * MEAN_PARTS
        heavy = HeavyKeys(
            new(batch, kv_heads, key_rows, channels, dtype=query.dtype),
            new(*heavy_shape, dtype=query.dtype),
            chosen if features.late else None,
        )
    reads_mean = return_lse or (heavy is not None and not leaves_query)
    operands = Int8Operands(
        query if leaves_query else new(*q_shape, channels, dtype=torch.int8),
        new(0) if leaves_query else new(*q_shape),
        new(*kv_shape, channels, dtype=torch.int8),
        new(batch, kv_heads, blocks * (BLOCK // KEY_BLOCK), KEY_BLOCK // THREAD_TOKENS, dtype=torch.bfloat16),
        new(batch, kv_heads, *value_shape, dtype=VALUE_DTYPES[pv]),
        new(batch, kv_heads, channels),
        new(batch, kv_heads, channels),
        new(*q_shape) if reads_mean else None,
        heavy,
        new(batch, kv_heads, channels) if features.equalize else None,
        lines[:, :, features.factors_row] if leaves_query and features.rotate else None,
        new(1, dtype=torch.int32) if features.causal else None,
    )
    halves = BLOCK // HALF_BLOCK
    query_blocks = 0 if leaves_query else q_blocks * halves * batch * q_heads
    blocks_of_pair = blocks * (halves + (halves if pv == "fp16" else channels // VALUE_CHANNELS))
    if heavy is not None:
        blocks_of_pair += 2
    key_tokens, value_tokens = Tokens.of(key), Tokens.of(value)
    statistics = Statistics(
        lines=lines,
        value_mean=operands.value_mean,
        value_scale=operands.value_scale,
        chosen=chosen,
        kv_heads=kv_heads,
        blocks=blocks,
        sum_blocks=sum_blocks,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        kv_len=kv_len,
        key_mask=None if padding is None else padding.key_mask_u8,
        key_mask_stride=0 if padding is None else padding.strides[0],
    )
    paddings = 0 if padding is None else padding.key_mask_u8.shape[0]
    written = Operands(
        query=operands.query,
        query_scale=operands.query_scale,
        key=operands.key,
        key_scale=operands.key_scale,
        value=operands.value,
        mean_score=operands.mean_score,
        pairs=pairs,
        q_heads=q_heads,
        q_blocks=q_blocks,
        leading_query_blocks=0 if reads_mean or features.rotate else min(LEADING_QUERY_BLOCKS, query_blocks),
        q_len=q_len,
        heavy_key=None if heavy is None else heavy.key,
        heavy_value=None if heavy is None else heavy.value,
        heavy_key_with_mean=leaves_query,
        spans=None if padding is None else padding.spans,
        paddings=paddings,
        queue=operands.queue,
    )
    statistics_kernel, quantize_kernel = kernels_of(call, padding is not None)
    query_tokens, sample_step = Tokens.of(query), ceil_div(q_len, EQUALIZER_QUERIES)
    equalizer = Equalizer(
        factors=operands.equalizer,
        q_heads=q_heads,
        samples=ceil_div(q_len, sample_step),
        sample_step=sample_step,
        q_len=q_len,
        softmax_scale=call.scale,
    )
    launch(
        statistics_kernel,
        2 * pairs * CLUSTER_BLOCKS,
        StatisticsParameters(
            key=Tokens.of(call.key),
            value=Tokens.of(call.value),
            statistics=statistics,
            query=query_tokens,
            equalizer=equalizer,
        ),
        query.device,
    )
    launch(
        quantize_kernel,
        query_blocks + pairs * blocks_of_pair + paddings,
        Int8QuantizeParameters(
            query=query_tokens, key=key_tokens, value=value_tokens, statistics=statistics, operands=written
        ),
        query.device,
        dependent=True,
    )
    return operands
