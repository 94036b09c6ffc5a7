"""Recipes with gradients in plain PyTorch: the forward pass that saves what the backward needs, and the backward.

With S from the INT8 codes of Q and K that the forward saved, and δ = rowsum(dO∘O), P = exp(S - lse) and
dS = P∘(dO·Vᵀ - δ); then dV = Pᵀ·dO, dK = dSᵀ·Q and dQ = dS·K, both times the softmax scale (arXiv 2505.11594,
algorithm 3). K and Q are the values of their INT8 codes: K without its mean, which changes nothing, because rows of dS
sum to 0. Their rotation and equalizing are undone: in 16 bit in the operands K and Q of these products, in 8 bit, whose
operands are the codes, in the gradients. Like `reference.forward`, this is the specification of the kernels, the CPU
path and the emulation; memory is linear in length.

Sums are float32. With float64 tensors they are float64, and the "16bit" format does not round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ..exact.sdpa import rows_per_chunk
from ..formats import fp8, int8
from ..spec import transforms
from ..spec.block_list import BlockList
from ..spec.layout import KEY_BLOCK, Lengths, natural_order, padded_channels, padded_rows, thread_order
from ..spec.operands import Saved
from ..spec.recipe import Recipe
from .forward import (
    BLOCK_M,
    THREAD_TOKENS,
    Operands,
    attend,
    nothing_attended,
    per_group,
    quantize_operands,
    tile_scores,
    valid_keys,
)

GRADIENT_BLOCK = 64  # rows of dO that share a scale in 8 bits


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe,
    *,
    lengths: Lengths | None = None,
    valid: torch.Tensor | None = None,
    blocks: BlockList | None = None,
    is_causal: bool,
    causal_offset: int = 0,
    scale: float | None = None,
) -> tuple[torch.Tensor, Saved]:
    """Compute `reference.forward.attention` and save what its gradients need.

    Args:
        query, key, value, recipe, is_causal, causal_offset, scale: as in `reference.forward.attention`.
        lengths: sequences packed one after the other in a batch of 1; each attends to itself.
        valid: bool (batch or 1, kv_len), False where a key does not exist; None: all exist.
        blocks: the tiles of keys that each block of rows attends to, beside lengths with sequences as its batch; None:
            all.

    Returns:
        (output, saved): (batch, q_heads, q_len, v_head_dim) in query's dtype, laid out as (batch, q_len, q_heads,
        v_head_dim); see `Saved`.

    Raises:
        ValueError: the recipe has no gradients, valid is given beside lengths, or a sequence is longer than
            lengths say the longest is.
    """
    _check(recipe, lengths, valid)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options: dict[str, Any] = {"is_causal": is_causal, "causal_offset": causal_offset, "scale": scale}
    if lengths is None:
        return _forward(query, key, value, recipe, valid, blocks, **options)
    output, lse = nothing_attended(query, value.shape[-1], query.dtype)
    sequences = len(lengths.cu_seqlens_q) - 1
    rows = padded_rows(query.shape[2], sequences), padded_rows(key.shape[2], sequences)
    saved = _empty(query, key, lse, *rows, sequences if recipe.equalize else None)
    for index, (queries, keys, query_rows, key_rows) in enumerate(_sequences(lengths)):
        own_blocks = _blocks_of_sequence(blocks, index, queries, keys, lengths)
        output[:, :, queries], part = _forward(
            query[:, :, queries], key[:, :, keys], value[:, :, keys], recipe, None, own_blocks, **options
        )
        for whole, own in zip(_sequence_part(saved, index, queries, query_rows, key_rows), part, strict=True):
            whole.copy_(own)
    return output, saved


def backward(
    output_gradient: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    saved: Saved,
    recipe: Recipe,
    *,
    head_dim: int,
    lengths: Lengths | None = None,
    valid: torch.Tensor | None = None,
    blocks: BlockList | None = None,
    is_causal: bool,
    causal_offset: int = 0,
    scale: float | None = None,
    block_m: int = 64,
    block_n: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of Q, K and V.

    Args:
        output_gradient: (batch, q_heads, q_len, v_head_dim), value's dtype, any strides.
        value: (batch, kv_heads, kv_len, v_head_dim), as the forward got it.
        output, saved: the results of the forward.
        head_dim: channels of Q and K.
        recipe, lengths, valid, blocks, is_causal, causal_offset, scale: as the forward got them.
        block_m, block_n: queries and keys a tile, 16, 32, 64 or 128; in 8 bits a tile's scores share scales.

    Returns:
        (query_gradient, key_gradient, value_gradient) in value's dtype, each laid out as (batch, tokens, heads,
        channels). A row that attends to nothing has gradient 0 and adds nothing to others; neither does a key that
        does not exist. A non-finite element in a row's dO makes dQ of that row, and dK and dV of the keys that it
        attends to, non-finite, but no other dQ or dK. It may also spoil dV of other keys, where dO is multiplied by a
        weight of 0: which ones depends on the tiles; in exact attention, all.

    Raises:
        ValueError: the recipe has no gradients, valid is given beside lengths, or the tile is not supported.
    """
    _check(recipe, lengths, valid)
    for name, block in (("block_m", block_m), ("block_n", block_n)):
        if block not in (16, 32, 64, 128):
            raise ValueError(f"{name} {block} is not supported: use 16, 32, 64 or 128")
    batch, q_heads, q_len, _ = output_gradient.shape
    kv_heads, kv_len = value.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    options: dict[str, Any] = {"is_causal": is_causal, "causal_offset": causal_offset, "scale": scale}
    options |= {"block_m": block_m, "block_n": block_n}
    if lengths is None:
        return _backward(output_gradient, value, output, saved, recipe, valid, blocks, head_dim, **options)
    gradients = (
        value.new_zeros(batch, q_len, q_heads, head_dim).transpose(1, 2),
        value.new_zeros(batch, kv_len, kv_heads, head_dim).transpose(1, 2),
        value.new_zeros(batch, kv_len, kv_heads, value.shape[-1]).transpose(1, 2),
    )
    for index, (queries, keys, query_rows, key_rows) in enumerate(_sequences(lengths)):
        parts = _backward(
            output_gradient[:, :, queries],
            value[:, :, keys],
            output[:, :, queries],
            _sequence_part(saved, index, queries, query_rows, key_rows),
            recipe,
            None,
            _blocks_of_sequence(blocks, index, queries, keys, lengths),
            head_dim,
            **options,
        )
        for gradient, tokens, part in zip(gradients, (queries, keys, keys), parts, strict=True):
            gradient[:, :, tokens] = part
    return gradients


