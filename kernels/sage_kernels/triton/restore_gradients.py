"""Gradients of Q and K that were computed from INT8 codes: undo the rotation and the equalizer of their channels.

This is a separate kernel, because the gradient kernels have no registers left for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..spec.call import BackwardCall
from ..spec.layout import Sequences, batch_strides, ceil_div
from .common.launch import UNSPECIALIZED, launch, strides
from .common.rotation import channel_factor, sign_bits, unrotate
from .common.sequences import sequence_range
from .common.tokens import load_tokens

BLOCK_ROWS = tl.constexpr(32)


def new_transformed(call: BackwardCall, gradient: torch.Tensor) -> torch.Tensor:
    """Allocate the gradient of the transformed Q or K: bfloat16, whose range suffices, with the operands' channels."""
    batch, heads, tokens, _ = gradient.shape
    new = gradient.new_empty if call.lengths is None else gradient.new_zeros
    return new(batch, tokens, heads, call.channels, dtype=torch.bfloat16).transpose(1, 2)


def restore_gradient(
    transformed: torch.Tensor, gradient: torch.Tensor, call: BackwardCall, sequences: Sequences, of_query: bool
) -> None:
    """Write the gradient of Q or K as the caller gave it.

    Args:
        transformed: a tensor of `new_transformed`, filled.
        gradient: (batch, heads, tokens, head_dim) in the caller's dtype.
        call: the call; its recipe and equalizer say what to undo.
        sequences: the token axis.
        of_query: the gradient is Q's.
    """
    heads, head_dim = gradient.shape[1], gradient.shape[3]
    blocks = ceil_div(sequences.tokens, BLOCK_ROWS.value)
    launch(
        restore_channels,
        (blocks * call.batch * heads,),
        transformed=transformed,
        gradient=gradient,
        equalizer=call.saved.equalizer if call.recipe.equalize else None,
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        blocks=blocks,
        heads=heads,
        group=heads // call.value.shape[1],
        head_dim=head_dim,
        **strides("from", batch_strides(transformed, sequences)),
        **strides("", batch_strides(gradient, sequences)),
        CHANNELS=call.channels,
        SIGN_BITS=sign_bits(call.channels) if call.recipe.rotate else None,
        IS_QUERY=of_query,
        RAGGED=sequences.ranges is not None,
    )


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "group"])
def restore_channels(
    transformed,
    gradient,
    equalizer,
    ranges,
    tokens,
    blocks,
    heads,
    group,
    head_dim,
    from_stride_batch,
    from_stride_head,
    from_stride_token,
    from_stride_channel,
    stride_batch,
    stride_head,
    stride_token,
    stride_channel,
    CHANNELS: tl.constexpr,
    SIGN_BITS: tl.constexpr,
    IS_QUERY: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Restore a block of 32 tokens of one (batch, head)."""
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    start, length, _ = sequence_range(ranges, batch, tokens, RAGGED)
    token, channel = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, CHANNELS)
    base = transformed + batch * from_stride_batch + head * from_stride_head
    x, inside = load_tokens(
        base, None, start, token, length, channel, CHANNELS, from_stride_token, from_stride_channel, False
    )
    if SIGN_BITS is not None:
        x = unrotate(x, CHANNELS, SIGN_BITS)
    if equalizer is not None:
        kv_pair = batch * (heads // group) + head // group
        x *= channel_factor(equalizer + kv_pair * CHANNELS, channel, CHANNELS, not IS_QUERY)[None, :]
    into = gradient + batch * stride_batch + head * stride_head
    into += (start + token).to(tl.int64)[:, None] * stride_token + channel[None, :] * stride_channel
    tl.store(into, x.to(gradient.dtype.element_ty), mask=inside[:, None] & (channel < head_dim)[None, :])
