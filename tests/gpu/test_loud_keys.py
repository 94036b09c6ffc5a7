"""Keys and documents that are a thousand times as loud as others, in the kernels that the GPU's calls run."""

import pytest
import torch

from sage_kernels import ops, training
from sage_kernels.exact import sdpa
from sage_kernels.spec.recipe import RECIPES
from tests.gpu.test_heavy_keys_accuracy import run
from tests.helpers.loud import LOUD_DOCUMENT, documents, loud_key
from tests.helpers.pairwise import pairwise

FORWARD_ONLY = ("sage1", "sage2", "sage3")
GOALS = {"sage1": 0.01, "sage2": 0.03}
"""Largest relative error, in L1, where one key is a thousand times as loud as all others."""
GROWTH = 4 / 3
"""Growth of the error by an equalizer that a loud key decides with others: a group counts in it while its mean square
is at most `transforms.LOUD` = 32 times the others', of which there are 7. A channel's root mean square is then at most
√((7 + 32) / 8) = 2.2 times too large, and by Kantorovich's inequality |Q r| · |K / r| at most (2.2 + 1 / 2.2) / 2 times
|Q| · |K|, in units of which the scores' errors are."""


def relative_error(output, inputs, **options):
    truth, _ = sdpa.attention(*(x.double() for x in inputs), **options)
    return (output.double() - truth).abs().sum() / truth.abs().sum()


@pytest.mark.parametrize(
    ("recipe", "kv_len", "place", "head_dim", "dtype", "is_causal"),
    pairwise(
        FORWARD_ONLY, [256, 4096], [0, 63, 64, 100, -1], [64, 128], [torch.bfloat16, torch.float16], [False, True]
    ),
)
@pytest.mark.parametrize("by", ["chosen kernel", "triton"])
def test_a_loud_key_costs_the_others_nothing(recipe, kv_len, place, head_dim, dtype, is_causal, by, device):
    """The error is at most the goal, or little more than where the key is as loud as the others.

    The goal is for rows whose loud score is near the others': the rounding of a score is in proportion to the score.
    """
    options = {"is_causal": is_causal, "causal_offset": kv_len - 256} if is_causal else {}

    def error(times):
        inputs = [x.to(device, dtype) for x in loud_key(kv_len, place % kv_len, head_dim, times=times)]
        if by == "triton":
            output, _ = run(inputs, RECIPES[recipe], **options)
        else:
            output, _ = ops.attention(*inputs, recipe=recipe, fallback="emulate", **options)
        return relative_error(output, inputs, **options)

    loud, ordinary = error(1000.0 if dtype == torch.bfloat16 else 100.0), error(1.0)
    print(recipe, kv_len, place, head_dim, dtype, is_causal, by, f"{loud:.4f} {ordinary:.4f}")
    assert loud <= max(GOALS.get(recipe, 0.0), GROWTH * ordinary)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("recipe", [*FORWARD_ONLY, "sage3_paper"])
def test_a_packed_document_is_independent_of_its_neighbours_to_the_bit(recipe, is_causal, device):
    outputs = []
    for loud in (False, True):
        inputs, lengths = documents(device, loud=loud)
        tokens = [x[0].transpose(0, 1) for x in inputs]
        outputs.append(
            ops.packed_attention(*tokens, *lengths[:4], recipe=recipe, fallback="emulate", is_causal=is_causal)[0]
        )
    quiet = torch.ones(len(outputs[0]), dtype=torch.bool, device=device)
    quiet[LOUD_DOCUMENT] = False
    assert torch.equal(outputs[0][quiet], outputs[1][quiet])
    assert not torch.equal(outputs[0][~quiet], outputs[1][~quiet])


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("recipe", ["sage_bwd", "sage_bwd_int8"])
def test_a_packed_documents_gradients_are_independent_of_its_neighbours_to_the_bit(recipe, is_causal, device):
    results = []
    for loud in (False, True):
        inputs, lengths = documents(device, loud=loud)
        tokens = [x[0].transpose(0, 1).requires_grad_() for x in inputs]
        output = training.packed_attention(*tokens, *lengths[:4], recipe=recipe, is_causal=is_causal)
        output.backward(torch.ones_like(output))
        results.append([output.detach(), *(x.grad for x in tokens)])
    quiet = torch.ones(len(results[0][0]), dtype=torch.bool, device=device)
    quiet[LOUD_DOCUMENT] = False
    for ordinary, with_loud in zip(*results, strict=True):
        assert torch.equal(ordinary[quiet], with_loud[quiet])
