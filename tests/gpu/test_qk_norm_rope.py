"""Norm and RoPE of heads on a GPU: called, replayed, captured, with gradients, and beyond 2³¹ elements."""

from functools import partial

import pytest
import torch

from sage_kernels.dispatch.qk_norm_rope_kernels import select_qk_norm_rope_kernel
from sage_kernels.qk_norm_rope import qk_norm_rope
from sage_kernels.reference.qk_norm_rope import qk_norm_rope as reference
from sage_kernels.spec.qk_norm_rope import Norm, Rope
from tests.helpers.qk_norm_rope import CASES, QKNormRopeCase

LARGE = (
    QKNormRopeCase((2, 1003, 30, 64), "layer"),
    QKNormRopeCase((1, 1003, 24, 128), "rounded", "channels", -7),
    QKNormRopeCase((1, 333, 40, 128), "tokens", "batch"),
    QKNormRopeCase((2, 517, 32, 128), "", "own", halves=True, heads_first=True),
)


pytestmark = pytest.mark.usefixtures("nothing_known")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_replayed_calls_compute_the_reference(case: QKNormRopeCase, dtype: torch.dtype, replayed: list[object]):
    for _ in range(3):
        x, norm, rope = case.draw(dtype, "cuda")
        assert select_qk_norm_rope_kernel(x, norm, rope, grad=False).name == "qk_norm_rope"
        case.judge(qk_norm_rope(x, norm, rope), x, norm, rope)
    assert len(replayed) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES + LARGE if not case.across_heads], ids=str)
def test_gradients_match_the_reference(case: QKNormRopeCase, dtype: torch.dtype):
    x, norm, rope = case.draw(dtype, "cuda")
    inputs = [one.requires_grad_() for one in (x, norm and norm.weight, norm and norm.bias) if one is not None]
    output = qk_norm_rope(x, norm, rope)
    assert output.grad_fn.name() == "_NormRopeBackward"
    gradient = torch.randn_like(output)
    found = torch.autograd.grad(output, inputs, gradient)
    case.judge_gradients((*found, None, None)[:3], gradient, x, norm, rope)


def test_a_graph_replays_it():
    x, norm, rope = LARGE[1].draw(torch.bfloat16, "cuda")
    for _ in range(3):
        qk_norm_rope(x, norm, rope)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = qk_norm_rope(x, norm, rope)
    x.copy_(torch.randn_like(x))
    output.fill_(torch.nan)
    graph.replay()
    LARGE[1].judge(output, x, norm, rope)


def test_another_stream_runs_it():
    x, norm, rope = LARGE[0].draw(torch.bfloat16, "cuda")
    expected = qk_norm_rope(x, norm, rope)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = [qk_norm_rope(x, norm, rope) for _ in range(4)]
    stream.synchronize()
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("heads_first", [False, True])
def test_more_elements_than_32_bits_count(heads_first: bool):
    tokens, heads, head_dim = 2**17 + 5, 128, 128
    x = torch.randn(1, 1, 1, head_dim, device="cuda", dtype=torch.bfloat16).expand(1, tokens, heads, head_dim)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else x.contiguous()
    x[:, -3:] = torch.randn_like(x[:, -3:])
    angles = torch.randn(tokens, head_dim // 2, device="cuda")
    norm, rope = Norm("rms", 1e-5), Rope(angles.cos(), angles.sin())
    output = qk_norm_rope(x, norm, rope)
    last = qk_norm_rope(x[:, -3:].contiguous(), norm, Rope(rope.cosine[-3:], rope.sine[-3:]))
    assert torch.equal(output[:, -3:], last)


def test_what_the_kernel_does_not_take_runs_in_operators():
    x, norm, rope = LARGE[1].draw(torch.bfloat16, "cuda")
    for other in (torch.stack((x, x), -1)[..., 0], torch._neg_view(-x)):
        qk_norm_rope(x, norm, rope)  # the kernel runs it
        assert select_qk_norm_rope_kernel(other, norm, rope, grad=False).name == "reference"
        LARGE[1].judge(qk_norm_rope(other, norm, rope).contiguous(), x, norm, rope)


def test_inside_of_transforms_pytorchs_operators_run():
    x, norm, rope = LARGE[1].draw(torch.bfloat16, "cuda")
    own = partial(qk_norm_rope, norm=norm, rope=rope)
    plain = partial(reference, norm=norm, rope=rope)
    own(x)  # the kernel runs it
    gradients = [torch.func.grad(lambda x, call=call: call(x).float().square().sum())(x) for call in (own, plain)]
    assert torch.equal(*gradients)
    assert torch.equal(torch.func.vmap(own)(x[None]), plain(x)[None])
    tangents = [torch.func.jvp(call, (x,), (torch.ones_like(x),))[1] for call in (own, plain)]
    assert torch.equal(*tangents)


@torch.no_grad()
def test_tensors_without_memory_are_refused():
    x, norm, rope = LARGE[1].draw(torch.bfloat16, "cuda")
    qk_norm_rope(x, norm, rope)  # the kernel runs it
    norm.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        qk_norm_rope(x, norm, rope)
