"""Block lists: the tiles of keys that each block of rows attends to, at each entry point."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from sage_kernels import ops
from sage_kernels.attend import attend
from sage_kernels.cuda import compiler
from sage_kernels.dispatch.registry import forget_choices
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.select import select
from sage_kernels.exact import block_lists, sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.arguments import OperatorArguments
from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.call import Call, Mask
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.options import Options
from sage_kernels.spec.recipe import RECIPES, get_recipe
from sage_kernels.triton import registration
from tests.helpers.blocks import as_mask, draw_blocks
from tests.helpers.calls import draw_tensors

SIZES = ((128, 128), (128, 64), (64, 64), (64, 128))


draw = partial(draw_tensors, q_len=300, kv_len=330)


@pytest.mark.parametrize(("block_m", "block_n"), SIZES)
def test_a_list_of_kept_tiles_lists_those(block_m, block_n):
    blocks = draw_blocks(2, 3, 300, 330, block_m, block_n)
    kept = blocks.kept(330)
    assert torch.equal(kept.sum(-1, dtype=torch.int32), blocks.counts)
    again = BlockList.of_kept(kept, block_m, block_n, places=kept.shape[-1])
    assert torch.equal(again.kept(330), kept)
    assert torch.equal(blocks.mask(330, 0, 300), as_mask(blocks, 300, 330))
    few = BlockList.of_kept(kept[:, :, 1:-1], block_m, block_n, places=int(kept[:, :, 1:-1].sum(-1).max()))
    assert torch.equal(few.kept(330), kept[:, :, 1:-1])


# Tiles of every size in two recipes, and those of one size in four bits.
QUICK = {*itertools.product(("exact", "sage2"), SIZES), ("sage3", (128, 64))}


@pytest.mark.parametrize(
    ("recipe", "block_m", "block_n"),
    [
        pytest.param(recipe, *sizes, marks=() if (recipe, sizes) in QUICK else pytest.mark.audit)
        for recipe, sizes in itertools.product(("exact", "sage2", "sage1", "sage3"), SIZES)
    ],
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "causal_offset": 30}, {"keys": True}])
def test_a_call_with_a_block_list_equals_the_call_with_its_mask(recipe, options, block_m, block_n):
    """Low bits without heavy and recent keys agree to the bit."""
    inputs, options = draw(), dict(options)
    blocks = draw_blocks(2, 4, 300, 330, block_m, block_n)
    mask = as_mask(blocks, 300, 330)
    keys = None
    if options.pop("keys", False):
        keys = (torch.rand(2, 1, 1, 330, generator=torch.Generator().manual_seed(3)) < 0.8).clone()
        keys[..., 128:256] = False
        mask = mask & keys
    output, lse = ops.attention(
        *inputs, mask=keys, blocks=blocks, recipe=recipe, return_lse=True, fallback="emulate", **options
    )
    truth, truth_lse = sdpa.attention(*inputs, mask=mask, **options)
    assert torch.equal(lse == -torch.inf, truth_lse == -torch.inf)
    assert (lse == -torch.inf)[:, :, :block_m].all()
    assert not output[lse == -torch.inf].any()
    if recipe == "exact":
        finite = truth_lse != -torch.inf
        assert (output - truth).norm() / truth.norm() < 1e-5
        assert torch.allclose(lse[finite].double(), truth_lse[finite], atol=1e-4)
        return
    # Each key is listed by some block, so means and scales are the same.
    expected = reference.attention(*inputs, replace(RECIPES[recipe], heavy_keys=0, recent_keys=0), mask=mask, **options)
    assert torch.equal(output, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("recipe", ["sage2", "sage1", "sage3"])
def test_all_tiles_listed_is_dense_attention_without_heavy_keys(recipe):
    inputs = draw()
    blocks = BlockList.of_kept(torch.ones(1, 1, 3, 3, dtype=torch.bool))
    output, lse = ops.attention(*inputs, blocks=blocks, recipe=recipe, return_lse=True, fallback="emulate")
    expected, expected_lse = reference.attention(*inputs, replace(get_recipe(recipe), heavy_keys=0))
    assert torch.equal(output, expected)
    assert torch.equal(lse, expected_lse)


def test_a_list_that_is_the_same_for_all_batches_and_heads_is_stored_once():
    inputs = draw()
    blocks = draw_blocks(1, 1, 300, 330)
    full = blocks._replace(counts=blocks.counts.expand(2, 4, -1), tiles=blocks.tiles.expand(2, 4, -1, -1))
    for recipe in ("sage2", "exact"):
        for actual, expected in zip(
            *(ops.attention(*inputs, blocks=one, recipe=recipe, return_lse=True) for one in (blocks, full)), strict=True
        ):
            assert torch.equal(actual, expected)


@pytest.mark.audit
def test_opcheck_passes():
    blocks = draw_blocks(2, 4, 300, 330)
    for dtype in (torch.float32, torch.bfloat16):
        for mask in (None, torch.ones(2, 1, 1, 330, dtype=torch.bool)):
            torch.library.opcheck(
                torch.ops.sage_kernels.attention.default,
                (
                    *draw(dtype=dtype),
                    mask,
                    *OperatorArguments.of(blocks, None, Options(recipe="sage2", return_lse=True)),
                ),
            )


@pytest.mark.audit  # with gradients, tests/kernels/test_training.py has it
def test_one_compiled_graph_serves_all_lengths_without_breaks():
    compiled = torch.compile(
        lambda q, k, v, blocks: ops.attention(q, k, v, blocks=blocks, recipe="sage2", return_lse=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    with torch.compiler.set_stance("default"):
        for q_len, kv_len in ((300, 330), (200, 500)):
            inputs, blocks = draw(q_len=q_len, kv_len=kv_len), draw_blocks(2, 4, q_len, kv_len)
            expected = ops.attention(*inputs, blocks=blocks, recipe="sage2", return_lse=True)
            for actual, wanted in zip(compiled(*inputs, blocks), expected, strict=True):
                assert torch.equal(actual, wanted)


@pytest.mark.parametrize(
    ("recipe", "capability", "kernel", "ran"),
    [
        ("sage2", (9, 0), "int8_forward_hopper", "sage2"),
        ("sage1", (8, 0), "int8_forward", "sage1"),
        ("sage3", (12, 0), "nvfp4_forward", "sage3"),
        ("sage3", (9, 0), "int8_forward_hopper", "sage2"),
    ],
)
def test_the_best_kernel_with_lists_runs(recipe, capability, kernel, ran, monkeypatch):
    monkeypatch.setattr(registration, "triton_version", lambda: (3, 9))
    monkeypatch.setattr(compiler, "unavailable", lambda *_: "")
    request = Request(
        recipe, "cuda", capability, torch.bfloat16, 1, 4, 4, 4096, 4096, 128, 128, "blocks", False, False, aligned=True
    )
    forget_choices()
    plan, of_64 = (select(replace(request, list_sizes=(size, size))) for size in (128, 64))
    forget_choices()
    assert (plan.kernel, plan.recipe) == (kernel, ran)
    assert (of_64.kernel, of_64.recipe) == (kernel.removesuffix("_hopper"), ran)
    if capability == (9, 0):
        reasons = " ".join(reason for _, reason in of_64.passed_over)
        assert "block lists of 128 rows and tiles of 128 keys only" in reasons


def test_lists_that_do_not_fit_are_refused():
    inputs = draw()
    good = draw_blocks(2, 4, 300, 330)

    def refused(blocks, error=ValueError, mask=None, **match):
        with pytest.raises(error, **match):
            ops.attention(*inputs, blocks=blocks, mask=mask, recipe="sage2")

    refused(good._replace(counts=good.counts.long()), TypeError, match="int32")
    refused(good._replace(block_m=32), match="64 or 128")
    refused(good._replace(block_m=64), match="blocks of 64")
    refused(good._replace(tiles=good.tiles[0]), match="with places")
    refused(good._replace(tiles=good.tiles + 1), match="0 to 2")
    refused(good._replace(counts=good.counts + 2), match=r"blocks\.counts must be 0 to 3")
    refused(good._replace(tiles=torch.zeros_like(good.tiles)), match="twice")
    refused(good, match="which keys exist", mask=torch.ones(1, 1, 300, 330, dtype=torch.bool))
    refused(good, match="which keys exist", mask=torch.zeros(1, 1, 1, 330))


def test_a_call_with_a_list_has_no_heavy_keys():
    query, key, value = draw()
    mask = Mask.of_blocks(draw_blocks(2, 4, 300, 330), None, 330)
    call = Call(query, key, value, get_recipe("sage2"), mask)
    assert call.heavy_keys == 0
    assert call.tail is call


def test_exact_attention_in_chunks_equals_one_call(monkeypatch):
    inputs, blocks = draw(), draw_blocks(2, 4, 300, 330)
    options = {"mask": None, "options": Options(is_causal=True, causal_offset=40, return_lse=True)}
    expected = block_lists.attend_to_list(*inputs, blocks, **options)
    monkeypatch.setattr(sdpa, "ELEMENTS_PER_CHUNK", 1)
    for actual, wanted in zip(block_lists.attend_to_list(*inputs, blocks, **options), expected, strict=True):
        assert torch.allclose(actual, wanted, atol=1e-6)


@pytest.mark.parametrize("sizes", [{"q_len": 0}, {"kv_len": 0}, {"batch": 0}])
@pytest.mark.parametrize("recipe", ["sage2", "exact"])
def test_calls_without_elements_give_nothing(sizes, recipe):
    query, key, value = draw(**sizes)
    tiles = -(-key.shape[2] // 128)
    blocks = BlockList.of_kept(torch.ones(1, 1, -(-query.shape[2] // 128), tiles, dtype=torch.bool))
    output, lse = ops.attention(query, key, value, blocks=blocks, recipe=recipe, return_lse=True)
    assert output.shape == (*query.shape[:3], 32)
    assert not output.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("recipe", ["sage2", "exact"])
@pytest.mark.parametrize("kv_len", [330, 0])
def test_exact_calls_without_queries_give_empty_outputs_and_zero_gradients(recipe, kv_len):
    inputs = [x.requires_grad_() for x in draw(q_len=0, kv_len=kv_len)]
    blocks = BlockList.of_kept(torch.ones(1, 1, 0, -(-kv_len // 128), dtype=torch.bool))
    output, lse = attend(*inputs, None, blocks, Options(recipe=recipe, return_lse=True))
    assert output.shape == (2, 4, 0, 32) and lse.shape == (2, 4, 0)
    output.sum().backward()
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]
    assert not any(x.grad.any() for x in inputs)


def draw_packed(q_lengths=(300, 0, 130, 200), k_lengths=(330, 40, 129, 0)):
    """Return Q, K and V of packed sequences, cu_seqlens and longest lengths, and a list with surplus tiles."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(lengths) + 5, heads, channels, generator=generator)
        for lengths, heads, channels in ((q_lengths, 4, 64), (k_lengths, 2, 64), (k_lengths, 2, 32))
    ]
    starts = [torch.tensor([0, *itertools.accumulate(lengths)]).int() for lengths in (q_lengths, k_lengths)]
    return inputs, (*starts, max(q_lengths), max(k_lengths))


