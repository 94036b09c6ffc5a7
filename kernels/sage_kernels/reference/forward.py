"""Every recipe in plain PyTorch: the specification of the kernels, the CPU path, and the emulation on other hardware.

Softmax is online over tiles of keys, as in the kernels, so that a kernel can be compared tile by tile. Formats and
transforms come from `formats` and `transforms`; matrix products of the quantised values are taken in float32, where
they are exact for INT8 (up to head_dim 512) and exact up to the order of the sums for FP4 and FP8. Memory is linear in
length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..exact.sdpa import apply_mask, rows_per_chunk
from ..formats import fp8, fp16, int8, nvfp4
from ..formats.weights import P_SCALE
from ..spec import transforms
from ..spec.block_list import BlockList
from ..spec.call import PADDING_BIAS, clamped_offset, recent_start
from ..spec.layout import THREAD_TOKENS, ceil_div, natural_order, padded_channels, thread_order
from ..spec.masks import as_key_mask, unexpanded
from ..spec.recipe import Recipe
from .unquantized import Unquantized, attend_unquantized, per_group, take_late

BLOCK_M = 128
BLOCK_N = 128
CHANNEL_GROUP = nvfp4.GROUP  # head_dim is padded to a multiple of it


@dataclass(frozen=True)
class ReferenceOperands:
    """Quantised Q, K and V as float32 values, and the means that undo the transforms.

    Attributes:
        query, key: (batch, heads, tokens, d) element values; multiply a score by query_scale · key_scaleᵀ.
        query_scale, key_scale: (batch, heads, tokens, 1).
        value: (batch, kv_heads, tokens, v_head_dim) element values; multiply the output by value_scale.
        value_scale: (batch, kv_heads, 1, v_head_dim or 1).
        query_mean, smooth_key: with smoothing of Q, (batch, q_heads, blocks, head_dim) and the unquantised
            (batch, kv_heads, tokens, head_dim), whose product must be added to the scores.
        key_mean, value_mean: (batch, kv_heads, 1, ·) or None.
        equalizer: the result of `transforms.equalize`, or None.
        heavy: the keys that are attended to in the caller's dtype and left out of the other operands; or None.
        recent: all keys, for attention to the latest keys of causal rows in the caller's dtype; or None.
    """

    query: torch.Tensor
    query_scale: torch.Tensor
    key: torch.Tensor
    key_scale: torch.Tensor
    value: torch.Tensor
    value_scale: torch.Tensor
    query_mean: torch.Tensor | None
    smooth_key: torch.Tensor | None
    key_mean: torch.Tensor | None
    value_mean: torch.Tensor | None
    equalizer: torch.Tensor | None = None
    heavy: Unquantized | None = None
    recent: Unquantized | None = None


def counted_keys(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return which keys count in means and scales: bool (batch or 1, 1, kv_len or 1, 1); None without a mask.

    A key counts if some query may attend to it. An additive mask of -10,000 and less, as padding often has, forbids a
    key to all queries as -inf does, provided that each query has another key left.

    Args:
        mask: bool or additive, 4-D, broadcastable to (batch, q_heads, q_len, kv_len).
    """
    if mask is None:
        return None
    mask = unexpanded(mask)

    def keys(allowed: torch.Tensor) -> torch.Tensor:
        return allowed.any(-2, keepdim=True).any(1, keepdim=True)

    if mask.dtype == torch.bool:
        return keys(mask).transpose(-1, -2)
    allowed = mask > PADDING_BIAS
    every_query_has_one = allowed.any(-1, keepdim=True).all(-2, keepdim=True).all(1, keepdim=True)
    return torch.where(every_query_has_one, keys(allowed), keys(mask != -torch.inf)).transpose(-1, -2)


