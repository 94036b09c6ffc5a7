"""The operators with gradients: what the kernel computes arrives, for the inputs that want it, and nothing is cut."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_kernels import ops, training
from sage_kernels.attend import attend as dense_attend
from sage_kernels.dispatch import execution, registry
from sage_kernels.dispatch.decide import decide
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.dispatch.verdicts import FAILED
from sage_kernels.exact.gradients import exact_gradients
from sage_kernels.packed import attend_packed
from sage_kernels.reference import backward as reference_backward
from sage_kernels.spec.call import NO_MASK, Mask
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.options import Options
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.blocks import draw_blocks
from tests.helpers.calls import draw_tensors, new_backward_call, new_call, pack
from tests.helpers.kernels import FakeBackward, FakeTraining, only_the_reference, preferred, refuse_packed

TRAINABLE = [name for name, recipe in RECIPES.items() if recipe.backward is not None]
OPTIONS = Options(recipe="sage_bwd")
NO_BLOCKS = (None, None, 0, 0)
NOTHING_PACKED = (None, None, 0, 0, None)


def draw(grad=True, **sizes):
    return [x.requires_grad_(grad) for x in draw_tensors(**sizes)]


def output_gradient(output):
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)


def padding(batch=2, kv_len=90):
    key_mask = torch.ones(batch, kv_len, dtype=torch.bool)
    key_mask[0, 71:] = False
    key_mask[-1, :13] = False
    return key_mask


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "causal_offset": -5, "scale": 0.2},
    "padding": {"key_mask": padding()},
    "causal padding": {"key_mask": padding(), "is_causal": True},
    "one padding for all": {"key_mask": padding(1)},
    "blocks": {"blocks": draw_blocks(2, 4, 70, 90, 64, 64)},
    "one list for all, causal padding": {
        "blocks": draw_blocks(1, 1, 70, 90, 64, 64, seed=3),
        "key_mask": padding(),
        "is_causal": True,
    },
}


@pytest.mark.parametrize("recipe", TRAINABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_output_and_gradients_equal_the_references(recipe, dtype, call):
    inputs = draw(dtype=dtype)
    output, _ = training.attention(*inputs, **call, recipe=recipe)
    gradients = torch.autograd.grad(output, inputs, output_gradient(output))
    detached = [x.detach() for x in inputs]
    expected, saved = reference_backward.forward(new_call(*detached, recipe, **call))
    expected_gradients = reference_backward.backward(
        new_backward_call(output_gradient(output), detached[2], expected, saved, recipe, 64, **call)
    )
    assert torch.equal(output, expected)
    for x, actual, wanted in zip(inputs, gradients, expected_gradients, strict=True):
        assert actual.dtype == dtype and actual.shape == x.shape
        assert actual.transpose(1, 2).is_contiguous()
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_lse_matches_inference_and_has_no_gradient(call):
    inputs = draw()
    _, lse = training.attention(*inputs, **call, return_lse=True)
    key_mask = call.get("key_mask")
    mask = None if key_mask is None else key_mask[:, None, None]
    options = {name: value for name, value in call.items() if name != "key_mask"}
    with torch.no_grad():
        _, expected = ops.attention(*inputs, mask=mask, **options, recipe="sage_bwd", return_lse=True)
    assert torch.equal(lse, expected)
    assert not lse.requires_grad
    assert training.attention(*inputs)[1].shape == (0,)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_inputs_that_want_no_gradient_get_none_and_change_nothing_of_the_others(wanted):
    everything = draw()
    output, _ = training.attention(*everything)
    expected = torch.autograd.grad(output, everything, output_gradient(output))
    inputs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(everything)]
    training.attention(*inputs)[0].backward(output_gradient(output))
    for i, x in enumerate(inputs):
        assert (x.grad is None) if i not in wanted else torch.equal(x.grad, expected[i])


def gradient_errors(recipe, offset):
    """Return |error| / |truth| of dQ, dK and dV of a causal call, against float64."""
    inputs = draw()
    options = Options(True, offset, recipe=recipe)
    output, _ = dense_attend(*inputs, None, None, options)
    gradients = torch.autograd.grad(output, inputs, output_gradient(output))
    with torch.no_grad():
        truths = exact_gradients(output_gradient(output), *inputs, is_causal=True, causal_offset=offset)[1:]
    return [((x - truth).norm() / truth.norm()).item() for x, truth in zip(gradients, truths, strict=True)]


@pytest.mark.parametrize("offset", [20, 7, -30])
def test_gradients_behind_a_causal_offset_are_as_exact_as_without_one(offset):
    """20 = kv_len - q_len: aligned lower right. The first 30 rows of -30 may attend to nothing."""
    for recipe in (*TRAINABLE, "exact"):
        aligned = gradient_errors(recipe, 0)
        assert all(x <= 2 * y for x, y in zip(gradient_errors(recipe, offset), aligned, strict=True)), recipe


def test_an_output_that_is_not_used_gives_no_gradient():
    inputs = draw()
    saved = torch.ops.sage_kernels.training_attention(
        *inputs, None, *NO_BLOCKS, *NOTHING_PACKED, False, 0, None, "sage_bwd", "native"
    )
    assert [tensor.requires_grad for tensor in saved] == [True, *[False] * 6]


def test_inputs_and_the_outputs_gradient_are_unchanged():
    inputs = draw()
    output, _ = training.attention(*inputs, key_mask=(key_mask := padding()))
    tensors = [*inputs, output, key_mask, gradient := output_gradient(output)]
    before = [x.detach().clone() for x in tensors]
    output.backward(gradient)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


@pytest.mark.parametrize("recipe", TRAINABLE)
@pytest.mark.parametrize("layout", ["expanded", "transposed", "strided"])
def test_strides_change_nothing(layout, recipe):
    inputs = draw()
    if layout == "expanded":
        inputs = [x.detach()[:1].expand(2, -1, -1, -1).requires_grad_() for x in inputs]
    elif layout == "transposed":
        inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    else:
        inputs = [x.detach().repeat_interleave(2, 2)[:, :, ::2].requires_grad_() for x in inputs]
    dense = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in inputs]
    for gradient in (torch.ones(1, 1, 1, 1).expand(2, 4, 70, 32), torch.randn(2, 70, 32, 4).permute(0, 3, 1, 2)):
        outputs = [training.attention(*some, recipe=recipe)[0] for some in (inputs, dense)]
        assert torch.equal(*outputs)
        strided = torch.autograd.grad(outputs[0], inputs, gradient)
        expected = torch.autograd.grad(outputs[1], dense, gradient.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(strided, expected, strict=True))


@pytest.mark.parametrize("recipe", TRAINABLE)
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}])
def test_nothing_to_attend_to_gives_zeros(sizes, recipe):
    inputs = draw(**sizes)
    output, _ = training.attention(*inputs, recipe=recipe)
    assert not output.any()
    for x, gradient in zip(inputs, torch.autograd.grad(output, inputs, torch.ones_like(output)), strict=True):
        assert gradient.shape == x.shape and not gradient.any()


def test_a_second_derivative_is_refused_with_what_to_do():
    inputs = draw()
    output, _ = training.attention(*inputs)
    (gradient,) = torch.autograd.grad(output.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match=r'no second derivative.*recipe="exact".*SDPBackend.MATH'):
        gradient.square().sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        output, _ = dense_attend(*inputs, None, None, Options(recipe="exact"))
        (gradient,) = torch.autograd.grad(output.square().sum(), inputs[:1], create_graph=True)
        gradient.square().sum().backward()


def test_forward_mode_and_transforms_are_refused_rather_than_cut():
    query, key, value = draw(grad=False)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: training.attention(x, key, value)[0], (query,), (query,))
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: training.attention(x, key, value)[0].sum())(query)


def packed_call():
    """Arguments of `packed_attention`; sequences of 80, 33, 0 and 64 keys that count."""
    query, key, value = (x.detach()[0].transpose(0, 1) for x in draw(q_len=135, kv_len=321))
    inputs = [x.contiguous().requires_grad_() for x in (query, key, value)]
    used = torch.tensor([80, 33, 0, 64], dtype=torch.int32)
    return inputs, (pack([70, 1, 0, 64]), pack([90, 33, 70, 128]), 70, 128), used


@pytest.mark.parametrize("recipe", TRAINABLE)
def test_packed_sequences_match_separate_sequences(recipe):
    inputs, sequences, used = packed_call()
    output = training.packed_attention(*inputs, *sequences, seqused_k=used, is_causal=True, recipe=recipe)
    gradient = output_gradient(output)
    gradients = torch.autograd.grad(output, inputs, gradient)
    assert not gradients[1][80:90].any()
    assert_each_alone(inputs, sequences, used, output, gradient, gradients, {"is_causal": True, "recipe": recipe})


def assert_each_alone(inputs, sequences, used, output, gradient, gradients, options, blocks=None):
    """Each of four packed sequences has the output and the gradients that it has alone."""
    q_starts, k_starts = sequences[0].tolist(), sequences[1].tolist()
    for i in range(4):
        rows, keys = slice(q_starts[i], q_starts[i + 1]), slice(k_starts[i], k_starts[i] + int(used[i]))
        parts = (inputs[0][rows], inputs[1][keys], inputs[2][keys])
        alone = [part.detach().transpose(0, 1)[None].requires_grad_() for part in parts]
        own = blocks and blocks.of_sequence(i, rows.stop - rows.start, int(used[i]), 128)
        expected, _ = training.attention(*alone, blocks=own, **options)
        wanted = torch.autograd.grad(expected, alone, gradient[rows].transpose(0, 1)[None])
        assert torch.equal(output[rows], expected[0].transpose(0, 1))
        for found, some, one in zip(gradients, (rows, keys, keys), wanted, strict=True):
            assert torch.equal(found[some], one[0].transpose(0, 1))


@pytest.mark.parametrize("list_batch", [4, 1])
@pytest.mark.parametrize("recipe", TRAINABLE)
def test_packed_sequences_have_gradients_over_lists_of_their_own(recipe, list_batch):
    """Blocks and tiles that a sequence does not have do not count."""
    inputs, sequences, used = packed_call()
    blocks = draw_blocks(list_batch, 4, 70, 128, 64, 64)
    options = {"is_causal": True, "causal_offset": 20, "recipe": recipe}
    output = training.packed_attention(*inputs, *sequences, seqused_k=used, blocks=blocks, **options)
    gradient = output_gradient(output)
    gradients = torch.autograd.grad(output, inputs, gradient)
    assert gradients[0].any()
    assert_each_alone(inputs, sequences, used, output, gradient, gradients, options, blocks)


@pytest.mark.audit
@pytest.mark.parametrize("call", ["plain", "padding", "packed", "blocks", "packed blocks"])
def test_opcheck_passes(call):
    operators = torch.ops.sage_kernels
    options = (True, 0, None, "sage_bwd", "native")
    inputs, key_mask, blocks, lengths = draw(), None, NO_BLOCKS, NOTHING_PACKED
    if call == "padding":
        key_mask = padding()
    elif call == "blocks":
        key_mask, blocks = padding(), tuple(draw_blocks(2, 4, 70, 90, 64, 64))
    elif call.startswith("packed"):
        packed, sequences, used = packed_call()
        inputs, lengths = [x.detach().transpose(0, 1)[None].requires_grad_() for x in packed], (*sequences, used)
        blocks = tuple(draw_blocks(4, 1, 70, 128)) if call == "packed blocks" else blocks
    torch.library.opcheck(operators.training_attention.default, (*inputs, key_mask, *blocks, *lengths, *options))
    with torch.no_grad():
        output, *saved = operators.training_attention(*inputs, key_mask, *blocks, *lengths, *options)
    forward, given = (inputs[2].detach(), output, *saved), (key_mask, *blocks, *lengths, *options)
    for kernel in ("reference_backward", ""):
        arguments = (torch.ones_like(output), *forward, 64, kernel, *given)
        torch.library.opcheck(operators.training_attention_backward.default, arguments)


@pytest.mark.parametrize("head_dim", [16, 40, 80, 256])
def test_the_compiler_knows_the_sizes_of_every_head_dim(head_dim):
    inputs = [torch.randn(1, 2, tokens, head_dim, requires_grad=True) for tokens in (5, 130, 130)]
    arguments = (*inputs, None, *NO_BLOCKS, *NOTHING_PACKED, True, 0, None, "sage_bwd", "native")
    operator = torch.ops.sage_kernels.training_attention.default
    torch.library.opcheck(operator, arguments, test_utils="test_faketensor")


def test_one_compiled_graph_serves_lists_of_all_lengths():
    def attend(query, key, value, key_mask, blocks):
        mask = Mask.of_blocks(blocks, key_mask[:, None, None], key.shape[2])
        options = Options(recipe="sage_bwd", dropout_p=0.0)  # a global float would become an input of the graph
        assert not decide(query, key, value, mask, options, wants_gradient=True).bypasses_kernels
        return training.attention(query, key, value, key_mask=key_mask, blocks=blocks, return_lse=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for q_len, kv_len in ((300, 700), (600, 900)):  # no two sizes alike, which the compiler would take for one
        arguments = draw(q_len=q_len, kv_len=kv_len), padding(kv_len=kv_len), draw_blocks(2, 4, q_len, kv_len)
        found = []
        for function in (compiled, attend):
            output, lse = function(*arguments[0], *arguments[1:])
            found.append([output, lse, *torch.autograd.grad(output, arguments[0], output_gradient(output))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert counter.frame_count == 1


def test_a_list_that_does_not_fit_is_refused_with_gradients_too():
    inputs, blocks = draw(), draw_blocks(2, 4, 300, 90)
    with pytest.raises(ValueError, match=r"blocks\.counts \(2, 4, 3\) must be"):
        training.attention(*inputs, blocks=blocks)
    packed, sequences, used = packed_call()
    with pytest.raises(ValueError, match=r"must be \(4 or 1, 4 or 1, 1\)"):
        training.packed_attention(*packed, *sequences, seqused_k=used, blocks=blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", ["sage_bwd", "sage2"])
def test_the_decision_says_the_same_inside_the_compiler(dtype, recipe):
    inputs, said = draw(dtype=dtype), []

    def ask(*tensors):
        said.append(decide(*tensors, NO_MASK, Options(recipe=recipe), wants_gradient=True).reason)
        return tensors[0] + 0

    ask(*inputs)
    torch.compile(ask, fullgraph=True, dynamic=True, backend="eager")(*inputs)
    assert said[0] == said[1]
    assert (said[0] == "") == (dtype == torch.float32 and recipe == "sage_bwd")


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_does_not_reach_into_the_kernels(inside):
    inputs = draw()
    output, _ = training.attention(*inputs, return_lse=True)
    expected = torch.autograd.grad(output, inputs, output_gradient(output))
    with torch.autocast("cpu", torch.bfloat16):
        again, lse = training.attention(*inputs, return_lse=True)
        gradients = torch.autograd.grad(again, inputs, output_gradient(again)) if inside else None
    assert torch.equal(lse, training.attention(*inputs, return_lse=True)[1])
    gradients = gradients or torch.autograd.grad(again, inputs, output_gradient(again))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_less_is_kept_for_the_backward_pass_than_by_16_bit_attention():
    """Q and K in 8 bits, V and O in 16; scales and lse are 12 bytes a token, next to the 4·2·64 of Q, K, V and O."""
    kept = []
    inputs = draw(q_heads=2, q_len=256, kv_len=256, dtype=torch.bfloat16, v_head_dim=64)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        training.attention(*inputs)
    tokens = 2 * 2 * 256
    assert sum(x.numel() * x.element_size() for x in kept) <= tokens * (2 * 64 + 4 * 64 + 12)


@pytest.fixture
def ran():
    """Names of the fake kernels that ran, which are preferred to the reference: "fast" and "fast_backward"."""
    ran = []
    with only_the_reference():
        registry.register_forward(FakeTraining("fast", "sage_bwd", ran=ran.append))
        registry.register_backward(FakeBackward("fast_backward", "sage_bwd", ran=ran.append))
        yield ran


def another_choice(ran):
    """Prefer another backward kernel than the one chosen so far."""
    return preferred(FakeBackward("other_backward", "sage_bwd", ran=ran.append), registry.backwards)


@pytest.mark.parametrize("attend", [training.attention, partial(dense_attend, mask=None, blocks=None, options=OPTIONS)])
def test_one_plan_serves_forward_and_backward_and_is_announced_once(ran, attend):
    heard = []
    execution.plan_listeners.append(heard.append)
    try:
        attend(*draw())[0].sum().backward()
    finally:
        execution.plan_listeners.remove(heard.append)
    assert ran == ["fast", "fast_backward"]
    facts = [(plan.kernel, plan.backward, plan.numerics, plan.request.grad) for plan in heard]
    assert facts == [("fast", "fast_backward", "native", True)]


def test_a_kernel_that_failed_its_self_check_leaves_gradients_to_the_next_one(ran):
    failed = FakeTraining("broken", "sage_bwd", ran=ran.append, reason=lambda request: f"{FAILED}: wrong")
    with preferred(failed):
        dense_attend(*draw(), None, None, OPTIONS)[0].sum().backward()
    assert ran == ["fast", "fast_backward"]


@pytest.mark.parametrize("kind", ["plain", "padding", "packed", "attend"])
def test_the_backward_pass_keeps_the_forward_passes_plan(ran, kind):
    if kind == "packed":
        inputs, sequences, used = packed_call()
        output = training.packed_attention(*[x.requires_grad_() for x in inputs], *sequences, seqused_k=used)
    elif kind == "attend":
        output, _ = dense_attend(*draw(), None, None, OPTIONS)
    else:
        output, _ = training.attention(*draw(), key_mask=padding() if kind == "padding" else None)
    with another_choice(ran):
        output.sum().backward()
    assert ran == ["fast", "fast_backward"]


def test_inside_the_compiler_the_backward_kernel_is_chosen_when_it_runs(ran):
    compiled = torch.compile(lambda *tensors: training.attention(*tensors)[0], fullgraph=True, backend="aot_eager")
    inputs = draw()
    compiled(*inputs).sum().backward()
    assert ran == ["fast", "fast_backward"]
    ran.clear()
    with another_choice(ran):
        compiled(*inputs).sum().backward()
    assert ran == ["fast", "other_backward"]


def test_inside_the_compiler_the_backward_kernel_is_chosen_by_the_causal_offset():
    asked = []
    backward = FakeBackward("asked", "sage_bwd", native=False, reason=lambda request: asked.append(request) or "")
    with preferred(backward, registry.backwards):
        attend = partial(training.attention, is_causal=True, causal_offset=-5)
        compiled = torch.compile(lambda *tensors: attend(*tensors)[0], fullgraph=True, backend="aot_eager")
        output = compiled(*draw())
        asked.clear()
        registry.forget_choices()
        output.sum().backward()
    assert asked and all(request.shifted for request in asked)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_packed_call_is_judged_by_its_sequences(compiled):
    """Three sequences of 32 tokens are no sequence of 96, for which other kernels may exist."""
    asked = []
    inputs = [x.detach().flatten(0, 1).requires_grad_() for x in torch.randn(3, 3, 32, 2, 64)]
    lengths, fake = Lengths(*[pack([32] * 3)] * 2, 32, 32), partial(FakeTraining, "asked", "sage_bwd")
    with preferred(fake(reason=lambda request: asked.append(request) or "serves nothing")):
        attend = torch.compile(attend_packed, backend="eager") if compiled else attend_packed
        attend(*inputs, lengths, OPTIONS)
    sizes = {(request.packed, request.batch, request.q_len, request.kv_len) for request in asked}
    assert (True, 3, 32, 32) in sizes
    assert {one[1:] for one in sizes} <= {(3, 32, 32), (1, 32, 32), (1, 1, 1)}  # the compiler asks for a small call


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fallback", ["native", "emulate", "error"])
def test_packed_sequences_that_only_a_kernel_of_batches_trains_run_one_by_one(ran, fallback, compiled):
    inputs, sequences, _ = packed_call()
    attend = torch.compile(attend_packed, backend="aot_eager") if compiled else attend_packed
    kernel = FakeTraining("batches", "sage_bwd", reason=refuse_packed, ran=ran.append)
    with registry.without("fast"), preferred(kernel):
        output, _ = attend(*inputs, Lengths(*sequences), OPTIONS._replace(fallback=fallback))
        output.sum().backward()
    assert ran == ["batches"] * 4 + ["fast_backward"] * 4


BAD_CALLS = {
    "float64": (lambda: draw(dtype=torch.float64), {}, KernelUnavailableError, "no kernel computes gradients.*dtype"),
    "head_dim": (lambda: [x[..., :8] for x in draw()], {}, KernelUnavailableError, "head_dim outside"),
    "recipe": (draw, {"recipe": "sage2"}, KernelUnavailableError, "sage2 is forward only"),
    "native": (draw, {"fallback": "error"}, KernelUnavailableError, "no native kernel"),
    "heads": (lambda: draw(kv_heads=3), {}, ValueError, "not a multiple of 3 key heads"),
    "key_mask dtype": (draw, {"key_mask": padding().float()}, ValueError, "key_mask must be bool"),
    "key_mask batch": (draw, {"key_mask": padding(3)}, ValueError, "key_mask must be bool .batch or 1, kv_len."),
    "key_mask length": (draw, {"key_mask": padding(kv_len=91)}, ValueError, "one element per key"),
}


@pytest.mark.parametrize(("build", "options", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_calls_that_no_kernel_trains_are_refused_with_advice(build, options, error, message):
    with pytest.raises(error, match=message):
        training.attention(*build(), **options)


@pytest.mark.parametrize("attend", [training.packed_attention, ops.packed_attention])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"cu_seqlens_k": None}, "need both"),
        ({"cu_seqlens_k": pack([90, 231])}, r"both be .sequences \+ 1,.*\(5,\) and \(3,\)"),
        ({"cu_seqlens_q": pack([135])[:0], "cu_seqlens_k": pack([321])[:0]}, "both be"),
        ({"seqused_k": torch.tensor([80], dtype=torch.int32)}, r"seqused_k must be \(4,\)"),
        ({"cu_seqlens_q": pack([70, 1, 0, 64]).float()}, "cu_seqlens_q must hold integers"),
        ({"cu_seqlens_q": pack([70, 1, 0, 64]) + 1}, "cu_seqlens_q must begin at 0"),
        ({"cu_seqlens_q": pack([70, 1, -1, 65])}, "cu_seqlens_q must .* never decrease"),
        ({"cu_seqlens_k": pack([90, 33, 70, 129])}, "cu_seqlens_k must .* end at the number of tokens, 321"),
        ({"cu_seqlens_k": pack([90, 33, 58, 140])}, "a sequence of cu_seqlens_k is longer than max_seqlen_k, 128"),
        ({"seqused_k": torch.tensor([80, -1, 70, 0], dtype=torch.int32)}, "seqused_k must not be negative"),
    ],
)
def test_lengths_of_other_sequences_are_refused(attend, bad, message):
    inputs, (cu_seqlens_q, cu_seqlens_k, *longest), used = packed_call()
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": used} | bad
    with pytest.raises(ValueError, match=message), torch.no_grad():
        attend(*inputs, max_seqlen_q=longest[0], max_seqlen_k=longest[1], **lengths, recipe="sage_bwd")


@pytest.mark.parametrize(("longest", "message"), [((69, 128), "max_seqlen_q, 69"), ((70, 127), "max_seqlen_k, 127")])
def test_sequences_longer_than_the_longest_are_refused_where_the_host_knows(longest, message):
    inputs, (*bounds, _, _), used = packed_call()
    with pytest.raises(ValueError, match=message):
        training.packed_attention(*inputs, *bounds, *longest, seqused_k=used)
