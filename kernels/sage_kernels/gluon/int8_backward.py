"""Backward pass of `triton.int8_backward` with P and dS in 16 bits, in kernels written for Hopper.

A program fills a multiprocessor, so the last wave of programs may be nearly empty (2 % of the time at 64 heads × 8,192
tokens × 64 channels). Therefore the second kernel starts while the first one ends, and the operands of both exist at
the same time; to save memory, the kernels read dO and V from the caller's tensors where their layout allows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..language.backward_launch import BackwardLaunch
from ..language.backward_operands import key_operands, query_operands
from ..language.launch import launch, overlapping, strides
from ..spec.call import BackwardCall
from ..spec.layout import TokenRows, ceil_div
from ..spec.operands import Saved
from .bwd_dkdv import hopper_bwd_dkdv
from .bwd_dq import hopper_bwd_dq
from .stages import ROWS, stage_tiles

# By channels. A program holds 64 keys or rows for each of two warpgroups, or of three where registers allow: with 64
# channels, the kernel that holds keys then takes 3.50 ms instead of 3.86, the kernel that holds queries 2.31 instead of
# 2.63 (H200, 64 heads × 8,192 tokens). Three leave registers for tiles of 32 queries, whose scores are started a tile
# ahead (docs/tuning-notes.md).
KEY_TILES: dict[int, dict[str, Any]] = {
    64: {"BLOCK_M": 32, "BLOCK_N": 192, "STAGES": 6, "AHEAD": True, "REGISTERS": 160},
    128: {"BLOCK_M": 64, "BLOCK_N": 128, "STAGES": 2, "AHEAD": False, "REGISTERS": 240},
}
QUERY_TILES: dict[int, dict[str, Any]] = {
    64: {"BLOCK_M": 192, "BLOCK_N": 64, "STAGES": 6, "REGISTERS": 160},
    128: {"BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 4, "REGISTERS": 240},
}


HEADS_TOGETHER = 4, 8
"""Heads of Q whose programs of dQ are taken together: the minimum, and the number if keys stay in the cache."""
L2_BYTES = 24 * 2**20
OPERAND_BYTES = 5
"""Bytes that are read for a channel of a key: its code, and 16 bits each for the operand and V."""


def backward(call: BackwardCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of Q, K and V of a call whose P and dS are in 16 bits."""
    gradients = call.new_gradients()
    if not call.is_empty:
        # Kernels assume contiguous operands.
        call = replace(call, saved=Saved(*(x.contiguous() for x in call.saved)))
        _run(BackwardLaunch.of(call, gradients))
    return gradients


def heads_together(call: BackwardCall) -> int:
    """Return the number of heads of Q whose programs of dQ are taken together, the longest programs first.

    Taken head after head, the longest programs of the last head would start when all others end: 2 to 5 % of a causal
    call's time. Heads that share keys stay together. Without causality all programs are equally long.
    """
    if not call.is_causal:
        return 1
    group = call.output.shape[1] // call.value.shape[1]
    fewest, most = (max(count, ceil_div(heads, group)) for count, heads in zip((1, 2), HEADS_TOGETHER, strict=True))
    bytes_of_head = OPERAND_BYTES * call.channels * call.kv_len
    return group * (most if most * bytes_of_head <= L2_BYTES else fewest)


def _run(run: BackwardLaunch) -> None:
    call, saved, channels = run.call, run.call.saved, run.call.channels
    query_gradient, key_gradient, value_gradient = run.gradients
    q_sequences, kv_sequences = call.token_axes
    key_tile, query_tile = KEY_TILES[channels], QUERY_TILES[channels]
    value_in_place = gradient_in_place = None
    if not q_sequences.packed and call.value.shape[3] == channels:
        value_in_place = TokenRows.of(call.value)
        # dO of a row without a key must count as 0: the caller's dO serves if each row of each tile has a key.
        has_key = run.padding is None and not (call.is_causal and call.kernel_offset < 0)
        if has_key and q_sequences.tokens % key_tile["BLOCK_M"] == 0:
            gradient_in_place = TokenRows.of(call.output_gradient)
    queries = query_operands(
        call.output_gradient, call.output, saved, call.batch, q_sequences, call.recipe, gradient_in_place is None
    )
    value, key = key_operands(
        call.value, saved, call.batch, kv_sequences, run.padding, call.recipe, value_in_place is None
    )

    def operand_rows(
        in_place: TokenRows | None, copy: torch.Tensor | None, name: str
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the caller's tensor, or its copy if there is one, and the arguments that locate a head's rows."""
        if in_place is not None:
            rows, first = in_place.rows, (in_place.rows_of_batch, in_place.rows_of_head, in_place.columns_of_head)
        else:
            assert copy is not None
            heads, per_head = copy.shape[1:3]
            rows, first = copy, (0 if q_sequences.packed else heads * per_head, per_head, 0)
        names = (f"{name}_rows_of_batch", f"{name}_rows_of_head", f"{name}_columns_of_head")
        return rows, dict(zip(names, first, strict=True))

    gradient_rows, gradient_place = operand_rows(gradient_in_place, queries.gradient, "gradient")
    value_rows, value_place = operand_rows(value_in_place, value, "value")

    def query_tiles(x: torch.Tensor) -> object:
        return stage_tiles(x, key_tile["BLOCK_M"], channels)

    def key_tiles(x: torch.Tensor) -> object:
        return stage_tiles(x, query_tile["BLOCK_N"], channels)

    def held_tiles(x: torch.Tensor) -> object:
        return stage_tiles(x, ROWS.value, channels)

    with overlapping(call.value.device) as apart:
        launch(
            hopper_bwd_dkdv,
            run.key_grid(key_tile["BLOCK_N"]),
            key_scale=saved.key_scale,
            key=held_tiles(saved.key),
            value=held_tiles(value_rows),
            **value_place,
            query=query_tiles(saved.query),
            query_scale=query_tiles(saved.query_scale),
            query_operand=query_tiles(queries.query),
            gradient=query_tiles(gradient_rows),
            lse=query_tiles(queries.lse),
            delta=query_tiles(queries.delta),
            **gradient_place,
            key_gradient=key_gradient,
            value_gradient=value_gradient,
            **strides("key", run.key_strides(key_gradient)[:3]),
            **strides("value", run.key_strides(value_gradient)[:3]),
            **run.arguments,
            **key_tile,
        )
        with apart:
            launch(
                hopper_bwd_dq,
                run.query_grid(query_tile["BLOCK_M"]),
                query_scale=saved.query_scale,
                query=held_tiles(saved.query),
                gradient=held_tiles(gradient_rows),
                **gradient_place,
                key=key_tiles(saved.key),
                key_operand=key_tiles(key),
                value=key_tiles(value_rows),
                **value_place,
                key_scale=saved.key_scale,
                query_gradient=query_gradient,
                lse=queries.lse,
                delta=queries.delta,
                **strides("", run.query_strides(query_gradient)[:3]),
                heads_together=heads_together(call),
                **{name: value for name, value in run.arguments.items() if name != "v_head_dim"},
                **query_tile,
            )
