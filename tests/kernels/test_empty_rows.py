"""Exact attention with gradients and padding: batch elements without a key give zeros, and get no gradient."""

import pytest
import torch

from sage_kernels.exact import masked_rows
from sage_kernels.exact import sdpa as exact


@pytest.fixture(params=["zeros chosen afterwards", "zeros given"])
def on_gpu(request, monkeypatch):
    """Have the call run as without a GPU, and as on one whose kernels give zeros where masks are -inf."""
    if request.param == "zeros given":
        monkeypatch.setattr(masked_rows, "_gives_zeros", lambda *tensors: True)


def draw(wanted=(True, True, True)):
    generator = torch.Generator().manual_seed(0)
    sizes = (3, 4, 50, 16), (3, 2, 40, 16), (3, 2, 40, 16)
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_(one)
        for size, one in zip(sizes, wanted, strict=True)
    ]


MASK = (torch.arange(40) < torch.tensor([40, 0, 7])[:, None])[:, None, None]


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, True), (False, False, True)], ids=str)
def test_output_and_gradients_match_rows_that_have_a_key(on_gpu, wanted):
    inputs = draw(wanted)
    output = masked_rows.attend_with_zero_rows(*inputs, mask=MASK, enable_gqa=True)
    expected, _ = exact.attention(*inputs, mask=MASK)
    torch.testing.assert_close(output, expected)
    there = [x for x in inputs if x.requires_grad]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = weights.clone()
    gradients = torch.autograd.grad(output, there, weights)
    assert torch.equal(weights, kept)
    for found, truth in zip(gradients, torch.autograd.grad(expected, there, weights), strict=True):
        torch.testing.assert_close(found, truth)
        assert not found[1].any()


def test_without_gradients_the_output_is_the_same(on_gpu):
    inputs = draw((False, False, False))
    expected, _ = exact.attention(*inputs, mask=MASK)
    torch.testing.assert_close(masked_rows.attend_with_zero_rows(*inputs, mask=MASK, enable_gqa=True), expected)
    with torch.no_grad():
        torch.testing.assert_close(masked_rows.attend_with_zero_rows(*inputs, mask=MASK, enable_gqa=True), expected)


def test_without_a_mask_it_is_pytorchs_attention():
    inputs = draw()
    expected = exact.sdpa(*inputs, enable_gqa=True)
    assert torch.equal(masked_rows.attend_with_zero_rows(*inputs, enable_gqa=True), expected)


def test_a_mask_of_fewer_dimensions_serves_too(on_gpu):
    query, key, value = draw()
    mask = torch.rand(50, 40, generator=torch.Generator().manual_seed(2)) < 0.3
    mask[3] = False
    expected, _ = exact.attention(query, key, value, mask=mask[None, None])
    torch.testing.assert_close(
        masked_rows.attend_with_zero_rows(query, key, value, mask=mask, enable_gqa=True), expected
    )


@pytest.mark.parametrize("size", [(2, 1, 1, 13), (1, 3, 7, 16), (7, 13)], ids=str)
def test_a_bool_mask_becomes_numbers_that_are_added_with_aligned_rows(size):
    mask = torch.rand(size, generator=torch.Generator().manual_seed(0)) < 0.5
    found = exact.additive(mask, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found == 0.0, mask) and torch.equal(found == -torch.inf, ~mask)
    assert all(stride % 8 == 0 for stride in found.stride()[:-1])
    broadcast = exact.additive(mask[..., None, :].expand(*size[:-1], 5, size[-1]), torch.float16)
    assert broadcast.shape[-2] == 1


def test_an_additive_mask_is_taken_as_it_is():
    mask = torch.randn(3, 4)
    assert exact.additive(mask, torch.float16) is mask


def test_a_backend_is_tried(monkeypatch):
    kind = torch.device("cpu"), torch.bfloat16, 40, 64
    assert masked_rows._gives_zeros_by(masked_rows._math, *kind)
    monkeypatch.setattr(masked_rows, "can_use_cudnn_attention", lambda parameters: False)
    assert masked_rows._gives_zeros_by(masked_rows._cudnn, *kind)  # it serves no such call
    sdpa, mean = exact.sdpa, lambda value: value.mean(2, keepdim=True)

    def given(change):
        monkeypatch.setattr(exact, "sdpa", change)
        return masked_rows._gives_zeros_by(masked_rows._math, *kind)

    def fails(*inputs, **options):
        raise RuntimeError("out of memory")

    assert given(lambda *inputs, **options: sdpa(*inputs, **options))
    assert not given(lambda *inputs, mask, backend: sdpa(*inputs, mask=mask.clamp(min=-1e4), backend=backend))
    assert not given(lambda *inputs, **options: sdpa(*inputs, **options) + 0.1 * mean(inputs[2]))
    assert not given(fails)
