"""The ways in which the gradients of low-bit attention could fail, each one a promise that ours do not."""

import gc
import weakref

import pytest
import torch

from sage_hf import sage_attention
from sage_kernels import training
from sage_kernels.cuda.registration import CudaInt8Backward
from sage_kernels.dispatch import registry
from sage_kernels.exact.gradients import Gradients
from sage_kernels.replay import cache
from sage_kernels.replay.cache import are_equal_to_rounding
from tests.helpers.judge_training import TRAINING, Draw, TrainingCall, assert_equal, judge_training, of_kernel, train
from tests.helpers.layouts import LAYOUTS, lay_out

pytestmark = [pytest.mark.parametrize("recipe", TRAINING), pytest.mark.usefixtures("repeatable")]


@pytest.fixture
def draw(device):
    return Draw(device)


@pytest.fixture(params=[(), (CudaInt8Backward.name,)], ids=["fused backward", "Triton's"])
def either_backward(request):
    """Let the fused backward kernel serve all that it can, or nothing."""
    with registry.without(*request.param):
        yield


MISALIGNED = ("every other channel", "offset")
"""Layouts that 128-bit loads cannot read in place, so that another quantiser may serve them."""


def draw_tensors(draw, batch=2, q_heads=4, kv_heads=2, q_len=300, kv_len=400, head_dim=128):
    """Query, key, value and output gradient."""
    call = draw.call("", batch, q_heads, kv_heads, q_len, kv_len, head_dim)
    return call.query, call.key, call.value, call.output_gradient


# 1. Uninitialised gradients.


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 63, 129, 1000])
def test_every_element_of_every_gradient_is_written(recipe, is_causal, length, draw):
    for q_len, kv_len in ((length, 333), (333, length)):
        found = train(*draw_tensors(draw, q_len=q_len, kv_len=kv_len), recipe, is_causal=is_causal)
        assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}], ids=str)
def test_empty_calls_have_gradients_of_zero(recipe, sizes, draw):
    tensors = draw_tensors(draw, **sizes)
    found = train(*tensors, recipe)
    assert all(x.shape == y.shape for x, y in zip(found[1:], tensors, strict=False))
    assert not any(x.any() for x in found)


# 2. A uniform scale error.


def test_gradients_of_v_sum_to_the_output_gradient(recipe, draw):
    """Rows of P sum to 1, so each row's dO is handed out to the values, no less and no more."""
    query, key, value, output_gradient = draw_tensors(draw, 1, 2, 2, 500, 700)
    output_gradient = output_gradient + 1
    found = train(query, key, value, output_gradient, recipe)
    total, expected = (x.double().sum(2) for x in (found.value, output_gradient))
    # Roundings of the elements of P, dO and dV have mean 0.
    assert ((total - expected).abs().sum() / expected.abs().sum()) <= 2**-9


def test_gradients_are_linear_in_the_outputs_gradient(recipe, draw):
    """A power of two moves every exponent and no rounding."""
    query, key, value, output_gradient = draw_tensors(draw)
    once = train(query, key, value, output_gradient, recipe)
    scaled = train(query, key, value, output_gradient * 2**-10, recipe)
    assert_equal(scaled[1:], [x * 2**-10 for x in once[1:]])


def test_equal_values_leave_query_and_key_without_gradient(recipe, draw):
    """The output is then that value, whatever the weights."""
    query, key, value, output_gradient = draw_tensors(draw)
    output_gradient = output_gradient.abs()
    found = train(query, key, value[:, :, :1].expand_as(value), output_gradient, recipe)
    usual = train(query, key, value, output_gradient, recipe)
    # The output is that value but for its rounding to bfloat16, and so is δ.
    for x, y in ((found.query, usual.query), (found.key, usual.key)):
        assert x.double().abs().sum() <= 2**-5 * y.double().abs().sum()


# 4. 32-bit offsets: test_training_large.py.

# 5. Lengths that are not a multiple of the tile.


