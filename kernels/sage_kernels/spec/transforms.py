"""Transforms of Q, K and V before quantisation. Each is exact in real arithmetic.

smooth  Subtract a mean. K's mean adds a constant to each row of scores, which softmax ignores (arXiv 2410.02367,
        section 4.2). V's mean, if large enough to matter, is added back to the output, because rows of P sum to 1
        (arXiv 2411.10958, section 3.4). Q's mean, one per block of rows, is added back to the scores as mean·Kᵀ (the
        same, 3.1).
rotate  Multiply the head dimension of Q and K by the same orthonormal matrix, which leaves every dot product unchanged
        and spreads channels of large magnitude over all channels.
equalize Divide each channel of K by a factor and multiply Q's by it, so that both have about the same magnitude in it.
exchange Let heavy keys change places with the first keys, which are attended to in 16 bits: the order of keys does not
        matter if every query sees the same keys. With causality a late key changes places only for the rows that see
        it: for earlier rows the first key is heavy.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from .layout import BLOCK, KEY_BLOCK, ceil_div

MIN_MEAN = 1 / 64
ROTATION_SEED = 0x5A6E
EQUALIZER_QUERIES = 128
"""Rows of Q, of each head, whose magnitudes decide the equalizer; at equal distances, from the first one on."""
MAX_EQUALIZER = 8
"""Largest exponent of a factor of the equalizer."""
MIN_VARIANCE = 2.0**-16
"""Least variance that is distinguished from 0, as a share of the squared mean: the precision of float32 sums."""
HEAVY_QUERIES = 16
"""Rows of Q, of all heads that share a head of K, whose mean decides which keys are heavy."""
HEAVY_MARGIN = 2.0
"""Least difference between the scores of a key and of the key whose place it takes."""
LATE_SHARE = 4
"""With causality, one in this many heavy keys may be a late key."""
MIN_LATE = 2
"""Late keys exist if there are at least this many times as many keys as heavy keys."""
NO_KEY = 2**31 - 1
"""Number that stands for an absent late key."""
LOUD_GROUPS = 8
"""Groups of K's tokens: block n of 128 tokens belongs to group n modulo this number."""
LOUD = 32.0
"""A group of K's tokens is loud if its mean square exceeds this multiple of the median group's."""


def _tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over blocks of 128 tokens, each by a tree of halves: (..., tokens, channels) -> (..., blocks, channels)."""
    x = F.pad(x, (0, 0, 0, -x.shape[-2] % BLOCK)).unflatten(-2, (-1, BLOCK))
    while x.shape[-2] > 1:
        first, second = x.chunk(2, -2)
        x = first + second
    return x.squeeze(-2)


def sum_of_tokens(x: torch.Tensor) -> torch.Tensor:
    """Sum over tokens in a fixed order, so that kernels can compute the same bits.

    Each block of 128 tokens is summed by a tree of halves, then each 128 block sums in the same way, then these sums in
    order.

    Args:
        x: float32 (..., tokens, channels).

    Returns:
        float32 (..., 1, channels).
    """
    groups = _tree_sum(_tree_sum(x))
    total = groups[..., :1, :]
    for group in range(1, groups.shape[-2]):
        total = total + groups[..., group : group + 1, :]
    return total


def mean_of_tokens(x: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean over tokens that count; non-finite elements count as 0, so one token does not spoil the others.

    Args:
        x: float32 (..., tokens, channels), at least one token.
        token_mask: bool broadcastable to (..., tokens, 1), which tokens count; None: all. The mean is 0 if no token
            counts, and if the sum is not finite.

    Returns:
        float32 (..., 1, channels).
    """
    x = torch.where(x.isfinite(), x, 0.0)
    if token_mask is None:
        mean = sum_of_tokens(x) / x.new_full((1, 1), x.shape[-2])
    else:
        token_mask = token_mask.expand(*token_mask.shape[:-2], x.shape[-2], 1)
        mean = sum_of_tokens(torch.where(token_mask, x, 0.0)) / token_mask.sum(-2, keepdim=True).clamp_min(1).float()
    return torch.where(mean.isfinite(), mean, 0.0)


