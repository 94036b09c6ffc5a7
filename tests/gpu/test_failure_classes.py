"""The ways in which low-bit attention fails in the field, each one a promise that ours does not."""

from dataclasses import replace

import pytest
import torch

from sage_hf import sage_attention
from sage_kernels import ops
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.judge import LOW_BIT, attend, attend_and_name, judge, lse_tolerance

pytestmark = pytest.mark.parametrize("recipe", LOW_BIT)


@pytest.fixture
def draw(device):
    """(batch, heads, tokens, head_dim) -> standard normal bfloat16, other values at every call."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    return draw


def attend_without_lse(query, key, value, recipe, **arguments):
    return sage_attention(query, key, value, recipe=recipe, fallback="emulate", **arguments)


# 1. Uninitialised output.


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("q_len", [1, 63, 64, 129, 1000])
def test_every_element_of_output_and_lse_is_written(recipe, q_len, draw):
    output, lse = attend(draw(2, 4, q_len, 64), draw(2, 4, 333, 64), draw(2, 4, 333, 128), recipe)
    assert output.isfinite().all()
    assert lse.isfinite().all()


# 2. A uniform scale error.


def test_values_of_one_give_outputs_of_one(recipe, draw):
    query, key, value = draw(1, 2, 300, 64), draw(1, 2, 500, 64), torch.ones_like(draw(1, 2, 500, 64))
    output, _ = attend(query, key, value, recipe)
    expected, _ = reference.attention(query, key, value, RECIPES[recipe])
    # Exact except for rounding to bfloat16; `sage1` and `sage3_paper` divide by unrounded sums.
    assert (output - 1).abs().amax() <= max(2**-8, 1.05 * (expected - 1).abs().amax())
    assert (output.double().mean() - 1).abs() <= max(2**-11, 1.05 * (expected.double().mean() - 1).abs())


@pytest.mark.parametrize("kv_len", [1, 100, 1000])
def test_uniform_scores_give_the_logarithm_of_the_length(recipe, kv_len, draw):
    _, lse = attend(torch.zeros_like(draw(1, 2, 70, 64)), draw(1, 2, kv_len, 64), draw(1, 2, kv_len, 64), recipe)
    assert torch.allclose(lse, torch.full_like(lse, kv_len).log(), atol=1e-5)


# 3. A smoothing correction applied to the wrong block.


def test_blocks_of_queries_with_different_means(recipe, draw):
    blocks = draw(1, 4, 8, 1, 64).expand(1, 4, 8, 128, 64).flatten(2, 3)
    query = 3 * blocks[:, :, :1000] + draw(1, 4, 1000, 64)
    judge(query, draw(1, 4, 700, 64) + 2, draw(1, 4, 700, 64), recipe).assert_as_small_as_the_references()


# 4. 32-bit offsets: test_large.py.

# 5. Lengths that are not a multiple of the tile.


@pytest.mark.parametrize("kv_len", [1, 15, 17, 63, 65, 127, 129, 1000])
@pytest.mark.parametrize("q_len", [1, 65, 300])
def test_what_lies_behind_the_last_token_does_not_matter(recipe, q_len, kv_len, draw):
    longer = [draw(1, 2, length + 256, 64) for length in (q_len, kv_len, kv_len)]
    lengths = (q_len, kv_len, kv_len)
    inputs = [x[:, :, :length].contiguous() for x, length in zip(longer, lengths, strict=True)]
    for x, length in zip(longer, lengths, strict=True):
        x[:, :, length:] = torch.nan
    sliced = [x[:, :, :length] for x, length in zip(longer, lengths, strict=True)]
    judge(*inputs, recipe)
    for actual, expected in zip(attend(*sliced, recipe), attend(*inputs, recipe), strict=True):
        assert torch.equal(actual, expected)


# 6. Causal with q_len ≠ kv_len.


@pytest.mark.parametrize(("q_len", "kv_len"), [(200, 500), (500, 200), (129, 128), (1, 300), (300, 1)])
def test_is_causal_is_aligned_upper_left_and_a_mask_may_align_it_lower_right(recipe, q_len, kv_len, draw, device):
    inputs = draw(1, 2, q_len, 64), draw(1, 2, kv_len, 64), draw(1, 2, kv_len, 64)
    judge(*inputs, recipe, is_causal=True)
    row, column = torch.arange(q_len, device=device).unsqueeze(1), torch.arange(kv_len, device=device)
    judge(*inputs, recipe, mask=(column <= row + kv_len - q_len)[None, None])


# 7. Causal broken by a permuted key order; the second tile's P·V dropped.


@pytest.mark.parametrize("ahead", [0, 1])
def test_each_causal_row_sees_its_own_key_and_not_the_next(recipe, ahead, draw):
    """Row i matches key i + ahead and no other, so that its output is that key's value unless it may not see it."""
    query, value = 3 * draw(1, 2, 600, 128), draw(1, 2, 600, 128).sign()
    output, _ = attend(query, query.roll(ahead, 2), value, recipe, is_causal=True)
    share = (output * value.roll(-ahead, 2)).float().mean(-1)
    assert (share > 0.5).all() if ahead == 0 else (share[..., :-1] < 0.5).all()


