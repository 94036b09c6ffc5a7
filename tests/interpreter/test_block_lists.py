"""The INT8 forward kernel over block lists in Triton's interpreter, against the reference."""

import pytest
import torch

from sage_kernels import exact
from sage_kernels.call import Call, Mask
from sage_kernels.recipe import RECIPES
from sage_kernels.reference import forward as reference
from sage_kernels.triton.block_tiles import block_tiles
from tests.helpers.blocks import as_mask, draw_blocks
from tests.helpers.triton_calls import attend

ADA = (8, 9)


def draw(q_heads=2, kv_heads=1, q_len=150, kv_len=330, batch=1):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, heads, tokens, 64, generator=generator) + torch.randn(64, generator=generator)
        for heads, tokens in ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]


def call_of(inputs, recipe, blocks, keys=None, causal_offset=None):
    mask = Mask.of_blocks(blocks, keys, inputs[1].shape[2])
    causal = causal_offset is not None
    return Call(*inputs, RECIPES[recipe], mask, causal, causal_offset or 0, 0.125, return_lse=True)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal_offset", [None, 150])
@pytest.mark.parametrize(("block_m", "block_n"), [(128, 128), (64, 64), (128, 64)])
@pytest.mark.parametrize(
    "recipe", ["sage2", *(pytest.param(recipe, marks=pytest.mark.audit) for recipe in ("sage1", "sage_bwd_int8"))]
)
def test_the_kernels_error_is_the_references(recipe, block_m, block_n, causal_offset, padded):
    inputs = draw()
    blocks = draw_blocks(1, 2, 150, 330, block_m, block_n)
    keys = None
    if padded:
        keys = torch.rand(1, 1, 1, 330, generator=torch.Generator().manual_seed(3)) < 0.8
        keys[..., :64], keys[..., 128:200] = True, False
    options = {"is_causal": causal_offset is not None, "causal_offset": causal_offset or 0, "scale": 0.125}
    allowed = as_mask(blocks, 150, 330)
    truth, _ = exact.attention(*inputs, mask=allowed if keys is None else allowed & keys, **options)
    expected, expected_lse = reference.attention(
        *inputs, RECIPES[recipe], mask=keys, blocks=blocks, block_n=64, **options
    )
    output, lse = attend(call_of(inputs, recipe, blocks, keys, causal_offset), ADA)
    # The kernel takes tiles without a mask first, so P is rounded relative to other maxima.
    assert (output - truth).abs().sum() <= 1.1 * (expected - truth).abs().sum()
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert (lse == -torch.inf)[:, :, :block_m].all()
    assert torch.allclose(lse, expected_lse, atol=1e-4)
    assert not output[lse == -torch.inf].any()


@pytest.mark.parametrize("causal_offset", [None, 0, 150, -100])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("block_m", "block_n", "kernel_n"), [(128, 128, 128), (128, 128, 64), (64, 64, 64)])
def test_tiles_are_sorted_into_whole_ones_and_partial_ones(block_m, block_n, kernel_n, padded, causal_offset):
    inputs = draw(batch=2)
    blocks = draw_blocks(1, 2, 150, 330, block_m, block_n)
    keys = torch.ones(2, 1, 1, 330, dtype=torch.bool)
    if padded:
        keys[0, ..., 64:130], keys[1, ..., 300:] = False, False
    call = call_of(inputs, "sage2", blocks, keys if padded else None, causal_offset)
    entries = block_tiles(call, kernel_n).tiles
    allowed = as_mask(blocks, 150, 330).expand(2, -1, -1, -1) & keys
    if causal_offset is not None:
        allowed = allowed & torch.ones(150, 330, dtype=torch.bool).tril(causal_offset)
    for batch in range(entries.shape[0]):
        for head in range(2):
            for block in range(entries.shape[2]):
                rows = allowed[batch, head, block * block_m : (block + 1) * block_m]
                tiles = rows.split(kernel_n, -1)
                whole = {i for i, tile in enumerate(tiles) if tile.all() and tile.shape[1] == kernel_n}
                some = {i for i, tile in enumerate(tiles) if tile.any()}
                count, number, *listed = entries[batch, head, block].tolist()
                assert set(listed[:count]) == whole
                assert set(listed[count:number]) == some - whole
                assert number == len(some)


def test_a_list_of_many_tiles_is_sorted_in_parts():
    """More places than a program reads at once."""
    inputs = draw(q_heads=1, q_len=16, kv_len=64 * 1100)
    blocks = draw_blocks(1, 1, 16, 64 * 1100, 64, 64)
    call = call_of(inputs, "sage2", blocks, causal_offset=64 * 900)
    count, number, *listed = block_tiles(call, 64).tiles[0, 0, 0].tolist()
    assert sorted(listed[:count]) == list(range(900))
    assert listed[count:number] == [900]


def test_tiles_that_do_not_exist_are_left_out():
    """Name tiles beyond the keys: on a GPU the host does not read the numbers."""
    inputs = draw(q_heads=1, q_len=16)
    blocks = draw_blocks(1, 1, 16, 330)
    tiles = torch.tensor([[[[-1, 2, 99, 0]]]], dtype=torch.int32)
    call = call_of(inputs, "sage2", blocks._replace(counts=torch.full_like(blocks.counts, 7), tiles=tiles))
    count, number, *listed = block_tiles(call, 128).tiles[0, 0, 0].tolist()
    assert (listed[:count], listed[count:number]) == ([0], [2])