@pytest.mark.parametrize("kv_len", [1, 63, 65, 129, 1000])
@pytest.mark.parametrize("q_len", [1, 65, 300])
def test_what_lies_behind_the_last_token_does_not_matter(recipe, q_len, kv_len, draw):
    longer = draw_tensors(draw, 1, 2, 2, q_len + 256, kv_len + 256)
    lengths = (q_len, kv_len, kv_len, q_len)
    inputs = [x[:, :, :length].clone() for x, length in zip(longer, lengths, strict=True)]
    for x, length in zip(longer, lengths, strict=True):
        x[:, :, length:] = torch.nan
    sliced = [x[:, :, :length] for x, length in zip(longer, lengths, strict=True)]
    assert_equal(train(*sliced, recipe), train(*inputs, recipe))


# 7. Causality.


def test_no_key_gets_a_gradient_from_a_row_that_does_not_see_it(recipe, draw):
    query, key, value, output_gradient = draw_tensors(draw, q_len=300, kv_len=300)
    for row in (0, 63, 64, 200):
        alone = torch.zeros_like(output_gradient)
        alone[:, :, row] = output_gradient[:, :, row]
        found = train(query, key, value, alone, recipe, is_causal=True)
        assert not found.key[:, :, row + 1 :].any() and not found.value[:, :, row + 1 :].any()
        assert found.value[:, :, : row + 1].any(-1).all()
        assert not found.query[:, :, :row].any() and not found.query[:, :, row + 1 :].any()


# 8. Rows with no allowed key, keys that do not exist.


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_a_key_and_keys_that_do_not_exist_have_no_gradient(recipe, is_causal, draw, device):
    query, key, value, output_gradient = draw_tensors(draw)
    key_mask = draw.uniform(2, 400) < 0.5
    key_mask[1] = False
    key_mask[0, :100] = False
    found = train(query, key, value, output_gradient, recipe, key_mask=key_mask, is_causal=is_causal)
    assert all(x.isfinite().all() for x in found)
    assert not any(x[1].any() for x in found)
    if is_causal:
        assert not found.output[:, :, :100].any() and not found.query[:, :, :100].any()
    pads = ~key_mask[:, None, :, None].expand_as(key)
    assert not found.key[pads].any() and not found.value[pads].any()


def test_what_padding_holds_does_not_matter(recipe, draw):
    query, key, value, output_gradient = draw_tensors(draw)
    key_mask = draw.uniform(2, 400) < 0.5
    expected = train(query, key, value, output_gradient, recipe, key_mask=key_mask)
    for x in (key, value):
        x.masked_fill_(~key_mask[:, None, :, None], torch.nan)
    assert_equal(train(query, key, value, output_gradient, recipe, key_mask=key_mask), expected)


@pytest.mark.usefixtures("either_backward")
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_have_the_gradients_they_have_alone(recipe, is_causal, draw):
    lengths = draw.lengths([70, 1, 200], [90, 64, 131])
    packed = [x[0].transpose(0, 1) for x in draw_tensors(draw, 1, 4, 2, 271, 285)]
    found = train(*packed, recipe, training.packed_attention, **_starts(lengths), is_causal=is_causal)
    spans = zip((0, 70, 71, 271), (70, 71, 271), (0, 90, 154, 285), (90, 154, 285), strict=False)
    for start, stop, k_start, k_stop in spans:
        tokens = slice(start, stop), slice(k_start, k_stop), slice(k_start, k_stop), slice(start, stop)
        alone = [x[span] for x, span in zip(packed, tokens, strict=True)]
        own_lengths = _starts(draw.lengths([stop - start], [k_stop - k_start]))
        expected = train(*alone, recipe, training.packed_attention, **own_lengths, is_causal=is_causal)
        own = [found.output[start:stop], found.query[start:stop], *(x[k_start:k_stop] for x in found[2:])]
        assert torch.equal(own[0], expected[0])
        assert are_equal_to_rounding(own[1:], expected[1:])  # of other parts of the keys


def _starts(lengths):
    return {name: value for name, value in lengths._asdict().items() if value is not None}


# 9. Inputs mutated; memory layouts.


