"""The kernels over block lists in Triton's interpreter, against the reference."""

import itertools
from dataclasses import replace

import pytest
import torch

from sage_kernels.exact import sdpa
from sage_kernels.reference import backward as reference_backward
from sage_kernels.reference import forward as reference
from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.call import Call, Mask
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.operands import Saved
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.triton.block_entries import block_entries
from sage_kernels.triton.configs import int8_bwd_dkdv_config, int8_bwd_dq_config, limit_to_list
from sage_kernels.triton.tile_rows import tile_rows
from tests.helpers.blocks import as_mask, draw_blocks
from tests.helpers.calls import new_backward_call, new_call, pack
from tests.helpers.portable_fp4 import without_inline_assembly
from tests.helpers.triton_calls import attend, backward

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


QUICK = {(128, 128, None), (64, 64, 150), (128, 64, 150)}


@pytest.mark.parametrize(
    ("recipe", "block_m", "block_n", "causal_offset", "padded"),
    [
        pytest.param(
            *(recipe, *sizes, offset, padded),
            marks=() if recipe == "sage2" and padded and (*sizes, offset) in QUICK else pytest.mark.audit,
        )
        for recipe in ("sage2", "sage1", "sage3", "sage_bwd_int8")
        for sizes in ((128, 128), (64, 64), (128, 64))
        for offset in (None, 150)
        for padded in (False, True)
    ],
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
    truth, _ = sdpa.attention(*inputs, mask=allowed if keys is None else allowed & keys, **options)
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


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.audit), True])
@pytest.mark.parametrize("causal_offset", [pytest.param(None, marks=pytest.mark.audit), 150])
@pytest.mark.parametrize(("block_m", "block_n"), [(128, 128), pytest.param(64, 64, marks=pytest.mark.audit)])
def test_native_nvfp4_has_the_references_error(block_m, block_n, causal_offset, padded, monkeypatch):
    """Portable functions stand for its inline assembly."""
    without_inline_assembly(monkeypatch)
    inputs, blocks = draw(), draw_blocks(1, 2, 150, 330, block_m, block_n)
    keys = torch.rand(1, 1, 1, 330, generator=torch.Generator().manual_seed(3)) < 0.8 if padded else None
    options = {"is_causal": causal_offset is not None, "causal_offset": causal_offset or 0, "scale": 0.125}
    allowed = as_mask(blocks, 150, 330) if keys is None else as_mask(blocks, 150, 330) & keys
    truth, _ = sdpa.attention(*inputs, mask=allowed, **options)
    expected, expected_lse = reference.attention(
        *inputs, RECIPES["sage3"], mask=keys, blocks=blocks, block_n=block_n, **options
    )
    output, lse = attend(call_of(inputs, "sage3", blocks, keys, causal_offset), (12, 0), native=True)
    assert (output - truth).abs().sum() <= 1.1 * (expected - truth).abs().sum()
    assert torch.allclose(lse, expected_lse, atol=1e-4)
    assert not output[lse == -torch.inf].any()


@pytest.mark.parametrize("causal_offset", [None, pytest.param(40, marks=pytest.mark.audit)])
@pytest.mark.parametrize("list_batch", [3, pytest.param(1, marks=pytest.mark.audit)])
@pytest.mark.parametrize("recipe", ["sage2", *(pytest.param(x, marks=pytest.mark.audit) for x in ("sage1", "sage3"))])
def test_packed_sequences_have_lists_of_their_own(recipe, list_batch, causal_offset):
    """Each is what the kernel makes of it alone; the second one's keys end inside a tile, by seqused_k."""
    q_lengths, k_lengths, used = (150, 70, 20), (330, 140, 0), (330, 100, 0)
    generator = torch.Generator().manual_seed(0)
    tokens = ((q_lengths, 2), (k_lengths, 1), (k_lengths, 1))
    inputs = [torch.randn(1, heads, sum(lengths), 64, generator=generator) for lengths, heads in tokens]
    starts = pack(q_lengths), pack(k_lengths)
    lengths = Lengths(*starts, 150, 330, torch.tensor(used).int())
    blocks = BlockList.of_kept(draw_blocks(list_batch, 2, 150, 330, 64, 64).kept(330), 64, 64)  # ascending, as below
    call = replace(call_of(inputs, recipe, blocks, causal_offset=causal_offset), lengths=lengths)
    output, lse = attend(call, ADA)
    for index, (q_len, kv_len) in enumerate(zip(q_lengths, used, strict=True)):
        queries = slice(int(starts[0][index]), int(starts[0][index]) + q_len)
        keys = slice(int(starts[1][index]), int(starts[1][index]) + kv_len)
        if kv_len == 0:
            assert not output[:, :, queries].any() and (lse[:, :, queries] == -torch.inf).all()
            continue
        one = [inputs[0][:, :, queries], *(x[:, :, keys] for x in inputs[1:])]
        part = blocks.of_sequence(index, q_len, kv_len, 330)
        expected, expected_lse = attend(call_of(one, recipe, part, causal_offset=causal_offset), ADA)
        assert torch.allclose(output[:, :, queries], expected, atol=1e-6)
        assert torch.allclose(lse[:, :, queries], expected_lse, atol=1e-6)


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
    entries = block_entries(call, kernel_n)
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
    count, number, *listed = block_entries(call, 64)[0, 0, 0].tolist()
    assert sorted(listed[:count]) == list(range(900))
    assert listed[count:number] == [900]


