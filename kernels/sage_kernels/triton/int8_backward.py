"""Backward pass of the recipes with gradients: recompute S from INT8, then dV, dK and dQ (`reference.backward`).

Two kernels see the same tiles of scores: `bwd_dkdv` holds keys and walks over queries, for dK and dV; `bwd_dq` holds
queries and walks over keys, for dQ. So each gradient is summed in registers, in a fixed order, without atomics. The
kernels run one after the other, each after the pass that prepares its operands: at most two 16-bit copies of the
caller's tensors exist at a time. In INT8 there is a third copy, the gradient of rotated or equalized Q or K.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..spec.call import BackwardCall
from ..spec.layout import broadcast_strides
from ..spec.operands import Saved
from .block_entries import block_entries
from .bwd_dkdv import int8_bwd_dkdv
from .bwd_dq import int8_bwd_dq
from .common.backward_launch import BackwardLaunch
from .common.backward_operands import key_operands, query_operands
from .common.launch import MASK_AXES, launch, strides
from .configs import int8_bwd_dkdv_config, int8_bwd_dq_config, limit_to_list
from .restore_gradients import new_transformed, restore_gradient
from .tile_rows import tile_rows


def backward(call: BackwardCall, capability: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of Q, K and V of a call whose P and dS are both in 16 bits or both in INT8."""
    gradients = call.new_gradients()
    if not call.is_empty:
        # Kernels assume contiguous operands.
        call = replace(call, saved=Saved(*(x.contiguous() for x in call.saved)))
        _run(BackwardLaunch.of(call, gradients), capability)
    return gradients


def _run(run: BackwardLaunch, capability: tuple[int, int]) -> None:
    call, saved, int8 = run.call, run.call.saved, run.int8
    query_gradient, key_gradient, value_gradient = run.gradients
    q_sequences, kv_sequences = call.token_axes
    tma = capability[0] >= 9
    channels = max(call.channels, call.v_channels)
    blocks = call.mask.blocks
    list_m, list_n = (0, 0) if blocks is None else (blocks.block_m, blocks.block_n)
    arguments = {"V_CHANNELS": call.v_channels, "INT8": int8, "LIST_M": list_m, "TMA": tma, **run.arguments}
    restores = int8 and (call.recipe.rotate or call.recipe.equalize)
    if restores:
        arguments["head_dim"] = call.channels

    def tiles(x: torch.Tensor | None, block: int, transposed: bool = False) -> torch.Tensor | TensorDescriptor | None:
        """Return an operand in the form in which a kernel reads tiles of `block` tokens."""
        if x is None or not tma:
            return x
        shape = [x.shape[2], block] if transposed else [block, x.shape[3]]
        return TensorDescriptor.from_tensor(x.view(-1, x.shape[3]), shape)

    queries = query_operands(call.output_gradient, call.output, saved, call.batch, q_sequences, call.recipe)
    lse, delta = queries.lse, queries.delta
    into = new_transformed(call, key_gradient) if restores else key_gradient
    config = int8_bwd_dkdv_config(capability, channels, int8)
    inverted = None
    if blocks is not None:
        config, inverted = limit_to_list(config, list_m, list_n), tile_rows(call)
    launch(
        int8_bwd_dkdv,
        run.key_grid(config.block_n),
        key=saved.key,
        key_scale=saved.key_scale,
        value=call.value,
        query=tiles(saved.query, config.block_m),
        query_scale=saved.query_scale,
        query_operand=tiles(queries.query, config.block_m, transposed=int8),
        gradient=tiles(queries.gradient, config.block_m),
        gradient_codes=tiles(queries.gradient_codes, config.block_m, transposed=True),
        gradient_scale=queries.gradient_scale,
        key_gradient=into,
        value_gradient=value_gradient,
        lse=lse,
        delta=delta,
        rows=None if inverted is None else inverted.rows,
        row_spans=None if inverted is None else inverted.spans,
        **strides("rows", (0, 0) if inverted is None else broadcast_strides(inverted.rows, 2)),
        **strides("row_spans", (0, 0) if inverted is None else broadcast_strides(inverted.spans, 2)),
        **strides("v", run.key_strides(call.value)),
        **strides("key", run.key_strides(into)),
        **strides("value", run.key_strides(value_gradient)),
        LIST_N=list_n,
        **arguments,
        **config.constants,
    )
    if restores:
        restore_gradient(into, key_gradient, call, kv_sequences, of_query=False)
    del queries, into, inverted  # before as much memory is allocated again
    value, key = key_operands(call.value, saved, call.batch, kv_sequences, run.padding, call.recipe)
    into = new_transformed(call, query_gradient) if restores else query_gradient
    config = int8_bwd_dq_config(capability, channels, int8)
    entries = None
    if blocks is not None:
        config = limit_to_list(config, list_m, list_n)
        entries = block_entries(call, config.block_n)
    launch(
        int8_bwd_dq,
        run.query_grid(config.block_m),
        query=saved.query,
        query_scale=saved.query_scale,
        gradient=call.output_gradient,
        key=tiles(saved.key, config.block_n),
        key_scale=saved.key_scale,
        key_operand=tiles(key, config.block_n, transposed=int8),
        value=tiles(value, config.block_n),
        query_gradient=into,
        lse=lse,
        delta=delta,
        entries=entries,
        **strides("entries", (0, 0, 0) if entries is None else broadcast_strides(entries), MASK_AXES),
        **strides("gradient", run.query_strides(call.output_gradient)),
        **strides("", run.query_strides(into)),
        **arguments,
        **config.constants,
    )
    if restores:
        restore_gradient(into, query_gradient, call, q_sequences, of_query=True)
