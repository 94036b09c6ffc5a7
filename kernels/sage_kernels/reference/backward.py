"""Recipes with gradients in plain PyTorch: the forward pass, which saves tensors, and the backward pass.

With S from the saved INT8 codes of Q and K, and δ = rowsum(dO∘O), P = exp(S - lse) and dS = P∘(dO·Vᵀ -
δ); then dV = Pᵀ·dO, dK = dSᵀ·Q and dQ = dS·K, both times the softmax scale (arXiv 2505.11594, algorithm 3). K and Q are
the values of their INT8 codes: K without its mean, which changes nothing, because rows of dS sum to 0. Their rotation
and equalizing are undone: in 16 bits in the operands K and Q of these products; in 8 bits, where the operands are the
codes, in the gradients. Like `reference.forward`, this is the specification of the kernels, the CPU path and the
emulation; memory is linear in length.

Sums are float32. With float64 tensors they are float64, and "16bit" does not round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..exact.sdpa import rows_per_chunk
from ..formats import int8
from ..spec import transforms
from ..spec.call import NO_MASK, BackwardCall, Call, Mask
from ..spec.layout import KEY_BLOCK, Lengths, natural_order, padded_channels, padded_rows, thread_order
from ..spec.operands import Saved
from ..spec.recipe import Recipe
from .forward import (
    BLOCK_M,
    THREAD_TOKENS,
    ReferenceOperands,
    attend_to_operands,
    counted_keys,
    nothing_attended,
    per_group,
    quantize_operands,
    tile_scores,
)

GRADIENT_BLOCK = 64  # rows of dO that share a scale in INT8


def forward(call: Call) -> tuple[torch.Tensor, Saved]:
    """Compute `reference.forward.attention` of a call, and save the tensors that its gradients need.

    The call's mask may be a key-padding mask, a block list, or both.

    Returns:
        (output, saved): (batch, q_heads, q_len, v_head_dim) in query's dtype, laid out as (batch, q_len, q_heads,
        v_head_dim); see `Saved`.

    Raises:
        ValueError: the recipe has no gradients, or a sequence is longer than the maximum that lengths state.
    """
    _check(call.recipe)
    lengths = call.lengths
    if lengths is None:
        return _forward(call)
    query, key, value = call.query, call.key, call.value
    output, lse = nothing_attended(query, value.shape[-1], query.dtype)
    sequences = len(lengths.cu_seqlens_q) - 1
    rows = padded_rows(query.shape[2], sequences), padded_rows(key.shape[2], sequences)
    saved = _empty(call, lse, *rows, sequences)
    for index, (queries, keys, query_rows, key_rows) in enumerate(_sequences(lengths)):
        sequence_call = replace(
            call,
            query=query[:, :, queries],
            key=key[:, :, keys],
            value=value[:, :, keys],
            mask=_mask_of_sequence(call, index, queries, keys),
            lengths=None,
        )
        output[:, :, queries], part = _forward(sequence_call)
        for whole, of_sequence in zip(_sequence_part(saved, index, queries, query_rows, key_rows), part, strict=True):
            whole.copy_(of_sequence)
    return output, saved


def backward(
    call: BackwardCall, block_m: int = 64, block_n: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of Q, K and V.

    Args:
        call: the backward pass of a call of `forward`.
        block_m, block_n: queries and keys of a tile, 16, 32, 64 or 128; in INT8 a tile's scores share scales.

    Returns:
        (query_gradient, key_gradient, value_gradient) in value's dtype, each laid out as (batch, tokens, heads,
        channels). A row that attends to nothing, or a key that does not exist, has gradient 0 and adds nothing to other
        gradients. A non-finite element in a row's dO makes dQ of that row, and dK and dV of the keys that it attends
        to, non-finite, but no other dQ or dK. It may also spoil dV of other keys, whose weight 0 is multiplied with dO:
        the tiles decide which keys; in exact attention, all keys.

    Raises:
        ValueError: the recipe has no gradients, or the tile is not supported.
    """
    _check(call.recipe)
    for name, block in (("block_m", block_m), ("block_n", block_n)):
        if block not in (16, 32, 64, 128):
            raise ValueError(f"{name} {block} is not supported: use 16, 32, 64 or 128")
    if call.lengths is None:
        return _backward(call, block_m, block_n)
    gradients = call.new_gradients()
    for index, (queries, keys, query_rows, key_rows) in enumerate(_sequences(call.lengths)):
        sequence_call = replace(
            call,
            output_gradient=call.output_gradient[:, :, queries],
            value=call.value[:, :, keys],
            output=call.output[:, :, queries],
            saved=_sequence_part(call.saved, index, queries, query_rows, key_rows),
            mask=_mask_of_sequence(call, index, queries, keys),
            lengths=None,
        )
        for gradient, tokens, part in zip(
            gradients, (queries, keys, keys), _backward(sequence_call, block_m, block_n), strict=True
        ):
            gradient[:, :, tokens] = part
    return gradients


