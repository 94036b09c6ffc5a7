"""Block lists on the GPU: kernels against the reference and exact attention, gradients too, and routers."""

from itertools import accumulate

import pytest
import torch

from sage_hf.sparse import MeanRouter, ShareRouter, SubBlockRouter, routers
from sage_kernels import ops, training
from sage_kernels.cuda import compiler
from sage_kernels.dispatch import execution
from sage_kernels.dispatch.registry import forget_choices
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.blocks import as_mask, draw_blocks
from tests.helpers.judge import lse_tolerance
from tests.helpers.judge_training import Draw, assert_equal, judge_training, train
from tests.helpers.pairwise import pairwise


def draw(device, batch=2, q_heads=4, kv_heads=2, q_len=1000, kv_len=1100, head_dim=128, dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(batch, heads, tokens, head_dim, generator=generator, device=device, dtype=dtype)
        + torch.randn(head_dim, generator=generator, device=device, dtype=dtype)
        for heads, tokens in ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]


def on(device, blocks):
    return blocks._replace(counts=blocks.counts.to(device), tiles=blocks.tiles.to(device))


CAUSAL = {"is_causal": True, "causal_offset": 100}


def int8_kernel(device, sizes, head_dim=128):
    """The forward kernel of the INT8 recipes for lists of these sizes."""
    hopper = torch.cuda.get_device_capability(device) == (9, 0) and not compiler.unavailable()
    return "int8_forward_hopper" if hopper and sizes == (128, 128) and head_dim <= 128 else "int8_forward"