def test_every_tile_of_keys_counts(recipe, draw, device):
    """Uniform scores let channel c tell the share of keys 16c … 16c + 15."""
    tokens = 1024
    value = torch.eye(64, device=device).repeat_interleave(16, 0)[None, None]
    query, key = torch.zeros(1, 1, 80, 64, device=device), draw(1, 1, tokens, 64, dtype=torch.float32)
    output, _ = attend(query, key, value, recipe)
    # Half a step of the coarsest element format, e2m1, whose values near 1 are 1/4 apart relative to their scale.
    assert torch.allclose(output, torch.full_like(output, 1 / 64), rtol=1 / 4, atol=0)


# 8. Rows with no allowed key.


@pytest.mark.parametrize("additive", [False, True])
def test_rows_that_may_attend_to_nothing_are_zero(recipe, additive, draw, device):
    mask = torch.rand(2, 1, 300, 500, device=device) < 0.5
    mask[:, :, 100:240] = False
    mask[1, :, 299] = False
    if additive:
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, -torch.inf)
    output, lse = attend(draw(2, 4, 300, 64), draw(2, 4, 500, 64), draw(2, 4, 500, 64) + 1, recipe, mask=mask)
    assert not output[:, :, 100:240].any() and not output[1, :, 299].any()
    assert (lse[:, :, 100:240] == -torch.inf).all() and (lse[1, :, 299] == -torch.inf).all()
    assert output.isfinite().all()


# 9. Inputs mutated.


def test_inputs_are_not_changed(recipe, draw, device):
    inputs = [draw(2, 4, 300, 64) + 1 for _ in range(3)]
    mask = torch.randn(2, 1, 300, 300, device=device)
    before = [x.clone() for x in (*inputs, mask)]
    attend(*inputs, recipe, mask=mask)
    assert all(torch.equal(x, y) for x, y in zip((*inputs, mask), before, strict=True))


# 10. The wrong device or stream; a graph that omits the kernel.


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_runs_on_the_device_of_its_tensors(recipe, draw):
    inputs = [draw(1, 2, 300, 64) for _ in range(3)]
    with torch.cuda.device(0):
        output, lse = attend(*(x.to("cuda:1") for x in inputs), recipe)
    assert output.device == lse.device == torch.device("cuda:1")
    expected, _ = attend(*inputs, recipe)
    assert torch.equal(output.cpu(), expected.cpu())


