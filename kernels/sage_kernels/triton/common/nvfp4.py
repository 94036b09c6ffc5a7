"""Tiles of the NVFP4 forward kernel: products, masks, the softmax, and the quantisation of P."""

import math

import triton
import triton.language as tl

from ...formats.weights import P_SCALE
from .formats import (
    GROUP,
    decode_e4m3,
    dequantize,
    encode_e4m3,
    max_or_nan,
    native_bytes,
    native_log2,
    native_pack_e2m1,
    round_to_e2m1,
)
from .scores import base_2

P_SCALE_LOG2 = tl.constexpr(math.log2(P_SCALE["nvfp4"]))
E2M1_MAX_LOG2 = tl.constexpr(math.log2(6))
E4M3_ROUNDS_TO_0 = tl.constexpr(2.0**-10)  # the largest number that e4m3 rounds to 0


@triton.jit
def dot_nvfp4(a, a_scale, b, b_scale, accumulator, NATIVE: tl.constexpr):
    """Return accumulator + A·Bᵀ; a (m, k/2) and b (n, k/2) are packed e2m1, scales (·, k/16) e4m3 bits."""
    if NATIVE:
        # Triton reads uint8 scales as e8m0.
        return tl.dot_scaled(
            a,
            a_scale.to(tl.float8e4nv, bitcast=True),
            "e2m1",
            tl.trans(b),
            b_scale.to(tl.float8e4nv, bitcast=True),
            "e2m1",
            accumulator,
        )
    else:
        return tl.dot(dequantize(a, a_scale), tl.trans(dequantize(b, b_scale)), accumulator)


@triton.jit
def key_order(x):
    """Reorder the columns of x (m, n) from positions in the operand to key indices; takes no instruction."""
    x = tl.permute(tl.reshape(x, (x.shape[0], x.shape[1] // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2] * x.shape[3] * x.shape[4]))


@triton.jit
def repeat_columns(x, TIMES: tl.constexpr):
    """Repeat every column of x (m, n) TIMES times in succession: (m, TIMES·n)."""
    copies = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], TIMES))
    return tl.reshape(copies, (x.shape[0], x.shape[1] * TIMES))


@triton.jit
def thread_keys(x):
    """View x (m, n) as (m, n/8, 8): consecutive keys of a row that one thread holds come together."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // 8, 8))


@triton.jit
def mask_from(column, x):
    """Set x (m, n) to -inf in the columns from `column`, a scalar or (m, 1), on."""
    # One difference per `thread_keys`; the differences are then compared with constants.
    room = column - 8 * tl.arange(0, x.shape[1] // 8)[None, :]
    allowed = tl.arange(0, 8)[None, None, :] < room[:, :, None]
    return tl.reshape(tl.where(allowed, thread_keys(x), float("-inf")), x.shape)


@triton.jit
def mask_bits(mask, row, column, q_len, limit, stride_row, stride_column):
    """Load a boolean mask: int32 (m, n/8), whose bit i allows row (m,) to attend to key column + i, column (n/8,).

    Keys from `limit` on, a scalar or (m, 1), are not allowed.
    """
    at = mask + row.to(tl.int64)[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
    bits = tl.zeros((row.shape[0], column.shape[0]), tl.int32)
    for i in tl.static_range(8):
        inside = (row < q_len)[:, None] & ((column + i)[None, :] < limit)
        bits |= tl.load(at + i * stride_column, mask=inside, other=0).to(tl.int32) << i
    return bits


@triton.jit
def mask_by_bits(bits, x):
    """Set x (m, n) to -inf where a bit of `mask_bits` is 0."""
    allowed = (bits[:, :, None] & (1 << tl.arange(0, 8))[None, None, :]) != 0
    return tl.reshape(tl.where(allowed, thread_keys(x), float("-inf")), x.shape)


@triton.jit
def mask_biases(mask, row, column, q_len, limit, stride_row, stride_column):
    """Load an additive mask for scores in base 2: eight float32 (m, n/8), for keys column + 0 … 7; see `mask_bits`."""
    inside = (row < q_len)[:, None]
    at = mask + row.to(tl.int64)[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
    b0 = _mask_bias(at, 0, inside, column, limit, stride_column)
    b1 = _mask_bias(at, 1, inside, column, limit, stride_column)
    b2 = _mask_bias(at, 2, inside, column, limit, stride_column)
    b3 = _mask_bias(at, 3, inside, column, limit, stride_column)
    b4 = _mask_bias(at, 4, inside, column, limit, stride_column)
    b5 = _mask_bias(at, 5, inside, column, limit, stride_column)
    b6 = _mask_bias(at, 6, inside, column, limit, stride_column)
    b7 = _mask_bias(at, 7, inside, column, limit, stride_column)
    return b0, b1, b2, b3, b4, b5, b6, b7


@triton.jit
def _mask_bias(at, i: tl.constexpr, inside, column, limit, stride_column):
    inside = inside & ((column + i)[None, :] < limit)
    return base_2(tl.load(at + i * stride_column, mask=inside, other=float("-inf")))


@triton.jit
def thread_sums(x):
    """Sum x (m, n/8), one number per `thread_keys`, within each thread: (m, 4)."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 4)), 1)


