"""Kernels of a backward pass are compiled while its forward pass is: each once, and as the launches want them."""

import logging
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from sage_kernels import backends  # noqa: F401 - `backends` registers the kernels
from sage_kernels.dispatch import execution, precompile
from sage_kernels.dispatch.plan import Plan
from sage_kernels.dispatch.registry import get_backward
from sage_kernels.replay import trace
from sage_kernels.spec.call import BackwardCall, Call, Mask
from sage_kernels.spec.operands import Saved
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.spec.saved import empty_saved
from tests.helpers import fake_gpu


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that are compiled, with the thread of each."""
    from sage_kernels.triton.common import backward_operands, rotation

    class Kernel:
        def __init__(self, kernel):
            self.kernel = kernel

        def run(self, grid, warmup, **options):
            assert warmup
            found.append((self.kernel.__name__, threading.current_thread()))

    found = []
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(precompile, "_begun", set())
    real = backward_operands.launch

    def launch(kernel, grid, **arguments):
        real(Kernel(kernel), grid, **arguments)

    from sage_kernels.triton import int8_backward as triton
    from sage_kernels.triton.common import padding

    for module in (backward_operands, padding, triton):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(
        backward_operands, "rotation_matrix", lambda *given: rotation.rotation_matrix(*given[:2], torch.device("cpu"))
    )
    return found


def draw(traced, key_mask=None, **options):
    query = torch.empty(1, 192, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    tensors = [traced.placeholder(query) for _ in range(3)]
    mask = Mask.of_keys(None if key_mask is None else traced.placeholder(key_mask))
    return Call(*tensors, get_recipe("sage_bwd"), mask, **{"scale": 0.125, **options})


def plan_of(call, backward):
    request = execution.request_of(call, grad=True)
    return Plan(request, "int8_forward", "sage_bwd", "native", backward=backward)


LAUNCHED = ["prepare_keys", "prepare_queries", "int8_bwd_dkdv", "int8_bwd_dq"]


@pytest.mark.parametrize("padded", [False, True])
def test_what_a_backward_pass_launches_is_compiled_in_a_thread_each(compiled, padded):
    with trace.tracing() as traced:
        call = draw(traced, torch.ones(1, 192, dtype=torch.bool) if padded else None)
    for _ in range(2):  # the second call begins nothing
        precompile.compile_backward(call, plan_of(call, "int8_backward"))
        precompile.finish()
    assert sorted(name for name, _ in compiled) == sorted(LAUNCHED + ["find_spans"] * padded)
    threads = {thread for _, thread in compiled}
    assert len(threads) == len(compiled) and threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)


def test_what_triton_does_first_is_done_at_once_and_together(compiled, monkeypatch):
    """Its driver is built, and its files are digested, at the same time: neither ends before the other has begun."""
    from sage_kernels.triton.common import launch, triton_abi

    both, seen = threading.Barrier(2, timeout=10), []

    def work():
        both.wait()
        seen.append(len(compiled))

    for name in ("build_driver", "digest_compiler"):
        monkeypatch.setattr(triton_abi, name, work)
    monkeypatch.setattr(launch, "_starting", [])
    with trace.tracing() as traced:
        call = draw(traced)
    precompile.compile_backward(call, plan_of(call, "int8_backward"))
    precompile.finish()
    assert seen == [0, 0] and len(compiled) == 4


@pytest.mark.parametrize(("causal", "padded"), [(False, False), (True, False), (False, True)])
def test_compiled_kernels_are_the_kernels_of_the_backward_pass(monkeypatch, causal, padded):
    """The output's gradient comes from a linear layer, so it is laid out as the output."""
    from sage_kernels.triton.common import backward_operands, rotation, triton_abi

    def described(value):
        if hasattr(value, "block_shape"):
            return described(value.base), value.shape, value.strides, value.block_shape
        return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value

    def note(names, kernel, grid, arguments, options, dependent=False):
        names.append((kernel.__name__, {name: described(value) for name, value in arguments.items()}, options))
        return fake_gpu.pack(kernel, grid, arguments, options, dependent)

    launched, compiled = [], []
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(triton_abi, "pack", partial(note, launched))
    monkeypatch.setattr(triton_abi, "compile_kernel", partial(note, compiled))
    monkeypatch.setattr(precompile, "_begun", set())
    monkeypatch.setattr(
        backward_operands, "rotation_matrix", lambda *given: rotation.rotation_matrix(*given[:2], torch.device("cpu"))
    )
    key_mask, x = (
        torch.arange(192)[None] < 150 if padded else None,
        torch.empty(1, 192, 2, 64).bfloat16().transpose(1, 2),
    )
    plain = Call(x, x, x, get_recipe("sage_bwd"))
    saved = empty_saved(plain, torch.empty(1, 2, 192))
    with trace.tracing() as traced:
        call = draw(traced, key_mask, is_causal=causal)
        precompile.compile_backward(call, plan_of(call, "int8_backward"))
        precompile.finish()
        gradient, output, *kept = map(traced.placeholder, (x, x, *saved))
        backward = BackwardCall(
            gradient, call.value, output, Saved(*kept), 64, call.recipe, call.mask, causal, 0, call.scale
        )
        get_backward("int8_backward").backward(backward)
    assert sorted(compiled, key=str) == sorted(launched, key=str) and len(launched) == 4 + padded


