"""Exact attention with softcap and sinks equals its definition, in bounded memory, with gradients."""

from __future__ import annotations

import pytest
import torch

from sage_hf.transformers import exact


def tensors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 13, 16), (2, 2, 17, 16), (2, 2, 17, 24))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def definition(query, key, value, mask, is_causal, scale, softcap, sinks):
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if is_causal:
        mask = torch.ones(13, 17, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 13, 1)], dim=-1)
    return scores.softmax(-1)[..., :17] @ value.repeat_interleave(2, 1)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("masking", ["none", "causal", "bool", "additive", "one_row"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_output_and_gradients_equal_the_definition(
    chunked: bool, masking: str, softcap: float | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunked:
        monkeypatch.setattr(exact, "rows_per_chunk", lambda *args: 5)
    generator = torch.Generator().manual_seed(1)
    masks = {
        "bool": (torch.rand(2, 1, 13, 17, generator=generator) < 0.5) | (torch.arange(17) == 3),
        "additive": torch.randn(1, 4, 13, 17, generator=generator, dtype=torch.float64),
        "one_row": torch.arange(17).view(1, 1, 1, 17) < 11,
    }
    inputs = [*tensors(), torch.linspace(-3, 3, 4, dtype=torch.float64)]
    ours, expected = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    mask, is_causal = masks.get(masking), masking == "causal"

    output = exact.exact_attention(
        *ours[:3], mask, is_causal=is_causal, scale=0.3, softcap=softcap, sinks=ours[3] if with_sinks else None
    )
    judge = definition(*expected[:3], mask, is_causal, 0.3, softcap, expected[3] if with_sinks else None)
    torch.testing.assert_close(output, judge)
    output.square().sum().backward()
    judge.square().sum().backward()
    for tensor, other in zip(ours, expected, strict=True):
        if tensor is not ours[3] or with_sinks:
            torch.testing.assert_close(tensor.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_is_kept_and_the_softmax_is_no_coarser_than_float32(dtype: torch.dtype) -> None:
    query, key, value = tensors(dtype)
    output = exact.exact_attention(query, key, value, None, is_causal=False, scale=None, softcap=2.0)
    judge = definition(query.double(), key.double(), value.double(), None, False, 0.25, 2.0, None)
    assert output.dtype == dtype
    # Scores, weights and output are rounded to dtype once each; scores stay below 4 in magnitude before the cap, and
    # |output| below max|value|.
    bound = (4 + 1 + 1) * torch.finfo(dtype).eps * value.double().abs().max()
    assert (output - judge).abs().max() <= bound


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_rows_with_no_allowed_key_are_zero_and_have_no_nan_gradient(sinks: torch.Tensor | None) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tensors(torch.float32))
    mask = torch.ones(1, 1, 13, 17, dtype=torch.bool)
    mask[..., 4, :] = False
    output = exact.exact_attention(query, key, value, mask, is_causal=False, scale=None, softcap=2.0, sinks=sinks)
    assert torch.equal(output[:, :, 4], torch.zeros_like(output[:, :, 4]))
    output.sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in (query, key, value))


def test_dropout_drops_weights_and_keeps_their_mean() -> None:
    query, key, _ = tensors(torch.float32)
    torch.manual_seed(0)
    output = exact.exact_attention(
        query, key, torch.eye(17).expand(2, 2, 17, 17), None, is_causal=False, scale=None, dropout_p=0.25
    )
    weights = exact.exact_attention(query, key, torch.eye(17).expand(2, 2, 17, 17), None, is_causal=False, scale=None)
    kept = output != 0
    torch.testing.assert_close(output[kept], weights[kept] / 0.75)
    # 1768 weights, each dropped with probability 1/4: five standard deviations are 0.052.
    assert abs(kept.float().mean().item() - 0.75) < 0.052


@pytest.mark.parametrize("sizes", [(0, 4, 5, 7), (2, 0, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0)])
def test_calls_without_elements_give_nothing_in_querys_dtype(sizes: tuple[int, ...]) -> None:
    batch, heads, q_len, kv_len = sizes
    query = torch.randn(batch, heads, q_len, 16, dtype=torch.float16, requires_grad=True)
    key, value = (torch.randn(batch, heads // 2, kv_len, size, dtype=torch.float16) for size in (16, 32))
    output = exact.exact_attention(query, key, value, None, is_causal=False, scale=None, softcap=30.0)
    assert (output.shape, output.dtype) == ((batch, heads, q_len, 32), torch.float16)
    assert not output.any()
    assert not torch.autograd.grad(output.sum(), query)[0].any()
