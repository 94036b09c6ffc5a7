"""QK-norm and RoPE: the specification against PyTorch and complex numbers, and the entry point."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from sage_kernels import qk_norm_rope as entry
from sage_kernels.qk_norm_rope import qk_norm_rope
from sage_kernels.reference import qk_norm_rope as reference
from sage_kernels.spec.qk_norm_rope import Norm, Rope
from tests.helpers.qk_norm_rope import CASES, QKNormRopeCase

SIZES = 2, 7, 3, 16


def draw(*sizes, dtype=torch.float64):
    return torch.randn(sizes or SIZES, dtype=dtype)


@pytest.mark.parametrize("across_heads", [False, True])
def test_norms_match_pytorch(across_heads):
    x, channels = draw(), 48 if across_heads else 16
    rows = x.flatten(2) if across_heads else x
    weight, bias = draw(channels), draw(channels)
    rms = reference.normalize(x, Norm("rms", 1e-3, weight, across_heads=across_heads))
    layer = reference.normalize(x, Norm("layer", 1e-3, weight, bias, across_heads))
    torch.testing.assert_close(rms, F.rms_norm(rows, (channels,), weight, 1e-3).view(SIZES))
    torch.testing.assert_close(layer, F.layer_norm(rows, (channels,), weight, bias, 1e-3).view(SIZES))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("repeated", [False, True])
def test_rope_is_a_product_of_complex_numbers(halves, repeated):
    x, angles = draw(), draw(7, 8)
    pairs = x.unflatten(-1, (2, 8)).transpose(-1, -2) if halves else x.unflatten(-1, (8, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(7, 8).double(), angles)[:, None]
    expected = torch.view_as_real(turned)
    expected = expected.transpose(-1, -2).flatten(-2) if halves else expected.flatten(-2)
    if repeated:
        angles = torch.cat((angles, angles), -1) if halves else angles.repeat_interleave(2, -1)
    torch.testing.assert_close(reference.apply_rope(x, Rope(angles.cos(), angles.sin(), halves=halves)), expected)


@pytest.mark.parametrize("offset", [-9, -3, 0, 2, 9])
def test_tokens_without_a_row_are_not_rotated(offset):
    x, angles = draw(), draw(5, 8)
    output = reference.apply_rope(x, Rope(angles.cos(), angles.sin(), offset))
    for token in range(7):
        row = token + offset
        one = x[:, token : token + 1]
        if 0 <= row < 5:
            table = angles[row : row + 1]
            one = reference.apply_rope(one, Rope(table.cos(), table.sin()))
        assert torch.equal(output[:, token : token + 1], one)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_entry_point_runs_the_reference_on_a_cpu(case: QKNormRopeCase):
    x, norm, rope = case.draw(torch.bfloat16)
    assert torch.equal(qk_norm_rope(x, norm, rope), reference.qk_norm_rope(x, norm, rope))


def test_gradients_of_the_reference_are_right():
    x, weight, bias = (one.requires_grad_() for one in (draw(), draw(16), draw(16)))
    angles = draw(7, 8)

    def attended(x, weight, bias):
        return reference.qk_norm_rope(x, Norm("layer", 1e-3, weight, bias), Rope(angles.cos(), angles.sin(), 1))

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
def test_a_wrong_grid_or_sparsity_is_refused(norm, rope, message):
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(draw(), norm, rope)


def test_tensors_on_several_devices_are_refused():
    weight = draw(16).to("meta")
    with pytest.raises(ValueError, match="x is on cpu, and norm or RoPE on meta"):
        qk_norm_rope(draw(), Norm("rms", 1e-5, weight))


def test_tables_that_want_gradients_get_them():
    angles = draw(7, 8).requires_grad_()
    output = qk_norm_rope(draw(), rope=Rope(angles.cos(), angles.sin()))
    output.square().sum().backward()
    assert angles.grad.shape == (7, 8)


@pytest.mark.parametrize("x", [draw(7, 16), torch.ones(SIZES, dtype=torch.int64)], ids=["two axes", "integers"])
def test_only_heads_of_floats_are_taken(x):
    with pytest.raises(ValueError, match="x must be"):
        qk_norm_rope(x)


def test_no_tokens_give_no_tokens():
    x, weight = draw(2, 0, 3, 16).requires_grad_(), draw(16).requires_grad_()
    output = qk_norm_rope(x, Norm("rms", 1e-5, weight), Rope(draw(5, 8), draw(5, 8)))
    output.sum().backward()
    assert output.shape == x.grad.shape == x.shape and not weight.grad.any()


@pytest.mark.parametrize("known", [False, True])
def test_a_tensor_whose_memory_was_freed_is_refused(known):
    x, norm, rope = QKNormRopeCase(SIZES, "layer", "channels").draw(torch.bfloat16)
    for _ in range(3 * known):
        qk_norm_rope(x, norm, rope)
    for freed in (x, norm.weight, rope.cosine):
        size = freed.untyped_storage().nbytes()
        freed.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="no memory"):
            qk_norm_rope(x, norm, rope)
        freed.untyped_storage().resize_(size)


def loss(x, norm, rope):
    return qk_norm_rope(x, norm, rope).float().square().sum()


def transformed(x, norm, rope):
    """Results of `torch.func` and forward-mode AD around `qk_norm_rope`."""
    tangent = torch.ones_like(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        forward = torch.autograd.forward_ad.unpack_dual(qk_norm_rope(dual, norm, rope)).tangent
    return (
        torch.func.grad(loss)(x, norm, rope),
        torch.func.vmap(partial(qk_norm_rope, norm=norm, rope=rope))(x[None]),
        *torch.func.jvp(partial(qk_norm_rope, norm=norm, rope=rope), (x,), (tangent,)),
        forward,
    )


def test_inside_of_transforms_pytorchs_operators_run(monkeypatch):
    x, norm, rope = QKNormRopeCase(SIZES, "layer", "channels").draw(torch.bfloat16)
    expected = transformed(x, norm, rope)
    monkeypatch.setattr(entry, "select_qk_norm_rope_kernel", None)  # no other kernel is asked for
    for own, theirs in zip(transformed(x, norm, rope), expected, strict=True):
        assert torch.equal(own, theirs)