def test_inputs_are_not_changed(recipe, draw):
    tensors = [*draw_tensors(draw), draw.uniform(2, 400) < 0.7]
    before = [x.clone() for x in tensors]
    *inputs, key_mask = tensors
    train(*inputs, recipe, key_mask=key_mask, is_causal=True, scale=-0.1)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_only_what_the_backward_pass_needs_is_kept(recipe, draw, nothing_known):
    tensors = [x.requires_grad_() for x in draw_tensors(draw)[:3]]
    for _ in range(2):  # the first call compiles
        cache.forget()
        copies = [x.clone() for x in tensors]
        watched = [weakref.ref(x) for x in copies]
        gc.disable()
        try:
            output = sage_attention(*copies, recipe=recipe, enable_gqa=True, fallback="emulate")
            del copies
            alive = [x() is not None for x in watched]
        finally:
            gc.enable()
        assert output.requires_grad
    assert alive == [False, False, True]  # V


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_gradients(recipe, layout, draw):
    tensors = draw_tensors(draw, 2, 2, 2)
    if layout == "one head for all":
        tensors = [x[:, :1].expand_as(x).contiguous() for x in tensors]
    found = train(*(lay_out(x, layout) for x in tensors), recipe, is_causal=True)
    expected = train(*tensors, recipe, is_causal=True)
    if layout not in MISALIGNED:
        assert_equal(found, expected)
    for x, y in zip(found, expected, strict=True):  # quantisers may rotate in another order: what they round may differ
        assert (x - y).abs().sum() <= torch.finfo(x.dtype).eps / 2 * y.abs().sum()


def test_the_gradient_of_a_sum_is_one_element_expanded(recipe, draw):
    query, key, value, output_gradient = draw_tensors(draw)
    one = output_gradient.new_ones(()).expand_as(output_gradient)
    assert_equal(
        train(query, key, value, one, recipe), train(query, key, value, torch.ones_like(output_gradient), recipe)
    )


# 10. The wrong device or stream; a graph that omits a kernel.


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_runs_on_the_device_of_its_tensors(recipe, draw):
    tensors = draw_tensors(draw)
    with torch.cuda.device(0):
        found = train(*(x.to("cuda:1") for x in tensors), recipe)
    assert {x.device for x in found} == {torch.device("cuda:1")}
    assert_equal([x.cpu() for x in found], [x.cpu() for x in train(*tensors, recipe)])


def test_a_call_runs_on_the_current_stream(recipe, draw, device):
    """The inputs come into being on the stream, after work that keeps it busy."""
    tensors = draw_tensors(draw, q_len=1000, kv_len=1000)
    expected = train(*tensors, recipe)
    late = [torch.full_like(x, torch.nan) for x in tensors]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, tensors, strict=True):
            x.copy_(y)
        found = train(*late, recipe)
    stream.synchronize()
    assert_equal(found, expected)


def test_four_streams_at_once_do_not_share_memory(recipe, draw, device):
    calls = [draw_tensors(draw, q_len=1000, kv_len=1000) for _ in range(4)]
    expected = [train(*tensors, recipe) for tensors in calls]
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in calls]
    found = [[] for _ in calls]
    for _ in range(5):
        for stream, tensors, kept in zip(streams, calls, found, strict=True):
            with torch.cuda.stream(stream):
                kept.append(train(*tensors, recipe))
    torch.cuda.synchronize(device)
    for kept, gradients in zip(found, expected, strict=True):
        for again in kept:
            assert_equal(again, gradients)


@pytest.mark.parametrize("padded", [False, True])
def test_a_replayed_graph_computes_the_gradients_of_the_new_inputs(recipe, padded, draw, device):
    tensors, others = draw_tensors(draw), draw_tensors(draw)
    key_mask, other_key_mask = (draw.uniform(2, 400) < 0.7 if padded else None for _ in range(2))
    expected = train(*tensors, recipe, key_mask=key_mask, is_causal=True)
    *static, output_gradient = (x.clone() for x in others)
    static_key_mask = None if other_key_mask is None else other_key_mask.clone()
    for x in static:
        x.requires_grad_()

    def step():
        output, _ = training.attention(
            *static, key_mask=static_key_mask, is_causal=True, recipe=recipe, fallback="emulate"
        )
        return output, *torch.autograd.grad(output, static, output_gradient)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        for x, y in zip((*static, output_gradient), tensors, strict=True):
            x.copy_(y)
        if static_key_mask is not None:
            static_key_mask.copy_(key_mask)
        for x in found:
            x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize(device)
    assert_equal(found, expected)


