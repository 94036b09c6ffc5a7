"""The heaviest keys and the loudest channels of calls."""

import math

import pytest
import torch

from sage_hf.app.peaks import NO_PEAKS, Peaks, channel_loudness, find_peaks
from sage_kernels.exact import sdpa

HEADS, TOKENS, HEAD_DIM = 4, 60, 16
SINK = 7


def inputs(kv_heads: int = HEADS) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K whose second-to-last head of K has a sink, as heavy as can be, at SINK."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, TOKENS, HEAD_DIM, generator=generator) for heads in (HEADS, kv_heads))
    query[..., 0] = 1.0
    key[1, -2, SINK, 0] = 40.0
    return query, key


def weights(query, key, mask=None, is_causal=False) -> torch.Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = (query.double() @ key.double().mT) * HEAD_DIM**-0.5
    return sdpa.apply_mask(scores, mask, is_causal, 0, 0).softmax(-1)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sink_is_the_heaviest_key_with_its_share_of_all_rows(kv_heads, is_causal):
    query, key = inputs(kv_heads)
    peaks = find_peaks(query, key, is_causal=is_causal)
    expected = weights(query, key, is_causal=is_causal).mean(2)
    assert peaks.key == SINK
    assert peaks.share == pytest.approx(expected.max().item(), rel=1e-5)
    assert 0.6 < peaks.share < 1


@pytest.mark.parametrize("kind", ["keys", "bool", "additive"])
def test_masked_keys_hold_nothing_and_rows_without_keys_do_not_count(kind):
    query, key = inputs()
    mask = torch.ones(1, 1, 1, TOKENS, dtype=torch.bool)
    mask[..., SINK] = False
    masked = mask if kind != "additive" else torch.where(mask, 0.0, -torch.inf)
    peaks = find_peaks(query, key, mask=masked)
    assert peaks.key != SINK and peaks.share < 0.3
    rows = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    rows[20:] = True
    bias = rows if kind != "additive" else torch.where(rows, 0.0, -torch.inf)
    peaks = find_peaks(query, key, mask=bias)
    assert peaks.key == SINK
    assert peaks.share == pytest.approx(weights(query, key)[:, :, 20:].mean(2).max().item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(TOKENS, TOKENS), (1, 1, TOKENS, TOKENS)])
def test_a_call_that_attends_to_nothing_has_no_heaviest_key(shape):
    query, key = inputs()
    peaks = find_peaks(query, key, mask=torch.zeros(shape, dtype=torch.bool))
    assert (peaks.share, peaks.key) == (0.0, None)
    assert find_peaks(query[:, :, :0], key).key is None
    assert find_peaks(query, key[:, :, :0]) == NO_PEAKS


def test_a_loud_channel_shows_a_mean_does_not_and_padding_does_not():
    key = torch.randn(2, 3, 400, 32, generator=torch.Generator().manual_seed(0))
    key += 100 * torch.randn(2, 3, 1, 32, generator=torch.Generator().manual_seed(1))
    assert channel_loudness(key).amax() < 1.3
    key[1, 2, :, 5] *= 10
    loudness = channel_loudness(key)
    assert loudness.argmax() == 5 and loudness[1, 2].item() == pytest.approx(10, rel=0.15)
    key[:, :, 390:] = 1e6
    key_mask = (torch.arange(400) < 390)[None, None, :, None]
    assert channel_loudness(key, key_mask)[1, 2].item() == pytest.approx(10, rel=0.15)
    mask = key_mask.mT.expand(2, 1, 7, 400)
    peaks = find_peaks(torch.randn(2, 3, 7, 32), key, mask=mask)
    assert peaks.loudness == pytest.approx(10, rel=0.15)


def test_peaks_of_several_calls_are_the_largest_and_keep_nan():
    first, second = Peaks(0.5, 3, 2.0), Peaks(0.25, 9, 4.0)
    assert first.joined(second) == second.joined(first) == Peaks(0.5, 3, 4.0)
    assert NO_PEAKS.joined(first) == first
    broken = Peaks(math.nan, 1, math.nan)
    for joined in (first.joined(broken), broken.joined(first)):
        assert math.isnan(joined.share) and math.isnan(joined.loudness)
