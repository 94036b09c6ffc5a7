"""The router's kernel on the GPU, against PyTorch."""

import pytest
import torch

from sage_hf.sparse import SubBlockRouter
from sage_kernels.routing import part_scores, part_scores_reference


@pytest.mark.parametrize(
    ("parts", "q_parts", "k_parts", "channels"), [((4, 4), 300, 333, 128), ((4, 8), 64, 70, 64), ((1, 16), 5, 40, 80)]
)
def test_scores_are_the_references(device, parts, q_parts, k_parts, channels):
    """Products in three passes of TF32 are those of float32 but for a few last bits."""
    generator = torch.Generator(device).manual_seed(0)
    q_means = torch.randn(2, 4, q_parts, channels, generator=generator, device=device)
    k_means = torch.randn(2, 2, k_parts, channels, generator=generator, device=device)
    truth = part_scores_reference(q_means.double(), k_means.double(), 0.1, *parts)
    found = part_scores(q_means, k_means, 0.1, *parts)
    size = 0.1 * q_means.norm(dim=-1).max() * k_means.norm(dim=-1).max()
    assert (found - truth).abs().max() <= 2**-19 * channels**0.5 * (1 + size)


def test_a_gpu_keeps_the_tiles_that_a_cpu_keeps(device):
    """But for the last ones, where scores are equal to the last bits."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, 1500, 64, generator=generator) for _ in range(2))
    router = SubBlockRouter(0.25)
    kept = [router.route(query.to(x), key.to(x)).kept(1500).cpu() for x in (device, torch.device("cpu"))]
    assert (kept[0] != kept[1]).float().mean() <= 0.01
