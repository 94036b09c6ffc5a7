"""A GPU that runs nothing, on which calls are prepared."""

import pytest
import torch

from sage_kernels.dispatch import run
from sage_kernels.dispatch.registry import Plan
from sage_kernels.replay import prepared, prepared_training
from sage_kernels.spec.call import Call, Mask
from sage_kernels.spec.operands import Saved
from sage_kernels.spec.recipe import get_recipe
from tests.helpers import fake_gpu

HOPPER = {"kernel": "int8_forward_hopper", "quantizer": "int8_quantize_hopper", "backward": "int8_backward_hopper"}


@pytest.fixture
def nothing_prepared():
    """Forget prepared calls before and after a test."""
    prepared.forget()
    yield
    prepared.forget()


@pytest.fixture
def gpu(monkeypatch):
    """The driver of a GPU on which calls with tensors of the CPU are prepared, with Hopper's kernels."""
    library = fake_gpu.install(monkeypatch)

    def plan_of(call, grad):
        return Plan(run.request_of(call, grad), recipe=call.recipe.name, numerics="native", **HOPPER)

    def prepare(call, plan, mask, result, tokens_first=False):
        return prepared.prepare_launches(call, plan_of(call, False), result)

    def prepare_training(query, key, value, mask, is_causal, scale, recipe, fallback):
        call = Call(query, key, value, get_recipe(recipe), Mask.of(mask, key.shape[2]), is_causal, 0, 0.125)
        result = query, Saved(*[query] * 6)
        return prepared_training.prepare_launches(call, plan_of(call, True), scale, fallback, result)

    def backward(self, tensors, valid):
        return tuple(x.new_zeros(x.shape) for x in (tensors[0], tensors[1], tensors[1]))

    monkeypatch.setattr(prepared, "prepare", prepare)
    monkeypatch.setattr(prepared_training, "prepare", prepare_training)
    monkeypatch.setattr(prepared_training.TrainingCall, "_backward_by_operator", backward)
    return library


@pytest.fixture
def gluon(monkeypatch):
    """Let Triton launches be packed without a compiler; skip the test where Triton is too old for the kernels."""
    pytest.importorskip("sage_kernels.gluon.int8_backward", exc_type=ImportError)
    from sage_kernels.language import backward_operands, launch, rotation

    def matrix(channels, dtype, device):
        return rotation.rotation_matrix(channels, dtype, torch.device("cpu"))

    monkeypatch.setattr(launch, "pack", fake_gpu.pack)
    monkeypatch.setattr(backward_operands, "rotation_matrix", matrix)
