"""Heavy keys as the forward kernels read them: in the caller's dtype; with NVFP4, without K's mean."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...spec.call import Call
from ...spec.layout import batch_strides, stride_of
from ...spec.operands import HeavyKeys, KVStatistics
from ..common.heavy import heavy_channel
from ..common.launch import UNSPECIALIZED, launch, strides
from ..common.sequences import sequence_range
from ..common.tokens import load_tokens

BLOCK_ROWS = tl.constexpr(16)


def heavy_keys(
    call: Call,
    statistics: KVStatistics,
    key_mask_u8: torch.Tensor | None,
    channels: int,
    v_channels: int,
    *,
    centred: bool,
) -> HeavyKeys | None:
    """Return the heavy keys of a call; None if it has none.

    Args:
        call: the whole call, with its heavy keys.
        statistics: the call's statistics.
        key_mask_u8: uint8 (batch or 1, kv_len), 0 for keys that do not exist; None: all exist.
        channels, v_channels: channels of the operands, head_dim rounded up to a power of two.
        centred: whether to subtract K's mean.
    """
    keys = call.heavy_keys
    if keys == 0:
        return None
    key, value, sequences = call.key, call.value, call.token_axes[1]
    kv_heads = key.shape[1]
    heavy = HeavyKeys(
        key.new_empty(call.batch, kv_heads, keys, channels),
        key.new_empty(call.batch, kv_heads, keys, v_channels),
        statistics.chosen if call.late_keys else None,
    )
    launch(
        copy_heavy_keys,
        (call.batch * kv_heads, keys // BLOCK_ROWS.value),
        key=key,
        value=value,
        key_mean=statistics.key_mean if centred else None,
        chosen=statistics.chosen,
        heavy_key=heavy.key,
        heavy_value=heavy.value,
        key_mask=key_mask_u8,
        ranges=sequences.ranges,
        tokens=sequences.tokens,
        kv_heads=kv_heads,
        mean_channels=statistics.key_mean.shape[2],
        head_dim=key.shape[3],
        v_head_dim=value.shape[3],
        **strides("key", batch_strides(key, sequences)),
        **strides("value", batch_strides(value, sequences)),
        key_mask_stride=stride_of(key_mask_u8),
        KEYS=keys,
        PLACES=replaceable_keys(statistics),
        CHANNELS=channels,
        V_CHANNELS=v_channels,
        HAS_KEY_MASK=key_mask_u8 is not None,
        RAGGED=sequences.ranges is not None,
    )
    return heavy


def replaceable_keys(statistics: KVStatistics) -> int:
    """Return the number of first keys that may have given way to chosen keys; 0 if heavy keys are not chosen."""
    return 0 if statistics.chosen is None else statistics.chosen.shape[-1]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def copy_heavy_keys(
    key,
    value,
    key_mean,
    chosen,
    heavy_key,
    heavy_value,
    key_mask,
    ranges,
    tokens,
    kv_heads,
    mean_channels,
    head_dim,
    v_head_dim,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    key_stride_channel,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    value_stride_channel,
    key_mask_stride,
    KEYS: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    V_CHANNELS: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Copy 16 heavy keys of one (batch, kv head): the first keys, of which PLACES may give way, then late keys."""
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // kv_heads, pair % kv_heads
    start, length, _ = sequence_range(ranges, batch, tokens, RAGGED)
    index = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if HAS_KEY_MASK:
        key_mask += batch * key_mask_stride
    key += batch * key_stride_batch + head * key_stride_head
    value += batch * value_stride_batch + head * value_stride_head
    place = tl.arange(0, CHANNELS)
    channel = heavy_channel(place)
    token = index
    if PLACES > 0:
        choice = index - (KEYS - PLACES)
        token = tl.where(choice < 0, index, tl.load(chosen + pair * PLACES + choice, mask=choice >= 0, other=0))
    k, exists = load_tokens(
        key, key_mask, start, token, length, channel, head_dim, key_stride_token, key_stride_channel, HAS_KEY_MASK
    )
    if key_mean is not None:
        k -= tl.load(key_mean + pair * mean_channels + channel, mask=channel < head_dim, other=0.0)[None, :]
    row = pair * KEYS + index
    into = heavy_key + row[:, None] * CHANNELS + place[None, :]
    tl.store(into, tl.where(exists[:, None], k, 0.0).to(heavy_key.dtype.element_ty))
    v_channel = tl.arange(0, V_CHANNELS)
    v, _ = load_tokens(
        value,
        key_mask,
        start,
        token,
        length,
        v_channel,
        v_head_dim,
        value_stride_token,
        value_stride_channel,
        HAS_KEY_MASK,
    )
    into = heavy_value + row[:, None] * V_CHANNELS + v_channel[None, :]
    tl.store(into, v.to(heavy_value.dtype.element_ty))
