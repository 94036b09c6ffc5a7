"""Who ran what."""

import gc
import threading
import weakref

import torch
from torch import nn

from sage_hf import record, sage_attention
from sage_kernels.dispatch.plan import Plan
from sage_kernels.dispatch.request import Request


def draw(q_len=64):
    return [torch.randn(1, 2, length, 32) for length in (q_len, 64, 64)]


def test_plans_are_filed_under_the_innermost_layer():
    outer, inner = nn.Identity(), nn.Identity()

    def attend():
        sage_attention(*draw())
        record.run_in_layer(inner, sage_attention, *draw(1))

    record.run_in_layer(outer, attend)
    assert [plan.kernel for plan in record.last_plans(outer)] == ["reference"]
    assert [plan.kernel for plan in record.last_plans(inner)] == ["sdpa"]
    assert not record.outcomes_outside_layers()


def test_threads_do_not_see_each_others_layers():
    mine = nn.Identity()

    def attend_elsewhere():
        thread = threading.Thread(target=sage_attention, args=draw())
        thread.start()
        thread.join()

    record.run_in_layer(mine, attend_elsewhere)
    assert not record.last_plans(mine)
    assert list(record.outcomes_outside_layers().values()) == [1]


def test_compiled_calls_are_counted_without_a_layer():
    layer = nn.Identity()

    def call(*tensors):
        return record.run_in_layer(layer, sage_attention, *tensors)

    inputs = draw()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    compiled(*inputs)
    compiled(*inputs)
    assert not record.last_plans(layer)
    assert [(plan.kernel, count) for plan, count in record.outcomes_outside_layers().items()] == [("reference", 2)]


def test_outcomes_of_compiled_calls_name_the_backward_kernel():
    inputs = [x.requires_grad_() for x in draw()]
    torch.compile(lambda *x: sage_attention(*x, recipe="sage_bwd"), fullgraph=True, backend="aot_eager")(*inputs)
    sage_attention(*draw(), recipe="sage_bwd")
    outcomes = [(one.kernel, one.quantizer, one.backward) for one in record.outcomes_outside_layers()]
    assert outcomes == [("reference", "", "reference_backward"), ("reference", "", "")]


def test_counting_compiled_calls_of_ever_new_lengths_takes_no_memory():
    for length in range(64, 84):
        sage_attention(*draw(length))
    assert list(record.outcomes_outside_layers().values()) == [20]


def test_observers_see_arguments_output_and_plan():
    layer, calls = nn.Identity(), []
    inputs = draw()
    with record.observe(calls.append):
        output = record.run_in_layer(layer, sage_attention, *inputs, scale=0.5, recipe="sage1")
    sage_attention(*inputs)
    (call,) = calls
    assert call.layer is layer
    assert call.output is output
    assert (call.scale, call.is_causal, call.plan.recipe) == (0.5, False, "sage1")
    assert all(x is y for x, y in zip((call.query, call.key, call.value), inputs, strict=True))


def test_a_layer_can_be_collected_with_its_plans():
    layer = nn.Identity()
    record.run_in_layer(layer, sage_attention, *draw())
    assert record.last_plans(layer)
    watched = weakref.ref(layer)
    del layer
    gc.collect()
    assert watched() is None


def test_a_gpu_that_runs_another_recipe_says_so_in_one_short_line(caplog):
    ada = Request("sage3", "cuda", (8, 9), torch.bfloat16, 1, 8, 8, 8192, 8192, 64, 64, "none", False, False)
    reasons = tuple((f"sage3 by {name}", "needs another GPU") for name in "abcdefgh")
    for _ in range(2):
        record.file_plan(Plan(ada, "int8_forward", "sage2", "native", reasons))
    (message,) = caplog.messages
    assert message.startswith("sage3: sage2 attention runs instead: sage3 is not native on this device")
    assert "sage_hf.explain" in message and len(message) < 120


def test_only_large_emulated_calls_warn_of_slowness_and_once(monkeypatch, caplog):
    monkeypatch.setattr(record, "SLOW_SCORES", 2 * 64 * 64)
    sage_attention(*draw(63))
    sage_attention(*draw(), recipe="exact")
    assert not caplog.records
    sage_attention(*draw())
    sage_attention(*draw(), recipe="sage2")
    (message,) = caplog.messages
    assert "sage3 is emulated in PyTorch, which is slow" in message and "64 queries, 64 keys, 2 heads" in message


def test_a_compiled_emulated_call_says_that_it_is_slow(monkeypatch, caplog):
    monkeypatch.setattr(record, "SLOW_SCORES", 1)
    torch.compile(sage_attention, fullgraph=True, backend="aot_eager")(*draw())
    assert [message for message in caplog.messages if "is slow" in message]