def save(operands: Operands, lse: torch.Tensor) -> Saved:
    """Return what the backward needs of one ordinary batch.

    Args:
        operands: those of a recipe with Q and K in INT8.
        lse: the result of `reference.forward.attend`.
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


def _check(recipe: Recipe, lengths: Lengths | None, valid: torch.Tensor | None) -> None:
    if recipe.backward is None or recipe.qk != "int8" or recipe.smooth_q:
        raise ValueError(f"recipe {recipe.name!r} has no gradients; sage_bwd and sage_bwd_int8 have")
    if lengths is not None and valid is not None:
        raise ValueError("packed sequences say by their lengths which keys exist: give no valid beside them")


def _empty(
    query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, query_rows: int, key_rows: int, equalized: int | None
) -> Saved:
    """Return `Saved` of zeros, and of an equalizer of ones for `equalized` sequences."""
    channels = padded_channels(query.shape[-1])
    return Saved(
        query.new_zeros(*query.shape[:2], query_rows, channels, dtype=torch.int8),
        query.new_zeros(*query.shape[:2], query_rows, dtype=torch.float32),
        key.new_zeros(*key.shape[:2], key_rows, channels, dtype=torch.int8),
        key.new_zeros(*key.shape[:2], key_rows // KEY_BLOCK, KEY_BLOCK // THREAD_TOKENS, dtype=torch.bfloat16),
        lse.new_ones(0 if equalized is None else (equalized, key.shape[1], channels)),
        lse,
    )


def _sequences(lengths: Lengths) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Yield of each sequence its queries, its keys that count, and the rows of `Saved` that hold each of the two."""
    q_starts, k_starts = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
    stored = lengths.cu_seqlens_k.diff()
    for name, own, longest in (
        ("q", lengths.cu_seqlens_q.diff(), lengths.max_seqlen_q),
        ("k", stored, lengths.max_seqlen_k),
    ):
        if (own > longest).any():
            raise ValueError(f"a sequence of cu_seqlens_{name} is longer than max_seqlen_{name}, {longest}")
    k_lengths = (stored if lengths.seqused_k is None else torch.minimum(stored, lengths.seqused_k)).tolist()
    for index, (start, stop, k_start, k_length) in enumerate(
        zip(q_starts, q_starts[1:], k_starts, k_lengths, strict=False)
    ):
        first, k_first = padded_rows(start, index), padded_rows(k_start, index)
        query_rows = slice(first, first + padded_rows(stop - start))
        key_rows = slice(k_first, k_first + padded_rows(k_length))
        yield slice(start, stop), slice(k_start, k_start + k_length), query_rows, key_rows


