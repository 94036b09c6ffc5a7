"""Replayed calls on a GPU: their results are those of the first call, whatever changes between calls."""

import threading

import pytest
import torch
import torch.utils.checkpoint

from sage_hf import record, sage_attention
from sage_kernels.replay import cache

SHAPE = (2, 4, 320, 64)


pytestmark = pytest.mark.usefixtures("nothing_known")


def draw(device, *shape, dtype=torch.bfloat16, count=3):
    return [torch.randn(shape or SHAPE, device=device, dtype=dtype) for _ in range(count)]


def first_time(*tensors, **options):
    """The result of a call's first time."""
    cache.forget()
    result = sage_attention(*tensors, **{"recipe": "sage2", "fallback": "error", **options})
    cache.forget()
    return result


def attend(*tensors, **options):
    return sage_attention(*tensors, **{"recipe": "sage2", "fallback": "error", **options})


def same(one, other) -> bool:
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in pairs)


MASKED = {"attn_mask": "keys"}
CALLS = {
    "plain": (SHAPE, {}),
    "128 channels": ((1, 4, 500, 128), {}),
    "80 channels": ((1, 4, 500, 80), {}),
    "causal": (SHAPE, {"is_causal": True}),
    "lse": (SHAPE, {"return_lse": True}),
    "scale": (SHAPE, {"scale": 0.3}),
    "few keys": ((1, 2, 64, 64), {}),
    "keys": (SHAPE, MASKED),
    "keys and lse": ((2, 4, 320, 128), {**MASKED, "return_lse": True}),
    "float16": (SHAPE, {"dtype": torch.float16}),
    "sage1": (SHAPE, {"recipe": "sage1"}),
    "sage3": ((1, 4, 1000, 128), {"recipe": "sage3", "fallback": "emulate", "return_lse": True}),
    "sage3, keys": (SHAPE, {**MASKED, "recipe": "sage3", "fallback": "emulate"}),
    "sage3_paper": (SHAPE, {"recipe": "sage3_paper", "fallback": "emulate"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_replayed_call_equals_the_first_call_bitwise(device, replayed, name):
    shape, options = CALLS[name]
    options = dict(options)
    dtype = options.pop("dtype", torch.bfloat16)
    calls = [draw(device, *shape, dtype=dtype) for _ in range(5)]
    masks = [torch.rand(shape[0], 1, 1, shape[2], device=device) > 0.3 for _ in calls]

    def given(number):
        return options | ({"attn_mask": masks[number]} if "attn_mask" in options else {})

    wanted = [first_time(*tensors, **given(number)) for number, tensors in enumerate(calls)]
    for number, tensors in enumerate(calls):
        assert same(attend(*tensors, **given(number)), wanted[number])
    assert len(replayed) == 3


@pytest.mark.usefixtures("poisoned_memory")
def test_a_replayed_call_reads_nothing_that_it_has_not_written(device, replayed):
    query, key, value = draw(device, 1, 2, 200, 64)
    wanted = first_time(query, key, value, return_lse=True)
    for _ in range(4):
        assert same(attend(query, key, value, return_lse=True), wanted)
    assert len(replayed) == 2


def test_strides_and_shared_memory_may_change(device, replayed):
    """Q, K and V in one buffer, apart, tokens before heads, or one tensor three times."""
    together = torch.randn(2, 320, 3, 4, 64, device=device, dtype=torch.bfloat16)
    layouts = [
        [x.transpose(1, 2) for x in together.unbind(2)],
        [x.transpose(1, 2).contiguous() for x in together.unbind(2)],
        [together[:, :, 0].transpose(1, 2)] * 3,
        [x[:, :, :300] for x in draw(device)],
    ]
    wanted = [first_time(*tensors) for tensors in layouts]
    for _ in range(4):
        for tensors, output in zip(layouts, wanted, strict=True):
            assert same(attend(*tensors), output)
    assert len(replayed) >= 8


def test_an_unaligned_tensor_is_served_as_before(device, replayed):
    for _ in range(3):
        attend(*draw(device))
    replayed.clear()
    query, key, value = draw(device)
    shifted = torch.empty(query.numel() + 1, device=device, dtype=query.dtype)[1:].view(SHAPE).copy_(query)
    output = sage_attention(shifted, key, value, recipe="sage2")
    assert not replayed
    assert torch.allclose(output.float(), attend(query, key, value).float(), atol=0.1)


@pytest.mark.parametrize("recipe", ["sage2", "sage3"])
def test_each_stream_has_its_own_work_and_its_own_memory(device, replayed, recipe):
    options = {"recipe": recipe, "fallback": "emulate"}
    inputs = [draw(device) for _ in range(8)]
    wanted = [first_time(*tensors, **options) for tensors in inputs]
    for tensors in inputs[:2]:
        attend(*tensors, **options)
    torch.cuda.synchronize()
    streams, outputs = [torch.cuda.Stream() for _ in range(4)], []
    for turn in range(4):
        for number, tensors in enumerate(inputs):
            with torch.cuda.stream(streams[(number + turn) % 4]):
                outputs.append(attend(*tensors, **options))
    torch.cuda.synchronize()
    assert all(same(x, wanted[number % 8]) for number, x in enumerate(outputs))
    assert len(replayed) == 32


def test_a_graph_captures_a_replayed_call(device, replayed):
    query, key, value = draw(device)
    for _ in range(3):
        attend(query, key, value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(query, key, value)
    eager = attend(*draw(device))  # other addresses, between capture and replay
    for _ in range(3):
        new = draw(device)
        for x, y in zip((query, key, value), new, strict=True):
            x.copy_(y)
        graph.replay()
        assert same(output, first_time(*new))
    assert eager.isfinite().all() and len(replayed) == 3


def test_a_thread_that_has_not_used_the_gpu_replays_a_call(device):
    tensors = draw(device)
    wanted = first_time(*tensors)
    for _ in range(3):
        attend(*tensors)
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(attend(*tensors)))
    thread.start()
    thread.join()
    assert same(outputs[0], wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_its_own_calls(device, replayed):
    for _ in range(4):
        for index in (0, 1):
            tensors = draw(torch.device("cuda", index))
            assert attend(*tensors).get_device() == index
    assert len(replayed) == 4


def test_a_compiled_graph_replays_its_calls(device, replayed):
    query, key, value = draw(device)
    wanted = first_time(query, key, value)
    compiled = torch.compile(lambda *tensors: attend(*tensors), fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            assert same(compiled(query, key, value), wanted)
    assert len(replayed) >= 2


def test_observers_and_layers_see_a_replayed_call(device, replayed):
    layer, seen = torch.nn.Identity(), []
    for _ in range(3):
        attend(*draw(device))
    with record.observe(seen.append):
        record.run_in_layer(layer, attend, *draw(device))
    assert len(seen) == 1 and seen[0].plan is record.last_plans(layer)[0]
    assert seen[0].plan.recipe == "sage2" and len(replayed) == 2


TRAINING = {
    "plain": (SHAPE, {}),
    "128 channels, causal": ((1, 4, 500, 128), {"is_causal": True}),
    "keys": (SHAPE, MASKED),
    "int8": (SHAPE, {"recipe": "sage_bwd_int8"}),
    "sum": (SHAPE, {}),
}


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("name", TRAINING)
def test_replayed_gradients_equal_the_operators_bitwise(device, monkeypatch, replayed, name):
    shape, options = TRAINING[name]
    options = {"recipe": "sage_bwd", "fallback": "error", **options}
    calls = [
        ([x.requires_grad_() for x in draw(device, *shape)], torch.randn_like(draw(device, *shape)[0]))
        for _ in range(5)
    ]
    masks = [torch.rand(shape[0], 1, 1, shape[2], device=device) > 0.3 for _ in calls]

    def step(number):
        inputs, gradient = calls[number]
        output = sage_attention(*inputs, **options | ({"attn_mask": masks[number]} if "attn_mask" in options else {}))
        if name == "sum":  # whose gradient is one number, expanded
            return output, *torch.autograd.grad(output.float().sum().to(output.dtype), inputs)
        return output, *torch.autograd.grad(output, inputs, gradient)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "find", lambda *arguments: None)
        wanted = [step(number) for number in range(5)]
    found = [step(number) for number in range(5)]
    assert len(replayed) == 3 + 2  # both passes
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_replayed_call_has_no_second_derivative(device):
    inputs = [x.requires_grad_() for x in draw(device)]
    outputs = [sage_attention(*inputs, recipe="sage_bwd", fallback="error") for _ in range(3)]
    first = torch.autograd.grad(outputs[-1].float().sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(first[0].float().sum(), inputs)


@pytest.mark.usefixtures("repeatable")
def test_checkpointing_recomputes_a_replayed_call(device):
    inputs = [x.requires_grad_() for x in draw(device)]

    def attend(*tensors):
        return sage_attention(*tensors, recipe="sage_bwd", fallback="error")

    wanted = torch.autograd.grad(attend(*inputs).float().sum(), inputs)
    for _ in range(4):
        output = torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False)
        found = torch.autograd.grad(output.float().sum(), inputs)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_what_cannot_be_replayed_is_run_anew(device, replayed):
    tensors = draw(device)
    wanted = first_time(*tensors, scale=-0.2)
    for _ in range(4):
        assert same(attend(*tensors, scale=-0.2), wanted)
    assert not replayed


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("recipe", ["sage2", "sage1", "exact", "sage_bwd"])
def test_a_tensor_whose_memory_was_freed_is_refused_as_by_pytorch(device, recipe, known, number):
    inputs = [x.requires_grad_(recipe == "sage_bwd") for x in draw(device)]
    wanted = sage_attention(*inputs, recipe=recipe)
    for _ in range(3 * known):
        sage_attention(*inputs, recipe=recipe)
    freed = torch.stack([inputs[number].detach()] * 2)[1]
    freed.untyped_storage().resize_(0)
    tensors = [freed if turn == number else x for turn, x in enumerate(inputs)]
    with pytest.raises(RuntimeError, match="no memory"):
        sage_attention(*tensors, recipe=recipe)
    assert torch.equal(sage_attention(*inputs, recipe=recipe), wanted)