@triton.jit
def load_scales(scale, offset, GROUPS: tl.constexpr, NATIVE: tl.constexpr):
    """Load GROUPS scales of each row from `offset` (n, 1) on, uint8 (n, GROUPS).

    Native kernels load words of four: narrower copies to shared memory are not asynchronous, and are spread byte by
    byte.
    """
    if NATIVE:
        words = scale.to(tl.pointer_type(tl.int32), bitcast=True)
        return native_bytes(tl.load(words + offset // 4 + tl.arange(0, GROUPS // 4)[None, :]))
    else:
        return tl.load(scale + offset + tl.arange(0, GROUPS)[None, :])


@triton.jit
def broadcast_delta(delta, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TWICE: tl.constexpr):
    """Load BLOCK_N scores of Q's mean for each row: float32 (BLOCK_M, BLOCK_N).

    If a thread's four accumulators of an MMA instruction are two columns of two rows, TWICE loads each pair of
    columns twice, one after the other: then the registers are ordered as the instruction needs.
    """
    if TWICE:
        pair, copy, column = tl.arange(0, BLOCK_N // 2), tl.arange(0, 2), tl.arange(0, 2)
        offset = (2 * pair[:, None, None] + column[None, None, :]) + 0 * copy[None, :, None]
        both = tl.reshape(tl.permute(tl.load(delta + offset), (1, 0, 2)), (2, BLOCK_N))
        rows = tl.broadcast_to(both[None, :, None, :], (BLOCK_M // 16, 2, 8, BLOCK_N))
        return tl.reshape(rows, (BLOCK_M, BLOCK_N))
    else:
        return tl.broadcast_to(tl.load(delta + tl.arange(0, BLOCK_N))[None, :], (BLOCK_M, BLOCK_N))


@triton.jit
def softmax_tile(s, factor, row_max, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    """Compute the maxima of a tile of the online softmax, and the scales of its P.

    Args:
        s: float32 (m, n) scores in the order of keys, in base 2 times `factor`; with MASKED, -inf where masked.
        row_max: (m,), of earlier tiles.

    Returns:
        (shift, scale, decay, row_max): P·448·6 is 2 to the power of s·factor - shift, (m,), and `scale` a sixth of the
        largest element of each group of 16, (m, n/16). Sums of earlier tiles must be multiplied by `decay`.
    """
    if NATIVE:
        largest = tl.reduce(thread_keys(s), 2, max_or_nan)
        tile_max = tl.reduce(largest, 1, max_or_nan)
        new_max = max_or_nan(row_max, tile_max * factor)
    else:
        largest = tl.max(thread_keys(s), 2)
        new_max = tl.maximum(row_max, tl.max(largest, 1) * factor)
    reference = new_max
    if MASKED:
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    shift = reference - P_SCALE_LOG2
    # The largest score has the largest exp2, so reuse the scores' maxima over 8 keys. Reduce over threads last: the
    # compiler repeats what follows such a reduction for each layout it needs.
    scale = tl.exp2(largest * factor - (shift + E2M1_MAX_LOG2)[:, None])
    scale = tl.max(tl.reshape(scale, (s.shape[0], s.shape[1] // GROUP, 2)), 2)
    return shift, scale, tl.exp2(row_max - reference), new_max


def _scale_rows_asm(count: int) -> str:
    """Return instructions that multiply `count` elements by as many factors if a warp has a factor other than 1."""
    outputs, factors = [f"${i}" for i in range(count)], [f"${i}" for i in range(2 * count, 3 * count)]
    lines = [f"setp.neu.f32 p{i}, {factor}, 0f3F800000;" for i, factor in enumerate(factors)]
    width = 1
    while width < count:
        lines += [f"or.pred p{i}, p{i}, p{i + width};" for i in range(0, count, 2 * width)]
        width *= 2
    lines += ["vote.sync.any.pred p0, p0, 0xffffffff;", "@!p0 bra.uni UNCHANGED;"]
    lines += [f"mul.f32 {output}, {output}, {factor};" for output, factor in zip(outputs, factors, strict=True)]
    return "{ .reg .pred p<" + str(count) + ">; " + " ".join(lines) + " UNCHANGED: }"


def _scale_rows_operands(count: int) -> str:
    """Return the constraints of `_scale_rows_asm`, whose elements are scaled in place."""
    return ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["f"] * count)


SCALE_32, SCALE_32_OPERANDS = tl.constexpr(_scale_rows_asm(32)), tl.constexpr(_scale_rows_operands(32))
SCALE_64, SCALE_64_OPERANDS = tl.constexpr(_scale_rows_asm(64)), tl.constexpr(_scale_rows_operands(64))


@triton.jit
def native_scale_rows(x, factor):
    """Return float32 x (m, n) times factor (m,); a warp whose factors are all 1 takes a vote instead.

    It is fastest if x has 32 or 64 elements per thread of 256.
    """
    SMALL: tl.constexpr = x.numel <= 32 * 256
    return tl.inline_asm_elementwise(
        SCALE_32 if SMALL else SCALE_64,
        SCALE_32_OPERANDS if SMALL else SCALE_64_OPERANDS,
        [x, tl.broadcast_to(factor[:, None], x.shape)],
        dtype=tl.float32,
        is_pure=True,
        pack=32 if SMALL else 64,
    )


@triton.jit
def weigh_values(
    s,
    factor,
    shift,
    scale,
    decay,
    v,
    v_scale,
    acc,
    denominator,
    row_sum,
    HAS_ROW_SUM: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return (acc, denominator, row_sum) after adding a tile of quantised P.

    Args:
        s, factor: see `softmax_tile`.
        shift, scale, decay: results of `softmax_tile`.
        v, v_scale: uint8 (v_channels, n/2), (v_channels, n/16).
        acc: the sum of P·V, (m, v_channels).
        denominator: twice the `thread_sums` of quantised P, (m, 4).
        row_sum: with HAS_ROW_SUM, the `thread_sums` of P before quantisation, (m, 4).
    """
    if NATIVE:
        scale = scale.to(tl.float8e4nv)
        bits = scale.to(tl.uint8, bitcast=True)
        step = scale.to(tl.float32)
    else:
        bits = encode_e4m3(scale)
        step = decode_e4m3(bits).to(tl.float32)
    # Dividing by the scale is a subtraction of its logarithm. In a group with scale 0, native elements may be anything,
    # since e2m1 is finite and products are 0, unless `row_sum` counts them before rounding.
    divisor = max_or_nan(step, E4M3_ROUNDS_TO_0) if HAS_ROW_SUM or not NATIVE else step
    logarithm = native_log2(divisor) if NATIVE else tl.log2(divisor)
    p = tl.exp2(s * factor - repeat_columns(shift[:, None] + logarithm, GROUP))
    if HAS_ROW_SUM:
        parts = tl.sum(thread_keys(p), 2) * repeat_columns(divisor, 2)
        row_sum = row_sum * decay[:, None] + thread_sums(parts)
    if NATIVE:
        words, sums = native_pack_e2m1(p)
        sums = sums.to(tl.float32) * repeat_columns(step, 2)
        acc = dot_nvfp4(native_bytes(words), bits, v, v_scale, native_scale_rows(acc, decay), NATIVE)
    else:
        rounded = round_to_e2m1(p) * repeat_columns(step, GROUP)
        sums = 2 * tl.sum(thread_keys(rounded), 2)
        acc = tl.dot(rounded.to(tl.float16), tl.trans(dequantize(v, v_scale)), acc * decay[:, None])
    denominator = denominator * decay[:, None] + thread_sums(sums)
    return acc, denominator, row_sum