def test_a_call_runs_on_the_current_stream(recipe, draw, device):
    """The inputs come into being on the stream, after work that keeps it busy."""
    inputs = [draw(1, 4, 1000, 64) for _ in range(3)]
    expected, _ = attend(*inputs, recipe)
    late = [torch.full_like(x, torch.nan) for x in inputs]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, inputs, strict=True):
            x.copy_(y)
        output, _ = attend(*late, recipe)
    stream.synchronize()
    assert torch.equal(output, expected)


def test_four_streams_at_once_do_not_share_memory(recipe, draw, device):
    calls = [[draw(1, 4, 1000, 64) for _ in range(3)] for _ in range(4)]
    expected = [attend(*inputs, recipe)[0] for inputs in calls]
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in calls]
    outputs = [[] for _ in calls]
    for _ in range(10):
        for stream, inputs, kept in zip(streams, calls, outputs, strict=True):
            with torch.cuda.stream(stream):
                kept.append(attend(*inputs, recipe)[0])
    torch.cuda.synchronize(device)
    for kept, output in zip(outputs, expected, strict=True):
        assert all(torch.equal(x, output) for x in kept)


@pytest.mark.parametrize("masked", [False, True])
def test_a_replayed_graph_attends_to_the_new_inputs(recipe, masked, draw, device):
    inputs = [draw(1, 4, 500, 64) for _ in range(3)]
    mask = torch.rand(1, 1, 1, 500, device=device) < 0.7 if masked else None
    expected, _ = attend(*inputs, recipe, mask=mask)
    others = [draw(1, 4, 500, 64) for _ in range(3)]
    other_mask = torch.rand(1, 1, 1, 500, device=device) < 0.7 if masked else None
    static, static_mask = [x.clone() for x in others], None if mask is None else other_mask.clone()
    attend(*static, recipe, mask=static_mask)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = attend(*static, recipe, mask=static_mask)
    for x, y in zip(static, inputs, strict=True):
        x.copy_(y)
    if masked:
        static_mask.copy_(mask)
    output.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize(device)
    assert torch.equal(output, expected)


# 11. Gradients cut in training: also test_emulation.py, test_training_failure_classes.py.


def test_backward_through_the_operator_raises(recipe, draw):
    output, _ = ops.attention(
        draw(1, 2, 200, 64).requires_grad_(), draw(1, 2, 200, 64), draw(1, 2, 200, 64), recipe=recipe
    )
    with pytest.raises(NotImplementedError, match="forward only"):
        output.sum().backward()


# 12. Zero channels, overflow, non-finite inputs.


def test_a_zero_channel_of_values_stays_zero(recipe, draw):
    value = draw(1, 2, 500, 64)
    value[..., 5] = 0.0
    output, _ = attend(draw(1, 2, 300, 64), draw(1, 2, 500, 64), value, recipe)
    assert not output[..., 5].any()
    output, _ = attend(draw(1, 2, 300, 64), draw(1, 2, 500, 64), torch.zeros_like(value), recipe)
    assert not output.any()


def test_large_values_do_not_overflow(recipe, draw):
    query, key, value = (draw(1, 2, 300, 64) for _ in range(3))
    assert attend(query, key, value * 1e30, recipe)[0].isfinite().all()
    half = (torch.rand(1, 2, 300, 64, device=query.device) * 2 - 1) * 65504
    assert attend(query.half(), key.half(), half.half(), recipe)[0].isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("position", ["query", "key", "value"])
def test_a_bad_element_is_not_laundered_and_spoils_no_other_head(recipe, bad, position, draw):
    inputs = {name: draw(1, 3, 300, 64) for name in ("query", "key", "value")}
    clean, _ = attend(*inputs.values(), recipe)
    inputs[position][0, 1, 140, 7] = bad
    output, _ = attend(*inputs.values(), recipe)
    expected, _ = reference.attention(*inputs.values(), RECIPES[recipe])
    assert not torch.equal(output[:, 1], clean[:, 1])
    assert (output.isnan() | ~expected.isnan()).all()
    assert torch.equal(output[:, ::2], clean[:, ::2])
    if position == "query":
        assert torch.equal(output[:, 1, 256:], clean[:, 1, 256:])