@pytest.mark.parametrize(
    ("recipe", "options", "block_m", "block_n", "head_dim"),
    [
        ("sage2", {}, 128, 128, 128),
        ("sage2", CAUSAL, 128, 128, 128),
        ("sage2", {"keys": True}, 128, 128, 128),
        ("sage2", CAUSAL | {"keys": True}, 128, 128, 80),
        ("sage2", {}, 64, 64, 80),
        ("sage2", {"keys": True}, 64, 64, 128),
        ("sage2", CAUSAL, 128, 64, 64),
        ("sage2", {}, 64, 128, 64),
        ("sage1", {}, 128, 128, 128),
        ("sage1", CAUSAL | {"keys": True}, 64, 64, 64),
        ("sage2", {}, 128, 128, 256),
        ("sage3", {}, 128, 128, 128),
        ("sage3", CAUSAL | {"keys": True}, 64, 64, 64),
    ],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_the_kernels_error_is_the_references(device, recipe, options, block_m, block_n, head_dim):
    inputs, options = draw(device, head_dim=head_dim), dict(options)
    blocks = on(device, draw_blocks(2, 4, 1000, 1100, block_m, block_n, share=0.3))
    mask, keys = blocks.mask(1100, 0, 1000), None
    if options.pop("keys", False):
        keys = torch.rand(2, 1, 1, 1100, device=device, generator=torch.Generator(device).manual_seed(1)) < 0.9
        keys[0, ..., 200:600] = False
        mask = mask & keys
    heard = []
    execution.plan_listeners.append(heard.append)
    try:
        output, lse = ops.attention(
            *inputs, mask=keys, blocks=blocks, recipe=recipe, fallback="emulate", return_lse=True, **options
        )
    finally:
        execution.plan_listeners.remove(heard.append)
    kind = "blocks" if keys is None else "block_keys"
    kernel = "nvfp4_forward" if recipe == "sage3" else int8_kernel(device, (block_m, block_n), head_dim)
    assert [(plan.kernel.removesuffix("_emulated"), plan.recipe, plan.request.mask) for plan in heard] == [
        (kernel, recipe, kind)
    ]
    truth, _ = sdpa.attention(*inputs, mask=mask, **options)
    expected, expected_lse = reference.attention(*inputs, RECIPES[recipe], mask=keys, blocks=blocks, **options)
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert not output[lse == -torch.inf].any()
    finite = expected_lse != -torch.inf
    assert ((lse - expected_lse)[finite].abs() <= lse_tolerance(inputs[0], inputs[1])).all()
    error, allowed = ((x - truth).abs().sum() for x in (output, expected))
    # P is rounded relative to other maxima, because tiles without a mask come first.
    assert error <= 1.1 * allowed + 2**-9 * truth.abs().sum()


def test_the_helper_draws_what_it_says(device):
    blocks = draw_blocks(1, 2, 300, 500)
    assert torch.equal(on(device, blocks).mask(500, 0, 300).cpu(), as_mask(blocks, 300, 500))


def test_reruns_are_equal_to_the_bit_and_compiled_calls_are_the_same(device):
    inputs, blocks = draw(device), on(device, draw_blocks(2, 4, 1000, 1100))
    first, again = (ops.attention(*inputs, blocks=blocks, recipe="sage2")[0] for _ in range(2))
    assert torch.equal(first, again)
    compiled = torch.compile(lambda *x: ops.attention(*x, blocks=blocks, recipe="sage2")[0], fullgraph=True)
    assert torch.equal(compiled(*inputs), first)


@pytest.mark.parametrize(
    ("recipe", "size", "masked"),
    [("sage2", 128, False), ("sage2", 128, True), ("sage1", 64, False), ("sage1", 64, True)],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_a_replayed_call_equals_the_first_call_bitwise(device, replayed, recipe, size, masked):
    if int8_kernel(device, (128, 128)) != "int8_forward_hopper":
        pytest.skip("calls of other kernels may be replayed or not")
    inputs = draw(device)
    calls = []
    for seed in range(4):
        blocks = on(device, draw_blocks(2, 4, 1000, 1100, size, size, seed=seed))
        mask = torch.rand(2, 1, 1, 1100, device=device) < 0.7 if masked else None
        calls.append(([x + seed for x in inputs], {"blocks": blocks, "mask": mask, "recipe": recipe}))
    expected = []
    for tensors, options in calls:
        forget_choices()  # forgets replays
        expected.append(ops.attention(*tensors, **options, return_lse=True))
    forget_choices()
    for (tensors, options), wanted in zip(calls * 2, expected * 2, strict=True):
        found = ops.attention(*tensors, **options, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert len(replayed) == 6 or size == 64  # Triton's launches cannot be replayed with a mask


def test_exact_attention_over_a_list_is_exact(device):
    inputs, blocks = draw(device), on(device, draw_blocks(2, 4, 1000, 1100))
    output, lse = ops.attention(*inputs, blocks=blocks, recipe="exact", return_lse=True)
    truth, truth_lse = sdpa.attention(*inputs, mask=blocks.mask(1100, 0, 1000))
    assert ((output - truth).norm() / truth.norm()) < 2**-7
    assert torch.equal(lse == -torch.inf, truth_lse == -torch.inf)


GRADIENTS = {
    "128": ((128, 128), (128,), {}),
    "128, causal": ((128, 128), (64,), {"is_causal": True, "causal_offset": 100}),
    "64, padded": ((64, 64), (128, 64), {"padded": True}),
    "64 by 128, causal, rows without a key": ((64, 128), (64,), {"is_causal": True, "causal_offset": -70}),
    "128 by 64, causal, padded": ((128, 64), (80,), {"is_causal": True, "causal_offset": 100, "padded": True}),
    "128, head_dim 256": ((128, 128), (256,), {}),
}


@pytest.mark.parametrize(
    ("recipe", "case", "heads"), pairwise(["sage_bwd", "sage_bwd_int8"], list(GRADIENTS), [(4, 2), (3, 3)])
)
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_are_as_accurate_as_the_references(recipe, case, heads, device):
    (block_m, block_n), dims, options = GRADIENTS[case]
    options = dict(options)
    draw = Draw(device)
    blocks = on(device, draw_blocks(2, heads[0], 500, 600, block_m, block_n, share=0.4))
    if options.pop("padded", False):
        options["key_mask"] = draw.uniform(2, 600) < 0.8
        options["key_mask"][1, 128:384] = False
    call = draw.call(recipe, 2, *heads, 500, 600, *dims, blocks=blocks, **options)
    judge_training(call).assert_as_small_as_the_references()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("recipe", ["sage_bwd", "sage_bwd_int8"])
def test_packed_sequences_have_the_gradients_over_lists_that_they_have_alone(recipe, is_causal, device):
    q_lengths, k_lengths = (1000, 300, 70), (1100, 333, 64)
    drawn = [draw(device, 1, q_len=q_len, kv_len=kv_len) for q_len, kv_len in zip(q_lengths, k_lengths, strict=True)]
    inputs = [torch.cat(parts, 2)[0].transpose(0, 1) for parts in zip(*drawn, strict=True)]
    inputs.append(torch.randn_like(inputs[0]))
    starts = [torch.tensor([0, *accumulate(one)], dtype=torch.int32, device=device) for one in (q_lengths, k_lengths)]
    # In ascending order, as the lists of each alone: sums are taken in the list's order.
    drawn_list = on(device, draw_blocks(3, 4, 1000, 1100, 64, 64))
    blocks = drawn_list.of_kept(drawn_list.kept(1100), 64, 64)
    options = {"attend": training.packed_attention, "recipe": recipe, "is_causal": is_causal}
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    lengths = dict(zip(names, (*starts, 1000, 1100), strict=True))
    found = train(*inputs, **options, **lengths, blocks=blocks)
    for index, (q_len, kv_len) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        rows, keys = (slice(int(x[index]), int(x[index + 1])) for x in starts)
        alone = [x[span] for x, span in zip(inputs, (rows, keys, keys, rows), strict=True)]
        own = [torch.tensor([0, length], dtype=torch.int32, device=device) for length in (q_len, kv_len)]
        lengths = dict(zip(names, (*own, q_len, kv_len), strict=True))
        expected = train(*alone, **options, **lengths, blocks=blocks.of_sequence(index, q_len, kv_len, 1100))
        assert_equal([x[span] for x, span in zip(found, (rows, rows, keys, keys), strict=True)], expected)


def test_gradients_run_by_the_kernels_over_lists_and_are_equal_at_every_run(device):
    inputs = [x.requires_grad_() for x in draw(device)]
    blocks, heard = on(device, draw_blocks(2, 4, 1000, 1100)), []
    execution.plan_listeners.append(heard.append)
    try:
        outputs = [training.attention(*inputs, blocks=blocks)[0] for _ in range(2)]
    finally:
        execution.plan_listeners.remove(heard.append)
    assert {(plan.kernel, plan.backward, plan.request.mask) for plan in heard} == {
        (int8_kernel(device, (128, 128)), "int8_backward", "blocks")
    }
    first, again = (torch.autograd.grad(x, inputs, torch.ones_like(x)) for x in outputs)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    compiled = torch.compile(lambda *x: training.attention(*x, blocks=blocks)[0], fullgraph=True)
    found = compiled(*inputs)
    assert torch.equal(found, outputs[0])
    for x, y in zip(torch.autograd.grad(found, inputs, torch.ones_like(found)), first, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dense", [(), (slice(-300, None),)], ids=["video", "text"])
@pytest.mark.parametrize("tokens", [4096, 5000])
@pytest.mark.parametrize(
    "router", [MeanRouter(0.25), SubBlockRouter(0.25, 64, 64), SubBlockRouter((0.1, 0.2, 0.3, 0.4)), ShareRouter(0.8)]
)
def test_routers_kernels_keep_the_specifications_tiles(router, tokens, dense, device, monkeypatch):
    """Tiles may differ only where scores are equal to 16 bits of the means' lengths."""
    query, key, _ = draw(device, q_len=tokens, kv_len=tokens)
    found = router.route(query, key, dense=dense)
    monkeypatch.setattr(routers, "router_kernels", lambda query, key: None)
    expected = router.route(query, key, dense=dense).kept(tokens)
    differ = found.kept(tokens) != expected
    assert differ.sum() <= 1e-3 * expected.sum()
    if not isinstance(router, ShareRouter) and not dense:
        assert torch.equal(found.counts, expected.sum(-1, dtype=torch.int32))
        scores = router.scores(query, key)
        lengths = [x.float().norm(dim=-1).max() * x.shape[-1] ** -0.25 for x in (query, key)]
        worst = scores.masked_fill(~found.kept(tokens), torch.inf).amin(-1)
        best_left = scores.masked_fill(found.kept(tokens), -torch.inf).amax(-1)
        assert (worst >= best_left - 2**-15 * lengths[0] * lengths[1]).all()


@pytest.mark.parametrize("recipe", ["sage2", "sage1", "sage3"])
@pytest.mark.usefixtures("poisoned_memory")
def test_packed_sequences_have_lists_of_their_own(device, recipe):
    """The error of each is the reference's; the second one's keys end before its list does."""
    q_lengths, k_lengths, used = (1000, 300, 70), (1100, 400, 0), (1100, 333, 0)
    drawn = [draw(device, 1, q_len=q_len, kv_len=kv_len) for q_len, kv_len in zip(q_lengths, k_lengths, strict=True)]
    inputs = [torch.cat(parts, 2)[0].transpose(0, 1) for parts in zip(*drawn, strict=True)]
    starts = [torch.tensor([0, *accumulate(one)], dtype=torch.int32, device=device) for one in (q_lengths, k_lengths)]
    seqused_k = torch.tensor(used, dtype=torch.int32, device=device)
    blocks = on(device, draw_blocks(3, 4, 1000, 1100, share=0.3))
    heard = []
    execution.plan_listeners.append(heard.append)
    try:
        output, lse = ops.packed_attention(
            *inputs, *starts, 1000, 1100, seqused_k=seqused_k, blocks=blocks, recipe=recipe, fallback="emulate",
            return_lse=True,
        )  # fmt: skip
    finally:
        execution.plan_listeners.remove(heard.append)
    kernel = "nvfp4_forward" if recipe == "sage3" else "int8_forward"
    assert [(plan.kernel.removesuffix("_emulated"), plan.request.mask) for plan in heard] == [(kernel, "blocks")]
    for index, (q_len, kv_len) in enumerate(zip(q_lengths, used, strict=True)):
        rows = slice(int(starts[0][index]), int(starts[0][index]) + q_len)
        found, found_lse = output[rows].transpose(0, 1)[None], lse[None, :, rows]
        if kv_len == 0:
            assert not found.any() and (found_lse == -torch.inf).all()
            continue
        one = [drawn[index][0], *(x[:, :, :kv_len] for x in drawn[index][1:])]
        part = blocks.of_sequence(index, q_len, kv_len, 1100)
        truth, _ = sdpa.attention(*one, mask=part.mask(kv_len, 0, q_len))
        expected, expected_lse = reference.attention(*one, RECIPES[recipe], blocks=part)
        assert torch.equal(found_lse == -torch.inf, expected_lse == -torch.inf)
        finite = expected_lse != -torch.inf
        assert ((found_lse - expected_lse)[finite].abs() <= lse_tolerance(one[0], one[1])).all()
        error, allowed = ((x - truth).abs().sum() for x in (found, expected))
        # P is rounded relative to other maxima, because tiles without a mask come first.
        assert error <= 1.1 * allowed + 2**-9 * truth.abs().sum()
