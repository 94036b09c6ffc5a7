"""Norm and rotation of heads: the specification against PyTorch and complex numbers, the door, prepared calls."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from sage_kernels import norm_rope as door
from sage_kernels.norm_rope import norm_rope
from sage_kernels.reference import norm_rope as reference
from sage_kernels.replay import trace
from sage_kernels.spec.heads import Norm, Rope
from sage_kernels.triton.registration import HeadKernel
from tests.helpers import fake_gpu
from tests.helpers.heads import CASES, HeadCase
from tests.helpers.host_cost import allocations, python_calls

SIZES = 2, 7, 3, 16


def draw(*sizes, dtype=torch.float64):
    return torch.randn(sizes or SIZES, dtype=dtype)


@pytest.mark.parametrize("across_heads", [False, True])
def test_norms_are_those_of_pytorch(across_heads):
    x, channels = draw(), 48 if across_heads else 16
    rows = x.flatten(2) if across_heads else x
    weight, bias = draw(channels), draw(channels)
    rms = reference.normalize(x, Norm("rms", 1e-3, weight, across_heads=across_heads))
    layer = reference.normalize(x, Norm("layer", 1e-3, weight, bias, across_heads))
    torch.testing.assert_close(rms, F.rms_norm(rows, (channels,), weight, 1e-3).view(SIZES))
    torch.testing.assert_close(layer, F.layer_norm(rows, (channels,), weight, bias, 1e-3).view(SIZES))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("repeated", [False, True])
def test_the_rotation_is_a_product_of_complex_numbers(halves, repeated):
    x, angles = draw(), draw(7, 8)
    pairs = x.unflatten(-1, (2, 8)).transpose(-1, -2) if halves else x.unflatten(-1, (8, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(7, 8).double(), angles)[:, None]
    expected = torch.view_as_real(turned)
    expected = expected.transpose(-1, -2).flatten(-2) if halves else expected.flatten(-2)
    if repeated:
        angles = torch.cat((angles, angles), -1) if halves else angles.repeat_interleave(2, -1)
    torch.testing.assert_close(reference.rotate(x, Rope(angles.cos(), angles.sin(), halves=halves)), expected)


@pytest.mark.parametrize("offset", [-9, -3, 0, 2, 9])
def test_tokens_without_a_row_are_not_rotated(offset):
    x, angles = draw(), draw(5, 8)
    output = reference.rotate(x, Rope(angles.cos(), angles.sin(), offset))
    for token in range(7):
        row = token + offset
        one = x[:, token : token + 1]
        if 0 <= row < 5:
            table = angles[row : row + 1]
            one = reference.rotate(one, Rope(table.cos(), table.sin()))
        assert torch.equal(output[:, token : token + 1], one)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_door_runs_the_reference_on_a_cpu(case: HeadCase):
    x, norm, rope = case.draw(torch.bfloat16)
    assert torch.equal(norm_rope(x, norm, rope), reference.norm_rope(x, norm, rope))


def test_gradients_of_the_reference_are_right():
    x, weight, bias = (one.requires_grad_() for one in (draw(), draw(16), draw(16)))
    angles = draw(7, 8)

    def attended(x, weight, bias):
        return reference.norm_rope(x, Norm("layer", 1e-3, weight, bias), Rope(angles.cos(), angles.sin(), 1))

    assert torch.autograd.gradcheck(attended, (x, weight, bias))


@pytest.mark.parametrize(
    ("norm", "rope", "message"),
    [
        (Norm("rms", 1e-5, draw(15)), None, r"weight must be \(16,\), got \(15,\)"),
        (Norm("layer", 1e-5, draw(16), draw(48)), None, r"bias must be \(16,\), got \(48,\)"),
        (Norm("rms", 1e-5, draw(16), across_heads=True), None, r"weight must be \(48,\), got \(16,\)"),
        (Norm("rms", 1e-5, draw(16), draw(16)), None, "RMSNorm has no bias"),
        (None, Rope(draw(7, 4), draw(7, 4)), "does not fit x"),
        (None, Rope(draw(7, 8), draw(6, 8)), "does not fit x"),
        (None, Rope(draw(7, 2, 8), draw(7, 2, 8)), "does not fit x"),
        (None, Rope(draw(3, 7, 1, 8), draw(3, 7, 1, 8)), "does not fit x"),
        (None, Rope(draw(7, 8).half(), draw(7, 8).half()), "does not fit x"),
        (None, Rope(draw(7, 8)), "complex numbers, or cosine and sine"),
        (None, Rope(torch.complex(draw(7, 16).float(), draw(7, 16).float())), "does not fit x"),
    ],
)
def test_what_does_not_fit_is_refused(norm, rope, message):
    with pytest.raises(ValueError, match=message):
        norm_rope(draw(), norm, rope)


def test_tensors_on_several_devices_are_refused():
    weight = draw(16).to("meta")
    with pytest.raises(ValueError, match="x is on cpu, and norm or rotation on meta"):
        norm_rope(draw(), Norm("rms", 1e-5, weight))


def test_tables_that_want_gradients_get_them():
    angles = draw(7, 8).requires_grad_()
    output = norm_rope(draw(), rope=Rope(angles.cos(), angles.sin()))
    output.square().sum().backward()
    assert angles.grad.shape == (7, 8)


@pytest.mark.parametrize("x", [draw(7, 16), torch.ones(SIZES, dtype=torch.int64)], ids=["two axes", "integers"])
def test_only_heads_of_floats_are_taken(x):
    with pytest.raises(ValueError, match="x must be"):
        norm_rope(x)


def test_no_tokens_give_no_tokens():
    x, weight = draw(2, 0, 3, 16).requires_grad_(), draw(16).requires_grad_()
    output = norm_rope(x, Norm("rms", 1e-5, weight), Rope(draw(5, 8), draw(5, 8)))
    output.sum().backward()
    assert output.shape == x.grad.shape == x.shape and not weight.grad.any()


class Rehearsed(HeadKernel):
    """The kernel, which runs in rehearsals alone: otherwise, what it returns holds anything."""

    def forward(self, x, norm, rope):
        return super().forward(x, norm, rope) if trace.current() else torch.empty(x.shape, dtype=x.dtype)

    def backward(self, gradient, x, norm, rope):
        if trace.current():
            return super().backward(gradient, x, norm, rope)
        return tuple(torch.empty_like(one) for one in (x, norm.weight, norm.bias))


@pytest.fixture
def rehearsed(gpu, monkeypatch):
    """The driver of a GPU that runs nothing, and gets the kernel's launches."""
    launch = pytest.importorskip("sage_kernels.language.launch", exc_type=ImportError)
    monkeypatch.setattr(launch, "pack", fake_gpu.pack)
    monkeypatch.setattr(door, "head_kernel", lambda *arguments, **options: Rehearsed())
    door._slots.clear()
    yield gpu
    door._slots.clear()


