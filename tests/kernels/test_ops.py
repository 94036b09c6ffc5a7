"""The operator: schema, compiler, and the promise that it is forward only and says so."""

import pytest
import torch

from sage_kernels import ops, reference
from sage_kernels.recipe import RECIPES


def draw(q_heads=4, kv_heads=2, q_len=70, kv_len=90, dtype=torch.float32, v_head_dim=32):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(2, q_heads, q_len, 64, generator=generator).to(dtype),
        torch.randn(2, kv_heads, kv_len, 64, generator=generator).to(dtype),
        torch.randn(2, kv_heads, kv_len, v_head_dim, generator=generator).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["sage3", "sage2", "sage1", "exact"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck_passes(dtype, recipe, return_lse):
    mask = torch.ones(2, 1, 1, 90, dtype=torch.bool)
    for arguments in ((None, True), (mask, False)):
        torch.library.opcheck(
            torch.ops.sage_kernels.attention.default,
            (*draw(dtype=dtype), *arguments, None, recipe, "native", return_lse),
        )


@pytest.mark.parametrize("recipe", ["sage3", "sage2", "sage1"])
def test_the_operator_runs_the_reference(recipe):
    inputs = draw()
    output, lse = ops.attention(*inputs, is_causal=True, scale=0.2, recipe=recipe, return_lse=True)
    expected = reference.attention(*inputs, RECIPES[recipe], is_causal=True, scale=0.2)
    assert torch.equal(output, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("recipe", ["sage3", "exact"])
def test_the_output_is_laid_out_so_that_merging_heads_is_free(recipe):
    output, _ = ops.attention(*draw(), recipe=recipe)
    assert output.transpose(1, 2).is_contiguous()


def test_one_compiled_graph_serves_all_lengths_without_breaks():
    compiled = torch.compile(
        lambda *tensors: ops.attention(*tensors, return_lse=True), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    with torch.compiler.set_stance("default"):
        for q_len, kv_len in ((70, 90), (100, 64), (33, 300)):
            inputs = draw(q_len=q_len, kv_len=kv_len)
            for actual, expected in zip(compiled(*inputs), ops.attention(*inputs, return_lse=True), strict=True):
                assert torch.equal(actual, expected)


def test_listeners_hear_the_plan_also_of_compiled_calls():
    heard = []
    ops.plan_listeners.append(heard.append)
    try:
        ops.attention(*draw())
        torch.compile(lambda *tensors: ops.attention(*tensors)[0], fullgraph=True, backend="aot_eager")(*draw())
    finally:
        ops.plan_listeners.remove(heard.append)
    assert [plan.kernel for plan in heard] == ["reference", "reference"]


def test_backward_raises_instead_of_cutting_the_gradient():
    query, key, value = draw()
    output, _ = ops.attention(query.requires_grad_(), key, value)
    with pytest.raises(NotImplementedError, match="forward only"):
        output.sum().backward()