def quantize_operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> ReferenceOperands:
    """Transform and quantise Q, K and V.

    Args:
        query, key, value: any floating dtype; (batch, heads, tokens, channels).
        recipe: a low-bit recipe. With more keys than its `heavy_keys`, so many keys become `ReferenceOperands.heavy`.
            With `heavy_choice` "heaviest", K and V first exchange tokens (`transforms.exchange`); with causality, one
            in LATE_SHARE heavy keys may be a late key (`transforms.late_keys`) if there are MIN_LATE times as many
            keys. Means, the equalizer, and the scales of V are taken over all keys; but with an equalizer, K's mean and
            the equalizer are taken over `transforms.quiet_keys`. With `recent_keys` all keys are kept for
            `Operands.recent`.
        key_mask: the result of `counted_keys`. Other keys become zeros, which change no mean and no scale. If there are
            as many queries as keys, the query of a token whose key does not count is padding too, and is left out of
            the equalizer.
        scale: factor of the scores, for the choice of heavy keys; default head_dim ** -0.5.
        is_causal: whether rows attend causally, and not to all keys.
    """
    dtype, heavy, recent = query.dtype, None, None
    query_mask = key_mask if query.shape[-2] == key.shape[-2] else None
    query, key, value = query.float(), key.float(), value.float()
    if key_mask is not None:
        key, value = torch.where(key_mask, key, 0.0), torch.where(key_mask, value, 0.0)
    query_mean = smooth_key = key_mean = value_mean = equalizer = None
    quiet = key_mask
    if recipe.equalize:
        quiet = transforms.quiet_keys(key, key_mask)
        equalizer = transforms.equalize(query, key, quiet, query_mask, recipe.smooth_q)
    if recipe.smooth_k:
        key_mean = transforms.mean_of_tokens(key, quiet)
    if recipe.smooth_v:
        _, value_mean = transforms.smooth_value(value, key_mask)
    first_keys, late = recipe.heavy_keys if recipe.heavy_keys < key.shape[-2] else 0, None
    heavy_key, heavy_value = (x[..., :first_keys, :] for x in (key, value))
    if first_keys and recipe.heavy_choice == "heaviest":
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if is_causal and key.shape[-2] >= transforms.MIN_LATE * first_keys:
            places = first_keys // transforms.LATE_SHARE
            first_keys -= places
            late = transforms.late_keys(query, key, first_keys, places, scale, key_mask)
            (heavy_key, key), (heavy_value, value) = (take_late(x, late, first_keys) for x in (key, value))
        elif not is_causal:
            chosen = transforms.heavy_places(query, key, first_keys, scale, key_mask)
            key, value = transforms.exchange(key, chosen), transforms.exchange(value, chosen)
            heavy_key, heavy_value = (x[..., :first_keys, :] for x in (key, value))
    if recipe.recent_keys:
        recent = Unquantized(query, key if key_mean is None else key - key_mean, value, dtype)
    if first_keys:
        if key_mean is not None:
            heavy_key = heavy_key - key_mean
            heavy_key = heavy_key if recipe.qk == "int8" else heavy_key.to(dtype).float()
        heavy = Unquantized(query, heavy_key, heavy_value, dtype, late)
    if key_mean is not None:
        key = key - key_mean
    if value_mean is not None:
        value = value - value_mean
    if key_mask is not None:
        key, value = torch.where(key_mask, key, 0.0), torch.where(key_mask, value, 0.0)
    (_, key), (smooth_heavy, value) = (x.tensor_split((first_keys,), -2) for x in (key, value))
    pad = -key.shape[-2] % BLOCK_N
    key, value = F.pad(key, (0, 0, 0, pad)), F.pad(value, (0, 0, 0, pad))
    if recipe.smooth_q:
        query, query_mean = transforms.smooth_blocks(query, BLOCK_M)
        smooth_key = key
    if equalizer is not None:
        key, query = key / equalizer, query * equalizer.repeat_interleave(query.shape[1] // key.shape[1], 1)
    channels = query.shape[-1]
    pad = padded_channels(channels) - channels if recipe.qk == "int8" else -channels % CHANNEL_GROUP
    query, key = F.pad(query, (0, pad)), F.pad(key, (0, pad))
    if recipe.rotate:
        query, key = transforms.rotate(query), transforms.rotate(key)
    if recipe.qk == "int8":
        query_codes, query_scale = int8.quantize(query, 1)
        key_parts = int8.quantize(thread_order(key), THREAD_TOKENS, torch.bfloat16)
        query, (key, key_scale) = query_codes.float(), (natural_order(part).float() for part in key_parts)
    else:
        query, query_scale = _quantize_nvfp4(query, recipe, recipe.scale_steps)
        key, key_scale = _quantize_nvfp4(key, recipe, recipe.key_scale_steps)
    return ReferenceOperands(
        query,
        query_scale,
        key,
        key_scale,
        *_quantize_value(value, smooth_heavy, recipe),
        query_mean,
        smooth_key,
        key_mean,
        value_mean,
        equalizer,
        heavy,
        recent,
    )


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    recipe: Recipe,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    block_n: int = BLOCK_N,
    blocks: BlockList | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by a low-bit recipe (arXiv 2505.11594, algorithm 1, and INT8 variants of it).

    Args:
        query: (batch, q_heads, q_len, head_dim), any floating dtype, any strides.
        key, value: (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_head_dim); q_heads a multiple of
            kv_heads.
        recipe: a low-bit recipe.
        mask: bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len).
        is_causal: row i attends to keys 0…i + causal_offset.
        scale: default head_dim ** -0.5.
        block_n: keys of a tile of the online softmax: 16, 32, 64 or 128.
        blocks: the tiles of keys that each block of rows attends to; None: all tiles. Means, scales and equalizer are
            taken over all keys, listed or not. With a list no key is heavy, and recent keys are treated like all
            others.

    With an attention bias, heavy keys are the first ones. Causal rows attend to their latest keys, `recent_keys` at
    least, in the caller's dtype (`call.recent_start`).

    Returns:
        (output, lse): (batch, q_heads, q_len, v_head_dim) in query's dtype, laid out as (batch, q_len, q_heads,
        v_head_dim); (batch, q_heads, q_len) float32. A row that may attend to nothing gives output 0 and lse -inf.

    Raises:
        ValueError: block_n is not 16, 32, 64 or 128.
    """
    if block_n not in (16, 32, 64, 128):
        raise ValueError(f"block_n {block_n} is not supported: use 16, 32, 64 or 128")
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len, v_head_dim = key.shape[1], key.shape[2], value.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    causal_offset = clamped_offset(causal_offset, q_len, kv_len)
    if 0 in (batch, q_heads, q_len, kv_len):
        return nothing_attended(query, v_head_dim, query.dtype)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    if blocks is not None:
        recipe = replace(recipe, heavy_keys=0, recent_keys=0)
    if not is_causal:
        recipe = replace(recipe, recent_keys=0)
    if mask is not None and as_key_mask(mask, kv_len) is None:
        recipe = replace(recipe, heavy_choice="first")
    # Contiguous, so that sums are taken in the same order whatever the caller's strides.
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    operands = quantize_operands(query, key, value, recipe, counted_keys(mask), scale, is_causal)
    output, lse = attend_to_operands(
        operands,
        recipe,
        kv_len,
        dtype=query.dtype,
        mask=mask,
        is_causal=is_causal,
        causal_offset=causal_offset,
        scale=scale,
        block_n=block_n,
        blocks=blocks,
    )
    if operands.key_mean is not None:
        lse += scale * per_group(query.float(), kv_heads).matmul(
            operands.key_mean.unsqueeze(2).transpose(-1, -2)
        ).flatten(1, 2).squeeze(-1)
    return output, lse


def nothing_attended(query: torch.Tensor, v_head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attention`'s output and lse for calls whose rows may attend to nothing: 0 and -inf."""
    batch, q_heads, q_len, _ = query.shape
    output = query.new_zeros(batch, q_len, q_heads, v_head_dim, dtype=dtype).transpose(1, 2)
    return output, query.new_full((batch, q_heads, q_len), -torch.inf, dtype=torch.float32)


