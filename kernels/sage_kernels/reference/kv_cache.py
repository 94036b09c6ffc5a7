"""The low-bit KV cache in plain PyTorch: the specification of the kernels' stored bits and results.

K: (k - mean) · (1 / equalizer), rotated (`transforms`); V: v / unit, rotated. Both are rounded to float16: in this form
the first and the newest tokens are kept, and a token's codes are made from these 16 bits. Q is multiplied by the
equalizer and rotated, so scores lack only q · mean, which softmax ignores; the output is unrotated and multiplied by
the unit. All these steps are exact in real arithmetic. Mean, equalizer and unit are taken from the first tokens that a
cache gets.

A token in INT8 or INT4 is x = low + scale · code, with its smallest element and (largest - smallest) / (2^bits - 1) in
float16 (asymmetric, arXiv 2405.04532, section 4.2); in NVFP4 as `formats.nvfp4` without a tensor scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..formats import nvfp4
from ..spec import transforms
from ..spec.kv_cache import FIRST_TOKENS, PAGE, RING, KVCache
from ..spec.kv_format import KVFormat
from ..spec.layout import ceil_div

FROZEN_TOKENS = 4096
"""Tokens, at equal distances, that decide the mean, the equalizer and V's unit."""
EQUALIZING_POWER = 5 / 32
"""Power of `transforms.loudness_ratio` for the equalizer: 1/4 suits the first tokens best, less suits later tokens."""
FEWEST_TOKENS = 16
"""Tokens from which an equalizer is decided; fewer tokens say too little about each channel."""
LEAST_UNIT = 2.0**-6
"""Least unit of V: after first tokens of nearly 0, later tokens of up to 1,000 stay within float16."""


@torch.inference_mode()  # the cache's tensors may be of this mode, which alone may write them
def freeze(
    cache: KVCache,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None = None,
) -> None:
    """Decide the transforms from the first tokens, and where sequences start.

    Args:
        cache: an empty cache.
        query: (batch, q_heads, tokens, head_dim); None: unknown. The equalizer is 1 without queries, and for fewer than
            FEWEST_TOKENS tokens.
        key, value: (batch, kv_heads, tokens, head_dim).
        key_mask: bool (batch or 1, tokens), False for padding; None: no padding.
    """
    tokens = key.shape[2]
    if key_mask is not None:
        cache.start.copy_(key_mask.int().argmax(1))
        key_mask = key_mask[:, None, :, None]
    step = ceil_div(tokens, FROZEN_TOKENS)
    some_key, some_value = _padded(cache, key[:, :, ::step]), _padded(cache, value[:, :, ::step])
    some_key_mask = None if key_mask is None else key_mask[:, :, ::step]
    quiet = transforms.quiet_keys(some_key, some_key_mask)
    cache.key_mean.copy_(transforms.mean_of_tokens(some_key, quiet)[:, :, 0])
    if query is not None and tokens >= FEWEST_TOKENS:
        rows = ceil_div(tokens, transforms.EQUALIZER_QUERIES)
        valid_rows = None if key_mask is None else key_mask[:, :, ::rows]
        some_query = _padded(cache, query[:, :, ::rows])
        ratio = transforms.loudness_ratio(some_query, some_key, quiet, valid_rows)
        cache.equalizer.copy_(ratio[:, :, 0] ** EQUALIZING_POWER)
    square = transforms.mean_of_tokens(some_value.square(), some_key_mask).mean((2, 3))
    _, exponent = torch.frexp(square)
    unit = torch.exp2((exponent >> 1).float()).clamp_min(LEAST_UNIT)
    cache.value_unit.copy_(torch.where(square > 0, unit, 1.0))
    cache.is_frozen = True


