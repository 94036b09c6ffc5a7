"""Sums of dQ in float16: an emulation on the CPU of what `cuda.int8_backward` and its kernels do."""

import pytest
import torch

from sage_kernels.cuda import int8_backward
from sage_kernels.cuda.int8_backward import BLOCK, FLOAT16_KEYS

RANGE = 2.0**15
CHANNELS = 128


def draw(kind: str, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    """Q, K, V and dO."""
    generator = torch.Generator().manual_seed(3)
    query, key, value, gradient = (
        torch.randn(tokens, CHANNELS, generator=generator) for tokens in (queries, keys, keys, queries)
    )
    if kind == "peaked":
        query *= 3
    if kind == "biased":
        key += torch.randn(CHANNELS, generator=generator) * 3
        value += torch.randn(CHANNELS, generator=generator)
    if kind == "loud":
        key[:, 5] *= 30
        value[:, 7] *= 100
        value[keys // 3] *= 100
    if kind == "wide":
        gradient *= 10 ** (torch.rand(queries, 1, generator=generator) * 10 - 6)
    return query, key - key.mean(0), value, gradient  # K is smoothed


def partial_sums(query, key, value, gradient) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what each block of keys adds to dQ (blocks, queries, channels), and the bound of each query."""
    p = torch.softmax(query @ key.mT * CHANNELS**-0.5, -1)
    dp = gradient @ value.mT
    delta = (p * dp).sum(-1, keepdim=True)
    ds = (p * (dp - delta)).split(BLOCK, -1)
    parts = torch.stack([x @ y for x, y in zip(ds, key.split(BLOCK), strict=True)])
    bound = (gradient.abs().sum(-1, keepdim=True) * value.abs().max() + delta.abs()) * key.abs().max()
    return parts, bound


@pytest.mark.parametrize("kind", ["normal", "peaked", "biased", "loud", "wide"])
@pytest.mark.parametrize("keys", [1024, 8192, FLOAT16_KEYS])
def test_sums_in_float16_are_as_near_as_derived_and_never_leave_half_of_the_range(kind, keys):
    parts, bound = partial_sums(*draw(kind, 48, keys))
    assert len(parts) <= FLOAT16_KEYS // BLOCK
    factor = RANGE / bound
    generator = torch.Generator().manual_seed(4)
    for _ in range(2):
        total = torch.zeros(parts.shape[1:], dtype=torch.float16)
        for block in torch.randperm(len(parts), generator=generator).tolist():
            total += (parts[block] * factor).half()
            assert total.abs().max() <= RANGE
        found, exact = (total.float() / factor).double(), parts.double().sum(0)
        errors = (found - exact).abs().sum(-1) / exact.abs().sum(-1)
        derived = 2**-12 * len(parts) ** 0.5
        assert errors.mean() <= derived
        assert errors.max() <= 4 * derived  # where loud K and V make the bound 2²⁵ times what a row sums to


def test_the_largest_number_of_keys_keeps_the_error_below_int8():
    assert 2**-12 * (int8_backward.FLOAT16_KEYS / BLOCK) ** 0.5 <= 0.004
