"""The backward pass of recipes with gradients: S from INT8 again, then dV, dK and dQ (`reference_backward`).

Two kernels see the same tiles of scores: `backward_keys` holds keys and walks over queries, for dK and dV;
`backward_queries` holds queries and walks over keys, for dQ. So each gradient is summed in registers, in one order,
without atomics. They run one after the other, and so do the passes that write what their loops read: there are never
more than two such tensors of 16 bit at a time.

Of both there is a second form, in Gluon, for Hopper: `why_not_hopper` says which calls it does not serve. A program of
it fills a multiprocessor, so that the last wave of programs may be nearly empty (3 % of the time at 64 heads × 8,192
tokens); therefore the second kernel begins while the first one ends. For memory's sake it reads dO and V where the
caller has them, if it can.
"""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from ..recipe import Recipe
from ..saved import Lengths, Saved, padded_channels
from .backward_keys import int8_backward_key
from .backward_operands import TokenRows, batch_strides, key_operands, query_operands
from .backward_queries import int8_backward_query
from .calls import clamped_offset
from .configs import (
    HOPPER_BACKWARD_KEY,
    HOPPER_BACKWARD_QUERY,
    int8_backward_key_config,
    int8_backward_query_config,
)
from .int8_training import token_axes
from .key_padding import KeyPadding
from .launch import launch, overlapping
from .registration import triton_version
from .sequences import ceil_div

HOPPER_TRITON = ((3, 6), (3, 9))  # the oldest and the newest whose Gluon, which is experimental, we have compiled with
HOPPER_CHANNELS = (64, 128)


def why_not_hopper(capability: tuple[int, int], channels: int, v_channels: int, int8: bool) -> str:
    """Why the backward kernels that are written for Hopper do not serve a call; "" when they do.

    Args:
        capability: the GPU's.
        channels, v_channels: of the operands.
        int8: P and dS are INT8.
    """
    if capability != (9, 0):
        return "needs compute capability 9.0"
    if knobs.runtime.interpret:
        return "Triton's interpreter does not run Gluon"
    triton, (oldest, newest) = triton_version(), HOPPER_TRITON
    if triton is None or not oldest <= triton <= newest:
        return f"needs Triton {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    if int8:
        return "multiplies P and dS in 16 bit"
    if channels not in HOPPER_CHANNELS or channels != v_channels:
        return "needs 64 or 128 channels of Q, K and V"
    return ""


