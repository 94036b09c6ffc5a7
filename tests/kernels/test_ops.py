"""The operator: schema, compiler, and the promise that it is forward only and says so."""

import gc
import itertools
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.bias import causal_lower_right

import sage_kernels
from sage_kernels import ops, training
from sage_kernels.dispatch import execution
from sage_kernels.exact import sdpa
from sage_kernels.packed import attend_packed
from sage_kernels.reference import forward as reference
from sage_kernels.spec.arguments import OperatorArguments
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.options import Options
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.blocks import draw_blocks
from tests.helpers.calls import draw_tensors, new_call, pack
from tests.helpers.kernels import FakeForward, preferred, refuse_packed


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.audit), torch.bfloat16])
@pytest.mark.parametrize(
    ("recipe", "return_lse"),
    [
        pytest.param(*case, marks=() if case in (("sage3", True), ("exact", False)) else pytest.mark.audit)
        for case in itertools.product(("sage3", "sage2", "sage1", "sage_bwd", "exact"), (False, True))
    ],
)
def test_opcheck_passes(dtype, recipe, return_lse):
    keys = torch.ones(2, 1, 1, 90, dtype=torch.bool)
    for mask, is_causal in ((None, True), (keys, False)):
        options = Options(is_causal, recipe=recipe, return_lse=return_lse)
        torch.library.opcheck(
            torch.ops.sage_kernels.attention.default,
            (*draw_tensors(dtype=dtype), mask, *OperatorArguments.of(None, None, options)),
        )


@pytest.mark.parametrize("recipe", ["sage3", "exact"])
def test_the_output_is_laid_out_so_that_merging_heads_is_free(recipe):
    output, _ = ops.attention(*draw_tensors(), recipe=recipe)
    assert output.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("recipe", ["sage3", "sage_bwd"])
def test_backward_raises_instead_of_cutting_the_gradient(recipe):
    query, key, value = draw_tensors()
    output, _ = ops.attention(query.requires_grad_(), key, value, recipe=recipe)
    with pytest.raises(NotImplementedError, match="forward only"):
        output.sum().backward()


def test_forward_mode_raises_instead_of_cutting_the_tangent():
    query, key, value = draw_tensors()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: ops.attention(x, key, value)[0], (query,), (query,))
    packed, sequences = [x[0].transpose(0, 1) for x in (query, key, value)], (pack([70]), pack([90]), 70, 90)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: ops.packed_attention(x, *packed[1:], *sequences)[0], (packed[0],), (packed[0],))


@pytest.mark.parametrize("recipe", ["sage3", "sage2", "sage1", "sage_bwd", "exact"])
@pytest.mark.parametrize("offset", [0, 20, -30])
def test_a_causal_offset_moves_the_diagonal(recipe, offset):
    """20 = kv_len - q_len: aligned lower right, as decoding is. The first 30 rows of -30 may attend to nothing."""
    inputs = draw_tensors()
    seen = torch.ones(70, 90, dtype=torch.bool).tril(offset)
    output, lse = ops.attention(*inputs, is_causal=True, causal_offset=offset, recipe=recipe, return_lse=True)
    truth, truth_lse = sdpa.attention(*inputs, mask=seen[None, None])
    expected, _ = (
        reference.attention(*inputs, RECIPES[recipe], is_causal=True, causal_offset=offset)
        if recipe != "exact"
        else (truth, None)
    )
    assert (output - truth).abs().sum() <= 1.01 * (expected - truth).abs().sum() + 1e-5 * truth.abs().sum()
    assert torch.equal(lse == -torch.inf, truth_lse == -torch.inf)
    assert not output[:, :, : max(0, -offset)].any()


def test_pytorchs_causal_bias_moves_the_diagonal_too():
    inputs = draw_tensors()
    expected = ops.attention(*inputs, is_causal=True, causal_offset=20, recipe="sage1")[0]
    assert torch.equal(ops.attention(*inputs, mask=causal_lower_right(70, 90), recipe="sage1")[0], expected)