def _blocks_of_sequence(
    blocks: BlockList | None, index: int, queries: slice, keys: slice, lengths: Lengths
) -> BlockList | None:
    if blocks is None:
        return None
    return blocks.of_sequence(index, queries.stop - queries.start, keys.stop - keys.start, lengths.max_seqlen_k)


def _sequence_part(saved: Saved, index: int, queries: slice, query_rows: slice, key_rows: slice) -> Saved:
    """Return the part of sequence `index` of what packed sequences save."""
    scales = slice(key_rows.start // KEY_BLOCK, key_rows.stop // KEY_BLOCK)
    return Saved(
        saved.query[:, :, query_rows],
        saved.query_scale[:, :, query_rows],
        saved.key[:, :, key_rows],
        saved.key_scale[:, :, scales],
        saved.equalizer[index : index + 1],
        saved.lse[:, :, queries],
    )


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe,
    valid: torch.Tensor | None,
    blocks: BlockList | None,
    *,
    is_causal: bool,
    causal_offset: int,
    scale: float,
) -> tuple[torch.Tensor, Saved]:
    """Compute `forward` of an ordinary batch."""
    if 0 in (*query.shape[:3], key.shape[2]):
        output, lse = nothing_attended(query, value.shape[-1], query.dtype)
        equalized = query.shape[0] if recipe.equalize else None
        return output, _empty(query, key, lse, padded_rows(query.shape[2]), padded_rows(key.shape[2]), equalized)
    mask = None if valid is None else valid[:, None, None]
    operands = quantize_operands(query.contiguous(), key.contiguous(), value.contiguous(), recipe, valid_keys(mask))
    output, lse = attend(
        operands,
        recipe,
        key.shape[2],
        dtype=query.dtype,
        mask=mask,
        is_causal=is_causal,
        causal_offset=causal_offset,
        scale=scale,
        blocks=blocks,
    )
    return output, save(operands, lse)


