"""Loading tokens of the callers' tensors, for kernels in Triton's languages."""

import triton
import triton.language as tl


@triton.jit
def load_tokens(
    x,
    valid,
    start,
    token,
    length,
    channel,
    channels,
    stride_token,
    stride_channel,
    HAS_VALID: tl.constexpr,
):
    """Load channels of some tokens of a sequence in float32, zeros for what does not count; return which count, too.

    Args:
        x, valid: pointers to the first token of the batch element; valid is read if HAS_VALID.
        start, length: of the sequence.
        token, channel: indices, (tokens,) and (channels,); there are `channels` of them.
    """
    counts = token < length
    if HAS_VALID:
        counts = counts & (tl.load(valid + token, mask=counts, other=0) != 0)
    offset = (start + token).to(tl.int64)[:, None] * stride_token + channel.to(tl.int64)[None, :] * stride_channel
    inside = counts[:, None] & (channel < channels)[None, :]
    return tl.load(x + offset, mask=inside, other=0.0).to(tl.float32), counts
