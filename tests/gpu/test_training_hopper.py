"""The two forms of the backward kernels, plain and Hopper's, compute the same gradients of what a forward kept."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from sage_kernels.dispatch import execution
from sage_kernels.dispatch.registry import get_backward, get_forward, get_quantizer
from sage_kernels.dispatch.select import select
from sage_kernels.language.launch import recording
from sage_kernels.reference import backward as reference_backward
from sage_kernels.spec.layout import natural_order, padded_channels
from sage_kernels.spec.operands import Saved
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.judge_training import Draw, TrainingCall, assert_equal, judge_training
from tests.helpers.layouts import LAYOUTS, lay_out
from tests.helpers.pairwise import pairwise
from tests.helpers.random_training_calls import GROUPS, KINDS, run

gluon_backward = pytest.importorskip("sage_kernels.gluon.int8_backward", exc_type=ImportError)  # Triton 3.6

HOPPER, PLAIN = "int8_backward_hopper", "int8_backward"
RECIPE = RECIPES["sage_bwd"]
# Of Q and of K. Tiles have 64 tokens, programs 128.
LENGTHS = (
    (1, 1),
    (1, 300),
    (300, 1),
    (63, 65),
    (64, 64),
    (65, 63),
    (127, 129),
    (128, 128),
    (129, 127),
    (300, 300),
    (4113, 4113),
)


@pytest.fixture(autouse=True)
def hopper(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    request = execution.request_of(Draw(device).call("sage_bwd", 1, 2, 1, 200, 300, 128).forward, grad=True)
    if reason := get_backward(HOPPER).unsupported(request):
        pytest.skip(reason)


def forward(call: TrainingCall) -> tuple[torch.Tensor, Saved]:
    return get_forward("int8_forward").attend_and_save(call.forward, get_quantizer("int8_quantize"))


def backward(call: TrainingCall, output: torch.Tensor, saved: Saved, kernel: str = HOPPER) -> tuple[torch.Tensor, ...]:
    return get_backward(kernel).backward(call.backward(output, saved))


def difference_of_sums(call: TrainingCall, output: torch.Tensor, saved: Saved) -> tuple[torch.Tensor, ...]:
    """Bounds, for each head, of Σ|ΔdQ|, Σ|ΔdK| and Σ|ΔdV| between two orders of float32 sums.

    A matrix instruction adds 16 products to a sum, which it rounds towards 0: two orders of n products are apart by
    2·(n/16 + 1)·2⁻²³ of the sum of their magnitudes at most. That is dP over the channels, then a gradient over tokens.
    Scores are rounded once or twice, which moves a weight by 2⁻²⁴ of its score in base 2, which is below 64. What is
    rounded to 16 bit between those is on average as far apart after it as before.
    """
    head_dim = call.query.shape[3]
    q_len, kv_len = call.query.shape[2], call.key.shape[2]
    group = call.query.shape[1] // call.key.shape[1]
    scale = head_dim**-0.5
    query = (saved.query * saved.query_scale.unsqueeze(-1).double())[:, :, :q_len]
    key_scale = natural_order(saved.key_scale.double().flatten(-2).repeat_interleave(16, -1).unsqueeze(-1))
    key = (saved.key * key_scale)[:, :, :kv_len].repeat_interleave(group, 1)
    value = call.value.double().repeat_interleave(group, 1)
    gradient = call.output_gradient.double()
    p = (query @ key.mT * scale - saved.lse.double().unsqueeze(-1)).exp_()
    if call.is_causal:
        ones = torch.ones(q_len, kv_len, dtype=torch.bool, device=p.device)
        p.masked_fill_(~ones.tril(call.causal_offset), 0.0)
    p.masked_fill_(saved.lse.isneginf().unsqueeze(-1), 0.0)
    dp = gradient @ value.mT
    ds = (p * (dp - (gradient * output.double()).sum(-1, keepdim=True))).abs()

    def order(terms):
        return 2 * (terms / 16 + 1) * 2.0**-23

    def of_key_heads(x):
        return x.unflatten(1, (-1, group)).sum(2)

    scores = 64 * 2.0**-24
    ds_error = ds * scores + p * (gradient.abs() @ value.abs().mT) * order(value.shape[3])
    dv = of_key_heads(p.mT @ gradient.abs()) * (order(q_len * group) + scores)
    dk = of_key_heads((ds * order(q_len * group) + ds_error).mT @ query.abs()) * scale
    dq = (ds * order(kv_len) + ds_error) @ key.abs() * scale
    return tuple(x.sum((-2, -1)) for x in (dq, dk, dv))


def assert_forms_agree(call: TrainingCall) -> None:
    output, saved = forward(call)
    found, expected = (backward(call, output, saved, kernel) for kernel in (HOPPER, PLAIN))
    bounds = difference_of_sums(call, output, saved)
    for name, x, y, bound in zip(("query", "key", "value"), found, expected, bounds, strict=True):
        assert x.isfinite().all(), name
        # Of few elements, one that is rounded the other way is more than its share.
        rounding = torch.finfo(x.dtype).eps * y.double().abs().amax((-2, -1))
        distance = (x.double() - y).abs().sum((-2, -1))
        assert (distance <= bound + rounding).all(), (name, distance, bound, rounding)


@pytest.mark.parametrize("dims", [(64,), (80,), (128,), (128, 64)], ids=str)
def test_a_call_that_hoppers_kernels_serve_runs_them(dims, device):
    call = Draw(device).call("sage_bwd", 1, 2, 1, 200, 300, *dims)
    request = execution.request_of(call.forward, grad=True)
    served = {padded_channels(x) for x in dims} in ({64}, {128})
    assert (select(request).backward == PLAIN) != served
    assert (not get_backward(HOPPER).unsupported(request)) == served
    output, saved = forward(call)
    with recording() as launches:
        backward(call, output, saved, HOPPER if served else PLAIN)
    assert any(launch.kernel.__name__.startswith("hopper") for launch in launches) == served


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("channels", "lengths", "is_causal"),
    pairwise([(80, torch.float16), (128, torch.bfloat16), (64, torch.bfloat16)], LENGTHS, [False, True]),
)
def test_both_forms_agree_at_every_length(channels, lengths, is_causal, device):
    (head_dim, dtype), (q_len, kv_len) = channels, lengths
    heads = (1, 2, 1) if q_len > 4096 else (2, 4, 2)
    draw = Draw(device, dtype=dtype)
    assert_forms_agree(draw.call("sage_bwd", *heads, q_len, kv_len, head_dim, is_causal=is_causal))


@pytest.mark.parametrize(
    ("dims", "heads", "dtype"),
    pairwise([(80,), (128,), (120, 72), (64,), (40, 56)], [(4, 4), (6, 2), (8, 1)], [torch.float16, torch.bfloat16]),
)
def test_both_forms_agree_on_grouped_queries(dims, heads, dtype, device):
    assert_forms_agree(Draw(device, dtype=dtype).call("sage_bwd", 2, *heads, 300, 200, *dims, is_causal=True))


@pytest.mark.parametrize(
    ("sizes", "layout", "padded"), pairwise([(64, 256, 320), (128, 320, 200), (128, 200, 320)], LAYOUTS, [False, True])
)
def test_gradients_do_not_depend_on_where_tensors_are_read(sizes, layout, padded, device):
    """V and dO: where the caller has them, next to memory that holds NaN, or copies."""
    head_dim, q_len, kv_len = sizes
    call = Draw(device).call("sage_bwd", 2, 4, 2, q_len, kv_len, head_dim, is_causal=padded)
    if padded:
        valid = torch.ones(2, kv_len, dtype=torch.bool, device=device)
        valid[0, 150:], valid[1, :70] = False, False
        call.value.transpose(1, 2)[~valid] = torch.nan
        call = replace(call, valid=valid)
    tensors = {name: lay_out(getattr(call, name), layout) for name in ("value", "output_gradient")}
    call = replace(call, **tensors)
    output, saved = forward(call)
    found = backward(call, output, saved)
    with mock.patch.object(gluon_backward.TokenRows, "of", return_value=None):
        expected = backward(call, output, saved)
    assert all(x.isfinite().all() for x in found)
    assert_equal(found, expected)


@pytest.mark.parametrize("causal_offset", [1, 64, 300, -64, -200, 10**9, -(10**9)])
def test_both_forms_agree_on_causality_with_an_offset(causal_offset, device):
    call = Draw(device).call("sage_bwd", 1, 4, 2, 333, 500, 128, is_causal=True, causal_offset=causal_offset)
    clamped = max(-333, min(500, causal_offset))
    output, saved = forward(call)
    found, expected = backward(call, output, saved), backward(replace(call, causal_offset=clamped), output, saved)
    assert_equal(found, expected)
    assert_forms_agree(replace(call, causal_offset=clamped))


@pytest.mark.parametrize("kernel", [HOPPER, PLAIN])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("is_causal", "causal_offset"), [(False, 0), (True, 0), (True, -70)])
def test_a_bad_gradient_spoils_what_it_spoils_in_the_reference(kernel, bad, is_causal, causal_offset, device):
    """Its query and K of the keys that its row sees; V's channel of those, and of others in tiles of 64."""
    call = Draw(device).call("sage_bwd", 1, 4, 2, 300, 500, 128, is_causal=is_causal, causal_offset=causal_offset)
    seen = 141 + causal_offset if is_causal else 500
    output, saved = forward(call)
    clean = backward(call, output, saved, kernel)
    call.output_gradient[0, 1, 140, 7] = bad
    found = backward(call, output, saved, kernel)
    expected = reference_backward.backward(call.backward(output, saved))
    for x, y, of_reference in zip(found[:2], clean[:2], expected[:2], strict=True):
        spoiled = ~of_reference.isfinite().all(-1)
        assert torch.equal(~x.isfinite().all(-1), spoiled)
        assert torch.equal(x[~spoiled], y[~spoiled])
    may_be_spoiled = torch.zeros_like(clean[2], dtype=torch.bool)
    may_be_spoiled[0, 0, : 256 if is_causal else 500, 7] = True
    assert torch.equal(found[2][~may_be_spoiled], clean[2][~may_be_spoiled])
    for x in (found, expected):
        assert (~x[1].isfinite().all(-1)).sum() == seen
        assert not x[2][0, 0, :seen, 7].isfinite().any()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_do_not_depend_on_how_many_heads_are_worked_through_together(monkeypatch, head_dim, device):
    """Take groups of one head, groups of which the last has fewer, and all heads at once."""
    call = Draw(device).call("sage_bwd", 3, 6, 2, 700, 600, head_dim, is_causal=True)
    output, saved = forward(call)
    expected = backward(call, output, saved)
    for heads in (1, 4, 18, 100):
        monkeypatch.setattr(gluon_backward, "heads_together", lambda call, heads=heads: heads)
        assert_equal(backward(call, output, saved), expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_twenty_reruns_are_bitwise_equal(is_causal, device):
    call = Draw(device).call("sage_bwd", 2, 8, 4, 2000, 2000, 128, is_causal=is_causal)
    output, saved = forward(call)
    first = backward(call, output, saved)
    for _ in range(20):
        assert_equal(backward(call, output, saved), first)


@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences_are_as_near_to_exact_attention_as_the_reference(is_causal, device):
    call = Draw(device).call("sage_bwd", 1, 4, 2, 4113, 4113, 128, is_causal=is_causal)
    judge_training(call).assert_as_small_as_the_references()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [x for x in GROUPS if x.recipe == "sage_bwd" and x.head_dim == x.v_head_dim], ids=str)
def test_the_plain_kernels_still_serve_random_calls(group, kind, device):
    """Which on this GPU run Hopper's elsewhere."""
    for index in range(4):
        run(group, kind, index, 2, device, PLAIN)