# 11. Gradients cut in training.


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_each_input_gets_its_gradient_also_when_others_want_none(recipe, wanted, draw):
    *tensors, output_gradient = draw_tensors(draw)
    expected = train(*tensors, output_gradient, recipe)
    inputs = [x.clone().requires_grad_(index in wanted) for index, x in enumerate(tensors)]
    output = sage_attention(*inputs, enable_gqa=True, recipe=recipe, fallback="emulate")
    output.backward(output_gradient)
    for index, (x, gradient) in enumerate(zip(inputs, expected[1:], strict=True)):
        assert torch.equal(x.grad, gradient) if index in wanted else x.grad is None


def test_a_second_derivative_raises(recipe, draw):
    *tensors, output_gradient = draw_tensors(draw)
    inputs = [x.requires_grad_() for x in tensors]
    output, _ = training.attention(*inputs, recipe=recipe, fallback="emulate")
    gradient, *_ = torch.autograd.grad(output, inputs, output_gradient, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(recipe, use_reentrant, draw):
    """Also where the pass that is thrown away ran without gradients, with the forward kernel of inference."""
    *tensors, output_gradient = draw_tensors(draw)
    expected = train(*tensors, output_gradient, recipe)
    inputs = [x.clone().requires_grad_() for x in tensors]
    output = torch.utils.checkpoint.checkpoint(
        lambda *x: sage_attention(*x, enable_gqa=True, recipe=recipe, fallback="emulate"),
        *inputs,
        use_reentrant=use_reentrant,
    )
    output.backward(output_gradient)
    assert_equal([x.grad for x in inputs], expected[1:])


@pytest.mark.usefixtures("either_backward")
def test_twenty_reruns_are_bitwise_equal(recipe, draw):
    tensors = draw_tensors(draw, 2, 8, 2, 1000, 1500)
    for options in ({}, {"is_causal": True}, {"key_mask": draw.uniform(2, 1500) < 0.5}):
        first = train(*tensors, recipe, **options)
        for _ in range(20):
            assert_equal(train(*tensors, recipe, **options), first)


# 12. Zero, loud and non-finite tensors.


def test_an_output_gradient_of_zero_gives_zeros(recipe, draw):
    query, key, value, output_gradient = draw_tensors(draw)
    found = train(query, key, value, torch.zeros_like(output_gradient), recipe, is_causal=True)
    assert not any(x.any() for x in found[1:])
    output_gradient[:, :, 64:] = 0
    found = train(query, key, value, output_gradient, recipe)
    assert not found.query[:, :, 64:].any() and all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("position", ["query", "key", "value"])
def test_tensors_of_zeros_have_finite_gradients(recipe, position, draw):
    call = draw.call(recipe, 2, 4, 2, 300, 400, 128)
    getattr(call, position).zero_()
    judge_training(call)


@pytest.mark.parametrize("magnitude", [1e-20, 1e-6, 1e4, 1e20])
def test_gradients_scale_with_the_values_and_the_outputs_gradient(recipe, magnitude, draw):
    query, key, value, output_gradient = draw_tensors(draw)
    call = TrainingCall(recipe, query, key, value * magnitude**0.5, output_gradient * magnitude**0.5)
    judge_training(call).assert_as_small_as_the_references()


@pytest.mark.usefixtures("either_backward")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_output_gradient_spoils_what_its_row_sees_and_no_other_head(recipe, bad, is_causal, draw):
    query, key, value, output_gradient = draw_tensors(draw, 1, 3, 3, 300, 300)
    clean = train(query, key, value, output_gradient, recipe, is_causal=is_causal)
    output_gradient[0, 1, 140, 7] = bad
    found = train(query, key, value, output_gradient, recipe, is_causal=is_causal)
    assert_equal([x[:, ::2] for x in found], [x[:, ::2] for x in clean])
    others = torch.arange(300, device=query.device) != 140
    assert torch.equal(found.query[:, 1, others], clean.query[:, 1, others])
    seen = 141 if is_causal else 300
    assert not found.query[0, 1, 140].isfinite().any()
    assert not found.key[0, 1, :seen].isfinite().any()
    assert not found.value[0, 1, :seen, 7].isfinite().any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("position", ["query", "key", "value"])
def test_a_bad_element_of_an_input_is_not_laundered_and_spoils_no_other_head(recipe, bad, position, draw):
    tensors = dict(zip(("query", "key", "value", "output_gradient"), draw_tensors(draw, 1, 3, 3), strict=True))
    clean = train(*tensors.values(), recipe)
    tensors[position][0, 1, 140, 7] = bad
    found = train(*tensors.values(), recipe)
    assert_equal([x[:, ::2] for x in found], [x[:, ::2] for x in clean])
    # Every row attends to every key, so a bad key or value spoils all rows, and a bad row all keys.
    spoiled = {"query": ("query", "key", "value"), "key": ("query", "key", "value"), "value": ("query", "key")}
    for name in spoiled[position]:
        assert not getattr(found, name)[0, 1, 140].isfinite().all(), name
        assert not getattr(found, name)[0, 1, 0].isfinite().all() or name == position == "query", name


# 14. Under torch.compile and autocast.


def compiled_step(recipe, attend=sage_attention, **options):
    """(query, key, value, output gradient, others) -> output and gradients, with the forward pass compiled."""

    def forward(query, key, value, *others):
        return attend(query, key, value, *others, enable_gqa=True, recipe=recipe, fallback="emulate", **options)

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")

    def step(query, key, value, output_gradient, *others):
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        output = compiled(*inputs, *others)
        return Gradients(output.detach(), *torch.autograd.grad(output, inputs, output_gradient))

    return step


def test_one_compiled_graph_serves_all_lengths(recipe, draw):
    step = compiled_step(recipe)
    for q_len, kv_len in ((70, 90), (300, 500), (65, 64)):
        tensors = draw_tensors(draw, q_len=q_len, kv_len=kv_len)
        assert_equal(step(*tensors), train(*tensors, recipe))


def test_a_compiled_graph_honours_padding_and_causality(recipe, draw):
    tensors = draw_tensors(draw)
    key_mask = draw.uniform(2, 400) < 0.5
    assert_equal(compiled_step(recipe)(*tensors, key_mask[:, None, None]), train(*tensors, recipe, key_mask=key_mask))
    assert_equal(compiled_step(recipe, is_causal=True)(*tensors), train(*tensors, recipe, is_causal=True))


def test_the_default_compiler_computes_the_same_gradients(recipe, draw):
    tensors = draw_tensors(draw)
    *inputs, output_gradient = (x.clone().requires_grad_() for x in tensors)
    compiled = torch.compile(
        lambda *x: sage_attention(*x, is_causal=True, enable_gqa=True, recipe=recipe, fallback="emulate"),
        fullgraph=True,
    )
    gradients = torch.autograd.grad(compiled(*inputs), inputs, output_gradient.detach())
    assert_equal(gradients, train(*tensors, recipe, is_causal=True)[1:])


def test_autocast_changes_the_inputs_dtype_and_nothing_else(recipe, device):
    draw = Draw(device, dtype=torch.float32)
    *tensors, output_gradient = draw_tensors(draw)
    inputs = [x.clone().requires_grad_() for x in tensors]
    with torch.autocast(device.type, torch.bfloat16):
        output = sage_attention(*inputs, enable_gqa=True, recipe=recipe, fallback="emulate")
        gradients = torch.autograd.grad(output, inputs, output_gradient.bfloat16())
    expected = train(*(x.bfloat16() for x in (*tensors, output_gradient)), recipe)
    assert torch.equal(output, expected.output)
    assert_equal(gradients, [x.float() for x in expected[1:]])


def test_the_operators_gradients_are_the_kernels(recipe, draw):
    call = draw.call(
        recipe, 2, 4, 2, 300, 400, 128, key_mask=draw.uniform(2, 400) < 0.7, is_causal=True, causal_offset=50
    )
    tensors = call.query, call.key, call.value, call.output_gradient
    options = {"key_mask": call.key_mask, "is_causal": True, "causal_offset": 50}
    assert_equal(train(*tensors, recipe, **options), of_kernel(call)[0])
