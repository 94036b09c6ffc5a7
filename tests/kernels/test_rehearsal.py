"""Rehearsed calls: what stands in for tensors, and how the buffers of a call share an allocation."""

import struct

import pytest
import torch
from torch._subclasses import FakeTensorMode

from sage_kernels.replay.launch_plan import ALIGNMENT, Bundle, Tape, launch_now, place_buffers
from sage_kernels.replay.trace import (
    FIRST_ADDRESS,
    Memory,
    NotRepeatableError,
    is_stand_in,
    keeping,
    locate,
    rehearsing,
    relocatable,
)
from tests.helpers import fake_gpu


@pytest.fixture
def rehearsal():
    with rehearsing() as rehearsal:
        yield rehearsal


def test_a_stand_in_is_like_the_tensor_but_for_its_address(rehearsal):
    x = torch.randn(2, 3, 40, 16).transpose(1, 2)
    like = rehearsal.stand_in(x)
    assert (like.shape, like.stride(), like.dtype, like.device) == (x.shape, x.stride(), x.dtype, x.device)
    assert is_stand_in(like.data_ptr()) and not is_stand_in(x.data_ptr())


def test_views_and_allocations_have_addresses(rehearsal):
    x, _ = (rehearsal.stand_in(torch.empty(2, 3, 40, 16)) for _ in range(2))
    assert locate(x[:, 1, 8:].data_ptr()) == (0, (40 + 8) * 16 * 4)
    assert locate(x.view(torch.uint8)[..., 4:].data_ptr()) == (0, 4)
    new = x.new_empty(7, dtype=torch.int8)
    assert locate(new.data_ptr()) == (2, 0) and rehearsal.memories[2].size == 7
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
def test_a_call_that_computes_with_a_tensor_cannot_be_repeated(rehearsal, function):
    with pytest.raises(NotRepeatableError):
        function(rehearsal.stand_in(torch.empty(2, 3, 40, 16)))


def test_a_call_that_allocates_beside_its_arguments_cannot_be_repeated():
    with FakeTensorMode(), rehearsing(), pytest.raises(NotRepeatableError, match="allocates memory"):
        torch.empty(4, device="cuda")


def test_memory_is_known_to_be_free_when_its_last_view_is_gone(rehearsal):
    x = rehearsal.stand_in(torch.empty(4))
    first, second = x.new_empty(8), x.new_empty(8)
    view = first.view(2, 4)
    del first, second
    rehearsal.steps.append("fork")
    del view
    assert [memory.last for memory in rehearsal.memories] == [None, 1, 0]


def test_buffers_needed_at_once_do_not_overlap_and_others_may():
    sizes = [(1000, 0, 2), (300, 0, 3), (5000, 2, None), (700, 2, 3), (1, 3, None), (64, 1, 2)]
    buffers = [Memory(number, size, first, last) for number, (size, first, last) in enumerate(sizes)]
    places, total = place_buffers(buffers, 4)
    spans = {number: (places[number], places[number] + sizes[number][0]) for number in places}
    for one in buffers:
        assert spans[one.number][0] % ALIGNMENT == 0 and spans[one.number][1] <= total
        for other in buffers:
            together = one.first < (other.last or 5) and other.first < (one.last or 5)
            (start, end), (begin, stop) = spans[one.number], spans[other.number]
            assert one is other or not together or end <= begin or stop <= start
    assert total < sum(-(-size // ALIGNMENT) * ALIGNMENT for size, _, _ in sizes)


def test_a_tensor_map_of_a_stand_in_begins_with_its_address():
    def tensor_map(address):
        return struct.pack("<Q", address) + b"layout"

    assert relocatable(tensor_map, 4096) == tensor_map(4096)
    assert relocatable(tensor_map, FIRST_ADDRESS + 32) == tensor_map(FIRST_ADDRESS + 32)
    with pytest.raises(NotRepeatableError, match="first 64 bits"):
        relocatable(lambda address: struct.pack("<QQ", address, address), FIRST_ADDRESS)


def test_an_output_that_is_an_argument_cannot_be_repeated(rehearsal):
    x = rehearsal.stand_in(torch.empty(4))
    with pytest.raises(NotRepeatableError, match="shares"):
        Tape(rehearsal, [x], [x], torch.device("cpu"))


def test_tensors_of_a_bundle_lie_one_behind_another(rehearsal):
    given = [torch.randn(3, 5), torch.randn(0), torch.arange(70, dtype=torch.int8), torch.randn(2).bfloat16()]
    bundle = Bundle.of(given)
    assert bundle.starts == (0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT) and bundle.size == 3 * ALIGNMENT
    memory = torch.empty(bundle.size, dtype=torch.uint8)
    for view, x in zip(bundle.views(memory), given, strict=True):
        assert (view.shape, view.dtype) == (x.shape, x.dtype)
        view.copy_(x)
    assert all(torch.equal(view, x) for view, x in zip(bundle.views(memory), given, strict=True))


def test_what_is_kept_for_all_calls_may_be_allocated():
    with FakeTensorMode(), rehearsing(), keeping():
        torch.ones(4, device="cuda")


def test_while_kernels_are_only_compiled_a_call_may_compute_what_they_take():
    with rehearsing(compiles_only=True) as rehearsal:
        x = rehearsal.stand_in(torch.empty(3, 4, dtype=torch.bfloat16), torch.device("cuda", 0))
        made = [-x, x.clone(), x.t().int(), x.new_zeros(5, dtype=torch.uint8), x[1:].zero_()]
        with pytest.raises(NotRepeatableError):
            x.sum()
    assert [(y.shape, y.dtype, y.is_cuda) for y in made[2:]] == [
        ((4, 3), torch.int32, True),
        ((5,), torch.uint8, True),
        ((2, 4), torch.bfloat16, True),
    ]
    assert len({y.data_ptr() for y in made}) == 5 and made[4].data_ptr() == x.data_ptr() + 8


def test_a_launch_by_itself_gets_its_parameters_and_the_current_stream(monkeypatch):
    def launch(config, function, parameters, extra):
        launched = fake_gpu.FakeLibrary.cuLaunchKernelEx(library, config, function, parameters, extra)
        words.extend(library.launched[-1].word(number) for number in range(2))  # while they are there
        return launched

    library, words = fake_gpu.install(monkeypatch), []
    library.cuLaunchKernelEx = launch
    inputs = {"x": torch.empty(4), "y": torch.empty(4)}
    launch_now(fake_gpu.pack(None, (3, 2), inputs, {}))
    assert words == [x.data_ptr() for x in inputs.values()]
    ((_, grid, stream, _),) = library.launched
    assert (grid, stream) == ((3, 2, 1), fake_gpu.STREAM)
