"""The backward pass of recipes with gradients: S from INT8 again, then dV, dK and dQ (`reference_backward`).

Two kernels see the same tiles of scores: `backward_keys` holds keys and walks over queries, for dK and dV;
`backward_queries` holds queries and walks over keys, for dQ. So each gradient is summed in registers, in one order,
without atomics. They run one after the other, and so do the passes that write what their loops read: there are never
more than two such tensors of 16 bit at a time.

Of both there is a second form, in Gluon, for Hopper: `why_not_hopper` says which calls it does not serve. A program of
it fills a multiprocessor, so that the last wave of programs may be nearly empty: 2 % of the backward pass at 64 heads ×
8,192 tokens × 64 channels. Therefore the second kernel begins while the first one ends. What both loops read is there
at the same time then, and to make up for it they read dO and V where the caller has them, if they can.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from .sequences import Sequences, ceil_div

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
    call = _Call(
        output_gradient=output_gradient,
        value=value,
        output=output,
        saved=saved,
        gradients=gradients,
        count=sequences or batch,
        q_sequences=q_sequences,
        kv_sequences=kv_sequences,
        padding=None if valid is None else KeyPadding.of(valid),
        is_causal=is_causal,
        causal_offset=clamped_offset(causal_offset, q_sequences, kv_sequences),
        scale=head_dim**-0.5 if scale is None else scale,
        int8=formats.ds == "int8",
    )
    if why_not_hopper(capability, call.channels, call.v_channels, call.int8):
        _run_plain(call, capability)
    else:
        _run_hopper(call)
    return gradients


@dataclass(frozen=True)
class _Call:
    """What the kernels of a backward pass get: what `backward` got, the token axes, and where gradients go."""

    output_gradient: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    saved: Saved
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    count: int  # of sequences
    q_sequences: Sequences
    kv_sequences: Sequences
    padding: KeyPadding | None
    is_causal: bool
    causal_offset: int
    scale: float
    int8: bool

    @property
    def channels(self) -> int:
        """Of the operands of Q and K."""
        return self.saved.query.shape[-1]

    @property
    def v_channels(self) -> int:
        """Of the operands of V and dO."""
        return padded_channels(self.value.shape[3])

    def key_grid(self, keys: int) -> tuple[int, int, int]:
        """Of programs that hold so many keys."""
        return ceil_div(self.kv_sequences.tokens, keys), self.value.shape[1], self.count

    def query_grid(self, rows: int) -> tuple[int, int, int]:
        """Of programs that hold so many rows."""
        return ceil_div(self.q_sequences.tokens, rows), self.output.shape[1], self.count

    @property
    def key_strides(self) -> list[tuple[int, ...]]:
        """Of V, dK and dV."""
        return [batch_strides(x, self.kv_sequences) for x in (self.value, *self.gradients[1:])]

    @property
    def query_strides(self) -> list[tuple[int, ...]]:
        """Of dO and dQ."""
        return [batch_strides(x, self.q_sequences) for x in (self.output_gradient, self.gradients[0])]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of every kernel, between its tensors and their strides."""
        return (
            None if self.padding is None else self.padding.valid,
            None if self.padding is None else self.padding.spans,
            *((0, 0) if self.padding is None else self.padding.strides),
            self.q_sequences.ranges,
            self.kv_sequences.ranges,
            self.q_sequences.tokens,
            self.kv_sequences.tokens,
            self.q_sequences.rows,
            self.kv_sequences.rows,
            self.output.shape[1] // self.value.shape[1],
            self.causal_offset,
            self.scale,
            self.gradients[0].shape[3],
            self.value.shape[3],
        )

    @property
    def constants(self) -> dict[str, Any]:
        """Of every kernel."""
        return {
            "CHANNELS": self.channels,
            "CAUSAL": self.is_causal,
            "PADDED": self.padding is not None,
            "PACKED": self.q_sequences.packed,
            "RAGGED": self.q_sequences.ranges is not None,
        }