@pytest.mark.parametrize("recipe", ["sage3", "sage2", "sage1", "sage_bwd", "exact"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_match_separate_sequences(recipe, is_causal):
    q_lengths, kv_lengths, used = [70, 1, 0, 64], [90, 33, 70, 128], [80, 33, 70, 0]
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(sum(lengths), heads, 32, generator=generator)
        for lengths, heads in ((q_lengths, 4), (kv_lengths, 2), (kv_lengths, 2))
    )
    output, lse = ops.packed_attention(
        query, key, value, pack(q_lengths), pack(kv_lengths), 70, 128,
        seqused_k=torch.tensor(used, dtype=torch.int32), is_causal=is_causal, recipe=recipe, return_lse=True,
    )  # fmt: skip
    first_q = first_k = 0
    for q_len, kv_len, length in zip(q_lengths, kv_lengths, used, strict=True):
        rows = slice(first_q, first_q + q_len)
        parts = query[rows], key[first_k : first_k + length], value[first_k : first_k + length]
        expected, expected_lse = ops.attention(
            *(part.transpose(0, 1).unsqueeze(0) for part in parts), is_causal=is_causal, recipe=recipe,
            fallback="emulate", return_lse=True,
        )  # fmt: skip
        assert torch.equal(output[rows], expected[0].transpose(0, 1))
        assert torch.equal(lse[:, rows], expected_lse[0])
        first_q, first_k = first_q + q_len, first_k + kv_len


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fallback", ["native", "emulate", "error"])
@pytest.mark.parametrize("entry_point", ["operator", "attend_packed"])
def test_packed_sequences_run_one_by_one_by_a_kernel_that_takes_batches_only(entry_point, fallback, compiled):
    """Hopper without Triton has such a kernel; a sequence that is too short for low bits alone runs exactly."""
    ran, plans, q_lengths, kv_lengths = [], [], [70, 1, 64], [90, 33, 128]
    query, key, value = (torch.randn(sum(n), 2, 32) for n in (q_lengths, kv_lengths, kv_lengths))
    sizes = pack(q_lengths), pack(kv_lengths), 70, 128
    lengths = Lengths(*sizes)

    def packed(*tensors):
        if entry_point == "operator":
            return ops.packed_attention(*tensors, *sizes, recipe="sage1", fallback=fallback, return_lse=True)
        return attend_packed(*tensors, lengths, Options(recipe="sage1", fallback=fallback, return_lse=True))

    kernel = FakeForward("batches", "sage1", reason=refuse_packed, ran=ran.append)
    with preferred(kernel), mock.patch.object(execution, "plan_listeners", [plans.append]):
        run = torch.compile(packed, backend="aot_eager", fullgraph=True) if compiled else packed
        output, lse = run(query, key, value)
        kernels = ["batches", "sdpa" if fallback == "native" else "batches", "batches"]
        assert [plan.kernel for plan in plans] == kernels and ran == [name for name in kernels if name != "sdpa"]
        parts = zip(*(x.split(n) for x, n in ((query, q_lengths), (key, kv_lengths), (value, kv_lengths))), strict=True)
        alone = [
            ops.attention(*(x.transpose(0, 1)[None] for x in part), recipe="sage1", fallback=fallback, return_lse=True)
            for part in parts
        ]
    assert torch.equal(output, torch.cat([one[0].transpose(0, 1) for one, _ in alone]))
    assert torch.equal(lse, torch.cat([of_rows[0] for _, of_rows in alone], 1))


@pytest.mark.parametrize("recipe", ["exact", "sage_bwd"])
def test_compiled_lengths_that_do_not_fit_are_refused_whoever_runs_them(recipe):
    tokens, starts = torch.randn(70, 2, 64, requires_grad=True), torch.tensor([0, 40, 30])
    attend = torch.compile(attend_packed, backend="aot_eager")
    with pytest.raises(ValueError, match="cu_seqlens_q must begin at 0, never decrease"):
        attend(tokens, tokens, tokens, Lengths(starts, starts, 70, 70), Options(recipe=recipe))


def attend_packed_to(tokens, starts, longest, recipe):
    return attend_packed(
        tokens, tokens, tokens, Lengths(starts, starts, longest, longest), Options(True, recipe=recipe)
    )


def attend_behind_cache(tokens, starts, longest, recipe):
    key = tokens.transpose(0, 1)[None]
    return ops.attention(key[:, :, -20:], key, key, is_causal=True, causal_offset=key.shape[2] - 20, recipe=recipe)


@pytest.mark.parametrize(
    ("attend", "recipe", "grad"),
    [
        (attend_packed_to, "sage2", False),
        (attend_packed_to, "sage_bwd", True),
        (attend_packed_to, "exact", True),  # one by one, and between two graphs: as many calls take minutes to compile
        (attend_behind_cache, "sage2", False),
    ],
)
def test_other_lengths_and_offsets_need_no_other_graph(attend, recipe, grad):
    """The first graph is for its sizes alone, the second for all sizes."""
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=graphs, fullgraph=recipe != "exact")
    for lengths in ([70, 3, 20], [40, 95], [31, 0, 77, 64], [33] * 5):
        tokens, starts = torch.randn(sum(lengths), 2, 16, requires_grad=grad), pack(lengths)
        expected, output = (run(tokens, starts, max(lengths), recipe)[0] for run in (attend, compiled))
        assert torch.equal(output, expected)
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("list_batch", [2, 1])
def test_packed_sequences_that_run_one_by_one_have_lists_of_their_own(list_batch):
    query, key, value = torch.randn(3, 230, 2, 64).unbind()
    starts, blocks = pack([130, 100]), draw_blocks(list_batch, 2, 140, 140, 64, 64)
    packed = partial(ops.packed_attention, query, key, value, starts, starts, 140, 140, recipe="sage1", blocks=blocks)
    expected, _ = packed(fallback="emulate")
    ran = []
    with preferred(FakeForward("batches", "sage1", reason=refuse_packed, ran=ran.append)):
        assert torch.equal(packed()[0], expected) and len(ran) == 2


