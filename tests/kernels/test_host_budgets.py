"""Hold what a repeated call does on its host to a budget, on every route."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from sage_hf import record, sage_attention
from sage_hf.transformers.attention import sage_attention_forward
from sage_kernels.dispatch import registry, run
from sage_kernels.exact import sdpa
from sage_kernels.external import flash_attention3
from tests.helpers.host_cost import allocations, python_calls

SHAPE = (1, 2, 192, 64)
pytestmark = pytest.mark.usefixtures("nothing_prepared")


def draw(*shape, count=3):
    return [torch.randn(shape or SHAPE, dtype=torch.bfloat16) for _ in range(count)]


def check_budget(call, library, *, python, allocated, launched):
    record.clear()  # which now and then adds up what was recorded
    for _ in range(3):
        call()
    names = python_calls(call)
    assert len(names) <= python, "\n".join(names)
    assert allocations(call) <= allocated
    library.launched.clear()
    call()
    assert len(library.launched) == launched


def test_a_repeated_call_costs_the_host_little(gpu):
    query, key, value = draw()
    check_budget(partial(sage_attention, query, key, value, recipe="sage2"), gpu, python=22, allocated=2, launched=3)


def test_a_repeated_call_with_a_mask_of_keys_costs_the_host_little(gpu):
    query, key, value = draw()
    mask = (torch.arange(SHAPE[2]) < 150)[None, None, None]
    call = partial(sage_attention, query, key, value, mask, recipe="sage2")
    check_budget(call, gpu, python=22, allocated=2, launched=3)


def test_a_repeated_call_of_the_operator_costs_the_host_little(gpu):
    query, key, value = draw()
    call = partial(torch.ops.sage_kernels.attention, query, key, value, None, False, 0, None, "sage2", "native", False)
    check_budget(call, gpu, python=22, allocated=3, launched=3)


def test_a_repeated_exact_call_costs_the_host_little(gpu):
    query, key, value = draw()
    own = allocations(partial(F.scaled_dot_product_attention, query, key, value))
    check_budget(partial(sage_attention, query, key, value, recipe="exact"), gpu, python=16, allocated=own, launched=0)


def test_a_repeated_call_with_gradients_costs_the_host_little(gpu, gluon):
    inputs = [x.requires_grad_() for x in draw()]
    gradient = torch.randn(SHAPE, dtype=torch.bfloat16)

    def step():
        torch.autograd.grad(sage_attention(*inputs, recipe="sage_bwd"), inputs, gradient)

    check_budget(step, gpu, python=54, allocated=9, launched=7)


EXACT = {
    "self-attention": ((2, 192, 192), {}),
    "causal": ((2, 192, 192), {"is_causal": True}),
    "grouped queries": ((4, 192, 192), {"enable_gqa": True}),
    "cross-attention": ((2, 192, 77), {}),
    "decoding": ((4, 1, 192), {"enable_gqa": True}),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", EXACT)
def test_an_exact_call_of_any_kind_is_one_call_of_pytorchs_function(kind, grad):
    """With gradients too: no function of ours stands in autograd's graph."""
    (heads, queries, keys), options = EXACT[kind]
    tensors = [*draw(1, heads, queries, 64, count=1), *draw(1, 2, keys, 64, count=2)]
    for x in tensors:
        x.requires_grad_(grad)
    own = partial(F.scaled_dot_product_attention, *tensors, **options)
    call = partial(sage_attention, *tensors, recipe="sage2", **options)
    if not grad:
        call = partial(sage_attention, *tensors, recipe="exact", **options)
    for _ in range(3):
        output = call()
    assert type(output.grad_fn) is type(own().grad_fn)
    names = python_calls(call)
    assert len(names) <= 17, names
    assert allocations(call) == allocations(own)


def test_an_exact_call_with_padding_reads_a_view_of_the_mask():
    tensors = [x.requires_grad_() for x in draw()]
    mask = (torch.arange(SHAPE[2]) < 150)[None, None, None]
    call = partial(sage_attention, *tensors, mask, recipe="exact")
    for _ in range(3):
        call()
    names = python_calls(call)
    assert len(names) <= 20 and "sdpa" not in names, names
    assert allocations(call) == allocations(partial(F.scaled_dot_product_attention, *tensors, mask))


def test_a_call_of_flash_attention_3_adds_views_alone(monkeypatch):
    def operator(query, key, value, **options):
        return [query]

    def select(request, fallback):
        return registry.exact_plan(request, kernel="fa3")

    monkeypatch.setattr(flash_attention3, "_operator", lambda: operator)
    monkeypatch.setattr(run, "select", select)
    query, key, value = draw()
    call = partial(sage_attention, query, key, value, recipe="sage2")
    for _ in range(3):
        call()
    names = python_calls(call)
    assert len(names) <= 19, names
    assert allocations(call) == 0


def test_transformers_function_adds_little_to_a_step_of_decoding():
    layer = torch.nn.Identity().eval()
    query, (key, value) = draw(1, 4, 1, 64, count=1)[0], draw(1, 2, 192, 64, count=2)
    options = {"dropout": 0.0, "scaling": 0.125, "is_causal": True, "recipe": "sage2"}
    call = partial(sage_attention_forward, layer, query, key, value, None, **options)
    for _ in range(3):
        output, _ = call()
    expected = sdpa.sdpa(query, key, value, scale=0.125, enable_gqa=True)
    assert torch.equal(output, expected.transpose(1, 2))
    names = python_calls(call)
    assert len(names) <= 28, names
