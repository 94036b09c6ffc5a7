"""Plans of launches: which calls can be replayed, and where their buffers lie."""

import pytest
import torch

from sage_kernels.replay import launch_plan
from sage_kernels.replay.launch_plan import LaunchPlan
from sage_kernels.replay.trace import NotReplayableError, tracing
from sage_kernels.runtime import torch_private

CPU = torch.device("cpu")


def test_an_operator_among_launches_gets_the_tensors_of_each_call(monkeypatch):
    monkeypatch.setattr(torch_private, "current_device", lambda: 0)
    monkeypatch.setattr(torch_private, "current_stream", lambda index: 7)

    def attend(x, y, lengths):
        lengths.fill_(3)
        y.copy_(x * lengths[4])

    with tracing() as trace:
        x = trace.placeholder(torch.empty(2, 8, 4).transpose(0, 1))
        y, lengths = x.new_empty(8, 2, 4), x.new_empty(5, dtype=torch.int32)
        trace.ran(attend, x, y, lengths)
        plan = LaunchPlan(trace, [x], [y], CPU)
    for _ in range(2):
        given = torch.randn(2, 8, 4).transpose(0, 1)
        assert torch.equal(plan.run(given)[0], 3 * given)


@pytest.mark.parametrize("argument", [lambda x: x[1:], lambda x: x.transpose(0, 1), lambda x: torch.empty(2)])
def test_an_operator_gets_no_part_of_an_argument_and_no_other_tensor(argument):
    with tracing() as trace, pytest.raises(NotReplayableError):
        x = trace.placeholder(torch.empty(8, 4))
        trace.ran(lambda x: None, argument(x))
        LaunchPlan(trace, [x], [], CPU)


def test_an_output_that_is_an_argument_cannot_be_replayed():
    with tracing() as trace, pytest.raises(NotReplayableError, match="shares"):
        x = trace.placeholder(torch.empty(4))
        LaunchPlan(trace, [x], [x], CPU)


def test_buffers_needed_at_once_do_not_overlap_and_others_may():
    sizes = [(1000, 0, 2), (300, 0, 3), (5000, 2, None), (700, 2, 3), (1, 3, None), (64, 1, 2)]
    buffers = [launch_plan.TracedMemory(number, size, first, last) for number, (size, first, last) in enumerate(sizes)]
    places, total = launch_plan.place_buffers(buffers, 4)
    spans = {number: (places[number], places[number] + sizes[number][0]) for number in places}
    for one in buffers:
        assert spans[one.number][0] % launch_plan.BUFFER_ALIGNMENT == 0 and spans[one.number][1] <= total
        for other in buffers:
            together = one.first < (other.last or 5) and other.first < (one.last or 5)
            (start, end), (begin, stop) = spans[one.number], spans[other.number]
            assert one is other or not together or end <= begin or stop <= start
    assert total < sum(-(-size // launch_plan.BUFFER_ALIGNMENT) * launch_plan.BUFFER_ALIGNMENT for size, _, _ in sizes)
