"""What the backward pass launches is compiled while the forward pass compiles its own."""

import contextlib
import threading

import pytest
import torch

from sage_kernels import ahead, dispatch, ops  # noqa: F401 - `ops` registers the kernels
from sage_kernels.call import BackwardCall, Call, Mask
from sage_kernels.recipe import get_recipe
from sage_kernels.registry import Plan, get_backward

pytest.importorskip("sage_kernels.gluon.int8_backward", exc_type=ImportError)
KERNELS = ["int8_backward_hopper", "int8_backward"]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def call_of(kernel, *, is_causal=False, padded=False):
    query, key, value = (torch.randn(2, 200, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 2, 2))
    valid = torch.arange(200).expand(2, 200) < 150 if padded else None
    call = Call(query, key, value, get_recipe("sage_bwd"), Mask.of_keys(valid), is_causal, 0, 0.125)
    facts = {"numerics": "native", "quantizer": "", "backward": kernel}
    return call, Plan(dispatch.request_of(call, grad=True), "forward", "sage_bwd", **facts)


def described(launch):
    """A launch without addresses: by this Triton chooses the machine code."""

    def describe(x):
        x = getattr(x, "base", x)
        return (x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x

    arguments = {name: describe(value) for name, value in launch.arguments.items()}
    return launch.kernel.__name__, launch.grid, arguments, launch.options


@pytest.fixture
def compiled(monkeypatch):
    """The launches that are compiled ahead."""
    from sage_kernels.language import launch

    compiled = []
    monkeypatch.setattr(launch, "compile_together", lambda launches, device: compiled.extend(launches))
    return compiled


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"padded": True}], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_compiled_is_what_the_backward_pass_launches(kernel, options, compiled):
    from sage_kernels.language.launch import recording

    call, plan = call_of(kernel, **options)
    output, saved = dispatch.attend_and_save(call, "native")  # on a CPU by the reference
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    backward = BackwardCall(output, call.value, output, saved, 64, call.recipe, call.mask, call.is_causal, 0, 0.125)
    with recording() as launches:
        get_backward(kernel).backward(backward)
    ahead.compile_backward(call, plan)
    ahead.wait()
    assert [described(launch) for launch in compiled] == [described(launch) for launch in launches]


def test_calls_of_one_kind_compile_once_and_those_who_wait_wait(compiled, monkeypatch):
    call, plan = call_of(KERNELS[0])
    waited, kernel = threading.Event(), get_backward(KERNELS[0])
    backward = kernel.backward
    monkeypatch.setattr(type(kernel), "backward", lambda self, call: waited.wait(20) and backward(call))
    for _ in range(2):
        ahead.compile_backward(call, plan)
    threading.Timer(0.2, waited.set).start()
    ahead.wait()
    assert len(compiled) == 4


def test_what_does_not_compile_is_left_to_the_launch(monkeypatch):
    call, plan = call_of(KERNELS[0])

    def fail(*arguments):
        raise RuntimeError("no")

    monkeypatch.setattr(type(get_backward(KERNELS[0])), "compile", fail)
    ahead.compile_backward(call, plan)
    ahead.wait()
