"""The same call gives the same bits, whatever ran before it."""

import pytest
import torch

from tests.helpers.judge import LOW_BIT, attend


@pytest.mark.parametrize("recipe", LOW_BIT)
@pytest.mark.parametrize("kind", ["none", "causal", "bool"])
def test_reruns_are_bitwise_equal(recipe, kind, device):
    generator = torch.Generator(device).manual_seed(0)
    query = torch.randn(2, 8, 1000, 64, device=device, dtype=torch.bfloat16, generator=generator)
    key, value = torch.randn(2, 2, 4, 3000, 64, device=device, dtype=torch.bfloat16, generator=generator)
    mask = torch.rand(1, 8, 1000, 3000, device=device, generator=generator) < 0.5 if kind == "bool" else None
    first = attend(query, key, value, recipe, mask=mask, is_causal=kind == "causal")
    for _ in range(20):
        again = attend(query, key, value, recipe, mask=mask, is_causal=kind == "causal")
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))