def save(operands: ReferenceOperands, lse: torch.Tensor) -> Saved:
    """Save one ordinary batch for the backward pass.

    Args:
        operands: operands of a recipe with Q and K in INT8.
        lse: the result of `reference.forward.attend_to_operands`.
    """

    def padded(codes: torch.Tensor) -> torch.Tensor:
        rows, channels = codes.shape[-2:]
        return F.pad(codes, (0, padded_channels(channels) - channels, 0, padded_rows(rows) - rows)).to(torch.int8)

    q_len = operands.query.shape[-2]
    query_scale = F.pad(operands.query_scale.squeeze(-1), (0, padded_rows(q_len) - q_len))
    by_thread = thread_order(operands.key_scale).unflatten(-2, (-1, KEY_BLOCK // THREAD_TOKENS, THREAD_TOKENS))
    key_scale = by_thread[..., 0, 0].to(torch.bfloat16)
    equalizer = lse.new_empty(0)
    if operands.equalizer is not None:
        channels = operands.equalizer.shape[-1]
        equalizer = F.pad(operands.equalizer.squeeze(-2), (0, padded_channels(channels) - channels), value=1.0)
    return Saved(padded(operands.query), query_scale, padded(operands.key), key_scale, equalizer, lse)


def _check(recipe: Recipe) -> None:
    if recipe.backward is None or recipe.qk != "int8" or recipe.smooth_q:
        raise ValueError(f"recipe {recipe.name!r} has no gradients; sage_bwd and sage_bwd_int8 have them")


def _empty(call: Call, lse: torch.Tensor, query_rows: int, key_rows: int, sequences: int) -> Saved:
    """Allocate `Saved` of zeros, and of an equalizer of ones for each sequence if the recipe equalizes."""
    query, key, channels = call.query, call.key, padded_channels(call.query.shape[-1])
    return Saved(
        query.new_zeros(*query.shape[:2], query_rows, channels, dtype=torch.int8),
        query.new_zeros(*query.shape[:2], query_rows, dtype=torch.float32),
        key.new_zeros(*key.shape[:2], key_rows, channels, dtype=torch.int8),
        key.new_zeros(*key.shape[:2], key_rows // KEY_BLOCK, KEY_BLOCK // THREAD_TOKENS, dtype=torch.bfloat16),
        lse.new_ones((sequences, key.shape[1], channels) if call.recipe.equalize else 0),
        lse,
    )


def _sequences(lengths: Lengths) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Yield for each sequence its queries, its keys that take part, and the rows of `Saved` for both."""
    q_starts, k_starts = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
    kv_stored = lengths.cu_seqlens_k.diff()
    for name, stored_lengths, longest in (
        ("q", lengths.cu_seqlens_q.diff(), lengths.max_seqlen_q),
        ("k", kv_stored, lengths.max_seqlen_k),
    ):
        if (stored_lengths > longest).any():
            raise ValueError(f"a sequence of cu_seqlens_{name} is longer than max_seqlen_{name}, {longest}")
    k_lengths = (kv_stored if lengths.seqused_k is None else torch.minimum(kv_stored, lengths.seqused_k)).tolist()
    for index, (start, stop, k_start, k_length) in enumerate(
        zip(q_starts, q_starts[1:], k_starts, k_lengths, strict=False)
    ):
        first, k_first = padded_rows(start, index), padded_rows(k_start, index)
        query_rows = slice(first, first + padded_rows(stop - start))
        key_rows = slice(k_first, k_first + padded_rows(k_length))
        yield slice(start, stop), slice(k_start, k_start + k_length), query_rows, key_rows


def _mask_of_sequence(call: Call | BackwardCall, index: int, queries: slice, keys: slice) -> Mask:
    """Select a packed sequence's block list, if there is one."""
    blocks, lengths = call.mask.blocks, call.lengths
    if blocks is None or lengths is None:
        return NO_MASK
    kv_len = keys.stop - keys.start
    sequence_blocks = blocks.of_sequence(index, queries.stop - queries.start, kv_len, lengths.max_seqlen_k)
    return Mask.of_blocks(sequence_blocks, None, kv_len)


def _sequence_part(saved: Saved, index: int, queries: slice, query_rows: slice, key_rows: slice) -> Saved:
    """Return the part of packed sequences' saved tensors that belongs to sequence `index`."""
    scales = slice(key_rows.start // KEY_BLOCK, key_rows.stop // KEY_BLOCK)
    return Saved(
        saved.query[:, :, query_rows],
        saved.query_scale[:, :, query_rows],
        saved.key[:, :, key_rows],
        saved.key_scale[:, :, scales],
        saved.equalizer[index : index + 1],
        saved.lse[:, :, queries],
    )


def _forward(call: Call) -> tuple[torch.Tensor, Saved]:
    """Compute `forward` of an ordinary batch."""
    query, key, value = call.query, call.key, call.value
    if 0 in (*query.shape[:3], key.shape[2]):
        output, lse = nothing_attended(query, value.shape[-1], query.dtype)
        return output, _empty(call, lse, padded_rows(query.shape[2]), padded_rows(key.shape[2]), query.shape[0])
    mask = call.mask.tensor
    operands = quantize_operands(
        query.contiguous(), key.contiguous(), value.contiguous(), call.recipe, counted_keys(mask)
    )
    output, lse = attend_to_operands(
        operands,
        call.recipe,
        key.shape[2],
        dtype=query.dtype,
        mask=mask,
        is_causal=call.is_causal,
        causal_offset=call.causal_offset,
        scale=call.scale,
        blocks=call.mask.blocks,
    )
    return output, save(operands, lse)


def _backward(call: BackwardCall, block_m: int, block_n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `backward` of an ordinary batch."""
    recipe, saved, blocks, dtype = call.recipe, call.saved, call.mask.blocks, call.value.dtype
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    (batch, q_heads, q_len), (kv_heads, kv_len) = call.output_gradient.shape[:3], call.value.shape[1:3]
    if 0 in (batch, q_heads, q_len, kv_len):
        return call.new_gradients()
    # Contiguous, so that sums are taken in the same order whatever the caller's strides.
    output_gradient, value, output = (x.contiguous() for x in (call.output_gradient, call.value, call.output))
    query_pad, key_pad = saved.query.shape[2] - q_len, saved.key.shape[2] - kv_len

    exists = value.new_ones(1, kv_len, dtype=torch.bool) if call.mask.key_mask is None else call.mask.key_mask
    exists = F.pad(exists, (0, key_pad))[:, None, None]
    # An infinite lse makes P 0 in rows that attend to nothing, and in the padding.
    lse = F.pad(saved.lse.masked_fill(saved.lse == -torch.inf, torch.inf), (0, query_pad), value=torch.inf)
    lse = lse.to(sums).unsqueeze(-1)
    output_gradient = F.pad(output_gradient.to(sums), (0, 0, 0, query_pad)).masked_fill(lse == torch.inf, 0.0)
    value = F.pad(value.to(sums), (0, 0, 0, key_pad)).masked_fill(~exists.transpose(-1, -2), 0.0)
    delta = (output_gradient * F.pad(output.to(sums), (0, 0, 0, query_pad))).sum(-1, keepdim=True)
    query, query_scale = saved.query.to(sums), saved.query_scale.to(sums).unsqueeze(-1)
    key = saved.key.to(sums)
    key_scale = natural_order(saved.key_scale.to(sums).flatten(-2).repeat_interleave(THREAD_TOKENS, -1).unsqueeze(-1))

    # Factors that undo the equalizer of K, and of dQ = dS·K; and of Q, and of dK = dSᵀ·Q.
    key_factors = (
        saved.equalizer.to(sums).unsqueeze(-2) if recipe.equalize else saved.equalizer.new_ones(1, 1, 1, 1, dtype=sums)
    )
    query_factors = 1 / key_factors.repeat_interleave(q_heads // kv_heads if recipe.equalize else 1, 1)
    in_int8 = recipe.backward == "int8"
    # In 16 bits Q and K are restored: sums of codes are exact, so that kernels may take them in any order. In INT8 they
    # are the codes; their scales vary along the sum, so they multiply dS before dS is rounded.
    gradient_operand, query_operand, key_operand = output_gradient, query, key
    if in_int8:
        gradient_operand = _round_int8(output_gradient.unflatten(-2, (-1, GRADIENT_BLOCK)).flatten(-2))
        gradient_operand = gradient_operand.view_as(output_gradient)
        query_factor, key_factor = query_scale, key_scale.transpose(-1, -2).repeat_interleave(q_heads // kv_heads, 1)
    else:
        query_operand = (_restore(query, recipe.rotate, query_factors) * query_scale).to(dtype).to(sums)
        key_operand = (_restore(key, recipe.rotate, key_factors) * key_scale).to(dtype).to(sums)
        query_factor, key_factor = torch.ones_like(query_scale), key_scale.new_ones(1, 1, 1, key.shape[2])

    def rounded(x: torch.Tensor, summed: int) -> torch.Tensor:
        """Round P or dS of a tile of keys; in INT8 a scale is shared along the sum over dimension `summed`."""
        if not in_int8:
            return x.to(dtype).to(sums)
        if summed == -1:
            return _round_int8(x)
        return _round_int8(x.unflatten(-2, (-1, block_m)).transpose(-1, -2)).transpose(-1, -2).flatten(-3, -2)

    query_gradient = torch.zeros_like(query)
    key_gradient, value_gradient = torch.zeros_like(key), torch.zeros_like(value)
    rows = rows_per_chunk(batch * q_heads, block_n, BLOCK_M)
    for start in range(0, query.shape[2], rows):
        chunk = slice(start, min(start + rows, query.shape[2]))
        listed = None
        if blocks is not None:
            listed = blocks.kept_by_rows(kv_len, chunk.start, min(chunk.stop, q_len))
            listed = F.pad(listed, (0, 0, 0, chunk.stop - chunk.start - listed.shape[2]))
        last_column = min(kv_len, chunk.stop + call.causal_offset) if call.is_causal else kv_len
        for column in range(0, last_column, block_n):
            tile = slice(column, column + block_n)
            scores = tile_scores(
                per_group(query[:, :, chunk], kv_heads),
                query_scale[:, :, chunk] * call.scale,
                key[:, :, tile],
                key_scale[:, :, tile],
            )
            allowed = exists[..., tile] & (lse[:, :, chunk] != torch.inf)
            columns = torch.arange(column, tile.stop, device=value.device)
            if blocks is not None and listed is not None:
                allowed = allowed & listed[..., columns.clamp(max=kv_len - 1) // blocks.block_n]
            if call.is_causal:
                row = torch.arange(chunk.start, chunk.stop, device=value.device).unsqueeze(-1)
                allowed = allowed & (columns <= row + call.causal_offset)
            p = scores.sub_(lse[:, :, chunk]).exp_().masked_fill_(~allowed, 0.0)
            dp = per_group(output_gradient[:, :, chunk], kv_heads) @ value[:, :, tile].unsqueeze(2).transpose(-1, -2)
            ds = dp.flatten(1, 2).sub_(delta[:, :, chunk]).mul_(p).masked_fill_(~allowed, 0.0)
            value_gradient[:, :, tile] += _transposed_product(rounded(p, -2), gradient_operand[:, :, chunk], kv_heads)
            of_keys = rounded(ds * query_factor[:, :, chunk], -2)
            key_gradient[:, :, tile] += _transposed_product(of_keys, query_operand[:, :, chunk], kv_heads)
            of_queries = per_group(rounded(ds * key_factor[..., tile], -1), kv_heads)
            query_gradient[:, :, chunk] += (of_queries @ key_operand[:, :, tile].unsqueeze(2)).flatten(1, 2)

    # Non-finite elements of dO, times a P of 0 or through a scale, would give NaN in place of 0.
    for gradient in (key_gradient, value_gradient):
        gradient.masked_fill_(~exists.transpose(-1, -2), 0.0)
    if in_int8:
        query_gradient = _restore(query_gradient, recipe.rotate, 1 / query_factors)
        key_gradient = _restore(key_gradient, recipe.rotate, 1 / key_factors)
    return (
        _tokens_first(query_gradient[:, :, :q_len, : call.head_dim] * call.scale, dtype),
        _tokens_first(key_gradient[:, :, :kv_len, : call.head_dim] * call.scale, dtype),
        _tokens_first(value_gradient[:, :, :kv_len], dtype),
    )


def _restore(x: torch.Tensor, rotates: bool, factor: torch.Tensor) -> torch.Tensor:
    """Undo the rotation of channels, then multiply them by the factor that undoes their equalizer."""
    return (transforms.unrotate(x) if rotates else x) * factor


def _round_int8(x: torch.Tensor) -> torch.Tensor:
    """Round x (..., groups, elements) to INT8 with a scale per group."""
    codes, scale = int8.quantize(x, 1)
    return codes.to(x.dtype) * scale


def _transposed_product(weights: torch.Tensor, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return weightsᵀ·x, also summed over the query heads of each group.

    Args:
        weights, x: (batch, q_heads, rows, keys), (batch, q_heads, rows, channels).

    Returns:
        (batch, kv_heads, keys, channels).
    """
    weights, x = (per_group(part, kv_heads).flatten(2, 3) for part in (weights, x))
    return weights.transpose(-1, -2) @ x


def _tokens_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x (batch, heads, tokens, channels) in another dtype, laid out as (batch, tokens, heads, channels)."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
