"""Loads of tokens of the callers' tensors, for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def tail_source(token, chosen, pair, FIRST: tl.constexpr, PLACES: tl.constexpr):
    """Return where tokens of the tail lie: the tail follows FIRST tokens and counts from there.

    In place of a heavy token the tail has the token that gave way to it: the last PLACES of the FIRST tokens may.
    `chosen` points to the heavy tokens of all (batch, kv head) pairs, one for each place.
    """
    if PLACES > 0:
        chosen += tl.cast(pair, tl.int64) * PLACES
        place = token % PLACES
        return tl.where(tl.load(chosen + place) == token + FIRST, place - PLACES, token)
    else:
        return token


@triton.jit
def load_tokens(
    x,
    token_mask,
    start,
    token,
    length,
    channel,
    channels,
    stride_token,
    stride_channel,
    HAS_TOKEN_MASK: tl.constexpr,
    token_mask_step=1,
    source=None,
):
    """Load tokens of a sequence in float32, zeros for tokens that do not count; return (values, which tokens count).

    Args:
        x, token_mask: pointers to the first token of the batch element; token_mask is read if HAS_TOKEN_MASK.
        start, length: the sequence's first token and length.
        token: indices in the sequence, (tokens,).
        channel: indices (n,); channels below `channels` exist.
        token_mask_step: elements of `token_mask` from one token to the next.
        source: positions of these tokens, if not their indices (`tail_source`).
    """
    counts = token < length
    if HAS_TOKEN_MASK:
        counts = counts & (tl.load(token_mask + token * token_mask_step, mask=counts, other=0) != 0)
    if source is None:
        source = token
    offset = (start + source).to(tl.int64)[:, None] * stride_token + channel.to(tl.int64)[None, :] * stride_channel
    inside = counts[:, None] & (channel < channels)[None, :]
    return tl.load(x + offset, mask=inside, other=0.0).to(tl.float32), counts
