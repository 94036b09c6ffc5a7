"""Long sequences, and tensors whose offsets do not fit in 32 bits. Sampled rows are judged."""

import pytest
import torch

from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.judge import LOW_BIT, attend

BLOCK = reference.BLOCK_M
# More elements than 32 bits can count: 1 × 136 × 131,072 × 128.
HEADS, TOKENS, HEAD_DIM = 136, 131_072, 128


pytestmark = pytest.mark.usefixtures("enough_memory")


def draw(device, *shape, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)


def judge_blocks(output, query, key, value, recipe, heads, blocks, mask=None):
    """Judge blocks of 128 rows of some heads: Q is smoothed by such blocks, so they stand for themselves."""
    group = query.shape[1] // key.shape[1]
    for head in heads:
        own_key, own_value = (x[:, head // group : head // group + 1] for x in (key, value))
        for block in blocks:
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            own_query = query[:, head : head + 1, rows]
            own_mask = None if mask is None else mask[:, :, rows]
            truth, _ = sdpa.attention(own_query, own_key, own_value, mask=own_mask)
            expected, _ = reference.attention(own_query, own_key, own_value, RECIPES[recipe], mask=own_mask)
            error = (output[:, head : head + 1, rows] - truth).abs().sum()
            assert error <= 1.05 * (expected - truth).abs().sum()


@pytest.mark.parametrize("recipe", LOW_BIT)
@pytest.mark.parametrize("tokens", [131_072, 200_000])
def test_long_sequences(recipe, tokens, device):
    query, key, value = (draw(device, 1, 2, tokens, 64, seed=seed) for seed in range(3))
    output, _ = attend(query, key, value, recipe)
    judge_blocks(output, query, key, value, recipe, heads=(0, 1), blocks=(0, tokens // BLOCK // 2, tokens // BLOCK - 1))


@pytest.mark.parametrize("recipe", LOW_BIT)
def test_more_queries_than_32_bits_count(recipe, device):
    query, key, value = draw(device, 1, HEADS, TOKENS, HEAD_DIM), *draw(device, 2, 1, HEADS // 2, 300, HEAD_DIM)
    output, _ = attend(query, key, value, recipe)
    assert output.numel() > 2**31
    judge_blocks(output, query, key, value, recipe, heads=(0, 1, HEADS - 1), blocks=(0, TOKENS // BLOCK - 1))


@pytest.mark.parametrize("recipe", LOW_BIT)
def test_more_keys_than_32_bits_count(recipe, device):
    query = draw(device, 1, HEADS, BLOCK, HEAD_DIM)
    key, value = (draw(device, 1, HEADS, TOKENS, HEAD_DIM, seed=seed) for seed in (1, 2))
    output, _ = attend(query, key, value, recipe)
    judge_blocks(output, query, key, value, recipe, heads=(0, HEADS - 1), blocks=(0,))


@pytest.mark.parametrize("recipe", LOW_BIT)
def test_strides_beyond_32_bits(recipe, device):
    """Two heads, 2³¹ elements apart."""
    stride, tokens = 2**31 + 64, 300
    memory = torch.full((stride + tokens * 64,), torch.nan, device=device, dtype=torch.bfloat16)
    x = memory.as_strided((1, 2, tokens, 64), (0, stride, 64, 1))
    x.copy_(draw(device, 1, 2, tokens, 64))
    output, lse = attend(x, x, x, recipe)
    near = x.contiguous()
    for actual, expected in zip((output, lse), attend(near, near, near, recipe), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("recipe", LOW_BIT)
def test_a_mask_of_more_elements_than_32_bits_count(recipe, device):
    tokens = 65_536
    query, key, value = (draw(device, 1, 1, tokens, 64, seed=seed) for seed in range(3))
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device)
    mask[..., ::3] = False
    mask[..., -BLOCK:, : tokens // 2] = False
    output, _ = attend(query, key, value, recipe, mask=mask)
    judge_blocks(output, query, key, value, recipe, heads=(0,), blocks=(0, tokens // BLOCK - 1), mask=mask)