def _backward(
    output_gradient: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    saved: Saved,
    recipe: Recipe,
    valid: torch.Tensor | None,
    blocks: BlockList | None,
    head_dim: int,
    *,
    is_causal: bool,
    causal_offset: int,
    scale: float,
    block_m: int,
    block_n: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `backward` of an ordinary batch."""
    formats = recipe.backward
    assert formats is not None
    dtype = value.dtype
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    (batch, q_heads, q_len), (kv_heads, kv_len) = output_gradient.shape[:3], value.shape[1:3]
    if 0 in (batch, q_heads, q_len, kv_len):
        return (
            _tokens_first(value.new_zeros(batch, q_heads, q_len, head_dim), dtype),
            _tokens_first(value.new_zeros(batch, kv_heads, kv_len, head_dim), dtype),
            _tokens_first(torch.zeros_like(value), dtype),
        )
    # Contiguous, so that sums are taken in the same order whatever the caller's strides.
    output_gradient, value, output = output_gradient.contiguous(), value.contiguous(), output.contiguous()
    query_pad, key_pad = saved.query.shape[2] - q_len, saved.key.shape[2] - kv_len

    exists = value.new_ones(1, kv_len, dtype=torch.bool) if valid is None else valid
    exists = F.pad(exists, (0, key_pad))[:, None, None]
    # An lse of infinity makes P 0 in the rows that attend to nothing, and in the padding.
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
    query_operand, query_factor = _product_operand(query, query_scale, formats.ds, recipe.rotate, query_factors, dtype)
    key_operand, key_factor = _product_operand(key, key_scale, formats.ds, recipe.rotate, key_factors, dtype)
    gradient_operand = _round_blocks(output_gradient, formats.p, GRADIENT_BLOCK, dtype)
    dp_gradient = _round_blocks(output_gradient, formats.dp, 1 if formats.scales == "row" else block_m, dtype)
    dp_value = _round_blocks(value, formats.dp, 1 if formats.scales == "row" else block_n, dtype)

    query_gradient = torch.zeros_like(query)
    key_gradient, value_gradient = torch.zeros_like(key), torch.zeros_like(value)
    rows = rows_per_chunk(batch * q_heads, block_n, BLOCK_M)

    def tiles(chunk: slice) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (keys, which scores are allowed, P, dP) of each tile of keys, for the rows in `chunk`."""
        last_column = min(kv_len, chunk.stop + causal_offset) if is_causal else kv_len
        listed = None
        if blocks is not None:
            listed = blocks.kept_by_rows(kv_len, chunk.start, min(chunk.stop, q_len))
            listed = F.pad(listed, (0, 0, 0, chunk.stop - chunk.start - listed.shape[2]))
        for column in range(0, last_column, block_n):
            tile = slice(column, column + block_n)
            scores = tile_scores(
                per_group(query[:, :, chunk], kv_heads),
                query_scale[:, :, chunk] * scale,
                key[:, :, tile],
                key_scale[:, :, tile],
            )
            allowed = exists[..., tile] & (lse[:, :, chunk] != torch.inf)
            if blocks is not None and listed is not None:
                keys = torch.arange(column, tile.stop, device=value.device).clamp(max=kv_len - 1)
                allowed = allowed & listed[..., keys // blocks.block_n]
            if is_causal:
                row = torch.arange(chunk.start, chunk.stop, device=value.device).unsqueeze(-1)
                allowed = allowed & (torch.arange(column, tile.stop, device=value.device) <= row + causal_offset)
            p = scores.sub_(lse[:, :, chunk]).exp_().masked_fill_(~allowed, 0.0)
            dp = per_group(dp_gradient[:, :, chunk], kv_heads) @ dp_value[:, :, tile].unsqueeze(2).transpose(-1, -2)
            yield tile, allowed, p, dp.flatten(1, 2)

    for start in range(0, query.shape[2], rows):
        chunk = slice(start, min(start + rows, query.shape[2]))
        subtracted = delta[:, :, chunk]
        if formats.delta == "consistent":
            subtracted = torch.zeros_like(subtracted)
            for _, _, p, dp in tiles(chunk):
                subtracted += (p * dp).sum(-1, keepdim=True)
        for tile, allowed, p, dp in tiles(chunk):
            ds = dp.sub_(subtracted).mul_(p).masked_fill_(~allowed, 0.0)
            rounded = _round_tile(p, formats.p, formats.scales, block_m, -2, dtype)
            value_gradient[:, :, tile] += _transposed_product(rounded, gradient_operand[:, :, chunk], kv_heads)
            rounded = _round_tile(ds * query_factor[:, :, chunk], formats.ds, formats.scales, block_m, -2, dtype)
            key_gradient[:, :, tile] += _transposed_product(rounded, query_operand[:, :, chunk], kv_heads)
            factor = key_factor[:, :, tile].transpose(-1, -2).repeat_interleave(q_heads // kv_heads, 1)
            rounded = _round_tile(ds * factor, formats.ds, formats.scales, block_m, -1, dtype)
            product = per_group(rounded, kv_heads) @ key_operand[:, :, tile].unsqueeze(2)
            query_gradient[:, :, chunk] += product.flatten(1, 2)

    # Non-finite elements of dO, times a P of 0 or by way of a scale, give NaN where 0 is due.
    for gradient in (key_gradient, value_gradient):
        gradient.masked_fill_(~exists.transpose(-1, -2), 0.0)
    if formats.ds != "16bit":
        query_gradient = _restore(query_gradient, recipe.rotate, 1 / query_factors)
        key_gradient = _restore(key_gradient, recipe.rotate, 1 / key_factors)
    return (
        _tokens_first(query_gradient[:, :, :q_len, :head_dim] * scale, dtype),
        _tokens_first(key_gradient[:, :, :kv_len, :head_dim] * scale, dtype),
        _tokens_first(value_gradient[:, :, :kv_len], dtype),
    )


def _restore(x: torch.Tensor, rotates: bool, factor: torch.Tensor) -> torch.Tensor:
    """Undo the rotation of channels, then multiply them by the factor that undoes their equalizer."""
    return (transforms.unrotate(x) if rotates else x) * factor


def _product_operand(
    codes: torch.Tensor, scale: torch.Tensor, kind: str, rotates: bool, factor: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (Q or K as multiplied by dS, the factor of dS before it is rounded).

    In 16 bits the values are restored: sums of codes are exact, so that kernels may take them in any order. In 8 bits
    these are the codes and their scales, which vary along the sum and cannot be factored out of it.
    """
    if kind == "16bit":
        return (_restore(codes, rotates, factor) * scale).to(dtype).to(codes.dtype), torch.ones_like(scale)
    return (codes if kind == "int8" else fp8.round_to_e4m3(codes).to(codes.dtype)), scale


def _round_blocks(x: torch.Tensor, kind: str, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Round x (batch, heads, rows, channels); in 8 bits, `tokens` tokens share a scale."""
    return _round(x.unflatten(-2, (-1, tokens)).flatten(-2), kind, dtype).view_as(x)


def _round_tile(x: torch.Tensor, kind: str, scales: str, block_m: int, summed: int, dtype: torch.dtype) -> torch.Tensor:
    """Round P or dS of a tile of keys (batch, q_heads, rows, block_n) for a sum over its dimension `summed`.

    In 8 bits a scale is shared along the sum, or by the whole tile; a tile has block_m rows.
    """
    if kind == "16bit":
        return _round(x, kind, dtype)
    tiles = x.unflatten(-2, (-1, block_m))
    if scales == "tile":
        return _round(tiles.flatten(-2), kind, dtype).view_as(x)
    if summed == -1:
        return _round(x, kind, dtype)
    return _round(tiles.transpose(-1, -2), kind, dtype).transpose(-1, -2).flatten(-3, -2)


def _round(x: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Round x (..., groups, elements) to `dtype` ("16bit"), or to INT8 or e4m3 with a scale per group."""
    if kind == "16bit":
        return x.to(dtype).to(x.dtype)
    codes, scale = int8.quantize(x, 1) if kind == "int8" else fp8.quantize(x, -1)
    return codes.to(x.dtype) * scale


def _transposed_product(weights: torch.Tensor, x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return weightsᵀ·x, summed over the query heads of each group too.

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
