"""Compare what the forward pass keeps for the backward pass with the reference's, but for almost-ties in codes."""

import random

import pytest
import torch

from sage_kernels.spec.layout import KEY_BLOCK, padded_channels, padded_rows, sequence_slices
from tests.helpers.codes import codes_agree, scales_agree
from tests.helpers.judge import lse_tolerance
from tests.helpers.judge_training import TRAINING, Draw, TrainingCall, of_kernel, of_reference, rows_of_sequences
from tests.helpers.layouts import LAYOUTS, lay_out
from tests.helpers.pairwise import some

CASES, AUDITED = 12, 24  # most are kernels of their own
LENGTHS = (1, 15, 63, 64, 127, 128, 129, 300)


def draw_call(recipe: str, case: int, device: torch.device) -> TrainingCall:
    """Draw a channel of zeros, a loud one, means, strides, now and then a NaN, padding or packed sequences."""
    choose = random.Random(case)
    draw = Draw(device, case, choose.choice((torch.float16, torch.bfloat16)))
    batch, q_heads, kv_heads = choose.choice(((1, 1, 1), (2, 2, 2), (1, 6, 2), (3, 2, 1)))
    head_dim, v_head_dim = choose.choice(((16, 16), (40, 24), (64, 64), (80, 128), (128, 128)))
    kind, lengths, key_mask = choose.choice(("plain", "key_mask", "packed")), None, None
    if kind == "packed":
        batch, count = 1, choose.randint(1, 4)
        q_lengths, k_lengths = ([choose.choice((0, *LENGTHS)) for _ in range(count)] for _ in range(2))
        q_len, kv_len = sum(q_lengths), sum(k_lengths)
        used = [choose.randint(0, length) for length in k_lengths] if choose.random() < 0.5 else None
        lengths = draw.lengths(q_lengths, k_lengths, used)
    else:
        q_len, kv_len = choose.choice(LENGTHS), choose.choice(LENGTHS)
    if kind == "key_mask":
        key_mask = draw.uniform(choose.choice((1, batch)), kv_len) < 0.7
    inputs = []
    for heads, tokens, channels in ((q_heads, q_len, head_dim), (kv_heads, kv_len, head_dim)):
        x = draw(batch, heads, tokens, channels) + draw(channels)
        x[..., 3] = 0.0
        x[..., 5] *= 6
        if tokens and choose.random() < 0.3:
            x[-1, 0, tokens // 2, 7] = torch.nan
        inputs.append(lay_out(x, choose.choice(LAYOUTS)))
    inputs += [draw(batch, kv_heads, kv_len, v_head_dim), draw(batch, q_heads, q_len, v_head_dim)]
    options = {"is_causal": choose.random() < 0.3, "scale": choose.choice((None, 0.3, -0.2))}
    return TrainingCall(recipe, *inputs, lengths=lengths, key_mask=key_mask, **options)


def both_or_nothing(spans: tuple[slice, slice]) -> tuple[slice, ...]:
    """Queries and keys of a sequence, where it has some of either."""
    some = all(span.stop > span.start for span in spans)
    return spans if some else tuple(slice(span.start, span.start) for span in spans)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("recipe", TRAINING)
@pytest.mark.parametrize("case", some(range(AUDITED), CASES))
def test_saved_tensors_are_the_references(recipe, case, device):
    call = draw_call(recipe, case, device)
    (_, found), (_, expected) = of_kernel(call), of_reference(call)
    count = None if call.lengths is None else len(call.lengths.cu_seqlens_q) - 1
    rows, kv_rows = padded_rows(call.query.shape[2], count), padded_rows(call.key.shape[2], count)
    assert found.query.shape == (*call.query.shape[:2], rows, padded_channels(call.query.shape[3]))
    assert found.key.shape == (*call.key.shape[:2], kv_rows, padded_channels(call.key.shape[3]))
    belongs, kv_belongs = torch.ones(rows, dtype=torch.bool), torch.ones(kv_rows, dtype=torch.bool)
    if call.lengths is not None:
        # Of a sequence without queries or without keys nothing is read again: the reference leaves it 0.
        spans, kv_spans = zip(*map(both_or_nothing, sequence_slices(call.lengths)), strict=True)
        belongs, kv_belongs = rows_of_sequences(spans, rows), rows_of_sequences(kv_spans, kv_rows)
    for name, which in (
        ("query", belongs),
        ("query_scale", belongs),
        ("key", kv_belongs),
        ("key_scale", kv_belongs[::KEY_BLOCK]),
    ):
        x, y = getattr(found, name), getattr(expected, name)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        which = which.to(device)
        agree = scales_agree if name.endswith("scale") else codes_agree  # MMA instructions rotate
        assert agree(x[:, :, which].nan_to_num(777), y[:, :, which].nan_to_num(777)), name
    assert torch.equal(found.equalizer, expected.equalizer)
    assert (found.lse.shape, found.lse.dtype) == (call.query.shape[:3], torch.float32)
    assert torch.equal(found.lse.isnan(), expected.lse.isnan())
    assert torch.equal(found.lse == -torch.inf, expected.lse == -torch.inf)
    finite = expected.lse.isfinite()
    if finite.any():
        tolerance = lse_tolerance(call.query.nan_to_num(), call.key.nan_to_num(), None, call.scale)
        assert ((found.lse - expected.lse)[finite].abs() <= tolerance).all()
