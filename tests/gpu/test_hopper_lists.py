"""The CUDA kernel of the INT8 recipes for Hopper over block lists, on the operands that the Triton kernel gets too."""

import pytest
import torch

from sage_kernels.cuda import block_lists
from sage_kernels.cuda import int8_forward as hopper
from sage_kernels.exact import sdpa
from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.layout import padded_channels
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.triton import int8_forward
from sage_kernels.triton.block_entries import block_entries
from sage_kernels.triton.common.padding import key_padding
from sage_kernels.triton.forward_mask import forward_mask
from tests.helpers import calls, triton_calls
from tests.helpers.blocks import draw_blocks
from tests.helpers.judge import lse_tolerance

# (batch, q_heads, kv_heads, q_len, kv_len)
SIZES = (
    (1, 1, 1, 64, 96),
    (1, 1, 1, 1, 1),
    (2, 4, 2, 300, 500),
    (1, 2, 2, 193, 1025),
    (2, 2, 2, 1024, 1024),
    (1, 3, 1, 129, 4113),
    (2, 24, 8, 1500, 700),  # several items a multiprocessor
)
CAUSAL = ((False, 0), (True, 0), (True, 37), (True, -100), (True, -5000))
# (recipe, head_dim, v_head_dim, dtype)
HEADS = (
    ("sage2", 128, 128, torch.bfloat16),
    ("sage1", 64, 64, torch.float16),
    ("sage1", 128, 128, torch.bfloat16),
    ("sage2", 80, 120, torch.float16),
)


pytestmark = pytest.mark.usefixtures("needs_hopper")


def one_tile(blocks: BlockList) -> BlockList:
    return blocks._replace(counts=torch.ones_like(blocks.counts))


def for_all(blocks: BlockList) -> BlockList:
    return blocks._replace(counts=blocks.counts[:1, :1], tiles=blocks.tiles[:1, :1])


def beyond_the_keys(blocks: BlockList) -> BlockList:
    """Name tiles that do not exist, which a GPU leaves out."""
    tiles = blocks.tiles.clone()
    tiles[..., ::3], tiles[..., 1::3] = 2**20, -1
    return blocks._replace(tiles=tiles)


class Operands:
    """Q, K and V, both with means, what a quantiser makes of them, and a list."""

    def __init__(self, sizes, head_dim, v_head_dim, dtype, recipe, change=lambda blocks: blocks, key_mask=None):
        batch, q_heads, kv_heads, q_len, kv_len = sizes
        generator = torch.Generator("cuda").manual_seed(sum(sizes))

        def draw(heads, tokens, channels):
            x = torch.randn(batch, heads, tokens, channels, generator=generator, device="cuda")
            return (x + torch.randn(1, heads, 1, channels, generator=generator, device="cuda")).to(dtype)

        self.recipe, self.key_mask = RECIPES[recipe], key_mask
        self.inputs = (
            draw(q_heads, q_len, head_dim),
            draw(kv_heads, kv_len, head_dim),
            draw(kv_heads, kv_len, v_head_dim),
        )
        drawn = change(draw_blocks(batch, q_heads, q_len, kv_len, share=0.4))
        self.blocks = drawn._replace(counts=drawn.counts.cuda(), tiles=drawn.tiles.cuda())
        self.padding = None if key_mask is None else key_padding(key_mask)
        self.quantized = triton_calls.quantize(self.call(True), key_mask)

    def call(self, return_lse, is_causal=False, causal_offset=0):
        options = {"is_causal": is_causal, "causal_offset": causal_offset, "return_lse": return_lse}
        call = calls.new_call(*self.inputs, self.recipe, key_mask=self.key_mask, blocks=self.blocks, **options)
        return call.for_kernel()

    def attend(self, kernel, is_causal=False, causal_offset=0, return_lse=True, change=lambda lists: None):
        """(output, lse), in memory that held NaN."""
        query, _, value = self.inputs
        output = query.new_full((*query.shape[:3], value.shape[3]), torch.nan)
        lse = query.new_full(query.shape[:3], torch.nan, dtype=torch.float32) if return_lse else None
        call = self.call(return_lse, is_causal, causal_offset)
        if kernel is hopper:
            lists = sort_lists(call, self.padding)
            change(lists)
            hopper.forward(
                self.quantized, output, lse, call, hopper.Int8ForwardConfig.of_call(call), self.padding, lists
            )
        else:
            channels = padded_channels(max(query.shape[3], value.shape[3]))
            config = int8_forward.choose_config(call, channels, call.recipe.pv, (9, 0))
            mask = forward_mask(call, config, reads_spans=True)
            int8_forward.forward(self.quantized, output, lse, call, (9, 0), mask)
        return output, lse