def test_opcheck_passes_for_packed_sequences():
    inputs = [x[:1] for x in draw_tensors()]
    lengths = Lengths(pack([30, 40]), pack([50, 40]), 40, 50, torch.tensor([45, 40], dtype=torch.int32))
    arguments = OperatorArguments.of(None, lengths, Options(True, recipe="sage2", return_lse=True))
    torch.library.opcheck(torch.ops.sage_kernels.attention.default, (*inputs, None, *arguments))


KINDS = {
    "integers": (lambda x: x.to(torch.int8), "torch.int8; expected a dense one of float16, bfloat16 or float32"),
    "bools": (lambda x: x > 0, "torch.bool; expected a dense one"),
    "sparse": (lambda x: x.to_sparse(), "sparse_coo tensor"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "nested tensor"),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "nested tensor"),
    "lists": (lambda x: x.tolist(), "must be tensors; got list"),
}


@pytest.mark.parametrize("entry", [ops.attention, training.attention, ops.packed_attention, training.packed_attention])
@pytest.mark.parametrize(("change", "message"), KINDS.values(), ids=KINDS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_kinds_of_tensors_are_refused_with_what_is_taken(entry, change, message):
    inputs = draw_tensors()
    lengths = ()
    if entry in (ops.packed_attention, training.packed_attention):
        inputs, lengths = [x[0].transpose(0, 1) for x in inputs], (pack([70]), pack([90]), 70, 90)
    with pytest.raises(TypeError, match=message):
        entry(*(change(x) for x in inputs), *lengths)
    for scale, error in (("a", TypeError), (True, TypeError), (torch.ones(()), TypeError), (float("inf"), ValueError)):
        with pytest.raises(error, match="scale must be"):
            entry(*inputs, *lengths, scale=scale)


def test_a_mask_of_another_kind_is_refused():
    mask = torch.ones(2, 1, 1, 90, dtype=torch.int32)
    for bad in (mask, mask.bool().to_sparse()):
        with pytest.raises(TypeError, match=r"mask is a .*expected a dense one, bool"):
            ops.attention(*draw_tensors(), mask=bad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("q_lengths", "kv_lengths"), [([], []), ([0, 0], [5, 70]), ([70, 3], [0, 0])])
def test_packed_calls_without_elements_give_nothing_in_querys_dtype(recipe, q_lengths, kv_lengths):
    query = torch.randn(sum(q_lengths), 4, 64, dtype=torch.float16)
    key, value = (torch.randn(sum(kv_lengths), 2, d, dtype=torch.float16) for d in (64, 32))
    lengths = (pack(q_lengths), pack(kv_lengths), max(q_lengths, default=0), max(kv_lengths, default=0))
    output, lse = ops.packed_attention(query, key, value, *lengths, recipe=recipe, return_lse=True)
    assert (output.shape, output.dtype) == ((sum(q_lengths), 4, 32), torch.float16)
    assert (lse.shape, lse.dtype) == ((4, sum(q_lengths)), torch.float32)
    assert not output.any()
    if RECIPES[recipe].backward is not None:
        output = training.packed_attention(query, key, value, *lengths, recipe=recipe)
        assert (output.shape, output.dtype) == ((sum(q_lengths), 4, 32), torch.float16)


def test_the_package_opens_the_doors_of_its_operators():
    assert sage_kernels.attention is ops.attention
    assert sage_kernels.packed_attention is ops.packed_attention
    assert sage_kernels.training_attention is training.attention
    assert sage_kernels.packed_training_attention is training.packed_attention


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kv_len", [20, 300])
def test_a_call_lets_its_tensors_go_at_once(recipe, kv_len):
    """Memory of tensors that only a cycle of references holds comes back when the garbage collector runs, if ever."""
    query = torch.randn(1, 2, 20, 16)
    call = new_call(query, *torch.randn(2, 1, 2, kv_len, 16).unbind(), recipe).for_kernel()
    watched = weakref.ref(call)
    assert call.tail.kv_len == kv_len - call.first_keys
    gc.disable()
    try:
        del call
        assert watched() is None
    finally:
        gc.enable()