# 13. Masks: padding in the middle; the base of additive ones and broadcasting: test_random_requests.py.


@pytest.mark.parametrize("bias", [-torch.inf, -1e4, torch.finfo(torch.bfloat16).min])
def test_padding_in_the_middle_does_not_matter(recipe, bias, draw, device):
    query, key, value = draw(2, 4, 300, 64), draw(2, 4, 500, 64), draw(2, 4, 500, 64)
    allowed = torch.ones(2, 1, 1, 500, dtype=torch.bool, device=device)
    allowed[0, ..., 100:300] = False
    allowed[1, ..., 3:7] = False
    key[:1, :, 100:300] = value[:1, :, 100:300] = 1e4
    mask = torch.zeros(allowed.shape, device=device).masked_fill(~allowed, bias)
    error = judge(query, key, value, recipe, mask=allowed)
    error.assert_as_small_as_the_references()
    (output, lse), kernel = attend_and_name(query, key, value, recipe, mask=mask)
    truth, _ = sdpa.attention(query, key, value, mask=allowed)
    replace(error, kernel=(output - truth).abs().sum().item()).assert_as_small_as_the_references()
    _, expected_lse = attend(query, key, value, recipe, mask=allowed)
    seen = key * allowed.transpose(-1, -2)
    assert ((lse - expected_lse).abs() <= lse_tolerance(query, seen)).all()
    # As an attention bias, padding is read in the same tiles as a bias, by the same kernel.
    scores = allowed.expand(-1, -1, 300, -1).contiguous()
    (expected, expected_lse), other_kernel = attend_and_name(query, key, value, recipe, mask=scores)
    assert kernel == other_kernel
    # A bias is added to a rounded score, a mask is not: of FP4, whose numbers are a third apart, a weight in a million
    # lies between the two and rounds differently, which moves its row by up to a sixth of the weight.
    moved = (output - expected).abs() > 2**-10 + 2**-7 * expected.abs()
    assert moved.any(-1).float().mean() <= (2**-9 if recipe.startswith("sage3") else 0)
    assert torch.allclose(lse, expected_lse, atol=1e-5)


# 14. Under torch.compile and autocast.


def test_one_compiled_graph_serves_all_lengths(recipe, draw):
    torch.compiler.reset()  # Dynamo compiles one function only so many times, whatever the recipe
    compiled = torch.compile(
        lambda *inputs: attend_without_lse(*inputs, recipe, enable_gqa=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for q_len, kv_len in ((70, 90), (300, 500), (1, 64)):
        inputs = draw(2, 4, q_len, 64), draw(2, 2, kv_len, 64), draw(2, 2, kv_len, 64)
        assert torch.equal(compiled(*inputs), attend_without_lse(*inputs, recipe, enable_gqa=True))


def test_a_compiled_graph_honours_masks_and_causal(recipe, draw, device):
    torch.compiler.reset()
    inputs = draw(2, 4, 300, 64), draw(2, 4, 500, 64), draw(2, 4, 500, 64)
    mask = torch.rand(2, 1, 300, 500, device=device) < 0.5
    for options in ({"attn_mask": mask}, {"is_causal": True}):
        compiled = torch.compile(lambda *x, options=options: attend_without_lse(*x, recipe, **options), fullgraph=True)
        assert torch.equal(compiled(*inputs), attend_without_lse(*inputs, recipe, **options))


def test_autocast_changes_the_inputs_dtype_and_nothing_else(recipe, draw):
    inputs = [draw(1, 2, 300, 64, dtype=torch.float32) for _ in range(3)]
    with torch.autocast("cuda", torch.bfloat16):
        output, lse = attend(*inputs, recipe)
    expected, expected_lse = attend(*(x.bfloat16() for x in inputs), recipe)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    assert torch.equal(lse, expected_lse)