@pytest.mark.parametrize("list_batch", [4, 1])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "causal_offset": 30}, {"seqused_k": True}])
@pytest.mark.parametrize("recipe", ["exact", "sage2", "sage3"])
def test_packed_sequences_have_lists_of_their_own(recipe, options, list_batch):
    """Each is what a call of it alone is: blocks and tiles that it does not have do not count."""
    inputs, lengths = draw_packed()
    options, used = dict(options), [330, 40, 129, 0]
    if options.pop("seqused_k", False):
        used = [200, 40, 128, 0]
        options["seqused_k"] = torch.tensor(used).int()
    blocks = draw_blocks(list_batch, 4, 300, 330, 64, 128)
    output, lse = ops.packed_attention(*inputs, *lengths, blocks=blocks, recipe=recipe, return_lse=True, **options)
    options.pop("seqused_k", None)
    for index, kv_len in enumerate(used):
        q_start, q_stop = lengths[0][index : index + 2].tolist()
        k_start = int(lengths[1][index])
        if q_stop == q_start or kv_len == 0:
            assert not output[q_start:q_stop].any() and (lse[:, q_start:q_stop] == -torch.inf).all()
            continue
        one = [inputs[0][q_start:q_stop], *(x[k_start : k_start + kv_len] for x in inputs[1:])]
        one = [x.transpose(0, 1).unsqueeze(0) for x in one]
        part = blocks if list_batch == 1 else BlockList(*(x[index : index + 1] for x in blocks[:2]), *blocks[2:])
        kept = part.kept(330)[:, :, : -(-(q_stop - q_start) // 64), : -(-kv_len // 128)]
        expected, expected_lse = ops.attention(
            *one, blocks=BlockList.of_kept(kept, 64, 128), recipe=recipe, return_lse=True, **options
        )
        assert torch.equal(output[q_start:q_stop], expected[0].transpose(0, 1))
        assert torch.equal(lse[:, q_start:q_stop], expected_lse[0])
    assert not output[lengths[0][-1] :].any()


def test_packed_lists_pass_opcheck_and_are_checked():
    inputs, lengths = draw_packed()
    blocks = draw_blocks(4, 4, 300, 330)
    arguments = OperatorArguments.of(blocks, Lengths(*lengths), Options(recipe="sage2", return_lse=True))
    one = [x.transpose(0, 1).unsqueeze(0) for x in inputs]
    torch.library.opcheck(torch.ops.sage_kernels.attention.default, (*one, None, *arguments))
    for bad, match in ((draw_blocks(2, 4, 300, 330), r"\(4 or 1"), (draw_blocks(4, 4, 500, 330), "300 queries")):
        with pytest.raises(ValueError, match=match):
            ops.packed_attention(*inputs, *lengths, blocks=bad, recipe="sage2")
    with pytest.raises(ValueError, match="packed sequences take no mask"):
        packed = [x.transpose(0, 1).unsqueeze(0) for x in inputs]
        keys = torch.ones(4, 1, 1, 330, dtype=torch.bool)
        mask = Mask.of_blocks(blocks, keys, 330)
        Call(*packed, get_recipe("sage2"), mask, lengths=Lengths(*lengths, None))
