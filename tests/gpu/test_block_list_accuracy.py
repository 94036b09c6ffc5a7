"""Block lists on the GPU: the INT8 kernel against the reference and exact attention."""

import pytest
import torch

from sage_kernels import dispatch, exact, ops
from sage_kernels.recipe import RECIPES
from sage_kernels.reference import forward as reference
from tests.helpers.blocks import as_mask, draw_blocks
from tests.helpers.judge import lse_tolerance


def draw(device, batch=2, q_heads=4, kv_heads=2, q_len=1000, kv_len=1100, head_dim=128, dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(batch, heads, tokens, head_dim, generator=generator, device=device, dtype=dtype)
        + torch.randn(head_dim, generator=generator, device=device, dtype=dtype)
        for heads, tokens in ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]


def on(device, blocks):
    return blocks._replace(counts=blocks.counts.to(device), tiles=blocks.tiles.to(device))


CAUSAL = {"is_causal": True, "causal_offset": 100}


@pytest.mark.parametrize(
    ("recipe", "options", "block_m", "block_n", "head_dim"),
    [
        ("sage2", {}, 128, 128, 128),
        ("sage2", CAUSAL, 128, 128, 128),
        ("sage2", {"keys": True}, 128, 128, 128),
        ("sage2", {}, 64, 64, 80),
        ("sage2", {"keys": True}, 64, 64, 128),
        ("sage2", CAUSAL, 128, 64, 64),
        ("sage2", {}, 64, 128, 64),
        ("sage1", {}, 128, 128, 128),
        ("sage1", CAUSAL | {"keys": True}, 64, 64, 64),
        ("sage2", {}, 128, 128, 256),
    ],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_the_kernels_error_is_the_references(device, recipe, options, block_m, block_n, head_dim):
    inputs, options = draw(device, head_dim=head_dim), dict(options)
    blocks = on(device, draw_blocks(2, 4, 1000, 1100, block_m, block_n, share=0.3))
    mask, keys = blocks.mask(1100, 0, 1000), None
    if options.pop("keys", False):
        keys = torch.rand(2, 1, 1, 1100, device=device, generator=torch.Generator(device).manual_seed(1)) < 0.9
        keys[0, ..., 200:600] = False
        mask = mask & keys
    heard = []
    dispatch.plan_listeners.append(heard.append)
    try:
        output, lse = ops.attention(*inputs, mask=keys, blocks=blocks, recipe=recipe, return_lse=True, **options)
    finally:
        dispatch.plan_listeners.remove(heard.append)
    kind = "blocks" if keys is None else "block_keys"
    assert [(plan.kernel, plan.recipe, plan.request.mask) for plan in heard] == [("int8_forward", recipe, kind)]
    truth, _ = exact.attention(*inputs, mask=mask, **options)
    expected, expected_lse = reference.attention(*inputs, RECIPES[recipe], mask=keys, blocks=blocks, **options)
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert not output[lse == -torch.inf].any()
    finite = expected_lse != -torch.inf
    assert ((lse - expected_lse)[finite].abs() <= lse_tolerance(inputs[0], inputs[1])).all()
    error, allowed = ((x - truth).abs().sum() for x in (output, expected))
    # P is rounded relative to other maxima, because tiles without a mask come first.
    assert error <= 1.1 * allowed + 2**-9 * truth.abs().sum()


def test_the_helper_draws_what_it_says(device):
    blocks = draw_blocks(1, 2, 300, 500)
    assert torch.equal(on(device, blocks).mask(500, 0, 300).cpu(), as_mask(blocks, 300, 500))


def test_reruns_are_equal_to_the_bit_and_compiled_calls_are_the_same(device):
    inputs, blocks = draw(device), on(device, draw_blocks(2, 4, 1000, 1100))
    first, again = (ops.attention(*inputs, blocks=blocks, recipe="sage2")[0] for _ in range(2))
    assert torch.equal(first, again)
    compiled = torch.compile(lambda *x: ops.attention(*x, blocks=blocks, recipe="sage2")[0], fullgraph=True)
    assert torch.equal(compiled(*inputs), first)


def test_exact_attention_over_a_list_is_exact(device):
    inputs, blocks = draw(device), on(device, draw_blocks(2, 4, 1000, 1100))
    output, lse = ops.attention(*inputs, blocks=blocks, recipe="exact", return_lse=True)
    truth, truth_lse = exact.attention(*inputs, mask=blocks.mask(1100, 0, 1000))
    assert ((output - truth).norm() / truth.norm()) < 2**-7
    assert torch.equal(lse == -torch.inf, truth_lse == -torch.inf)