@torch.inference_mode()
def append(cache: KVCache, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store tokens after earlier tokens, and quantise tokens that leave the window.

    Args:
        cache: a cache with frozen transforms.
        key, value: (batch, kv_heads, tokens, head_dim).
    """
    tokens, first = key.shape[2], cache.length
    end, coded_columns = first + tokens, cache.coded_after(tokens)
    cache.reserve(end)
    columns = torch.arange(first, end, device=cache.device)
    before = torch.arange(cache.coded_columns, min(coded_columns, first), device=cache.device)
    places = cache.start.long()[:, None] + torch.arange(FIRST_TOKENS, device=cache.device)
    is_new = ((places >= first) & (places < end))[:, None, :, None]
    places = (places - first).clamp(0, tokens - 1)[:, None, :, None].expand(-1, cache.kv_heads, -1, cache.channels)
    for operand, x in (("key", transform_key(cache, key)), ("value", transform_value(cache, value))):
        exact = getattr(cache, f"exact_{operand}")
        _store_codes(cache, operand, before, exact[:, :, FIRST_TOKENS + before % RING])
        _store_codes(cache, operand, columns[: max(coded_columns - first, 0)], x[:, :, : max(coded_columns - first, 0)])
        exact[:, :, :FIRST_TOKENS] = torch.where(is_new, x.gather(2, places), exact[:, :, :FIRST_TOKENS])
        newest = columns[-RING:]
        exact[:, :, FIRST_TOKENS + newest % RING] = x[:, :, -RING:]
    cache.advance(tokens)


def transform_key(cache: KVCache, key: torch.Tensor) -> torch.Tensor:
    """Return K as it is kept in 16 bits, float16 (batch, kv_heads, tokens, channels)."""
    x = (_padded(cache, key) - cache.key_mean[:, :, None]) * (1 / cache.equalizer[:, :, None])
    return transforms.round_finite(transforms.rotate(x), torch.float16)


def transform_value(cache: KVCache, value: torch.Tensor) -> torch.Tensor:
    """Return V as it is kept in 16 bits, float16 (batch, kv_heads, tokens, channels)."""
    x = _padded(cache, value) / cache.value_unit[:, :, None, None]
    return transforms.round_finite(transforms.rotate(x), torch.float16)


def read_all(cache: KVCache, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V as the cache holds them, (batch, kv_heads, length, head_dim).

    Args:
        cache: a cache of any length.
        dtype: dtype of the result, float64 for tests; default: the dtype of the caller's K.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    column = torch.arange(cache.length, device=cache.device)
    slot = (FIRST_TOKENS + column % RING).expand(cache.batch, -1)
    from_start = column - cache.start.long()[:, None]
    is_first = (from_start >= 0) & (from_start < FIRST_TOKENS)
    slot = torch.where(is_first, from_start, slot)
    in_16_bits = (is_first | (column >= cache.coded_columns))[:, None, :, None]
    index = slot[:, None, :, None].expand(-1, cache.kv_heads, -1, cache.channels)
    dequantized = []
    for operand in ("key", "value"):
        exact = getattr(cache, f"exact_{operand}").gather(2, index).to(wide)
        x = torch.where(in_16_bits, exact, _load_codes(cache, operand).to(wide))
        dequantized.append(transforms.unrotate(x)[..., : cache.head_dim])
    key = dequantized[0] * cache.equalizer[:, :, None, : cache.head_dim] + cache.key_mean[:, :, None, : cache.head_dim]
    value = dequantized[1] * cache.value_unit[:, :, None, None]
    return key.to(dtype or cache.dtype), value.to(dtype or cache.dtype)


def attend_to_cache(cache: KVCache, query: torch.Tensor, key_mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Attend with the newest tokens to the cache, causally.

    Args:
        cache: a cache that already holds the queries' tokens.
        query: (batch, q_heads, q_len, head_dim).
        key_mask: bool (batch or 1, length), True for columns that exist; None: all.
        scale: factor of the scores.

    Returns:
        (batch, q_heads, q_len, head_dim) in query's dtype, 0 in rows without a key.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // cache.kv_heads
    key, value = (x.repeat_interleave(group, 1) for x in read_all(cache, wide))
    column = torch.arange(cache.length, device=cache.device)
    allowed = (column <= column[cache.length - query.shape[2] :, None])[None, None]
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None]
    scores = (scale * query.to(wide) @ key.mT).masked_fill(~allowed, -torch.inf)
    weights = torch.where(allowed.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    return (weights @ value).to(query.dtype)


def quantize(x: torch.Tensor, format: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float16 tokens (…, channels) to words, int16 (…, W), and scales, as `KVCache` describes them."""
    x = x.float()
    if format.group:
        elements, scale = nvfp4.round_groups(x)
        magnitudes = torch.tensor(nvfp4.E2M1_VALUES, device=x.device)
        code = torch.searchsorted(magnitudes, elements.flatten(-2).abs()) + 8 * (elements.flatten(-2) < 0)
        scales = scale.squeeze(-1).to(torch.float8_e4m3fn)
    else:
        levels = 2**format.bits - 1
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = ((high - low) * (1 / levels)).half().float()
        inverse = torch.where(scale == 0, 0.0, 1 / torch.where(scale == 0, 1.0, scale))
        code = ((x - low) * inverse + 0.5).floor().clamp(0, levels)
        scales = torch.cat((scale, low), -1).half()
    parts = code.to(torch.int32).unflatten(-1, (16 // format.bits, -1))
    shift = torch.arange(0, 16, format.bits, device=x.device, dtype=torch.int32)[:, None]
    return (parts << shift).sum(-2).to(torch.int16), scales


def dequantize(words: torch.Tensor, scales: torch.Tensor, format: KVFormat) -> torch.Tensor:
    """Return the values of words and scales, float32 (…, channels)."""
    shift = torch.arange(0, 16, format.bits, device=words.device, dtype=torch.int32)[:, None]
    code = (words.to(torch.int32).unsqueeze(-2) >> shift & (2**format.bits - 1)).flatten(-2)
    if not format.group:
        return scales[..., 1:].float() + scales[..., :1].float() * code
    magnitudes = torch.tensor(nvfp4.E2M1_VALUES, device=words.device)
    elements = torch.cat((magnitudes, -magnitudes))[code].unflatten(-1, (-1, format.group))
    return (elements * scales.float().unsqueeze(-1)).flatten(-2)


def _store_codes(cache: KVCache, operand: str, columns: torch.Tensor, x: torch.Tensor) -> None:
    words, scales = quantize(x, cache.format)
    getattr(cache, f"{operand}_scales")[:, :, columns] = scales
    if operand == "key":
        cache.key_codes[:, :, columns] = words
    else:
        cache.value_codes[:, :, columns // PAGE, :, columns % PAGE] = words.permute(2, 0, 1, 3)


def _load_codes(cache: KVCache, operand: str) -> torch.Tensor:
    """Dequantise the codes of all columns, (batch, kv_heads, length, channels); columns in 16 bits have no codes."""
    words = cache.key_codes if operand == "key" else cache.value_codes.transpose(3, 4).flatten(2, 3)
    scales = getattr(cache, f"{operand}_scales")
    return dequantize(words[:, :, : cache.length], scales[:, :, : cache.length], cache.format)


def _padded(cache: KVCache, x: torch.Tensor) -> torch.Tensor:
    return F.pad(x.float(), (0, cache.channels - cache.head_dim))