def _run_plain(call: _Call, capability: tuple[int, int]) -> None:
    tma = capability[0] >= 9
    channels = max(call.channels, call.v_channels)
    saved, gradients = call.saved, call.gradients
    constants = {"V_CHANNELS": call.v_channels, "INT8": call.int8, "TMA": tma, **call.constants}

    def tiles(x: torch.Tensor | None, block: int, transposed: bool = False) -> torch.Tensor | TensorDescriptor | None:
        """An operand as a kernel reads tiles of `block` tokens of it."""
        if x is None or not tma:
            return x
        shape = [x.shape[2], block] if transposed else [block, x.shape[3]]
        return TensorDescriptor.from_tensor(x.view(-1, x.shape[3]), shape)

    queries = query_operands(
        call.output_gradient, call.output, saved, call.count, call.q_sequences, call.int8, copy_gradient=True
    )
    lse, delta = queries.lse, queries.delta
    config = int8_backward_key_config(capability, channels, call.int8)
    launch(
        int8_backward_key,
        call.key_grid(config.block_n),
        saved.key,
        saved.key_scale,
        call.value,
        tiles(saved.query, config.block_m),
        saved.query_scale,
        tiles(queries.query, config.block_m, transposed=call.int8),
        tiles(queries.gradient, config.block_m),
        tiles(queries.gradient_codes, config.block_m, transposed=True),
        queries.gradient_scale,
        *gradients[1:],
        lse,
        delta,
        *call.arguments,
        *(stride for strides in call.key_strides for stride in strides),
        **constants,
        **config.constants,
    )
    del queries  # before as much is allocated again
    value, key = key_operands(
        call.value, saved, call.count, call.kv_sequences, call.padding, call.int8, copy_value=True
    )
    config = int8_backward_query_config(capability, channels, call.int8)
    launch(
        int8_backward_query,
        call.query_grid(config.block_m),
        saved.query,
        saved.query_scale,
        call.output_gradient,
        tiles(saved.key, config.block_n),
        saved.key_scale,
        tiles(key, config.block_n, transposed=call.int8),
        tiles(value, config.block_n),
        gradients[0],
        lse,
        delta,
        *call.arguments,
        *(stride for strides in call.query_strides for stride in strides),
        **constants,
        **config.constants,
    )


def _run_hopper(call: _Call) -> None:
    from .hopper_backward_keys import hopper_backward_key  # another Triton's Gluon may be another
    from .hopper_backward_queries import hopper_backward_query
    from .hopper_stages import stage_tiles

    saved, gradients, channels = call.saved, call.gradients, call.channels
    of_keys, of_queries = HOPPER_BACKWARD_KEY, HOPPER_BACKWARD_QUERY
    own_value = own_gradient = None
    if not call.q_sequences.packed and call.value.shape[3] == channels:
        own_value = TokenRows.of(call.value)
        # Each row of each tile has a key: it must not be 0 instead.
        has_key = call.padding is None and not (call.is_causal and call.causal_offset < 0)
        if has_key and call.q_sequences.tokens % of_keys.block_m == 0:
            own_gradient = TokenRows.of(call.output_gradient)
    queries = query_operands(
        call.output_gradient, call.output, saved, call.count, call.q_sequences, call.int8, own_gradient is None
    )
    value, key = key_operands(
        call.value, saved, call.count, call.kv_sequences, call.padding, call.int8, own_value is None
    )

    def placed(own: TokenRows | None, copy: torch.Tensor | None) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """The caller's tensor or the copy that was made of it, and where a head's rows are."""
        if own is not None:
            return own.rows, own.place
        assert copy is not None
        heads, rows = copy.shape[1:3]
        return copy, (0 if call.q_sequences.packed else heads * rows, rows, 0)

    gradient_rows, gradient_place = placed(own_gradient, queries.gradient)
    value_rows, value_place = placed(own_value, value)
    query_loads = (saved.query, saved.query_scale, queries.query, gradient_rows, queries.lse, queries.delta)
    key_loads = (saved.key, key, value_rows)
    of_value, of_key_gradient, of_value_gradient = call.key_strides
    of_gradient, of_query_gradient = call.query_strides
    with overlapping(call.value.device) as beside:
        launch(
            hopper_backward_key,
            call.key_grid(of_keys.block_n),
            saved.key,
            saved.key_scale,
            call.value,
            *(stage_tiles(x, of_keys.block_m, channels) for x in query_loads),
            *gradient_place,
            *gradients[1:],
            *call.arguments,
            *of_value,
            *of_key_gradient[:3],
            *of_value_gradient[:3],
            STAGES=of_keys.num_stages,
            **call.constants,
            **of_keys.constants,
        )
        with beside:
            launch(
                hopper_backward_query,
                call.query_grid(of_queries.block_m),
                saved.query,
                saved.query_scale,
                call.output_gradient,
                *(stage_tiles(x, of_queries.block_n, channels) for x in key_loads),
                *value_place,
                saved.key_scale,
                gradients[0],
                queries.lse,
                queries.delta,
                *call.arguments,
                *of_gradient,
                *of_query_gradient[:3],
                STAGES=of_queries.num_stages,
                **call.constants,
                **of_queries.constants,
            )