def attend_to_operands(
    operands: ReferenceOperands,
    recipe: Recipe,
    kv_len: int,
    *,
    dtype: torch.dtype,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float,
    block_n: int = BLOCK_N,
    blocks: BlockList | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention` of quantised operands.

    Args:
        operands: the result of `quantize_operands`.
        kv_len: number of existing keys, including heavy keys; operands hold padding beyond them.
        dtype: dtype of the output.
        mask: 4-D; otherwise as in `attention`, like the arguments below.

    Returns:
        (output, lse) as in `attention`, but lse is of the scores against K without its mean.
    """
    batch, q_heads, q_len, _ = operands.query.shape
    output, lse = nothing_attended(operands.query, operands.value.shape[-1], dtype)
    if mask is not None:
        mask = mask.expand(batch, q_heads, q_len, kv_len)
    rows = rows_per_chunk(batch * q_heads, block_n, BLOCK_M)
    for start in range(0, q_len, rows):
        chunk = slice(start, min(start + rows, q_len))
        attended, lse[:, :, chunk] = _attend_rows(
            operands, recipe, chunk, kv_len, mask, is_causal, causal_offset, scale, block_n, blocks
        )
        # A rounded V can exceed every unrounded V, and so the range of its dtype.
        output[:, :, chunk] = transforms.round_finite(attended, dtype)
    return output, lse


def _attend_rows(
    operands: ReferenceOperands,
    recipe: Recipe,
    chunk: slice,
    kv_len: int,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float,
    block_n: int,
    blocks: BlockList | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (float32) and lse of the rows in `chunk`, whose start is a multiple of BLOCK_M."""
    kv_heads = operands.key.shape[1]
    query = per_group(operands.query[:, :, chunk], kv_heads)
    query_scale = operands.query_scale[:, :, chunk] * scale
    p_scale = P_SCALE[recipe.pv]
    maximum = query_scale.new_full((*query_scale.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(maximum)
    denominator = torch.zeros_like(maximum)
    output = maximum.new_zeros(*maximum.shape[:3], operands.value.shape[-1])
    first_keys = 0 if operands.heavy is None else operands.heavy.first_keys
    first_recent, hides_later = 0, is_causal and operands.recent is None
    last_column = min(kv_len, chunk.stop + causal_offset) if is_causal else kv_len
    if operands.recent is not None:
        first_recent = first_keys + recent_start(causal_offset - first_keys, recipe.recent_keys)
        last_column = min(last_column, (chunk.stop - 1) // BLOCK_M * BLOCK_M + first_recent)
    listed = None if blocks is None else blocks.kept_by_rows(kv_len, chunk.start, chunk.stop)
    for column in range(first_keys, last_column, block_n):
        tile = slice(column - first_keys, column - first_keys + block_n)
        scores = tile_scores(query, query_scale, operands.key[:, :, tile], operands.key_scale[:, :, tile])
        if operands.query_mean is not None and operands.smooth_key is not None:
            mean = operands.query_mean[:, :, chunk.start // BLOCK_M : ceil_div(chunk.stop, BLOCK_M)]
            smooth_key = operands.smooth_key[:, :, tile].unsqueeze(2).transpose(-1, -2)
            delta = (per_group(mean, kv_heads) @ smooth_key).flatten(1, 2)
            for block, block_scores in enumerate(scores.split(BLOCK_M, 2)):
                block_scores.add_(delta[:, :, block : block + 1], alpha=scale)
        scores[..., kv_len - column :] = -torch.inf
        inside = scores[..., : kv_len - column]
        inside.copy_(apply_mask(inside, mask, hides_later, chunk.start, column, causal_offset))
        if operands.recent is not None:
            for block, block_scores in enumerate(scores.split(BLOCK_M, 2)):
                if column >= chunk.start + block * BLOCK_M + first_recent:
                    block_scores.fill_(-torch.inf)
        if blocks is not None and listed is not None:
            keys = torch.arange(column, column + inside.shape[-1], device=inside.device)
            inside.masked_fill_(~listed[..., keys // blocks.block_n], -torch.inf)

        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        offset = torch.where(new_maximum == -torch.inf, 0.0, new_maximum)
        p = scores.sub_(offset).exp_().mul_(p_scale)
        decay = torch.exp(maximum - offset)
        quantized_p = _quantize_p(p, recipe)
        value = operands.value[:, :, tile].unsqueeze(2)
        output = output * decay + (per_group(quantized_p, kv_heads) @ value).flatten(1, 2)
        total = total * decay + p.sum(-1, keepdim=True)
        summed = quantized_p if recipe.denominator == "quantized_p" else p
        denominator = denominator * decay + summed.sum(-1, keepdim=True)
        maximum = new_maximum

    value_scale = operands.value_scale.expand(*operands.value.shape[:2], 1, -1).repeat_interleave(query.shape[2], 1)
    output = output * value_scale
    if operands.value_mean is not None:
        output = output + denominator * operands.value_mean.repeat_interleave(query.shape[2], 1)
    unquantized = operands.heavy, operands.recent, first_recent, kv_heads
    for scores, weigh in attend_unquantized(*unquantized, chunk, kv_len, mask, is_causal, causal_offset, scale):
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        offset = torch.where(new_maximum == -torch.inf, 0.0, new_maximum)
        p = scores.sub_(offset).exp_().mul_(p_scale)
        decay = torch.exp(maximum - offset)
        output = output * decay + weigh(p)
        total, denominator = (x * decay + p.sum(-1, keepdim=True) for x in (total, denominator))
        maximum = new_maximum
    output = torch.where(denominator == 0, 0.0, output / torch.where(denominator == 0, 1.0, denominator))
    return output, (maximum + torch.log(total / p_scale)).squeeze(-1)


def tile_scores(
    query: torch.Tensor, query_scale: torch.Tensor, key: torch.Tensor, key_scale: torch.Tensor
) -> torch.Tensor:
    """Return the scores of a tile: (batch, q_heads, rows, keys).

    Args:
        query: (batch, kv_heads, q_heads / kv_heads, rows, d) element values.
        query_scale: (batch, q_heads, rows, 1), times the softmax scale.
        key, key_scale: (batch, kv_heads, keys, d) element values, (batch, kv_heads, keys, 1).
    """
    scores = (query @ key.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    return scores.mul_(query_scale).mul_(key_scale.transpose(-1, -2).repeat_interleave(query.shape[2], 1))


def _quantize_nvfp4(x: torch.Tensor, recipe: Recipe, scale_steps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the dequantised values of Q or K in NVFP4, and 1 as the scale of each token."""
    tokens = x.shape[-2]
    blocks = F.pad(x, (0, 0, 0, -tokens % BLOCK_M)).unflatten(-2, (-1, BLOCK_M))
    values = nvfp4.quantize_dequantize(blocks, scale_steps, _tensor_scale(blocks, recipe))
    return values.flatten(-3, -2)[..., :tokens, :], x.new_ones(*x.shape[:-1], 1)


def _quantize_value(value: torch.Tensor, heavy: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the element values of V and the scale of each channel, which multiplies the output.

    Args:
        value: (batch, kv_heads, tokens, v_head_dim), a multiple of BLOCK_N tokens.
        heavy: V of the heavy keys, which count in the scale; it may have no keys.
    """
    tokens = value.shape[-2]
    value = torch.cat((value, F.pad(heavy, (0, 0, 0, -heavy.shape[-2] % BLOCK_N))), -2)
    elements, scale = _quantize_all_values(value, recipe)
    return elements[..., :tokens, :], scale


def _quantize_all_values(value: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    if recipe.pv == "fp8":
        codes, scale = fp8.quantize_value(value)
        return codes.float(), scale
    if recipe.pv == "int8":
        codes, scale = int8.quantize(value.mT, 1)
        return codes.float().mT, scale.mT
    if recipe.pv == "fp16":
        codes, scale = fp16.quantize(value)
        return codes.float(), scale
    value = value.transpose(-1, -2)
    tensor_scale = _tensor_scale(value, recipe)
    elements, scale = nvfp4.round_groups(value / tensor_scale, recipe.scale_steps)
    return (elements * scale).flatten(-2).transpose(-1, -2), tensor_scale


def _tensor_scale(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    return nvfp4.power_of_two_scale(x) if recipe.tensor_scale else x.new_ones(1, 1, 1, 1)


def _quantize_p(p: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Quantise and dequantise P (float32, in [0, P_SCALE])."""
    if recipe.pv == "fp8":
        return fp8.round_to_e4m3(p).float()
    if recipe.pv == "int8":
        codes, scale = int8.quantize(p, 1)
        return int8.dequantize(codes, scale)
    if recipe.pv == "fp16":
        return p.half().float()
    elements, scale = nvfp4.round_groups(p)
    return elements.mul_(scale).flatten(-2)
