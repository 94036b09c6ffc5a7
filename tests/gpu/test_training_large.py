"""Gradients of long sequences, and of tensors whose offsets do not fit in 32 bits. Sampled heads are judged."""

import math
from dataclasses import replace

import pytest
import torch

from sage_kernels.exact.gradients import Gradients
from tests.helpers.judge_training import (
    TRAINING,
    Draw,
    TrainingCall,
    assert_equal,
    judge_gradients,
    judge_training,
    train,
)

# More elements than 32 bits can count: 1 × 136 × 131,072 × 128.
HEADS, TOKENS, HEAD_DIM = 136, 131_072, 128

pytestmark = [pytest.mark.parametrize("recipe", TRAINING), pytest.mark.usefixtures("enough_memory", "repeatable")]


def judge_heads(call: TrainingCall, kv_heads: tuple[int, ...]) -> None:
    """Judge all that belongs to some key heads.

    Errors of a row hang together: a rounded output gives its δ an error, of a normal distribution's size. So two sums
    of as large errors over n rows are apart by √2·√(π/2 - 1)/√n of them in standard deviation, three of which may be.
    """
    group = call.query.shape[1] // call.key.shape[1]
    found = train(call.query, call.key, call.value, call.output_gradient, call.recipe)
    for head in kv_heads:
        of_keys, of_queries = slice(head, head + 1), slice(head * group, (head + 1) * group)
        alone = replace(
            call,
            query=call.query[:, of_queries],
            key=call.key[:, of_keys],
            value=call.value[:, of_keys],
            output_gradient=call.output_gradient[:, of_queries],
        )
        heads = of_queries, of_queries, of_keys, of_keys
        errors = judge_gradients(alone, Gradients(*(x[:, some] for x, some in zip(found, heads, strict=True))))
        chance = 3 * (math.pi - 2) ** 0.5 / (group * call.query.shape[2]) ** 0.5
        for name, error in errors.of.items():
            assert error.kernel <= (1.05 + chance) * error.reference, (name, head, error)


@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences(recipe, is_causal, device):
    call = Draw(device).call(recipe, 1, 2, 1, 65_536, 65_536, 64, is_causal=is_causal)
    judge_training(call).assert_as_small_as_the_references()


def test_more_queries_than_32_bits_count(recipe, device):
    call = Draw(device).call(recipe, 1, HEADS, HEADS // 2, TOKENS, 300, HEAD_DIM)
    assert call.query.numel() > 2**31
    judge_heads(call, (0, HEADS // 2 - 1))


def test_more_keys_than_32_bits_count(recipe, device):
    call = Draw(device).call(recipe, 1, HEADS, HEADS, 128, TOKENS, HEAD_DIM)
    assert call.key.numel() > 2**31
    judge_heads(call, (0, HEADS - 1))


def test_strides_beyond_32_bits(recipe, device):
    """Two heads, 2³¹ elements apart."""
    stride, tokens = 2**31 + 64, 300
    memory = torch.full((stride + tokens * 64,), torch.nan, device=device, dtype=torch.bfloat16)
    far = memory.as_strided((1, 2, tokens, 64), (0, stride, 64, 1))
    far.copy_(Draw(device)(1, 2, tokens, 64))
    near = far.contiguous()
    assert_equal(train(far, far, far, far, recipe), train(near, near, near, near, recipe))
