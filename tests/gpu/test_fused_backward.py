"""The fused backward kernel of Hopper: in every call that it serves, gradients are as near to exact attention's as the
reference's; where PyTorch is to be deterministic they repeat to the bit."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from sage_hf import sage_attention
from sage_kernels.cuda import int8_backward, item_order
from sage_kernels.cuda.registration import CudaInt8Backward
from sage_kernels.dispatch import execution
from sage_kernels.dispatch.registry import get_backward
from sage_kernels.dispatch.select import select
from sage_kernels.reference import backward as reference_backward
from sage_kernels.replay import cache
from sage_kernels.replay.cache import are_equal_to_rounding, are_same
from tests.helpers.judge_training import Draw, GradientErrors, TrainingCall, assert_equal, judge_training
from tests.helpers.layouts import LAYOUTS, lay_out
from tests.helpers.pairwise import pairwise
from tests.helpers.random_training_calls import GROUPS, KINDS, run

FUSED = CudaInt8Backward.name
# Of Q and of K. Tiles have 64 queries, blocks 128 keys.
LENGTHS = ((300, 300), (1, 1), (1, 300), (300, 1), (63, 65), (64, 64), (65, 129), (129, 63), (128, 128), (127, 257))
DIMS = ((128,), (64,), (80,), (40,), (72, 128), (56, 48))
SUMS = tuple(int8_backward.SUMS)


@pytest.fixture(autouse=True)
def served(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    request = execution.request_of(Draw(device).call("sage_bwd", 1, 2, 1, 200, 300, 128).forward, grad=True)
    if reason := get_backward(FUSED).unsupported(request):
        pytest.skip(reason)


@contextmanager
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def summed_in(sums: torch.dtype):
    """Let dQ be summed in a dtype, also where the kernel would choose another."""
    return mock.patch.object(int8_backward, "sums_dtype", lambda *_: sums)


def gradients(call: TrainingCall, sums: torch.dtype = torch.int32, kept=None) -> tuple[torch.Tensor, ...]:
    output, saved = kept or execution.attend_and_save(call.forward, "error")
    with summed_in(sums):
        return get_backward(FUSED).backward(call.backward(output, saved))


def judge(call: TrainingCall, sums: torch.dtype | None = None) -> GradientErrors:
    """Judge gradients whose sums are in the dtype that the kernel chooses, or in a given one."""
    with nullcontext() if sums is None else summed_in(sums):
        return judge_training(call, FUSED)


@pytest.mark.parametrize("dims", [*DIMS, (60,), (128, 64), (32,), (256,)], ids=str)
def test_calls_of_any_length_take_the_kernel_if_it_serves_their_head_dim(dims, device):
    for q_len in (200, 4096):
        call = Draw(device).call("sage_bwd", 1, 2, 1, q_len, 300, *dims).forward
        assert select(execution.request_of(call, grad=True)).backward == (FUSED if dims in DIMS else "int8_backward")


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [128, 64])
def test_gradients_are_near_the_references(head_dim, is_causal, dtype, sums, device):
    judge(Draw(device, dtype=dtype).call("sage_bwd", 2, 4, 2, 700, 650, head_dim, is_causal=is_causal), sums)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("lengths", "dims", "is_causal", "sums"), pairwise(LENGTHS, DIMS, [False, True], SUMS), ids=str
)
def test_gradients_are_near_the_references_at_every_length(lengths, dims, is_causal, sums, device):
    judge(Draw(device).call("sage_bwd", 2, 4, 2, *lengths, *dims, is_causal=is_causal), sums)


@pytest.mark.parametrize(("group", "head_dim"), pairwise(range(1, 9), [64, 128]))
def test_queries_that_share_keys_are_summed(group, head_dim, device):
    judge(Draw(device).call("sage_bwd", 1, 2 * group, 2, 200, 333, head_dim, is_causal=True, causal_offset=133))


@pytest.mark.parametrize("causal_offset", [1, 64, 167, 500, -64, -200, -333, 10**9, -(10**9)])
def test_causality_may_have_an_offset(causal_offset, device):
    judge(Draw(device).call("sage_bwd", 1, 4, 2, 333, 500, 128, is_causal=True, causal_offset=causal_offset))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [GROUPS[0], GROUPS[1]], ids=str)
def test_random_calls_with_padding_and_packed_sequences(group, kind, device):
    for index in range(4):
        run(group, kind, index, 3, device, FUSED)


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_and_keys_that_attend_to_nothing_have_gradient_0(head_dim, sums, device):
    call = Draw(device).call("sage_bwd", 3, 4, 2, 200, 300, head_dim)
    key_mask = torch.ones(3, 300, dtype=torch.bool, device=device)
    key_mask[0], key_mask[1, 100:250], key_mask[2, :131] = False, False, False
    call = replace(call, key_mask=key_mask)
    judge(call, sums)
    kept = execution.attend_and_save(call.forward, "error")
    expected = gradients(call, sums, kept)
    call.value.transpose(1, 2)[~key_mask] = torch.nan  # that such keys hold must not count
    query, key, value = found = gradients(call, sums, kept)
    assert_equal(found[1:], expected[1:])
    assert (are_same if sums == torch.int32 else are_equal_to_rounding)(found[:1], expected[:1])
    assert not query[0].any()
    for x in (key, value):
        assert not x.transpose(1, 2)[~key_mask].any()


@pytest.mark.parametrize(
    ("sizes", "layout", "padded"), pairwise([(64, 256, 320), (128, 320, 200), (128, 200, 320)], LAYOUTS, [False, True])
)
def test_gradients_do_not_depend_on_how_tensors_lie_in_memory(sizes, layout, padded, device):
    head_dim, q_len, kv_len = sizes
    call = Draw(device).call("sage_bwd", 2, 4, 2, q_len, kv_len, head_dim, is_causal=padded)
    if padded:
        call = replace(call, key_mask=Draw(device).uniform(2, kv_len) < 0.7)
    names = ("value", "output_gradient")
    laid_out = replace(call, **{name: lay_out(getattr(call, name), layout) for name in names})
    plain = replace(call, **{name: getattr(laid_out, name).contiguous() for name in names})
    kept = execution.attend_and_save(plain.forward, "error")
    assert_equal(gradients(laid_out, kept=kept), gradients(plain, kept=kept))


@pytest.mark.parametrize(("head_dim", "is_causal"), pairwise([64, 128], [False, True]))
def test_reruns_are_equal_to_the_bit_where_pytorch_is_deterministic(head_dim, is_causal, device):
    """DK and dV are so always."""
    call = Draw(device).call("sage_bwd", 2, 8, 4, 2000, 2000, head_dim, is_causal=is_causal)
    kept = execution.attend_and_save(call.forward, "error")
    backward = partial(get_backward(FUSED).backward, call.backward(*kept))
    with deterministic():
        fixed = backward()
        for _ in range(20):
            assert_equal(backward(), fixed)
    for sums in (torch.float32, torch.float16):
        for _ in range(20):
            assert_equal(gradients(call, sums, kept)[1:], fixed[1:])


def test_gradients_are_replayed_though_sums_are_taken_in_any_order(device, caplog):
    cache._warn.cache_clear()
    tensors = [torch.randn(1, 3, 1031, 128, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    found = []
    for _ in range(4):
        output = sage_attention(*tensors, recipe="sage_bwd", fallback="error")
        found.append(torch.autograd.grad(output.square().sum(), tensors))
    assert not caplog.records  # of calls that are not replayed
    assert all(are_equal_to_rounding(gradients, found[0]) for gradients in found)


@pytest.mark.parametrize("sums", [torch.int32, torch.float16])
@pytest.mark.parametrize("magnitude", [2.0**-60, 2.0**-20, 2.0**40])
def test_scaled_sums_fit_gradients_of_any_size(magnitude, sums, device):
    """Float16 takes one block of keys, so that sums have one order."""
    call = Draw(device).call("sage_bwd", 1, 2, 1, 300, 400 if sums == torch.int32 else 128, 128)
    kept = execution.attend_and_save(call.forward, "error")
    expected = gradients(call, sums, kept)
    found = gradients(replace(call, output_gradient=call.output_gradient * magnitude), sums, kept)
    assert_equal(found, tuple(x * magnitude for x in expected))


@pytest.mark.parametrize("kv_len", [700, int8_backward.FLOAT16_KEYS])
@pytest.mark.parametrize("loud", ["", "value", "key", "both"])
def test_sums_in_float16_serve_rows_of_any_size_next_to_each_other(loud, kv_len, device):
    """Elements of dO are 1e-6 to 1e4; a token and a channel of V, and a channel of K, are far larger than others."""
    draw = Draw(device)
    call = draw.call("sage_bwd", 1, 2, 1, 300, kv_len, 128)
    call.output_gradient.mul_(10 ** (draw.uniform(1, 2, 300, 1) * 10 - 6))
    if loud in ("value", "both"):
        call.value[:, :, 140] *= 50
        call.value[..., 7] *= 50
    if loud in ("key", "both"):
        call.key[..., 5] *= 30
    kept = execution.attend_and_save(call.forward, "error")
    expected, others = gradients(call, torch.float32, kept), gradients(call, torch.float16, kept)
    assert_equal(others[1:], expected[1:])
    distance, size = ((x.double().abs().sum(-1)) for x in (others[0] - expected[0], expected[0]))
    assert (distance <= 0.02 * size).all()
    assert distance.sum() <= 0.006 * size.sum()
    judge(call, torch.float16)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sums_in_float16_are_as_near_to_exact_attention_as_the_reference(is_causal, device):
    call = Draw(device).call("sage_bwd", 1, 2, 1, 2048, 20000, 128, is_causal=is_causal, causal_offset=17952)
    assert int8_backward.sums_dtype(128, torch.bfloat16, 20000) == torch.float16
    judge(call).assert_as_small_as_the_references()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("head_dim", "is_causal", "causal_offset"), [(128, False, 0), (64, True, 0), (128, True, -70)])
def test_a_bad_gradient_spoils_the_same_elements_as_in_the_reference(bad, head_dim, is_causal, causal_offset, device):
    """Its query and K of the keys that its row sees; V's channel of those, and of others in tiles of 64."""
    call = Draw(device).call("sage_bwd", 1, 4, 2, 300, 500, head_dim, is_causal=is_causal, causal_offset=causal_offset)
    kept = execution.attend_and_save(call.forward, "error")
    clean = gradients(call, kept=kept)
    call.output_gradient[0, 1, 140, 7] = bad
    found, expected = gradients(call, kept=kept), reference_backward.backward(call.backward(*kept))
    for x, y, of_reference in zip(found[:2], clean[:2], expected[:2], strict=True):
        spoiled = ~of_reference.isfinite().all(-1)
        assert torch.equal(~x.isfinite().all(-1), spoiled)
        assert torch.equal(x[~spoiled], y[~spoiled])
    may_be_spoiled = torch.zeros_like(clean[2], dtype=torch.bool)
    may_be_spoiled[0, 0, : 256 if is_causal else 500, 7] = True
    assert torch.equal(found[2][~may_be_spoiled], clean[2][~may_be_spoiled])
    for sums in (torch.float32, torch.float16):
        for x, y in zip(found, gradients(call, sums, kept), strict=True):
            assert torch.equal(x.isfinite(), y.isfinite())


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("position", ["value", "key", "query"])
def test_a_bad_input_spoils_the_same_elements_as_in_the_reference(position, bad, sums, device):
    call = Draw(device).call("sage_bwd", 1, 4, 2, 300, 500, 128)
    getattr(call, position)[0, 1, 140, 7] = bad
    kept = execution.attend_and_save(call.forward, "error")
    query, expected = gradients(call, sums, kept)[0], reference_backward.backward(call.backward(*kept))[0]
    assert torch.equal(query.isfinite().all(-1), expected.isfinite().all(-1))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_do_not_depend_on_how_many_heads_are_worked_through_together(monkeypatch, head_dim, device):
    call = Draw(device).call("sage_bwd", 3, 6, 2, 700, 600, head_dim, is_causal=True)
    kept = execution.attend_and_save(call.forward, "error")
    expected = gradients(call, kept=kept)
    for heads in (1, 4, 5, 100):
        monkeypatch.setattr(item_order, "key_heads_at_once", lambda *_, heads=heads: heads)
        assert_equal(gradients(call, kept=kept), expected)