def test_tiles_that_do_not_exist_are_left_out():
    """Name tiles beyond the keys: on a GPU the host does not read the numbers."""
    inputs = draw(q_heads=1, q_len=16)
    blocks = draw_blocks(1, 1, 16, 330)
    tiles = torch.tensor([[[[-1, 2, 99, 0]]]], dtype=torch.int32)
    call = call_of(inputs, "sage2", blocks._replace(counts=torch.full_like(blocks.counts, 7), tiles=tiles))
    count, number, *listed = block_entries(call, 128)[0, 0, 0].tolist()
    assert (listed[:count], listed[count:number]) == ([0], [2])


def gradients(inputs, recipe, tiles, **options):
    """Return dQ, dK and dV of the kernels and of the reference, from what the reference's forward kept."""
    *tensors, gradient = inputs
    output, saved = reference_backward.forward(new_call(*tensors, recipe, **options))
    call = new_backward_call(gradient, tensors[2], output, saved, recipe, 64, **options)
    return backward(call, ADA), reference_backward.backward(call, **tiles)


LISTS = {
    "128": ((128, 128), {"is_causal": False}),
    "64, causal": ((64, 64), {"is_causal": True, "causal_offset": 120}),
    "128 by 64, padded": ((128, 64), {"is_causal": False, "key_mask": True}),
    "64 by 128, causal, padded": ((64, 128), {"is_causal": True, "causal_offset": 200, "key_mask": True}),
    "128, causal, rows without a key": ((128, 128), {"is_causal": True, "causal_offset": -30}),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.audit if name == "128" else (), id=name) for name, case in LISTS.items()],
)
@pytest.mark.parametrize("recipe", ["sage_bwd", pytest.param("sage_bwd_int8", marks=pytest.mark.audit)])
@pytest.mark.parametrize("heads", [2, pytest.param(1, marks=pytest.mark.audit)])
def test_gradients_are_the_references(recipe, case, heads):
    """Both heads of a group share a list, or have one each; the first rows have none."""
    (block_m, block_n), options = case[0], dict(case[1])
    generator = torch.Generator().manual_seed(2)
    inputs = [x.half() for x in draw(batch=2)]
    inputs.append(torch.randn(2, 2, 150, 64, generator=generator).half())
    if options.pop("key_mask", False):
        options["key_mask"] = torch.rand(2, 330, generator=generator) < 0.8
        options["key_mask"][1, 128:256] = False
    blocks = draw_blocks(1 if heads == 1 else 2, heads, 150, 330, block_m, block_n)
    int8 = recipe == "sage_bwd_int8"
    tiles = {
        "block_m": limit_to_list(int8_bwd_dkdv_config(ADA, 64, int8), block_m, block_n).block_m,
        "block_n": limit_to_list(int8_bwd_dq_config(ADA, 64, int8), block_m, block_n).block_n,
    }
    found, expected = gradients(inputs, recipe, tiles, blocks=blocks, **options)
    assert not found[0][:, :, :block_m].any()
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    mask = as_mask(blocks, 150, 330)
    if (key_mask := options.pop("key_mask", None)) is not None:
        mask = mask & key_mask[:, None, None]
    truths = torch.autograd.grad(sdpa.attention(*leaves, mask=mask, **options)[0], leaves, inputs[3].double())
    for actual, wanted, truth in zip(found, expected, truths, strict=True):
        # As for dense gradients: in INT8 an element that is almost a tie may become another integer.
        error, own = (actual - truth).abs().sum(), (wanted - truth).abs().sum()
        rounding = torch.finfo(torch.float16).eps * truth.abs().sum()
        assert error <= 1.05 * own + rounding
        assert (actual - wanted).abs().sum() <= (0.25 / 0.29 * own if int8 else 0) + rounding


