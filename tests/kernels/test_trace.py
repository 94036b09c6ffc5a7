"""Traced calls: placeholders for tensors, and which host code can be traced."""

import struct
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch._subclasses import FakeTensorMode

from sage_kernels import backends  # noqa: F401 - `backends` registers the kernels
from sage_kernels.cuda import quantize_nvfp4
from sage_kernels.cuda.registration import CudaNVFP4Quantizer
from sage_kernels.dispatch.registry import get_forward
from sage_kernels.formats import nvfp4
from sage_kernels.replay.trace import (
    FIRST_ADDRESS,
    NotReplayableError,
    is_placeholder,
    keeping,
    locate,
    relocatable,
    tracing,
)
from sage_kernels.spec.call import Call, Mask
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton import nvfp4_forward
from tests.helpers import fake_gpu, triton_calls

SEARCH_TABLE = nvfp4.search_table(get_recipe("sage3").scale_steps, torch.device("cpu"))
MASKS = {
    "keys": torch.ones(1, 1, 1, 192, dtype=torch.bool),
    "bool": torch.ones(1, 1, 192, 192, dtype=torch.bool),
    "additive": torch.zeros(1, 2, 192, 192, dtype=torch.bfloat16),
}


@pytest.fixture
def traced():
    with tracing() as traced:
        yield traced


def test_a_placeholder_is_like_the_tensor_but_for_its_address(traced):
    x = torch.randn(2, 3, 40, 16).transpose(1, 2)
    like = traced.placeholder(x)
    assert (like.shape, like.stride(), like.dtype, like.device) == (x.shape, x.stride(), x.dtype, x.device)
    assert is_placeholder(like.data_ptr()) and not is_placeholder(x.data_ptr())


def test_views_and_allocations_have_addresses(traced):
    x, _ = (traced.placeholder(torch.empty(2, 3, 40, 16)) for _ in range(2))
    assert locate(x[:, 1, 8:].data_ptr()) == (0, (40 + 8) * 16 * 4)
    assert locate(x.view(torch.uint8)[..., 4:].data_ptr()) == (0, 4)
    new = x.new_empty(7, dtype=torch.int8)
    assert locate(new.data_ptr()) == (2, 0) and traced.memories[2].size == 7
    assert locate(torch.empty_like(x).data_ptr()) == (3, 0)
    assert x.contiguous() is x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x.neg_(),
        lambda x: x.transpose(1, 2).contiguous(),
        lambda x: x.new_zeros(3),
        lambda x: x.float().half(),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.sum().item(),
    ],
)
def test_a_call_that_computes_with_a_tensor_cannot_be_replayed(traced, function):
    with pytest.raises(NotReplayableError):
        function(traced.placeholder(torch.empty(2, 3, 40, 16)))


def test_a_call_that_allocates_with_its_arguments_cannot_be_replayed():
    with FakeTensorMode(), tracing(), pytest.raises(NotReplayableError, match="allocates memory"):
        torch.empty(4, device="cuda")


def test_memory_is_known_to_be_free_when_its_last_view_is_gone(traced):
    x = traced.placeholder(torch.empty(4))
    first, second = x.new_empty(8), x.new_empty(8)
    view = first.view(2, 4)
    del first, second
    traced.ran(torch.Tensor.zero_, x)
    del view
    assert [memory.last for memory in traced.memories] == [None, 1, 0]


def test_a_tensor_map_of_a_placeholder_begins_with_its_address():
    def tensor_map(address):
        return struct.pack("<Q", address) + b"layout"

    assert relocatable(tensor_map, 4096) == tensor_map(4096)
    assert relocatable(tensor_map, FIRST_ADDRESS + 32) == tensor_map(FIRST_ADDRESS + 32)
    with pytest.raises(NotReplayableError, match="first 64 bits"):
        relocatable(lambda address: struct.pack("<QQ", address, address), FIRST_ADDRESS)


def test_what_is_kept_for_all_calls_may_be_allocated():
    with FakeTensorMode(), tracing(), keeping():
        torch.ones(4, device="cuda")


def test_calls_may_compute_their_inputs_while_kernels_compile():
    with tracing(compiles_only=True) as traced:
        x = traced.placeholder(torch.empty(3, 4, dtype=torch.bfloat16), torch.device("cuda", 0))
        made = [-x, x.clone(), x.t().int(), x.new_zeros(5, dtype=torch.uint8), x[1:].zero_()]
        with pytest.raises(NotReplayableError):
            x.sum()
    assert [(y.shape, y.dtype, y.is_cuda) for y in made[2:]] == [
        ((4, 3), torch.int32, True),
        ((5,), torch.uint8, True),
        ((2, 4), torch.bfloat16, True),
    ]
    assert len({y.data_ptr() for y in made}) == 5 and made[4].data_ptr() == x.data_ptr() + 8


@pytest.mark.parametrize(
    ("kernels", "mask"), [*product(("sage1", "sage2", "sage3", "CUDA's quantiser"), MASKS), ("CUDA", "keys")]
)
def test_calls_with_masks_can_be_replayed(monkeypatch, kernels, mask):
    """Rotation is left out, and tables of scales are placeholders: both are kept for all calls, and lie on the GPU."""
    fake_gpu.install(monkeypatch)
    with tracing() as traced:
        table = traced.placeholder(SEARCH_TABLE)
        for module in (nvfp4, quantize_nvfp4):
            monkeypatch.setattr(module, "search_table", lambda steps, device: table)
        tensors = [traced.placeholder(torch.empty(1, 2, 192, 64, dtype=torch.bfloat16)) for _ in range(3)]
        recipe = replace(get_recipe(kernels if kernels in ("sage1", "sage2") else "sage3"), rotate=False)
        call = Call(*tensors, recipe, Mask.of(traced.placeholder(MASKS[mask]), 192), scale=0.125)
        if kernels == "CUDA":
            get_forward("nvfp4_forward_cuda").attend(call, CudaNVFP4Quantizer())
        elif kernels == "CUDA's quantiser":
            nvfp4_forward.attend(call, CudaNVFP4Quantizer(), (12, 0), native=True)
        else:
            triton_calls.attend(call, (9, 0))
    assert traced.steps
