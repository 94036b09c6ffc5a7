"""Operations of kernels: `int8_forward` and `nvfp4_forward` mask tiles of scores; these two, `masked_forward`,
`nonprefix_forward`, `splitkv_forward` and `kv_decode` store outputs.
"""

import math

import triton
import triton.language as tl

from .padding import key_exists

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
FLOAT16_MAX = tl.constexpr(65504.0)
BFLOAT16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def base_2(bias):
    """Return an additive mask for scores in base 2. Finite elements stay finite, as rows of only padding need."""
    bias = bias.to(tl.float32)
    finite = tl.clamp(bias * LOG2E, -FLOAT32_MAX, FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(tl.abs(bias) == float("inf"), bias, finite)


@triton.jit
def mask_scores(
    x,
    mask,
    row,
    column,
    q_len,
    kv_len,
    causal_offset,
    stride_row,
    stride_column,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Return a tile of scores in base 2 with the mask applied: -inf where a row may not attend to a key.

    Args:
        x: float32 (rows, columns).
        mask: pointer to the mask of a (batch, head), or for kind "keys" to the validity of a batch's keys.
        row, column: indices in their sequences, (rows,) and (columns,).
        MASK: "none", "keys", "bool" or "additive".
    """
    allowed = key_exists(column, kv_len, mask, MASK == "keys")[None, :]
    if CAUSAL:
        allowed = allowed & (column[None, :] <= row[:, None] + causal_offset)
    if MASK == "bool" or MASK == "additive":
        inside = allowed & (row < q_len)[:, None]
        at = mask + row.to(tl.int64)[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
        if MASK == "bool":
            allowed = tl.load(at, mask=inside, other=0) != 0
        else:
            x += base_2(tl.load(at, mask=inside, other=float("-inf")))
    return tl.where(allowed, x, float("-inf"))


@triton.jit
def store_clamped(into, x, inside):
    """Store float32 x as `round_finite` rounds it, because a rounded V can exceed every unrounded V."""
    tl.store(into, round_finite(x, into.dtype.element_ty), mask=inside)


@triton.jit
def round_finite(x, dtype: tl.constexpr):
    """Round float32 x; finite numbers beyond the dtype's range become its largest number, non-finite numbers NaN."""
    # The product with 0 is NaN if x is not finite. A comparison would take registers that kernels lack.
    if dtype == tl.float16:
        x = tl.fma(x, 0.0, tl.clamp(x, -FLOAT16_MAX, FLOAT16_MAX))
    if dtype == tl.bfloat16:
        x = tl.fma(x, 0.0, tl.clamp(x, -BFLOAT16_MAX, BFLOAT16_MAX))
    return x.to(dtype)
