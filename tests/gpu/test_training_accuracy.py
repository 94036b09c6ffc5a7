"""A kernel's gradients are as near to exact attention's in float64 as its recipe's reference's, for all calls."""

import pytest
import torch

from sage_hf import sage_attention
from tests.helpers.judge_training import (
    TRAINING,
    Draw,
    GradientErrors,
    TrainingCall,
    assert_equal,
    judge_training,
    train,
)

pytestmark = pytest.mark.parametrize("recipe", TRAINING)

HEAD_DIMS = ((16,), (32,), (40, 24), (64,), (64, 128), (80,), (128,), (128, 64), (256,))
CASES = [(dims, torch.bfloat16) for dims in HEAD_DIMS] + [((64,), torch.float16), ((128,), torch.float16)]


@pytest.mark.parametrize(("dims", "dtype"), CASES, ids=str)
def test_every_head_dim(recipe, dims, dtype, device):
    draw = Draw(device, dtype=dtype)
    judge_training(draw.call(recipe, 2, 4, 2, 333, 500, *dims)).assert_as_small_as_the_references()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_queries(recipe, head_dim, heads, is_causal, device):
    call = Draw(device).call(recipe, 2, *heads, 1000, 1000, head_dim, is_causal=is_causal)
    judge_training(call).assert_as_small_as_the_references()


@pytest.mark.parametrize("causal_offset", [0, 300, -200, 1, 10**9])
@pytest.mark.parametrize(("q_len", "kv_len"), [(200, 500), (500, 200), (129, 128), (1, 300), (300, 1)])
def test_causal_with_an_offset(recipe, causal_offset, q_len, kv_len, device):
    """A few rows have few errors, so several calls are judged together."""
    errors = GradientErrors.none()
    for seed in range(4):
        draw = Draw(device, seed)
        errors += judge_training(
            draw.call(recipe, 1, 4, 2, q_len, kv_len, 64, is_causal=True, causal_offset=causal_offset)
        )
    errors.assert_as_small_as_the_references()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_standard_normal_tensors_are_two_percent_off_at_most(recipe, head_dim, device):
    """`sage_bwd_int8` less than 5 %, which is what one scale per tile gives (arXiv 2505.11594)."""
    draw = Draw(device)
    call = TrainingCall(recipe, *(draw(1, 2, 2048, head_dim) for _ in range(4)))
    errors = judge_training(call).of
    limit = 0.02 if recipe == "sage_bwd" else 0.05
    assert max(errors[name].kernel / errors[name].size for name in ("query", "key", "value")) <= limit


@pytest.mark.usefixtures("repeatable")
def test_the_plugs_function_gives_the_operators_gradients(recipe, device):
    """`sage_attention` with key padding as a mask."""
    draw = Draw(device)
    call = draw.call(recipe, 2, 4, 2, 300, 400, 64)
    tensors = call.query, call.key, call.value, call.output_gradient
    key_mask = draw.uniform(2, 400) < 0.7
    found = train(*tensors, recipe, sage_attention, attn_mask=key_mask[:, None, None], enable_gqa=True)
    assert_equal(found, train(*tensors, recipe, key_mask=key_mask))
    found = train(*tensors, recipe, sage_attention, is_causal=True, enable_gqa=True)
    assert_equal(found, train(*tensors, recipe, is_causal=True))