def backward(
    output_gradient: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    saved: Saved,
    *,
    head_dim: int,
    lengths: Lengths | None,
    valid: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int = 0,
    scale: float | None,
    recipe: Recipe,
    capability: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of Q, K and V.

    Args:
        output_gradient: (batch, q_heads, q_len, v_head_dim), value's dtype, any strides.
        value: (batch, kv_heads, kv_len, v_head_dim) float16 or bfloat16, as the forward got it.
        output, saved: what the forward returned.
        head_dim: of Q and K.
        lengths, valid, is_causal, causal_offset, scale, recipe, capability: as `int8_training.training_attention` got
            them.

    Returns:
        (query_gradient, key_gradient, value_gradient) in value's dtype, each laid out as (batch, tokens, heads,
        channels). Rows without a key, and keys that do not exist, have gradient 0 and give none.

    Raises:
        ValueError: both lengths and valid are given, or the recipe's backward has no kernel.
    """
    if lengths is not None and valid is not None:
        raise ValueError("packed sequences say by their lengths which keys exist: give no valid beside them")
    formats = recipe.backward
    if formats is None or (formats.p, formats.ds) not in (("16bit", "16bit"), ("int8", "int8")):
        raise ValueError(f"the backward of {recipe} has no kernel")
    if (formats.dp, formats.scales, formats.delta) != ("16bit", "row", "output"):
        raise ValueError(f"the backward of {recipe} has no kernel")
    # Kernels read them as they were made.
    saved = Saved(*(x.contiguous() for x in saved))
    batch, q_heads, q_len, v_head_dim = output_gradient.shape
    kv_heads, kv_len = value.shape[1:3]
    sequences, q_sequences, kv_sequences = token_axes(q_len, kv_len, lengths)
    # Zeros where only the GPU knows the lengths, which say what is written.
    empty = 0 in (*output_gradient.shape, *value.shape[1:3], sequences, q_sequences.tokens, kv_sequences.tokens)
    new = value.new_zeros if empty or sequences is not None else value.new_empty
    gradients = (
        new(batch, q_len, q_heads, head_dim).transpose(1, 2),
        new(batch, kv_len, kv_heads, head_dim).transpose(1, 2),
        new(batch, kv_len, kv_heads, v_head_dim).transpose(1, 2),
    )
    if empty:
        return gradients
    padding = None if valid is None else KeyPadding.of(valid)
    int8 = formats.ds == "int8"
    count = sequences or batch
    channels, v_channels = saved.query.shape[-1], padded_channels(v_head_dim)
    tma = capability[0] >= 9
    hopper = not why_not_hopper(capability, channels, v_channels, int8)
    causal_offset = clamped_offset(causal_offset, q_sequences, kv_sequences)
    own_value = own_gradient = None
    if hopper and lengths is None and v_head_dim == v_channels:
        own_value = TokenRows.of(value)
        # Each row of each tile has a key: it must not be 0 instead.
        if q_len % HOPPER_BACKWARD_KEY.block_m == 0 and padding is None and not (is_causal and causal_offset < 0):
            own_gradient = TokenRows.of(output_gradient)
    queries = query_operands(output_gradient, output, saved, count, q_sequences, int8, own_gradient is None)
    lse, delta = queries.lse, queries.delta
    shared: tuple[Any, ...] = (
        None if padding is None else padding.valid,
        None if padding is None else padding.spans,
        *((0, 0) if padding is None else padding.strides),
        q_sequences.ranges,
        kv_sequences.ranges,
        q_sequences.tokens,
        kv_sequences.tokens,
        q_sequences.rows,
        kv_sequences.rows,
        q_heads // kv_heads,
        causal_offset,
        head_dim**-0.5 if scale is None else scale,
        head_dim,
        v_head_dim,
    )
    constants: dict[str, Any] = {
        "CHANNELS": channels,
        "CAUSAL": is_causal,
        "PADDED": padding is not None,
        "PACKED": q_sequences.packed,
        "RAGGED": q_sequences.ranges is not None,
    }
    plain_constants = {"V_CHANNELS": v_channels, "INT8": int8, "TMA": tma, **constants}

    def tiles(x: torch.Tensor | None, block: int, transposed: bool = False) -> torch.Tensor | TensorDescriptor | None:
        """An operand as a kernel reads tiles of `block` tokens of it."""
        if x is None or not tma:
            return x
        shape = [x.shape[2], block] if transposed else [block, x.shape[3]]
        return TensorDescriptor.from_tensor(x.view(-1, x.shape[3]), shape)

    def placed(own: TokenRows | None, copy: torch.Tensor | None) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """The caller's tensor or the copy that was made of it, and where a head's rows are."""
        if own is not None:
            return own.rows, own.place
        assert copy is not None
        heads, rows = copy.shape[1:3]
        return copy, (0 if q_sequences.packed else heads * rows, rows, 0)

    key_strides = [batch_strides(x, kv_sequences) for x in (value, *gradients[1:])]
    query_strides = [batch_strides(x, q_sequences) for x in (output_gradient, gradients[0])]
    if hopper:
        from .hopper_backward_keys import hopper_backward_key  # another Triton's Gluon may be another
        from .hopper_backward_queries import hopper_backward_query
        from .hopper_stages import stage_tiles

        operand_value, key = key_operands(value, saved, count, kv_sequences, padding, int8, own_value is None)
        gradient_rows, gradient_place = placed(own_gradient, queries.gradient)
        value_rows, value_place = placed(own_value, operand_value)
        with overlapping(value.device) as beside:
            config = HOPPER_BACKWARD_KEY
            launch(
                hopper_backward_key,
                (ceil_div(kv_sequences.tokens, config.block_n), kv_heads, count),
                saved.key,
                saved.key_scale,
                value,
                *(
                    stage_tiles(x, config.block_m, channels)
                    for x in (saved.query, saved.query_scale, queries.query, gradient_rows, lse, delta)
                ),
                *gradient_place,
                gradients[1],
                gradients[2],
                *shared,
                *key_strides[0],
                *key_strides[1][:3],
                *key_strides[2][:3],
                STAGES=config.num_stages,
                **constants,
                **config.constants,
            )
            config = HOPPER_BACKWARD_QUERY
            with beside:
                launch(
                    hopper_backward_query,
                    (ceil_div(q_sequences.tokens, config.block_m), q_heads, count),
                    saved.query,
                    saved.query_scale,
                    output_gradient,
                    *(stage_tiles(x, config.block_n, channels) for x in (saved.key, key, value_rows)),
                    *value_place,
                    saved.key_scale,
                    gradients[0],
                    lse,
                    delta,
                    *shared,
                    *query_strides[0],
                    *query_strides[1][:3],
                    STAGES=config.num_stages,
                    **constants,
                    **config.constants,
                )
        return gradients
    config = int8_backward_key_config(capability, max(channels, v_channels), int8)
    launch(
        int8_backward_key,
        (ceil_div(kv_sequences.tokens, config.block_n), kv_heads, count),
        saved.key,
        saved.key_scale,
        value,
        tiles(saved.query, config.block_m),
        saved.query_scale,
        tiles(queries.query, config.block_m, transposed=int8),
        tiles(queries.gradient, config.block_m),
        tiles(queries.gradient_codes, config.block_m, transposed=True),
        queries.gradient_scale,
        gradients[1],
        gradients[2],
        lse,
        delta,
        *shared,
        *key_strides[0],
        *key_strides[1],
        *key_strides[2],
        **plain_constants,
        **config.constants,
    )
    del queries  # before as much is allocated again
    operand_value, key = key_operands(value, saved, count, kv_sequences, padding, int8, True)
    config = int8_backward_query_config(capability, max(channels, v_channels), int8)
    launch(
        int8_backward_query,
        (ceil_div(q_sequences.tokens, config.block_m), q_heads, count),
        saved.query,
        saved.query_scale,
        output_gradient,
        tiles(saved.key, config.block_n),
        saved.key_scale,
        tiles(key, config.block_n, transposed=int8),
        tiles(operand_value, config.block_n),
        gradients[0],
        lse,
        delta,
        *shared,
        *query_strides[0],
        *query_strides[1],
        **plain_constants,
        **config.constants,
    )
    return gradients