def sort_lists(call, padding, heads_at_once=2):
    lists = block_lists.SortedLists.empty(call, padding)
    block_lists.sort_lists(call, padding, lists, heads_at_once)
    return lists


def error(x, truth):
    return (x.double() - truth.double()).abs().sum().item()


def assert_as_accurate(operands, is_causal=False, offset=0):
    query, key, _ = operands.inputs
    expected, expected_lse = operands.attend(int8_forward, is_causal, offset)
    kept = operands.blocks.kept(key.shape[2]).repeat_interleave(128, 2)[:, :, : query.shape[2]]
    mask = kept.repeat_interleave(128, 3)[..., : key.shape[2]]
    if operands.key_mask is not None:
        mask = mask & operands.key_mask[:, None, None]
    truth, _ = sdpa.attention(*operands.inputs, mask=mask, is_causal=is_causal, causal_offset=offset)
    rounding = torch.finfo(expected.dtype).eps * truth.abs().sum().item()
    for return_lse in (True, False):
        output, lse = operands.attend(hopper, is_causal, offset, return_lse)
        assert output.isfinite().all()
        # Weights are relative to another power of two, so that they round otherwise; as far, on average.
        assert error(output, truth) <= 1.05 * error(expected, truth) + rounding
        assert error(output, expected) <= 2**0.5 * error(expected, truth) + rounding
        assert torch.equal((output == 0).all(-1), (expected == 0).all(-1))
        if lse is not None:
            assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
            finite = expected_lse > -torch.inf
            assert ((lse - expected_lse)[finite].abs() <= lse_tolerance(query, key)).all()


@pytest.mark.parametrize(("recipe", "head_dim", "v_head_dim", "dtype"), HEADS)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_as_accurate_as_the_portable_kernel(recipe, sizes, head_dim, v_head_dim, dtype):
    operands = Operands(sizes, head_dim, v_head_dim, dtype, recipe)
    for is_causal, offset in CAUSAL:
        assert_as_accurate(operands, is_causal, offset)


@pytest.mark.parametrize("change", [one_tile, for_all], ids=lambda change: change.__name__)
def test_lists_of_one_tile_and_lists_for_all_heads_are_walked_right(change):
    for sizes in SIZES:
        operands = Operands(sizes, 128, 128, torch.bfloat16, "sage2", change)
        assert_as_accurate(operands)
        assert_as_accurate(operands, True, 37)