@pytest.mark.parametrize("kind", ["none", "keys", "bool"])
def test_kernels_of_a_first_call_compile_in_parallel(monkeypatch, kind):
    from sage_kernels.triton.common import launch, rotation
    from sage_kernels.triton.int8_forward import attend_and_save
    from sage_kernels.triton.quantize import int8
    from sage_kernels.triton.registration import TritonInt8Quantizer

    def run(self, grid, warmup, **arguments):
        assert warmup
        compiled.append((self.__name__, threading.current_thread()))

    def attend(call):
        return attend_and_save(call, TritonInt8Quantizer(), (9, 0))

    compiled = []
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(launch.triton.JITFunction, "run", run)
    monkeypatch.setattr(launch, "_await_compiler", lambda: None)
    monkeypatch.setattr(precompile, "_begun", set())
    monkeypatch.setattr(
        int8, "rotation_matrix", lambda *given: rotation.rotation_matrix(*given[:2], torch.device("cpu"))
    )
    mask = {
        "keys": torch.ones(1, 1, 1, 192, dtype=torch.bool),
        "bool": torch.ones(192, 192, dtype=torch.bool)[None, None],
    }
    with trace.tracing() as traced:
        call = draw(traced)
        if kind in mask:
            call = replace(call, mask=Mask.of(traced.placeholder(mask[kind]), 192))
    for _ in range(2):  # the second call compiles nothing
        precompile.compile_forward(call, plan_of(call, "int8_backward"), attend)
    with trace.tracing(compiles_only=True) as traced:
        attend(call)
    names = [name for name, _ in compiled]
    assert names and len(names) == len(traced.compilations)
    assert {"block_statistics", "quantize_key_int8", "int8_forward"} <= set(names)
    assert len({thread for _, thread in compiled}) == len(compiled)


def test_a_parser_that_another_thread_disturbed_is_asked_again(monkeypatch):
    """Python's own may say so of parsing in two threads, before 3.12.2: "AST constructor recursion depth mismatch"."""
    from sage_kernels.triton.common import launch

    class Kernel:
        def run(self, **options):
            asked.append(options["warmup"])
            if len(asked) == 1:
                raise SystemError("AST constructor recursion depth mismatch")

    asked = []
    with trace.tracing(compiles_only=True) as traced:
        launch.launch(Kernel(), (1,), x=traced.placeholder(torch.empty(1)))
    traced.compilations[0]()
    assert asked == [True, True]


def test_calls_that_tell_too_little_begin_nothing(compiled, monkeypatch):
    with trace.tracing() as traced:
        call = draw(traced)
        plan = plan_of(call, "int8_backward")
        precompile.compile_backward(replace(call, query=torch.empty(1, 2, 192, 64)), plan)  # on the CPU
        precompile.compile_backward(replace(call, key=call.key[:, :, :0], value=call.value[:, :, :0]), plan)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        precompile.compile_backward(call, plan)
    precompile.finish()
    assert not compiled and not precompile._begun


@pytest.mark.parametrize("refused_by", ["the host code", "the compiler"])
def test_a_kernel_that_does_not_compile_ahead_raises_nothing_and_is_logged(compiled, monkeypatch, caplog, refused_by):
    begun, raised = [], []

    def refuse():
        begun.append(threading.current_thread())
        raise RuntimeError("refused")

    def backward(call):
        if refused_by == "the host code":
            refuse()
        trace.current().compilations.extend((refuse, refuse))

    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(precompile, "get_backward", lambda name: SimpleNamespace(backward=backward))
    with trace.tracing() as traced:
        call = draw(traced)
    with caplog.at_level(logging.INFO, "sage_kernels.dispatch.precompile"):
        precompile.compile_backward(call, plan_of(call, "int8_backward"))
        precompile.finish()
    assert len(begun) == (1 if refused_by == "the host code" else 2)
    assert not raised and threading.main_thread() not in begun
    assert [message.endswith("RuntimeError: refused") for message in caplog.messages] == [True] * len(begun)