@pytest.mark.parametrize("list_batch", [3, pytest.param(1, marks=pytest.mark.audit)])
@pytest.mark.parametrize("causal_offset", [None, pytest.param(60, marks=pytest.mark.audit)])
@pytest.mark.parametrize("recipe", ["sage_bwd", pytest.param("sage_bwd_int8", marks=pytest.mark.audit)])
def test_packed_sequences_have_gradients_over_lists_of_their_own(recipe, causal_offset, list_batch):
    """Compare with each alone; rows, tiles and blocks that one does not have are others' in memory."""
    q_lengths, k_lengths, used = (150, 70, 20), (330, 140, 0), (330, 100, 0)
    generator = torch.Generator().manual_seed(0)
    tokens = ((q_lengths, 2), (k_lengths, 1), (k_lengths, 1), (q_lengths, 2))
    inputs = [torch.randn(1, heads, sum(lengths), 64, generator=generator).half() for lengths, heads in tokens]
    starts = pack(q_lengths), pack(k_lengths)
    blocks = BlockList.of_kept(draw_blocks(list_batch, 2, 150, 330, 64, 64).kept(330), 64, 64)  # ascending, as below
    options = {"is_causal": causal_offset is not None, "causal_offset": causal_offset or 0}
    lengths = Lengths(*starts, 150, 330, torch.tensor(used).int())
    found, _ = gradients(inputs, recipe, {}, lengths=lengths, blocks=blocks, **options)
    rest = [torch.ones(x.shape[2], dtype=torch.bool) for x in found]
    for index, (q_len, kv_len) in enumerate(zip(q_lengths, used, strict=True)):
        queries = slice(int(starts[0][index]), int(starts[0][index]) + q_len)
        keys = slice(int(starts[1][index]), int(starts[1][index]) + kv_len)
        if kv_len == 0:
            continue
        one = [x[:, :, part] for x, part in zip(inputs, (queries, keys, keys, queries), strict=True)]
        own = blocks.of_sequence(index, q_len, kv_len, 330)
        alone, _ = gradients(one, recipe, {}, blocks=own, **options)
        for x, left, part, expected in zip(found, rest, (queries, keys, keys), alone, strict=True):
            assert torch.equal(x[:, :, part], expected)
            left[part] = False
    assert not any(x[:, :, left].any() for x, left in zip(found, rest, strict=True))


@pytest.mark.parametrize("causal_offset", [None, 0, 150, -100])
@pytest.mark.parametrize(("block_m", "block_n"), [(128, 128), (64, 64), (64, 128)])
def test_an_inverted_list_has_the_rows_that_see_each_tile(block_m, block_n, causal_offset):
    query, key, value = draw(batch=2, q_len=700)
    blocks = draw_blocks(2, 2, 700, 330, block_m, block_n)
    options = {"is_causal": causal_offset is not None, "causal_offset": causal_offset or 0, "blocks": blocks}
    output, saved = reference_backward.forward(new_call(query, key, value, "sage_bwd", **options))
    inverted = tile_rows(new_backward_call(query, value, output, saved, "sage_bwd", 64, **options))
    allowed = as_mask(blocks, 700, 330)
    if causal_offset is not None:
        allowed = allowed & torch.ones(700, 330, dtype=torch.bool).tril(causal_offset)
    for batch, head, tile in itertools.product(range(2), range(2), range(inverted.spans.shape[2])):
        columns = allowed[batch, head, :, tile * block_n : (tile + 1) * block_n].split(block_m)
        seen, whole, end = inverted.spans[batch, head, tile].tolist()
        rows = inverted.rows[batch, head].tolist()
        assert rows[whole:end] == [row for row, part in enumerate(columns) if part.all()]
        assert rows[seen:whole] == [row for row, part in enumerate(columns) if part.any() and not part.all()]


def test_a_long_list_is_inverted_in_parts_and_tiles_that_do_not_exist_are_left_out():
    query, _, value = draw(q_heads=1, q_len=64 * 70, kv_len=64 * 40)
    counts = torch.full((1, 1, 70), 4, dtype=torch.int32)
    tiles = torch.tensor([-1, 39, 99, 7], dtype=torch.int32).expand(1, 1, 70, 4)
    blocks = BlockList(counts, tiles, 64, 64)
    saved = Saved(*(query.new_empty(0) for _ in range(6)))
    inverted = tile_rows(new_backward_call(query, value, query, saved, "sage_bwd", 64, blocks=blocks))
    spans = inverted.spans[0, 0].tolist()
    assert [(tile, *span) for tile, span in enumerate(spans) if span[1] < span[2]] == [(7, 0, 0, 70), (39, 70, 70, 140)]
    assert inverted.rows[0, 0, :140].tolist() == [*range(70), *range(70)]