@pytest.mark.parametrize(("head_dim", "kv_len", "is_causal"), pairwise([64, 128, 40], [256, 200], [False, True]))
def test_blocks_of_keys_may_be_split(monkeypatch, head_dim, kv_len, is_causal, device):
    """The blocks are the last of several rounds of the multiprocessors, or fewer than the multiprocessors."""
    whole = torch.cuda.get_device_properties(device).multi_processor_count // 2
    for heads in (3, whole + 1):
        call = Draw(device).call("sage_bwd", 1, 2 * heads, heads, 600, kv_len, head_dim, is_causal=is_causal)
        kept = execution.attend_and_save(call.forward, "error")
        with monkeypatch.context() as patch:
            patch.setattr(item_order, "parts_of_key_blocks", lambda *_: 1)
            expected = gradients(call, kept=kept)
        parts = 1 if is_causal and heads > whole else min(item_order.MOST_PARTS, 20 // item_order.STEPS_OF_PART)
        assert item_order.parts_of_key_blocks(call.backward(*kept), 2 * whole, steps=20) == parts
        query, *others = gradients(call, kept=kept)
        assert torch.equal(query, expected[0])  # sums of integers
        for x, y in zip(others, expected[1:], strict=True):
            torch.testing.assert_close(x, y, rtol=0.01, atol=1e-3 * y.abs().max().item())


@pytest.mark.parametrize(("head_dim", "is_causal"), pairwise([128, 64], [False, True]))
def test_long_sequences_are_as_near_to_exact_attention_as_the_reference(head_dim, is_causal, device):
    call = Draw(device).call("sage_bwd", 1, 4, 2, 4113, 4113, head_dim, is_causal=is_causal)
    judge_training(call, FUSED).assert_as_small_as_the_references()