def test_a_repeated_call_costs_the_host_little(rehearsed):
    x, norm, rope = HeadCase(SIZES, "layer", "channels").draw(torch.bfloat16)
    call = torch.no_grad()(partial(norm_rope, x, norm, rope))
    call()
    names = python_calls(call)
    assert len(names) <= 22, "\n".join(names)
    assert allocations(call) <= 1
    rehearsed.launched.clear()
    call()
    (launched,) = rehearsed.launched
    assert launched.grid == (1, 3, 2)


def test_a_repeated_call_with_gradients_costs_the_host_little(rehearsed):
    x, norm, rope = HeadCase(SIZES, "layer", "channels").draw(torch.bfloat16)
    inputs = [one.requires_grad_() for one in (x, norm.weight, norm.bias)]
    gradient = torch.randn(SIZES).to(x.dtype)

    def step():
        return torch.autograd.grad(norm_rope(x, norm, rope), inputs, gradient)

    step()
    names = python_calls(step)
    assert len(names) <= 60, "\n".join(names)
    rehearsed.launched.clear()
    gradients = step()
    assert [one.shape for one in gradients] == [one.shape for one in inputs]
    forward, backward, *sums = rehearsed.launched
    assert forward.grid == backward.grid == (1, 3, 2)
    assert [launched.grid for launched in sums] == [(2, 1, 1), (2, 1, 1)]


@pytest.mark.parametrize("known", [False, True])
def test_a_tensor_whose_memory_was_freed_is_refused_before_any_launch(rehearsed, known):
    x, norm, rope = HeadCase(SIZES, "layer", "channels").draw(torch.bfloat16)
    for _ in range(3 * known):
        norm_rope(x, norm, rope)
    rehearsed.launched.clear()
    for freed in (x, norm.weight, rope.cosine):
        size = freed.untyped_storage().nbytes()
        freed.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="no memory"):
            norm_rope(x, norm, rope)
        freed.untyped_storage().resize_(size)
    assert not rehearsed.launched


def test_calls_that_differ_in_more_than_addresses_are_not_one(rehearsed):
    cases = [
        HeadCase(SIZES, "layer", "channels"),
        HeadCase(SIZES, "layer", "pairs"),
        HeadCase(SIZES, "layer", "channels", offset=1),
        HeadCase(SIZES, "layer", "channels", halves=True),
        HeadCase(SIZES, "layer", "channels", heads_first=True),
        HeadCase(SIZES, "rms", "channels"),
        HeadCase(SIZES, "rounded", "channels"),
        HeadCase(SIZES, "bare", "channels"),
        HeadCase(SIZES, "tokens", "channels"),
        HeadCase(SIZES, "layer"),
        HeadCase((2, 8, 3, 16), "layer", "channels"),
    ]
    for case in cases:
        norm_rope(*case.draw(torch.bfloat16))
    assert len(door._slots) == len(cases)
    x, norm, rope = HeadCase(SIZES, "layer", "complex").draw(torch.bfloat16)
    for other in (
        (x, norm, rope),
        (x, norm, replace(rope, cosine=rope.cosine.conj())),
        (torch._neg_view(x), norm, rope),
    ):
        door._slot(*other)
    assert len(door._slots) == len(cases) + 3
    for case in cases:
        norm_rope(*case.draw(torch.bfloat16))
    assert len(door._slots) == len(cases) + 3


def loss(x, norm, rope):
    return norm_rope(x, norm, rope).float().square().sum()


def transformed(x, norm, rope):
    """Results of `torch.func` and forward-mode AD around `norm_rope`."""
    tangent = torch.ones_like(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        forward = torch.autograd.forward_ad.unpack_dual(norm_rope(dual, norm, rope)).tangent
    return (
        torch.func.grad(loss)(x, norm, rope),
        torch.func.vmap(partial(norm_rope, norm=norm, rope=rope))(x[None]),
        *torch.func.jvp(partial(norm_rope, norm=norm, rope=rope), (x,), (tangent,)),
        forward,
    )


def test_inside_of_transforms_pytorchs_operators_run(request):
    x, norm, rope = HeadCase(SIZES, "layer", "channels").draw(torch.bfloat16)
    expected = transformed(x, norm, rope)
    gpu = request.getfixturevalue("rehearsed")
    for own, theirs in zip(transformed(x, norm, rope), expected, strict=True):
        assert torch.equal(own, theirs)
    assert not gpu.launched