def quiet_keys(key: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return which keys enter K's mean and the equalizer: the keys of groups that are not loud.

    One key that is much louder than all others would move the mean away from the others, and decide the equalizer
    alone. Any vector may be subtracted from K, so keys may be left out. Groups are compared by their mean squares; the
    median is the lower median of the groups whose mean square is not 0.

    Args:
        key: float32 (batch, kv_heads, tokens, channels).
        key_mask: bool broadcastable to (batch, kv_heads, tokens, 1), which keys count; None: all.

    Returns:
        bool (batch, kv_heads, tokens, 1).
    """
    tokens = key.shape[-2]
    counts = torch.ones_like(key[..., :1], dtype=torch.bool)
    counts = counts if key_mask is None else counts & key_mask
    square = key.square()
    square = torch.where(square.isfinite() & counts, square, 0.0).sum(-1, keepdim=True)
    group = torch.arange(tokens, device=key.device) // BLOCK % LOUD_GROUPS
    sums = square.new_zeros(*key.shape[:2], LOUD_GROUPS, 1).index_add_(2, group, square)
    token_counts = square.new_zeros(*key.shape[:2], LOUD_GROUPS, 1).index_add_(2, group, counts.float())
    mean = sums / token_counts.clamp_min(1)
    median = torch.where(mean > 0, mean, torch.nan).nanmedian(2, keepdim=True).values
    return counts & ~(mean > median * LOUD)[:, :, group]


def smooth(x: torch.Tensor, token_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract the mean over tokens that count and return (x - mean, mean); shapes as in `mean_of_tokens`."""
    mean = mean_of_tokens(x, token_mask)
    return x - mean, mean


def smooth_value(x: torch.Tensor, token_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth V in the channels whose mean exceeds MIN_MEAN times the largest finite |x - mean|; leave the others.

    V's elements lie on a 16-bit grid. A mean below the grid's step changes no rounded element, so adding it back shifts
    all of them: an error of one sign, which averaging over many keys does not reduce.
    """
    mean = mean_of_tokens(x, token_mask)
    counts = x.isfinite() if token_mask is None else x.isfinite() & token_mask
    max_deviation = torch.where(counts, (x - mean).abs(), 0.0).amax(-2, keepdim=True)
    mean = torch.where(mean.abs() > max_deviation * MIN_MEAN, mean, 0.0)
    return x - mean, mean


def smooth_blocks(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract from every block of `block` consecutive tokens the block's mean.

    Args:
        x: float32 (..., tokens, channels), any number of tokens; the last block may be short.
        block: tokens of a block.

    Returns:
        (x - mean, mean): (..., tokens, channels); (..., ceil(tokens/block), channels).
    """
    parts = [smooth(part) for part in x.split(block, dim=-2)]
    return torch.cat([part for part, _ in parts], -2), torch.cat([mean for _, mean in parts], -2)


def equalize(
    query: torch.Tensor,
    key: torch.Tensor,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    smooth_q: bool = False,
) -> torch.Tensor:
    """Return the power of two by which each channel of K is divided, and each channel of Q multiplied.

    It is the power nearest to the fourth root of `loudness_ratio`, which takes the same arguments: so both results are
    equally large, and dividing and multiplying round nothing.

    Returns:
        float32 (batch, kv_heads, 1, head_dim).
    """
    ratio = loudness_ratio(query, key, key_mask, query_mask, smooth_q)
    # Use the exponent, an integer, so that kernels can compute the same: log2(ratio) is at least `exponent` - 1.
    _, exponent = torch.frexp(ratio)
    return torch.exp2(((exponent + 1) >> 2).float())


def loudness_ratio(
    query: torch.Tensor,
    key: torch.Tensor,
    key_mask: torch.Tensor | None = None,
    query_mask: torch.Tensor | None = None,
    smooth_q: bool = False,
) -> torch.Tensor:
    """Return K's variance / Q's mean square in each channel, within 2^±(4 · MAX_EQUALIZER).

    It is 1 in channels where Q or K is 0 throughout, or so large that the sum of squares is not finite.
    Q's mean square is taken over the rows that count among 0, n, 2n …, with n = ceil(q_len / EQUALIZER_QUERIES).
    Where Q's means are subtracted before it is quantised, it is the variance of these rows.

    Args:
        query: float32 (batch, q_heads, q_len, head_dim).
        key: float32 (batch, kv_heads, kv_len, head_dim), with its mean.
        key_mask: bool broadcastable to (batch, kv_heads, tokens, 1), which keys count; None: all.
        query_mask: the same for Q's rows, (batch or 1, 1, q_len or 1, 1).
        smooth_q: whether Q's means are subtracted before Q is quantised.

    Returns:
        float32 (batch, kv_heads, 1, head_dim).
    """
    step = ceil_div(query.shape[2], EQUALIZER_QUERIES)
    sample = query[:, :, ::step]
    if query_mask is not None:
        query_mask = query_mask.expand(-1, -1, query.shape[2], -1)[:, :, ::step]
    query_square = _variance(sample, query_mask) if smooth_q else mean_of_tokens(sample.square(), query_mask)
    query_square = query_square.unflatten(1, (key.shape[1], -1)).mean(2)
    variance = _variance(key, key_mask)
    ratio = torch.where((query_square > 0) & (variance > 0), variance / query_square, 1.0)
    return ratio.clamp(2.0 ** (-4 * MAX_EQUALIZER), 2.0 ** (4 * MAX_EQUALIZER))


def _variance(x: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    """Return the variance over tokens that count, 0 where the sum of squares is not finite."""
    mean, square = mean_of_tokens(x, token_mask).square(), mean_of_tokens(x.square(), token_mask)
    return torch.where(square > 0, torch.maximum(square - mean, mean * MIN_VARIANCE), 0.0)


def heavy_places(
    query: torch.Tensor, key: torch.Tensor, places: int, scale: float, key_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the key that takes each of the first places, which hold the heavy keys.

    A key may take place p if its number is p modulo `places`. Of these keys, the key with the largest score, the first
    among equals, takes it if its score exceeds key p's by HEAVY_MARGIN; otherwise key p stays. Scores are from
    `_choice_scores`. A key whose score is not finite, or that does not exist, neither takes a place nor gives up its
    place.

    Args:
        query: float32 (batch, q_heads, q_len, head_dim).
        key: float32 (batch, kv_heads, kv_len, head_dim), with at least `places` keys.
        places: the number of heavy keys.
        scale: factor of the scores.
        key_mask: bool (batch or 1, 1, kv_len or 1, 1), which keys exist; None: all.

    Returns:
        int64 (batch, kv_heads, places), numbers of keys.
    """
    return _heaviest(_choice_scores(query, key, scale, key_mask), places)


def late_keys(
    query: torch.Tensor, key: torch.Tensor, first_keys: int, places: int, scale: float, key_mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the late keys that are heavy for the causal rows that see them.

    Each of the last `places` first keys may give way to a key behind all first keys: the key that `heavy_places` puts
    in its place among these keys, by the mean of the later half of the queries, which see most keys.

    Args:
        query, key, scale, key_mask: as in `heavy_places`; key has at least `first_keys` keys.
        first_keys: number of keys that are heavy for rows that see no late key; a multiple of `places`.
        places: the number of late keys.

    Returns:
        int64 (batch, kv_heads, places), numbers of keys, NO_KEY if the first key does not give way.
    """
    before = first_keys - places
    later = query[:, :, query.shape[2] // 2 :]
    chosen = _heaviest(_choice_scores(later, key, scale, key_mask)[..., before:], places)
    stays = chosen == torch.arange(places, device=key.device)
    return torch.where(stays, NO_KEY, chosen + before)


def _choice_scores(query: torch.Tensor, key: torch.Tensor, scale: float, key_mask: torch.Tensor | None) -> torch.Tensor:
    """Return the scores by which heavy keys are chosen: (batch, kv_heads, kv_len), -inf for keys that cannot be.

    Scores are products with a mean query, times `scale`. The mean is over rows 0, n, 2n … of all heads of Q that share
    the head of K, one head after another, with n = ceil(number of rows / HEAVY_QUERIES). Elements that are not finite
    count as 0. A score's magnitude is used if it exceeds the sum of the magnitudes of the other 15 keys that share its
    scale in INT8 (`layout.thread_order`): such a loud key would take all bits of the shared scale.
    """
    rows = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    sample = rows[:, :, :: ceil_div(rows.shape[2], HEAVY_QUERIES)]
    mean = torch.where(sample.isfinite(), sample, 0.0).mean(2, keepdim=True) * scale
    scores = (torch.where(key.isfinite(), key, 0.0) * mean).sum(-1)
    exists = scores.isfinite()
    if key_mask is not None:
        exists = exists & key_mask[..., 0]
    magnitude = F.pad(torch.where(exists, scores.abs(), 0.0), (0, -scores.shape[-1] % KEY_BLOCK))
    groups = magnitude.unflatten(-1, (-1, 8, 4, 2))
    is_loud = (groups > groups.sum((-3, -1), keepdim=True) * 0.5).flatten(-4)[..., : scores.shape[-1]]
    return torch.where(exists, torch.where(is_loud, scores.abs(), scores), -torch.inf)


def _heaviest(scores: torch.Tensor, places: int) -> torch.Tensor:
    """Return `heavy_places` of keys with these scores."""
    keys = scores.shape[-1]
    stays = scores[..., :places] == -torch.inf
    scores = torch.cat((scores[..., :places] + HEAVY_MARGIN, scores[..., places:]), -1)
    scores = F.pad(scores, (0, -keys % places), value=-torch.inf).unflatten(-1, (-1, places))
    # Of equal maxima take the first: torch.max promises no order.
    is_largest = scores == scores.amax(-2, keepdim=True)
    index = torch.arange(scores.shape[-2], device=scores.device)[:, None] * places
    index = index + torch.arange(places, device=scores.device)
    chosen = torch.where(is_largest, index, keys + places).amin(-2)
    return torch.where(stays, index[0], chosen)


def exchange(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Swap tokens: token p, for each p, with token chosen[…, p].

    Args:
        x: (batch, heads, tokens, channels).
        chosen: the result of `heavy_places`.
    """
    index = torch.arange(x.shape[2], device=x.device).expand(*x.shape[:2], -1).contiguous()
    places = index[..., : chosen.shape[-1]].clone()
    index.scatter_(2, chosen, places)
    index[..., : chosen.shape[-1]] = chosen
    return x.gather(2, index.unsqueeze(-1).expand_as(x))


@lru_cache(maxsize=16)
def rotation_signs(size: int) -> torch.Tensor:
    """Return the fixed random signs of the rotation: float32 (size,) of ±1 on the CPU.

    Raises:
        ValueError: size is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"rotation needs a power of two; got {size}: pad the head dimension with zeros")
    generator = torch.Generator("cpu").manual_seed(ROTATION_SEED)
    return torch.randint(0, 2, (size,), generator=generator, device="cpu").float() * 2 - 1


def rotation_block(head_dim: int) -> int:
    """Return the largest power of two that divides head_dim: rotation works in blocks of it (64, 128: one block)."""
    return head_dim & -head_dim


def round_finite(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to a dtype; finite numbers beyond its range become its largest number, non-finite numbers NaN."""
    limit = torch.finfo(dtype).max
    return (x.clamp(-limit, limit) + 0 * x).to(dtype)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate the head dimension: signs, then an orthonormal Walsh-Hadamard transform, in blocks of `rotation_block`.

    The transform adds in a fixed order, by butterflies of distance 1, 2, 4 …, so that kernels can compute the same
    bits.

    Args:
        x: float32 (..., head_dim).

    Returns:
        float32 (..., head_dim). Two rotated vectors have the dot product of the original ones.
    """
    block = rotation_block(x.shape[-1])
    return _walsh_hadamard(x.unflatten(-1, (-1, block)) * rotation_signs(block).to(x.device)).flatten(-2)


def unrotate(x: torch.Tensor) -> torch.Tensor:
    """Undo `rotate`; this also turns the gradient of a rotated tensor into the gradient of the original."""
    block = rotation_block(x.shape[-1])
    return (_walsh_hadamard(x.unflatten(-1, (-1, block))) * rotation_signs(block).to(x.device)).flatten(-2)


def _walsh_hadamard(x: torch.Tensor) -> torch.Tensor:
    """Apply the orthonormal transform, its own inverse, to the last dimension, a power of two."""
    block, distance = x.shape[-1], 1
    while distance < block:
        first, second = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        distance *= 2
    return x * block**-0.5
