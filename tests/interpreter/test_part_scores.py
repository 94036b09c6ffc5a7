"""The router's kernel in Triton's interpreter, against PyTorch."""

import pytest
import torch

from sage_kernels.routing import part_scores_reference
from sage_kernels.triton.part_scores import part_scores


@pytest.mark.parametrize(("parts_m", "parts_n"), [(4, 4), (4, 8), (1, 1), (16, 2)])
@pytest.mark.parametrize(("q_parts", "k_parts", "channels"), [(128, 64, 64), (70, 133, 40), (1, 3, 256)])
def test_scores_are_the_references(parts_m, parts_n, q_parts, k_parts, channels):
    generator = torch.Generator().manual_seed(0)
    q_means = torch.randn(2, 4, q_parts, channels, generator=generator)
    k_means = torch.randn(2, 2, k_parts, channels, generator=generator)
    found = part_scores(q_means, k_means, 0.3, parts_m, parts_n)
    assert torch.allclose(found, part_scores_reference(q_means, k_means, 0.3, parts_m, parts_n), atol=1e-5, rtol=1e-5)