@pytest.mark.parametrize(("recipe", "head_dim", "v_head_dim", "dtype"), HEADS[:2])
def test_it_is_as_accurate_where_keys_do_not_exist(recipe, head_dim, v_head_dim, dtype):
    for sizes in SIZES:
        batch, kv_len = sizes[0], sizes[4]
        index = torch.arange(kv_len, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        holes = torch.rand(batch, kv_len, generator=generator, device="cuda") < 0.5
        for key_mask in ((index >= kv_len // 3)[None], (index < kv_len * 2 // 3)[None], holes, (index < 0)[None]):
            operands = Operands(sizes, head_dim, v_head_dim, dtype, recipe, key_mask=key_mask)
            assert_as_accurate(operands)
            assert_as_accurate(operands, True, 37)


def test_tiles_that_do_not_exist_are_left_out():
    operands = Operands((2, 4, 2, 1000, 1100), 128, 128, torch.bfloat16, "sage2", beyond_the_keys)
    output, lse = operands.attend(hopper)
    expected, expected_lse = operands.attend(int8_forward)
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    # Each is at most 0.036 off exact attention, in another direction; a wrong number of tiles moves rows by far more.
    assert error(output, expected) <= 2**0.5 * 0.036 * expected.double().abs().sum().item()


def test_outputs_do_not_depend_on_the_order_of_items():
    operands = Operands((2, 24, 8, 1500, 700), 128, 128, torch.bfloat16, "sage2")

    def shuffle(lists):
        order = torch.randperm(lists.queue.numel() - 1, device="cuda")
        lists.queue[1:] = lists.queue[1:][order]

    expected, expected_lse = operands.attend(hopper)
    for _ in range(3):
        output, lse = operands.attend(hopper, change=shuffle)
        assert torch.equal(output, expected)
        assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_queue_has_each_item_once_and_first_the_long_ones_that_would_end_alone(is_causal):
    tiles = torch.arange(40, dtype=torch.int32).expand(2, 50, 60, -1)
    counts = torch.full((2, 50, 60), 4, dtype=torch.int32)
    counts[:, ::3, -1], counts[1, 7, 5], counts[0, 0, 0] = 40, 39, 0
    blocks = BlockList(counts.cuda(), tiles.cuda())
    inputs = [torch.empty(2, heads, 60 * 128, 64, device="cuda", dtype=torch.bfloat16) for heads in (50, 10, 10)]
    call = calls.new_call(*inputs, "sage2", blocks=blocks, is_causal=is_causal)
    queue = sort_lists(call, None, 20).queue.cpu()
    assert queue[0] == 0
    assert torch.equal(queue[1:].sort().values, torch.arange(2 * 50 * 60, dtype=torch.int32))
    listed = counts.flatten()[queue[1:].long()]
    moved = int((listed > 8).int().cumprod(0).sum())
    assert 0 < moved < int((counts > 8).sum())
    rest = listed[moved:]
    assert (rest[-1000:] <= 8).all()
    left = listed[:moved].sum() + rest.flip(0).cumsum(0).flip(0)
    blocks = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert (left >= 2 * rest * blocks)[rest > 8].all()


def test_lists_are_sorted_as_the_portable_kernel_sorts_them():
    key_mask = torch.rand(2, 1100, device="cuda") < 0.95
    key_mask[0, :300], key_mask[1, 700:] = False, False
    for padded in (False, True):
        operands = Operands(
            (2, 4, 2, 1000, 1100), 64, 64, torch.bfloat16, "sage2", key_mask=key_mask if padded else None
        )
        for is_causal, offset in CAUSAL:
            call = operands.call(False, is_causal, offset)
            lists = sort_lists(call, operands.padding).lists.flatten(0, 2).cpu()
            expected = block_entries(call, 128).flatten(0, 2).cpu()
            for found, wanted in zip(lists.tolist(), expected.tolist(), strict=True):
                # Between the first and last key that exist, tiles without any are masked, not left out.
                assert set(wanted[2 : 2 + wanted[1]]) <= set(found[2 : 2 + found[1]])
                assert set(found[2 : 2 + found[0]]) <= set(wanted[2 : 2 + wanted[0]])
                if not padded:
                    assert found[:2] == wanted[:2]
                if found[1] == 0:
                    assert found[2] == 9


def test_reruns_streams_and_graphs_give_the_same_bits():
    operands = Operands((2, 4, 2, 1000, 3000), 128, 128, torch.bfloat16, "sage2")
    expected, _ = operands.attend(hopper, return_lse=False)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outputs = []
    for stream in streams * 8:
        with torch.cuda.stream(stream):
            outputs.append(operands.attend(hopper, return_lse=False)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = operands.attend(hopper, return_lse=False)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)
    assert all(torch.equal(x, expected) for x in outputs)


def test_a_mean_of_v_does_not_add_up_in_the_matrix_units():
    """Their sums keep few bits, so sums of many keys move to float32."""
    operands = Operands((1, 2, 2, 256, 40_000), 128, 128, torch.bfloat16, "sage2")
    query, key, value = operands.inputs
    kept = operands.blocks.kept(40_000)[:, :, -1]
    assert kept.all()  # the last block of rows attends to all tiles, and so to V without its mean
    truth, _ = sdpa.attention(query[:, :, 128:], key, value)
    found, expected = (error(operands.attend(kernel)[0][:, :, 128:], truth) for kernel in (hopper, int8_forward))
    assert found <= 1.05 * expected
