"""A kernel's error against exact attention in float64 is that of its recipe's reference."""

from pathlib import Path

import pytest
import torch
from tensors import dit_like, gaussian, video_activations

from tests.helpers.judge import LOW_BIT, Error, judge

TINY_VIDEO = Path(__file__).parents[2] / "examples" / "tiny_video"
DRAWN = {"gaussian": gaussian, "DiT-like": dit_like}


@pytest.mark.parametrize("recipe", LOW_BIT)
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_drawn_tensors(recipe, name, head_dim, dtype, device):
    inputs = [x.to(device, dtype) for x in DRAWN[name](1, 4, 2048, head_dim)]
    judge(*inputs, recipe).assert_as_small_as_the_references()
    judge(*inputs, recipe, is_causal=True).assert_as_small_as_the_references()


@pytest.fixture(scope="module")
def activations():
    """Record Q, K and V of the repository's own trained video model, in all layers at two denoising steps."""
    pytest.importorskip("diffusers")
    return video_activations(TINY_VIDEO, "a red circle moving left", steps=4, at_steps=(0, 2))


@pytest.mark.parametrize("recipe", LOW_BIT)
def test_on_a_trained_models_tensors(recipe, activations, device):
    error = Error()
    for triple in activations:
        error += judge(*(x.to(device) for x in triple), recipe)
    error.assert_as_small_as_the_references()
