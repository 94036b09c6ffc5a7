"""Prepared calls over block lists, on a GPU that runs nothing."""

import pytest
import torch

from sage_kernels import ops
from sage_kernels.cuda import block_lists, int8_forward
from sage_kernels.cuda.parameters import layout
from sage_kernels.dispatch import run
from sage_kernels.dispatch.registry import Plan, select
from sage_kernels.replay import prepared_lists
from sage_kernels.spec.block_list import BlockList
from tests.helpers import fake_gpu
from tests.helpers.blocks import draw_blocks

HOPPER = {"kernel": "int8_forward_hopper", "quantizer": "int8_quantize_hopper"}
SORT, FORWARD = -2, -1  # of the launches of a call
ARGUMENTS = 7  # of the parameters of the forward kernel


@pytest.fixture
def gpu(monkeypatch):
    """The driver of a GPU on which calls with tensors of the CPU are prepared, with Hopper's kernels."""

    def prepare(call, plan, result):
        plan = Plan(run.request_of(call), recipe=call.recipe.name, numerics="native", **HOPPER)
        return prepared_lists.prepare_launches(call, plan, result)

    monkeypatch.setattr(prepared_lists, "prepare", prepare)
    select.cache_clear()
    yield fake_gpu.install(monkeypatch)
    select.cache_clear()


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(1, 2, 300, 128, generator=generator).bfloat16() for _ in range(3)]
    return inputs, draw_blocks(1, 2, 300, 300, seed=seed)


def place(module, name):
    """The first byte of a field of a kernel's arguments."""
    return next(field.offset for field in layout(module.Arguments).fields if field.path == name)


@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "mask of keys"])
def test_a_repeated_call_launches_with_its_own_tensors(gpu, masked):
    mask = (torch.arange(300) < 200)[None, None, None] if masked else None
    for seed in range(4):
        inputs, blocks = draw(seed)
        gpu.launched.clear()
        output, lse = ops.attention(*inputs, mask=mask, blocks=blocks, recipe="sage2", return_lse=True)
        assert (output.shape, lse.shape) == (inputs[0].shape, inputs[0].shape[:3])
        assert output.transpose(1, 2).is_contiguous()
        if seed < 2:
            continue
        assert len(gpu.launched) == 4  # statistics, operands, lists, and attention
        assert gpu.launched[SORT].word(0) == blocks.counts.data_ptr()
        assert gpu.launched[SORT].word(0, 8) == blocks.tiles.data_ptr()
        assert gpu.launched[SORT].word(0, place(block_lists, "lists")) == gpu.launched[FORWARD].word(
            ARGUMENTS, place(int8_forward, "lists")
        )


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("known", [False, True])
def test_a_tensor_whose_memory_was_freed_is_refused_before_any_launch(gpu, known, number):
    inputs, blocks = draw()
    for _ in range(3 * known):
        ops.attention(*inputs, blocks=blocks, recipe="sage2")
    gpu.launched.clear()
    tensors = [*inputs, blocks.counts, blocks.tiles]
    tensors[number] = tensors[number].clone()
    tensors[number].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory"):
        ops.attention(*tensors[:3], blocks=BlockList(*tensors[3:]), recipe="sage2")
    assert not gpu.launched


def test_calls_that_differ_in_their_lists_sizes_or_options_are_others(gpu):
    inputs, blocks = draw()
    tensors = *inputs, blocks.counts, blocks.tiles
    slot = prepared_lists.find(tensors, 128, 128, "sage2")
    assert prepared_lists.find(tensors, 128, 128, "sage2") is slot
    assert prepared_lists.find(tensors, 64, 128, "sage2") is not slot
    assert prepared_lists.find(tensors, 128, 128, "sage1") is not slot
    wider = *inputs, blocks.counts, torch.cat([blocks.tiles, blocks.tiles], -1)
    assert prepared_lists.find(wider, 128, 128, "sage2") is not slot


def test_what_kernels_do_not_serve_is_not_prepared():
    inputs, _ = draw()
    blocks = BlockList.of_kept(torch.ones(1, 1, 3, 3, dtype=torch.bool))
    first, *others = (ops.attention(*inputs, blocks=blocks, recipe="sage2")[0] for _ in range(3))
    assert all(torch.equal(first, other) for other in others)
    options = 128, 128, False, 0, type(None), None, "sage2", "native", False
    slot = prepared_lists.find((*inputs, blocks.counts, blocks.tiles), *options)
    assert slot.calls == 3 and slot.prepared is None
